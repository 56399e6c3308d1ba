"""The numbers of a benchmark as text, Markdown and CSV."""

import csv
import io
import textwrap
from collections.abc import Sequence

from vl_plugins.benchmarks.contestants import Skipped
from vl_plugins.benchmarks.measurement import Measurement, Result, describe_setting, ratio
from vl_plugins.utils.tables import align_columns

__all__ = ["csv_table", "markdown_tables", "skipped_lines", "text_tables"]

WIDTH = 100

COLUMNS = (
    "machine",
    "clock",
    "rounds",
    "dtype",
    "batch_size",
    "dimension",
    "elements",
    "contestant",
    "milliseconds",
    "least_milliseconds",
    "most_milliseconds",
    "megabytes",
    "product_share",
    "copy_share",
    "peer",
    "time_ratio",
    "least_time_ratio",
    "most_time_ratio",
    "memory_ratio",
)


def text_tables(result: Result) -> str:
    """Return tables for a terminal."""
    lines = [*_heading(result)]
    for tables in _tables(result):
        for table in tables:
            lines += ["", *("  ".join(row).rstrip() for row in align_columns(table))]
    return "\n".join([*lines, *_with_gap(skipped_lines(result))])


def markdown_tables(result: Result) -> str:
    """Return the same tables in Markdown."""
    lines = [*_heading(result)]
    for tables in _tables(result):
        for header, *rows in tables:
            lines += ["", _markdown_row(header), "|---|" + "---:|" * (len(header) - 1), *map(_markdown_row, rows)]
    return "\n".join([*lines, *_with_gap([f"- {line}" for line in skipped_lines(result)])]) + "\n"


def csv_table(result: Result) -> str:
    """Return one line for each of ours with each peer, and for each of the others alone; see :data:`COLUMNS`.

    Numbers are not rounded. Ratios are ours divided by the peer's, of time in the same round.
    """
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(COLUMNS)
    for setting in result.settings():
        pairs = result.pairs(setting)
        for measurement in result.at(setting):
            own = [
                result.machine,
                result.clock,
                result.rounds,
                setting.dtype,
                setting.batch_size,
                setting.dimension,
                setting.elements,
                measurement.name,
                *(1e3 * value for value in (measurement.median, min(measurement.seconds), max(measurement.seconds))),
                measurement.peak_bytes / 1e6,
                measurement.product_share,
                measurement.copy_share,
            ]
            compared = [[other.name, *ratio(ours, other)] for ours, other in pairs if ours is measurement]
            writer.writerows([*own, *others] for others in compared or [[None] * 5])
    return stream.getvalue()


def skipped_lines(result: Result) -> list[str]:
    """Return what was not measured, a line for each contestant and reason; with the settings, unless it was all."""
    settings = set(result.settings()) | {setting for setting, _ in result.skipped}
    places: dict[Skipped, list[str]] = {}
    for setting, skipped in result.skipped:
        places.setdefault(skipped, []).append(describe_setting(setting))
    lines = []
    for skipped, where in places.items():
        at = "" if len(where) == len(settings) else f" ({'; '.join(where)})"
        lines.append(f"skipped {skipped.name}{at}: {skipped.reason}")
    return lines


def _heading(result: Result) -> list[str]:
    texts = [
        f"{result.machine}.",
        f"Forward and backward, {result.clock}, median of {result.rounds} rounds. MB: the most that was allocated at "
        "once, gradients included. products, copies: which part of the time the fewest matrix products, and reading "
        "embeddings and writing gradients once, would take at the rates measured here.",
    ]
    if result.peers:
        texts[1] += " Ratios: ours / other in the same round, median, least and most; and of the MB."
    return [line for text in texts for line in textwrap.wrap(text, WIDTH)]


def _with_gap(lines: list[str]) -> list[str]:
    return ["", *lines] if lines else []


def _tables(result: Result) -> list[list[list[list[str]]]]:
    """Return for each setting a table of the contestants and, where there are any, one of the ratios."""
    tables = []
    for setting in result.settings():
        title = describe_setting(setting)
        of_setting = [[[title, "ms", "least", "most", "MB", "products", "copies"], *map(_row, result.at(setting))]]
        pairs = result.pairs(setting)
        if pairs:
            rows = [
                [
                    f"{ours.name} / {other.name}",
                    *(_significant(value) for value in compared[:3]),
                    _significant(compared.memory),
                ]
                for ours, other in pairs
                for compared in [ratio(ours, other)]
            ]
            of_setting.append([["", "time", "least", "most", "memory"], *rows])
        tables.append(of_setting)
    return tables


def _row(measurement: Measurement) -> list[str]:
    milliseconds = (1e3 * value for value in (measurement.median, min(measurement.seconds), max(measurement.seconds)))
    shares = (measurement.product_share, measurement.copy_share)
    return [
        measurement.name,
        *map(_significant, milliseconds),
        _significant(measurement.peak_bytes / 1e6),
        *("-" if share is None else f"{share:.3f}" for share in shares),
    ]


def _significant(value: float) -> str:
    """Return three digits or more, without an exponent.

    >>> [_significant(value) for value in (0.012345, 0.5, 12.345, 12345.6)]
    ['0.0123', '0.500', '12.3', '12,346']
    """
    if value >= 100:
        return f"{value:,.0f}"
    decimals = 2
    while decimals < 6 and abs(value) < 10 ** (2 - decimals):
        decimals += 1
    return f"{value:.{decimals - (value >= 10)}f}"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
