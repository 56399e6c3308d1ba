"""Short names of training runs, for tables and plots."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vl_plugins.errors import UserError

__all__ = ["run_names"]

FEATURES = (".npz", ".safetensors")  # named by the file, as they need not lie in the folder of a run


def run_names(runs: Sequence[str]) -> dict[str, str]:
    """Return the paths of runs by name, given as ``NAME=PATH`` or as a path, which may hold ``=`` itself.

    A run without a name is named after its folder, and so is a checkpoint, ``vit`` for
    ``logs/vit/checkpoints/epoch_9.pt``; where two would have the same name, each is ``vit/epoch_9``, or else its whole
    path. What does not exist keeps its name.

    Raises:
        UserError: two runs have one name.
    """
    candidates, paths = [], []
    for run in runs:
        name, separator, path = run.partition("=")
        has_name = separator and not os.path.exists(run)
        candidates.append([name] * 3 if has_name else _candidates(run))
        paths.append(path if has_name else run)
    names = [short for short, *_ in candidates]
    for longer in (1, 2):
        counts = Counter(names)
        names = [name if counts[name] == 1 else three[longer] for name, three in zip(names, candidates, strict=True)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"two runs are called {twice[0]!r}; name them: NAME=PATH OTHER=PATH")
    return dict(zip(names, paths, strict=True))


def _candidates(path: str) -> list[str]:
    file = Path(path).resolve()
    if not file.exists():
        return [path] * 3
    folder = file if file.is_dir() else file.parent
    folder = folder.parent if folder.name == "checkpoints" else folder
    return [file.stem if file.suffix in FEATURES else folder.name, f"{folder.name}/{file.stem}", path]
