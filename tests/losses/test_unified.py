import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.reducers import MeanReducer

from vl_plugins.functional import unified_loss
from vl_plugins.losses import TripletHNLoss, UnifiedLoss

LABELS = torch.arange(6)
IMAGES = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TEXTS = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def call(loss):
    return loss(IMAGES, LABELS, ref_emb=TEXTS, ref_labels=LABELS)


def test_defaults():
    loss = UnifiedLoss()
    assert (loss.margin, loss.scale, loss.symmetric) == (0.2, 50.0, True)
    assert isinstance(loss.distance, CosineSimilarity)
    assert isinstance(loss.reducer, MeanReducer)
    positives = torch.eye(6, dtype=torch.bool)
    torch.testing.assert_close(call(loss), unified_loss(loss.distance(IMAGES, TEXTS), positives, ~positives, 0.2, 50))


@pytest.mark.parametrize("option", [{"margin": -0.1}, {"margin": float("nan")}, {"scale": 0}, {"scale": "50"}])
def test_wrong_hyper_parameters(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be a finite number"):
        UnifiedLoss(**option)


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-D", "1-D"])
def test_learned_scale(shape):
    scale = torch.full(shape, 20.0, requires_grad=True)
    loss = UnifiedLoss()
    loss.scale = scale
    value = call(loss)
    value.backward()
    assert scale.grad.isfinite()
    assert scale.grad != 0
    torch.testing.assert_close(value, call(UnifiedLoss(scale=20)))
    loss.scale = 50.0
    torch.testing.assert_close(call(loss), call(UnifiedLoss()))


def test_large_scale_is_triplet_hn():
    torch.testing.assert_close(call(UnifiedLoss(scale=1e4)), call(TripletHNLoss()), atol=1e-3, rtol=0)
