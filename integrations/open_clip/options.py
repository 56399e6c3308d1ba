"""The launcher's flags, and configuration files with flags of the launcher and of open_clip."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vl_plugins.errors import UserError, unknown_name
from vl_plugins.integrations.config_files import find_config, read_yaml
from vl_plugins.integrations.key_values import KeyValues, Parser
from vl_plugins.integrations.open_clip.host import default_options, parse_args, parser_help
from vl_plugins.registry import check_registered

__all__ = ["PluginOptions", "format_help", "option_flag", "parse_arguments"]

EXAMPLES = (
    "python -m vl_plugins.integrations.open_clip \\\n"
    "    --model ViT-B-32-quickgelu --pretrained openai --lr 1e-5 --warmup 500 \\\n"
    "    --train-data 'shards/coco-train-{000000..000113}.tar' --loss unified",
    "torchrun --nproc_per_node 8 -m vl_plugins.integrations.open_clip -- \\\n"
    "    --config flickr30k_vit_l_14_336_unified.yaml",
)


@dataclass
class PluginOptions:
    """The launcher's flags; the defaults leave open_clip unchanged."""

    model_config: str | None = None
    loss: str | None = None
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    miner: str | None = None
    miner_kwargs: dict[str, Any] = field(default_factory=dict)
    reducer: str | None = None
    reducer_kwargs: dict[str, Any] = field(default_factory=dict)
    distance: str | None = None
    distance_kwargs: dict[str, Any] = field(default_factory=dict)
    head: str | None = None
    head_kwargs: dict[str, Any] = field(default_factory=dict)
    captions_per_image: str | None = None
    allow_duplicate_captions: bool = False
    on_read_error: str = "skip"


def _plugin_parser() -> Parser:
    parser = Parser(
        prog="python -m vl_plugins.integrations.open_clip",
        usage="%(prog)s [options]",
        examples=EXAMPLES,
        description="Run open_clip's trainer with the losses of vl_plugins. All flags of open_clip work as usual; "
        "without --loss, training is unchanged.",
        add_help=False,
    )
    group = parser.add_argument_group("vl_plugins options")
    group.add_argument("-h", "--help", action="store_true", help="show this help and exit")
    group.add_argument(
        "--config", metavar="FILE.yaml", help="read flags, also open_clip's, from a file; flags on the command line win"
    )
    group.add_argument(
        "--model-config",
        metavar="FILE_OR_FOLDER",
        # Absolute, because evaluation finds it again in params.txt.
        type=os.path.abspath,
        help="your own model configurations for open_clip: a .json file or a folder of them",
    )
    group.add_argument(
        "--loss",
        metavar="NAME",
        help="a loss of `vl-plugins losses`, a class of pytorch-metric-learning, such as NTXentLoss, or "
        "package.module:Class (default: open_clip's)",
    )
    group.add_argument(
        "--loss-kwargs",
        action=KeyValues,
        help="options of the loss, such as margin=0.2 scale=50; scale=learned uses the model's logit scale",
    )
    for kind, example, text in (
        ("miner", "epsilon=0.1", "a miner of pytorch-metric-learning, such as BatchHardMiner, or HardestNegativeMiner"),
        ("reducer", "low=0.05", "a reducer of pytorch-metric-learning, such as AvgNonZeroReducer"),
        (
            "distance",
            "alpha=16",
            "a distance of pytorch-metric-learning, or for --head set: smooth_chamfer (default), chamfer, mil or "
            "match_probability",
        ),
    ):
        group.add_argument(f"--{kind}", metavar="CLASS", help=text)
        group.add_argument(f"--{kind}-kwargs", action=KeyValues, help=f"options of the {kind}, such as {example}")
    group.add_argument(
        "--head",
        choices=("set", "linear"),
        help="add a head to both towers: set predicts a set of embeddings by slot attention, linear is one layer",
    )
    group.add_argument(
        "--head-kwargs", action=KeyValues, help="options of the head: num_slots=4 num_iters=4 of set, dim=768 of linear"
    )
    group.add_argument(
        "--captions-per-image",
        metavar="{random,first,all,N}",
        help="captions per image in a batch; with --loss, all are positives of their image (default with --loss on "
        "shards of `vl-plugins shards`: random)",
    )
    group.add_argument(
        "--allow-duplicate-captions",
        action="store_true",
        help="allow images with equal captions (false negatives) in one batch",
    )
    group.add_argument(
        "--on-read-error",
        choices=("skip", "raise"),
        default="skip",
        help="skip unreadable training images with a warning, or stop (default: %(default)s)",
    )
    return parser


