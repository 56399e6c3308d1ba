"""Runs ``open_clip_train.main.main`` with the loss, the reader and the validation that the flags ask for."""

import contextlib
import functools
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vl_plugins.integrations.command_lines import exit_status
from vl_plugins.integrations.open_clip import host
from vl_plugins.integrations.open_clip.names import check_command_line
from vl_plugins.integrations.open_clip.options import PluginOptions, format_help, parse_arguments
from vl_plugins.integrations.open_clip.run_folder import files_named, occupied
from vl_plugins.registry import format_options
from vl_plugins.utils.errors import UserError

__all__ = ["main"]

# Options that mean nothing to open_clip's own loss.
OF_LOSS = (
    "loss_kwargs",
    "miner",
    "miner_kwargs",
    "reducer",
    "reducer_kwargs",
    "distance",
    "distance_kwargs",
)


def main(argv: Sequence[str]) -> int:
    """Train or evaluate; return 0, or after one line on standard error 2 when the input is wrong, 130 after Ctrl-C."""
    return exit_status("vl_plugins", lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    if {"-h", "--help"}.intersection(argv):
        print(format_help(), end="")
        return 0
    options, host_options, host_argv = parse_arguments(argv)
    host.check_version()
    check_command_line(options, host_options)
    host.trainer()
    return _run(options, host_options, host_argv)


def _run(options: PluginOptions, host_options: Namespace, host_argv: Sequence[str]) -> int:
    from vl_plugins.integrations.open_clip import data, resuming

    loss = check(options, host_options)
    if options.dry_run:
        return _dry_run(options, loss, host_options, host_argv)
    reader = data.choose_reader(options, host_options)
    if options.head == "set" and host_options.val_data and not reader.validation:
        raise UserError(
            f"--val-data {host_options.val_data}: open_clip's validation compares single vectors; "
            "with --head set give shards of `vl-plugins shards`"
        )
    continues = host_options.resume == "latest"
    of_host = SimpleNamespace(**vars(host.trainer()))  # as its functions are before they are replaced
    with contextlib.ExitStack() as stack:
        if host_options.name is not None and data.is_first_process():
            folder = Path(host_options.logs, host_options.name)
            stack.enter_context(occupied(folder, continues=continues))
            if continues and host_options.save_most_recent:
                resuming.mend_most_recent(folder / "checkpoints")
        return _train(options, loss, reader, of_host, host_argv, continues=continues)


def _dry_run(options: PluginOptions, loss, host_options: Namespace, host_argv: Sequence[str]) -> int:
    from vl_plugins.integrations.open_clip import data, dry_run
    from vl_plugins.integrations.open_clip.loss import describe

    with dry_run.trainer_without_data(host.trainer(), options.captions_per_image) as without_data:
        status = _train(options, loss, data.Reader(), without_data, host_argv)
    if status == 0 and os.environ.get("RANK", "0") == "0":
        tried = f"{host_options.model} with {'the loss of open_clip' if options.loss is None else describe(options)}"
        if options.head is not None:
            tried += f" and the head {options.head}({format_options(options.head_kwargs)})"
        print(f"dry run: one step of {tried} in {host_options.precision}, on made-up data; nothing was read or kept")
    return status


def _train(options: PluginOptions, loss, reader, of_host, host_argv: Sequence[str], *, continues: bool = False) -> int:
    """Run open_clip's ``main`` with our functions in front of those of ``of_host``, its own or a dry run's."""
    from vl_plugins.integrations.open_clip import data, resuming, validation
    from vl_plugins.integrations.open_clip.training import Training

    is_ours = loss is not None or reader.captions_per_image is not None
    on_nan = options.on_nan or (None if loss is None else "stop")
    training = Training(repeats=is_ours, continues=continues, looks_at_epochs=on_nan is not None)
    recorded = {**asdict(options), "captions_per_image": reader.captions_per_image, "on_nan": on_nan}
    replacements = {
        "parse_args": functools.partial(
            _parse_args, recorded=recorded, training=training, host_parse_args=of_host.parse_args
        ),
        "pt_load": functools.partial(resuming.read_checkpoint, training=training),
        "get_latest_checkpoint": functools.partial(
            resuming.latest_checkpoint, host_latest=of_host.get_latest_checkpoint
        ),
        "get_data": functools.partial(data.get_data, reader=reader, training=training, host_get_data=of_host.get_data),
        "evaluate": functools.partial(validation.evaluate, training=training, host_evaluate=of_host.evaluate),
        "create_model_and_transforms": functools.partial(
            _create_model,
            options=options,
            loss=loss,
            training=training,
            host_create=of_host.create_model_and_transforms,
        ),
    }
    if on_nan is not None:
        replacements["train_one_epoch"] = functools.partial(
            _train_one_epoch, training=training, host_train=of_host.train_one_epoch
        )
        replacements |= host.adapter().with_loss(
            None if loss is None else functools.partial(_create_loss, options=options, loss=loss, training=training),
            functools.partial(_guard, training=training),
            functools.partial(_continue_with, options=options, training=training),
            replacements["get_data"],
            of_host,
        )
    with (
        host.patched(replacements) as trainer,
        host.data_parallel_on_cpu(),
        resuming.complete_checkpoints(training),
        resuming.unfit_checkpoint_named(training, has_heads=options.head is not None),
        files_named(training),
    ):
        status = trainer.main(list(host_argv))
        training.check_validation()  # of the last epoch
    return 2 if status else 0


def check(options: PluginOptions, host_options: Namespace):
    """Find what is wrong with a command line before anything is written or a model is built.

    Returns:
        The loss that the flags ask for, of pytorch-metric-learning; None without ``--loss``.

    Raises:
        UserError: one line that says what is wrong and what would be right.
    """
    from vl_plugins.integrations.open_clip.models import add_model_config, check_model, check_pretrained

    sources = (host_options.train_data, host_options.val_data, host_options.imagenet_val, host_options.imagenet_v2)
    if not any(sources) and host_options.dataset_type != "synthetic" and not options.dry_run:
        raise UserError("there is nothing to do: give --train-data or --val-data, or --help for all options")
    model = host_options.model
    if options.model_config is not None:
        add_model_config(options.model_config)
    check_model(model)
    check_pretrained(model, host_options.pretrained)
    if options.loss is None:
        for name in OF_LOSS:
            if getattr(options, name):
                raise UserError(f"--{name.replace('_', '-')} needs --loss")
        if options.captions_per_image not in (None, "random", "first", 1):
            raise UserError(
                f"--captions-per-image {options.captions_per_image} needs --loss: "
                "open_clip's own loss takes one caption per image"
            )
        if options.same_group == "positive":
            raise UserError(
                "--same-group positive needs --loss: open_clip's own loss takes all other images for negatives"
            )
    else:
        if getattr(host_options, "horovod", False):  # gone in 4.x
            raise UserError(f"--loss {options.loss} does not support --horovod: start the processes with torchrun")
        for other in ("siglip", "distill_model"):
            if getattr(host_options, other):
                raise UserError(
                    f"--loss {options.loss} and --{other.replace('_', '-')} both name a loss: give one of them"
                )
        if "coca" in model.lower():
            raise UserError(
                f"--loss {options.loss} has no captioning term, which model {model} needs; train it without --loss"
            )
    other = host.adapter().other_than_pairs(host_options)
    for name in ("loss", "head", "captions_per_image"):
        given = getattr(options, name)
        if other is not None and given is not None:
            raise UserError(f"--{name.replace('_', '-')} {given} is for pictures and captions, and {other} is not")
    for kind in ("miner", "reducer", "distance", "head"):
        if getattr(options, f"{kind}_kwargs") and getattr(options, kind) is None:
            raise UserError(f"--{kind}-kwargs needs --{kind}")
    if options.head is not None:
        _check_head(options, host_options)
    if host_options.resume == "latest" and host_options.name is None:
        raise UserError("--resume latest goes on with an earlier run: give its --name")
    return None if options.loss is None else _checked_loss(options, host_options)


def _check_head(options: PluginOptions, host_options: Namespace) -> None:
    from vl_plugins.integrations.open_clip.heads import head_settings

    head_settings(options.head, options.head_kwargs)
    if options.head == "set" and options.loss is None:
        raise UserError("--head set needs a loss: give --loss smooth_chamfer, or another of `vl-plugins losses`")
    refused = [*host.adapter().REFUSED_WITH_HEADS]
    if options.head == "set":  # open_clip's zero-shot classifier takes single vectors
        refused += ["imagenet_val", "imagenet_v2"]
    for name in refused:
        if getattr(host_options, name):
            raise UserError(f"--head {options.head} does not go with --{name.replace('_', '-')}: give one of them")
    if "coca" in host_options.model.lower():
        raise UserError(f"--head {options.head} is not for model {host_options.model}, which generates captions too")


def _checked_loss(options: PluginOptions, host_options: Namespace):
    from open_clip_train.distributed import world_info_from_env

    from vl_plugins.integrations.open_clip.loss import build_loss

    try:
        two_towers = build_loss(
            options,
            local_loss=host_options.local_loss,
            world_size=world_info_from_env()[2],  # the processes have not been joined yet
            batches_per_step=host_options.accum_freq,
        )
        return two_towers.loss
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"--loss {options.loss}: {error}") from error


