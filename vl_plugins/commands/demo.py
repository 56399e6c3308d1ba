"""``vl-plugins demo``: the whole way from annotations to a table, on pictures that are drawn on the spot.

Every step is a command that the user can repeat on COCO, and is printed before it runs.
"""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from vl_plugins.commands.shards import brace_pattern
from vl_plugins.errors import UserError, require

__all__ = ["register", "run"]

SHARDS = """\
vl-plugins toy --out {out}/toy --seed {seed} --train {train_images} --test 1000
vl-plugins shards coco --annotations {out}/toy/dataset_toy.json --images {out}/toy --out {out}/shards
"""
TRAINING = (
    "python -m vl_plugins.integrations.open_clip --config toy.yaml --train-data {train} --val-data {val} "
    "--epochs {epochs} --seed {seed} --logs {out}/logs --name {name} "
)
# The flags in which the runs differ. Without --loss it is open_clip's own, which takes one caption of an image.
RUNS = {
    "clip": "--captions-per-image random",
    "unified": "--loss unified --loss-kwargs margin=0.2 scale=learned --captions-per-image all",
    "sets": "--head set --head-kwargs num_slots=4 num_iters=4 hidden_dim=256 "
    "--loss smooth_chamfer --loss-kwargs base=unified scale=learned --captions-per-image all",
}
LOGS = "clip={out}/logs/clip unified={out}/logs/unified sets={out}/logs/sets"
PLOT = f"vl-plugins plot training {LOGS} --out {{out}}/training.png"
EVALUATION = f"vl-plugins evaluate --checkpoint {LOGS} --shards {{test}} --device cpu --report {{out}}/report.html"
SPREAD = "With other seeds RSUM differs by 10 to 20: docs/measured.md has five seeds, and intervals."


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``demo`` command."""
    parser = subparsers.add_parser(
        "demo",
        help="train a tiny CLIP with three losses and compare them",
        examples=["vl-plugins demo"],
        description="Train a tiny CLIP on drawn scenes with open_clip's loss, with the Unified loss, and with sets of "
        "embeddings, and compare them in a table, a plot and a report. Takes some minutes on two cores.",
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="a new folder (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of each run (default: %(default)s)")
    parser.add_argument("--train-images", type=int, default=2048, help="scenes to train on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the scenes and of the runs (default: %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; every step's command is printed first."""
    for module, extra in (("open_clip", "open-clip"), ("matplotlib", "eval"), ("jinja2", "eval")):
        require(module, extra=extra)
    out = arguments.out
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty: delete it, or name a new folder")
    values = vars(arguments) | {"out": shlex.quote(str(out))}
    for command in SHARDS.splitlines():
        print(_run(command.format(**values)), end="")
    for split in ("train", "val", "test"):
        values[split] = shlex.quote(brace_pattern(sorted(map(str, out.glob(f"shards/toy-{split}-*.tar")))))
    for name, flags in RUNS.items():
        _run((TRAINING + flags).format(name=name, **values), out / f"{name}.log")
    print(_run(PLOT.format(**values)), end="")
    print(f"{_run(EVALUATION.format(**values))}\nRecalls are in percent, after {arguments.epochs} epochs. {SPREAD}\n")
    print(f"RSUM and similarities over the epochs: {out}/training.png\nReport with examples: {out}/report.html")
    return 0


def _run(command: str, log: Path | None = None) -> str:
    """Print a command and run it; return its output, or write it to a log, with that on standard error."""
    print(f"\n$ {command}" + (f"  # writes {log}" if log else ""), flush=True)
    words = [sys.executable, *shlex.split(command.replace("vl-plugins", "python -m vl_plugins.cli", 1))[1:]]
    with open(log or os.devnull, "w") as file:
        streams: dict = {"stdout": file, "stderr": file} if log else {"stdout": subprocess.PIPE}
        finished = subprocess.run(words, **streams, text=True)
    if finished.returncode:
        ending = f"; the end of {log}:\n{log.read_text()[-1500:]}" if log else ""
        raise UserError(f"the command above failed with exit code {finished.returncode}{ending}")
    return finished.stdout or ""
