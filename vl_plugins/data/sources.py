"""Sources of captioned images: Karpathy's splits, COCO's caption files, and tables (CSV, TSV, JSON Lines)."""

import codecs
import csv
import hashlib
import io
import itertools
import operator
import os
import re
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypedDict

from vl_plugins.data.captions import LABEL, CaptionedImage, RejectedImage, normalize_caption
from vl_plugins.data.json_text import check_type, parse_json
from vl_plugins.data.storage import open_regular, read_file
from vl_plugins.errors import UserError, one_of, require, unknown_name, user_errors

__all__ = [
    "CaptionedImage",
    "Columns",
    "PlacedRow",
    "RejectedImage",
    "as_id",
    "group_rows",
    "is_integer",
    "join_rows",
    "read_coco_captions",
    "read_karpathy",
    "read_table",
    "with_annotation_ids",
]

CANONICAL_INT = re.compile(r"0|-?[1-9][0-9]{0,17}")  # fits into 64 bits

Rejected = list["RejectedImage"] | None
Row = dict[str, Any]
PlacedRow = tuple[str, Row]


def group_rows(rows: Iterable[PlacedRow]) -> Iterable[list[PlacedRow]]:
    """Return the rows of each image: those with the same path, at the position of the first."""
    groups: dict[str, list[PlacedRow]] = {}
    for place, row in rows:
        key = place
        if isinstance(row.get("file"), str) and row["file"].strip():
            row["file"] = key = str(PurePosixPath(row["file"]))
        groups.setdefault(key, []).append((place, row))
    return groups.values()


def join_rows(images: Iterable[Sequence[PlacedRow]], rejected: Rejected = None) -> Iterator[CaptionedImage]:
    """Yield the images of a source, each with the captions of all its rows.

    Args:
        images: the rows of each image: file and position, for messages, and arguments of :class:`CaptionedImage`.
            Without ``caption_ids``, and with None as ``image_id``, ids are running numbers. The split ``validation``
            becomes ``val``. A row that cannot be used has only ``split`` and ``problem``, the reason.
        rejected: receives the images with a wrong row; None raises an error for the first one.

    Raises:
        UserError: a value has the wrong type or is not allowed in a :class:`CaptionedImage`, an id is not unique, or
            rows of an image disagree. With ``rejected`` only if the split is unknown.
    """
    convert = require("msgspec", extra="data").convert
    used: dict[str, set] = {"image": set(), "caption": set()}
    total = 0  # captions

    def join(index: int, rows: Sequence[PlacedRow]) -> CaptionedImage:
        place, first = rows[0]
        captions: list[str] = []
        caption_ids: list[int | str] = []
        for _, row in rows:
            if "problem" in row:
                raise UserError(row["problem"])
            for key in ("split", "image_id", "group") if row is not first else ():
                # As text: JSON may have a number in one line and the same in quotes in another.
                if row[key] != first[key] and str(row[key]) != str(first[key]):
                    reason = f"{key} {row[key]!r}, but {first[key]!r} in {_label(place, first)}"
                    raise UserError(f"{reason}; rows of one image must agree")
            captions += row["captions"]
            # Running numbers, unless the source has ids.
            caption_ids += row.get("caption_ids", range(total + len(caption_ids), total + len(captions)))
        for key, kind in (("file", "path"), ("image_id", "image id")):
            if isinstance(first[key], str) and not first[key].strip():
                raise UserError(f"its {kind} is blank")
        changes = {
            "captions": captions,
            "caption_ids": caption_ids,
            "image_id": index if first["image_id"] is None else first["image_id"],
            "split": "val" if first["split"] == "validation" else first["split"],
        }
        return convert(first | changes, CaptionedImage)

    for index, rows in enumerate(images):
        first = rows[0][1]
        try:
            image = join(index, rows)
            # Running numbers are unique.
            ids = {
                "image": [] if first["image_id"] is None else [str(image.image_id)],
                "caption": image.caption_ids if "caption_ids" in first else [],
            }
            for kind, values in ids.items():
                if len(set(values)) < len(values) or not used[kind].isdisjoint(values):
                    value = next(value for value in values if value in used[kind] or values.count(value) > 1)
                    raise UserError(f"{kind} id {value} occurs more than once; ids must be unique")
        except ValueError as error:
            place, row, reason = *rows[0], str(error)
            for place, row in rows:
                try:
                    join(index, [rows[0], (place, row)])
                except ValueError as row_error:
                    reason = str(row_error)
                    break
                total += len(row["captions"])
            else:
                place, row = rows[0]
            split = "val" if first["split"] == "validation" else first["split"]
            if rejected is None or not (isinstance(split, str) and LABEL.fullmatch(split)):
                raise UserError(f"{_label(place, row)}: {reason}") from error
            rejected.append(RejectedImage(_label(place, row), split, reason))
        else:
            for kind, values in ids.items():
                used[kind].update(values)
            total += len(image.captions)
            yield image


