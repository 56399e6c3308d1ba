"""Annotation files of captioned images, read into one checked record per image."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from vl_plugins.data.json_text import check_type, parse_json
from vl_plugins.data.storage import open_regular
from vl_plugins.utils.errors import UserError, unknown_name

__all__ = [
    "KARPATHY_DATASETS",
    "CaptionedImage",
    "ImageCollector",
    "RejectedImage",
    "check_caption",
    "check_name",
    "check_unique",
    "get_group",
    "place_of",
    "read_json",
    "read_karpathy",
]

KARPATHY_DATASETS = ("coco", "flickr30k")
SPLITS = ("train", "restval", "val", "test")


@dataclass(frozen=True)
class CaptionedImage:
    """One image with its captions, as the annotation file has them.

    Args:
        image_id: id of the image, unique in the source (``cocoid`` or ``id`` for COCO, ``imgid`` for Flickr30K); a
            string where a table has such ids.
        file: POSIX path relative to the image root; never absolute and without ``..``.
        captions: at least one, none blank, in source order.
        caption_ids: one id per caption, unique in the source (``sentid``, COCO's annotation id, or a running number).
        split: name of the split, such as ``"train"``; letters, digits, ``_`` and ``-`` only.
        dataset: name of the data set; letters, digits, ``_`` and ``-`` only.
        filename: name of the image file as the annotation file gives it.
        group: id of the images of the data set that belong together, such as pictures of one object or frames of a
            video; None for an image that is in no group.

    Raises:
        UserError: there is no caption, a caption is blank, there are more or fewer ids than captions, a text is not
            valid Unicode, the path leads out of the root, or a name has other characters.
    """

    image_id: int | str
    file: str
    captions: tuple[str, ...]
    caption_ids: tuple[int | str, ...]
    split: str
    dataset: str
    filename: str
    group: int | str | None = None

    def __post_init__(self):
        # Both become part of keys and shard names, where a dot or a slash has a meaning of its own.
        check_name("split", self.split)
        check_name("data set", self.dataset)
        # Windows paths know both separators and drive letters, so this refuses what any system could resolve elsewhere.
        path = PureWindowsPath(self.file)
        if path.anchor or ".." in path.parts:
            raise UserError(f"path {self.file!r} leads out of the image root; paths must be relative, without '..'")
        for kind, text in (("path", self.file), ("file name", self.filename), ("image id", self.image_id)):
            _check_unicode(kind, str(text))
        _check_unicode("group", str(self.group))
        if not self.captions:
            raise UserError("it has no captions; every image needs at least one")
        if len(self.caption_ids) != len(self.captions):
            raise UserError(f"it has {len(self.caption_ids)} caption ids for {len(self.captions)} captions")
        for caption in self.captions:
            check_caption(caption)


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


class ImageCollector:
    """Images of one source in order, with unique ids; wrong entries are raised or put on a list.

    Args:
        rejected: list that wrong entries are appended to; None raises the first one.
    """

    def __init__(self, rejected: list[RejectedImage] | None):
        self.images: list[CaptionedImage] = []
        self._rejected = rejected
        self._image_ids: set[int | str] = set()
        self._caption_ids: set[int | str] = set()

    def add(self, image: CaptionedImage) -> None:
        """Append an image.

        Raises:
            UserError: its id, or that of a caption, occurred before. The ids of an image that was not added stay free.
        """
        check_unique("image", [image.image_id], self._image_ids)
        check_unique("caption", image.caption_ids, self._caption_ids)
        self._image_ids.add(image.image_id)
        self._caption_ids.update(image.caption_ids)
        self.images.append(image)

    def reject(self, source: str | Path, place: str, split: str | None, error: UserError) -> None:
        """Put a wrong entry on the list of the rejected.

        Args:
            source: file (or files) with the entry.
            place: where in the file the entry is.
            split: its split; None where that is unknown, and the entry cannot be counted.
            error: what is wrong.

        Raises:
            UserError: there is no list, or the split is unknown; the message names file and place.
        """
        if self._rejected is None or split is None:
            raise UserError(f"{source}: {place}: {error}") from error
        self._rejected.append(RejectedImage(place, split, str(error)))


def check_name(kind: str, name: Any) -> None:
    """Raise :class:`UserError` unless ``name`` consists of letters, digits, ``_`` and ``-``."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UserError(f"{name!r} cannot name a {kind}; use letters, digits, '_' and '-'")


def check_caption(caption: str) -> None:
    """Raise :class:`UserError` when a caption is blank or not valid Unicode."""
    if not caption.strip():
        raise UserError(f"caption {caption!r} is blank")
    _check_unicode("caption", caption)


def check_unique(kind: str, ids: Iterable[int | str], seen: Collection[int | str]) -> None:
    """Raise :class:`UserError` when one of ``ids`` is among those ``seen`` or occurs twice."""
    here: set[int | str] = set()
    for value in ids:
        if value in seen or value in here:
            raise UserError(f"{kind} id {value} occurs more than once; ids must be unique")
        here.add(value)


def get_group(item: Mapping[str, Any], key: str | None) -> int | str | None:
    """Return the group under ``key``; None without a key, and where there is none or it is blank.

    Raises:
        UserError: it is neither a string nor a whole number.
    """
    value = None if key is None else item.get(key)
    if isinstance(value, str) and not value.strip():
        return None
    try:
        return check_type(value, int | str | None)
    except UserError as error:
        raise UserError(f"group {key!r}: {error}") from None


def place_of(kind: str, number: int | str, name: Any = None) -> str:
    r"""Return how messages call an entry; the name is left out unless it is a string.

    >>> place_of("image", 3, "cat.jpg"), place_of("line", 7), place_of("line", 8, "a\nb")
    ('image 3 (cat.jpg)', 'line 7', 'line 8 (a\\nb)')
    """
    if not isinstance(name, str):
        return f"{kind} {number}"
    # Messages are one line, and the list of the rejected is UTF-8, which has no half characters.
    return f"{kind} {number} ({name if name.isprintable() else repr(name)[1:-1]})"


def read_json(file: Path) -> Any:
    """Read a JSON document.

    Raises:
        UserError: the file is missing or unreadable, not UTF-8, or not JSON; the message names the file.
    """
    try:
        with open_regular(file) as stream:
            data = stream.read()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    return parse_json(data, str(file))


def read_karpathy(
    annotation_file: str | Path,
    dataset: str,
    *,
    dataset_name: str | None = None,
    join_restval: bool = True,
    group_key: str | None = None,
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
        group_key: field of an image with its ``group``.
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
    if "annotations" in document and isinstance(items[0], dict) and "sentences" not in items[0]:
        raise UserError(
            f"{annotation_file} has COCO's own format, with 'annotations'; convert it with `vl-plugins shards "
            "coco-captions`"
        )
    name = document.get("dataset", dataset) if dataset_name is None else dataset_name
    try:
        check_name("data set", name)
    except UserError as error:
        raise UserError(f"{annotation_file}: {error}") from error

    collector = ImageCollector(rejected)
    for position, item in enumerate(items):
        try:
            collector.add(_parse_image(item, dataset, name, join_restval, group_key))
        except UserError as error:
            known = item if isinstance(item, dict) else {}
            split = _joined(known["split"], join_restval) if known.get("split") in SPLITS else None
            collector.reject(annotation_file, place_of("image", position, known.get("filename")), split, error)
    return collector.images


@dataclass
class _Sentence:
    raw: str
    sentid: int


@dataclass
class _KarpathyImage:
    filename: str
    split: str
    sentences: list[_Sentence]


@dataclass
class _CocoImage(_KarpathyImage):
    filepath: str
    cocoid: int


@dataclass
class _Flickr30kImage(_KarpathyImage):
    imgid: int


def _parse_image(item: Any, dataset: str, name: str, join_restval: bool, group_key: str | None) -> CaptionedImage:
    entry = check_type(item, _CocoImage if dataset == "coco" else _Flickr30kImage)
    if entry.split not in SPLITS:
        raise unknown_name("split", entry.split, SPLITS)
    return CaptionedImage(
        image_id=entry.cocoid if dataset == "coco" else entry.imgid,
        file=str(PurePosixPath(entry.filepath, entry.filename)) if dataset == "coco" else entry.filename,
        captions=tuple(sentence.raw for sentence in entry.sentences),
        caption_ids=tuple(sentence.sentid for sentence in entry.sentences),
        split=_joined(entry.split, join_restval),
        dataset=name,
        filename=entry.filename,
        group=get_group(item, group_key),
    )


def _joined(split: str, join_restval: bool) -> str:
    return "train" if split == "restval" and join_restval else split


def _check_unicode(kind: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{kind} {text!r:.60} is not valid Unicode: {error.reason}") from error
