"""COCO's official caption files, ``captions_*.json``: as a source of images, and of annotation ids for others."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

from vl_plugins.data.annotations import CaptionedImage, RejectedImage, gather_images, place_of, read_document
from vl_plugins.data.batching import normalize_caption
from vl_plugins.errors import UserError

__all__ = ["read_coco_captions", "with_annotation_ids"]

HINT = "expected a file like captions_val2017.json; `vl-plugins shards coco` converts Karpathy's"


class _Image(TypedDict):
    id: int
    file_name: str


class _Annotation(TypedDict):
    id: int
    image_id: int
    caption: str


def read_coco_captions(
    annotation_files: Sequence[str | Path],
    *,
    image_root: str | Path | None = None,
    dataset_name: str = "coco",
    group_key: str | None = None,
    rejected: list[RejectedImage] | None = None,
) -> list[CaptionedImage]:
    """Read COCO's official caption files, or others in their format.

    Args:
        annotation_files: files with ``images`` (``id``, ``file_name``) and ``annotations`` (``id``, ``image_id``,
            ``caption``). Each is a split with the name of the file: ``captions_val2017.json`` is ``val2017``.
        image_root: folder of the images. Those of a split are in the folder with its name, if there is one.
        dataset_name: name given to the data set.
        group_key: field of an image with its ``group``.
        rejected: a list for images that cannot be used, also for those that only annotations mention.

    Returns:
        The images and captions in the order of the files, with the annotation ids as ``caption_ids``.

    Raises:
        UserError: a file is missing or not in this format; files are the same split; an image cannot be used, or an id
            occurs in two files.
    """
    files = {Path(file).stem.removeprefix("captions_"): Path(file) for file in annotation_files}
    if len(files) < len(annotation_files):
        raise UserError(f"two files of one split, among {', '.join(map(str, annotation_files))}; rename one")
    return gather_images(_rows(files, image_root, dataset_name, group_key), rejected)


def with_annotation_ids(
    images: Iterable[CaptionedImage],
    annotation_files: Sequence[str | Path],
    *,
    rejected: list[RejectedImage] | None = None,
) -> list[CaptionedImage]:
    """Replace the caption ids of Karpathy's COCO images by COCO's annotation ids, which ECCV Caption and CxC use.

    Captions are matched within their image by :func:`~vl_plugins.data.batching.normalize_caption`; equal ones take
    their ids in the order of the official file.

    Args:
        images: images whose ``image_id`` is that of COCO (``cocoid``).
        annotation_files: official caption files that have all these images between them; of Karpathy's COCO, that
            is ``captions_train2014.json`` and ``captions_val2014.json``, or both of 2017.
        rejected: a list for images that have no annotations, or not one for each caption.

    Returns:
        The images in the same order with the annotation ids as ``caption_ids``; each id occurs once.

    Raises:
        UserError: an official file is missing or not in this format; an image or a caption of it is not in the files.
    """
    documents = [read_document(Path(file), HINT, annotations=list[_Annotation]) for file in annotation_files]
    official = _by_image(annotation for document in documents for annotation in document["annotations"])
    files = ", ".join(map(str, annotation_files))
    rows = (
        (
            place_of(files, "image id", image.image_id, image.file),
            {**vars(image), **_match_captions(image.captions, official.get(image.image_id, ()))},
        )
        for image in images
    )
    return gather_images(rows, rejected)


def _rows(
    files: Mapping[str, Path], image_root: str | Path | None, dataset: str, group_key: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    for split, file in files.items():
        document = read_document(file, HINT, images=list[_Image], annotations=list[_Annotation])
        annotations = _by_image(document["annotations"])
        folder = split if image_root is not None and Path(image_root, split).is_dir() else ""
        for position, item in enumerate(document["images"]):
            found = annotations.get(item["id"], ())
            yield (
                place_of(file, "image", position, item["file_name"]),
                {
                    "image_id": item["id"],
                    "file": str(PurePosixPath(folder, item["file_name"])),
                    "captions": [annotation["caption"] for annotation in found],
                    "caption_ids": [annotation["id"] for annotation in found],
                    "split": split,
                    "dataset": dataset,
                    "filename": item["file_name"],
                    "group": item.get(group_key),
                },
            )
        for image_id in sorted(annotations.keys() - {item["id"] for item in document["images"]}):
            problem = "it has annotations, but is not among the images of the file"
            yield place_of(file, "image id", image_id), {"split": split, "problem": problem}


def _by_image(annotations: Iterable[dict[str, Any]]) -> dict[int | str, list[dict[str, Any]]]:
    by_image: dict[int | str, list[dict[str, Any]]] = defaultdict(list)
    for annotation in annotations:
        by_image[annotation["image_id"]].append(annotation)
    return dict(by_image)


def _match_captions(captions: Sequence[str], annotations: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the annotation id of each caption, each id once, or what is wrong, as fields of a row."""
    unused: dict[str, deque[int]] = defaultdict(deque)
    for annotation in annotations:
        unused[normalize_caption(annotation["caption"])].append(annotation["id"])
    if not unused:
        return {"problem": "it has no annotations there; Karpathy's splits need those of train2014 and val2014"}
    caption_ids = []
    for caption in captions:
        ids = unused[normalize_caption(caption)]
        if not ids:
            return {"problem": f"caption {caption!r} is not, or not as often, among the annotations of its image"}
        caption_ids.append(ids.popleft())
    return {"caption_ids": caption_ids}
