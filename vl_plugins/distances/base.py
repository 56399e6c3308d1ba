"""What distances of embedding sets have in common."""

import math

import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor
from torch.nn.functional import normalize

from vl_plugins.losses.checks import integer

__all__ = ["SetDistance", "elements_present"]


class SetDistance(BaseDistance):
    """A similarity of sets of embeddings, as a pytorch-metric-learning distance: larger is closer.

    An item is a set of K vectors, (B, K, D); K may differ on the two sides. What insists on two dimensions, as queues
    of pytorch-metric-learning do, takes sets packed as (B, ``set_size`` * D); the number of vectors of the other side
    then follows from its own width. With the default ``set_size`` of 1 an embedding (B, D) is a set of one.

    A vector of zeros is not in its set: that is how sets of unequal size share a tensor. A set of nothing else has the
    similarity 0 to any set.

    Args:
        set_size: K of packed sets.
        kwargs: those of pytorch-metric-learning's ``BaseDistance``. With ``normalize_embeddings=False`` the vectors'
            dot products take the place of their cosines.

    Raises:
        ValueError: a hyper-parameter out of its range.
    """

    def __init__(self, set_size: int = 1, **kwargs):
        super().__init__(is_inverted=True, **kwargs)
        self.set_size = integer("set_size", set_size, least=1)
        self.add_to_recordable_attributes(name="set_size", is_stat=False)

    def similarity(
        self, x: Tensor, y: Tensor, *, x_mask: Tensor | None, y_mask: Tensor | None, normalize: bool
    ) -> Tensor:
        """Return the similarities (A, C) of sets (A, K1, D) and (C, K2, D); masks (A, K1) and (C, K2) are bool."""
        raise NotImplementedError

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return the similarities, (A, C).

        Args:
            query_emb: (A, K1, D), or (A, set_size * D).
            ref_emb: (C, K2, D), or (C, K2 * D).
        """
        queries, references = self.unpack(query_emb, ref_emb)
        return self.similarity(
            queries,
            references,
            x_mask=elements_present(queries),
            y_mask=elements_present(references),
            normalize=self.normalize_embeddings,
        )

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return the similarity of each set and the one at its place, (A,)."""
        queries, references = self.unpack(self.maybe_normalize(query_emb), self.maybe_normalize(ref_emb))
        return torch.cat(
            [self.compute_mat(*pair)[0] for pair in zip(queries.split(1), references.split(1), strict=True)]
        )

    def unpack(self, query_emb: Tensor, ref_emb: Tensor) -> tuple[Tensor, Tensor]:
        """Return both sides as (A, K1, D) and (C, K2, D).

        Raises:
            ValueError: shapes that do not fit each other or ``set_size``.
        """
        sides = query_emb, ref_emb
        three_dimensional = [side.shape[2] for side in sides if side.ndim == 3]
        if three_dimensional:
            width = three_dimensional[0]
        else:
            width = query_emb.shape[-1] // self.set_size if query_emb.shape[-1] % self.set_size == 0 else 0
        for side in sides:
            fits = (
                side.shape[2] == width
                if side.ndim == 3
                else side.ndim == 2 and width > 0 and side.shape[1] % width == 0
            )
            if not fits:
                raise ValueError(
                    f"embeddings must be sets (B, K, D) with the same D, or packed (B, {self.set_size} * D), "
                    f"got {tuple(query_emb.shape)} and {tuple(ref_emb.shape)}"
                )
        return tuple(side if side.ndim == 3 else side.unflatten(1, (-1, width)) for side in sides)

    def check_shapes(self, query_emb: Tensor, ref_emb: Tensor | None) -> None:
        self.unpack(query_emb, query_emb if ref_emb is None else ref_emb)

    def normalize(self, embeddings: Tensor, dim: int = -1, **kwargs) -> Tensor:
        """Return the embeddings with all vectors of unit length."""
        sets, _ = self.unpack(embeddings, embeddings)
        return normalize(sets, p=self.p, dim=-1, **kwargs).view_as(embeddings)

    def maybe_normalize(self, embeddings: Tensor, dim: int = -1, **kwargs) -> Tensor:
        """Return the embeddings as they are: the similarity divides by the lengths itself, without a copy."""
        return embeddings

    def get_norm(self, embeddings: Tensor, dim: int = -1, **kwargs) -> Tensor:
        sets, _ = self.unpack(embeddings, embeddings)
        return torch.norm(sets, p=self.p, dim=-1, **kwargs)


def elements_present(sets: Tensor) -> Tensor | None:
    """Return which vectors are not zeros, (B, K) bool, or None where all are."""
    if math.prod(sets.shape) == 0:
        return None
    # Compared with zero in this direction, so that NaN is an element.
    present = ~(torch.linalg.vector_norm(sets.detach(), ord=math.inf, dim=2) == 0)
    return None if present.all() else present
