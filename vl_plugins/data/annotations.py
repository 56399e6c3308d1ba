"""Captioned images, how the rows of any source become images, and the reader of Karpathy's annotation files."""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, TypedDict

from vl_plugins.data.json_text import check_type, parse_json
from vl_plugins.data.storage import read_file
from vl_plugins.errors import UserError, one_of

__all__ = ["CaptionedImage", "RejectedImage", "gather_images", "place_of", "read_document", "read_karpathy"]

KARPATHY_HINT = (
    "expected Karpathy's format, with the splits train, restval, val and test; "
    "`vl-plugins shards coco-captions` converts COCO's own caption files"
)
LABEL = re.compile(r"[A-Za-z0-9_-]+")
# 18 digits fit into 64 bits, whatever reads the shards.
CANONICAL_INT = re.compile(r"0|-?[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class CaptionedImage:
    """One image with its captions.

    Args:
        image_id: id of the image, unique in the source.
        file: POSIX path relative to the image root; never absolute and without ``..``.
        captions: at least one, none blank, in source order.
        caption_ids: one id per caption, unique in the source.
        split, dataset: their names, such as ``"train"``; letters, digits, ``_`` and ``-`` only.
        filename: name of the image file as the source gives it.
        group: id of images that belong together, such as frames of a video; None, or blank text, for no group.

    Raises:
        UserError: a value is not as above, or a text is not valid Unicode.
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
        # Both become part of keys and shard names, where dots and slashes are separators.
        for kind, name in (("split", self.split), ("data set", self.dataset)):
            if not _is_label(name):
                raise UserError(f"{name!r} cannot name a {kind}; use letters, digits, '_' and '-'")
        # Windows paths know both separators and drive letters: nothing passes that any system could resolve elsewhere.
        path = PureWindowsPath(self.file)
        if path.anchor or ".." in path.parts:
            raise UserError(f"path {self.file!r} leads out of the image root; paths must be relative, without '..'")
        if isinstance(self.group, str) and not self.group.strip():
            object.__setattr__(self, "group", None)
        if not self.captions:
            raise UserError("it has no captions; every image needs at least one")
        if len(self.caption_ids) != len(self.captions):
            raise UserError(f"it has {len(self.caption_ids)} caption ids for {len(self.captions)} captions")
        for caption in self.captions:
            if not caption.strip():
                raise UserError(f"caption {caption!r} is blank")
        texts = [("path", self.file), ("file name", self.filename), ("image id", self.image_id), ("group", self.group)]
        for kind, text in (*texts, *(("caption", caption) for caption in self.captions)):
            try:
                str(text).encode()
            except UnicodeEncodeError as error:
                raise UserError(f"{kind} {text!r:.60} is not valid Unicode: {error.reason}") from error


@dataclass(frozen=True)
class RejectedImage:
    """An image that was left out: its file, or its place in the source; its split; and the reason."""

    image: str
    split: str
    reason: str


def gather_images(
    rows: Iterable[tuple[str, dict[str, Any]]], rejected: list[RejectedImage] | None
) -> list[CaptionedImage]:
    """Return the images of a source. Rows with the same path are one image, at the place of the first.

    An image has the captions of all its rows; split, id and group must agree. Image ids become integers when all of
    them are, or are text of plain decimal integers of up to 18 digits; otherwise strings.

    Args:
        rows: the place of each row for messages, and its arguments of :class:`CaptionedImage`. With None as
            ``image_id``, and without ``caption_ids``, ids are running numbers. A row that cannot be used has ``split``
            and ``problem``, the reason.
        rejected: a list for images with a wrong row; None raises an error for the first one.

    Raises:
        UserError: a row is wrong: a value of another type, no valid :class:`CaptionedImage`, an id that occurred
            before, rows of an image that disagree. With ``rejected`` only if the split is not known.
    """
    gathered: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for place, row in rows:
        key = place
        if isinstance(row.get("file"), str) and row["file"].strip():
            row["file"] = key = str(PurePosixPath(row["file"]))
        gathered.setdefault(key, []).append((place, row))
    images: list[CaptionedImage] = []
    seen_images: set[str] = set()
    seen_captions: set[int | str] = set()
    total = 0  # captions
    for number, members in enumerate(gathered.values()):
        first_place, first = members[0]
        captions: list[str] = []
        caption_ids: list[int | str] = []
        try:
            for place, row in members:  # noqa: B007, the place of the row that is wrong
                image = _parse_row(row, number, total + len(captions))
                for key in ("split", "image_id", "group"):
                    # As text: JSON may have a number in one line and the same in quotes in another.
                    if str(row[key]) != str(first[key]):
                        reason = f"{key} {row[key]!r}, but {first[key]!r} in {first_place}"
                        raise UserError(f"{reason}; rows of one image must agree")
                captions += image.captions
                caption_ids += image.caption_ids
            place = first_place
            if len(members) > 1:
                image = replace(
                    image, filename=first["filename"], captions=tuple(captions), caption_ids=tuple(caption_ids)
                )
            _check_unique("image", [str(image.image_id)], seen_images)
            _check_unique("caption", caption_ids, seen_captions)
        except UserError as error:
            if rejected is None or not _is_label(first["split"]):
                raise UserError(f"{place}: {error}") from error
            rejected.append(RejectedImage(place, first["split"], str(error)))
        else:
            images.append(image)
            # Only now: the ids of an image that is rejected stay free.
            seen_images.add(str(image.image_id))
            seen_captions.update(caption_ids)
        total += len(captions)
    if any(isinstance(image.image_id, str) for image in images):
        as_id = int if all(CANONICAL_INT.fullmatch(str(image.image_id)) for image in images) else str
        images = [replace(image, image_id=as_id(image.image_id)) for image in images]
    return images


def _parse_row(row: dict[str, Any], number: int, first_caption_id: int) -> CaptionedImage:
    """Return a row as an image, with running numbers for ids that it does not have."""
    if "problem" in row:
        raise UserError(row["problem"])
    for key, name in (("file", "path"), ("image_id", "image id")):
        if isinstance(row[key], str) and not row[key].strip():
            raise UserError(f"its {name} is blank")
    image_id = number if row["image_id"] is None else row["image_id"]
    caption_ids = range(first_caption_id, first_caption_id + len(row["captions"]))
    return check_type({"caption_ids": list(caption_ids), **row, "image_id": image_id}, CaptionedImage)


def _is_label(text: Any) -> bool:
    return isinstance(text, str) and LABEL.fullmatch(text) is not None


def _check_unique(kind: str, ids: Iterable[int | str], seen: Collection[int | str]) -> None:
    for value, count in Counter(ids).items():
        if count > 1 or value in seen:
            raise UserError(f"{kind} id {value} occurs more than once; ids must be unique")


def place_of(file: str | Path, kind: str, number: int | str, name: Any = None) -> str:
    """Return what messages call an entry of a file; the name is left out unless it is a string.

    >>> place_of("a.json", "image", 3, "cat.jpg")
    'a.json: image 3 (cat.jpg)'
    """
    # Messages are one line, and the list of the rejected is UTF-8, which has no half characters.
    shown = f" ({name if name.isprintable() else repr(name)[1:-1]})" if isinstance(name, str) else ""
    return f"{file}: {kind} {number}{shown}"


def read_document(file: Path, hint: str, **fields: Any) -> dict[str, Any]:
    """Read an annotation file and check the types of some fields, such as ``images=list[dict[str, str]]``.

    Raises:
        UserError: the file cannot be read, or a field is missing or of another type; the hint follows.
    """
    document = parse_json(read_file(file), str(file))
    try:
        check_type(document, TypedDict("Document", fields))  # type: ignore[operator]
    except UserError as error:
        raise UserError(f"{file}: {error}; {hint}") from error
    return document


class _Sentence(TypedDict):
    raw: str
    sentid: int


KARPATHY_FIELDS = {"filename": str, "split": Literal["train", "restval", "val", "test"], "sentences": list[_Sentence]}
KARPATHY_IDS = {"coco": {"filepath": str, "cocoid": int}, "flickr30k": {"imgid": int}}


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
        dataset: ``"coco"``, with ``filepath`` beside ``filename`` and ``cocoid`` as image id; or ``"flickr30k"``, with
            ``filename`` only and ``imgid``.
        dataset_name: by default the name in the file, or else ``dataset``.
        join_restval: whether ``restval`` images count as ``train`` (113,287 images on COCO).
        group_key: field of an image with its ``group``.
        rejected: a list for images that cannot be used, see :func:`gather_images`.

    Returns:
        The images of all splits in the order of the file, with ``sentid`` as ``caption_ids``.

    Raises:
        UserError: the file is missing or not in this format; an image cannot be used, see :func:`gather_images`.
    """
    one_of("dataset", dataset, KARPATHY_IDS)
    file, coco = Path(annotation_file), dataset == "coco"
    item_type = TypedDict("Image", KARPATHY_FIELDS | KARPATHY_IDS[dataset])  # type: ignore[misc]
    document = read_document(file, KARPATHY_HINT, images=list[item_type])
    name = document.get("dataset", dataset) if dataset_name is None else dataset_name
    rows = (
        (
            place_of(file, "image", position, item["filename"]),
            {
                "image_id": item["cocoid" if coco else "imgid"],
                "file": str(PurePosixPath(item["filepath"] if coco else "", item["filename"])),
                "captions": [sentence["raw"] for sentence in item["sentences"]],
                "caption_ids": [sentence["sentid"] for sentence in item["sentences"]],
                "split": "train" if item["split"] == "restval" and join_restval else item["split"],
                "dataset": name,
                "filename": item["filename"],
                "group": item.get(group_key),
            },
        )
        for position, item in enumerate(document["images"])
    )
    return gather_images(rows, rejected)
