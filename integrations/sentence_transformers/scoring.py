"""Smooth-Chamfer similarity as a scorer of sentence-transformers."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vl_plugins.distances import SmoothChamferSimilarity

__all__ = ["join_sets", "smooth_chamfer_scores"]

Sets = Tensor | Sequence[Tensor]


def smooth_chamfer_scores(
    queries_embeddings: Sets,
    documents_embeddings: Sets,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    alpha: float = 16.0,
) -> Tensor:
    """Smooth-Chamfer similarity as ``similarity_fct`` of the losses and evaluators of ``MultiVectorEncoder``.

    It compares cosines, see :class:`~vl_plugins.distances.SmoothChamferSimilarity`; a contrastive loss needs a
    ``scale`` of 20 or more.

    Args:
        queries_embeddings: (Q, K, D), or Q tensors (k, D).
        documents_embeddings: (C, L, D), or C tensors (l, D); or N documents in each of G groups, (G, N, L, D).
        queries_mask, documents_mask: (Q, K), and (C, L) or (G, N, L), 0 for padding; without masks zero vectors are it.
        alpha: inverse temperature, > 0.

    Returns:
        (Q, C) or (Q, G * N), float32 at least; 0 for an empty document.
    """
    documents = join_sets(documents_embeddings, documents_mask)
    return SmoothChamferSimilarity(alpha)(join_sets(queries_embeddings, queries_mask), documents)


def join_sets(sets: Sets, mask: Tensor | None = None) -> Tensor:
    """Return sets as one tensor (C, L, D) with zeros as padding."""
    sets = sets if isinstance(sets, Tensor) else pad_sequence(list(sets), batch_first=True)
    return (sets if mask is None else sets * mask[..., None].to(sets.dtype)).flatten(0, -3)
