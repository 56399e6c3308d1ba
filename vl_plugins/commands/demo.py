"""``vl-plugins demo``: the whole way from annotations to a table, on pictures that are drawn on the spot.

It types no private shortcut: every step is a command that the user can repeat on COCO, and is printed before it runs.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vl_plugins.commands.shards import brace_pattern
from vl_plugins.errors import UserError, require

__all__ = ["register", "run"]

# The flags in which the runs differ. Without --loss it is open_clip's own, which takes one caption of an image.
ALL_CAPTIONS = ["--captions-per-image", "all"]
RUNS = {
    "clip": ["--captions-per-image", "random"],
    "unified": ["--loss", "unified", "--loss-kwargs", "margin=0.2", "scale=learned", *ALL_CAPTIONS],
    "sets": [
        *("--head", "set", "--head-kwargs", "num_slots=4", "num_iters=4", "hidden_dim=256"),
        *("--loss", "smooth_chamfer", "--loss-kwargs", "base=unified", "scale=learned", *ALL_CAPTIONS),
    ],
}
SPREAD = "With other seeds it differs by 10 to 20: docs/measured.md has five seeds, and intervals."
TRAINING_LOG = re.compile(r"Train Epoch: (?P<epoch>\d+) \[.*\((?P<percent>\d+)%\)\]")
PROGRESS_BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed} elapsed, {remaining} left"


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``demo`` subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="train a tiny CLIP with three losses and compare them",
        examples=["vl-plugins demo"],
        description="Train a tiny CLIP on drawn scenes with open_clip's loss, with the Unified loss, and with sets of "
        "embeddings, and compare them in a table, a plot and a report. Takes three minutes on two cores.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for all that it makes (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=8, help="epochs of each run (default: %(default)s)")
    parser.add_argument("--train-images", type=int, default=2048, help="scenes to train on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the scenes and of the runs (default: %(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; every step's command is printed first."""
    for module in ("open_clip", "webdataset"):
        require(module, extra="open-clip")
    require("matplotlib", extra="eval")
    from vl_plugins.retrieval import format_metrics_table

    out = _fresh_folder(arguments.out)
    counts = ["--seed", str(arguments.seed), "--train", str(arguments.train_images), "--test", "1000"]
    _command("vl-plugins", "toy", "--out", f"{out}/toy", *counts)
    source = ["--annotations", f"{out}/toy/dataset_toy.json", "--images", f"{out}/toy"]
    _command("vl-plugins", "shards", "coco", *source, "--out", f"{out}/shards", "--samples-per-shard", "512")

    _train_all(arguments)
    plot, report = out / "training.png", out / "report.html"
    runs = [f"{name}={out}/logs/{name}" for name in RUNS]
    _command("vl-plugins", "plot", "training", *runs, "--out", str(plot))
    results = _evaluate_all(arguments, report)

    print(f"\nTest split after {arguments.epochs} epochs, recalls in percent:\n")
    print(format_metrics_table(results))
    rsums = {name: result["rsum"] for name, result in results.items()}
    print("\nRSUM against clip: " + ", ".join(f"{name} {rsums[name] - rsums['clip']:+.1f}" for name in list(rsums)[1:]))
    print(SPREAD)
    print(f"\nRSUM and similarities over the epochs: {plot}")
    print(f"Report with examples: {report}")
    return 0


def _fresh_folder(out: Path) -> Path:
    """Empty the folder of an earlier demo; refuse any other folder that holds something."""
    marker = out / ".vl-plugins-demo"
    if marker.exists():
        shutil.rmtree(out)
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists and was not made by the demo; name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    marker.touch()
    return out


def _train_all(arguments: argparse.Namespace) -> None:
    """Run the trainings side by side, one core each, with a progress bar made from the trainer's own log lines."""
    from tqdm import tqdm

    commands = {name: _training_command(name, flags, arguments) for name, flags in RUNS.items()}
    for command in commands.values():
        _announce(command)
    # Two threads of one training beside other busy processes are slower than one.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = {
        name: subprocess.Popen(
            [sys.executable, *command[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for name, command in commands.items()
    }
    total = 100 * arguments.epochs * len(processes)
    try:
        with (
            tqdm(total=total, desc=f"training {' and '.join(processes)}", bar_format=PROGRESS_BAR) as bar,
            ThreadPoolExecutor(len(processes)) as pool,
        ):
            list(pool.map(lambda name: _follow(processes[name], arguments.out / f"{name}.log", bar), processes))
    except BaseException:
        for process in processes.values():
            process.terminate()
        raise


def _training_command(name: str, flags: list[str], arguments: argparse.Namespace) -> list[str]:
    out = arguments.out
    return [
        *("python", "-m", "vl_plugins.integrations.open_clip", "--config", "toy.yaml"),
        *("--train-data", _shards(out, "train"), "--val-data", _shards(out, "val")),
        *("--epochs", str(arguments.epochs), "--seed", str(arguments.seed)),
        *("--logs", f"{out}/logs", "--name", name, *flags),
    ]


def _follow(process: subprocess.Popen, log: Path, bar) -> None:
    """Write what a training prints to ``log``, and move the bar by one for each percent of each epoch."""
    done = 0
    with log.open("w") as log_file:
        for line in process.stdout or ():
            log_file.write(line)
            if step := TRAINING_LOG.search(line):
                now = 100 * int(step["epoch"]) + int(step["percent"])
                bar.update(now - done)
                done = now
    if process.wait():
        ending = "".join(log.read_text().splitlines(keepends=True)[-15:])
        raise UserError(f"{log.stem} failed with exit code {process.returncode}; the end of {log}:\n{ending}")


def _evaluate_all(arguments: argparse.Namespace, report: Path) -> dict[str, dict[str, float]]:
    checkpoints = [f"{name}={arguments.out}/logs/{name}/checkpoints/epoch_{arguments.epochs}.pt" for name in RUNS]
    output = _command(
        *("vl-plugins", "evaluate", "--checkpoint", *checkpoints, "--shards", _shards(arguments.out, "test")),
        *("--device", "cpu", "--report", str(report), "--json"),
        capture=True,
    )
    return {result["name"]: result["metrics"]["plain"] for result in json.loads(output)["results"]}


def _shards(out: Path, split: str) -> str:
    """Name all shards of a split in brace notation."""
    return brace_pattern(sorted(map(str, out.glob(f"shards/toy-{split}-*.tar"))))


def _command(*command: str, capture: bool = False) -> str:
    """Print a ``vl-plugins`` command and run it; return its output where it is captured."""
    from vl_plugins.cli import main

    _announce(command)
    output = io.StringIO()
    with contextlib.redirect_stdout(output) if capture else contextlib.nullcontext():
        status = main(command[1:])
    if status:
        raise UserError(f"{command[1]} failed with exit code {status}")
    return output.getvalue()


def _announce(command) -> None:
    print(f"\n$ {shlex.join(command)}", flush=True)
