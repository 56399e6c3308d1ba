"""Projects and pools the features of a trunk."""

from typing import Any

from torch import Tensor, nn

from vl_plugins.errors import one_of
from vl_plugins.modules import POOLINGS, TowerFeatures

__all__ = ["Embedder", "ResidualMLP"]


class Embedder(nn.Module):
    """Project and pool the features of a trunk to one embedding per item.

    With ``avg``, ``max`` and ``gpo``, of :data:`vl_plugins.modules.POOLINGS`, every local feature is projected, and the
    embedding is pooled from them; padding stays 0. With ``own``, the trunk's own embedding is projected, and its local
    features stay as they are.

    Args:
        local_width: width of the trunk's local features.
        pooled_width: width of the trunk's own embedding; None where it has none.
        dim: D, width of the embeddings.
        pooling: ``"avg"``, ``"gpo"``, ``"max"`` or ``"own"``.
        projection: ``"linear"`` as in VSE++, ``"residual_mlp"`` for :class:`ResidualMLP`, or ``"none"``, for features
            that have the width of the embeddings.

    Attributes:
        local_width: width of the local features of the output.

    Raises:
        ValueError: an unknown name, or ``own`` pooling for a trunk that does not pool.

    Reference:
        Faghri et al. 2018, VSE++: Improving Visual-Semantic Embeddings with Hard Negatives, Section 3.1.

    >>> import torch
    >>> features = TowerFeatures(torch.rand(2, 9, 24), None, None, (3, 3), has_positions=False)
    >>> output = Embedder(24, None, 16, pooling="max")(features)
    >>> output.local.shape, output.pooled.shape
    (torch.Size([2, 9, 16]), torch.Size([2, 16]))
    """

    def __init__(
        self, local_width: int, pooled_width: int | None, dim: int, pooling: str = "avg", projection: str = "linear"
    ):
        super().__init__()
        one_of("pooling", pooling, (*POOLINGS, "own"))
        width = pooled_width if pooling == "own" else local_width
        if width is None:
            raise ValueError(f"pooling 'own' needs a trunk that pools; use one of {', '.join(POOLINGS)}")
        self.dim, self.local_width = dim, local_width if pooling == "own" else dim
        pool: Any = POOLINGS.get(pooling)
        self.pool = pool() if isinstance(pool, type) else pool
        makers: dict[str, Any] = {"linear": _linear, "none": nn.Identity, "residual_mlp": ResidualMLP}
        self.projection = makers[one_of("projection", projection, makers)](width, dim)

    def forward(self, features: TowerFeatures) -> TowerFeatures:
        """Return the features with the embeddings as ``pooled`` (B, D)."""
        if self.pool is None:
            return features._replace(pooled=self.projection(features.pooled))
        local = self._project(features.local, features.padding_mask)
        return features._replace(local=local, pooled=self.pool(local, features.padding_mask))

    def _project(self, local: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Return (B, N, D). Padding is left out and not masked: batch norm must not see it."""
        if padding_mask is None:
            return self.projection(local.flatten(0, 1)).unflatten(0, local.shape[:2])
        rows = self.projection(local[~padding_mask])
        projected = rows.new_zeros(*padding_mask.shape, self.dim)
        projected[~padding_mask] = rows
        return projected


class ResidualMLP(nn.Module):
    """A linear map plus a perceptron with a hidden layer of half the output's width, batch norm and ReLU.

    VSE infinity projects region features by it. Unlike in the authors' code, :class:`Embedder` shows it no padding.

    Args:
        width: W, of the inputs.
        dim: D, of the outputs.

    Reference:
        Chen et al. 2021, Learning the Best Pooling Strategy for Visual Semantic Embedding.
    """

    def __init__(self, width: int, dim: int):
        super().__init__()
        hidden_dim = max(dim // 2, 1)
        self.linear = _linear(width, dim)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden_dim), nn.BatchNorm1d(hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, dim)
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Return (R, D) of rows (R, W)."""
        return self.linear(rows) + self.mlp(rows)


def _linear(width: int, dim: int) -> nn.Linear:
    linear = nn.Linear(width, dim)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