def _label(place: str, row: Row) -> str:
    """Return ``place (file name)`` as one line of UTF-8."""
    name = row.get("filename")
    return f"{place} ({name if name.isprintable() else repr(name)[1:-1]})" if isinstance(name, str) else place


def is_integer(image_id: Any) -> bool:
    """True for ints, canonical decimals of up to 18 digits, and blank ids: if all are such, ids become ints."""
    return not isinstance(image_id, str) or not image_id.strip() or CANONICAL_INT.fullmatch(image_id) is not None


def as_id(image_id: Any, integers: bool) -> Any:
    """Return an id as an int or as a string; another type, or blank text, stays for the error of its row."""
    if integers:
        return int(image_id) if isinstance(image_id, str) and image_id.strip() else image_id
    return str(image_id) if type(image_id) is int else image_id


def _read_json(file: str | Path, hint: str, **fields: Any) -> dict[str, Any]:
    """Read a JSON file whose fields have these types; ``hint`` follows the error about another format."""
    with user_errors(str(file)):
        document = parse_json(read_file(file), str(file))
        try:
            check_type(document, TypedDict("Document", fields))  # type: ignore[operator]
        except UserError as error:
            raise UserError(f"{file}: {error}; {hint}") from error
    return document


class _Sentence(TypedDict):
    raw: str


class _KarpathyNeeds(TypedDict):
    filename: str
    split: Literal["train", "restval", "val", "validation", "test"]
    sentences: list[_Sentence]


class _KarpathyImage(_KarpathyNeeds, total=False):
    filepath: str
    cocoid: int
    imgid: int


