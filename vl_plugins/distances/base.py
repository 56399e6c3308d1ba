"""What distances of embedding sets have in common."""

import math

import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor

from vl_plugins.functional.precision import full_precision
from vl_plugins.utils.checks import integer

__all__ = ["SetDistance", "elements_present"]


class SetDistance(BaseDistance):
    """A similarity of sets of embeddings as a pytorch-metric-learning distance: larger is closer.

    An item is a set of K vectors, its elements: (B, K, D), where K may differ on the two sides. Sets may also be packed
    as (B, K * D), because miners' containers such as ``CrossBatchMemory`` and ``AccuracyCalculator`` insist on two
    dimensions. Then ``set_size`` is the K of the query, the first argument; the K of the other side follows from its
    width. If one side only is packed, the other one tells D, and ``set_size`` does not matter. With the default
    ``set_size``, 1, embeddings (B, D) are sets of one.

    An element that is exactly zero is padding, as sets of unequal size need it: it is not in the set and has no
    gradient. A set without any other element has the similarity 0 to all.

    Everything is computed in float32 at least. Second derivatives there are none.

    Args:
        set_size: number of elements of a packed query, >= 1.
        kwargs: those of pytorch-metric-learning's ``BaseDistance``, such as ``normalize_embeddings`` (each element is
            normalised, or dot products take the place of cosines), ``p`` (by which norm), ``power`` and
            ``collect_stats``.

    Raises:
        ValueError: ``set_size`` out of its range.
    """

    def __init__(self, set_size: int = 1, **kwargs):
        super().__init__(is_inverted=True, **kwargs)
        self.set_size = integer("set_size", set_size, least=1)
        self.add_to_recordable_attributes(name="set_size", is_stat=False)

    def similarity(self, x: Tensor, y: Tensor, **options) -> Tensor:
        """Return the similarity of sets.

        Args:
            x: (A, K1, D).
            y: (C, K2, D).
            options: ``x_mask``, ``y_mask``, ``normalize`` and ``paired`` of the functions in
                :mod:`vl_plugins.functional.set_similarity`.
        """
        raise NotImplementedError

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        """Return the similarities, (A, C).

        Args:
            query_emb: (A, K1, D), or packed (A, set_size * D).
            ref_emb: (C, K2, D), or packed (C, K2 * D); the queries themselves if left out.

        Raises:
            ValueError: shapes that do not fit each other.
        """
        # Not the base class's, which would keep normalised copies; :meth:`compute_mat` needs none.
        self.reset_stats()
        queries, references = self.unpack(query_emb, query_emb if ref_emb is None else ref_emb)
        if self.collect_stats:
            with torch.no_grad():
                normalized = (self.maybe_normalize(sets) for sets in (queries, references))
                self.set_default_stats(queries, references, *normalized)
        similarities = self.compute_mat(queries, references)
        return similarities if self.power == 1 else similarities**self.power

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return the similarities, (A, C), of embeddings that are normalised already or not."""
        return self._similarity(query_emb, ref_emb, paired=False)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return the similarity of each set and the one at its place, (A,); normalised already or not."""
        return self._similarity(query_emb, ref_emb, paired=True)

    def unpack(self, query_emb: Tensor, ref_emb: Tensor) -> tuple[Tensor, Tensor]:
        """Return both sides as (A, K1, D) and (C, K2, D).

        Raises:
            ValueError: shapes that do not fit each other or ``set_size``.
        """
        sides = query_emb, ref_emb
        widths = [side.shape[2] for side in sides if side.ndim == 3]
        if not widths and query_emb.ndim == 2 and query_emb.shape[1] % self.set_size == 0:
            widths = [query_emb.shape[1] // self.set_size]
        if not all(
            len(set(widths)) == 1 and widths[0] > 0 and side.ndim in (2, 3) and side.shape[-1] % widths[0] == 0
            for side in sides
        ):
            raise ValueError(
                f"embeddings must be sets (B, K, D) of the same D, or packed: (B, {self.set_size} * D) for the query "
                f"and a multiple of D for the other, got {tuple(query_emb.shape)} and {tuple(ref_emb.shape)}"
            )
        return tuple(
            side if side.ndim == 3 else side.unflatten(1, (side.shape[1] // widths[0], widths[0])) for side in sides
        )

    def check_shapes(self, query_emb: Tensor, ref_emb: Tensor | None) -> None:
        self.unpack(query_emb, query_emb if ref_emb is None else ref_emb)

    def normalize(self, embeddings: Tensor, dim: int = 1, **kwargs) -> Tensor:
        """Return the embeddings, packed or not, with all elements normalised."""
        (embeddings,) = full_precision(embeddings)
        return super().normalize(self._elements(embeddings), dim=-1, **kwargs).view_as(embeddings)

    def get_norm(self, embeddings: Tensor, dim: int = 1, **kwargs) -> Tensor:
        """Return the norms of all elements, (B, K)."""
        return super().get_norm(self._elements(embeddings), dim=-1, **kwargs)

    def _elements(self, embeddings: Tensor) -> Tensor:
        return self.unpack(embeddings, embeddings)[0]

    def _similarity(self, query_emb: Tensor, ref_emb: Tensor, *, paired: bool) -> Tensor:
        queries, references = self.unpack(query_emb, ref_emb)
        normalize = self.normalize_embeddings
        if normalize and self.p != 2:
            queries, references, normalize = self.normalize(queries), self.normalize(references), False
        x_mask, y_mask = elements_present(queries), elements_present(references)
        return self.similarity(
            queries,
            references,
            x_mask=x_mask,
            y_mask=y_mask,
            normalize=normalize,
            paired=paired,
        )


def elements_present(sets: Tensor) -> Tensor | None:
    """Return which elements of (B, K, D) are in their sets, (B, K) bool: those that are not zero; None if all are.

    >>> elements_present(torch.tensor([[[1.0, 2.0], [0.0, 0.0]]]))
    tensor([[ True, False]])
    """
    if sets.numel() == 0:
        return None
    # NaN is not equal to zero either.
    present = torch.linalg.vector_norm(sets.detach(), ord=math.inf, dim=2) != 0
    return None if present.all() else present
