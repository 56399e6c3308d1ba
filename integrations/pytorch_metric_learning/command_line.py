"""``python -m vl_plugins.integrations.pytorch_metric_learning``: a training from a configuration file."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vl_plugins.errors import MALFORMED_CONTENT, UserError, exit_status, require, user_errors
from vl_plugins.integrations.command_lines import CommandParser, KeyValues

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
    parser = CommandParser(
        prog="python -m vl_plugins.integrations.pytorch_metric_learning",
        usage="%(prog)s [options]",
        examples=EXAMPLES,
        description="Train an image encoder and a text encoder as described in a YAML file.",
    )
    add = parser.add_argument_group("what to train").add_argument
    add("--config", required=True, metavar="FILE.yaml", help="a file, or the name of a recipe")
    add("--train-data", metavar="SHARDS", help="training shards; replaces data.train")
    add("--val-data", metavar="SHARDS", help="validation shards; replaces data.val")
    losses = "a loss of `vl-plugins losses`, a class of pytorch-metric-learning, or package.module:Class"
    add("--loss", metavar="NAME", help=losses)
    add("--loss-kwargs", action=KeyValues, help="options of the loss; without --loss, added to those in the file")
    values = "change other values, such as data.batch_size=64 or stages.0.optimizer.lr=1e-4"
    add("--set", nargs="+", action="extend", default=[], metavar="KEY.PATH=VALUE", help=values)
    add = parser.add_argument_group("how to run").add_argument
    add("--out", type=Path, metavar="FOLDER", help="output folder (default: runs/<name of the file>)")
    add("--resume", action="store_true", help="continue the run in --out, if any, after its last complete epoch")
    precision = "of the models, not of the losses (default: that of accelerate launch, or fp32)"
    add("--precision", choices=("fp32", "bf16", "fp16"), help=precision)
    add("--device", choices=("cpu", "cuda"), help="default: cuda if available, with a GPU per process, else cpu")
    trackers = "trackers of accelerate, such as tensorboard (default) and wandb"
    add("--report-to", nargs="+", default=["tensorboard"], metavar="NAME", help=trackers)
    return parser


def main(argv: Sequence[str]) -> int:
    """Train; return 0, 2 after one line on standard error when the input is wrong, or 130 after Ctrl-C."""
    interrupted = "interrupted; use --resume to continue from the last completed epoch"
    return exit_status("vl_plugins", lambda: _run(build_parser().parse_args(argv)), interrupted)


def _run(arguments: argparse.Namespace) -> None:
    for module in ("omegaconf", "accelerate", "tensorboard", "timm"):
        require(module, extra="pml")
    from vl_plugins.integrations.pytorch_metric_learning.config import read_config
    from vl_plugins.integrations.pytorch_metric_learning.run import Run, make_accelerator

    with user_errors(arguments.config, *MALFORMED_CONTENT):
        config = read_config(arguments.config, overrides(arguments))
    out = arguments.out or Path("runs") / Path(arguments.config).stem
    with user_errors("--precision, --device, --report-to or the settings of accelerate", ImportError):
        accelerator = make_accelerator(arguments.precision, out, arguments.device, arguments.report_to)
    logging.basicConfig(format="%(asctime)s | %(message)s", datefmt="%Y-%m-%d,%H:%M:%S")
    logging.getLogger("vl_plugins").setLevel(logging.INFO if accelerator.is_main_process else logging.WARNING)
    Run(config, out, accelerator, resume=arguments.resume).train()


def overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the command line that replace those of the file, by their path."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    loss = arguments.loss and {"name": arguments.loss}
    values: dict[str, Any] = {"data.train": arguments.train_data, "data.val": arguments.val_data, "loss": loss}
    values = {path: value for path, value in values.items() if value is not None}
    values |= {f"loss.{option}": value for option, value in arguments.loss_kwargs.items()}
    for token in arguments.set:
        path, separator, value = token.partition("=")
        if not separator:  # OmegaConf would set null
            raise UserError(f"--set: expected key.path=value, got {token!r}")
        with user_errors(f"--set {token}", OmegaConfBaseException):
            parsed: Any = OmegaConf.to_container(OmegaConf.create(f"value: {value}"), resolve=False)
        values[path] = parsed["value"]
    return values
