"""Short names of training runs, for tables and plots."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vl_plugins.errors import UserError

__all__ = ["ENSEMBLE", "named_runs", "run_names"]

ENSEMBLE = "ensemble"  # all models together; no run may have this name
FEATURES = (".npz", ".safetensors")
# Of a run of open_clip, above the folder of its checkpoints; of the PML trainer, beside them.
PARAMS, RESULTS = "params.txt", "results.jsonl"


def run_names(runs: Sequence[str]) -> dict[str, str]:
    """Return the paths of runs by name, as :func:`named_runs` names them.

    Raises:
        UserError: two runs have one name.
    """
    pairs = named_runs(runs)
    paths: dict[str, str] = {}
    for name, path in pairs:
        if name in paths:
            raise UserError(f"two runs are called {name!r}; name them: NAME=PATH OTHER=PATH")
        paths[name] = path
    return paths


def named_runs(runs: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, path) of runs, given as ``NAME=PATH`` or as a path, which may hold ``=`` itself.

    A run without a name is named after its folder, and so is a checkpoint in it, ``vit`` for
    ``logs/vit/checkpoints/epoch_9.pt``. Features, and checkpoints outside of runs, are named after their file. If such
    a name occurs again, each of these runs has its whole path. What does not exist keeps its name. Names that are given
    may occur several times.
    """
    pairs = []
    counts = Counter[str]()
    for run in runs:
        name, path = _short_name(run), run
        if _is_named(run):
            name, _, path = run.partition("=")
        pairs.append((name, path))
        counts[name] += 1
    for place, (name, path) in enumerate(pairs):
        if counts[name] > 1 and path in runs:
            pairs[place] = path, path
    return pairs


def _is_named(run: str) -> bool:
    """Return whether a run is ``NAME=PATH``, and not a path that holds ``=``.

    What is there decides. A folder before ``=``, or a number after it, tells a mistyped path, such as
    ``runs/epoch=3-step=999.ckpt``: the error shows all of it.
    """
    name, separator, path = run.partition("=")
    if not separator or os.path.exists(run):
        return False
    if os.path.exists(path):
        return True
    return not os.path.dirname(name) and not re.match(r"[-+.]?\d", path)


def _short_name(path: str) -> str:
    file = Path(os.path.abspath(path))  # links keep their names
    if not file.exists():
        return path
    if file.suffix in FEATURES:
        return file.stem
    folder = file if file.is_dir() else file.parent
    run = folder.parent if folder.name == "checkpoints" else folder
    if file.is_dir() or (run / PARAMS).is_file() or (folder / RESULTS).is_file():
        return run.name
    return file.stem
