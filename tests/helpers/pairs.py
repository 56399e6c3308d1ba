"""Similarity matrices with masks of positive and negative pairs, and what losses of them give."""

import itertools

import torch

from tests.helpers.seeds import first_that, seeded
from tests.reference import losses as reference

__all__ = [
    "EMPTY",
    "assert_near",
    "diagonal_masks",
    "index_pairs",
    "label_masks",
    "loops",
    "rounding",
    "similarities_like",
    "upstream_like",
    "value_and_gradients",
]


def diagonal_masks(size):
    """One positive in each row and column."""
    positive_mask = torch.eye(size, dtype=torch.bool)
    return positive_mask, ~positive_mask


def label_masks(rows, columns):
    """Several positives for most anchors; row 0 has no negatives, row 1 no positives, column 0 neither."""
    draws = (draw_label_masks(rows, columns, 1000 * number + rows * columns) for number in itertools.count())
    return first_that(lambda masks: min(mask.sum() for mask in masks) >= rows * columns // 7, draws)


def draw_label_masks(rows, columns, seed):
    generator = seeded(seed)
    positive_mask = torch.randint(3, (rows, 1), generator=generator) == torch.randint(
        3, (1, columns), generator=generator
    )
    negative_mask = ~positive_mask
    negative_mask[0] = False
    positive_mask[0, 1] = True
    positive_mask[1] = False
    positive_mask[:, 0] = negative_mask[:, 0] = False
    return positive_mask, negative_mask


EMPTY = {
    name: (torch.full(shape, positive), torch.full(shape, negative))
    for name, shape, positive, negative in (
        ("no positives", (3, 4), False, True),
        ("no negatives", (3, 4), True, False),
        ("neither", (3, 4), False, False),
        ("no rows", (0, 4), False, False),
        ("no columns", (3, 0), False, False),
    )
}


def similarities_like(mask, dtype=torch.float64, seed=7):
    """Return a leaf of numbers in [-1, 1]."""
    return (2 * torch.rand(mask.shape, dtype=torch.float64, generator=seeded(seed)) - 1).to(dtype).requires_grad_()


def index_pairs(mask):
    return {tuple(pair) for pair in mask.nonzero().tolist()}


def upstream_like(values):
    """Return other gradients for each value, none of them 1."""
    return (0.5 + 0.25 * torch.arange(values.numel(), dtype=torch.float64)).to(values).reshape(values.shape)


def value_and_gradients(values, leaves, *, create_graph=False):
    gradients = torch.autograd.grad(
        values, leaves, upstream_like(values), retain_graph=True, create_graph=create_graph, materialize_grads=True
    )
    return values.detach(), *gradients


def loops(pair_loss, similarities, masks, **options):
    """Return the losses of all positive pairs by a reference, and the gradient of :func:`value_and_gradients`."""
    values, derivatives = reference.pair_losses(pair_loss, similarities.tolist(), *map(index_pairs, masks), **options)
    assert list(values) == [tuple(pair) for pair in masks[0].nonzero().tolist()]
    expected = similarities.new_tensor(list(values.values()))
    upstream = dict(zip(values, upstream_like(expected).tolist(), strict=True))
    gradient = reference.weighted_gradient(derivatives, upstream, *similarities.shape)
    return expected, similarities.new_tensor(gradient).reshape(similarities.shape)


def rounding(dtype, largest=1.0):
    """Return a few units in the last place of numbers up to ``largest``, the relative error of their exponentials."""
    return 4 * torch.finfo(dtype).eps * max(float(largest), 1.0)


def assert_near(actual, expected, tolerance):
    """Compare each tensor relative to its largest element."""
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        largest = other.abs().max().item() if other.numel() else 0
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance * max(largest, 1e-3))
