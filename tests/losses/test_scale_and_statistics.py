"""Learned scales, and what a loss records of a call."""

import copy
import math

import numpy as np
import pytest
import torch
from pytorch_metric_learning.distances import LpDistance

from tests.helpers.loops import call_with, expected, leaves_of, make_loss
from tests.helpers.processes import in_processes
from tests.losses.test_hooks import make_call, pairs_of
from vl_plugins import create_loss
from vl_plugins.distributed import DistributedLoss
from vl_plugins.losses import SmoothChamferLoss, TripletHNLoss, TripletSHLoss, UnifiedLoss, Warmup
from vl_plugins.losses.statistics import STATISTICS

SCALED = pytest.mark.parametrize("name", ["unified", "vlc", "siglip"])


@SCALED
def test_a_learned_scale_begins_at_the_number_and_has_the_gradient_of_its_logarithm(name):
    learned, call = make_loss(name, learn_scale=True), call_with(2)
    scale = torch.tensor(make_loss(name).scale, dtype=torch.float64, requires_grad=True)
    value, plain = learned(**call), make_loss(name)(**call, scale=scale)
    torch.testing.assert_close(value, plain)
    (of_log,) = torch.autograd.grad(value, learned.log_scale)
    (of_scale,) = torch.autograd.grad(plain, scale)
    torch.testing.assert_close(of_log.double(), of_scale * scale.detach(), rtol=1e-5, atol=1e-6)
    assert [*learned.state_dict()] == ["log_scale"]
    with pytest.raises(ValueError, match="scale is the loss's own parameter"):
        learned(**call, scale=3.0)


def test_a_learned_scale_stays_at_its_limit_and_can_leave_it():
    loss, call = make_loss("unified", learn_scale=True, max_scale=30.0), call_with(2)
    with torch.no_grad():
        loss.log_scale.fill_(10.0)
    assert loss.scale.item() == pytest.approx(30.0), "after a step of the optimizer, too"
    value = loss(**call)
    assert loss.scale.item() == pytest.approx(30.0)
    assert torch.autograd.grad(value, loss.log_scale)[0] != 0


def test_reading_a_learned_scale_changes_nothing():
    """A repr between the forward and the backward pass, of a parameter that is beyond its limit."""
    loss = create_loss("unified", learn_scale=True)
    with torch.no_grad():
        loss.log_scale.fill_(9.0)
    decay = loss.log_scale.square()
    assert "scale=100.0" in repr(loss)
    assert loss.scale.item() == pytest.approx(100.0)
    assert loss.log_scale.item() == 9.0
    decay.backward()
    assert loss.log_scale.grad == 18.0


def test_a_learned_bias():
    loss, call = make_loss("siglip", learn_bias=True), call_with(2)
    bias = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    plain = make_loss("siglip")(**call, bias=bias)
    torch.testing.assert_close(loss(**call), plain)
    gradients = torch.autograd.grad(loss(**call), loss.bias)[0], torch.autograd.grad(plain, bias)[0]
    torch.testing.assert_close(gradients[0].double(), gradients[1], rtol=1e-5, atol=1e-6)


def with_another_scale(rank):
    loss = create_loss("unified", gather_across_devices=True, learn_scale=True)
    with torch.no_grad():
        loss.log_scale.add_(rank)
    try:
        loss(torch.eye(3), ref_emb=torch.eye(3))
    except ValueError as error:
        return str(error)
    return ""


def with_another_number(rank):
    """Errors of a call whose scale, or margin, differs: a number or a tensor."""
    errors = []
    for numbers in ({"scale": 20 + rank}, {"scale": torch.tensor(20.0 + rank)}, {"margin": 0.1 * rank}):
        for wrap in (lambda loss: loss, DistributedLoss):
            loss = create_loss("unified")
            if wrap is not DistributedLoss:
                loss.gather_across_devices = True
            try:
                wrap(loss)(torch.eye(3), ref_emb=torch.eye(3), **numbers)
            except ValueError as error:
                errors.append(str(error))
    return errors


def test_a_number_of_a_call_that_differs_between_processes():
    for errors in in_processes(with_another_number, 2):
        assert [error.partition(" has another value in each process, [")[0] for error in errors] == [
            *["scale"] * 4,
            *["margin"] * 2,
        ]