def read_karpathy(
    annotation_file: str | Path,
    dataset: str,
    *,
    dataset_name: str | None = None,
    join_restval: bool = True,
    group_key: str | None = None,
    rejected: Rejected = None,
) -> list[CaptionedImage]:
    """Read an annotation file in the format of Karpathy's COCO and Flickr30K splits.

    Args:
        annotation_file: ``dataset_coco.json``, ``dataset_flickr30k.json``, or another file in their format. Images need
            ``filename``, ``split`` and ``sentences`` with ``raw``.
        dataset: ``"coco"``, with ``filepath`` as folder, if given, and ``cocoid`` or else ``imgid`` as image id; or
            ``"flickr30k"``, with ``filename`` only and ``imgid``. Without them image ids are running numbers.
        dataset_name: by default the name in the file, or else ``dataset``.
        join_restval: whether ``restval`` images count as ``train`` (113,287 images on COCO).
        group_key: field of an image with its ``group``.
        rejected: receives images that cannot be used, see :func:`join_rows`.

    Returns:
        The images of all splits in the order of the file. Caption ids are ``sentid``, or running numbers where an image
        of the file has none.

    Raises:
        UserError: the file is missing or not in this format; an image cannot be used, see :func:`join_rows`.
    """
    one_of("dataset", dataset, ("coco", "flickr30k"))
    hint = "expected Karpathy's format, with the splits train, restval, val and test; "
    hint += "`vl-plugins shards coco-captions` converts COCO's own caption files"
    document = _read_json(annotation_file, hint, images=list[_KarpathyImage])
    id_keys = ("cocoid", "imgid") if dataset == "coco" else ("imgid",)
    has_ids = all("sentid" in sentence for item in document["images"] for sentence in item["sentences"])
    rows = []
    for position, item in enumerate(document["images"]):
        row = {
            "image_id": next((item[key] for key in id_keys if key in item), None),
            "file": str(PurePosixPath(item.get("filepath", "") if dataset == "coco" else "", item["filename"])),
            "captions": [sentence["raw"] for sentence in item["sentences"]],
            "split": "train" if item["split"] == "restval" and join_restval else item["split"],
            "dataset": document.get("dataset", dataset) if dataset_name is None else dataset_name,
            "filename": item["filename"],
            "group": item.get(group_key),
        }
        if has_ids:
            row["caption_ids"] = [sentence["sentid"] for sentence in item["sentences"]]
        rows.append((f"{annotation_file}: image {position}", row))
    return list(join_rows(group_rows(rows), rejected))


class _Image(TypedDict):
    id: int
    file_name: str


class _Annotation(TypedDict):
    id: int
    image_id: int
    caption: str


COCO_HINT = "expected a file like captions_val2017.json; `vl-plugins shards coco` converts Karpathy's"


def read_coco_captions(
    annotation_files: Sequence[str | Path],
    *,
    image_root: str | Path | None = None,
    dataset_name: str = "coco",
    group_key: str | None = None,
    rejected: Rejected = None,
) -> list[CaptionedImage]:
    """Read COCO's official caption files, or others in their format.

    Args:
        annotation_files: files with ``images`` (``id``, ``file_name``) and ``annotations`` (``id``, ``image_id``,
            ``caption``). Each is a split with the name of the file: ``captions_val2017.json`` is ``val2017``.
        image_root: folder of the images. Those of a split are in the folder with its name, if there is one.
        dataset_name: name of the data set.
        group_key: field of an image with its ``group``.
        rejected: receives images that cannot be used, also those that only annotations mention.

    Returns:
        The images and captions in the order of the files, with the annotation ids as ``caption_ids``.

    Raises:
        UserError: a file is missing or not in this format; files have the same split; an image cannot be used, or an id
            occurs in two files.
    """
    files = {Path(file).stem.removeprefix("captions_"): file for file in annotation_files}
    if len(files) < len(annotation_files):
        raise UserError(f"two files of one split, among {', '.join(map(str, annotation_files))}; rename one")
    rows: list[PlacedRow] = []
    for split, file in files.items():
        document = _read_json(file, COCO_HINT, images=list[_Image], annotations=list[_Annotation])
        annotations = _by_image(document["annotations"])
        folder = split if image_root is not None and Path(image_root, split).is_dir() else ""
        for position, item in enumerate(document["images"]):
            found = annotations.get(item["id"], ())
            row = {
                "image_id": item["id"],
                "file": str(PurePosixPath(folder, item["file_name"])),
                "captions": [annotation["caption"] for annotation in found],
                "caption_ids": [annotation["id"] for annotation in found],
                "split": split,
                "dataset": dataset_name,
                "filename": item["file_name"],
                "group": item.get(group_key),
            }
            rows.append((f"{file}: image {position}", row))
        for image_id in sorted(annotations.keys() - {item["id"] for item in document["images"]}):
            problem = "it has annotations, but is not among the images of the file"
            rows.append((f"{file}: image id {image_id}", {"split": split, "problem": problem}))
    return list(join_rows(group_rows(rows), rejected))


