"""Sources of captioned images: Karpathy's splits, COCO's caption files, and tables (CSV, TSV, JSON Lines)."""

import codecs
import csv
import hashlib
import io
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Generic, Literal, TypeVar

import msgspec

from vl_plugins.data.captions import CaptionedImage, RejectedImage, is_label, normalize_caption
from vl_plugins.data.files import open_regular, read_bytes
from vl_plugins.data.out_of_core import KeyedRows, Row, group_rows
from vl_plugins.errors import UserError, one_of, unknown_name, user_errors
from vl_plugins.tables import printable

__all__ = ["Columns", "join_rows", "read_coco_captions", "read_karpathy", "read_table", "with_annotation_ids"]

Images = Iterator[CaptionedImage | RejectedImage]


def join_rows(groups: Iterable[tuple[list[Row], bool]], dataset: Any, source: str, on_error: str) -> Images:
    """Yield the images of a source, each with the captions of all its rows.

    Args:
        groups: the rows of each image, and whether another image may have its id; see
            :func:`~vl_plugins.data.out_of_core.group_rows`. The split ``validation`` becomes ``val``.
        dataset: name of the data set.
        source: begins the message about a row, before its place.
        on_error: ``"raise"``, or ``"skip"`` to yield a :class:`RejectedImage` in place of an image with a wrong row.

    Raises:
        UserError: a value is not one of a :class:`CaptionedImage`, an id is not unique, or rows of an image disagree.
            With ``"skip"`` only if the split is unknown.
    """
    used: set[tuple[str, Any]] = set()
    total = 0  # captions
    for index, (rows, may_repeat) in enumerate(groups):
        try:
            image = _join(rows, index, total, dataset, source)
            ids: list[tuple[str, Any]] = [("image", str(image.image_id))] if may_repeat else []
            if rows[0].caption_ids is not None:
                ids += [("caption", caption_id) for caption_id in image.caption_ids]
            _claim(ids, used)
            yield image
        except ValueError as error:
            wrong, reason = rows[0], error
            for row in reversed(rows):
                try:
                    _join([rows[0], row], index, total, dataset, source)
                except ValueError as row_error:
                    wrong, reason = row, row_error
            yield _reject(_label(source, wrong), rows[0].split, reason, on_error)
        total += sum([len(row.captions) for row in rows])


def _join(rows: Sequence[Row], index: int, total: int, dataset: Any, source: str) -> CaptionedImage:
    """Return the image of some rows; ``index`` and ``total`` are the ids of an image and a caption without ids."""
    first = rows[0]
    for row in rows:
        row.split = "val" if row.split == "validation" else row.split
        if row.problem is not None:
            raise UserError(row.problem)
        if (row.split, row.image_id, row.group) != (first.split, first.image_id, first.group):
            keys = ("split", "image_id", "group")
            key = next(key for key in keys if getattr(row, key) != getattr(first, key))
            reason = f"{key} {getattr(row, key)!r}, but {getattr(first, key)!r} in {_label(source, first)}"
            raise UserError(f"{reason}; rows of one image must agree")
    for what, value in (("path", first.file), ("image id", first.image_id)):
        if isinstance(value, str) and not value.strip():
            raise UserError(f"its {what} is blank")
    captions = [caption for row in rows for caption in row.captions]
    caption_ids: Sequence[Any] = range(total, total + len(captions))
    if first.caption_ids is not None:
        caption_ids = [caption_id for row in rows for caption_id in row.caption_ids or ()]
    fields = {
        "image_id": index if first.image_id is None else first.image_id,
        "file": first.file,
        "captions": captions,
        "caption_ids": tuple(caption_ids),
        "split": first.split,
        "dataset": dataset,
        "filename": first.file if first.filename is None else first.filename,
        "group": first.group,
    }
    return msgspec.convert(fields, CaptionedImage)


