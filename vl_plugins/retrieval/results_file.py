"""A CSV file with a row for each model and protocol, to which evaluations are appended."""

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vl_plugins.data.files import write_file
from vl_plugins.errors import UserError

__all__ = ["append_rows", "is_finished", "read_rows"]

IDENTITY = ("checkpoint", "checkpoint_sha256", "shards", "max_captions", "precision")
"""Columns that tell what was evaluated; the column ``protocol`` tells how."""

# Names of a protocol's results, where there are several.
RESULTS = {"eccv": ("eccv-caption", "cxc")}


def read_rows(file: str | Path) -> list[dict[str, str]]:
    """Return the rows of a file, none if there is no such file.

    Raises:
        UserError: it is not a file of :func:`append_rows`, or cannot be read.
    """
    file = Path(file)
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    rows = list(csv.DictReader(io.StringIO(text)))
    if text and not {"name", "protocol", *IDENTITY} <= {*text.splitlines()[0].split(",")}:
        raise UserError(
            f"{file} is not a file of --csv: its first line must name the columns name, protocol, checkpoint"
        )
    return rows


def is_finished(rows: Iterable[Mapping[str, str]], identity: Mapping[str, Any], protocols: Iterable[str]) -> bool:
    """Return whether there are results of the same data and model by all these protocols."""
    found = {row["protocol"] for row in rows if _identity(row) == _identity(identity)}
    return all(found.issuperset(RESULTS.get(protocol, (protocol,))) for protocol in protocols)


def append_rows(file: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to a file, which then has their columns too; it is replaced as a whole.

    Raises:
        UserError: the file cannot be read or written.
    """
    rows = [*read_rows(file), *rows]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, dict.fromkeys(name for row in rows for name in row))
    writer.writeheader()
    writer.writerows(rows)
    write_file(Path(file), text.getvalue().encode())


def _identity(row: Mapping[str, Any]) -> list[str]:
    return ["" if row.get(name) is None else str(row[name]) for name in IDENTITY]
