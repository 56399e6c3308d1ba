"""``vl-plugins demo``: the whole way from annotations to a table, on pictures that are drawn on the spot.

Every step is a command that the user can repeat on COCO, and is printed before it runs.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

from vl_plugins.errors import UserError, require

__all__ = ["register", "run"]

SHARDS = """
vl-plugins toy --out {out}/toy --seed {seed} --train {train_images} --test 1000
vl-plugins shards coco --annotations {out}/toy/dataset_toy.json --images {out}/toy --out {out}/shards
"""
TRAINING = """python -m vl_plugins.integrations.open_clip --config toy.yaml --train-data '{train}' --val-data '{val}'
--epochs {epochs} --seed {seed} --logs {out}/logs --name {name} """
# The flags in which the runs differ. Without --loss it is open_clip's own, which takes one caption of an image.
RUNS = {
    "clip": "--captions-per-image random",
    "unified": "--loss unified --loss-kwargs margin=0.2 scale=learned --captions-per-image all",
    "sets": "--head set --head-kwargs num_slots=4 num_iters=4 hidden_dim=256 "
    "--loss smooth_chamfer --loss-kwargs base=unified scale=learned --captions-per-image all",
}
EVALUATION = """
vl-plugins plot training clip={out}/logs/clip unified={out}/logs/unified sets={out}/logs/sets --out {out}/training.png
vl-plugins evaluate --checkpoint clip={out}/logs/clip unified={out}/logs/unified sets={out}/logs/sets
 --shards '{test}' --device cpu --report {out}/report.html --json
"""
LOG_LINE = re.compile(r"Train Epoch: (\d+) \[.*\((\d+)%\)\]")
SPREAD = "With other seeds it differs by 10 to 20: docs/measured.md has five seeds, and intervals."


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
    from vl_plugins.retrieval import format_metrics_table

    if arguments.out.exists() and any(arguments.out.iterdir()):
        raise UserError(f"--out {arguments.out} is not empty: delete it, or name a new folder")
    values = vars(arguments)
    for command in SHARDS.strip().splitlines():
        _run(command.format(**values))
    values |= {split: f"{arguments.out}/shards/{_pattern(arguments.out, split)}" for split in ("train", "val", "test")}
    for name, flags in RUNS.items():
        _train((TRAINING.replace("\n", " ") + flags).format(name=name, **values), arguments, name)
    plot, evaluation = EVALUATION.strip().replace("\n ", " ").splitlines()
    _run(plot.format(**values))
    found = json.loads(_run(evaluation.format(**values), capture=True))["results"]
    results = {result["name"]: result["metrics"]["plain"] for result in found}
    print(f"\nTest split after {arguments.epochs} epochs, recalls in percent:\n\n{format_metrics_table(results)}")
    leads = (
        f"{name} {result['rsum'] - results['clip']['rsum']:+.1f}" for name, result in results.items() if name != "clip"
    )
    print(f"\nRSUM against clip: {', '.join(leads)}\n{SPREAD}")
    print(f"\nRSUM and similarities over the epochs: {arguments.out}/training.png")
    print(f"Report with examples: {arguments.out}/report.html")
    return 0


def _pattern(out: Path, split: str) -> str:
    """Name all shards of a split in brace notation."""
    first, *_, last = [*sorted(file.stem[-6:] for file in out.glob(f"shards/toy-{split}-*.tar")) * 2]
    return f"toy-{split}-{first}.tar" if first == last else f"toy-{split}-{{{first}..{last}}}.tar"


def _run(command: str, capture: bool = False) -> str:
    """Print a command and run it; return its output where that is captured."""
    print(f"\n$ {command}", flush=True)
    words = [sys.executable, "-m", *shlex.split(command.replace("vl-plugins", "vl_plugins.cli", 1))]
    finished = subprocess.run(words, stdout=subprocess.PIPE if capture else None, text=True, check=False)
    if finished.returncode:
        raise UserError(f"the command above failed with exit code {finished.returncode}")
    return finished.stdout


def _train(command: str, arguments: argparse.Namespace, name: str) -> None:
    """Print a training's command and run it, with a progress bar made from the log that it writes to a file."""
    print(f"\n$ {command}", flush=True)
    log = arguments.out / f"{name}.log"
    words = [sys.executable, *shlex.split(command)[1:]]
    with (
        log.open("w") as log_file,
        tqdm(total=100 * arguments.epochs, desc=name, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}") as bar,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        for line in process.stdout or ():
            log_file.write(line)
            if step := LOG_LINE.search(line):
                bar.update(100 * int(step[1]) + int(step[2]) - bar.n)
    if process.returncode:
        ending = "".join(log.read_text().splitlines(keepends=True)[-15:])
        raise UserError(f"{name} failed with exit code {process.returncode}; the end of {log}:\n{ending}")
