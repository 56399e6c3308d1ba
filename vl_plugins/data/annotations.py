"""Annotation files of captioned images, read into one checked record per image."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from vl_plugins.errors import UserError, unknown_name

__all__ = ["KARPATHY_DATASETS", "CaptionedImage", "RejectedImage", "read_json", "read_karpathy"]

KARPATHY_DATASETS = ("coco", "flickr30k")
SPLITS = ("train", "restval", "val", "test")


@dataclass(frozen=True)
class CaptionedImage:
    """One image with its captions, as the annotation file has them.

    Args:
        image_id: id of the image, unique in the annotation file (``cocoid`` for COCO, ``imgid`` for Flickr30K).
        file: POSIX path relative to the image root; never absolute and without ``..``.
        captions: at least one, none blank, in source order.
        caption_ids: one id per caption (``sentid``), unique in the annotation file.
        split: name of the split, such as ``"train"``.
        dataset: name of the data set; letters, digits, ``_`` and ``-`` only.
        filename: name of the image file as the annotation file gives it.

    Raises:
        UserError: there is no caption, a caption is blank or not valid Unicode, or the path leads out of the root.
    """

    image_id: int
    file: str
    captions: tuple[str, ...]
    caption_ids: tuple[int, ...]
    split: str
    dataset: str
    filename: str

    def __post_init__(self):
        # Windows paths know both separators and drive letters, so this refuses what any system could resolve elsewhere.
        path = PureWindowsPath(self.file)
        if path.anchor or ".." in path.parts:
            raise UserError(f"path {self.file!r} leads out of the image root; paths must be relative, without '..'")
        if not self.captions:
            raise UserError("it has no captions; every image needs at least one")
        for caption in self.captions:
            if not caption.strip():
                raise UserError(f"caption {caption!r} is blank")
            try:
                caption.encode()
            except UnicodeEncodeError as error:
                raise UserError(f"caption {caption!r:.60} is not valid Unicode: {error.reason}") from error


@dataclass(frozen=True)
class RejectedImage:
    """An image that was left out, and why.

    Args:
        image: file of the image, or its place in the annotation file when it has no usable file name.
        split: name of its split.
        reason: what is wrong with it.
    """

    image: str
    split: str
    reason: str


def read_json(file: Path) -> Any:
    """Read a JSON document.

    Raises:
        UserError: the file is missing or unreadable, not UTF-8, or not JSON; the message names the file.
    """
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_karpathy(
    annotation_file: str | Path,
    dataset: str,
    *,
    dataset_name: str | None = None,
    join_restval: bool = True,
    rejected: list[RejectedImage] | None = None,
) -> list[CaptionedImage]:
    """Read an annotation file in the format of Karpathy's COCO and Flickr30K splits.

    Args:
        annotation_file: ``dataset_coco.json``, ``dataset_flickr30k.json``, or another file in their format.
        dataset: whose keys the file uses. ``"coco"`` has ``filepath`` beside ``filename``, and its image id is
            ``cocoid``; ``"flickr30k"`` has ``filename`` only, and its image id is ``imgid``.
        dataset_name: name given to the data set; by default the one in the file, or else ``dataset``.
        join_restval: whether ``restval`` images count as ``train`` (113,287 images on COCO) or stay a split of
            their own.
        rejected: a list to which images with wrong entries are appended, as long as their split is known. None
            raises on the first one.

    Returns:
        The images of all splits in the order of the file.

    Raises:
        UserError: the file is missing, not JSON or without images. Also, unless ``rejected`` is given: an image
            with a missing or ill-typed key, an unknown split, an id that occurred before, no captions, a caption
            that is blank or not a string, or a path that leads out of the image root. The message names file
            and image.
    """
    if dataset not in KARPATHY_DATASETS:
        raise unknown_name("dataset", dataset, KARPATHY_DATASETS)
    annotation_file = Path(annotation_file)
    document = read_json(annotation_file)
    items = document.get("images") if isinstance(document, dict) else None
    if not isinstance(items, list) or not items:
        raise UserError(
            f"{annotation_file} has no images; expected Karpathy's format, an object with a list under 'images'"
        )
    name = dataset_name or document.get("dataset", dataset)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UserError(f"{annotation_file}: {name!r} cannot name a data set; use letters, digits, '_' and '-'")

    images: list[CaptionedImage] = []
    seen_images: set[int] = set()
    seen_captions: set[int] = set()
    for position, item in enumerate(items):
        try:
            image = _parse_image(item, dataset, name, join_restval)
            _check_unique("image", [image.image_id], seen_images)
            _check_unique("caption", image.caption_ids, seen_captions)
        except UserError as error:
            label = _label(position, item)
            split = item.get("split") if isinstance(item, dict) else None
            if rejected is None or split not in SPLITS:
                raise UserError(f"{annotation_file}: {label}: {error}") from error
            rejected.append(RejectedImage(label, _joined(split, join_restval), str(error)))
            continue
        seen_images.add(image.image_id)
        seen_captions.update(image.caption_ids)
        images.append(image)
    return images


def _parse_image(item: Any, dataset: str, name: str, join_restval: bool) -> CaptionedImage:
    if not isinstance(item, dict):
        raise UserError(f"expected an object, got {item!r:.60}")
    filename = _get(item, "filename", str)
    split = _get(item, "split", str)
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    sentences = _get(item, "sentences", list)
    if not all(isinstance(sentence, dict) for sentence in sentences):
        raise UserError("'sentences' must hold objects with 'raw' and 'sentid'")
    return CaptionedImage(
        image_id=_get(item, "cocoid" if dataset == "coco" else "imgid", int),
        file=str(PurePosixPath(_get(item, "filepath", str), filename)) if dataset == "coco" else filename,
        captions=tuple(_get(sentence, "raw", str) for sentence in sentences),
        caption_ids=tuple(_get(sentence, "sentid", int) for sentence in sentences),
        split=_joined(split, join_restval),
        dataset=name,
        filename=filename,
    )


def _check_unique(kind: str, ids: Sequence[int], seen: set[int]) -> None:
    repeated = [value for value in ids if value in seen or ids.count(value) > 1]
    if repeated:
        raise UserError(f"{kind} id {repeated[0]} occurs more than once in the file; ids must be unique")


def _get(item: dict[str, Any], key: str, expected: type) -> Any:
    if key not in item:
        raise UserError(f"has no {key!r}")
    value = item[key]
    # `type` instead of `isinstance`: true and false are instances of int.
    if type(value) is not expected:
        raise UserError(f"{key!r} must be of type {expected.__name__}, got {value!r:.60}")
    return value


def _joined(split: str, join_restval: bool) -> str:
    return "train" if split == "restval" and join_restval else split


def _label(position: int, item: Any) -> str:
    filename = item.get("filename") if isinstance(item, dict) else None
    return f"image {position} ({filename})" if isinstance(filename, str) else f"image {position}"