def test_a_learned_scale_that_differs_between_processes():
    for error in in_processes(with_another_scale, 2):
        assert error.startswith("log_scale has another value in each process, [3.91")


@pytest.mark.parametrize("name", ["unified", "triplet_hn", "siglip", "goal nca con"])
@pytest.mark.parametrize("options", [{}, {"distance": LpDistance(normalize_embeddings=False)}], ids=["plain", "matrix"])
def test_statistics(name, options):
    """Of the pairs by loops; computed only if they are asked for, and with the same loss."""
    if options and name == "goal nca con":
        pytest.skip("tested with the plain distance")
    call = make_call(("known",), "labels")
    loss = make_loss(name, collect_stats=True, **options)
    assert loss(**call) == make_loss(name, **options)(**call)
    x, y = call["embeddings"].detach(), call["ref_emb"].detach()
    if options:
        similarities = -torch.cdist(x, y)
    else:
        similarities = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(y).T
    positives, negatives, _ = pairs_of(call)
    scale = getattr(loss, "scale", None)
    positive = [similarities[pair].item() for pair in sorted(positives)]
    negative = []
    for row, _ in sorted(positives):
        others = [similarities[row, column].item() for r, column in negatives if r == row]
        soft = scale and math.log(sum(math.exp(scale * other) for other in others)) / scale
        negative.append(soft if scale else max(others))
    margin = 0.0 if name in ("siglip", "goal nca con") else 0.3
    active = sum(margin + n > p for p, n in zip(positive, negative, strict=True)) / len(positive)
    left_out = 1 - (len(positives) + len(negatives)) / similarities.numel()
    found = {name: getattr(loss, name).item() for name in STATISTICS}
    expected_values = {
        "mean_positive": sum(positive) / len(positive),
        "mean_negative": sum(negative) / len(negative),
        "active_pairs": active,
        "scale_in_use": scale or 1.0,
        "known_positives_left_out": left_out,
    }
    assert found == pytest.approx(expected_values, rel=1e-5)
    assert 0 < left_out < 1
    plain = make_loss(name)
    plain(**call)
    assert not any(hasattr(plain, statistic) for statistic in STATISTICS)


@SCALED
def test_the_loss_with_a_scale_of_its_own_is_that_of_the_loops(name):
    call = call_with(2)
    value, gradients = expected(name, call)
    loss = make_loss(name, learn_scale=True).double()
    torch.testing.assert_close(loss(**call).item(), value)
    torch.testing.assert_close(torch.autograd.grad(loss(**call), leaves_of(call)), tuple(gradients))


def test_copies_are_no_known_positives():
    loss = create_loss("unified", collect_stats=True)
    loss(torch.eye(4), [0, 0, 1, 1])
    assert loss.known_positives_left_out == 0


def test_a_copy_of_a_loss_with_statistics():
    loss = create_loss("unified", collect_stats=True, learn_scale=True)
    loss(torch.eye(4), [0, 0, 1, 1])
    assert copy.deepcopy(loss).scale_in_use.item() == pytest.approx(50)


def test_the_limit_of_a_learned_scale():
    loss, masks = create_loss("unified", learn_scale=True, max_scale=60.0), (torch.eye(3).bool(), ~torch.eye(3).bool())
    with torch.no_grad():
        loss.log_scale.fill_(6.0)
    loss.from_similarities(torch.rand(3, 3), *masks)
    assert loss.scale.item() == pytest.approx(60)
    with pytest.raises(ValueError, match=r"scale must be at most max_scale, 100\.0, to be learned, got 150"):
        create_loss("unified", scale=150, learn_scale=True)


def test_a_margin_as_a_parameter_of_one_element_and_as_an_array():
    call, masks = torch.rand(4, 4), (torch.eye(4).bool(), ~torch.eye(4).bool())
    own = UnifiedLoss(margin=torch.nn.Parameter(torch.tensor([0.3])))
    value = own.from_similarities(call, *masks)
    torch.testing.assert_close(value, UnifiedLoss(margin=0.3).from_similarities(call, *masks))
    assert torch.autograd.grad(value, own.margin)[0] > 0
    for margin in (np.full(4, 0.3), [0.3] * 4):
        torch.testing.assert_close(UnifiedLoss().from_similarities(call, *masks, margin=margin), value)
    with pytest.raises(
        ValueError, match=r"margin must be a number, or one for each caption, \(4,\); got the shape \(7,\)"
    ):
        UnifiedLoss().from_similarities(call, *masks, margin=torch.ones(7))


