from functools import partial

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import CircleLoss
from pytorch_metric_learning.reducers import SumReducer

from tests.helpers.pairs import diagonal_masks, index_pairs, label_masks, loops, similarities_like, value_and_gradients
from tests.helpers.seeds import seed_torch, seeded
from tests.reference import goal as reference
from vl_plugins.functional import goal_loss, goal_triplet_loss, triplet_hn_loss, vlc_loss
from vl_plugins.functional.goal import (
    PAIR_WEIGHTS,
    TRIPLET_WEIGHTS,
    Objective,
    RelativeTerms,
    pair_weights,
    triplet_weight,
)

COMBINATIONS = [(triplet, pair) for triplet in TRIPLET_WEIGHTS for pair in PAIR_WEIGHTS]
ALL_COMBINATIONS = pytest.mark.parametrize(("triplet", "pair"), COMBINATIONS, ids=map("-".join, COMBINATIONS))
MININGS = {"hardest": reference.goal_hardest, "all": reference.goal_all}
OTHER_OPTIONS = {"margin": 0.3, "tau": 4.0, "offset": 0.5, "alpha": 3.0, "beta": 6.0, "lam": 0.3, "eps": 0.4}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


def assert_equal_to_loops(similarities, masks, mining, tolerance, *, symmetric=True, **options):
    expected = loops(
        partial(MININGS[mining], batch_positives=similarities[masks[0]].tolist(), **options),
        similarities,
        masks,
        symmetric=symmetric,
    )
    objective = Objective(**(reference.DEFAULTS | options))
    values = goal_loss(similarities, *masks, objective, mining=mining, symmetric=symmetric, reduction="none")
    actual = value_and_gradients(values, [similarities])
    assert len(values) >= 6
    torch.testing.assert_close(actual, expected, atol=10 * tolerance, rtol=tolerance)


@ALL_COMBINATIONS
@pytest.mark.parametrize("mining", MININGS)
def test_value_and_gradient_equal_the_loops(triplet, pair, mining):
    for options in ({}, OTHER_OPTIONS):
        options = {"triplet_weight": triplet, "pair_weight": pair, **options}
        for masks, symmetric, dtype in (
            (label_masks(5, 9), True, torch.float64),
            (label_masks(12, 20), False, torch.float64),
            (label_masks(9, 5), True, torch.float32),
            (diagonal_masks(6), True, torch.float32),
        ):
            similarities = similarities_like(masks[0], dtype)
            assert_equal_to_loops(similarities, masks, mining, TOLERANCE[dtype], symmetric=symmetric, **options)


@pytest.mark.parametrize("pair", ["sig_ms", "lin_ms"])
@pytest.mark.parametrize("mining", MININGS)
@pytest.mark.parametrize("steepness", [0.0, 2.0, 60.0])
def test_relative_terms_with_ties_and_steep_weights(pair, mining, steepness):
    # Multiples of 1/4: equal positives, equal negatives, and similarities exactly at the threshold, which are not
    # chosen. Steep weights: the extreme one of the chosen outweighs all others by e^-15 and more.
    options = {"triplet_weight": "nca", "pair_weight": pair, "eps": 0.5, "alpha": steepness, "beta": steepness}
    for seed in range(8):
        masks = label_masks(5, 9) if seed % 2 else label_masks(9, 5)
        generator = seeded(seed)
        similarities = torch.randint(-4, 5, masks[0].shape, generator=generator).float().div(4).requires_grad_()
        assert_equal_to_loops(similarities, masks, mining, 1e-5, **options)


