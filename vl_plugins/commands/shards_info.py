"""``vl-plugins shards info``: what is in shards, and what in them misleads training."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require
from vl_plugins.utils.tables import align_columns

if TYPE_CHECKING:
    from vl_plugins.data.repeats import Repeats
    from vl_plugins.data.statistics import Range, SplitStatistics

__all__ = ["format_statistics", "register", "run"]

DEFAULT_BATCH_SIZE = 128
DEFAULT_SAMPLES = 12

WIDTH = 100  # characters
BAR = 40
# More numbers of captions per image than this are put together.
MOST_ROWS = 12

DESCRIPTION = """\
Print what shards contain: numbers, captions per image, lengths of captions and sizes of images, and
the pictures and captions that occur more than once, which a contrastive loss takes for negatives of
each other. With --contact-sheet, draw samples from all over the shards. Shards of other programs
(img2dataset, webdataset: jpg and txt, perhaps json) will do; name-000.tar, name-001.tar, ... are
then a split called name. Pixels are not decoded, except those of the contact sheet. Of shards with
features, the numbers of features stand in place of the sizes of images."""

EPILOG = """\
example:
  vl-plugins shards info shards --split coco-train --contact-sheet coco-train.png"""

REPEATS = """\
A repeat in a batch is a false negative: two images that show or say the same, which a contrastive loss pushes apart. \
The training reader of vl-plugins holds such captions back, so that equal ones of different images never meet in a \
batch of one process. Pictures it does not compare; leave repeated ones out when you make the shards, or give them a \
group in common (--group-key)."""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``info`` subcommand."""
    parser = subparsers.add_parser(
        "info",
        help="statistics of shards, repeated pictures and captions, and a contact sheet",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", help="folder of the shards, or a URL of fsspec such as s3://...")
    parser.add_argument(
        "--split", nargs="+", metavar="NAME", help="only these, such as train or coco-train (default: all)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=DEFAULT_BATCH_SIZE,
        metavar="B",
        help="images in a batch, for the repeats to expect in it (default: %(default)s)",
    )
    parser.add_argument(
        "--contact-sheet", type=Path, metavar="FILE", help="draw samples into this .png (default: draw nothing)"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=DEFAULT_SAMPLES,
        metavar="N",
        help="number of samples on the contact sheet, at most 60 (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read the shards, print what they contain, and draw a contact sheet; the progress bar goes to standard error."""
    # Here, because every command imports this module and most need no shards.
    from vl_plugins.data.contact_sheet import MOST_SAMPLES
    from vl_plugins.data.statistics import shard_statistics
    from vl_plugins.data.storage import Folder

    sheet = arguments.contact_sheet
    # Before the shards are read, which may take minutes.
    if not 1 <= arguments.samples <= MOST_SAMPLES:
        raise UserError(f"--samples must be 1 to {MOST_SAMPLES}, got {arguments.samples}")
    if sheet is not None:
        if sheet.suffix.lower() != ".png":
            raise UserError(f"--contact-sheet must be a .png file, got {sheet}")
        require("matplotlib", extra="eval")

    folder = Folder(arguments.folder)
    statistics = shard_statistics(folder, splits=arguments.split, batch_size=arguments.batch_size)
    pictured = {name: split for name, split in statistics.items() if split.places and split.features is None}
    reason = None
    if sheet is not None and not pictured:
        sheet = None
        if any(split.places for split in statistics.values()):
            reason = "the shards have features in place of pictures"
    if not arguments.json:
        # Whatever becomes of the picture.
        print(format_statistics(statistics))
    if sheet is not None:
        _draw(folder, pictured, arguments.samples, sheet)
    if arguments.json:
        document = {"splits": {name: _as_json(split) for name, split in statistics.items()}}
        print(json.dumps(document | {"contact_sheet": None if sheet is None else str(sheet)}, indent=2))
    elif sheet is not None:
        print(f"\ncontact sheet: {sheet}")
    elif reason is not None:
        print(f"\nno contact sheet: {reason}")
    return 0


def format_statistics(statistics: Mapping[str, "SplitStatistics"]) -> str:
    """Return statistics by split as text of at most 100 columns, as long as no split has a long name."""
    rows = [["", "shards", "images", "captions", "rejected", "size"]]
    for name, split in statistics.items():
        rejected = "-" if split.rejected is None else f"{split.rejected:,}"
        numbers = (f"{number:,}" for number in (split.shards, split.images, split.captions))
        rows.append([_printable(name), *numbers, rejected, f"{split.bytes / 1e6:,.1f} MB"])
    lines = ["  ".join(row) for row in align_columns(rows)]
    for name, split in statistics.items():
        lines += ["", _printable(name), *_format_split(split)]
    return "\n".join([*lines, "", *textwrap.wrap(REPEATS, WIDTH)])


def _format_split(split: "SplitStatistics") -> Iterator[str]:
    for name, value in _describe_source(split.source or {}):
        yield from _entry(name, value)
    if split.unusable:
        yield from _entry(
            "unusable", f"{split.unusable:,} samples without a picture, or features, or a caption, not counted"
        )
    if not split.images:
        return
    counts = split.captions_per_image
    yield from _entry("captions per image", f"min {min(counts)}, max {max(counts)}")
    yield from _histogram(_few_rows(counts), "images")
    if split.groups:
        yield from _entry("groups", f"{split.groups:,}")
    yield from _entry("words per caption", _format_range(split.words))
    if split.widths is not None:
        yield from _entry("width", f"{_format_range(split.widths)} pixels")
        yield from _entry("height", f"{_format_range(split.heights)} pixels")
        yield from _entry("shorter side", "")
        yield from _histogram(_bin_rows(split.shorter_sides), "images")
    if split.features is not None:
        yield from _entry("features per image", _format_range(split.features))
        yield from _entry("values per feature", ", ".join(f"{dim:,}" for dim in split.feature_dims))
    pictures, captions = split.repeated_pictures, split.repeated_captions
    yield from _entry("repeated pictures", _format_repeats(pictures, "image", "with the same picture as others"))
    if pictures.example is not None:
        yield from _expected(pictures)
        yield from _entry(
            "", f"most frequent: the picture of {_printable(pictures.example)}, {pictures.example_images:,} times"
        )
    yield from _entry("repeated captions", _format_repeats(captions, "caption", "with the same text as other images'"))
    if captions.example is not None:
        yield from _expected(captions)
        example = textwrap.shorten(_printable(captions.example), 50, placeholder=" ...")
        yield from _entry("", f'most frequent: "{example}", with {captions.example_images:,} images')


def _entry(name: str, value: str) -> list[str]:
    return textwrap.wrap(
        value, WIDTH, initial_indent=f"  {name:<18}  ", subsequent_indent=" " * 22, break_on_hyphens=False
    ) or [f"  {name}"]


def _describe_source(source: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a manifest says of the origin of a split, in words."""
    if isinstance(source.get("format"), str):
        yield "format", source["format"]
    files = source.get("annotations")
    # A name, or a list of objects with name and hash.
    described = files if isinstance(files, list) else [{"file": files}]
    names = [file.get("file") for file in described if isinstance(file, dict)]
    names = [_printable(name) for name in names if isinstance(name, str)]
    if names:
        yield "annotations", ", ".join(names)
    if isinstance(source.get("caption_ids"), str):
        yield "caption ids", source["caption_ids"]


def _few_rows(counts: Mapping[int, int]) -> list[tuple[str, int]]:
    """Return a label and a number of images for each number of captions, or for each range of them if they are many."""
    step = -(-(max(counts) - min(counts) + 1) // MOST_ROWS)
    if step == 1 or len(counts) <= MOST_ROWS:
        return [(str(captions), images) for captions, images in counts.items()]
    rows = []
    for first in range(min(counts), max(counts) + 1, step):
        images = sum(number for captions, number in counts.items() if first <= captions < first + step)
        rows.append((f"{first}-{first + step - 1}", images))
    return rows


def _bin_rows(bins: Mapping[int, int]) -> list[tuple[str, int]]:
    """Return a label and a number of images for each bin, from the first to the last with any."""
    firsts = list(bins)
    used = [index for index, first in enumerate(firsts) if bins[first]]
    rows = []
    for index in range(used[0], used[-1] + 1):
        end = firsts[index + 1] - 1 if index + 1 < len(firsts) else None
        label = (
            f"{firsts[index]} and more" if end is None else f"{firsts[index]}-{end}" if index else f"below {end + 1}"
        )
        rows.append((label, bins[firsts[index]]))
    return rows


def _histogram(rows: Sequence[tuple[str, int]], unit: str) -> Iterator[str]:
    most, total = max(number for _, number in rows), sum(number for _, number in rows)
    cells = align_columns([[label, f"{number:,}", f"{100 * number / total:.1f}%"] for label, number in rows])
    for (label, number, percent), (_, images) in zip(cells, rows, strict=True):
        # What occurs at all is seen.
        bar = "#" * -(-BAR * images // most)
        yield f"    {label}  {number} {unit} {percent}  {bar}".rstrip()


def _format_range(numbers: "Range") -> str:
    return f"min {numbers.minimum:,}, median {numbers.median:,.10g}, max {numbers.maximum:,}"


def _format_repeats(repeats: "Repeats", name: str, what: str) -> str:
    if not repeats.number:
        return "none"
    return f"{repeats.number:,} {name}s ({_percent(repeats.share)}) {what}; {repeats.different:,} different"


def _expected(repeats: "Repeats") -> list[str]:
    pairs = repeats.expected_pairs
    number = f"{pairs:,.2f}" if pairs >= 0.005 else "less than 0.01"
    return _entry("", f"expected in a random batch of {repeats.batch_size:,}: {number} pairs")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share >= 0.0005 else "less than 0.1%"


def _as_json(split: "SplitStatistics") -> dict[str, Any]:
    """Return statistics without the places of the samples, which are as many."""
    values = {key: value for key, value in vars(split).items() if key != "places"}
    for key in ("words", "widths", "heights", "features"):
        values[key] = None if values[key] is None else values[key]._asdict()
    for key in ("repeated_pictures", "repeated_captions"):
        values[key] = vars(values[key])
    return values


def _draw(folder: Any, statistics: Mapping[str, "SplitStatistics"], number: int, sheet: Path) -> None:
    from vl_plugins.data.contact_sheet import draw_contact_sheet
    from vl_plugins.data.statistics import read_place, spread_places

    every = [place for split in statistics.values() for place in split.places]
    places = spread_places(every, number)
    title = f"{', '.join(statistics)}: {len(places):,} of {len(every):,} samples"
    draw_contact_sheet([read_place(folder, place) for place in places], sheet, title=title)


def _printable(text: str) -> str:
    """Return a text so that a terminal can print it on one line."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
