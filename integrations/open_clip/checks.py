"""Flags that do not go together, or not with the data, found before anything is written."""

from argparse import Namespace
from collections.abc import Mapping

import open_clip
import torch
from open_clip_train.distributed import world_info_from_env
from torch import nn

from vl_plugins.data import Collection
from vl_plugins.errors import UserError, number, one_of, user_errors
from vl_plugins.integrations.open_clip.flags import KINDS, check_refusals, flag
from vl_plugins.integrations.open_clip.models import add_model_config, check_model
from vl_plugins.integrations.open_clip.rates import OWN_RATES, RATES
from vl_plugins.integrations.open_clip.validation import metric_names

__all__ = ["check_classes", "check_flags", "check_parameters"]

# Entries of the configurations of models whose training step returns more than image and text embeddings.
OTHER_OUTPUTS = {
    "multimodal_cfg": "CoCa models",
    "audio_cfg": "CLAP models",
    "genlip_cfg": "GenLIP models",
    "genlap_cfg": "GenLAP models",
}


def check_flags(args: Namespace) -> None:
    """Raise ``UserError`` for flags that do not go together, before anything is written."""
    if args.model_config is not None:
        add_model_config(args.model_config)
    for model in filter(None, (args.distill_model, args.model)):
        check_model(model)
    with user_errors(f"--device {args.device}", RuntimeError):
        torch.device(args.device)
    _check_components(args)
    if args.validate_first and not (args.train_data and args.val_data):
        raise UserError("--validate-first needs --train-data and --val-data")
    _check_best(args)
    _check_rates(args)
    if args.loss:
        _check_loss(args)
    elif args.captions_per_image not in (None, "first", "random", 1):
        raise UserError(
            f"--captions-per-image {args.captions_per_image} needs --loss, such as unified: open_clip's own loss "
            "compares each image with one caption"
        )


def _check_best(args: Namespace) -> None:
    """Check ``--save-best`` and ``--patience``, which an evaluation without training does not use."""
    if args.save_best is None or (args.resume and not args.train_data):
        return
    check_refusals(args, "--save-best")
    names = metric_names(args)
    if not (args.train_data and names):
        raise UserError("--save-best and --patience need --train-data, and --val-data that are validated")
    one_of("metric of --save-best", args.save_best, names)
    if args.patience is not None:
        with user_errors("--patience"):
            number("patience", args.patience, least=1, kind=int)


def _check_rates(args: Namespace) -> None:
    for option in RATES:
        value = getattr(args, option)
        if value is None:
            continue
        with user_errors(flag(option)):
            number(option, value, above=0)
        if option in OWN_RATES and not args.lr > 0:
            raise UserError(f"{flag(option)} is scheduled as --lr is, which must be above 0, got {args.lr}")
        if option.endswith("decay") and value > 1:
            raise UserError(f"{flag(option)} {value}: lower layers would be trained faster; take a number up to 1")


def _check_components(args: Namespace) -> None:
    for kind in ("miner", "reducer", "distance", "head"):
        if args.loss is None and getattr(args, kind) not in (None, "linear"):
            raise UserError(f"--{kind} {getattr(args, kind)} needs --loss, such as unified, or smooth_chamfer for sets")
    for kind in KINDS:
        if getattr(args, f"{kind}_kwargs") and getattr(args, kind) is None:
            raise UserError(f"--{kind}-kwargs needs --{kind}")
    if args.loss:
        check_refusals(args, "--loss")
    if args.head:
        check_refusals(args, "--head")
    if args.head == "set":
        check_refusals(args, "--head set")


def _check_loss(args: Namespace) -> None:
    # The loss uses a learned similarity after the model's forward pass.
    if getattr(args, "fsdp", False) and not args.fsdp_no_reshard_after_forward:
        raise UserError("--loss with --fsdp needs whole parameters: add --fsdp-no-reshard-after-forward")
    config = open_clip.get_model_config(args.model) or {}
    for entry, models in OTHER_OUTPUTS.items():
        if entry in config:
            raise UserError(
                f"--loss does not support {models} such as {args.model}, which trains with more than image and text "
                "embeddings: remove --loss, or take a model with two towers"
            )
    if args.loss == "smooth_chamfer" and args.head != "set":
        raise UserError("--loss smooth_chamfer compares embedding sets: add --head set, or take another loss")
    _, _, world_size = world_info_from_env()
    if args.train_data and args.batch_size * world_size * args.accum_freq == 1:
        raise UserError(
            f"--loss {args.loss} compares images, and there is only one: raise --batch-size, now 1, or --accum-freq"
        )


def check_parameters(args: Namespace, loss: nn.Module | None) -> None:
    """Raise ``UserError`` for flags that do not go with the parameters of the loss."""
    has_parameters = loss is not None and next(loss.parameters(), None) is not None
    for name in ("torchscript", "trace"):
        if has_parameters and getattr(args, name, False):
            raise UserError(f"--loss {args.loss} has trained parameters, which {flag(name)} does not support")
    if args.head_lr is not None and not (has_parameters or args.head):
        raise UserError("--head-lr is the rate of heads and of a loss's parameters: add --head, or remove it")
    embedding_size = args.loss_kwargs.get("embedding_size")
    if embedding_size is None or args.head:
        return
    width = open_clip.get_model_config(args.model)["embed_dim"]
    if embedding_size != width:  # of weights of classes, such as proxies
        raise UserError(
            f"--loss-kwargs embedding_size={embedding_size}: embeddings of {args.model} have {width} numbers: "
            f"embedding_size={width}"
        )


def check_classes(args: Namespace, splits: Mapping[str, Collection]) -> None:
    """Raise ``UserError`` if a loss with weights of classes, such as proxies, has none for some images."""
    classes = args.loss_kwargs.get("num_classes")
    if classes is None or not args.train_data:
        return
    if "train_data" not in splits:
        raise UserError(
            f"--loss {args.loss} takes images for classes, which our reader numbers: add --captions-per-image random"
        )
    images = len(splits["train_data"])
    if classes < images:
        raise UserError(
            f"--loss-kwargs num_classes={classes}: each of the {images:,} images of --train-data is a class: "
            f"num_classes={images}"
        )
