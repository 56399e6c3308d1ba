"""Runs ``open_clip_train.main.main`` with the loss, the reader and the validation that the flags ask for."""

import contextlib
import functools
import logging
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from vl_plugins.errors import UserError, exit_status, user_errors
from vl_plugins.integrations.open_clip.host import OpenCLIP3, data_parallel_on_cpu, installed_host, replaced
from vl_plugins.integrations.open_clip.names import check_command_line, is_shards
from vl_plugins.integrations.open_clip.options import PluginOptions, format_help, option_flag, parse_arguments
from vl_plugins.registry import format_options

__all__ = ["main"]

# Options that mean nothing to open_clip's own loss.
LOSS_OPTIONS = ("loss_kwargs", "miner", "miner_kwargs", "reducer", "reducer_kwargs", "distance", "distance_kwargs")


def main(argv: Sequence[str]) -> int:
    """Train or evaluate; return 0, or after one line on standard error 2 when the input is wrong, 130 after Ctrl-C."""
    return exit_status("vl_plugins", lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(argv):
        print(format_help(), end="")
        return 0
    options, host_options, host_argv = parse_arguments(argv)
    check_command_line(options, host_options)
    _check_shards(host_options)
    host = installed_host()
    # After the checks of names, because these import torch, which takes seconds.
    from open_clip_train.distributed import world_info_from_env

    from vl_plugins.integrations.open_clip.batch_record import BatchRecord
    from vl_plugins.integrations.open_clip.data import choose_reader
    from vl_plugins.integrations.open_clip.resuming import check_resume
    from vl_plugins.integrations.open_clip.run_folder import occupied

    _check(options, host_options, host)
    _, rank, _ = world_info_from_env()  # the processes have not joined yet
    record = BatchRecord(host_options.accum_freq)
    loss = None if options.loss is None else _build_loss(options, host_options, record)
    reader = choose_reader(options, host_options)
    if options.head == "set" and host_options.val_data and reader.validation is None:
        raise UserError(
            f"--val-data {host_options.val_data}: open_clip's validation compares single vectors; with --head set give "
            "shards of `vl-plugins shards`"
        )
    folder = None if host_options.name is None else Path(host_options.logs, host_options.name)
    with contextlib.ExitStack() as stack:
        if folder is not None and rank == 0:
            stack.enter_context(occupied(folder, resumes=host_options.resume == "latest"))
        check_resume(host_options.resume, folder, save_most_recent=host_options.save_most_recent)
        return _train(host, host_argv, host_options, options, loss, reader, record)


def _check_shards(host_options: Namespace) -> None:
    """Raise ``UserError`` for shards that do not exist."""
    from vl_plugins.data.collection import expand_shards

    for path in (host_options.train_data, host_options.val_data):
        if is_shards(path, host_options.dataset_type) and not path.startswith("pipe:"):  # for open_clip's own reader
            expand_shards(path)


def _train(host: OpenCLIP3, host_argv, host_options: Namespace, options: PluginOptions, loss, reader, record) -> int:
    """Run open_clip's ``main`` with some of its functions replaced."""
    from open_clip_train import main

    from vl_plugins.integrations.open_clip import data, resuming, validation
    from vl_plugins.integrations.open_clip.trainer_errors import one_line_errors

    # The trainer writes them all to params.txt and wandb.
    args = Namespace(**vars(host_options), **{**asdict(options), "captions_per_image": reader.captions_per_image})
    validation_errors: list[UserError] = []
    replacements = {
        "parse_args": lambda argv: args,
        "create_model_and_transforms": functools.partial(
            _create_model, host_create=main.create_model_and_transforms, options=options, loss=loss
        ),
        "get_data": functools.partial(
            data.get_data,
            host=host,
            host_get_data=main.get_data,
            reader=reader,
            record=None if loss is None and reader.make_sampler is None else record,
        ),
        "evaluate": functools.partial(
            validation.evaluate, host=host, host_evaluate=main.evaluate, errors=validation_errors
        ),
        "get_latest_checkpoint": functools.partial(resuming.latest_checkpoint, host_latest=main.get_latest_checkpoint),
    }
    if loss is not None:
        replacements |= host.with_loss(functools.partial(_announce_loss, loss, options))
    with replaced(main, **replacements), data_parallel_on_cpu(), one_line_errors(args):
        status = main.main(list(host_argv))
    if validation_errors:
        raise validation_errors[-1]
    return 2 if status else 0


def _check(options: PluginOptions, host_options: Namespace, host: OpenCLIP3) -> None:
    """Raise ``UserError`` for a wrong command line before anything is written or a model is built."""
    from vl_plugins.integrations.open_clip.models import add_model_config, check_model, check_pretrained

    sources = (host_options.train_data, host_options.val_data, host_options.imagenet_val, host_options.imagenet_v2)
    if not any(sources) and host_options.dataset_type != "synthetic":
        raise UserError("there is nothing to do: give --train-data or --val-data, or --help for all options")
    if options.model_config is not None:
        add_model_config(options.model_config)
    check_model(host_options.model)
    check_pretrained(host_options.model, host_options.pretrained)
    if options.loss is None:
        _check_without_loss(options)
    else:
        _check_with_loss(options.loss, host_options)
    if "coca" in host_options.model.lower() and (options.loss or options.head):
        raise UserError(f"--model {host_options.model} generates captions too: train it without --loss and --head")
    other_data = host.other_data(host_options)
    for name in ("loss", "head", "captions_per_image"):
        given = getattr(options, name)
        if other_data is not None and given is not None:
            raise UserError(f"{option_flag(name)} {given} is for images and captions, and {other_data} is not")
    for kind in ("miner", "reducer", "distance", "head"):
        if getattr(options, f"{kind}_kwargs") and getattr(options, kind) is None:
            raise UserError(f"--{kind}-kwargs needs --{kind}")
    if options.head is not None:
        _check_head(options.head, options, host_options, host)


def _check_without_loss(options: PluginOptions) -> None:
    for name in LOSS_OPTIONS:
        if getattr(options, name):
            raise UserError(f"{option_flag(name)} needs --loss")
    if options.captions_per_image not in (None, "random", "first", "1"):
        raise UserError(
            f"--captions-per-image {options.captions_per_image} needs --loss: open_clip's own loss takes one caption "
            "per image"
        )


def _check_with_loss(loss: str, host_options: Namespace) -> None:
    if getattr(host_options, "horovod", False):  # gone in 4.x
        raise UserError(f"--loss {loss} does not support --horovod: start the processes with torchrun")
    for other in ("siglip", "distill_model"):
        if getattr(host_options, other):
            raise UserError(f"--loss {loss} and {option_flag(other)} both name a loss: give one of them")
    if getattr(host_options, "fsdp", False) and not host_options.fsdp_no_reshard_after_forward:  # flags of 4.x
        raise UserError(f"--loss {loss} with --fsdp needs the whole logit scale: add --fsdp-no-reshard-after-forward")


def _check_head(head: str, options: PluginOptions, host_options: Namespace, host: OpenCLIP3) -> None:
    from vl_plugins.integrations.open_clip.heads import head_settings

    head_settings(head, options.head_kwargs)
    not_supported = [*host.not_with_heads]
    if head == "set":
        if options.loss is None:
            raise UserError("--head set needs a loss: give --loss smooth_chamfer, or another of `vl-plugins losses`")
        not_supported += ["imagenet_val", "imagenet_v2"]  # open_clip's zero-shot classifier takes single vectors
    for name in not_supported:
        if getattr(host_options, name):
            raise UserError(f"--head {head} does not support {option_flag(name)}: give one of them")


def _build_loss(options: PluginOptions, host_options: Namespace, record):
    from vl_plugins.integrations.open_clip.loss import build_loss

    with user_errors(f"--loss {options.loss}"):
        return build_loss(options, local_loss=host_options.local_loss, record=record)


def _announce_loss(loss, options: PluginOptions, args: Namespace):
    """Return the loss when the trainer would make its own; its log is open by then."""
    from vl_plugins.integrations.open_clip.loss import describe

    logging.info(f"Training with the loss of vl_plugins: {describe(options)}")
    if args.world_size > 1:
        compared = "its own images and texts with those" if loss.compares_own_rows else "the images and texts"
        logging.info(f"Each process compares {compared} of all processes; gradients are exact by all flags")
    return loss


def _create_model(model: str, *args, host_create: Callable, options: PluginOptions, loss, **kwargs):
    """Return what open_clip makes, with heads on the model if ``--head`` asks for them."""
    clip, *transforms = host_create(model, *args, **kwargs)
    if options.head is None:
        return clip, *transforms
    from vl_plugins.integrations.open_clip.heads import CLIPWithHeads

    similarity = loss.loss.distance if options.head == "set" else None
    with_heads = CLIPWithHeads(clip, model, kwargs, options.head, options.head_kwargs, similarity)
    state = with_heads.get_extra_state()
    compared = ""
    if similarity is not None:
        compared = f"; sets are compared by {state['similarity']}({format_options(state['similarity_kwargs'])})"
    logging.info(f"Both towers end in the head {options.head}({format_options(state['head_kwargs'])}){compared}")
    return with_heads, *transforms
