"""Brings the embeddings of two modalities together."""

import torch
from pytorch_metric_learning.regularizers import BaseRegularizer
from torch import Tensor
from torch.nn.functional import normalize

from vl_plugins.functional import mmd_loss
from vl_plugins.regularizers.sets import unpack
from vl_plugins.utils.checks import integer, positive

__all__ = ["MMDRegularizer"]


class MMDRegularizer(BaseRegularizer):
    """Maximum mean discrepancy of the embeddings of two modalities, ``regularizer(embeddings, ref_emb)``.

    See :func:`vl_plugins.functional.mmd_loss` for the formula. The vectors are L2-normalised, as a similarity of them
    does; of sets they are all elements, whichever item they belong to. It is one value for all,
    ``reduction_type="already_reduced"``.

    As ``embedding_regularizer`` it is for the losses of this package, called with ``ref_emb``. Those of
    pytorch-metric-learning do not hand ``ref_emb`` to their regularizers.

    Args:
        gamma: of the distances in the exponent, > 0.
        squared: the Gaussian kernel, of squared distances.
        set_size: K of packed sets, (B, K * D), >= 1; of no effect on sets (B, K, D). A vector of zeros is padding.
        kwargs: ``reducer`` and ``collect_stats`` of pytorch-metric-learning.

    Raises:
        ValueError: a hyper-parameter out of its range, no ``ref_emb``, or embeddings that are no such sets.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, section 3.4.

    >>> images, texts = torch.tensor([[1.0, 0.0]]), torch.tensor([[-2.0, 0.0]])
    >>> MMDRegularizer()(images, texts)  # 2 - 2 exp(-0.5 * 2)
    tensor(1.2642)
    """

    def __init__(self, gamma: float = 0.5, squared: bool = False, set_size: int = 1, **kwargs):
        super().__init__(**kwargs)
        self.gamma = positive("gamma", gamma)
        self.squared = squared
        self.set_size = integer("set_size", set_size, least=1)
        self.add_to_recordable_attributes(list_of_names=["gamma", "set_size"])

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
        clouds = (
            normalize(sets.flatten(0, 1) if mask is None else sets[mask], dim=-1)
            for sets, mask in unpack(self.set_size, embeddings, ref_emb)
        )
        loss = mmd_loss(*clouds, self.gamma, squared=self.squared)
        return {"loss": {"losses": loss, "indices": None, "reduction_type": "already_reduced"}}
