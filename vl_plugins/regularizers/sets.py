"""Regularizers of embeddings and of sets of them."""

import torch
from pytorch_metric_learning.regularizers import BaseRegularizer
from torch import Tensor

from vl_plugins.distances.sets import SetDistance, elements_present
from vl_plugins.functional import diversity_loss, mmd_loss, uniformity_loss
from vl_plugins.functional.precision import full_precision, unit_vectors
from vl_plugins.utils.checks import integer, positive

__all__ = ["DiversityRegularizer", "MMDRegularizer", "SetRegularizer", "UniformityRegularizer"]


class SetRegularizer(BaseRegularizer):
    """A regularizer of embeddings (B, D), sets (B, K, D), or packed sets (B, K * D).

    Args:
        set_size: K of packed sets, >= 1; of no effect on sets (B, K, D). A vector of zeros is padding.
        kwargs: ``reducer`` and ``collect_stats`` of pytorch-metric-learning.

    Raises:
        ValueError: a hyper-parameter out of its range, or embeddings that are no such sets.
    """

    def __init__(self, set_size: int = 1, **kwargs):
        super().__init__(**kwargs)
        self.set_size = integer("set_size", set_size, least=1)
        self.add_to_recordable_attributes(name="set_size")

    def unpack(self, *sides: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Return sets (B, K, D) in float32 at least and masks (B, K) of one or two sides; None without padding."""
        sides = full_precision(*sides)
        unpacked = SetDistance(self.set_size).unpack(sides[0], sides[-1])
        return [(sets, elements_present(sets)) for sets in unpacked[: len(sides)]]


class DiversityRegularizer(SetRegularizer):
    """How near the elements of one embedding set are to each other, one value for each item.

    See :func:`vl_plugins.functional.diversity_loss` for the formula. An item of one element has none. The reducer
    receives the others, ``reduction_type="element"``; it is their mean by default.

    Args:
        scale: of the squared distances in the exponent, > 0.
        set_size, kwargs: see :class:`SetRegularizer`, also for errors.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, section 3.4.

    >>> regularizer = DiversityRegularizer(set_size=2)
    >>> regularizer(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]))  # mean of exp(-2 * 2) and exp(0)
    tensor(0.5092)
    """

    def __init__(self, scale: float = 2.0, set_size: int = 1, **kwargs):
        super().__init__(set_size, **kwargs)
        self.scale = positive("scale", scale)
        self.add_to_recordable_attributes(name="scale")

    def compute_loss(self, embeddings: Tensor) -> dict[str, dict]:
        ((sets, mask),) = self.unpack(embeddings)
        elements = (sets.new_ones(sets.shape[:2]) if mask is None else mask).sum(dim=1)
        (items,) = torch.where(elements > 1)
        if len(items) == 0:
            return _reduced(0)
        losses = diversity_loss(sets, mask=mask, scale=self.scale, reduction="none")[items]
        return {"loss": {"losses": losses, "indices": items, "reduction_type": "element", "divisor": len(items)}}


class MMDRegularizer(SetRegularizer):
    """Maximum mean discrepancy of the embeddings of two modalities, ``regularizer(embeddings, ref_emb)``.

    See :func:`vl_plugins.functional.mmd_loss` for the formula. The vectors are L2-normalized, as a similarity of them
    does; of sets they are all elements, whichever item they belong to. It is one value for all.

    As ``embedding_regularizer`` it works in the losses of this package, called with ``ref_emb``. Those of
    pytorch-metric-learning do not pass ``ref_emb`` to their regularizers.

    Args:
        gamma: of the distances in the exponent, > 0.
        squared: the Gaussian kernel, of squared distances.
        set_size, kwargs: see :class:`SetRegularizer`, also for errors.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, section 3.4.

    >>> images, texts = torch.tensor([[1.0, 0.0]]), torch.tensor([[-2.0, 0.0]])
    >>> MMDRegularizer()(images, texts)  # 2 - 2 exp(-0.5 * 2)
    tensor(1.2642)
    """

    takes_ref_emb = True

    def __init__(self, gamma: float = 0.5, squared: bool = False, set_size: int = 1, **kwargs):
        super().__init__(set_size, **kwargs)
        self.gamma = positive("gamma", gamma)
        self.squared = squared
        self.add_to_recordable_attributes(name="gamma")

    def forward(self, embeddings: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        if ref_emb is None:
            raise ValueError(
                "MMDRegularizer compares the embeddings of two modalities, got embeddings without ref_emb: as "
                "embedding_regularizer it works in the losses of vl_plugins, called with ref_emb and ref_labels"
            )
        self.reset_stats()
        loss_dict = self.compute_loss(embeddings, ref_emb)
        return self.reducer(loss_dict, embeddings, torch.arange(len(embeddings), device=embeddings.device))

    def compute_loss(self, embeddings: Tensor, ref_emb: Tensor) -> dict[str, dict]:
        x, y = (
            unit_vectors(sets.flatten(0, 1) if mask is None else sets[mask])
            for sets, mask in self.unpack(embeddings, ref_emb)
        )
        return _reduced(mmd_loss(x, y, self.gamma, squared=self.squared))


class UniformityRegularizer(SetRegularizer):
    """How far the embeddings of different items are from being spread over the whole sphere; at most 0.

    See :func:`vl_plugins.functional.uniformity_loss` for the formula. It is one value for all.

    Args:
        t: of the squared distances in the exponent, > 0.
        set_size, kwargs: see :class:`SetRegularizer`, also for errors.

    Reference:
        Wang and Isola 2020, Understanding Contrastive Representation Learning through Alignment and Uniformity on the
        Hypersphere, section 4.1.2.

    >>> UniformityRegularizer()(torch.eye(3))  # log(exp(-2 * 2))
    tensor(-4.)
    """

    def __init__(self, t: float = 2.0, set_size: int = 1, **kwargs):
        super().__init__(set_size, **kwargs)
        self.t = positive("t", t)
        self.add_to_recordable_attributes(name="t")

    def compute_loss(self, embeddings: Tensor) -> dict[str, dict]:
        ((sets, mask),) = self.unpack(embeddings)
        return _reduced(uniformity_loss(sets, self.t, mask=mask))


def _reduced(loss: Tensor | int) -> dict[str, dict]:
    """Return pytorch-metric-learning's ``loss_dict`` of one value for all embeddings."""
    return {"loss": {"losses": loss, "indices": None, "reduction_type": "already_reduced"}}