def _claim(ids: Sequence[tuple[str, Any]], used: set[tuple[str, Any]]) -> None:
    """Add ids of a kind to those that are used, all of them or none."""
    new: set[tuple[str, Any]] = set()
    for kind, value in ids:
        if (kind, value) in used or (kind, value) in new:
            raise UserError(f"{kind} id {value} occurs more than once; ids must be unique")
        new.add((kind, value))
    used |= new


def _label(source: str, row: Row) -> str:
    """Return ``source place (file name)`` as one line of UTF-8."""
    name = row.file if row.filename is None else row.filename
    return f"{source}{row.place}{f' ({printable(name)})' if isinstance(name, str) else ''}"


def _reject(label: str, split: Any, error: ValueError, on_error: str) -> RejectedImage:
    if on_error == "skip" and isinstance(split, str) and is_label(split):
        return RejectedImage(label, split, str(error))
    raise UserError(f"{label}: {error}") from error


def _group(rows: Iterable[Row]) -> Iterator[tuple[list[Row], bool]]:
    """Yield the rows of each image of a file that is in memory: those with the same path."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.file or row.place, []).append(row)
    return ((group, True) for group in groups.values())


Image = TypeVar("Image")


class _Sentence(msgspec.Struct):
    raw: str
    sentid: Any = None


class _KarpathyImage(msgspec.Struct):
    filename: str
    split: Literal["train", "restval", "val", "validation", "test"]
    sentences: list[_Sentence]
    filepath: str = ""
    cocoid: int | None = None
    imgid: int | None = None


class _Karpathy(msgspec.Struct, Generic[Image]):
    images: list[Image]
    dataset: Any = None


class _Image(msgspec.Struct):
    id: int
    file_name: str


class _Annotation(msgspec.Struct):
    id: int
    image_id: int
    caption: str


class _Annotations(msgspec.Struct):
    annotations: list[_Annotation]


class _Captions(_Annotations, Generic[Image]):
    images: list[Image]


def _read_json(file: str | Path, kind: Any, image: Any = None, group_key: str | None = None) -> Any:
    """Return a JSON document; its images are of the type ``image``, with ``group_key`` as their ``group``."""
    data = read_bytes(file).removeprefix(codecs.BOM_UTF8)
    with user_errors(str(file)):
        if image is not None:
            key = group_key or "no group"
            kind = kind[msgspec.defstruct("Image", [("group", Any, None)], bases=(image,), rename={"group": key})]
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            hint = "is it Karpathy's (`shards coco`) or COCO's own (`shards coco-captions`)?"
            raise UserError(f"{file}: {error}; {hint}") from error


def read_karpathy(
    annotation_file: str | Path,
    dataset: str,
    *,
    dataset_name: str | None = None,
    join_restval: bool = True,
    group_key: str | None = None,
    on_error: str = "raise",
) -> Images:
    """Yield the images of an annotation file in the format of Karpathy's COCO and Flickr30K splits, in its order.

    Args:
        annotation_file: ``dataset_coco.json``, ``dataset_flickr30k.json``, or another file in their format. Images need
            ``filename``, ``split`` and ``sentences`` with ``raw``. Caption ids are ``sentid`` if all have it, or else
            running numbers.
        dataset: ``"coco"``, with ``filepath`` as folder, if given, and ``cocoid`` or else ``imgid`` as image id; or
            ``"flickr30k"``, with ``filename`` only and ``imgid``. Without them image ids are running numbers.
        dataset_name: by default the name in the file, or else ``dataset``.
        join_restval: whether ``restval`` images count as ``train`` (113,287 images on COCO).
        group_key: field of an image with its ``group``.
        on_error: see :func:`join_rows`, as for the errors of an image.

    Raises:
        UserError: the file is missing or not in this format; an image cannot be used.
    """
    is_coco = one_of("dataset", dataset, ("coco", "flickr30k")) == "coco"
    parsed = _read_json(annotation_file, _Karpathy, _KarpathyImage, group_key)
    has_ids = all(sentence.sentid is not None for item in parsed.images for sentence in item.sentences)
    rows = (
        Row(
            place=position,
            file=str(PurePosixPath(item.filepath if is_coco else "", item.filename)),
            captions=[sentence.raw for sentence in item.sentences],
            split="train" if item.split == "restval" and join_restval else item.split,
            image_id=item.cocoid if is_coco and item.cocoid is not None else item.imgid,
            group=item.group,
            filename=item.filename,
            caption_ids=[sentence.sentid for sentence in item.sentences] if has_ids else None,
        )
        for position, item in enumerate(parsed.images)
    )
    name = dataset_name if dataset_name is not None else parsed.dataset or dataset
    yield from join_rows(_group(rows), name, f"{annotation_file}: image ", on_error)


def read_coco_captions(
    annotation_files: Sequence[str | Path],
    *,
    image_root: str | Path | None = None,
    dataset_name: str = "coco",
    group_key: str | None = None,
    on_error: str = "raise",
) -> Images:
    """Yield the images of COCO's official caption files, or of others in their format, in their order.

    Args:
        annotation_files: files with ``images`` (``id``, ``file_name``) and ``annotations`` (``id``, ``image_id``,
            ``caption``). Each is a split with the name of the file: ``captions_val2017.json`` is ``val2017``.
        image_root: folder of the images. Those of a split are in the folder with its name, if there is one.
        dataset_name: name of the data set.
        group_key: field of an image with its ``group``.
        on_error: see :func:`join_rows`, as for the errors of an image.

    Raises:
        UserError: a file is missing or not in this format; files have the same split; an image cannot be used, or has
            annotations but is not listed.
    """
    files = {Path(file).stem.removeprefix("captions_"): file for file in annotation_files}
    if len(files) < len(annotation_files):
        raise UserError(f"two files of one split, among {', '.join(map(str, annotation_files))}; rename one")

    def rows() -> Iterator[Row]:
        for split, file in files.items():
            parsed = _read_json(file, _Captions, _Image, group_key)
            annotations = _by_image(parsed.annotations)
            folder = split if image_root is not None and Path(image_root, split).is_dir() else ""
            for position, item in enumerate(parsed.images):
                found = annotations.get(item.id, ())
                yield Row(
                    place=f"{file}: image {position}",
                    file=str(PurePosixPath(folder, item.file_name)),
                    captions=[annotation.caption for annotation in found],
                    split=split,
                    image_id=item.id,
                    group=item.group,
                    filename=item.file_name,
                    caption_ids=[annotation.id for annotation in found],
                )
            for image_id in sorted(annotations.keys() - {item.id for item in parsed.images}):
                problem = "it has annotations, but is not among the images of the file"
                yield Row(f"{file}: image id {image_id}", None, [], split, problem=problem)

    yield from join_rows(_group(rows()), dataset_name, "", on_error)


def with_annotation_ids(images: Images, annotation_files: Sequence[str | Path], on_error: str = "raise") -> Images:
    """Replace the caption ids of Karpathy's COCO images by COCO's annotation ids, which ECCV Caption and CxC use.

    Captions are matched within their image by :func:`~vl_plugins.data.captions.normalize_caption`; equal ones take
    their ids in the order of the official file.

    Args:
        images: images whose ``image_id`` is that of COCO (``cocoid``).
        annotation_files: official caption files that have all these images between them; for Karpathy's splits, that is
            ``captions_train2014.json`` and ``captions_val2014.json``, or both of 2017.
        on_error: see :func:`join_rows`.

    Raises:
        UserError: an official file is missing or not in this format; an image or a caption of it is not in the files.
    """
    files = ", ".join(map(str, annotation_files))
    parsed = (_read_json(file, _Annotations) for file in annotation_files)
    official = _by_image(annotation for document in parsed for annotation in document.annotations)
    used: set[tuple[str, Any]] = set()
    for image in images:
        if isinstance(image, CaptionedImage):
            try:
                caption_ids = _match_captions(image.captions, official.get(image.image_id, ()))
                _claim([("caption", caption_id) for caption_id in caption_ids], used)
                image = replace(image, caption_ids=caption_ids)
            except UserError as error:
                label = f"{files}: image id {image.image_id} ({printable(image.filename)})"
                image = _reject(label, image.split, error, on_error)
        yield image


def _by_image(annotations: Iterable[_Annotation]) -> dict[int | str, list[_Annotation]]:
    by_image: dict[int | str, list[_Annotation]] = defaultdict(list)
    for annotation in annotations:
        by_image[annotation.image_id].append(annotation)
    return dict(by_image)


def _match_captions(captions: Sequence[str], annotations: Sequence[_Annotation]) -> tuple[int, ...]:
    """Return the annotation id of each caption, each id once."""
    if not annotations:
        raise UserError("it has no annotations there; Karpathy's splits need those of train2014 and val2014")
    unused: dict[str, list[int]] = defaultdict(list)
    for annotation in reversed(annotations):
        unused[normalize_caption(annotation.caption)].append(annotation.id)
    caption_ids = []
    for caption in captions:
        if not (ids := unused[normalize_caption(caption)]):
            raise UserError(f"caption {caption!r} is not, or not as often, among the annotations of its image")
        caption_ids.append(ids.pop())
    return tuple(caption_ids)


IMAGE_COLUMNS = ("image", "filepath", "file_name", "filename", "path", "image_path")
ID_COLUMNS = ("image_id", "id")
CAPTION_COLUMNS = ("caption", "captions", "sentences", "sentence", "text", "texts", "title", "txt")
NUMBERED_CAPTIONS = re.compile(r"caption[_ ]?\d+")
# Keys of the texts in an object: Karpathy's sentences, COCO's annotations, the .json of WebDataset tars.
TEXT_KEYS = ("raw", "caption", "captions", "text")
DELIMITERS = ("\t", ",", "| ", ";")


@dataclass(frozen=True)
class Columns:
    """The columns of a table by what they hold; those that are None or empty are found by their names.

    A caption is a text, an object with texts under ``raw``, ``caption``, ``captions`` or ``text``, or a list of these.

    Args:
        image: by default the first present of :data:`IMAGE_COLUMNS`.
        captions: by default the first present of :data:`CAPTION_COLUMNS`, and all of ``caption1``, ``caption_2``, ...
        split: by default ``split``, if present.
        id: id of the image; by default the first present of :data:`ID_COLUMNS`, if any.
        group: ``group`` of the image; by default there are no groups.
    """

    image: str | None = None
    captions: Sequence[str] = ()
    split: str | None = None
    id: str | None = None
    group: str | None = None

    def find(
        self,
        source: str | Path,
        names: Sequence[str],
        image_columns: Sequence[str] = IMAGE_COLUMNS,
        id_columns: Sequence[str] = ID_COLUMNS,
    ) -> "Columns":
        """Return the columns of a table with these names.

        Raises:
            UserError: a column that was asked for is not there, or there is none with images or captions.
        """
        asked = [name for name in (self.image, *self.captions, self.split, self.id, self.group) if name is not None]
        for name in asked:
            if name not in names:
                raise UserError(f"{source}: {unknown_name('column', name, names)}")
        free = [name for name in names if name not in asked]

        def first(candidates: Sequence[str]) -> str | None:
            return next((name for name in candidates if name in free), None)

        image = self.image or first(image_columns)
        caption = first(CAPTION_COLUMNS)
        captions = self.captions or [name for name in free if name == caption or NUMBERED_CAPTIONS.fullmatch(name)]
        for what, found in (("image", image), ("caption", captions)):
            if not found:
                raise UserError(
                    f"{source}: which column has the {what}s? name it with --{what}-column; "
                    f"columns: {', '.join(map(repr, names))}"
                )
        return Columns(image, captions, self.split or first(["split"]), self.id or first(id_columns), self.group)

    def picker(
        self, names: Sequence[str], split: str, caption_lines: bool = False
    ) -> Callable[[int | str, Sequence[Any]], Row]:
        """Return a function from a place and the values there, in the order of ``names``, to a row.

        ``split`` is for tables without a split column; with ``caption_lines`` each line of a text is a caption.
        """
        places: dict[str | None, int] = {name: position for position, name in enumerate(names)}
        captions_at = [places[name] for name in self.captions]
        image_at, split_at, id_at, group_at = map(places.get, (self.image, self.split, self.id, self.group))

        def pick(place: int | str, values: Sequence[Any]) -> Row:
            texts = [values[position] for position in captions_at]
            if len(texts) > 1:
                texts = [text for text in texts if not isinstance(text, str) or text.strip()]
            if caption_lines or [text for text in texts if type(text) is not str]:
                texts = [text for value in texts for text in _texts(value, caption_lines)]
            return Row(
                place,
                None if image_at is None else values[image_at],
                texts,
                split if split_at is None else values[split_at],
                None if id_at is None else "" if values[id_at] is None else values[id_at],
                None if group_at is None else values[group_at],
            )

        return pick


def read_table(
    file: str | Path,
    columns: Columns | None = None,
    *,
    image_root: str | Path | None = None,
    delimiter: str | None = None,
    dataset_name: str | None = None,
    split_name: str = "train",
    val_fraction: float = 0.0,
    test_fraction: float = 0.0,
    on_error: str = "raise",
) -> Images:
    """Yield the images of a table whose rows have the path of an image, relative to the image root, and its captions.

    Text tables start with a row of column names and quote fields as spreadsheets do; JSON Lines have an object in each
    line. Rows with the same path are one image, where the first row is. With several caption columns an empty one means
    that the row has fewer captions. Caption ids are running numbers, image ids too if there is no id column. Tables of
    any size are grouped on disk, in the folder for temporary files.

    Args:
        file: UTF-8 text; JSON Lines if the name ends in ``.jsonl``.
        columns: which column holds what; by default they are found by their names.
        image_root: folder that absolute paths of the table are in.
        delimiter: one character, or one and a space, as in Kaggle's ``results.csv``, where quotes have no meaning. By
            default the first of tab, comma, ``"| "`` and semicolon that the first line has.
        dataset_name: by default the name of the file.
        split_name: split of all rows when there is no split column.
        val_fraction, test_fraction: share of the images that a hash of the group, or else of the path, assigns to
            ``val`` and ``test`` instead; other rows of the table do not matter.
        on_error: see :func:`join_rows`.

    Raises:
        UserError: the file has no rows, or a line that cannot be read; the columns cannot be found; an image cannot be
            used. The message names the file and the line where the row starts.
    """
    file = Path(file)
    if not (val_fraction >= 0 and test_fraction >= 0 and val_fraction + test_fraction < 1):
        raise UserError("val_fraction and test_fraction must be at least 0, and below 1 together")
    with user_errors(str(file)):
        table = _read_json_rows(file) if file.suffix.lower() == ".jsonl" else _read_csv_rows(file, delimiter)
        _, names = next(table, (0, []))
        if len(set(names)) < len(names):
            raise UserError(f"{file}: two columns have the same name: {', '.join(map(repr, names))}")
        if (first := next(table, None)) is None:
            raise UserError(f"{file} has no rows")
        found = (columns or Columns()).find(file, names)
        if (val_fraction or test_fraction) and found.split is not None:
            raise UserError(f"{file} has splits in column {found.split!r}; leave out val_fraction and test_fraction")
        folders = [] if image_root is None else [os.path.abspath(image_root), os.path.realpath(image_root)]
        roots = tuple(f"{folder.rstrip(os.sep)}{os.sep}" for folder in folders)
        pick = found.picker(names, split_name)

        def rows() -> KeyedRows:
            for line, values in itertools.chain([first], table):
                number = len(values)
                row = pick(line, values if number == len(names) else [*values, *names][: len(names)])
                if number != len(names):
                    row.problem = f"{number} fields, but {len(names)} column names"
                key = f"{line}/"  # no path ends so
                if isinstance(row.file, str) and row.file.strip():
                    key = _clean(row.file, roots)
                    if key != row.file:
                        row.filename = key if roots and row.file.startswith(roots) else row.file
                        row.file = key
                if val_fraction or test_fraction:
                    group = "" if row.group is None else str(row.group)
                    row.split = _draw_split(group.strip() or key, val_fraction, test_fraction) or split_name
                yield key, row

        dataset = re.sub(r"[^A-Za-z0-9_-]", "_", file.stem) if dataset_name is None else dataset_name
        source = f"{file}: line "
        yield from join_rows(group_rows(rows(), source), dataset, source, on_error)


def _read_json_rows(file: Path) -> Iterator[tuple[int, list[Any]]]:
    """Yield the names of all keys, and then the values of each line that is not empty, with its number."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode

    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        with open_regular(file) as stream:
            for line, text in enumerate(stream, 1):
                if text.strip():
                    try:
                        yield line, decode(text.removeprefix(codecs.BOM_UTF8) if line == 1 else text)
                    except (ValueError, RecursionError) as error:
                        raise UserError(f"{file}: line {line}: it is not a JSON object: {error}") from error

    names = list(dict.fromkeys(name for _, row in objects() for name in row))
    yield 0, names
    yield from ((line, [row.get(name) for name in names]) for line, row in objects())


