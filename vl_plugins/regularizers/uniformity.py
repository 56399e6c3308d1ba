"""Spreads embeddings over the sphere."""

from pytorch_metric_learning.regularizers import BaseRegularizer
from torch import Tensor

from vl_plugins.functional import uniformity_loss
from vl_plugins.regularizers.sets import unpack
from vl_plugins.utils.checks import integer, positive

__all__ = ["UniformityRegularizer"]


class UniformityRegularizer(BaseRegularizer):
    """How far the embeddings of different items are from being spread over the whole sphere; at most 0.

    See :func:`vl_plugins.functional.uniformity_loss` for the formula. It is one value for all,
    ``reduction_type="already_reduced"``.

    Args:
        t: of the squared distances in the exponent, > 0.
        set_size: K of packed sets, (B, K * D), >= 1; of no effect on sets (B, K, D). A vector of zeros is padding.
        kwargs: ``reducer`` and ``collect_stats`` of pytorch-metric-learning.

    Raises:
        ValueError: a hyper-parameter out of its range, or embeddings that are no such sets.

    Reference:
        Wang and Isola 2020, Understanding Contrastive Representation Learning through Alignment and Uniformity on the
        Hypersphere, section 4.1.2.

    >>> import torch
    >>> UniformityRegularizer()(torch.eye(3))  # log(exp(-2 * 2))
    tensor(-4.)
    """

    def __init__(self, t: float = 2.0, set_size: int = 1, **kwargs):
        super().__init__(**kwargs)
        self.t = positive("t", t)
        self.set_size = integer("set_size", set_size, least=1)
        self.add_to_recordable_attributes(list_of_names=["t", "set_size"])

    def compute_loss(self, embeddings: Tensor) -> dict[str, dict]:
        ((sets, mask),) = unpack(self.set_size, embeddings)
        loss = uniformity_loss(sets, self.t, mask=mask)
        return {"loss": {"losses": loss, "indices": None, "reduction_type": "already_reduced"}}