@pytest.mark.parametrize("first", [TripletSHLoss, UnifiedLoss])
@pytest.mark.parametrize("then", [TripletHNLoss, UnifiedLoss])
def test_a_warm_up_takes_the_numbers_of_both_losses(first, then):
    call = {"embeddings": torch.eye(3), "ref_emb": torch.eye(3).roll(1, dims=0)}
    warm = Warmup(first(), then(), steps=1)
    for loss in (first(), then()):
        scale = {"scale": 7.0} if "scale" in loss.numbers else {}
        given = {"scale": 7.0} if "scale" in warm.numbers else {}
        torch.testing.assert_close(warm(**call, **given), loss(**call, **scale))


def test_a_warm_up_of_sets_takes_a_scale():
    call = {"embeddings": torch.eye(3), "ref_emb": torch.eye(3).roll(1, dims=0)}
    losses = [SmoothChamferLoss(base) for base in ("triplet_sh", "unified")]
    warm = Warmup(*losses, steps=1)
    torch.testing.assert_close(warm(**call, scale=7.0), losses[0](**call))
    torch.testing.assert_close(warm(**call, scale=7.0), losses[1](**call, scale=7.0))


def test_a_number_that_the_later_loss_refuses_is_an_error_at_once():
    call = {"embeddings": torch.eye(3), "ref_emb": torch.eye(3)}
    warm = Warmup(UnifiedLoss(), UnifiedLoss(learn_scale=True), steps=5)
    with pytest.raises(ValueError, match="scale is the loss's own parameter"):
        warm(**call, scale=4.0)
    with pytest.raises(ValueError, match="TripletHNLoss: it has no scale"):
        Warmup(TripletHNLoss(), TripletHNLoss(), steps=5)(**call, scale=4.0)


def test_a_number_of_numpy():
    call = {"embeddings": torch.eye(3), "ref_emb": torch.eye(3)}
    loss = create_loss("siglip")
    assert loss(**call, bias=np.array(-3.0), scale=np.float32(4.0)) == loss(**call, bias=-3.0, scale=4.0)


def test_numbers_of_a_warm_up_are_those_of_its_losses():
    """Lists, arrays, None, and warm-ups of warm-ups."""
    call = {"embeddings": torch.eye(3), "ref_emb": torch.eye(3).roll(1, dims=0)}
    nested = Warmup(TripletSHLoss(), Warmup(UnifiedLoss(), UnifiedLoss(), steps=1), steps=1)
    for margin in ([0.1] * 3, np.array(0.4), None):
        expected = UnifiedLoss()(**call, margin=margin, scale=np.array(3.0))
        assert Warmup(UnifiedLoss(), UnifiedLoss(), steps=5)(**call, margin=margin, scale=np.array(3.0)) == expected
    assert nested(**call, scale=3.0) == TripletSHLoss()(**call)
    assert nested(**call, scale=3.0) == UnifiedLoss()(**call, scale=3.0)
    with pytest.raises(ValueError, match="scale must be a finite number > 0"):
        Warmup(TripletSHLoss(), Warmup(TripletSHLoss(), UnifiedLoss(), steps=1), steps=1)(**call, scale=-3.0)


class CountingWarmup(Warmup):
    """With a buffer and a parameter of its own, and a module."""

    def __init__(self, first, then, steps):
        super().__init__(first, then, steps)
        self.register_buffer("counts", torch.zeros(2))
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.layer = torch.nn.Linear(1, 1)


def test_a_state_of_a_warm_ups_own():
    losses = [CountingWarmup(UnifiedLoss(learn_scale=True), UnifiedLoss(learn_scale=True), 3) for _ in range(2)]
    losses[0].counts.fill_(7)
    losses[0].step = 2
    losses[1].load_state_dict(losses[0].state_dict())
    assert losses[1].counts.tolist() == [7, 7]
    assert losses[1].step == 2
