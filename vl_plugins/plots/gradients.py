"""How strongly a loss pulls at the two pairs of a triplet, for any loss, by automatic differentiation."""

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_metric_learning.losses import GenericPairLoss
from torch import Tensor

from vl_plugins.plots.figures import COLORS, new_figure, write_figure

__all__ = ["gradient_sizes", "plot_gradient_sizes"]

POINTS = 41  # per axis


def plot_gradient_sizes(losses: Mapping[str, Any], out: str | os.PathLike[str]) -> None:
    """Draw the size of the gradients of losses over the plane of a triplet's two similarities.

    As in Xuan et al. 2020, Hard Negative Examples are Hard, but Useful; triplets in the right order are below the
    diagonal.

    Args:
        losses: title -> loss, see :func:`gradient_sizes`.
        out: ``.png``, ``.pdf`` or ``.svg``; its folder is created.
    """
    grid = (2 * torch.arange(POINTS) + 1) / POINTS - 1  # centers of intervals that cover [-1, 1]
    figure = new_figure(9, 3.8 * len(losses))
    parts = figure.subfigures(len(losses), 1, squeeze=False)[:, 0]
    for part, (title, loss) in zip(parts, losses.items(), strict=True):
        part.suptitle(title)
        both = gradient_sizes(loss, grid, grid)
        for axes, pair, sizes in zip(part.subplots(1, 2), ("positive", "negative"), both, strict=True):
            image = axes.imshow(sizes.numpy(), cmap="cividis", vmin=0, origin="lower", extent=(-1, 1, -1, 1))
            axes.axline((0, 0), slope=1, linestyle="--", color=COLORS[1])
            axes.set(
                title=f"gradient at the {pair} pair",
                xlabel="cosine of positive $s_p$",
                ylabel="cosine of negative $s_n$",
            )
            part.colorbar(image, ax=axes, label=rf"$|\partial L / \partial s_{pair[0]}|$")
    write_figure(figure, out)


def gradient_sizes(loss: Any, positive_similarities: Tensor, negative_similarities: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return :math:`|\partial L / \partial s_p|` and :math:`|\partial L / \partial s_n|` of one triplet, (N, P) each.

    The embeddings are made from the cosines and lie on the unit sphere, so the loss may use any distance. PML's
    ``GenericPairLoss`` ignores a batch of a single positive and a single negative pair: its subclasses get the triplet
    twice.

    Args:
        loss: of pytorch-metric-learning, called as ``loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)``.
        positive_similarities: (P,), cosines of anchor and positive, inside (-1, 1).
        negative_similarities: (N,), cosines of anchor and negative, inside (-1, 1).

    >>> from vl_plugins import create_loss
    >>> positive, negative = gradient_sizes(create_loss("vlc", scale=2), torch.tensor([0.0, 0.5]), torch.tensor([0.5]))
    >>> positive  # 2 * sigmoid(2 * (s_n - s_p))
    tensor([[1.4621, 1.0000]])
    """
    cosines = torch.cartesian_prod(negative_similarities, positive_similarities).requires_grad_()  # (N * P, 2)
    copies = 2 if isinstance(loss, GenericPairLoss) else 1
    index = torch.arange(copies)
    labels = torch.arange(2 * copies)
    anchors = torch.eye(3, dtype=cosines.dtype)[:1].repeat(copies, 1)
    loss = copy.deepcopy(loss).eval()  # it may count its calls
    total = cosines.new_zeros(())
    for negative, positive in cosines:
        zero = torch.zeros_like(positive)
        positives = torch.stack([positive, (1 - positive**2).sqrt(), zero]).repeat(copies, 1)
        negatives = torch.stack([negative, zero, (1 - negative**2).sqrt()]).repeat(copies, 1)
        triplets = (index, index, index, index + copies)
        total = total + loss(anchors, labels[:copies], triplets, torch.cat([positives, negatives]), labels)
    (gradients,) = torch.autograd.grad(total, cosines)
    by_negative, by_positive = gradients.abs().view(len(negative_similarities), -1, 2).unbind(dim=2)
    return by_positive, by_negative
