"""The launcher's flags on open_clip's own parser, and configuration files with flags of both."""

import argparse
import functools
import os
import textwrap
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from vl_plugins.errors import UserError, one_of, require, user_errors
from vl_plugins.integrations.command_lines import (
    CommandParser,
    KeyValues,
    add_caption_rule,
    add_max_image_pixels,
    find_config,
    read_yaml,
)
from vl_plugins.registry import check_registered

__all__ = [
    "DEFAULT_METRIC",
    "KINDS",
    "REFUSALS",
    "Refusal",
    "check_refusals",
    "default_options",
    "flag",
    "options_given",
    "parse_args",
]

EXAMPLES = (
    "python -m vl_plugins.integrations.open_clip \\\n"
    "    --model ViT-B-32-quickgelu --pretrained openai --lr 1e-5 --warmup 500 \\\n"
    "    --train-data 'shards/coco-train-{000000..000113}.tar' --loss unified",
    "torchrun --nproc_per_node 8 -m vl_plugins.integrations.open_clip -- \\\n"
    "    --config flickr30k_vit_l_14_336_unified.yaml",
)
KINDS = {
    "loss": (
        "a loss of `vl-plugins losses`, a class of pytorch-metric-learning, such as NTXentLoss, or "
        "package.module:Class (default: open_clip's)",
        "margin=0.2 scale=50; by default, scale is the model's own logit scale",
    ),
    "miner": ("a miner of pytorch-metric-learning, such as BatchHardMiner, or HardestNegativeMiner", "epsilon=0.1"),
    "reducer": ("a reducer of pytorch-metric-learning, such as AvgNonZeroReducer", "low=0.05"),
    "distance": (
        "a distance of pytorch-metric-learning, or for --head set: smooth_chamfer (default), chamfer, mil or "
        "match_probability",
        "alpha=16",
    ),
    "head": (
        "a head for both towers: set (a set of embeddings by slot attention) or linear (one layer)",
        "num_slots=4 num_iters=4 of set, dim=768 of linear",
    ),
}
"""Components by the flag that names one, with its help and that of the flag of its options, ``--<kind>-kwargs``."""


DEFAULT_METRIC = "rsum"
"""By which ``--save-best`` chooses an epoch."""


class Refusal(NamedTuple):
    """Options of open_clip that raise an error beside one of our flags, and why."""

    beside: str
    options: tuple[str, ...]
    reason: str


REFUSALS = (
    Refusal("--loss", ("siglip",), "it is another loss, here --loss siglip"),
    Refusal("--loss", ("distill_model",), "a distillation has a loss of its own"),
    Refusal("--loss", ("horovod",), "the processes exchange embeddings by torch.distributed"),
    Refusal("--loss", ("use_naflex",), "its batches vary in size"),
    Refusal("--loss", ("fsdp_checkpoint",), "a sharded checkpoint does not hold the loss"),
    Refusal("--head", ("torchscript", "trace"), "heads are parts of a model in Python"),
    Refusal("--head", ("use_bnb_linear",), "it would replace the layers of the heads"),
    Refusal("--head", ("distill_model",), "a teacher has no heads"),
    Refusal("--head set", ("imagenet_val", "imagenet_v2"), "a classifier compares single vectors"),
    Refusal(
        "--captions-per-image",
        ("dataset_resampled", "train_data_upsampling_factors"),
        "an epoch of our reader is a permutation of the images",
    ),
    Refusal(
        "--captions-per-image",
        ("length_bucketing", "bucket_chunk", "bucket_pool", "bucket_prefetch_pools"),
        "batches of our reader are drawn from all images",
    ),
    Refusal("--captions-per-image", ("use_naflex",), "our reader gives pictures of one size"),
    Refusal("--captions-per-image", ("json_text_key_probs",), "our reader chooses among the captions of an image"),
    Refusal("--captions-per-image", ("text_pad_multiple",), "our reader pads texts to the context length"),
    Refusal("--save-best", ("fsdp_checkpoint",), "a sharded checkpoint does not hold which epoch was the best"),
)
"""Some of the options exist in some versions of open_clip only."""

# Options of our reader that open_clip's does not have.
OURS = ("shuffle_window", "caption_lines", "caption_fields", "no_index", "on_error", "max_errors")
# Options of open_clip 4.x for the files and fields of a sample, which our reader has too.
SAMPLE_KEYS = ("text_key", "json_text_key", "image_key")
IMAGE_KEY = "jpg;png;jpeg;webp"


