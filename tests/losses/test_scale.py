"""A learned scale, given in the call."""

import math

import pytest
import torch
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.reducers import AvgNonZeroReducer

from vl_plugins import create_loss

LABELS = torch.tensor([0, 1, 2, 1])
TEXT_LABELS = torch.tensor([1, 0, 2, 2, 1, 3])
LOSSES = {
    "unified": ("unified", {"margin": 0.1}),
    "vlc": ("vlc", {}),
    "smooth_chamfer": ("smooth_chamfer", {"base": "unified", "margin": 0.1, "mmd_weight": 0, "diversity_weight": 0}),
}
CASES = [(name, backend) for name in ("unified", "vlc") for backend in ("functional", "dense", "tiled")]


def batch(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(number, 5, dtype=torch.float64, generator=generator) for number in (4, 6))
    return images.to(dtype).requires_grad_(), texts.to(dtype).requires_grad_()


def loops(name, images, texts, scale):
    """Return the mean over the positive pairs of log(1 + sum of exp(scale * (s_n - s_p + m))) / scale, both ways."""
    margin = 0.0 if name == "vlc" else 0.1
    similarities = [[i @ t / (i.norm() * t.norm()) for t in texts] for i in images]
    losses = []
    for i, label in enumerate(LABELS.tolist()):
        for t, text_label in enumerate(TEXT_LABELS.tolist()):
            if label != text_label:
                continue
            of_image = [s for s, other in zip(similarities[i], TEXT_LABELS.tolist(), strict=True) if other != label]
            of_text = [row[t] for row, other in zip(similarities, LABELS.tolist(), strict=True) if other != label]
            losses.append(
                sum(
                    torch.log(1 + sum(torch.exp(scale * (s - similarities[i][t] + margin)) for s in negatives)) / scale
                    for negatives in (of_image, of_text)
                )
            )
    mean = sum(losses) / len(losses)
    return (scale * mean if name == "vlc" else mean).sum()


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-D", "1-D"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "backend"), [*CASES, ("smooth_chamfer", None)])
def test_value_and_gradients(name, backend, dtype, shape):
    loss_name, options = LOSSES[name]
    loss = create_loss(loss_name, **options, backend=backend)
    images, texts = batch(dtype)
    log_scale = torch.full(shape, math.log(5), dtype=torch.float64, requires_grad=True)
    value = loss(images, LABELS, ref_emb=texts, ref_labels=TEXT_LABELS, scale=log_scale.exp())
    assert value.shape == ()
    assert value.dtype == dtype
    gradients = torch.autograd.grad(3 * value, (images, texts, log_scale))

    twins = [leaf.detach().double().requires_grad_() for leaf in (images, texts, log_scale)]
    expected = loops(name, *twins[:2], twins[2].exp())
    tolerance = {"rtol": 0, "atol": 1e-10 if dtype == torch.float64 else 1e-5}
    torch.testing.assert_close(value.double(), expected, **tolerance)
    for gradient, other in zip(gradients, torch.autograd.grad(3 * expected, twins), strict=True):
        torch.testing.assert_close(gradient.double(), other, **tolerance)


@pytest.mark.parametrize("name", LOSSES)
def test_a_number_and_a_miners_pairs(name):
    loss_name, options = LOSSES[name]
    images, texts = batch()
    labels = {"ref_emb": texts, "ref_labels": TEXT_LABELS}
    pairs = MultiSimilarityMiner(epsilon=0.5)(images, LABELS, **labels)
    expected = create_loss(loss_name, **options, scale=5.0)(images, LABELS, pairs, **labels)
    loss = create_loss(loss_name, **options)
    torch.testing.assert_close(loss(images, LABELS, pairs, **labels, scale=5), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reducer", [None, AvgNonZeroReducer()], ids=["mean", "non-zero"])
@pytest.mark.parametrize("text_labels", [TEXT_LABELS + 9, TEXT_LABELS * 0], ids=["no positives", "no negatives"])
def test_the_scale_has_a_gradient_without_pairs(name, reducer, text_labels):
    loss_name, options = LOSSES[name]
    images, texts = batch()
    scale = torch.tensor(5.0, requires_grad=True)
    loss = create_loss(loss_name, **options, reducer=reducer)
    value = loss(images, LABELS * 0, ref_emb=texts, ref_labels=text_labels, scale=scale)
    (gradient,) = torch.autograd.grad(value, scale)
    assert value.dtype == torch.float64
    assert (value, gradient) == (0, 0)


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("unified", torch.ones(2), r"scale must have one element, got shape \(2,\)"),
        ("unified", 0, "scale must be a finite number > 0, got 0"),
        ("unified", "learned", "scale must be a finite number > 0, got 'learned'"),
        ("triplet_hn", torch.tensor(5.0), "TripletHNLoss has no scale"),
        ("smooth_chamfer", torch.tensor(5.0), "TripletHNLoss has no scale"),
    ],
)
def test_wrong_scales(name, scale, message):
    images, texts = batch()
    with pytest.raises(ValueError, match=message):
        create_loss(name)(images, LABELS, ref_emb=texts, ref_labels=TEXT_LABELS, scale=scale)


@pytest.mark.parametrize("name", ["unified", "vlc"])
@pytest.mark.parametrize("scale", ["learned", torch.tensor(5.0)], ids=["learned", "tensor"])
def test_a_scale_that_is_learned_belongs_to_the_call(name, scale):
    with pytest.raises(ValueError, match=r"give a learned one in the call, loss\(\.\.\., scale=logit_scale\), or .*"):
        create_loss(name, scale=scale)
