"""COCO's official caption files, ``captions_*.json``: as a source of images, and of annotation ids for others."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from vl_plugins.data.annotations import (
    CaptionedImage,
    ImageCollector,
    RejectedImage,
    check_name,
    check_unique,
    get_group,
    place_of,
    read_json,
)
from vl_plugins.data.captions import normalize_caption
from vl_plugins.data.json_text import check_type
from vl_plugins.utils.errors import UserError

__all__ = ["read_coco_captions", "with_annotation_ids"]


@dataclass
class _Image:
    id: int
    file_name: str


@dataclass
class _Annotation:
    id: int
    image_id: int
    caption: str


@dataclass
class _Entry:
    """An entry of ``images`` while its annotations are gathered; ``problem`` is the first that is wrong with them."""

    place: str
    image: _Image
    group: int | str | None
    captions: list[str] = field(default_factory=list)
    caption_ids: list[int] = field(default_factory=list)
    problem: UserError | None = None


def read_coco_captions(
    annotation_files: Sequence[str | Path],
    *,
    image_root: str | Path | None = None,
    dataset_name: str = "coco",
    split_name: str | None = None,
    group_key: str | None = None,
    rejected: list[RejectedImage] | None = None,
) -> list[CaptionedImage]:
    """Read COCO's official caption files, or others in their format.

    A file is one split with the name of the file: ``captions_val2017.json`` is ``val2017``. Its images are expected in
    the folder of that name, or of the split's name, where ``image_root`` has one, and in ``image_root`` itself
    otherwise.

    Args:
        annotation_files: files with ``images`` (``id``, ``file_name``) and ``annotations`` (``id``, ``image_id``,
            ``caption``).
        image_root: folder of the images; None looks for no folder in it.
        dataset_name: name given to the data set.
        split_name: name of the split instead of that of the file, where there is one file only.
        group_key: field of an image with its ``group``.
        rejected: a list to which images with a wrong entry or a wrong annotation are appended, once each, and
            images that only annotations mention. None raises on the first one.

    Returns:
        The images in the order of the files and of ``images`` in each; the captions of an image in the order of
        ``annotations``, with the annotation ids as ``caption_ids``.

    Raises:
        UserError: a file is missing, not JSON, or without images or captions; files name the same split, or
            something that is no name. Also, unless ``rejected`` is given: a missing or ill-typed key, an image id or
            annotation id that occurred before in any of the files, an annotation of an image that is not in the file,
            an image without captions, a blank caption, or a path that leads out of the image root. The message names
            file and entry.
    """
    files = [Path(file) for file in annotation_files]
    if not files:
        raise UserError("there is no annotation file to read; give at least one")
    if split_name is not None and len(files) > 1:
        raise UserError(f"the split name {split_name!r} cannot be that of {len(files)} files; convert them one by one")
    check_name("data set", dataset_name)
    splits: dict[str, Path] = {}
    for file in files:
        split = _split_of(file) if split_name is None else split_name
        try:
            check_name("split", split)
        except UserError as error:
            raise UserError(f"{file}: {error}, or give --split-name") from error
        if split in splits:
            raise UserError(f"{splits[split]} and {file} are both of the split {split!r}; rename one")
        splits[split] = file

    collector = ImageCollector(rejected)
    for split, file in splits.items():
        folder = _image_folder(image_root, (_split_of(file), split))
        for entry in _read_entries(file, split, group_key, collector):
            try:
                if entry.problem is not None:
                    raise entry.problem
                filename = entry.image.file_name
                image = CaptionedImage(
                    image_id=entry.image.id,
                    file=str(PurePosixPath(folder, filename)),
                    captions=tuple(entry.captions),
                    caption_ids=tuple(entry.caption_ids),
                    split=split,
                    dataset=dataset_name,
                    filename=filename,
                    group=entry.group,
                )
                collector.add(image)
            except UserError as error:
                collector.reject(file, entry.place, split, error)
    return collector.images


def with_annotation_ids(
    images: Iterable[CaptionedImage],
    annotation_files: Sequence[str | Path],
    *,
    rejected: list[RejectedImage] | None = None,
) -> list[CaptionedImage]:
    """Replace the caption ids of Karpathy's COCO images by COCO's annotation ids.

    ECCV Caption and CxC know captions by annotation id, while the ``sentid`` of Karpathy's files is a numbering of
    their own. Captions are matched within their image: exactly equal ones first, then those equal but for case and
    white space. Equal captions of one image take their ids in the order of the official file.

    Args:
        images: images whose ``image_id`` is that of COCO (``cocoid``).
        annotation_files: official caption files that have all these images between them; of Karpathy's COCO, that
            is ``captions_train2014.json`` and ``captions_val2014.json``, or both of 2017.
        rejected: a list to which images are appended that have no annotations, or not one for each caption. None
            raises on the first one.

    Returns:
        The images in the same order with the annotation ids as ``caption_ids``; each id occurs once.

    Raises:
        UserError: an official file is missing, not JSON, has no captions, an ill-typed annotation, or an annotation
            id that occurred before in any of the files. Also, unless ``rejected`` is given: an image that is not in
            the files, or a caption that its image does not have there; the message names both and the files.
    """
    official: dict[int, list[tuple[str, int]]] = defaultdict(list)
    seen: set[int] = set()
    for file in map(Path, annotation_files):
        for position, item in enumerate(_read_document(file)["annotations"]):
            try:
                annotation = check_type(item, _Annotation)
                check_unique("annotation", [annotation.id], seen)
            except UserError as error:
                raise UserError(f"{file}: {place_of('annotation', position)}: {error}") from error
            seen.add(annotation.id)
            official[annotation.image_id].append((annotation.caption, annotation.id))

    names = ", ".join(map(str, annotation_files))
    collector = ImageCollector(rejected)
    for image in images:
        try:
            if image.image_id not in official:
                raise UserError("it has no annotations there; Karpathy's splits need those of train2014 and val2014")
            caption_ids = _match_captions(image.captions, official[image.image_id])
            collector.add(replace(image, caption_ids=caption_ids))
        except UserError as error:
            collector.reject(names, place_of("image id", image.image_id, image.file), image.split, error)
    return collector.images


def _split_of(file: Path) -> str:
    return file.stem.removeprefix("captions_")


def _image_folder(image_root: str | Path | None, names: Sequence[str]) -> str:
    """Return the first of the names that is a folder in the root, or an empty string."""
    if image_root is None:
        return ""
    return next((name for name in names if Path(image_root, name).is_dir()), "")


def _read_document(file: Path) -> dict[str, Any]:
    """Return an official file as an object with a list of annotations that is not empty."""
    document = read_json(file)
    annotations = document.get("annotations") if isinstance(document, dict) else None
    if not isinstance(annotations, list) or not annotations:
        raise UserError(
            f"{file} has no captions; expected a file like captions_val2017.json, an object with a list under "
            "'annotations' (files of the test images have none); `vl-plugins shards coco` converts Karpathy's"
        )
    return document


def _read_entries(file: Path, split: str, group_key: str | None, collector: ImageCollector) -> list[_Entry]:
    """Return the entries of ``images`` with their annotations; what belongs to none of them is rejected."""
    document = _read_document(file)
    items = document.get("images")
    if not isinstance(items, list) or not items:
        raise UserError(f"{file} has no images; expected a list under 'images'")

    entries: dict[int, _Entry] = {}
    strangers: set[int] = set()
    for position, item in enumerate(items):
        known = item if isinstance(item, dict) else {}
        place = place_of("image", position, known.get("file_name"))
        try:
            image = check_type(item, _Image)
            check_unique("image", [image.id], entries)
            entries[image.id] = _Entry(place, image, get_group(item, group_key))
        except UserError as error:
            collector.reject(file, place, split, error)
            if type(known.get("id")) is int:
                strangers.add(known["id"])

    for position, item in enumerate(document["annotations"]):
        image_id = item.get("image_id") if isinstance(item, dict) else None
        entry = entries.get(image_id) if type(image_id) is int else None
        place = place_of("annotation", position)
        try:
            annotation = check_type(item, _Annotation)
            if entry is None and image_id not in strangers:
                strangers.add(image_id)
                raise UserError(f"its image id {image_id} is not among the images of the file")
        except UserError as error:
            if entry is None:
                collector.reject(file, place, split, error)
            else:
                entry.problem = entry.problem or UserError(f"{place}: {error}")
            continue
        if entry is not None:
            entry.captions.append(annotation.caption)
            entry.caption_ids.append(annotation.id)
    return list(entries.values())


def _match_captions(captions: Sequence[str], official: Iterable[tuple[str, int]]) -> tuple[int, ...]:
    """Return the annotation id of each caption; each id is used once."""
    caption_ids: list[int | None] = [None] * len(captions)
    used: set[int] = set()
    for form in (str, normalize_caption):
        unused = _ids_by_text(official, form, used)
        for position, caption in enumerate(captions):
            if caption_ids[position] is None and unused[form(caption)]:
                caption_ids[position] = unused[form(caption)].popleft()
                used.add(caption_ids[position])
        if None not in caption_ids:
            return tuple(caption_ids)
    missing = captions[caption_ids.index(None)]
    raise UserError(f"caption {missing!r} is not, or not as often, among the annotations of its image")


def _ids_by_text(
    official: Iterable[tuple[str, int]], form: Callable[[str], str], used: set[int]
) -> dict[str, deque[int]]:
    ids: dict[str, deque[int]] = defaultdict(deque)
    for caption, annotation_id in official:
        if annotation_id not in used:
            ids[form(caption)].append(annotation_id)
    return ids