@ALL_COMBINATIONS
def test_given_triplets_equal_the_loops(triplet, pair):
    masks = label_masks(12, 20)
    every = sorted((a, p, n) for a, p in index_pairs(masks[0]) for b, n in index_pairs(masks[1]) if a == b)
    order = torch.randperm(len(every), generator=seeded(5))[:40]
    triplets = [every[k] for k in order.tolist()]
    triplets.append(triplets[0])  # a triplet given twice counts twice, but its pairs are no others of their own
    for dtype, tolerance in TOLERANCE.items():
        similarities = similarities_like(masks[0], dtype)
        rows = similarities.tolist()
        batch_positives = [rows[a][p] for a, p in {(a, p) for a, p, _ in triplets}]
        values = goal_triplet_loss(
            similarities, *torch.tensor(triplets).T, Objective(triplet, pair, **reference.DEFAULTS)
        )
        assert len(values) == 41
        (gradient,) = torch.autograd.grad(values, similarities, torch.arange(1, 42, dtype=dtype))
        expected = torch.zeros_like(similarities)
        for k, (a, p, n) in enumerate(triplets):
            negatives = sorted({other for b, _, other in triplets if b == a})
            value, derivatives = reference.goal_triplet(rows[a], p, n, negatives, batch_positives, triplet, pair)
            assert values[k].item() == pytest.approx(value, abs=10 * tolerance)
            for column, derivative in derivatives.items():
                expected.data[a, column] += (k + 1) * derivative
        torch.testing.assert_close(gradient, expected.detach(), atol=10 * tolerance, rtol=tolerance)


def test_con_con_is_triplet_hn():
    for masks in (diagonal_masks(6), label_masks(12, 20)):
        similarities = similarities_like(masks[0])
        ours = goal_loss(similarities, *masks, Objective("con", "con", margin=0.3), reduction="none")
        theirs = triplet_hn_loss(similarities, *masks, margin=0.3, reduction="none")
        assert theirs.count_nonzero() >= 4
        torch.testing.assert_close(
            value_and_gradients(ours, [similarities]), value_and_gradients(theirs, [similarities])
        )


def test_nca_con_is_nt_xent_over_the_hardest_negative_divided_by_tau():
    positive_mask, _ = diagonal_masks(6)
    similarities = similarities_like(positive_mask)
    objective = Objective("nca", "con", tau=7.0)
    hardest = similarities.detach().masked_fill(positive_mask, -2).argmax(dim=1, keepdim=True)
    hardest_mask = torch.zeros_like(positive_mask).scatter(1, hardest, True)
    options = {"symmetric": False, "reduction": "none"}
    ours = goal_loss(similarities, positive_mask, ~positive_mask, objective, **options)
    theirs = vlc_loss(similarities, positive_mask, hardest_mask, scale=7.0, **options) / 7
    torch.testing.assert_close(value_and_gradients(ours, [similarities]), value_and_gradients(theirs, [similarities]))