def with_annotation_ids(
    images: Iterable[CaptionedImage], annotation_files: Sequence[str | Path], *, rejected: Rejected = None
) -> list[CaptionedImage]:
    """Replace the caption ids of Karpathy's COCO images by COCO's annotation ids, which ECCV Caption and CxC use.

    Captions are matched within their image by :func:`~vl_plugins.data.batching.normalize_caption`; equal ones take
    their ids in the order of the official file.

    Args:
        images: images whose ``image_id`` is that of COCO (``cocoid``).
        annotation_files: official caption files that have all these images between them; for Karpathy's splits, that is
            ``captions_train2014.json`` and ``captions_val2014.json``, or both of 2017.
        rejected: receives images that have no annotations, or not one for each caption.

    Returns:
        The images in the same order with the annotation ids as ``caption_ids``; each id occurs once.

    Raises:
        UserError: an official file is missing or not in this format; an image or a caption of it is not in the files.
    """
    documents = [_read_json(file, COCO_HINT, annotations=list[_Annotation]) for file in annotation_files]
    official = _by_image(annotation for document in documents for annotation in document["annotations"])
    files = ", ".join(map(str, annotation_files))
    rows = (
        (
            f"{files}: image id {image.image_id}",
            vars(image) | _match_captions(image.captions, official.get(image.image_id, ())),
        )
        for image in images
    )
    return list(join_rows(group_rows(rows), rejected))


def _by_image(annotations: Iterable[dict[str, Any]]) -> dict[int | str, list[dict[str, Any]]]:
    by_image: dict[int | str, list[dict[str, Any]]] = defaultdict(list)
    for annotation in annotations:
        by_image[annotation["image_id"]].append(annotation)
    return dict(by_image)


def _match_captions(captions: Sequence[str], annotations: Sequence[dict[str, Any]]) -> Row:
    """Return the annotation id of each caption, each id once, or the problem, as fields of a row."""
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


IMAGE_COLUMNS = ("image", "filepath", "file_name", "filename", "path", "image_path")
ID_COLUMNS = ("image_id", "id")
CAPTION_COLUMNS = ("caption", "captions", "sentences", "sentence", "text", "texts", "title", "txt")
NUMBERED_CAPTIONS = re.compile(r"caption[_ ]?\d+")
# Keys of the texts in an object: Karpathy's sentences, COCO's annotations, the .json of WebDataset tars.
TEXT_KEYS = ("raw", "caption", "captions", "text")
DELIMITERS = ("\t", ",", "| ", ";")
ROWS_INSERTED, ROWS_FETCHED = 10_000, 2_000


