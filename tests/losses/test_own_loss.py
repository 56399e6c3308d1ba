"""The loss that docs/guides/own_loss.md shows how to write, against its loops."""

import math
import re
from pathlib import Path

import pytest
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.reducers import SumReducer

from tests.helpers.loops import Reference, call_with, calls, check_call
from tests.reference import distances
from vl_plugins.functional import triplet_hn_loss
from vl_plugins.losses.base import PairLoss


def sigmoid(row, positive, negatives, scale, bias):
    """Zhai et al. 2023, Eq. 1: minus the logarithm of a sigmoid for each pair."""
    value, derivatives = 0.0, {}
    for column, sign in [(positive, 1), *((n, -1) for n in negatives)]:
        term = math.exp(-sign * (scale * row[column] + bias))
        value += math.log1p(term)
        derivatives[column] = -sign * scale * term / (1 + term)
    return value, derivatives


OPTIONS = {"scale": 4.0, "bias": -1.0}
LOOPS = Reference(sigmoid, options=OPTIONS)


@pytest.fixture(scope="module")
def own_loss():
    """The class of the documentation."""
    guide = Path(__file__).parents[2] / "docs" / "guides" / "own_loss.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", guide.read_text(), flags=re.MULTILINE | re.DOTALL)
    names = {}
    exec(code, names)
    assert names["image_embeddings"].grad.any()
    assert names["logit_scale"].grad.isfinite()
    return names["SigmoidLoss"]


def test_value_and_gradient_of_every_call(own_loss):
    for what, call in calls():
        check_call(LOOPS, call, loss=own_loss(**OPTIONS), what=what)
        reduced = own_loss(**OPTIONS, distance=LpDistance(), reducer=SumReducer(), symmetric=False)
        how = {"reducer": SumReducer(), "similarity": distances.negative_euclidean, "symmetric": False}
        check_call(LOOPS, call, loss=reduced, what=what, **how)


def test_scale_of_a_call_and_no_kernel(own_loss):
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    call = call_with(2) | {"scale": scale}
    check_call(LOOPS, call, loss=own_loss(**OPTIONS), options=OPTIONS | {"scale": 3.0})
    assert torch.autograd.gradcheck(lambda scale: own_loss(**OPTIONS)(**(call | {"scale": scale})), scale)
    with pytest.raises(ValueError, match="backend 'tiled' cannot be used, because SigmoidLoss needs all similarities"):
        own_loss(backend="tiled")(**call)


def test_a_loss_that_is_already_reduced():
    loss = PairLoss()
    loss.pair_losses = lambda batch: triplet_hn_loss(batch.similarities(), *batch.masks())
    with pytest.raises(ValueError, match=r"PairLoss.pair_losses .* each of the 4 positive pairs, got shape \(\)"):
        loss(**call_with(1))


def test_it_is_twice_the_loss_of_open_clip(own_loss):
    siglip_loss = pytest.importorskip("open_clip.loss").SigLipLoss()
    images, texts = (torch.nn.functional.normalize(torch.randn(6, 5)).requires_grad_() for _ in range(2))
    labels = torch.arange(6)
    # One loss for each pair: that of SigLIP has each negative once, this one once for its row and once for its column.
    ours = own_loss()(images, labels, ref_emb=texts, ref_labels=labels)
    torch.testing.assert_close(ours, 2 * siglip_loss(images, texts, 10.0, -10.0))
