"""From the local features of an item to a single one."""

from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vl_plugins.functional.precision import full_precision
from vl_plugins.modules.positions import sinusoidal_positions
from vl_plugins.utils.checks import integer

__all__ = ["POOLINGS", "GeneralizedPooling", "average_pooling", "max_pooling"]

# What the authors' code divides the scores of ranks by; without it the coefficients start out nearly equal.
TEMPERATURE = 0.1


def average_pooling(features: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Return the mean of the features of each item.

    Args:
        features: (B, N, D); summed in float32 at least.
        padding_mask: (B, N), bool, True for features that do not exist. Whatever they hold has no influence.

    Returns:
        (B, D), in the type of the features; 0 for an item without any.

    >>> average_pooling(torch.tensor([[[1.0], [3.0], [8.0]]]), torch.tensor([[False, False, True]]))
    tensor([[2.]])
    """
    (summands,) = full_precision(features)
    if padding_mask is None:
        total, number = summands.sum(dim=1), max(features.shape[1], 1)
    else:
        total = summands.masked_fill(padding_mask[:, :, None], 0).sum(dim=1)
        number = (~padding_mask).sum(dim=1, keepdim=True).clamp(min=1)
    return (total / number).to(features.dtype)


def max_pooling(features: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """Return the largest value of each dimension, with arguments and result as of :func:`average_pooling`.

    >>> max_pooling(torch.tensor([[[1.0], [3.0], [8.0]]]), torch.tensor([[False, False, True]]))
    tensor([[3.]])
    """
    if features.shape[1] == 0:
        return features.sum(dim=1)
    if padding_mask is None:
        return features.amax(dim=1)
    largest = features.masked_fill(padding_mask[:, :, None], -torch.inf).amax(dim=1)
    return largest.masked_fill(padding_mask.all(dim=1, keepdim=True), 0)


class GeneralizedPooling(nn.Module):
    r"""Learn which pooling is best, from average to max: the generalized pooling operator of VSE infinity.

    The values of each dimension are sorted, and those of rank k get the coefficient theta_k:

    .. math:: v_d = \sum_{k=1}^{N} \theta_k \max_k\{x_{nd}\}_{n=1}^{N}, \quad \sum_k \theta_k = 1

    where max_k is the k-th largest. Coefficients depend on k and on the size N of the set alone: sinusoidal positions
    of the ranks go through a bidirectional GRU; a linear map turns the mean of its two directions into a score of each
    rank; a softmax over the ranks, of the scores divided by 0.1 as in the authors' code, gives theta.

    Args:
        position_dim: width of the ranks' positions, >= 1.
        hidden_dim: width of the GRU, >= 1.

    Raises:
        ValueError: an argument out of its range.

    Reference:
        Chen et al. 2021, Learning the Best Pooling Strategy for Visual Semantic Embedding, Section 3.2, Eq. 4-6.

    >>> GeneralizedPooling()(torch.rand(2, 5, 16)).shape
    torch.Size([2, 16])
    """

    def __init__(self, position_dim: int = 32, hidden_dim: int = 32):
        super().__init__()
        self.position_dim = integer("position_dim", position_dim, least=1)
        hidden_dim = integer("hidden_dim", hidden_dim, least=1)
        self.gru = nn.GRU(position_dim, hidden_dim, batch_first=True, bidirectional=True)
        self.to_score = nn.Linear(hidden_dim, 1, bias=False)

    def coefficients(self, sizes: Tensor) -> Tensor:
        """Return theta for sets of the given sizes.

        Args:
            sizes: (S,), int64, >= 1.

        Returns:
            (S, N), float32 at least, where N is the largest size; 0 behind the last rank of a set.
        """
        length = int(sizes.max())
        positions = sinusoidal_positions(length, self.position_dim).to(self.to_score.weight)
        packed = pack_padded_sequence(
            positions.expand(len(sizes), -1, -1), sizes.cpu(), batch_first=True, enforce_sorted=False
        )
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)  # (S, N, 2 * hidden_dim)
        scores = self.to_score(states.unflatten(2, (2, -1)).mean(dim=2)).squeeze(2)
        (scores,) = full_precision(scores)
        return (scores / TEMPERATURE).masked_fill(_behind(sizes, length), -torch.inf).softmax(dim=1)

    def forward(self, features: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the pooled features, with arguments and result as of :func:`average_pooling`."""
        batch_size, length, _ = features.shape
        if batch_size == 0 or length == 0:
            return features.sum(dim=1)
        with torch.autocast(features.device.type, enabled=False):
            if padding_mask is None:
                sorted_features = features.sort(dim=1, descending=True).values
                coefficients = self.coefficients(torch.tensor([length], device=features.device))  # (1, N)
            else:
                sizes = (~padding_mask).sum(dim=1)
                sorted_features = features.masked_fill(padding_mask[:, :, None], -torch.inf)
                sorted_features = sorted_features.sort(dim=1, descending=True).values
                sorted_features = sorted_features.masked_fill(_behind(sizes, length)[:, :, None], 0)
                # Of a batch of captions many have the same length.
                distinct_sizes, which = sizes.clamp(min=1).unique(return_inverse=True)
                coefficients = self.coefficients(distinct_sizes)[which]
                sorted_features = sorted_features[:, : coefficients.shape[1]]
            sorted_features, coefficients = full_precision(sorted_features, coefficients)
            return (coefficients[:, None] @ sorted_features).squeeze(1).to(features.dtype)


def _behind(sizes: Tensor, length: int) -> Tensor:
    """Return (S, length), True for the ranks that sets of these sizes (S,) do not have."""
    return torch.arange(length, device=sizes.device) >= sizes[:, None]


POOLINGS = MappingProxyType({"avg": average_pooling, "gpo": GeneralizedPooling, "max": max_pooling})
"""Functions of features and padding mask, and classes of modules that are, by name."""