def test_cir_lin_with_offset_1_is_the_circle_loss_of_pytorch_metric_learning():
    seed_torch(0)
    # In one orthant: all similarities are positive.
    images, texts = (torch.rand(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    similarities = CosineSimilarity()(images, texts)
    positive_mask, negative_mask = diagonal_masks(6)
    hardest = similarities.detach().masked_fill(positive_mask, -2).argmax(dim=1)
    triplets = torch.arange(6), torch.arange(6), hardest
    theirs = CircleLoss(m=0, gamma=9.0, reducer=SumReducer())(images, indices_tuple=triplets, ref_emb=texts) / 9
    assert theirs > 1e-3
    objective = Objective("cir", "lin", tau=9.0, offset=1.0)
    mined = goal_loss(similarities, positive_mask, negative_mask, objective, symmetric=False, reduction="sum")
    for ours in (mined, goal_triplet_loss(similarities, *triplets, objective).sum()):
        torch.testing.assert_close(
            value_and_gradients(ours, (images, texts)), value_and_gradients(theirs, (images, texts))
        )


def test_sig_ms_with_relative_terms_of_1_is_sig():
    s_p, s_n = torch.rand(2, 50, dtype=torch.float64) * 2 - 1
    options = {"alpha": 3.0, "beta": 5.0, "lam": 0.4}
    actual = pair_weights(s_p, s_n, Objective("nca", "sig_ms", **options), RelativeTerms(1.0, 1.0))
    torch.testing.assert_close(actual, pair_weights(s_p, s_n, Objective("nca", "sig", **options)))


@pytest.fixture(params=[False, True], ids=["subnormal numbers", "flushed to zero"])
def flush_denormal(request):
    if not torch.set_flush_denormal(request.param):
        pytest.skip("this processor cannot")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("triplet", TRIPLET_WEIGHTS)
@pytest.mark.usefixtures("flush_denormal")
def test_the_value_is_zero_exactly_where_the_triplet_weight_is(triplet):
    # tau * (s_n - s_p) passes through where the float32 logistic function and logarithm are subnormal and zero
    s_n = torch.linspace(-1, 1, 4001)
    similarities = torch.stack([torch.full_like(s_n, 0.95), s_n], dim=1).requires_grad_()
    objective = Objective(triplet, tau=150.0, margin=0.25, offset=0.0)
    weight = triplet_weight(similarities[:, 0], similarities[:, 1], objective)
    assert (weight == 0).any()
    assert (weight > 0).any()
    rows, zeros = torch.arange(4001), torch.zeros(4001, dtype=torch.long)
    assert torch.equal(goal_triplet_loss(similarities, rows, zeros, zeros + 1, objective) > 0, weight > 0)


@ALL_COMBINATIONS
def test_gradients_are_finite_at_the_ends(triplet, pair):
    masks = diagonal_masks(5)
    for options in ({}, {"tau": 1e3}, {"eps": 3.0}, {"eps": 0.0}):
        objective = Objective(triplet, pair, **options)
        for dtype in (torch.float16, torch.float32):
            for positive, negative in ((1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (0.0, 0.0)):
                for mining in MININGS:
                    similarities = torch.where(masks[0], positive, negative).to(dtype).requires_grad_()
                    value = goal_loss(similarities, *masks, objective, mining=mining)
                    (gradient,) = torch.autograd.grad(value, similarities)
                    assert value.isfinite()
                    assert gradient.isfinite().all(), (dtype, positive, negative, options)


def test_relative_terms_do_not_overflow():
    # exp(alpha * (s_p - R)) of about e^1000: the weight's limit is 0, not NaN
    similarities = torch.tensor([[1.0, -1.0, 0.9], [-1.0, -1.0, 0.9]], requires_grad=True)
    masks = torch.tensor([[True, True, False]] * 2), torch.tensor([[False, False, True]] * 2)
    value = goal_loss(similarities, *masks, Objective("nca", "sig_ms", alpha=500.0), symmetric=False)
    (gradient,) = torch.autograd.grad(value, similarities)
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert gradient[0, 0] == 0
    # 1 / (0 + e^-750) of an anchor without negatives
    masks = torch.tensor([[True, False]]), torch.tensor([[False, False]])
    similarities = torch.tensor([[-1.0, 0.5]], requires_grad=True)
    assert goal_loss(similarities, *masks, Objective("nca", "sig_ms", alpha=500.0)) == 0


@pytest.mark.parametrize("count", [0, 1])
def test_few_triplets_beside_what_is_not_finite(count):
    for bad in (0.5, float("nan"), float("inf")):
        similarities = torch.rand(3, 4)
        similarities[2, 3] = bad  # not of the triplet
        values = goal_triplet_loss(similarities.requires_grad_(), *torch.tensor([[0], [1], [2]])[:, :count])
        (gradient,) = torch.autograd.grad(values.sum(), similarities)
        assert values.isnan().tolist() == [bad != 0.5] * count
        assert gradient.isnan().any() == (bad != 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"triplet_weight": "cos"}, "unknown triplet_weight 'cos'.*; known: cir, con, nca"),
        ({"pair_weight": "sigms"}, "unknown pair_weight 'sigms' .did you mean 'sig_ms'"),
        ({"tau": 0}, "tau must be a finite number > 0, got 0"),
        ({"lam": float("nan")}, "lam must be a finite number, got nan"),
        ({"mining": "easy"}, "unknown mining 'easy'; known: all, hardest"),
    ],
)
def test_wrong_options(options, message):
    mining = {"mining": options.pop("mining")} if "mining" in options else {}
    with pytest.raises(ValueError, match=message):
        goal_loss(torch.rand(3, 3), *diagonal_masks(3), Objective(**options), **mining)