def format_help() -> str:
    """Return the help text: our flags, then open_clip's."""
    return f"{_plugin_parser().format_help()}\nopen_clip options:\n{parser_help()}"


def parse_arguments(argv: Sequence[str]) -> tuple[PluginOptions, argparse.Namespace, list[str]]:
    """Split a command line, with the configuration file it names, into our options and open_clip's.

    Args:
        argv: the command line without the program's name.

    Returns:
        Our options; open_clip's options as its parser reads them; open_clip's part of the command line.

    Raises:
        UserError: an unknown flag or configuration key, a value that does not fit, a file that cannot be read.
    """
    config_file = _config_file(argv)
    if config_file is not None:
        argv = [*_config_arguments(config_file, argv), *argv]
    namespace, host_argv = _plugin_parser().parse_known_args(argv)
    _check_abbreviations(host_argv)
    del namespace.config, namespace.help
    return PluginOptions(**vars(namespace)), parse_args(host_argv), host_argv


def _check_abbreviations(host_argv: Sequence[str]) -> None:
    """open_clip's parser accepts unique prefixes: it would read ``--los unified`` as its own ``--loss-dist-impl``."""
    host_flags = {option_flag(name) for name in default_options()}
    for token in host_argv:
        flag = token.partition("=")[0]
        meant = [known for known in _plugin_actions() if known.startswith(flag)]
        if flag.startswith("--") and len(flag) > 2 and flag not in host_flags and meant:
            raise UserError(f"unknown option {flag}; did you mean {' or '.join(meant)}?")


def option_flag(name: str) -> str:
    """Return the flag of an option on the command line: ``--batch-size`` of ``batch_size``."""
    return "--" + name.replace("_", "-")


def _plugin_actions() -> dict[str, argparse.Action]:
    actions = {option_flag(action.dest): action for action in _plugin_parser()._actions}
    del actions["--help"], actions["--config"]
    return actions


def _config_file(argv: Sequence[str]) -> Path | None:
    finder = Parser(add_help=False)
    finder.add_argument("--config")
    name = finder.parse_known_args(argv)[0].config
    return None if name is None else find_config(name, "open_clip")


def _config_arguments(path: Path, argv: Sequence[str]) -> list[str]:
    """Return the command-line form of a configuration file, to be put before the command line ``argv``."""
    config = read_yaml(path, extra="open-clip")
    if not isinstance(config, Mapping):
        raise UserError(f"{path}: expected a mapping of flag names to values, got {type(config).__name__}")
    actions = _plugin_actions()
    defaults = {option_flag(name): value for name, value in default_options().items()}
    defaults |= {flag: action.default for flag, action in actions.items()}
    on_command_line = _plugin_parser().parse_known_args(argv)[0]

    arguments: list[str] = []
    for key, value in config.items():
        flag = option_flag(str(key))
        if flag not in defaults:
            raise unknown_name(f"key in {path}", key, [known[2:] for known in defaults])
        if isinstance(actions.get(flag), KeyValues):
            if not isinstance(value, Mapping):
                raise UserError(f"{path}: {key} must be a mapping such as {{margin: 0.2}}, got {value!r}")
            owner = actions[flag].dest.removesuffix("_kwargs")
            chosen = getattr(on_command_line, owner)
            if chosen is not None and chosen != config.get(owner):
                continue  # the command line names another loss, miner or reducer: these are not its options
        if value is not None and isinstance(defaults[flag], bool) != isinstance(value, bool):
            expected = "true or false" if isinstance(defaults[flag], bool) else "a value"
            raise UserError(f"{path}: {key} must be {expected}, got {value!r}")
        arguments += _as_arguments(flag, value)
    # Parsed, because a list may hold "--loss=..." as a value of another key.
    check_registered(_plugin_parser().parse_known_args(arguments)[0].loss)
    return arguments


def _as_arguments(flag: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, Mapping):
        return [flag, *(f"{name}={item}" for name, item in value.items())]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]