def _parse_args(argv: Sequence[str], *, recorded: Mapping[str, Any], training, host_parse_args: Callable) -> Namespace:
    """Add our options to open_clip's, which writes all of them to params.txt and wandb."""
    training.args = Namespace(**vars(host_parse_args(argv)), **recorded)
    return training.args


def _create_model(model: str, *args, options: PluginOptions, loss, training, host_create: Callable, **kwargs):
    """Put the heads on the model, if any; in training mode or not, all else that was made with it is open_clip's."""
    from vl_plugins.integrations.open_clip.models import downloads_named

    with downloads_named(model):
        clip, *transforms = host_create(model, *args, **kwargs)
    if options.head is not None:
        clip = _add_heads(clip, model, kwargs, options, loss)
    training.model = training.model or clip  # one that is made later is the teacher
    return clip, *transforms


def _add_heads(clip, model: str, created_with: Mapping[str, Any], options: PluginOptions, loss):
    from vl_plugins.integrations.open_clip.heads import CLIPWithHeads

    similarity = loss.distance if options.head == "set" else None
    with_heads = CLIPWithHeads(clip, model, created_with, options.head, options.head_kwargs, similarity)
    state = with_heads.get_extra_state()
    compared = ""
    if similarity is not None:
        compared = f"; sets are compared by {state['similarity']}({format_options(state['similarity_kwargs'])})"
    logging.info(f"Both towers end in the head {options.head}({format_options(state['head_kwargs'])}){compared}")
    return with_heads