@dataclass(frozen=True)
class Columns:
    """The columns of a table by what they hold; those that are None or empty are found by their names.

    A caption is a text, an object with texts under ``raw``, ``caption``, ``captions`` or ``text``, or a list of these.

    Args:
        image: by default the first present of ``image``, ``filepath``, ``file_name``, ``filename``, ``path`` and
            ``image_path``.
        captions: by default the first present of ``caption``, ``captions``, ``sentences``, ``sentence``, ``text``,
            ``texts``, ``title`` and ``txt``, and all of ``caption1``, ``caption_2``, ``caption 3``, ...
        split: by default ``split``, if present.
        id: id of the image; by default the first present of ``image_id`` and ``id``, if any.
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
        captions = self.captions or [
            name for name in free if name == first(CAPTION_COLUMNS) or NUMBERED_CAPTIONS.fullmatch(name)
        ]
        for what, found in (("image", image), ("caption", captions)):
            if not found:
                raise UserError(
                    f"{source}: which column has the {what}s? name it with --{what}-column; "
                    f"columns: {', '.join(map(repr, names))}"
                )
        return Columns(image, captions, self.split or first(["split"]), self.id or first(id_columns), self.group)

    def picker(
        self, names: Sequence[str], dataset: str, split: str, caption_lines: bool = False
    ) -> Callable[[Sequence[Any]], Row]:
        """Return a function from the values of a row, in the order of ``names``, to a row for :func:`join_rows`.

        ``split`` is for tables without a split column; with ``caption_lines`` each line of a text is a caption.
        """
        position_of: dict[str | None, int] = {name: position for position, name in enumerate(names)}
        captions_at = [position_of[name] for name in self.captions]
        image_at, split_at, id_at, group_at = map(position_of.get, (self.image, self.split, self.id, self.group))

        def pick(values: Sequence[Any]) -> Row:
            texts = [values[position] for position in captions_at]
            if len(texts) > 1:
                texts = [text for text in texts if not isinstance(text, str) or text.strip()]
            if caption_lines or [text for text in texts if type(text) is not str]:
                texts = [text for value in texts for text in _texts(value, caption_lines)]
            return {
                "image_id": None if id_at is None else "" if values[id_at] is None else values[id_at],
                "captions": texts,
                "split": split if split_at is None else values[split_at],
                "dataset": dataset,
                "filename": None if image_at is None else values[image_at],
                "group": None if group_at is None else values[group_at],
            }

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
    rejected: Rejected = None,
) -> Iterator[CaptionedImage]:
    """Yield the images of a table whose rows have the path of an image, relative to the image root, and its captions.

    Text tables start with a row of column names and quote fields as spreadsheets do; JSON Lines have an object in each
    line. Rows with the same path are one image, at the position of the first. With several caption columns an empty one
    means that the row has fewer captions. Without an id column ids are running numbers. Tables of any size are grouped
    on disk.

    Args:
        file: UTF-8 text; JSON Lines if the name ends in ``.jsonl``.
        columns: which column holds what; by default they are found by their names.
        image_root: folder that absolute paths of the table are in.
        delimiter: one character, or one and a space, as in Kaggle's ``results.csv``, where quotes are characters like
            others. By default the first of tab, comma, ``"| "`` and semicolon that the first line has.
        dataset_name: by default the name of the file.
        split_name: split of all rows when there is no split column.
        val_fraction, test_fraction: share of the images that a hash of the group, or else of the path, assigns to
            ``val`` and ``test`` instead; the rows of other images do not matter.
        rejected: receives images that cannot be used, see :func:`join_rows`.

    Yields:
        The images in the order in which they first appear; the caption ids are running numbers.

    Raises:
        UserError: the file has no rows, or a line that cannot be read; the columns cannot be found; an image cannot be
            used. The message names the file and the line where the row starts.
    """
    file, name = Path(file), str(file)
    if not (val_fraction >= 0 and test_fraction >= 0 and val_fraction + test_fraction < 1):
        raise UserError("val_fraction and test_fraction must be at least 0, and below 1 together")
    with user_errors(name):
        is_json = file.suffix.lower() == ".jsonl"
        rows = _read_json_rows(file) if is_json else _read_csv_rows(file, delimiter)
        _, names = next(rows, (0, []))
        if len(set(names)) < len(names):
            raise UserError(f"{file}: two columns have the same name: {', '.join(map(repr, names))}")
        if (first := next(rows, None)) is None:
            raise UserError(f"{file} has no rows")
        rows = itertools.chain([first], rows)
        found = (columns or Columns()).find(file, names)
        if (val_fraction or test_fraction) and found.split is not None:
            raise UserError(f"{file} has splits in column {found.split!r}; leave out val_fraction and test_fraction")
        folders = [] if image_root is None else [os.path.abspath(image_root), os.path.realpath(image_root)]
        roots = tuple(f"{folder.rstrip(os.sep)}{os.sep}" for folder in folders)
        dataset = re.sub(r"[^A-Za-z0-9_-]", "_", file.stem) if dataset_name is None else dataset_name
        integers = True

        image_column, id_column = names.index(found.image), names.index(found.id) if found.id else None

        def keyed_rows() -> Iterator[tuple[int, str, list[Any]]]:
            nonlocal integers
            for line, values in rows:
                if len(values) != len(names):
                    problem = f"{len(values)} fields, but {len(names)} column names"
                    values = [*itertools.islice(itertools.chain(values, itertools.repeat(None)), len(names)), problem]
                path = values[image_column]
                key = _clean(path, roots) if isinstance(path, str) and path.strip() else f"{line}/"
                integers = integers and (id_column is None or is_integer(values[id_column]))
                yield line, key, values

        pick = found.picker(names, dataset, split_name)

        def placed(key: str, line: int, values: list[Any]) -> PlacedRow:
            row = pick(values)
            row["file"] = row["filename"] if key[-1] == "/" else key
            if id_column is not None:
                row["image_id"] = as_id(row["image_id"], integers)
            if roots and str(row["filename"]).startswith(roots):
                row["filename"] = key
            if len(values) > len(names):
                row["problem"] = values[-1]
            if val_fraction or test_fraction:
                row["split"] = _draw_split(str(row["group"] or key), val_fraction, test_fraction) or split_name
            return f"{name}: line {line}", row

        grouped = _grouped(file, keyed_rows())
        yield from join_rows(([placed(*member) for member in members] for members in grouped), rejected)


def _read_json_rows(file: Path) -> Iterator[tuple[int, list[Any]]]:
    """Yield the names of all keys, and then the values of each line that is not empty, with its number."""
    decode = require("msgspec.json", extra="data").Decoder(dict[str, Any]).decode

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


def _grouped(file: Path, rows: Iterator[tuple[int, str, Any]]) -> Iterator[Iterator[tuple[str, int, Any]]]:
    """Yield the rows of each key in the order of lines, grouped and sorted by DuckDB in limited memory."""
    duckdb, numpy, json = (require(name, extra="data") for name in ("duckdb", "numpy", "msgspec.json"))
    encode, decode = json.Encoder().encode, json.Decoder().decode
    with (
        tempfile.TemporaryDirectory() as folder,
        duckdb.connect(config={"memory_limit": "200MB", "temp_directory": folder, "threads": 1}) as database,
    ):
        database.execute("CREATE TEMP TABLE rows (line BIGINT, image VARCHAR, row VARCHAR)")
        while part := list(itertools.islice(rows, ROWS_INSERTED)):
            texts = []
            for line, _, row in part:
                try:
                    texts.append(encode(row).decode())
                except UnicodeEncodeError as error:
                    raise UserError(f"{file}: line {line}: it is not UTF-8") from error
            lines, keys, _ = zip(*part, strict=True)
            arrays = [numpy.array(lines), *(numpy.array(column, dtype=object) for column in (keys, texts))]
            database.register("part", dict(zip(("line", "image", "row"), arrays, strict=True)))
            database.execute("INSERT INTO rows SELECT line, image, row FROM part")
        database.execute("CREATE TEMP TABLE firsts AS SELECT image, min(line) AS first FROM rows GROUP BY image")
        ordered = database.execute("SELECT image, line, row FROM rows JOIN firsts USING (image) ORDER BY first, line")
        fetched = itertools.chain.from_iterable(iter(lambda: ordered.fetchmany(ROWS_FETCHED), []))
        for _, members in itertools.groupby(fetched, operator.itemgetter(0)):
            yield ((key, line, decode(row)) for key, line, row in members)


def _clean(path: str, roots: tuple[str, ...]) -> str:
    """Return a path relative to the root that it is in, if it is absolute, and without superfluous parts."""
    if roots and path.startswith(roots):
        path = path[len(next(filter(path.startswith, roots))) :].lstrip("/")
    return str(PurePosixPath(path)) if "./" in path or "//" in path or path.endswith(("/", "/.")) else path


def _draw_split(key: str, val_fraction: float, test_fraction: float) -> str | None:
    position = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
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
