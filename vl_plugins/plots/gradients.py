"""How strongly a loss pulls at the two pairs of a triplet, for any loss, by automatic differentiation."""

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_metric_learning.losses import GenericPairLoss
from torch import Tensor

from vl_plugins.plots.figures import COLORS, new_figure, picture_file, write_figure

__all__ = ["gradient_sizes", "plot_gradient_sizes"]

POINTS = 41  # per axis; their combinations are that many squared batches


def plot_gradient_sizes(losses: Mapping[str, Any], out: str | os.PathLike[str]) -> None:
    """Draw the size of the gradients of losses over the plane of a triplet's two similarities.

    As in Xuan et al. 2020, Hard Negative Examples are Hard, but Useful. Triplets in the right order are below the
    diagonal.

    Args:
        losses: title -> loss, see :func:`gradient_sizes`; each takes some seconds.
        out: the picture, by its suffix ``.png``, ``.pdf`` or ``.svg``; its folder is created.

    Raises:
        UserError: another suffix, or a picture that cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    out = picture_file(out)
    grid = (2 * torch.arange(POINTS) + 1) / POINTS - 1  # centers of equal intervals that cover [-1, 1]
    figure = new_figure(9, 3.8 * len(losses))
    parts = figure.subfigures(len(losses), 1, squeeze=False)[:, 0]
    for part, (title, loss) in zip(parts, losses.items(), strict=True):
        part.suptitle(title)
        both = gradient_sizes(loss, grid, grid)
        for axes, pair, sizes in zip(part.subplots(1, 2), ("positive", "negative"), both, strict=True):
            # A map with the same order of lightness for every kind of color vision, and in gray.
            image = axes.imshow(sizes.numpy(), cmap="cividis", vmin=0, origin="lower", extent=(-1, 1, -1, 1))
            axes.plot([-1, 1], [-1, 1], "--", color=COLORS[1], linewidth=1.2, label="$s_p = s_n$")
            axes.set(
                title=f"gradient at the {pair} pair",
                xlabel="cosine of anchor and positive $s_p$",
                ylabel="cosine of anchor and negative $s_n$",
                xlim=(-1, 1),
                ylim=(-1, 1),
            )
            part.colorbar(image, ax=axes, label=rf"$|\partial L / \partial s_{pair[0]}|$")
    figure.axes[0].legend(loc="lower right")
    write_figure(figure, out)


def gradient_sizes(loss: Any, positive_similarities: Tensor, negative_similarities: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return how fast a loss changes with the two similarities of a triplet that is alone in its batch.

    That is :math:`|\partial L / \partial s_p|` and :math:`|\partial L / \partial s_n|` of one anchor with one positive
    and one negative. Their embeddings lie on the unit sphere, so the loss may use any distance.

    pytorch-metric-learning's ``GenericPairLoss`` ignores a batch of a single positive and a single negative pair: its
    subclasses get the triplet twice, with two anchors, and a reducer that takes a sum doubles the gradient.

    Args:
        loss: of pytorch-metric-learning, called as ``loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)``.
        positive_similarities: (P,), cosines of anchor and positive, inside (-1, 1).
        negative_similarities: (N,), cosines of anchor and negative, inside (-1, 1).

    Returns:
        Two (N, P) tensors, for positive and negative pair, of the similarities' type.

    >>> from vl_plugins import create_loss
    >>> positive, negative = gradient_sizes(create_loss("vlc", scale=2), torch.tensor([0.0, 0.5]), torch.tensor([0.5]))
    >>> positive  # 2 * sigmoid(2 * (s_n - s_p))
    tensor([[1.4621, 1.0000]])
    """
    cosines = torch.cartesian_prod(negative_similarities, positive_similarities).requires_grad_()  # (N * P, 2)
    copies = 2 if isinstance(loss, GenericPairLoss) else 1
    anchors = torch.eye(3, dtype=cosines.dtype)[:1].repeat(copies, 1)
    index, labels = torch.arange(copies), torch.arange(2 * copies)
    triplets = (index, index, index, index + copies)
    loss = copy.deepcopy(loss).eval()  # it may count training steps
    total = cosines.new_zeros(())
    for negative, positive in cosines:
        zero = torch.zeros_like(positive)
        positives = torch.stack([positive, (1 - positive.square()).sqrt(), zero]).repeat(copies, 1)
        negatives = torch.stack([negative, zero, (1 - negative.square()).sqrt()]).repeat(copies, 1)
        total = total + loss(anchors, labels[:copies], triplets, torch.cat([positives, negatives]), labels)
    (gradients,) = torch.autograd.grad(total, cosines)
    of_negatives, of_positives = gradients.abs().view(len(negative_similarities), -1, 2).unbind(dim=2)
    return of_positives, of_negatives