def parse_args(argv: Sequence[str]) -> Namespace:
    """Return the options of open_clip and of the launcher, as ``open_clip_train.params.parse_args`` returns its own.

    Raises:
        UserError: an unknown flag or configuration key, a value that does not fit, or a file that cannot be read.
        MissingExtraError: open_clip's trainer is not installed.
    """
    params = require("open_clip_train.params", extra="open-clip")
    with_our_parser = Namespace(**{**vars(argparse), "ArgumentParser": _Parser})
    with mock.patch.object(params, "argparse", with_our_parser), user_errors("command line"):
        return params.parse_args(list(argv))


def flag(option: str) -> str:
    """Return the flag of an option: ``--batch-size`` of ``batch_size``."""
    return "--" + option.replace("_", "-")


@functools.cache
def default_options() -> Namespace:
    """Return the options of an empty command line, which are not to be changed."""
    return parse_args([])


def options_given(args: Namespace) -> list[str]:
    """Return the options that differ from their defaults."""
    defaults = vars(default_options())
    return [name for name in defaults if getattr(args, name, None) != defaults[name]]


def check_refusals(args: Namespace, beside: str) -> None:
    """Raise ``UserError`` for an option of open_clip that our flag ``beside`` does not go with."""
    given_options = options_given(args)
    for refusal in REFUSALS:
        for option in refusal.options:
            if refusal.beside == beside and option in given_options:
                raise UserError(
                    f"{beside} does not support {flag(option)}, because {refusal.reason}: remove one of them"
                )


class _Parser(CommandParser):
    """open_clip's parser, to which our flags are added last."""

    def __init__(self) -> None:
        super().__init__(
            prog="python -m vl_plugins.integrations.open_clip",
            usage="%(prog)s [options]",
            examples=EXAMPLES,
            description="Run open_clip's trainer with the losses of vl_plugins. Without our flags, which come last, "
            "training is unchanged. With them, all flags of open_clip work as usual but for those listed at the end.",
            allow_abbrev=True,
        )
        self.epilog = _exceptions()

    def parse_args(self, argv: Any = None, namespace: Any = None) -> Any:
        """Return all options; flags on the command line win over those in the file of ``--config``."""
        _add_flags(self)
        given, _ = self.parse_known_args(argv)
        if given.config is None:
            return super().parse_args(argv)
        file = find_config(given.config, "open_clip")
        words = self._words(file, given)
        from_file, _ = self.parse_known_args(words)
        check_registered(from_file.loss)
        found = super().parse_args([*words, *argv])
        if not found.captions_per_image:
            # open_clip's reader gives what is no path to a program, such as ``pipe:``; ours opens paths and URLs only.
            from vl_plugins.data.shard_names import expand_braces

            for option in ("train_data", "val_data"):
                shards = getattr(from_file, option) or ""
                expand_braces(shards)  # raises an error for too many
                # ``::`` separates shards, and braces make no colon.
                if ":" in shards.replace("::", "") and shards == getattr(found, option):
                    raise UserError(
                        f"{file}: {shards!r} is no local path: give it on the command line, or --captions-per-image"
                    )
        return found

    def _words(self, file: Path, given: Namespace) -> list[str]:
        """Return a configuration file as a command line."""
        config = read_yaml(file)
        if not isinstance(config, Mapping):
            raise UserError(f"{file}: expected flags and their values, such as 'loss: unified', got {config!r:.80}")
        config = {str(key).replace("_", "-"): value for key, value in config.items()}
        actions = {name[2:]: action for action in self._actions for name in action.option_strings}
        words = []
        for key, value in config.items():
            action = actions[one_of(f"key in {file}", key, actions)]
            kind = action.dest.removesuffix("_kwargs")
            if isinstance(action, KeyValues) and getattr(given, kind) not in (None, config.get(kind)):
                continue  # the command line names another loss, miner, ...: these are not its options
            if isinstance(value, Mapping):
                words += [f"--{key}", *(f"{name}={item}" for name, item in value.items())]
            elif isinstance(value, list):
                words += [f"--{key}", *map(str, value)]
            elif action.nargs == 0 and isinstance(value, bool):
                words += [f"--{key}"] * value
            elif value is not None:
                words.append(f"--{key}={value}")
        return words


