"""Any pytorch-metric-learning loss on two modalities, in both directions."""

import inspect
from collections.abc import Callable
from typing import Any

from pytorch_metric_learning.utils.distributed import DistributedMinerWrapper
from torch import Tensor, nn

from vl_plugins.distances import SetDistance
from vl_plugins.errors import UserError
from vl_plugins.losses.triplet import HardestNegativeLoss

__all__ = [
    "check_compares_sets",
    "check_takes_references",
    "compares_sets",
    "cross_modal_loss",
    "regularization",
    "without_regularization",
]


def cross_modal_loss(
    loss: nn.Module,
    image_embeddings: Tensor,
    image_labels: Tensor,
    text_embeddings: Tensor,
    text_labels: Tensor,
    miner: Callable | None = None,
    image_slots: Tensor | None = None,
    text_slots: Tensor | None = None,
    **options: Tensor,
) -> Tensor:
    """Return the loss of images and texts: image to text plus text to image.

    A loss with an attribute ``symmetric``, such as :class:`~vl_plugins.losses.PairLoss`, adds both directions and
    is called once. Other losses, and all losses with a miner, are called for each direction, which is one step of their
    ``warmup_steps``. With ``symmetric`` False it is image to text only.

    The ``regularization`` of a loss, as of ``smooth_chamfer``, is added once for both directions.

    Args:
        loss: called as ``loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)``.
        image_embeddings: (B, D), or sets (B, K, D) where the loss's distance compares those.
        image_labels: (B,).
        text_embeddings: (C, D) or (C, K, D).
        text_labels: (C,); a text belongs to the images of its label.
        miner: called as ``miner(embeddings, labels, ref_emb, ref_labels)``.
        image_slots: (B, K, D), from which the sets of images were made; for the regularization.
        text_slots: (C, K, D), from which the sets of texts were made.
        options: other arguments of the loss's call, such as ``scale``.

    Raises:
        UserError: a loss that cannot compare two sets, or a miner that fails with a ``TypeError``.
        ValueError: ``miner`` is pytorch-metric-learning's ``DistributedMinerWrapper(efficient=True)``, which drops each
            image's own caption.
    """
    if isinstance(miner, DistributedMinerWrapper) and miner.efficient:
        raise ValueError(
            "DistributedMinerWrapper(efficient=True) drops pairs of an image and its own caption: give its miner to "
            "vl_plugins.distributed.DistributedLoss"
        )
    if text_labels is image_labels:
        text_labels = text_labels.clone()  # the same object makes pytorch-metric-learning take both for one set
    pair_loss = without_regularization(loss)
    images, texts = (image_embeddings, image_labels), (text_embeddings, text_labels)
    if miner is None and hasattr(pair_loss, "symmetric"):
        value = pair_loss(*images, None, *texts, **options)
    else:
        steps = {module: module.step for module in pair_loss.modules() if isinstance(module, HardestNegativeLoss)}
        value = _one_direction(pair_loss, miner, *images, *texts, **options)
        if getattr(pair_loss, "symmetric", True):
            for module, step in steps.items():
                module.step = step  # both directions are one step
            value = value + _one_direction(pair_loss, miner, *texts, *images, **options)
    terms = regularization(loss, image_embeddings, text_embeddings, image_slots, text_slots)
    return value + sum(terms.values()) if terms else value


def _one_direction(loss, miner, queries, query_labels, candidates, candidate_labels, **options) -> Tensor:
    try:
        pairs = None if miner is None else miner(queries, query_labels, candidates, candidate_labels)
    except TypeError as error:  # raised by pytorch-metric-learning for most options of a wrong type
        raise UserError(f"miner {type(miner).__name__} fails, see its options: {error}") from error
    try:
        return loss(queries, query_labels, pairs, candidates, candidate_labels, **options)
    except ValueError as error:
        if "ref_emb is not supported" in str(error):  # raised by many losses of pytorch-metric-learning
            raise _takes_no_references(loss) from error
        raise


def without_regularization(loss: Any) -> nn.Module:
    """Return the loss of pairs: the ``base`` of a loss that has a method ``regularization``, otherwise the loss."""
    return loss.base if hasattr(loss, "regularization") else loss


def regularization(
    loss: Any, images: Tensor, texts: Tensor, image_slots: Tensor | None, text_slots: Tensor | None
) -> dict[str, Tensor]:
    """Return the terms by name that a loss adds to that of the pairs; most losses add none."""
    return loss.regularization(images, texts, image_slots, text_slots) if hasattr(loss, "regularization") else {}


def compares_sets(loss: Any) -> bool:
    """Return whether a loss compares sets of embeddings."""
    return isinstance(getattr(loss, "distance", None), SetDistance)


def check_compares_sets(loss: Any) -> None:
    """Raise ``UserError`` unless :func:`compares_sets`."""
    if not compares_sets(loss):
        name = type(getattr(loss, "distance", loss)).__name__
        raise UserError(
            f"head set: {name} does not compare sets; give distance smooth_chamfer, chamfer, mil or match_probability"
        )


def check_takes_references(loss: nn.Module) -> None:
    """Raise ``UserError`` for a loss that compares one set of embeddings with itself only.

    >>> from pytorch_metric_learning.losses import MultipleLosses, NTXentLoss
    >>> check_takes_references(NTXentLoss())
    >>> check_takes_references(MultipleLosses([NTXentLoss()]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    vl_plugins.errors.UserError: MultipleLosses takes no ref_emb...
    """
    parameters = inspect.signature(loss.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any and not {"labels", "ref_emb", "ref_labels"} <= parameters.keys():
        raise _takes_no_references(loss)


def _takes_no_references(loss: nn.Module) -> UserError:
    return UserError(
        f"{type(loss).__name__} takes no ref_emb and ref_labels, so it cannot compare images with texts: "
        "one_set: true in the configuration of the trainer compares both as one set"
    )
