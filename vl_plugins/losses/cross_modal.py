"""Any pytorch-metric-learning loss on two modalities, in both directions."""

import inspect
from collections.abc import Callable

from torch import Tensor, nn

from vl_plugins.losses.wrappers import check_miner
from vl_plugins.utils.errors import UserError

__all__ = ["check_takes_references", "cross_modal_loss", "one_direction", "pair_loss_of"]


def cross_modal_loss(
    loss: nn.Module,
    images: Tensor,
    image_labels: Tensor,
    texts: Tensor,
    text_labels: Tensor,
    *,
    miner: Callable | None = None,
    image_slots: Tensor | None = None,
    text_slots: Tensor | None = None,
) -> Tensor:
    """Return the loss of images and texts: image to text plus text to image.

    A loss that adds both directions itself says so with an attribute ``symmetric``, as all of ours do, and is called
    once; where that is False, it is image to text only. Any other loss is called once for each direction, and so is one
    with a miner, which chooses pairs for one direction at a time.

    A loss with a method ``regularization``, as ``smooth_chamfer``, has it added once for both directions.

    Args:
        loss: called as ``loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)``.
        images: (B, D), or sets (B, K, D) where the loss's distance compares those.
        image_labels: (B,).
        texts: (C, D) or (C, K, D).
        text_labels: (C,); a text belongs to the images of its label.
        miner: called as ``miner(embeddings, labels, ref_emb, ref_labels)``.
        image_slots: (B, K, D), from which the sets were made; for the regularization.
        text_slots: (C, K, D), likewise.

    Raises:
        UserError: a loss that cannot compare two sets, or a miner that fails with a ``TypeError``.
        ValueError: ``miner`` is pytorch-metric-learning's ``DistributedMinerWrapper(efficient=True)``, which drops each
            image's own caption: :class:`vl_plugins.losses.wrappers.DistributedMinerWrapper` keeps it.
    """
    if text_labels is image_labels:
        text_labels = text_labels.clone()  # the same object makes pytorch-metric-learning take both for one set
    pair_loss = pair_loss_of(loss)
    if miner is None and hasattr(pair_loss, "symmetric"):
        value = pair_loss(images, image_labels, ref_emb=texts, ref_labels=text_labels)
    else:
        value = one_direction(pair_loss, miner, images, image_labels, texts, text_labels)
        if getattr(pair_loss, "symmetric", True):
            value = value + one_direction(pair_loss, miner, texts, text_labels, images, image_labels)
    if pair_loss is not loss:
        value = value + sum(loss.regularization(images, texts, image_slots, text_slots).values())
    return value


def one_direction(
    loss: nn.Module,
    miner: Callable | None,
    queries: Tensor,
    query_labels: Tensor,
    candidates: Tensor,
    candidate_labels: Tensor,
    **options: Tensor,
) -> Tensor:
    """Return the loss of queries that look for candidates; see :func:`cross_modal_loss` for the shapes and errors.

    ``options`` are more arguments of the loss's call.
    """
    check_miner(miner)
    try:
        pairs = None if miner is None else miner(queries, query_labels, candidates, candidate_labels)
    except TypeError as error:  # the first that pytorch-metric-learning says of most options of a wrong type
        raise UserError(f"miner {type(miner).__name__} fails, see its options: {error}") from error
    try:
        return loss(queries, query_labels, pairs, candidates, candidate_labels, **options)
    except ValueError as error:
        if "ref_emb is not supported" in str(error):  # as many losses of pytorch-metric-learning say when called
            raise _takes_no_references(loss) from error
        raise


def pair_loss_of(loss: nn.Module) -> nn.Module:
    """Return the part of a loss that compares pairs: all of it, but of one with ``regularization`` its ``base``."""
    return loss.base if hasattr(loss, "regularization") else loss


def check_takes_references(loss: nn.Module) -> None:
    """Raise ``UserError`` for a loss that compares one set of embeddings with itself only.

    >>> from pytorch_metric_learning.losses import MultipleLosses, NTXentLoss
    >>> check_takes_references(NTXentLoss())
    >>> check_takes_references(MultipleLosses([NTXentLoss()]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    vl_plugins.utils.errors.UserError: MultipleLosses takes no ref_emb...
    """
    parameters = inspect.signature(loss.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any and not {"labels", "ref_emb", "ref_labels"} <= parameters.keys():
        raise _takes_no_references(loss)


def _takes_no_references(loss: nn.Module) -> UserError:
    return UserError(
        f"{type(loss).__name__} takes no ref_emb and ref_labels, so it cannot compare images with texts: "
        "the trainers MetricLossOnly and TwoStreamMetricLoss give it both as one set"
    )
