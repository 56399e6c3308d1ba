"""Sources of captioned images: Karpathy's splits and COCO's caption files.

A source yields a :class:`RejectedImage` in place of an image that cannot be used; the writer raises or records it.
"""

import codecs
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec

from vl_plugins.data.captions import CaptionedImage, RejectedImage, normalize_caption
from vl_plugins.data.files import is_folder, join, read_bytes
from vl_plugins.data.grouping import Images, KeyedRows, Row, join_rows
from vl_plugins.errors import UserError, user_errors, warn_of_input
from vl_plugins.tables import printable


class _Sentence(msgspec.Struct):
    raw: str
    sentid: int | str | None = None


class _KarpathyImage(msgspec.Struct):
    filename: str
    split: Literal["train", "restval", "val", "validation", "test"]
    sentences: list[_Sentence]
    filepath: str = ""
    cocoid: int | None = None
    imgid: int | None = None
    group: Any = None


class _Karpathy(msgspec.Struct):
    images: list[_KarpathyImage]
    dataset: str | None = None


class _CocoImage(msgspec.Struct):
    id: int
    file_name: str
    group: Any = None


class _Annotation(msgspec.Struct):
    id: int
    image_id: int
    caption: str


class _Coco(msgspec.Struct):
    annotations: list[_Annotation]
    images: list[_CocoImage] = []


def _read_json(file: str | Path, kind: Any) -> Any:
    with user_errors(str(file)):
        return msgspec.json.decode(read_bytes(file).removeprefix(codecs.BOM_UTF8), type=kind)


def read_karpathy(annotation_file: str | Path, dataset: str = "coco", *, dataset_name: str | None = None) -> Images:
    """Yield the images of an annotation file in the format of Karpathy's COCO and Flickr30K splits, in its order.

    Args:
        annotation_file: ``dataset_coco.json``, ``dataset_flickr30k.json``, or another file in their format. Images need
            ``filename``, ``split`` and ``sentences`` with ``raw``, and may have ``filepath``, their folder, and a
            ``group``. Image ids are ``cocoid`` or else ``imgid``, and caption ids ``sentid`` if all have it; otherwise
            both are running numbers. ``restval`` counts as ``train`` (113,287 images of COCO).
        dataset: name of the data set if the file has none.
        dataset_name: name of the data set in any case.

    Raises:
        UserError: the file is missing or not in this format.
    """
    document = _read_json(annotation_file, _Karpathy)
    has_ids = all(sentence.sentid is not None for item in document.images for sentence in item.sentences)

    def rows() -> KeyedRows:
        for position, item in enumerate(document.images):
            file = str(PurePosixPath(item.filepath, item.filename))
            captions = [sentence.raw for sentence in item.sentences]
            image_id = item.imgid if item.cocoid is None else item.cocoid
            ids = [sentence.sentid for sentence in item.sentences] if has_ids else None
            yield file, Row(position, file, captions, item.split, image_id, item.group, item.filename, ids)

    yield from join_rows(rows(), dataset_name or document.dataset or dataset, f"{annotation_file}: image ")


def read_coco_captions(
    annotation_files: Sequence[str | Path],
    *,
    image_root: str | Path | None = None,
    dataset_name: str | None = None,
) -> Images:
    """Yield the images of COCO's official caption files, or of others in their format, in their order.

    Args:
        annotation_files: files with ``images`` (``id``, ``file_name``, perhaps ``group``) and ``annotations`` (``id``,
            ``image_id``, ``caption``). Each is a split with the name of the file: ``captions_val2017.json`` is
            ``val2017``.
        image_root: folder of the images. Those of a split are in the folder with its name, if there is one.
        dataset_name: by default ``coco``.

    Raises:
        UserError: a file is missing or not in this format.
    """

    def rows() -> KeyedRows:
        file_of_id: dict[int, str | Path] = {}
        for file in annotation_files:
            split, document = Path(file).stem.removeprefix("captions_"), _read_json(file, _Coco)
            if not document.images:
                raise UserError(f"{file}: it has no 'images', a list with the id and the file_name of each")
            annotations = _by_image(document.annotations)
            problems = _repeated_ids(document.images)
            lost = annotations.keys() - {item.id for item in document.images}
            if lost:
                count = sum(len(annotations[image_id]) for image_id in lost)
                warn_of_input(f"{file}: {count:,} annotations are left out, of images that are not in 'images'")
            folder = split if image_root is not None and is_folder(join(image_root, split)) else ""
            for position, item in enumerate(document.images):
                place, file_name = f"{file}: image {position}", str(PurePosixPath(folder, item.file_name))
                captions = [annotation.caption for annotation in annotations.get(item.id, ())]
                ids = [annotation.id for annotation in annotations.get(item.id, ())]
                problem = problems.get(item.id)
                earlier = file_of_id.setdefault(item.id, file)
                if earlier != file:
                    problem = (
                        f"image id {item.id} is in {earlier}, too; ids must be unique in all files that are given: "
                        "write each file by its own command, with another --dataset-name"
                    )
                row = Row(place, file_name, captions, split, item.id, item.group, item.file_name, ids, problem)
                yield file_name, row

    yield from join_rows(rows(), dataset_name or "coco", "")


def _repeated_ids(images: Sequence[_CocoImage]) -> dict[int, str]:
    """Return what is wrong with the images whose id occurs several times: their captions cannot be told apart."""
    positions: dict[int, list[int]] = defaultdict(list)
    for position, image in enumerate(images):
        positions[image.id].append(position)
    problems = {}
    for image_id, entries in positions.items():
        if len(entries) > 1:
            listed = ", ".join(map(str, entries))
            problems[image_id] = f"image id {image_id} occurs in the entries {listed} of 'images'; ids must be unique"
    return problems


def with_annotation_ids(images: Images, annotation_files: Sequence[str | Path]) -> Images:
    """Replace the caption ids of Karpathy's COCO images by COCO's annotation ids, which ECCV Caption and CxC use.

    Captions are matched within their image by :func:`~vl_plugins.data.captions.normalize_caption`; equal ones take
    their ids in the order of the official file. Images with a caption that is not there are rejected.

    Args:
        images: images whose ``image_id`` is that of COCO (``cocoid``).
        annotation_files: official caption files that have all these images between them; for Karpathy's splits, that is
            ``captions_train2014.json`` and ``captions_val2014.json``, or both of 2017.

    Raises:
        UserError: an official file is missing or not in this format.
    """
    official = _by_image(annotation for file in annotation_files for annotation in _read_json(file, _Coco).annotations)
    for image in images:
        if isinstance(image, CaptionedImage):
            unused: dict[str, list[int]] = defaultdict(list)
            for annotation in reversed(official.get(image.image_id, ())):
                unused[normalize_caption(annotation.caption)].append(annotation.id)
            try:
                ids = tuple(unused[normalize_caption(caption)].pop() for caption in image.captions)
                image = replace(image, caption_ids=ids)
            except IndexError:
                label = f"image id {image.image_id} ({printable(image.filename)})"
                reason = f"not all of its captions are in {', '.join(map(str, annotation_files))}"
                image = RejectedImage(label, image.split, reason)
        yield image


def _by_image(annotations: Iterable[_Annotation]) -> dict[int | str, list[_Annotation]]:
    by_image: dict[int | str, list[_Annotation]] = defaultdict(list)
    for annotation in annotations:
        by_image[annotation.image_id].append(annotation)
    return dict(by_image)
