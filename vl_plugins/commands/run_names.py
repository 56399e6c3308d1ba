"""Short names of training runs, for tables and plots."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vl_plugins.errors import UserError

__all__ = ["run_names", "split_name"]

FEATURES = (".npz", ".safetensors")  # named by the file, as they need not lie in the folder of a run


def split_name(argument: str) -> tuple[str, str]:
    """Split ``NAME=PATH``; the name of a path alone, which may hold ``=`` itself, is empty.

    Raises:
        UserError: the name or the path is missing.
    """
    name, separator, path = argument.partition("=")
    if not separator or os.path.exists(argument):
        return "", argument
    if not name or not path:
        raise UserError(f"a run is NAME=PATH or a path, got {argument!r}")
    return name, path


def run_names(runs: Sequence[tuple[str, str]]) -> list[str]:
    """Name runs, given as name and path, where the name is empty.

    A run is named after its folder, and so is a checkpoint, ``vit`` for ``logs/vit/checkpoints/epoch_9.pt``; where two
    would have the same name, each is ``vit/epoch_9``, or else its whole path. Anything that does not exist keeps its
    name.
    """
    candidates = [[name] * 3 if name else _candidates(path) for name, path in runs]
    names = [short for short, *_ in candidates]
    for longer in (1, 2):
        counts = Counter(names)
        names = [name if counts[name] == 1 else three[longer] for name, three in zip(names, candidates, strict=True)]
    return names


def _candidates(path: str) -> list[str]:
    file = Path(path).resolve()
    if file.is_dir():
        return [file.name, path, path]
    if not file.is_file():
        return [path] * 3
    folder = (file.parents[1] if file.parent.name == "checkpoints" else file.parent).name
    return [file.stem if file.suffix in FEATURES else folder, f"{folder}/{file.stem}", path]
