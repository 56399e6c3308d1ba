"""``vl-plugins shards info``: what is in shards, and what in them misleads training."""

import argparse
import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vl_plugins.errors import UserError
from vl_plugins.tables import align_columns, printable

if TYPE_CHECKING:
    from vl_plugins.data.statistics import Range, Repeats, SplitStatistics

__all__ = ["format_statistics", "register", "run"]

WIDTH = 100  # characters

REPEATS = """\
A repeat in a batch is a false negative: two images that show or say the same, which a contrastive loss pushes apart. \
The training reader of vl-plugins keeps equal captions of different images out of a batch of one process. It does not \
compare pictures: leave repeated ones out when you make the shards, or give them a common group (--group-key)."""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``info`` subcommand."""
    parser = subparsers.add_parser(
        "info",
        help="print statistics of shards, or draw a contact sheet",
        examples=["vl-plugins shards info shards", "vl-plugins shards info shards --contact-sheet sheet.png"],
        description="Print counts, lengths of captions, sizes of images, and repeated images and captions. Shards of "
        "img2dataset and other programs work too.",
    )
    parser.add_argument("folder", metavar="DIR", help="folder of shards, or an fsspec URL such as s3://...")
    parser.add_argument("--split", nargs="+", metavar="NAME", help="read only these splits, such as coco-train")
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--contact-sheet", type=Path, metavar="FILE", help="draw samples to this .png file")
    parser.add_argument("--samples", **number, default=12, help="samples on the sheet, up to 60 (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read the shards, print what they contain, and draw a contact sheet; the progress bar goes to standard error."""
    # Here, because every command imports this module and most need no shards.
    from vl_plugins.data.contact_sheet import check_contact_sheet, draw_contact_sheet
    from vl_plugins.data.statistics import read_place, shard_statistics
    from vl_plugins.data.storage import Folder

    sheet, folder = arguments.contact_sheet, Folder(arguments.folder)
    if sheet is not None:
        # Before the shards are read, which may take minutes.
        check_contact_sheet(sheet, arguments.samples)
    statistics = shard_statistics(folder, splits=arguments.split)
    if arguments.json:
        splits = {
            name: {key: value for key, value in vars(split).items() if key != "places"}
            for name, split in statistics.items()
        }
        print(json.dumps({"splits": splits}, indent=2, default=vars))
    else:
        print(format_statistics(statistics))
    if sheet is not None:
        pictured = {name: split.places for name, split in statistics.items() if split.features is None}
        every = list(itertools.chain(*pictured.values()))
        if not every:
            raise UserError("no contact sheet: the shards hold no pictures")
        number = min(arguments.samples, len(every))
        # Each from the middle of an equal part of all.
        places = [every[(2 * index + 1) * len(every) // (2 * number)] for index in range(number)]
        title = f"{', '.join(pictured)}: {number:,} of {len(every):,} samples"
        draw_contact_sheet([read_place(folder, place) for place in places], sheet, title=title)
    return 0


def format_statistics(statistics: Mapping[str, "SplitStatistics"]) -> str:
    """Return statistics by split as text of at most 100 columns, as long as no split has a long name."""
    rows = [["", "shards", "images", "captions", "rejected", "size"]]
    for name, split in statistics.items():
        rejected = "-" if split.rejected is None else f"{split.rejected:,}"
        numbers = (f"{number:,}" for number in (split.shards, split.images, split.captions))
        rows.append([printable(name), *numbers, rejected, f"{split.bytes / 1e6:,.1f} MB"])
    lines = ["  ".join(row) for row in align_columns(rows)]
    for name, split in statistics.items():
        lines += ["", printable(name)]
        for label, value in _rows(split):
            first = f"  {label:<18}  "
            lines += textwrap.wrap(printable(value), WIDTH, initial_indent=first, subsequent_indent=" " * len(first))
    return "\n".join([*lines, "", *textwrap.wrap(REPEATS, WIDTH)])


def _rows(split: "SplitStatistics") -> Iterator[tuple[str, str]]:
    """Yield labels and values."""
    source = [f"{key} {value}" for key, value in (split.source or {}).items() if isinstance(value, str)]
    if source:
        yield "source", ", ".join(source)
    if split.unusable:
        yield "unusable", f"{split.unusable:,} samples without a picture, or features, or a caption, not counted"
    if split.words is None:  # there are no images
        return
    yield "captions per image", _histogram(split.captions_per_image)
    if split.groups:
        yield "groups", f"{split.groups:,}"
    yield "words per caption", _range(split.words)
    if split.widths is not None and split.heights is not None:
        yield "width", f"{_range(split.widths)} pixels"
        yield "height", f"{_range(split.heights)} pixels"
    if split.features is not None:
        yield "features per image", _range(split.features)
        yield "values per feature", _histogram(split.feature_dims)
    yield from _repeats("repeated pictures", split.repeated_pictures, "images", "the picture of")
    yield from _repeats("repeated captions", split.repeated_captions, "captions", "the text")


def _histogram(counts: Mapping[int, int]) -> str:
    total = sum(counts.values())
    return ", ".join(f"{key:,}: {images:,} ({images / total:.1%})" for key, images in counts.items() if images)


def _range(numbers: "Range") -> str:
    return f"min {numbers.minimum:,}, median {numbers.median:,.10g}, max {numbers.maximum:,}"


def _repeats(label: str, repeats: "Repeats", unit: str, what: str) -> Iterator[tuple[str, str]]:
    if repeats.example is None:
        yield label, "none"
        return
    yield label, f"{repeats.number:,} {unit} ({repeats.share:.2%}), {repeats.different:,} different"
    example = textwrap.shorten(repeats.example, 50, placeholder=" ...")
    yield "", f"most frequent: {what} {example!r}, {repeats.example_images:,} images"
