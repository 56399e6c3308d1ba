"""Losses for pytorch-metric-learning; see :mod:`vl_plugins.functional` for the formulas alone.

Write your own loss
===================

Derive it from :class:`~vl_plugins.losses.base.PairLoss` and override one method, which returns the loss of each
positive pair. This is the sigmoid loss of SigLIP (Zhai et al. 2023, Eq. 1), added up over both directions:

>>> import torch
>>> from torch.nn.functional import softplus
>>> from vl_plugins.losses.base import PairLoss
>>> class SigmoidLoss(PairLoss):
...     def __init__(self, scale=10.0, bias=-10.0, **kwargs):
...         super().__init__(**kwargs)
...         self.scale, self.bias = scale, bias
...
...     def pair_losses(self, batch):
...         logits = batch.scale * batch.similarities() + self.bias  # (A, C)
...         _, negative_mask = batch.masks()  # (A, C), bool
...         anchors, candidates = batch.pairs  # (M,) each: the positive pairs
...         negatives = softplus(logits) * negative_mask
...         positives = softplus(-logits[anchors, candidates])
...         losses = positives + negatives.sum(dim=1)[anchors]
...         if batch.symmetric:  # text to image too
...             losses = losses + positives + negatives.sum(dim=0)[candidates]
...         return losses

The rest is there: one set of embeddings or two, labels or what a miner has chosen, any ``distance``, ``reducer`` and
``embedding_regularizer`` of pytorch-metric-learning, float32 at least under autocast, NaN that no reducer hides. An
attribute ``scale`` can be learned, because a call may give another one:

>>> loss = SigmoidLoss()
>>> labels, logit_scale = torch.arange(3), torch.tensor(2.0, requires_grad=True)
>>> loss(torch.eye(3), labels, ref_emb=torch.eye(3), ref_labels=labels, scale=logit_scale.exp())
tensor(5.3639, grad_fn=<AddBackward0>)

An entry point in the pyproject.toml of your package gives the loss its name. ``vl-plugins losses`` lists it once the
package is installed, and ``--loss sigmoid --loss-kwargs bias=-5`` trains with it in open_clip and in
pytorch-metric-learning::

    [project.entry-points."vl_plugins.losses"]
    sigmoid = "my_package.losses:SigmoidLoss"
"""

from vl_plugins.losses.goal import GOALLoss
from vl_plugins.losses.smooth_chamfer import SmoothChamferLoss
from vl_plugins.losses.triplet import TripletHNLoss, TripletSHLoss
from vl_plugins.losses.unified import UnifiedLoss, VLCLoss

__all__ = ["GOALLoss", "SmoothChamferLoss", "TripletHNLoss", "TripletSHLoss", "UnifiedLoss", "VLCLoss"]
