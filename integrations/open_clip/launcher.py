"""Runs ``open_clip_train.main.main`` with the loss, the reader and the validation that the flags ask for."""

import functools
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vl_plugins.errors import UserError, message
from vl_plugins.integrations.open_clip import host
from vl_plugins.integrations.open_clip.options import PluginOptions, format_help, parse_arguments

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Train or evaluate; return 0, or 2 after one line on standard error when the input is wrong."""
    try:
        host.trainer()
        if {"-h", "--help"}.intersection(argv):
            print(format_help(), end="")
            return 0
        return _run(*parse_arguments(argv))
    except UserError as error:
        # Before the processes join, all find the same; afterwards an error may be that of one process alone.
        if os.environ.get("RANK", "0") == "0" or _processes_have_joined():
            print(f"vl_plugins: error: {message(error)}", file=sys.stderr)
        return 2


def _processes_have_joined() -> bool:
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _run(options: PluginOptions, host_options: Namespace, host_argv: Sequence[str]) -> int:
    from vl_plugins.integrations.open_clip import data, validation

    check(options, host_options)
    reader = data.choose_reader(options, host_options)
    recorded = {**asdict(options), "captions_per_image": reader.captions_per_image}
    trainer = host.trainer()
    replacements = {
        "parse_args": functools.partial(_parse_args, recorded=recorded, host_parse_args=trainer.parse_args),
        "get_data": functools.partial(data.get_data, reader=reader, host_get_data=trainer.get_data),
        "evaluate": functools.partial(validation.evaluate, host_evaluate=trainer.evaluate),
    }
    if options.loss is not None:
        replacements["create_loss"] = functools.partial(_create_loss, options=options)
    with host.patched(replacements), host.data_parallel_on_cpu():
        status = trainer.main(list(host_argv))
    return 2 if status else 0


def check(options: PluginOptions, host_options: Namespace) -> None:
    """Find what is wrong with a command line before anything is written or a model is built.

    Raises:
        UserError: one line that says what is wrong and what would be right.
    """
    from vl_plugins.integrations.open_clip.models import check_model

    sources = (host_options.train_data, host_options.val_data, host_options.imagenet_val, host_options.imagenet_v2)
    if not any(sources) and host_options.dataset_type != "synthetic":
        raise UserError("there is nothing to do: give --train-data or --val-data, or --help for all options")
    model = host_options.model
    check_model(model)
    if options.loss is None:
        for name in ("loss_kwargs", "miner", "miner_kwargs", "reducer", "reducer_kwargs"):
            if getattr(options, name):
                raise UserError(f"--{name.replace('_', '-')} needs --loss")
        if options.captions_per_image not in (None, "random", "first", 1):
            raise UserError(
                f"--captions-per-image {options.captions_per_image} needs --loss: "
                "open_clip's own loss takes one caption per image"
            )
    else:
        for other in ("siglip", "distill_model"):
            if getattr(host_options, other):
                raise UserError(
                    f"--loss {options.loss} and --{other.replace('_', '-')} both name a loss: give one of them"
                )
        if "coca" in model.lower():
            raise UserError(
                f"--loss {options.loss} has no captioning term, which model {model} needs; train it without --loss"
            )
        _check_loss(options)
    if host_options.name is not None and host_options.resume != "latest":
        log = Path(host_options.logs, host_options.name, "out.log")
        if log.exists():
            raise UserError(
                f"--name {host_options.name}: {log.parent} holds an earlier run; "
                "give another name, or --resume latest to go on"
            )


def _check_loss(options: PluginOptions) -> None:
    from vl_plugins.integrations.open_clip.loss import build_loss

    try:
        build_loss(options)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"--loss {options.loss}: {error}") from error


def _parse_args(argv: Sequence[str], *, recorded: Mapping[str, Any], host_parse_args: Callable) -> Namespace:
    """Add our options to open_clip's, which writes all of them to params.txt and wandb."""
    return Namespace(**vars(host_parse_args(argv)), **recorded)


def _create_loss(args: Namespace, *, options: PluginOptions):
    from vl_plugins.integrations.open_clip.loss import build_loss, describe

    if args.local_loss and not args.gather_with_grad and args.world_size > 1:
        logging.warning(
            "--local-loss without --gather-with-grad: features of other processes get no gradient, so the update "
            "points in another direction than the loss's; add --gather-with-grad."
        )
    loss = build_loss(
        options,
        args.local_loss,
        args.gather_with_grad,
        args.rank,
        args.world_size,
        use_horovod=args.horovod,
        accum_freq=args.accum_freq,
        steps_before=args.steps_before,
    )
    logging.info(f"Training with the loss of vl_plugins: {describe(options)}")
    return loss
