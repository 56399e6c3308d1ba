"""What is particular to open_clip 3.x: the loss is made once the data are known, and a batch is a pair.

It offers the same functions as :mod:`vl_plugins.integrations.open_clip.host_4`; ``host.adapter()`` chooses.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

__all__ = [
    "CHECKED",
    "REFUSED_WITH_HEADS",
    "as_batch",
    "evaluates_together",
    "optimizer_of",
    "other_than_pairs",
    "pair_of",
    "plain_model",
    "with_loss",
]

# What is replaced or called, by module, with its parameters; after an ellipsis come others, passed on as they are.
CHECKED: Mapping[str, Mapping[str, tuple]] = MappingProxyType(
    {
        "open_clip_train.main": {
            "create_model_and_transforms": ("model_name", ...),
            "parse_args": ("args",),
            "create_loss": ("args",),
            "get_data": ("args", "preprocess_fns", "epoch", "tokenizer"),
            "evaluate": ("model", "data", "epoch", "args", "tb_writer", "tokenizer"),
            "get_latest_checkpoint": ("path", "remote"),
            "pt_load": ("file_path", "map_location"),
            "train_one_epoch": ("model", "data", "loss", ...),  # epoch, optimizer
        }
    }
)

# Options of open_clip, by name, that no model with heads goes with.
REFUSED_WITH_HEADS = ("distill_model", "torchscript", "trace", "use_bnb_linear")


def with_loss(
    make_loss: Callable[[Namespace], nn.Module] | None,
    guard: Callable[[nn.Module, Namespace], nn.Module],
    continue_with: Callable[[nn.Module], None],
    get_data: Callable,
    of_host: Any,
) -> dict[str, Callable]:
    """Return the replacements, by name in ``open_clip_train.main``, that train with another loss.

    Args:
        make_loss: makes the loss from open_clip's options; None for that of the trainer.
        guard: puts something before the loss, made or the trainer's.
        continue_with: is given the loss that was made, once it is known where the training stands.
        get_data: what takes the place of the trainer's; afterwards that is known.
        of_host: has the trainer's own functions.
    """

    def create_loss(args: Namespace) -> nn.Module:
        if make_loss is None:
            return guard(of_host.create_loss(args), args)
        loss = make_loss(args)
        continue_with(loss)
        return guard(loss, args)

    return {"create_loss": create_loss, "get_data": get_data}


def optimizer_of(*of_epoch: Any) -> Any:
    """Return the optimizer of what the trainer gives ``train_one_epoch``."""
    return of_epoch[4]


def as_batch(pair: tuple[Tensor, Tensor]) -> Any:
    """Return images and texts as the trainer takes them."""
    return pair


def pair_of(batch: Any) -> tuple[Tensor, Tensor] | None:
    """Return images and texts of a batch of the trainer; None for other data."""
    return batch


def plain_model(evaluated: nn.Module) -> nn.Module:
    """Return the model in what the trainer evaluates, out of the wrapper of data parallelism."""
    return getattr(evaluated, "module", evaluated)


def evaluates_together(args: Namespace) -> bool:
    """Return whether a model can only be run by all processes at once."""
    return False


def other_than_pairs(options: Namespace) -> str | None:
    """Name the option or model that trains on something else than pictures and captions; None if none does."""
    return None
