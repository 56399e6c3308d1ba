"""Short names of training runs, for tables and plots."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vl_plugins.errors import UserError

__all__ = ["run_names"]

FEATURES = (".npz", ".safetensors")
# Of a run of open_clip, above the folder of its checkpoints; of the PML trainer, beside them.
PARAMS, RESULTS = "params.txt", "results.jsonl"


def run_names(runs: Sequence[str]) -> dict[str, str]:
    """Return the paths of runs by name, given as ``NAME=PATH`` or as a path, which may hold ``=`` itself.

    A run without a name is named after its folder, and so is a checkpoint in it, ``vit`` for
    ``logs/vit/checkpoints/epoch_9.pt``. Features, and checkpoints outside of runs, are named after their file. Where
    two would have the same name, each has its whole path. What does not exist keeps its name.

    Raises:
        UserError: two runs have one name.
    """
    pairs = []
    for run in runs:
        name, separator, path = run.partition("=")
        pairs.append((name, path) if separator and not os.path.exists(run) else (_short_name(run), run))
    counts = Counter(name for name, _ in pairs)
    named = [(name if counts[name] == 1 or path not in runs else path, path) for name, path in pairs]
    if twice := [name for name, count in Counter(name for name, _ in named).items() if count > 1]:
        raise UserError(f"two runs are called {twice[0]!r}; name them: NAME=PATH OTHER=PATH")
    return dict(named)


def _short_name(path: str) -> str:
    file = Path(os.path.abspath(path))  # links keep their names
    if not file.exists():
        return path
    if file.suffix in FEATURES:
        return file.stem
    folder = file if file.is_dir() else file.parent
    run = folder.parent if folder.name == "checkpoints" else folder
    is_run = file.is_dir() or (run / PARAMS).is_file() or (folder / RESULTS).is_file()
    return run.name if is_run else file.stem
