"""Random sets of embeddings, and values with gradients to compare."""

import torch

from tests.helpers.seeds import seeded

__all__ = ["normal", "random_mask", "upstream_like", "value_and_gradients"]


def normal(*shape, seed=0, dtype=torch.float64):
    """Return a leaf of normally distributed numbers."""
    generator = seeded(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def random_mask(sets, seed):
    """Of the sets one is full, one has all elements but the first, one is empty."""
    mask = torch.rand(sets.shape[:2], generator=seeded(seed)) < 0.6
    mask[:2], mask[1, 0], mask[-1] = True, False, False
    return mask


def upstream_like(values):
    generator = seeded(7)
    return torch.randn(values.shape, dtype=torch.float64, generator=generator).to(values)


def value_and_gradients(values, leaves):
    """Return the values and the gradients of their sum with random weights."""
    return values.detach(), *torch.autograd.grad(values, leaves, upstream_like(values))
