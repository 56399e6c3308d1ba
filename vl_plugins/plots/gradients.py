"""How strongly a loss pulls at the two pairs of a triplet, for any loss, by automatic differentiation."""

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_metric_learning.losses import GenericPairLoss
from torch import Tensor

from vl_plugins.errors import UserError
from vl_plugins.plots.figures import new_figure, picture_file, write_figure
from vl_plugins.plots.plane import draw_plane, similarity_grid

__all__ = ["gradient_sizes", "plot_gradient_sizes"]

POINTS = 41  # per axis; their combinations are that many squared batches


def plot_gradient_sizes(losses: Mapping[str, Any], out: str | os.PathLike[str]) -> None:
    """Draw the size of the gradients of losses over the plane of a triplet's two similarities.

    Args:
        losses: title -> loss, see :func:`gradient_sizes`; each takes a few seconds.
        out: the picture, by its suffix ``.png``, ``.pdf`` or ``.svg``; its folder is created.

    Raises:
        UserError: no loss, a loss that cannot be drawn, another suffix, or a picture that cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    if not losses:
        raise UserError("there is no loss to draw: name at least one")
    out = picture_file(out)
    grid = similarity_grid(POINTS)
    sizes = {}
    for title, loss in losses.items():
        try:
            sizes[title] = gradient_sizes(loss, grid, grid)
        except UserError as error:
            raise UserError(f"{title}: {error}") from error
    write_figure(_draw_gradient_sizes(sizes), out)


def gradient_sizes(loss: Any, positive_similarities: Tensor, negative_similarities: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return how fast a loss changes with the similarities of a triplet that is alone in its batch.

    That is :math:`|\partial L / \partial s_p|` and :math:`|\partial L / \partial s_n|` of one anchor with one positive
    and one negative. The embeddings lie on the unit sphere in three dimensions, positive and negative in perpendicular
    directions from the anchor, and move along great circles through it, so the loss may use any distance.

    PML's ``GenericPairLoss`` ignores a batch of a single positive and a single negative pair: its subclasses get the
    triplet twice, with two anchors, and a reducer that takes a sum instead of a mean doubles the gradient.

    Args:
        loss: of pytorch-metric-learning, called as ``loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)``.
        positive_similarities: (P,), cosines of anchor and positive, inside (-1, 1).
        negative_similarities: (N,), cosines of anchor and negative, inside (-1, 1).

    Returns:
        Two (N, P) tensors, for positive and negative pair, of the similarities' type.

    Raises:
        ValueError: a cosine that is not inside (-1, 1).
        UserError: the loss cannot be called so, or its value does not depend on the similarities.

    >>> from vl_plugins import create_loss
    >>> positive, negative = gradient_sizes(create_loss("vlc", scale=2), torch.tensor([0.0, 0.5]), torch.tensor([0.5]))
    >>> positive  # 2 * sigmoid(2 * (s_n - s_p))
    tensor([[1.4621, 1.0000]])
    """
    for name, similarities in (("positive", positive_similarities), ("negative", negative_similarities)):
        if similarities.ndim != 1 or not bool((similarities.abs() < 1).all()):
            raise ValueError(f"{name}_similarities must be a vector of cosines inside (-1, 1), got {similarities}")
    negative_cosines, positive_cosines = torch.meshgrid(negative_similarities, positive_similarities, indexing="ij")
    positives, positive_tangents = _on_great_circle(positive_cosines, axis=1)  # (N, P, 3)
    negatives, negative_tangents = _on_great_circle(negative_cosines, axis=2)

    copies = 2 if isinstance(loss, GenericPairLoss) else 1
    candidates = torch.stack([positives] * copies + [negatives] * copies, dim=2).requires_grad_()  # (N, P, C, 3)
    gradients = _gradients(loss, candidates)
    to_positives, to_negatives = gradients.split(copies, dim=2)
    return (
        (to_positives.sum(dim=2) * positive_tangents).sum(dim=-1).abs(),
        (to_negatives.sum(dim=2) * negative_tangents).sum(dim=-1).abs(),
    )


def _on_great_circle(cosines: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the points (..., 3) with these cosines to the first axis, towards another, and their derivatives."""
    sines = (1 - cosines.square()).sqrt()
    points, tangents = (torch.zeros(*cosines.shape, 3, dtype=cosines.dtype) for _ in range(2))
    points[..., 0], points[..., axis] = cosines, sines
    tangents[..., 0], tangents[..., axis] = 1, -cosines / sines
    return points, tangents


def _gradients(loss: Any, candidates: Tensor) -> Tensor:
    """Return the gradients of ``candidates`` (N, P, C, 3), C / 2 positives before as many negatives, batch by batch."""
    copies = candidates.shape[2] // 2
    anchors = candidates.new_tensor([[1.0, 0.0, 0.0]]).repeat(copies, 1)
    index = torch.arange(copies)
    triplets = (index, index, index, index + copies)
    labels = torch.arange(2 * copies)
    try:
        loss = copy.deepcopy(loss).eval()  # it may count its calls, as training steps even
        total = sum(
            loss(anchors, labels[:copies], triplets, batch, labels) for batch in candidates.flatten(0, 1).unbind()
        )
        (gradients,) = torch.autograd.grad(total, candidates)
    except Exception as error:  # whatever goes wrong while the module of another distribution runs
        raise UserError(
            f"{type(loss).__name__} has no gradient for one anchor with one positive and one negative: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    return gradients


def _draw_gradient_sizes(sizes: Mapping[str, tuple[Tensor, Tensor]]) -> Any:
    """Return the ``matplotlib.figure.Figure``."""
    figure = new_figure(9, 3.8 * len(sizes))
    parts = figure.subfigures(len(sizes), 1, squeeze=False)[:, 0]
    for part, (title, both) in zip(parts, sizes.items(), strict=True):
        part.suptitle(title)
        for axes, pair, symbol, values in zip(
            part.subplots(1, 2), ("positive", "negative"), ("p", "n"), both, strict=True
        ):
            image = draw_plane(axes, values)
            axes.set_title(f"gradient at the {pair} pair")
            part.colorbar(image, ax=axes, label=rf"$|\partial L / \partial s_{symbol}|$")
    figure.axes[0].legend(loc="lower right")
    return figure