def _exceptions() -> str:
    """Return the list of open_clip's flags that raise an error beside ours."""
    flags_beside: dict[str, list[str]] = {}
    for refusal in REFUSALS:
        flags_beside.setdefault(refusal.beside, []).extend(map(flag, refusal.options))
    lines = ["flags of open_clip that raise an error beside ours:"]
    for ours, flags in flags_beside.items():
        words = f"{ours}: {' '.join(flags)}"
        lines.append(textwrap.fill(words, 78, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    lines.append("Some exist in some versions of open_clip only. --fsdp with --loss needs")
    lines.append("--fsdp-no-reshard-after-forward.")
    return "\n".join(lines)


def _add_sample_keys(group: Any) -> None:
    """Add :data:`SAMPLE_KEYS` with the meaning and the syntax of open_clip 4.x."""
    add = group.add_argument
    text = "extension of the captions in other programs' shards; 'txt;caption' for the first that is there"
    add("--text-key", default="txt", metavar="EXTENSION", help=f"{text} (default: %(default)s)")
    field = "field of the .json that has the caption; 'long;short' for the first that is not empty"
    add("--json-text-key", metavar="FIELD", help=field)
    picture = "extension of the picture (default: %(default)s)"
    add("--image-key", default=IMAGE_KEY, metavar="EXTENSION", help=picture)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("vl_plugins options")
    group.add_argument("--config", metavar="FILE.yaml", help="read flags from a file; the command line wins")
    for kind, (text, options) in KINDS.items():
        choices = ("set", "linear") if kind == "head" else None
        group.add_argument(f"--{kind}", metavar="NAME", choices=choices, help=text)
        group.add_argument(f"--{kind}-kwargs", action=KeyValues, help=f"options of the {kind}: {options}")
    group.add_argument(
        "--head-lr",
        type=float,
        metavar="RATE",
        help="learning rate of the heads and of the loss's own parameters (default: that of --lr)",
    )
    for tower in ("image", "text"):
        help_of_rate = f"learning rate of the {tower} tower (default: that of --lr)"
        group.add_argument(f"--{tower}-lr", type=float, metavar="RATE", help=help_of_rate)
    names = [name for action in parser._actions for name in action.option_strings]
    for tower in ("image", "text"):
        if f"--{tower}-layer-decay" not in names:  # which open_clip 4.x has
            help_of_decay = f"multiply the rate of the {tower} tower by F for each layer further down, such as 0.7"
            group.add_argument(f"--{tower}-layer-decay", type=float, metavar="F", help=help_of_decay)
    group.add_argument(
        "--captions-per-image",
        type=lambda value: int(value) if value.isdigit() else value,
        metavar="{random,first,all,N}",
        help="read the data by our reader, with so many captions of each image in a batch; with --loss, all are "
        "positives of their image (default: open_clip's reader, which reads one)",
    )
    group.add_argument(
        "--allow-duplicate-captions",
        action="store_true",
        help="without effect: losses take equal captions of several images for no negatives",
    )
    group.add_argument(
        "--shuffle-window",
        type=int,
        metavar="N",
        help="shuffle shards, and images within windows of N, so that reads are close to each other (default: all "
        "images together)",
    )
    add_caption_rule(group)
    group.add_argument(
        "--no-index",
        action="store_true",
        help="do not write indexes of other programs' shards, which are scanned at each start then",
    )
    group.add_argument(
        "--on-error",
        choices=("skip", "raise"),
        default="skip",
        help="repeat another image of the batch in place of one that cannot be read, or stop (default: %(default)s)",
    )
    group.add_argument(
        "--max-errors",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="stop when more than this share of the images cannot be read (default: %(default)s)",
    )
    if "--max-image-pixels" not in names:  # which open_clip 4.x has
        add_max_image_pixels(group)
    if "--text-key" not in names:  # which open_clip 4.x has
        _add_sample_keys(group)
    group.add_argument(
        "--validate-first",
        action="store_true",
        help="validate before the first step of a new run, too, as epoch 0",
    )
    group.add_argument(
        "--save-best",
        nargs="?",
        const=DEFAULT_METRIC,
        metavar="METRIC",
        help=f"keep the weights of the epoch with the best validation in checkpoints/best.pt: by {DEFAULT_METRIC}, or "
        "another name of results.jsonl; losses and ranks are best when they are small",
    )
    group.add_argument(
        "--patience",
        type=int,
        metavar="N",
        help="end the training after N validations in a row that were not better than the best one; with --save-best",
    )
    group.add_argument(
        "--allow-other-loss",
        action="store_true",
        help="let --resume continue a run with another loss, miner, reducer, distance or head than it was trained with",
    )
    group.add_argument(
        "--model-config",
        type=os.path.abspath,  # evaluation finds it again in the checkpoint
        metavar="FILE_OR_FOLDER",
        help="your own model configurations for open_clip: a .json file or a folder of them",
    )
