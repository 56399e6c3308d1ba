"""Keeps the elements of an embedding set apart."""

import torch
from pytorch_metric_learning.regularizers import BaseRegularizer
from torch import Tensor

from vl_plugins.functional import diversity_loss
from vl_plugins.regularizers.sets import unpack
from vl_plugins.utils.checks import integer, positive

__all__ = ["DiversityRegularizer"]


class DiversityRegularizer(BaseRegularizer):
    """How near the elements of one embedding set are to each other, one value for each item.

    See :func:`vl_plugins.functional.diversity_loss` for the formula. An item of one element has none. The reducer
    receives the others, ``reduction_type="element"``; it is their mean by default.

    Args:
        scale: of the squared distances in the exponent, > 0.
        set_size: K of packed sets, (B, K * D), >= 1; of no effect on sets (B, K, D). A vector of zeros is padding.
        kwargs: ``reducer`` (default ``MeanReducer()``) and ``collect_stats`` of pytorch-metric-learning.

    Raises:
        ValueError: a hyper-parameter out of its range, or embeddings that are no such sets.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, section 3.4.

    >>> regularizer = DiversityRegularizer(set_size=2)
    >>> regularizer(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]))  # mean of exp(-2 * 2) and exp(0)
    tensor(0.5092)
    """

    def __init__(self, scale: float = 2.0, set_size: int = 1, **kwargs):
        super().__init__(**kwargs)
        self.scale = positive("scale", scale)
        self.set_size = integer("set_size", set_size, least=1)
        self.add_to_recordable_attributes(list_of_names=["scale", "set_size"])

    def compute_loss(self, embeddings: Tensor) -> dict[str, dict]:
        ((sets, mask),) = unpack(self.set_size, embeddings)
        elements = (sets.new_ones(sets.shape[:2]) if mask is None else mask).sum(dim=1)
        (items,) = torch.where(elements > 1)
        if len(items) == 0:
            return {"loss": {"losses": 0, "indices": None, "reduction_type": "already_reduced"}}
        losses = diversity_loss(sets, mask=mask, scale=self.scale, reduction="none")[items]
        return {"loss": {"losses": losses, "indices": items, "reduction_type": "element", "divisor": len(items)}}