def _create_loss(args: Namespace, *, options: PluginOptions, loss, training):
    from vl_plugins.integrations.open_clip.loss import build_loss, describe

    if args.local_loss and not args.gather_with_grad and args.world_size > 1 and args.rank == 0:
        logging.warning(
            "--local-loss without --gather-with-grad: features of other processes get no gradient, so the update "
            "points in another direction than the loss's; add --gather-with-grad."
        )
    two_towers = build_loss(
        options,
        loss,
        local_loss=args.local_loss,
        gather_with_grad=args.gather_with_grad,
        rank=args.rank,
        world_size=args.world_size,
        batches_per_step=args.accum_freq,
        log_every=args.log_every_n_steps * args.accum_freq if args.rank == 0 else 0,
        image_ids=training.image_ids,
    )
    logging.info(f"Training with the loss of vl_plugins: {describe(options)}")
    return two_towers


def _continue_with(loss, *, options: PluginOptions, training) -> None:
    """Let the loss go on where the training does, and be kept in its checkpoints."""
    from vl_plugins.integrations.open_clip import resuming
    from vl_plugins.integrations.open_clip.loss import describe

    description = describe(options)
    training.beside["loss"] = functools.partial(resuming.state_of_loss, loss, description)
    saved = training.saved.get("loss") if training.continues else None
    if saved is None or not resuming.restore_loss(loss, description, saved):
        loss.continue_after(training.steps_before)


def _train_one_epoch(*args, training, host_train: Callable, **kwargs):
    with training.steps_watched(host.adapter().optimizer_of(*args)):
        return host_train(*args, **kwargs)


def _guard(loss, args: Namespace, *, training):
    from vl_plugins.integrations.open_clip.non_finite import NonFiniteGuard

    guard = NonFiniteGuard(loss, args.on_nan, training, calls_per_step=args.accum_freq, world_size=args.world_size)
    training.before_step, training.after_epoch = guard.before_step, guard.after_epoch
    return guard
