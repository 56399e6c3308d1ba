import pytest
import torch
from torch.nn.functional import cross_entropy

from vl_plugins.functional import triplet_hn_loss, unified_loss, vlc_loss

POSITIVES = torch.eye(7, dtype=torch.bool)
MASKS = (POSITIVES, ~POSITIVES)


def random_similarities(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(7, 7, dtype=torch.float64, generator=generator) - 1).requires_grad_()


def value_and_gradient(function, *leaves):
    value = function()
    return value, *torch.autograd.grad(3 * value, leaves)


def test_unified_is_cross_entropy_with_the_margin_on_negatives():
    similarities = random_similarities()
    target = torch.arange(7)

    def expected():
        logits = 10 * (similarities + 0.2 * MASKS[1].double())
        return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 10

    torch.testing.assert_close(
        value_and_gradient(lambda: unified_loss(similarities, *MASKS, margin=0.2, scale=10), similarities),
        value_and_gradient(expected, similarities),
        atol=1e-12,
        rtol=1e-10,
    )


def test_scaled_unified_without_margin_is_the_sum_of_the_cross_entropies():
    similarities = random_similarities()
    target = torch.arange(7)

    def expected():
        logits = 50 * similarities
        return cross_entropy(logits, target, reduction="sum") + cross_entropy(logits.T, target, reduction="sum")

    torch.testing.assert_close(
        value_and_gradient(lambda: 50 * unified_loss(similarities, *MASKS, 0.0, 50, reduction="sum"), similarities),
        value_and_gradient(expected, similarities),
        atol=1e-10,
        rtol=1e-10,
    )


def test_vlc_is_scaled_unified_without_margin():
    similarities = random_similarities()
    torch.testing.assert_close(
        value_and_gradient(lambda: vlc_loss(similarities, *MASKS, scale=50), similarities),
        value_and_gradient(lambda: 50 * unified_loss(similarities, *MASKS, margin=0.0, scale=50), similarities),
    )


def test_unified_at_a_large_scale_is_triplet_hn():
    similarities = random_similarities()
    unified = unified_loss(similarities, *MASKS, margin=0.2, scale=1e4, reduction="none")
    triplet = triplet_hn_loss(similarities, *MASKS, margin=0.2, reduction="none")
    assert triplet.max() > 0.5
    torch.testing.assert_close(unified, triplet, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("loss", [unified_loss, vlc_loss])
def test_extreme_scale_and_similarities_stay_finite(loss, sign, dtype):
    similarities = (sign * (2 * torch.eye(7) - 1)).to(dtype).requires_grad_()
    value = loss(similarities, *MASKS, scale=1e4)
    value.backward()
    assert value.isfinite()
    assert similarities.grad.isfinite().all()
    if sign > 0:
        assert value == 0
    else:
        assert value > 4


def test_softplus_is_exact_where_torch_rounds_it_to_the_identity():
    # one negative, scale * difference = 21: log(1 + e^21) = 21 + log(1 + e^-21)
    similarities = torch.tensor([[0.0, 2.1]], dtype=torch.float64)
    positive_mask = torch.tensor([[True, False]])
    value = vlc_loss(similarities, positive_mask, ~positive_mask, scale=10, symmetric=False)
    assert value.item() == pytest.approx(21 + 7.582560422162385e-10, abs=1e-12)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anchor_without_negatives_is_exactly_zero_beside_others():
    similarities = random_similarities()
    negative_mask = MASKS[1].clone()
    negative_mask[2] = False
    with torch.autograd.detect_anomaly(check_nan=True):
        values = unified_loss(similarities, POSITIVES, negative_mask, symmetric=False, reduction="none")
        values.sum().backward()
    assert values[2] == 0
    assert torch.equal(similarities.grad[2], torch.zeros(7, dtype=torch.float64))
    assert similarities.grad.isfinite().all()
    assert (values > 0).sum() == 6


@pytest.mark.parametrize("loss", [unified_loss, vlc_loss])
def test_other_positives_are_not_negatives(loss):
    similarities = torch.tensor([[0.1, 0.9, 0.3]], dtype=torch.float64)
    positive_mask = torch.tensor([[True, True, False]])
    with_both = loss(similarities, positive_mask, ~positive_mask, symmetric=False, reduction="none")
    alone = torch.tensor([[True, False, False]])
    assert torch.equal(with_both[:1], loss(similarities, alone, ~positive_mask, symmetric=False, reduction="none"))


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-D", "1-D"])
@pytest.mark.parametrize("loss", [unified_loss, vlc_loss])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_learned_scale_receives_its_gradient(loss, shape, reduction):
    similarities = random_similarities()
    scale = torch.full(shape, 10.0, dtype=torch.float64, requires_grad=True)
    values = loss(similarities, *MASKS, scale=scale, reduction=reduction)
    assert values.shape == (() if reduction == "mean" else (7,))
    values.sum().backward()

    step = 1e-5
    above, below = (loss(similarities, *MASKS, scale=10 + delta, reduction=reduction).sum() for delta in (step, -step))
    torch.testing.assert_close(values, loss(similarities, *MASKS, scale=10, reduction=reduction))
    assert scale.grad.item() == pytest.approx(((above - below) / (2 * step)).item(), rel=1e-6)


@pytest.mark.parametrize("loss", [unified_loss, vlc_loss])
def test_learned_scale_stays_in_the_graph_without_pairs(loss):
    nothing = torch.zeros(7, 7, dtype=torch.bool)
    scale = torch.tensor(10.0, requires_grad=True)
    loss(random_similarities(), nothing, nothing, scale=scale).backward()
    assert scale.grad == 0


def test_scale_of_several_elements():
    with pytest.raises(ValueError, match=r"scale must have one element, got shape \(2,\)"):
        unified_loss(random_similarities(), *MASKS, scale=torch.ones(2))
