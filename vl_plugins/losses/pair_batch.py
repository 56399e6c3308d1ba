"""The data of one call of a loss."""

from dataclasses import dataclass
from typing import Any

import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor

from vl_plugins.kernels import equal_label_pairs
from vl_plugins.utils.checks import tensor_or_none

__all__ = ["IndicesTuple", "PairBatch"]

IndicesTuple = tuple[Tensor, ...]
"""A miner's (anchors, positives, negatives), or (anchors, positives, anchors, negatives)."""


@dataclass(frozen=True)
class PairBatch:
    """What one call of a loss compares.

    Attributes:
        embeddings: (A, D), the anchors.
        ref_emb: (C, D), the candidates.
        labels, ref_labels: (A,) and (C,); None where they are not given.
        pairs: rows and columns of the M positive pairs.
        negative_pairs: those of the negative pairs; None for all pairs of different labels.
        same_set: ``ref_emb`` is ``embeddings``; an item is not its own positive.
        symmetric: rows and columns are anchors; otherwise rows only.
        scale: inverse temperature; 1 for a loss without one.
        distance: of the loss.
        use_kernel: :mod:`vl_plugins.kernels` can compute the loss.
    """

    embeddings: Tensor
    ref_emb: Tensor
    labels: Tensor | None
    ref_labels: Tensor | None
    pairs: tuple[Tensor, Tensor]
    negative_pairs: tuple[Tensor, Tensor] | None
    same_set: bool
    symmetric: bool
    scale: float | Tensor
    distance: BaseDistance
    use_kernel: bool

    @classmethod
    def make(
        cls,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: IndicesTuple | None,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
        **options: Any,
    ) -> "PairBatch":
        """Find the pairs of a call; ``symmetric`` is dropped where there is one direction only.

        Raises:
            ValueError: labels missing, or tensors that do not fit each other.
        """
        if indices_tuple is not None and len(indices_tuple) not in (3, 4):
            raise ValueError(f"indices_tuple must have 3 tensors (triplets) or 4 (pairs), got {len(indices_tuple)}")
        same_set = ref_emb is None
        if ref_emb is None:
            ref_emb, ref_labels = embeddings, labels
        for name, values, side in (("labels", labels, embeddings), ("ref_labels", ref_labels, ref_emb)):
            tensor_or_none(name, values)
            if values is not None and values.shape != side.shape[:1]:
                raise ValueError(f"{name} must have the shape {tuple(side.shape[:1])}, got {tuple(values.shape)}")
        # A distance of sets checks dimensions itself: packed sets may have different sizes.
        if not hasattr(options["distance"], "unpack") and ref_emb.shape[-1] != embeddings.shape[-1]:
            raise ValueError(
                f"ref_emb must have the dimension of embeddings, {tuple(embeddings.shape)}, got {tuple(ref_emb.shape)}"
            )
        if ref_emb.device != embeddings.device:
            raise ValueError(f"ref_emb must be on the device of embeddings, {embeddings.device}, got {ref_emb.device}")
        labels, ref_labels = (None if side is None else side.to(embeddings.device) for side in (labels, ref_labels))
        negative_pairs = None
        if indices_tuple is None:
            if labels is None or ref_labels is None:
                name = "labels" if labels is None else "ref_labels"
                raise ValueError(f"{name} must be given without an indices_tuple, got None")
            rows, columns = equal_label_pairs(labels, ref_labels, same_set=same_set)
        else:
            anchors, positives, *negatives = indices_tuple
            negative_pairs = anchors if len(negatives) == 1 else negatives[0], negatives[-1]
            rows, columns = torch.where(_mask(embeddings, ref_emb, (anchors, positives)))
        options["symmetric"] = options["symmetric"] and not same_set and indices_tuple is None
        return cls(embeddings, ref_emb, labels, ref_labels, (rows, columns), negative_pairs, same_set, **options)

    def kernel_arguments(self) -> dict[str, Any]:
        """Return the arguments that all functions of :mod:`vl_plugins.kernels` on labels share."""
        names = "embeddings", "ref_emb", "labels", "ref_labels", "pairs", "same_set", "symmetric"
        arguments = {name: getattr(self, name) for name in names}
        return arguments | {"normalize": self.distance.normalize_embeddings}

    def similarities(self) -> Tensor:
        """Compute all similarities, (A, C), larger is closer."""
        distances = self.distance(self.embeddings, self.ref_emb)
        return distances if self.distance.is_inverted else -distances

    def masks(self) -> tuple[Tensor, Tensor]:
        """Return which pairs are positive and which are negative, (A, C) bool each."""
        positive_mask = _mask(self.embeddings, self.ref_emb, self.pairs)
        if self.negative_pairs is not None:
            return positive_mask, _mask(self.embeddings, self.ref_emb, self.negative_pairs)
        assert self.labels is not None
        assert self.ref_labels is not None
        return positive_mask, self.labels[:, None] != self.ref_labels


def _mask(embeddings: Tensor, ref_emb: Tensor, pairs: tuple[Tensor, Tensor]) -> Tensor:
    mask = torch.zeros(len(embeddings), len(ref_emb), dtype=torch.bool, device=embeddings.device)
    mask[pairs] = True
    return mask
