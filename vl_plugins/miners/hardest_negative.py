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
    ``miner(embeddings, labels, ref_emb=None, ref_labels=None)``:

    - ``miner(image_embeddings, labels, text_embeddings, text_labels)``: images are the anchors. ``labels`` may be one
      tensor for both; the matching pairs are kept.
    - ``miner(embeddings, labels)``: one set, where an item is not its own positive.

    Similarities are computed in float32 at least, as the losses do. Of equally hard negatives the first counts. An
    anchor without positives or without negatives gives no triplet, one with fewer than k negatives gives what there is.

    Args:
        k: number of negatives for each positive pair, >= 1.
        kwargs: ``distance`` (default ``CosineSimilarity()``; any other too, also of embedding sets) and
            ``collect_stats`` of pytorch-metric-learning.

    Returns:
        Anchors, positives and negatives, (T,) each: indices of ``embeddings``, ``ref_emb`` and ``ref_emb``, sorted by
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

    def mine(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if ref_labels is None:
            raise ValueError("ref_labels cannot be None when ref_emb is given")
        positive_mask = labels[:, None] == ref_labels[None, :]
        negative_mask = ~positive_mask
        if ref_emb is embeddings:
            positive_mask.fill_diagonal_(False)
        embeddings, ref_emb = full_precision(embeddings, ref_emb)
        with torch.autocast(embeddings.device.type, enabled=False):
            distances = self.distance(embeddings, ref_emb)
        hardness = distances if self.distance.is_inverted else -distances
        hardest, exists = _hardest(hardness, negative_mask, self.k)
        anchors, positives = torch.where(positive_mask)
        pairs, ranks = torch.where(exists[anchors])
        return anchors[pairs], positives[pairs], hardest[anchors[pairs], ranks]

    def get_default_distance(self):
        return CosineSimilarity()


def _hardest(hardness: Tensor, mask: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the columns of each row's k largest values under the mask, (A, k), and which of them exist, (A, k)."""
    k = min(k, hardness.shape[1])
    columns = torch.zeros(len(hardness), k, dtype=torch.long, device=hardness.device)
    exists = torch.zeros_like(columns, dtype=torch.bool)
    left = mask.clone()
    # Not topk: which of equal values it chooses is not defined.
    for rank in range(k):
        column = hardness.masked_fill(~left, float("-inf")).argmax(dim=1, keepdim=True)
        columns[:, rank] = column[:, 0]
        exists[:, rank] = left.gather(1, column)[:, 0]
        left.scatter_(1, column, False)
    return columns, exists