def _read_csv_rows(file: Path, delimiter: str | None) -> Iterator[tuple[int, list[Any]]]:
    """Yield the column names, and then the fields of each row that is not empty, with the number of its first line."""
    line = 1
    # "sig": spreadsheets put a byte order mark first. "surrogateescape": to find the line that is not UTF-8.
    with open_regular(file) as binary, io.TextIOWrapper(binary, "utf-8-sig", "surrogateescape", newline="") as stream:
        header = stream.readline()
        if delimiter is None:
            delimiter = next((candidate for candidate in DELIMITERS if candidate in header), ",")
        options: dict[str, Any] = {"delimiter": delimiter, "strict": True}
        if delimiter[1:] == " ":
            options |= {"delimiter": delimiter[0], "skipinitialspace": True, "quoting": csv.QUOTE_NONE}
        try:
            reader = csv.reader(itertools.chain([header], stream), **options)
            for fields in reader:
                if fields:
                    yield line, fields
                line = reader.line_num + 1
        except (csv.Error, TypeError) as error:
            hint = "; is a quote missing, or one too many?" if isinstance(error, csv.Error) else ""
            raise UserError(f"{file}: line {line}: {error}{hint}") from error


def _clean(path: str, roots: tuple[str, ...]) -> str:
    """Return a path relative to the root that it is in, if it is absolute, and without superfluous parts."""
    if roots and path.startswith(roots):
        path = path[len(next(filter(path.startswith, roots))) :].lstrip("/")
    return str(PurePosixPath(path)) if "./" in path or "//" in path or path.endswith(("/", "/.")) else path


def _draw_split(key: str, val_fraction: float, test_fraction: float) -> str | None:
    position = int.from_bytes(hashlib.sha256(key.encode(errors="surrogateescape")).digest()[:8], "big") / 2**64
    return "test" if position < test_fraction else "val" if position >= 1 - val_fraction else None


def _texts(value: Any, lines: bool) -> list[Any]:
    """Return the texts of a caption; anything else remains for the error."""
    texts: list[Any] = []
    for item in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(item, dict):
            item = next((item[key] for key in TEXT_KEYS if key in item), item)
        for text in item if isinstance(item, list) else [item]:
            if lines and isinstance(text, str):
                texts += [line for line in text.splitlines() if line.strip()]
            else:
                texts.append(text)
    return texts
