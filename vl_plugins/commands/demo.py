"""``vl-plugins demo``: the whole way from annotations to a table, on pictures that are drawn on the spot.

It types no private shortcut: every step is a command that the user can repeat on COCO, and is printed before it runs.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from vl_plugins.errors import UserError
from vl_plugins.optional import require

__all__ = ["register", "run"]

# The flags in which the runs differ. Without --loss it is open_clip's own; both choose captions alike.
RUNS = {
    "clip": ["--captions-per-image", "random"],
    "unified": ["--captions-per-image", "random", "--loss", "unified", "--loss-kwargs", "margin=0.2", "scale=50"],
}
TRAINING_LOG = re.compile(r"Train Epoch: (?P<epoch>\d+) \[.*\((?P<percent>\d+)%\)\]")
PROGRESS_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed} elapsed, {remaining} left"


def register(subparsers) -> None:
    """Add the ``demo`` subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="train a tiny CLIP with open_clip's loss and with the Unified loss, and compare",
        description="Draws a set of scenes with five captions each, writes shards, trains the model vl-tiny on the CPU "
        "once with open_clip's own loss and once with the Unified loss, same seed and steps, and compares them on the "
        "test split: a table and a plot. Takes a few minutes on two cores.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for all that it makes (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=16, help="epochs of each run (default: %(default)s)")
    parser.add_argument("--train-images", type=int, default=2048, help="scenes to train on (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the scenes and of both runs (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; every step's command is printed first."""
    for module in ("open_clip", "webdataset"):
        require(module, extra="open-clip")
    require("matplotlib", extra="eval")
    from vl_plugins.retrieval import format_metrics_table

    out = _fresh_folder(arguments.out)
    scenes = f"toy --out {out}/toy --seed {arguments.seed} --train {arguments.train_images}"
    _command("vl-plugins", *scenes.split())
    shards = f"shards coco --annotations {out}/toy/dataset_toy.json --images {out}/toy --out {out}/shards"
    _command("vl-plugins", *shards.split(), "--samples-per-shard", "512")

    results = {}
    for name, loss_flags in RUNS.items():
        _train(name, loss_flags, arguments)
        results[name] = _evaluate(name, arguments)
    plot = out / "training.png"
    runs = [f"{name}={out}/logs/{name}" for name in RUNS]
    _command("vl-plugins", "plot", "training", *runs, "--out", str(plot))

    print(f"\nTest split after {arguments.epochs} epochs, recalls in percent:\n")
    print(format_metrics_table(results))
    print(f"\nRSUM and similarities over the epochs: {plot}")
    return 0


def _fresh_folder(out: Path) -> Path:
    """Empty the folder of an earlier demo; refuse any other folder that holds something."""
    marker = out / ".vl-plugins-demo"
    if marker.exists():
        shutil.rmtree(out)
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists and was not made by the demo; name a new folder")
    out.mkdir(parents=True)
    marker.touch()
    return out


def _train(name: str, loss_flags: list[str], arguments: argparse.Namespace) -> None:
    """Run one training with a progress bar made from the trainer's own log lines."""
    from tqdm import tqdm

    out = arguments.out
    command = [
        *("python", "-m", "vl_plugins.integrations.open_clip", "--config", "toy_vl_tiny.yaml"),
        *("--train-data", _shards(out, "train"), "--val-data", _shards(out, "val")),
        *("--epochs", str(arguments.epochs), "--seed", str(arguments.seed)),
        *("--logs", f"{out}/logs", "--name", name, *loss_flags),
    ]
    _announce(command)
    log = out / f"{name}.log"
    with (
        log.open("w") as log_file,
        subprocess.Popen(
            [sys.executable, *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
        tqdm(total=100 * arguments.epochs, desc=f"training {name}", unit="%", bar_format=PROGRESS_BAR) as bar,
    ):
        try:
            for line in process.stdout:
                log_file.write(line)
                if step := TRAINING_LOG.search(line):
                    bar.update(100 * int(step["epoch"]) + int(step["percent"]) - bar.n)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        ending = "".join(log.read_text().splitlines(keepends=True)[-15:])
        raise UserError(f"training {name} failed with exit code {process.returncode}; the end of {log}:\n{ending}")


def _evaluate(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    checkpoint = f"{arguments.out}/logs/{name}/checkpoints/epoch_{arguments.epochs}.pt"
    shards = _shards(arguments.out, "test")
    output = _command(
        *("vl-plugins", "evaluate", "--model", "vl-tiny", "--checkpoint", checkpoint, "--shards", shards),
        *("--device", "cpu", "--json"),
        capture=True,
    )
    return json.loads(output)


def _shards(out: Path, split: str) -> str:
    """Name all shards of a split in brace notation."""
    last = max(out.glob(f"shards/toy-{split}-*.tar")).stem.rpartition("-")[2]
    first = "0" * len(last)
    return f"{out}/shards/toy-{split}-" + (f"{{{first}..{last}}}.tar" if last != first else f"{first}.tar")


def _command(*command: str, capture: bool = False) -> str | None:
    """Print a ``vl-plugins`` command and run it with this interpreter; return its output where it is captured."""
    _announce(command)
    finished = subprocess.run(
        [sys.executable, "-m", "vl_plugins.cli", *command[1:]], stdout=subprocess.PIPE if capture else None, text=True
    )
    if finished.returncode:
        raise UserError(f"{command[1]} failed with exit code {finished.returncode}")
    return finished.stdout


def _announce(command) -> None:
    print(f"\n$ {shlex.join(command)}", flush=True)
