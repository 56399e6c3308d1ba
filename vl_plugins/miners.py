"""Miners for pytorch-metric-learning."""

from typing import Any

import torch
from pytorch_metric_learning.distances import BaseDistance, CosineSimilarity
from pytorch_metric_learning.miners import BaseMiner
from torch import Tensor

from vl_plugins.distances import VECTOR_DISTANCES
from vl_plugins.engine import label_pairs
from vl_plugins.errors import number
from vl_plugins.numerics import checked_rows, fill_at, full_precision_call

__all__ = ["HardestNegativeMiner"]


class HardestNegativeMiner(BaseMiner):
    """Pairs every positive pair with the k hardest negatives of its anchor, the mining of VSE++.

    ``BatchHardMiner`` keeps one positive per anchor; here all captions of an image count. In a call
    ``miner(image_embeddings, labels, text_embeddings, text_labels)``, images are the anchors. In one set,
    ``miner(embeddings, labels)``, an item is not its own positive. If an anchor has fewer than k negatives, all are
    used. Ties are broken arbitrarily.

    Args:
        k: number of negatives for each positive pair, >= 1.
        kwargs: ``distance``, by default ``CosineSimilarity()``, which should be that of the loss, and ``collect_stats``
            of pytorch-metric-learning.

    Reference:
        Faghri et al. 2018, VSE++: Improving Visual-Semantic Embeddings with Hard Negatives.

    >>> images, texts = torch.eye(3), torch.tensor([[1.0, 0.2, 0.0], [0.5, 1.0, 0.0], [0.0, 0.4, 1.0]])
    >>> labels = torch.arange(3)
    >>> HardestNegativeMiner()(images, labels, texts, labels)
    (tensor([0, 1, 2]), tensor([0, 1, 2]), tensor([1, 2, 0]))
    """

    def __init__(self, k: int = 1, **kwargs: Any):
        super().__init__(**kwargs)
        self.k = number("k", k, least=1, kind=int)
        self.add_to_recordable_attributes(name="k")

    def forward(
        self, embeddings: Tensor, labels: Any, ref_emb: Tensor | None = None, ref_labels: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return anchors, positives and negatives, index tensors (T,).

        Args:
            embeddings, ref_emb: (A, D) and (C, D), or what the distance compares.
            labels, ref_labels: (A,) and (C,), integers: tensors, numpy arrays or lists.

        Raises:
            ValueError: embeddings of unequal widths, or labels that are missing, NaN, of another type or length.
        """
        if labels is None or (ref_emb is not None and ref_labels is None):
            missing = "labels" if labels is None else "ref_labels"
            raise ValueError(f"{missing} must be given with the embeddings: a miner finds pairs by their labels")
        sides = {"embeddings": embeddings, "ref_emb": ref_emb, "labels": labels, "ref_labels": ref_labels}
        rows = checked_rows(sides, isinstance(self.distance, VECTOR_DISTANCES))
        triplets: tuple[Tensor, Tensor, Tensor] = super().forward(
            rows["embeddings"], rows["labels"], rows["ref_emb"], rows["ref_labels"]
        )
        return triplets

    def mine(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        anchors, positives, _ = label_pairs(labels, ref_labels)
        with full_precision_call(embeddings=embeddings):
            distances = self.distance(embeddings, ref_emb)
        hardness = distances if self.distance.is_inverted else -distances
        hardness = hardness.clone()
        fill_at(hardness, (anchors, positives), -torch.inf)
        if ref_emb is embeddings:
            anchors, positives = anchors[anchors != positives], positives[anchors != positives]
        values, hardest = hardness.topk(min(self.k, hardness.shape[1]), dim=1)
        pairs, ranks = (values[anchors] != -torch.inf).nonzero().T  # NaN stays
        return anchors[pairs], positives[pairs], hardest[anchors[pairs], ranks]

    def get_default_distance(self) -> BaseDistance:
        return CosineSimilarity()
