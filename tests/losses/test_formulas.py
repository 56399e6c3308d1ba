"""What single losses add to the contract: variants of Unified, weights of GOAL, the warm-up."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from pytorch_metric_learning import miners
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.reducers import DoNothingReducer
from torch import nn

from tests.helpers.loops import LABELS, OTHER_LABELS, RSP, SSP, call_with, calls, check, leaves_of, make_loss
from tests.helpers.seeds import seeded
from tests.reference import goal as goal_reference
from tests.reference import losses as reference
from vl_plugins import create_loss
from vl_plugins.distances import MatchProbability, SmoothChamferSimilarity
from vl_plugins.losses import (
    GOALLoss,
    Polynomial,
    SmoothChamferLoss,
    TripletHNLoss,
    TripletSHLoss,
    UnifiedLoss,
    VLCLoss,
    soft_margin,
)
from vl_plugins.miners import HardestNegativeMiner
from vl_plugins.modules import SetPrediction
from vl_plugins.regularizers import DiversityRegularizer, MMDRegularizer, UniformityRegularizer

SHAPE = len(LABELS), len(OTHER_LABELS)
POSITIVES = LABELS[:, None] == OTHER_LABELS


# Unified


def tensor(*shape, seed=3):
    return torch.rand(shape, dtype=torch.float64, generator=seeded(seed)).mul(0.5).requires_grad_()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [(), SHAPE[1:]], ids=["one", "of captions"])
def test_adaptive_margins(shape, symmetric):
    """From embeddings and from a matrix; the gradients of margins too; with weights and relative similarities."""
    margin, call = tensor(*shape), call_with(2)
    similarities = CosineSimilarity()(*leaves_of(call)).detach().requires_grad_()
    margins = margin.expand(SHAPE)
    pairs, others = (set(map(tuple, mask.nonzero().tolist())) for mask in (POSITIVES, ~POSITIVES))
    for weights, relative in ((None, None), (SSP, RSP)):
        options = {"scale": 5.0, "symmetric": symmetric}
        loops = {"weights": weights and tuple(map(reference.polynomial, weights))}
        loops["relative"] = relative and reference.polynomial(relative)
        by_hand = partial(reference.pair_losses, reference.unified, similarities, negatives=others, **options, **loops)
        value = torch.stack([by_hand(positives={pair}, margin=margins[pair])[pair] for pair in sorted(pairs)]).mean()
        gradients = torch.autograd.grad(value, [similarities, margin])
        loss = UnifiedLoss(weights=weights, relative=relative, **options)
        found = loss.from_similarities(similarities, POSITIVES, ~POSITIVES, margin=margin)
        check(found, [similarities, margin], value.item(), gradients)
        torch.testing.assert_close(loss(**call, margin=margin), value)
        torch.testing.assert_close(torch.autograd.grad(loss(**call, margin=margin), margin)[0], gradients[1])


def test_learned_margins_and_weights_are_parameters_of_the_loss():
    margin, module = nn.Parameter(torch.tensor(0.3)), nn.PReLU(dtype=torch.float64)
    assert list(UnifiedLoss(margin=margin).parameters()) == [margin]
    loss = UnifiedLoss(weights=(torch.sigmoid, module))
    assert list(loss.parameters()) == [module.weight]
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(twin(**call_with(2)), loss(**call_with(2)))
        with torch.no_grad():
            next(twin.parameters()).fill_(9.0)
        assert abs(twin(**call_with(2)) - loss(**call_with(2))) > 1e-3


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (UnifiedLoss, {"margin": -0.1}),
        (UnifiedLoss, {"scale": "learned"}),
        (VLCLoss, {"scale": 0}),
        (TripletHNLoss, {"margin": -1}),
        (partial(create_loss, "triplet_hn"), {"warmup_steps": 1.5}),
        (TripletSHLoss, {"margin": -1}),
        *((GOALLoss, {name: -1}) for name in ("margin", "alpha", "beta", "eps")),
        (GOALLoss, {"tau": 0}),
        *((GOALLoss, {name: math.nan}) for name in ("offset", "lam")),
        (GOALLoss, {"triplet_weight": "cirr"}),
        (GOALLoss, {"pair_weight": "cir"}),
        (SmoothChamferLoss, {"mmd_weight": -1}),
        (HardestNegativeMiner, {"k": 0}),
        (SmoothChamferSimilarity, {"set_size": 0}),
        (SmoothChamferSimilarity, {"alpha": 0}),
        (MatchProbability, {"scale": math.nan}),
        (DiversityRegularizer, {"scale": 0}),
        (MMDRegularizer, {"gamma": 0}),
        (UniformityRegularizer, {"t": 0}),
        (SetPrediction, {"num_slots": 0, "dim": 4}),
    ],
)
def test_options_out_of_range(make, option):
    with pytest.raises(ValueError, match=next(iter(option))):
        make(**option)


@pytest.mark.parametrize("shape", [(5,), (6,), (6, 9)])
def test_margins_of_another_batch(shape):
    with pytest.raises(ValueError, match=r"margin must be a number, or one for each caption, \(9,\); got the shape"):
        UnifiedLoss()(**call_with(2), margin=torch.rand(shape))
    with pytest.raises(ValueError, match="one for each caption belongs to the call"):
        UnifiedLoss(margin=torch.rand(shape))


def test_soft_margin():
    confidence = torch.linspace(0, 1, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    value = soft_margin(confidence, margin=0.4, base=5.0)
    expected = [[0.4 * (5**y - 1) / 4 for y in row] for row in confidence.tolist()]
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64))
    assert torch.autograd.gradcheck(soft_margin, confidence)
    half = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float16)
    torch.testing.assert_close(soft_margin(half), torch.tensor([0.0, (math.sqrt(10) - 1) / 9 * 0.2, 0.2]))
    # (b^y - 1) / (b - 1) -> y as b -> 1, and log(b) / (b - 1) * y for small y
    small = torch.tensor([1e-12, 0.5], dtype=torch.float64)
    torch.testing.assert_close(soft_margin(small, margin=1.0, base=1 + 2**-40), small, atol=0, rtol=1e-11)
    with pytest.raises(ValueError, match="base must be a finite number > 1, got 1"):
        soft_margin(half, base=1)


def test_polynomial():
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    for coefficients in ([2], [0.5, -0.7], [0.25, -3, 0, 2, 1]):
        torch.testing.assert_close(Polynomial(coefficients)(x), sum(c * x**k for k, c in enumerate(coefficients)))
    with pytest.raises(ValueError, match="coefficients must be a finite number, got '1e-3'"):
        Polynomial(["1e-3"])


# GOAL


@pytest.mark.parametrize("pair_weight", ["sig_ms", "lin_ms"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("steepness", [0.0, 2.0, 60.0])
def test_relative_weights_with_ties_and_steep_exponentials(pair_weight, warm, steepness):
    """Multiples of 1/4: equal positives, equal negatives, similarities at the threshold, which are not chosen."""
    options = {"triplet_weight": "nca", "pair_weight": pair_weight, "eps": 0.5, "alpha": steepness, "beta": steepness}
    formula = goal_reference.goal_all if warm else goal_reference.goal_hardest
    for seed in range(6):
        similarities = torch.randint(-4, 5, SHAPE, generator=seeded(seed)).double().div(4)
        if not warm:  # of equal hardest negatives, any may have the gradient
            similarities += torch.randperm(54, generator=seeded(seed)).reshape(SHAPE) * 1e-9
        leaf = similarities.float().requires_grad_() if seed % 2 and warm else similarities.requires_grad_()
        twin = leaf.detach().double().requires_grad_()
        expected = reference.pair_losses(
            partial(formula, batch_positives=twin[POSITIVES].tolist(), **(goal_reference.DEFAULTS | options)),
            twin,
            *(set(map(tuple, mask.nonzero().tolist())) for mask in (POSITIVES, ~POSITIVES)),
            symmetric=True,
        )
        expected = torch.stack(list(expected.values()))
        loss = GOALLoss(**(goal_reference.DEFAULTS | options), all_negatives=warm, reducer=DoNothingReducer())
        found = loss.from_similarities(leaf, POSITIVES, ~POSITIVES)["loss"]["losses"]
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
        weights = 0.5 + 0.25 * torch.arange(len(expected), dtype=torch.float64)
        (gradient,) = torch.autograd.grad(expected, twin, weights)
        (actual,) = torch.autograd.grad(found, leaf, weights.to(found))
        torch.testing.assert_close(actual.double(), gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pair_weight", ["sig_ms", "lin_ms"])
def test_a_triplet_given_twice_counts_twice(pair_weight):
    """But its pairs are no others of their own."""
    loss, call = GOALLoss("cir", pair_weight, reducer=DoNothingReducer(), **goal_reference.DEFAULTS), call_with(2)
    triplets = miners.TripletMarginMiner(margin=0.3)(**call)
    twice = tuple(torch.cat([index, index[:1]]) for index in triplets)
    losses, more = (loss(**call, indices_tuple=indices)["loss"]["losses"] for indices in (triplets, twice))
    sums = more.sum(), losses.sum() + losses[0]
    torch.testing.assert_close(*(torch.autograd.grad(value, leaves_of(call)) for value in sums))


# The warm-up


@pytest.mark.parametrize("name", ["goal", "triplet_hn"])
def test_warm_up(name, tmp_path):
    """All negatives in the first steps of training; a trainer may set the step; copies and checkpoints go on."""
    loss, call = make_loss(name, warmup_steps=2), call_with(2)
    mined = make_loss(name)(**call)
    with torch.no_grad():
        assert loss(**call) == loss.eval()(**call) == mined
    assert loss.train().step == 0
    matrix = CosineSimilarity()(*leaves_of(call)), POSITIVES, ~POSITIVES
    twin = copy.deepcopy(loss)
    assert twin.from_similarities(*matrix) > mined + 0.1
    assert twin.step == 1
    warm = loss(**call)
    assert warm > mined + 0.1
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    fresh = make_loss(name, warmup_steps=2)
    fresh.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    older = make_loss(name, warmup_steps=2)
    older.load_state_dict({"training_calls": torch.tensor(1)})  # of version 0.2
    for twin in (fresh, older, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert [twin(**call).item() for _ in range(2)] == [warm.item(), mined.item()]
        assert twin.step == 3
        twin.step = 0
        assert twin(**call) == warm
    for what, given in calls():
        if "triplets" in what:  # of which each has its own negative
            torch.testing.assert_close(make_loss(name, warmup_steps=2)(**given), make_loss(name)(**given))


@pytest.mark.parametrize("loss", [TripletHNLoss, GOALLoss, UnifiedLoss])
def test_a_warm_up_as_an_option_of_a_class(loss):
    with pytest.raises(TypeError, match=r"has no warmup_steps: Warmup\(first, then, steps\), or create_loss"):
        loss(warmup_steps=3)


@pytest.mark.parametrize("name", ["unified", "triplet_hn", "goal", "smooth_chamfer"])
def test_a_state_of_version_0_3(name):
    """Each loss that may begin with a warm-up had its step, and one that did had the parameters of one loss."""
    state = {"_extra_state": torch.tensor(0)} if name != "smooth_chamfer" else {"base._extra_state": torch.tensor(0)}
    create_loss(name).load_state_dict(state)
    if name in ("triplet_hn", "goal"):
        loss = create_loss(name, warmup_steps=3, distance={"name": "match_probability", "scale": 2.0})
        values = {"distance.scale": torch.tensor(7.0), "distance.shift": torch.tensor(3.0)}
        loss.load_state_dict({"_extra_state": torch.tensor(2)} | values)
        assert loss.step == 2
        for part in (loss.first, loss.then):
            assert (part.distance.scale, part.distance.shift) == (7.0, 3.0)


# SigLIP


@pytest.mark.parametrize("labels", [[0, 1, 2, 9, 8], [9, 8, 7, 0, 1]])
@pytest.mark.parametrize("tiled", [False, True])
def test_each_pair_counts_once_also_of_an_image_without_a_caption(labels, tiled, monkeypatch):
    """In each block of rows, whether it has pairs or not."""
    monkeypatch.setattr("vl_plugins.engine.block_rows", lambda *_, **__: 2)
    images, texts = (torch.randn(5, 8, dtype=torch.float64, generator=seeded(seed)).requires_grad_() for seed in (0, 1))
    texts_of_labels = [0, 0, 1, 2, 5]
    loss = create_loss("siglip", scale=5.0, bias=-1.0, tiled=tiled)
    value = loss(images, labels, ref_emb=texts, ref_labels=texts_of_labels)
    signs = torch.where(torch.tensor(labels)[:, None] == torch.tensor(texts_of_labels), 1.0, -1.0)
    logits = 5.0 * nn.functional.normalize(images) @ nn.functional.normalize(texts).T - 1.0
    expected = -nn.functional.logsigmoid(signs * logits).sum() / (signs > 0).sum()
    torch.testing.assert_close(value, expected)
    sides = [images, texts]
    torch.testing.assert_close(torch.autograd.grad(value, sides), torch.autograd.grad(expected, sides))
