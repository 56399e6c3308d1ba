"""Pooling of an item's local features."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vl_plugins.modules.positions import kept_positions
from vl_plugins.numerics import full_precision

__all__ = ["POOLINGS", "GeneralizedPooling", "average_pooling", "max_pooling"]


def average_pooling(features: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Return the mean of the features of each item.

    Args:
        features: (B, N, D); summed in float32 at least.
        padding_mask: (B, N), bool, True for features that do not exist; their values have no influence.

    Returns:
        (B, D), in the dtype of the features; 0 for an item without features.

    >>> average_pooling(torch.tensor([[[1.0], [3.0], [8.0]]]), torch.tensor([[False, False, True]]))
    tensor([[2.]])
    """
    padding_mask = _padding_mask(features, padding_mask)
    (summands,) = full_precision(features.masked_fill(padding_mask[:, :, None], 0))
    sizes = (~padding_mask).sum(dim=1, keepdim=True).clamp(min=1)
    return (summands.sum(dim=1) / sizes).to(features.dtype)


def max_pooling(features: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Return the largest value of each dimension; arguments and result as in :func:`average_pooling`.

    >>> max_pooling(torch.tensor([[[1.0], [3.0], [8.0]]]), torch.tensor([[False, False, True]]))
    tensor([[3.]])
    """
    if features.shape[1] == 0:
        return features.sum(dim=1)
    if padding_mask is None:
        return features.amax(dim=1)
    padding_mask = _padding_mask(features, padding_mask)
    largest = features.masked_fill(padding_mask[:, :, None], -torch.inf).amax(dim=1)
    return largest.masked_fill(padding_mask.all(dim=1, keepdim=True), 0)


class GeneralizedPooling(nn.Module):
    r"""Learned pooling between average and max: the generalized pooling operator (GPO) of VSE infinity.

    The values of each dimension are sorted, and the k-th largest gets the coefficient theta_k:

    .. math:: v_d = \sum_{k=1}^{N} \theta_k \max_k\{x_{nd}\}_{n=1}^{N}, \quad \sum_k \theta_k = 1

    Coefficients depend on k and the set's size N alone. Sinusoidal positions of the ranks go through a bidirectional
    GRU, and the mean of its two directions through a linear map, which gives a score for each rank; theta is the
    softmax of the scores divided by 0.1, as in the authors' code: else the coefficients would start nearly equal.

    Args:
        position_dim: width of the ranks' positions, >= 1.
        hidden_dim: width of the GRU, >= 1.

    Reference:
        Chen et al. 2021, Learning the Best Pooling Strategy for Visual Semantic Embedding, Section 3.2, Eq. 4-6.

    >>> GeneralizedPooling()(torch.rand(2, 5, 16)).shape
    torch.Size([2, 16])
    """

    def __init__(self, position_dim: int = 32, hidden_dim: int = 32):
        super().__init__()
        self.position_dim = position_dim
        self.gru = nn.GRU(position_dim, hidden_dim, batch_first=True, bidirectional=True)
        self.to_score = nn.Linear(hidden_dim, 1, bias=False)

    def coefficients(self, sizes: Tensor) -> Tensor:
        """Return theta for sets of the sizes (S,), int64, >= 1: (S, largest size), float32 at least, 0 past a size."""
        length = int(sizes.max())
        weight = self.to_score.weight
        positions = kept_positions(weight.device, length, self.position_dim).to(weight.dtype).expand(len(sizes), -1, -1)
        packed = pack_padded_sequence(positions, sizes.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)  # (S, N, 2 * hidden_dim)
        (scores,) = full_precision(self.to_score(states.unflatten(2, (2, -1)).mean(dim=2)).squeeze(2))
        return (scores / 0.1).masked_fill(_past(sizes, length), -torch.inf).softmax(dim=1)

    def forward(self, features: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the pooled features; arguments and result as in :func:`average_pooling`."""
        if 0 in features.shape[:2]:
            return features.sum(dim=1)
        padding_mask = _padding_mask(features, padding_mask)
        with torch.autocast(features.device.type, enabled=False):
            sizes = (~padding_mask).sum(dim=1)
            ranked = features.masked_fill(padding_mask[:, :, None], -torch.inf).sort(dim=1, descending=True).values
            ranked = ranked.masked_fill(_past(sizes, features.shape[1])[:, :, None], 0)
            # Many items of a batch have the same size.
            distinct_sizes, which = sizes.clamp(min=1).unique(return_inverse=True)
            coefficients = self.coefficients(distinct_sizes)[which]
            ranked, coefficients = full_precision(ranked[:, : coefficients.shape[1]], coefficients)
            return (coefficients[:, None] @ ranked).squeeze(1).to(features.dtype)


def _padding_mask(features: Tensor, padding_mask: Tensor | None) -> Tensor:
    if padding_mask is None:
        return features.new_zeros(features.shape[:2], dtype=torch.bool)
    if padding_mask.shape != features.shape[:2]:  # would be broadcast
        expected, given = tuple(features.shape[:2]), tuple(padding_mask.shape)
        raise ValueError(f"padding_mask must have the shape {expected}, got {given}")
    return padding_mask


def _past(sizes: Tensor, length: int) -> Tensor:
    """Return (S, length), True for the ranks past the size of each set."""
    return torch.arange(length, device=sizes.device) >= sizes[:, None]


POOLINGS = {"avg": average_pooling, "gpo": GeneralizedPooling, "max": max_pooling}
"""By name: functions of features and padding mask, and classes of modules that are called likewise."""
