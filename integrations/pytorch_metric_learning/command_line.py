"""``python -m vl_plugins.integrations.pytorch_metric_learning``: a training from a configuration file."""

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vl_plugins.errors import UserError, exit_status, require
from vl_plugins.integrations.key_values import KeyValues, Parser, literal

__all__ = ["build_parser", "main", "overrides"]

EXAMPLES = (
    "python -m vl_plugins.integrations.pytorch_metric_learning \\\n"
    "    --config vsepp_flickr30k.yaml --loss unified --out runs/unified",
    "torchrun --nproc_per_node 8 \\\n"
    "    -m vl_plugins.integrations.pytorch_metric_learning -- \\\n"
    "    --config vsepp_flickr30k.yaml --precision bf16",
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python -m vl_plugins.integrations.pytorch_metric_learning",
        usage="%(prog)s [options]",
        examples=EXAMPLES,
        description="Train an image encoder and a text encoder as described in a YAML file.",
    )
    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--config",
        required=True,
        metavar="FILE.yaml",
        help="configuration file, or the name of one in configs/pytorch_metric_learning",
    )
    what.add_argument("--train-data", metavar="SHARDS", help="training shards; replaces data.train")
    what.add_argument("--val-data", metavar="SHARDS", help="validation shards; replaces data.val")
    what.add_argument(
        "--loss",
        metavar="NAME",
        help="a loss of `vl-plugins losses`, a class of pytorch-metric-learning, or package.module:Class",
    )
    what.add_argument(
        "--loss-kwargs", action=KeyValues, help="options of the loss; without --loss, added to those in the file"
    )
    what.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="change other values of the file, such as data.batch_size=64 or stages.0.optimizer.lr=1e-4",
    )
    how = parser.add_argument_group("how to run")
    how.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="output folder, for one run at a time (default: runs/<name of the file>)",
    )
    how.add_argument(
        "--resume", action="store_true", help="resume the run in --out, if any, after its last complete epoch"
    )
    how.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        help="precision of the models, not of the losses (default: that of accelerate launch, or fp32)",
    )
    how.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if available; one GPU per process)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Train; return 0, 2 after one line on standard error when the input is wrong, or 130 after Ctrl-C."""
    interrupted = "interrupted; --resume goes on after the last whole epoch"
    return exit_status("vl_plugins", lambda: _run(build_parser().parse_args(argv)), interrupted)


def _run(arguments: argparse.Namespace) -> int:
    require("yaml", extra="pml")
    if os.environ.get("RANK", "0") != "0":
        os.environ.setdefault("TQDM_DISABLE", "1")  # one progress bar is enough
    import torch

    from vl_plugins.integrations.pytorch_metric_learning.config import read_config
    from vl_plugins.integrations.pytorch_metric_learning.processes import start_processes
    from vl_plugins.integrations.pytorch_metric_learning.runs import Run
    from vl_plugins.integrations.torch_files import check_device

    config = read_config(arguments.config, overrides(arguments))
    cpu = arguments.device == "cpu" or not torch.cuda.is_available()
    processes = start_processes(arguments.precision, cpu=cpu)
    name = arguments.device or ("cpu" if cpu else "cuda")
    if processes.count > 1 and name not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: with several processes each takes another GPU; give cpu or cuda")
    device = check_device("--device", name) if processes.count == 1 else processes.device
    _log_to_standard_error(processes.is_first)
    out = arguments.out or Path("runs") / Path(arguments.config).stem
    Run(config, out, device=device, resume=arguments.resume, processes=processes).train()
    processes.stop()
    return 0


def _log_to_standard_error(is_first: bool) -> None:
    # Without the messages of other packages.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s | %(message)s", datefmt="%Y-%m-%d,%H:%M:%S"))
    ours, host = logging.getLogger("vl_plugins"), logging.getLogger("PML")
    ours.setLevel(logging.INFO if is_first else logging.WARNING)
    host.setLevel(logging.WARNING)  # it announces each epoch, as does the progress bar
    for logger in (ours, host):
        logger.handlers = [handler]


def overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the command line that replace those of the file, by their path."""
    loss = None if arguments.loss is None else {"name": arguments.loss}
    values: dict[str, Any] = {"data.train": arguments.train_data, "data.val": arguments.val_data, "loss": loss}
    values |= {f"loss.{option}": value for option, value in arguments.loss_kwargs.items()}
    values = {path: value for path, value in values.items() if value is not None}
    for token in arguments.set:
        path, separator, value = token.partition("=")
        if not separator or not path:
            raise UserError(f"--set: expected key.path=value, got {token!r}")
        values[path] = literal(value)
    return values
