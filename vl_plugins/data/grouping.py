"""Rows into images: what every source of captioned images has in common."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from vl_plugins.data.captions import CaptionedImage, RejectedImage, hash64, is_blank
from vl_plugins.errors import UserError
from vl_plugins.tables import printable

SPLITS = {"validation": "val", "restval": "train"}
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # as Python writes it, and fits into 64 bits


class Row(msgspec.Struct, array_like=True, gc=False):
    """A row of a source: its place, for messages, and the fields of an image, not checked yet.

    Where ``image_id`` or ``caption_ids`` is None, ids are running numbers. Where ``filename`` is None, it is ``file``.
    A row with a ``problem`` cannot be used.
    """

    place: int | str
    file: Any
    captions: list[Any]
    split: Any
    image_id: Any = None
    group: Any = None
    filename: str | None = None
    caption_ids: list[Any] | None = None
    problem: str | None = None


Images = Iterable[CaptionedImage | RejectedImage]
KeyedRows = Iterator[tuple[str, Row]]  # rows of one image have one key

# Rows and images wait as bytes, which take half the memory of objects.
_encode = msgspec.msgpack.Encoder().encode
_decode_row = msgspec.msgpack.Decoder(Row).decode
_decode_image = msgspec.msgpack.Decoder(CaptionedImage).decode


def join_rows(rows: KeyedRows, dataset: str, source: str, has_plain_ids: bool = False) -> Images:
    """Yield the images of a source, each with the captions of all its rows, in the order of their first rows.

    The split ``validation`` becomes ``val``, and COCO's ``restval`` becomes ``train``. Ids of images become integers if
    all are integers, or texts of up to 18 digits.

    A row that cannot be used is rejected alone. An image with wrong values, with an id that another one has, or whose
    rows disagree is rejected with all its rows.

    Args:
        rows: with keys; those of one image have the same key.
        dataset: of the images.
        source: precedes the place of a row in messages.
        has_plain_ids: nobody said whose the ids are: where rows of one image differ in them, they are ids of captions.
    """
    rows_of_image, have_ids, have_integers = _by_image(rows, source)
    are_of_captions = has_plain_ids and any(map(_differ_in_ids, rows_of_image.values()))
    used_ids = _UsedIds()
    captions = 0
    for number, key in enumerate(list(rows_of_image)):
        usable = []
        first_caption = captions
        for row in map(_decode_row, rows_of_image.pop(key)):
            captions += len(row.captions)
            if row.problem is not None:
                yield _rejected(row, row.problem, source)
            else:
                _set_ids(row, have_integers, are_of_captions)
                usable.append(row)
        if usable:
            first = usable[0]
            try:
                _check_that_they_agree(usable)
                image = _joined(usable, number, first_caption, dataset)
                used_ids.add(image, have_ids and not are_of_captions, first.caption_ids is not None)
            except _RowError as error:
                yield _rejected(error.row, str(error), source)
            except ValueError as error:
                yield _rejected(first, str(error), source)
            else:
                yield image


class _RowError(UserError):
    """An error about a row of an image that is not the first."""

    def __init__(self, row: Row, message: str):
        super().__init__(message)
        self.row = row


def _by_image(rows: KeyedRows, source: str) -> tuple[dict[str, list[bytes]], bool, bool]:
    """Return the rows of each image, encoded; whether any has an image id, and whether all ids are integers."""
    rows_of_image: dict[str, list[bytes]] = {}
    have_ids, have_integers = False, True
    for key, row in rows:
        if isinstance(row.split, str):
            row.split = SPLITS.get(row.split, row.split)
        row.problem = row.problem or _problem(row)
        if row.problem is None and row.image_id is not None:
            have_ids = True
            if have_integers and type(row.image_id) is not int:
                have_integers = INTEGER.fullmatch(str(row.image_id)) is not None
        try:
            rows_of_image.setdefault(key, []).append(_encode(row))
        except UnicodeEncodeError as error:
            raise UserError(f"{source}{row.place} is not text in UTF-8: save the file as UTF-8") from error
        except OverflowError as error:
            raise UserError(f"{source}{row.place}: {error}") from error
    return rows_of_image, have_ids, have_integers


def _set_ids(row: Row, have_integers: bool, are_of_captions: bool) -> None:
    if row.image_id is not None:
        row.image_id = int(row.image_id) if have_integers else str(row.image_id)
    if are_of_captions:
        row.caption_ids = [row.image_id]
        if len(row.captions) > 1:
            row.caption_ids = [f"{row.image_id}#{number}" for number in range(len(row.captions))]
        row.image_id = None


def _check_that_they_agree(rows: list[Row]) -> None:
    """Raise an error about the first row of an image that contradicts the first one."""
    first = rows[0]
    for row in rows:
        if row.split != first.split or row.image_id != first.image_id or row.group != first.group:
            reason = f"its split, image id or group is not that of {first.place}, but rows of one image must agree"
            raise _RowError(row, reason)


def _problem(row: Row) -> str | None:
    """Return why a row cannot be used."""
    if isinstance(row.file, str) and "://" in row.file:
        return f"its path is the URL {row.file}, which is not downloaded: img2dataset downloads pictures"
    if row.file in (None, "") or row.image_id == "" or str(row.file).isspace():
        return "its path or image id is blank"
    for caption in row.captions:
        if isinstance(caption, dict):
            keys = ", ".join(map(repr, caption))
            return f"its caption is an object with the keys {keys}: give one of them a column of its own"
    if not row.captions or not all(isinstance(caption, str) and not is_blank(caption) for caption in row.captions):
        return "it has no captions, or a blank one; every image needs at least one"
    return None


def _rejected(row: Row, reason: str, source: str) -> RejectedImage:
    name = row.file if row.filename is None else row.filename
    return RejectedImage(f"{source}{row.place} ({printable(str(name))})", str(row.split), reason)


def _differ_in_ids(rows: list[bytes]) -> bool:
    """Return whether the rows of an image have several ids."""
    if len(rows) == 1:
        return False
    members = [_decode_row(data) for data in rows]
    return len({str(row.image_id) for row in members if row.problem is None}) > 1


def _joined(rows: list[Row], number: int, first_caption: int, dataset: str) -> CaptionedImage:
    """Return the image of its rows, which is image ``number`` of the source; ``ValueError`` for a wrong value."""
    first = rows[0]
    captions: list[Any] = []
    caption_ids: list[Any] = []
    for row in rows:
        captions += row.captions
        caption_ids += row.caption_ids or ()
    if first.caption_ids is None:
        caption_ids = list(range(first_caption, first_caption + len(captions)))
    fields = {
        "image_id": number if first.image_id is None else first.image_id,
        "file": first.file,
        "captions": captions,
        "caption_ids": caption_ids,
        "split": first.split,
        "dataset": dataset,
        "filename": first.file if first.filename is None else first.filename,
        "group": first.group,
    }
    return msgspec.convert(fields, CaptionedImage)


class _UsedIds:
    """The ids of images and captions that a source gave."""

    def __init__(self) -> None:
        self.of_images = set[Any]()
        self.of_captions = set[Any]()

    def add(self, image: CaptionedImage, has_id: bool, has_caption_ids: bool) -> None:
        """Take the ids of an image, or raise ``UserError`` and take none."""
        ids = image.caption_ids if has_caption_ids else ()
        if has_id and image.image_id in self.of_images:
            raise UserError(f"image id {image.image_id} occurs more than once; ids must be unique")
        for caption_id in ids:
            if caption_id in self.of_captions or ids.count(caption_id) > 1:
                raise UserError(f"caption id {caption_id} occurs more than once; ids must be unique")
        if has_id:
            self.of_images.add(image.image_id)
        self.of_captions.update(ids)


def shuffled(images: Images, seed: int) -> Images:
    """Yield the images of splits named ``train...`` in the order of a hash of seed, split and id.

    All others come first and keep their order.
    """
    waiting: list[tuple[int, int, bytes]] = []
    for image in images:
        if isinstance(image, RejectedImage) or not image.split.startswith("train"):
            yield image
        else:
            rank = hash64(f"{seed}/{image.split}/{image.image_id}".encode())
            waiting.append((rank, len(waiting), _encode(image)))
    waiting.sort(reverse=True)
    while waiting:
        *_, data = waiting.pop()
        yield _decode_image(data)
