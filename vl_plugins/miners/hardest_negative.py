"""The hardest negatives of every positive pair."""

import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.miners import BaseMiner
from torch import Tensor

from vl_plugins.functional.precision import full_precision
from vl_plugins.utils.checks import integer, tensor_or_none

__all__ = ["HardestNegativeMiner"]


class HardestNegativeMiner(BaseMiner):
    """Triplets of every positive pair and the k hardest negatives of its anchor, the mining of VSE++.

    ``BatchHardMiner`` keeps one positive of each anchor; here all captions of an image count. Called as
    ``miner(image_embeddings, labels, text_embeddings, text_labels)``, images are the anchors; in one set,
    ``miner(embeddings, labels)``, an item is not its own positive.

    Similarities are computed in float32 at least, as in the losses. Of equally hard negatives the first counts. An
    anchor without positives or negatives gives no triplet, one with fewer than k negatives gives all of them.

    Args:
        k: number of negatives for each positive pair, >= 1.
        kwargs: ``distance``, by default ``CosineSimilarity()``, also one of embedding sets, and ``collect_stats`` of
            pytorch-metric-learning.

    Returns:
        Anchors, positives and negatives, (T,) each: indices into ``embeddings``, ``ref_emb`` and ``ref_emb``, sorted by
        anchor, positive and hardness.

    Raises:
        ValueError: ``k`` out of its range, ``ref_emb`` without ``ref_labels``, or labels that are no tensors.

    Reference:
        Faghri et al. 2018, VSE++: Improving Visual-Semantic Embeddings with Hard Negatives.

    >>> images, texts = torch.eye(3), torch.tensor([[1.0, 0.2, 0.0], [0.5, 1.0, 0.0], [0.0, 0.4, 1.0]])
    >>> labels = torch.arange(3)
    >>> HardestNegativeMiner()(images, labels, texts, labels)
    (tensor([0, 1, 2]), tensor([0, 1, 2]), tensor([1, 2, 0]))
    """

    def __init__(self, k: int = 1, **kwargs):
        super().__init__(**kwargs)
        self.k = integer("k", k, least=1)
        self.add_to_recordable_attributes(name="k")

    def forward(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensor_or_none("labels", labels)
        tensor_or_none("ref_labels", ref_labels)
        return super().forward(embeddings, labels, ref_emb, ref_labels)

    def mine(self, embeddings, labels, ref_emb, ref_labels) -> tuple[Tensor, Tensor, Tensor]:
        if ref_labels is None:
            raise ValueError("ref_labels cannot be None when ref_emb is given")
        same_label = labels[:, None] == ref_labels
        positive_mask = same_label.clone()
        if ref_emb is embeddings:
            positive_mask.fill_diagonal_(False)
        embeddings, ref_emb = full_precision(embeddings, ref_emb)
        with torch.autocast(embeddings.device.type, enabled=False):
            distances = self.distance(embeddings, ref_emb)
        hardness = (distances if self.distance.is_inverted else -distances).masked_fill(same_label, -torch.inf)
        hardest = torch.full((len(labels), self.k), -1, device=labels.device)
        for rank in range(min(self.k, hardness.shape[1])):
            values, columns = hardness.max(dim=1)  # the first of equal values, which topk does not promise
            hardest[:, rank] = columns.where(values != -torch.inf, -1)
            hardness = hardness.scatter(1, columns[:, None], -torch.inf)
        anchors, positives = torch.where(positive_mask)
        pairs, ranks = torch.where(hardest[anchors] >= 0)
        return anchors[pairs], positives[pairs], hardest[anchors[pairs], ranks]

    def get_default_distance(self):
        return CosineSimilarity()
