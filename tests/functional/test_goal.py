import math

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import CircleLoss
from pytorch_metric_learning.reducers import SumReducer
from torch.nn.functional import normalize

from tests.functional.test_pairs import EMPTY, diagonal_masks, label_masks, pairs, similarities_like
from tests.memory import LargestTensor
from tests.reference import goal as reference
from tests.reference import losses as reference_losses
from vl_plugins.functional import goal_loss, goal_triplet_loss, triplet_hn_loss, vlc_loss
from vl_plugins.functional.goal import (
    PAIR_WEIGHTS,
    TRIPLET_WEIGHTS,
    NegativeStatistics,
    Objective,
    hardest_negative_losses,
    pair_weights,
    triplet_violation,
    triplet_weight,
)

COMBINATIONS = [(triplet, pair) for triplet in TRIPLET_WEIGHTS for pair in PAIR_WEIGHTS]
ALL_COMBINATIONS = pytest.mark.parametrize(("triplet", "pair"), COMBINATIONS, ids=map("-".join, COMBINATIONS))
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}
MININGS = {"hardest": reference.goal_hardest, "all": reference.goal_all}
OTHER_OPTIONS = {"margin": 0.3, "tau": 4.0, "offset": 0.5, "alpha": 3.0, "beta": 6.0, "lam": 0.3, "eps": 0.4}


def test_there_are_fifteen_combinations():
    assert len(set(COMBINATIONS)) == 15


def of_loops(similarities, masks, pair_loss, upstream=1.0, **options):
    """Return values and the gradient of their sum, times ``upstream`` for the first, twice that for the second, ..."""
    batch_positives = similarities[masks[0]].tolist()
    values, derivatives = reference_losses.pair_losses(
        pair_loss,
        similarities.tolist(),
        pairs(masks[0]),
        pairs(masks[1]),
        batch_positives=batch_positives,
        **options,
    )
    weights = {key: upstream * (k + 1) for k, key in enumerate(values)}
    gradient = reference_losses.weighted_gradient(derivatives, weights, *similarities.shape)
    return similarities.new_tensor(list(values.values())), similarities.new_tensor(gradient)


def value_and_gradient(values, leaf, upstream=1.0):
    weights = upstream * torch.arange(1, len(values) + 1, dtype=values.dtype)
    return values.detach(), torch.autograd.grad(values, leaf, weights, retain_graph=True)[0]


@ALL_COMBINATIONS
@pytest.mark.parametrize("options", [reference.DEFAULTS, OTHER_OPTIONS], ids=["options of the paper", "other options"])
@pytest.mark.parametrize("mining", MININGS)
@pytest.mark.parametrize("symmetric", [True, False], ids=["both directions", "rows only"])
def test_value_and_gradient_equal_the_loops(triplet, pair, options, mining, symmetric):
    # one positive per row; several, in rows and in columns, beside rows and columns without some
    for masks in (diagonal_masks(6), label_masks(5, 9), label_masks(9, 5), label_masks(12, 20)):
        for dtype, tolerance in TOLERANCE.items():
            similarities = similarities_like(masks[0], dtype)
            expected = of_loops(
                similarities,
                masks,
                MININGS[mining],
                0.5,
                symmetric=symmetric,
                triplet_weight=triplet,
                pair_weight=pair,
                **options,
            )
            values = goal_loss(
                similarities, *masks, triplet, pair, mining=mining, symmetric=symmetric, reduction="none", **options
            )
            assert len(values) >= 6
            assert values.dtype == dtype
            torch.testing.assert_close(
                value_and_gradient(values, similarities, 0.5), expected, atol=10 * tolerance, rtol=tolerance
            )


@pytest.mark.parametrize("pair", ["sig_ms", "lin_ms"])
@pytest.mark.parametrize("mining", MININGS)
@pytest.mark.parametrize("steepness", [2.0, 60.0])
def test_relative_terms_with_ties_and_steep_weights(pair, mining, steepness):
    # Multiples of 1/4: equal positives, equal negatives, and similarities exactly at the threshold, which are not
    # chosen. Steep weights: the extreme one of the chosen outweighs all others by e^-15 and more.
    options = {"triplet_weight": "nca", "pair_weight": pair, "eps": 0.5, "alpha": steepness, "beta": steepness}
    for seed in range(8):
        masks = label_masks(5, 9) if seed % 2 else label_masks(9, 5)
        generator = torch.Generator().manual_seed(seed)
        similarities = torch.randint(-4, 5, masks[0].shape, generator=generator).float().div(4).requires_grad_()
        expected = of_loops(similarities.detach(), masks, MININGS[mining], symmetric=True, **options)
        values = goal_loss(similarities, *masks, mining=mining, reduction="none", **options)
        torch.testing.assert_close(value_and_gradient(values, similarities), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pair", ["sig_ms", "lin_ms"])
@pytest.mark.parametrize("mining", MININGS)
def test_weights_without_steepness_count_the_others(pair, mining):
    options = {"triplet_weight": "nca", "pair_weight": pair, "alpha": 0.0, "beta": 0.0, "eps": 0.4}
    masks = label_masks(9, 5)
    similarities = similarities_like(masks[0])
    expected = of_loops(similarities.detach(), masks, MININGS[mining], symmetric=True, **options)
    values = goal_loss(similarities, *masks, mining=mining, reduction="none", **options)
    torch.testing.assert_close(value_and_gradient(values, similarities), expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("pair", ["sig_ms", "lin_ms"])
def test_what_is_known_of_all_negatives_is_enough(pair):
    masks = label_masks(12, 20)
    similarities = similarities_like(masks[0])
    anchors, positives = torch.where(masks[0])
    positive_similarities = similarities[anchors, positives]
    objective = Objective("nca", pair, **(reference.DEFAULTS | OTHER_OPTIONS))
    floor = min(positive_similarities.tolist()) - OTHER_OPTIONS["eps"]
    statistics = []
    for row, mask in zip(similarities.tolist(), masks[1].tolist(), strict=True):
        negatives = [s for s, is_negative in zip(row, mask, strict=True) if is_negative]
        hardest = max(negatives, default=-math.inf)
        chosen = [s for s in negatives if s > floor]
        terms = chosen if pair == "lin_ms" else [math.exp(6 * (s - hardest)) for s in chosen if s != hardest]
        statistics.append((hardest, row.index(hardest) if negatives else 0, len(chosen), math.fsum(terms)))
    assert statistics[0] == (-math.inf, 0, 0, 0)
    _, index, chosen, total = zip(*statistics, strict=True)
    index, chosen, total = torch.tensor(index), torch.tensor(chosen), torch.tensor(total, dtype=torch.float64)
    hardest = similarities.masked_fill(~masks[1], -math.inf).gather(1, index[:, None])[:, 0]
    values = hardest_negative_losses(
        objective, anchors, positive_similarities, NegativeStatistics(hardest, index, chosen, total)
    )
    expected = goal_loss(similarities, *masks, "nca", pair, symmetric=False, reduction="none", **OTHER_OPTIONS)
    torch.testing.assert_close(
        value_and_gradient(values, similarities), value_and_gradient(expected, similarities), atol=1e-11, rtol=1e-11
    )


@ALL_COMBINATIONS
@pytest.mark.parametrize("mining", MININGS)
def test_gradient_of_the_embeddings_equals_the_loops(triplet, pair, mining):
    torch.manual_seed(3)
    positive_mask, negative_mask = label_masks(5, 9)
    images = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    texts = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    similarities = normalize(images) @ normalize(texts).T
    options = {"symmetric": True, "triplet_weight": triplet, "pair_weight": pair, **reference.DEFAULTS}
    _, gradient = of_loops(similarities.detach(), (positive_mask, negative_mask), MININGS[mining], **options)
    expected = torch.autograd.grad(similarities, (images, texts), gradient, retain_graph=True)
    values = goal_loss(similarities, positive_mask, negative_mask, mining=mining, reduction="none", **options)
    weights = torch.arange(1.0, len(values) + 1, dtype=torch.float64)
    actual = torch.autograd.grad(values, (images, texts), weights)
    assert all(g.abs().max() > 0.1 for g in expected)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-10)


def triplets_of(positive_mask, negative_mask, count=40):
    every = [(a, p, n) for a, p in pairs(positive_mask) for b, n in pairs(negative_mask) if a == b]
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(5))[:count]
    return [sorted(every)[k] for k in order.tolist()]


@ALL_COMBINATIONS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_given_triplets_equal_the_loops(triplet, pair, dtype):
    triplets = triplets_of(*label_masks(12, 20))
    triplets.append(triplets[0])  # a triplet given twice counts twice, but its pairs are no others of their own
    similarities = similarities_like(label_masks(12, 20)[0], dtype)
    rows = similarities.tolist()
    batch_positives = [rows[a][p] for a, p in {(a, p) for a, p, _ in triplets}]
    values, gradient = [], [[0.0] * 20 for _ in range(12)]
    for k, (a, p, n) in enumerate(triplets):
        negatives = sorted({other for b, _, other in triplets if b == a})
        value, derivatives = reference.goal_triplet(rows[a], p, n, negatives, batch_positives, triplet, pair)
        values.append(value)
        for column, derivative in derivatives.items():
            gradient[a][column] += (k + 1) * derivative
    actual = goal_triplet_loss(similarities, *torch.tensor(triplets).T, triplet, pair, **reference.DEFAULTS)
    torch.testing.assert_close(
        value_and_gradient(actual, similarities),
        (similarities.new_tensor(values), similarities.new_tensor(gradient)),
        atol=10 * TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
    )


@ALL_COMBINATIONS
def test_triplets_of_the_hardest_negatives_are_the_mined_ones(triplet, pair):
    masks = label_masks(12, 20)
    similarities = similarities_like(masks[0])
    anchors, positives = torch.where(masks[0])
    kept = masks[1].any(dim=1)[anchors]
    hardest = similarities.detach().masked_fill(~masks[1], -2).argmax(dim=1)
    everything = (anchors[kept], positives[kept], hardest[anchors][kept])
    # All pairs of the batch have to be given for the same relative similarities: the others as triplets of weight 0.
    rest = torch.tensor([(a, p, n) for a, p in pairs(masks[0]) for b, n in pairs(masks[1]) if a == b]).T
    given = [torch.cat(both) for both in zip(everything, rest, strict=True)]
    upstream = torch.zeros(len(given[0]), dtype=torch.float64)
    upstream[: kept.sum()] = 1
    similarities_without = masks[0].clone()
    similarities_without[~masks[1].any(dim=1)] = False  # no triplet has their positives
    mined = goal_loss(similarities, similarities_without, masks[1], triplet, pair, symmetric=False, reduction="none")
    values = goal_triplet_loss(similarities, *given, triplet, pair)
    torch.testing.assert_close(values[: kept.sum()], mined)
    torch.testing.assert_close(
        torch.autograd.grad(values, similarities, upstream), torch.autograd.grad(mined.sum(), similarities)
    )


def test_no_triplets():
    similarities = torch.rand(3, 4, requires_grad=True)
    values = goal_triplet_loss(similarities, *torch.zeros(3, 0, dtype=torch.long))
    assert values.shape == (0,)
    values.sum().backward()
    assert torch.equal(similarities.grad, torch.zeros(3, 4))


# The identities of Table 1.


def test_con_con_is_triplet_hn():
    for masks in (diagonal_masks(6), label_masks(5, 9), label_masks(12, 20)):
        similarities = similarities_like(masks[0])
        ours = goal_loss(similarities, *masks, "con", "con", margin=0.3, reduction="none")
        theirs = triplet_hn_loss(similarities, *masks, margin=0.3, reduction="none")
        assert theirs.count_nonzero() >= 4
        torch.testing.assert_close(value_and_gradient(ours, similarities), value_and_gradient(theirs, similarities))


def test_nca_con_is_nt_xent_over_the_hardest_negative_divided_by_tau():
    positive_mask, negative_mask = diagonal_masks(6)
    similarities = similarities_like(positive_mask)
    ours = goal_loss(similarities, positive_mask, negative_mask, "nca", "con", tau=7.0, reduction="none")
    # one negative for each row, and one for each column
    hardest = similarities.detach().masked_fill(positive_mask, -2)
    rows = torch.zeros_like(positive_mask).scatter(1, hardest.argmax(dim=1, keepdim=True), True)
    columns = torch.zeros_like(positive_mask).scatter(0, hardest.argmax(dim=0, keepdim=True), True)
    theirs = sum(
        vlc_loss(s, positive_mask, negatives, scale=7.0, symmetric=False, reduction="none") / 7
        for s, negatives in ((similarities, rows), (similarities.T, columns.T))
    )
    torch.testing.assert_close(value_and_gradient(ours, similarities), value_and_gradient(theirs, similarities))
    loop = [
        sum(
            -torch.log(torch.exp(7 * s[i, i]) / (torch.exp(7 * s[i, i]) + torch.exp(7 * s[i][~positive_mask[i]].max())))
            for s in (similarities, similarities.T)
        )
        / 7
        for i in range(6)
    ]
    torch.testing.assert_close(
        value_and_gradient(ours, similarities), value_and_gradient(torch.stack(loop), similarities)
    )


def test_cir_lin_with_offset_1_is_the_circle_loss_of_pytorch_metric_learning():
    torch.manual_seed(0)
    images = torch.rand(6, 4, dtype=torch.float64, requires_grad=True)  # in one orthant: all similarities >= 0
    texts = torch.rand(6, 4, dtype=torch.float64, requires_grad=True)
    similarities = CosineSimilarity()(images, texts)
    assert similarities.min() > 0
    positive_mask, negative_mask = diagonal_masks(6)
    hardest = similarities.detach().masked_fill(positive_mask, -2).argmax(dim=1)
    triplets = (torch.arange(6), torch.arange(6), hardest)  # one for each anchor
    circle = CircleLoss(m=0, gamma=9.0, reducer=SumReducer())
    theirs = circle(images, indices_tuple=triplets, ref_emb=texts) / 9
    expected = torch.autograd.grad(theirs, (images, texts))
    assert theirs > 0.5
    options = {"tau": 9.0, "offset": 1.0}
    mined = goal_loss(
        similarities, positive_mask, negative_mask, "cir", "lin", symmetric=False, reduction="sum", **options
    )
    given = goal_triplet_loss(similarities, *triplets, "cir", "lin", **options).sum()
    for ours in (mined, given):
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(torch.autograd.grad(ours, (images, texts), retain_graph=True), expected)


@pytest.mark.parametrize("triplet", TRIPLET_WEIGHTS)
def test_sig_ms_with_relative_terms_of_1_is_sig(triplet):
    s_p, s_n = torch.rand(2, 50, dtype=torch.float64) * 2 - 1
    options = {"alpha": 3.0, "beta": 5.0, "lam": 0.4}
    torch.testing.assert_close(
        pair_weights(s_p, s_n, "sig_ms", relative_positive=1.0, relative_negative=1.0, **options),
        pair_weights(s_p, s_n, "sig", **options),
    )


def test_without_other_pairs_ms_has_no_relative_term():
    similarities = torch.tensor([[0.6, 0.3]], dtype=torch.float64, requires_grad=True)
    masks = (torch.tensor([[True, False]]), torch.tensor([[False, True]]))
    weight = triplet_weight(similarities[0, 0], similarities[0, 1], "nca").item()
    for kind, positive, negative in (
        ("sig_ms", torch.tensor(-0.2).exp().item(), torch.tensor(-2.0).exp().item()),
        ("lin_ms", 0.4, 0.3),
    ):
        value = goal_loss(similarities, *masks, "nca", kind, symmetric=False)
        (gradient,) = torch.autograd.grad(value, similarities)
        torch.testing.assert_close(gradient[0].tolist(), [-weight * positive, weight * negative], atol=1e-7, rtol=1e-6)


def test_the_value_is_the_violation():
    masks = label_masks(12, 20)
    similarities = similarities_like(masks[0])
    anchors, positives = torch.where(masks[0])
    s_p = similarities[anchors, positives]
    s_n = similarities.masked_fill(~masks[1], -2).max(dim=1).values[anchors]
    for triplet, pair in COMBINATIONS:
        values = goal_loss(similarities, *masks, triplet, pair, symmetric=False, reduction="none")
        expected = torch.where(masks[1].any(dim=1)[anchors], triplet_violation(s_p, s_n, triplet), 0)
        assert torch.equal(values, expected), "exactly, in spite of the straight-through sum"
        assert (values >= 0).all()


@pytest.mark.parametrize("similarity", [0.4, 0.5, 0.6])
@pytest.mark.parametrize("triplet", [None, "cir"], ids=["default", "cir"])
def test_wrong_triplets_in_the_middle_pull_about_as_strongly_as_those_of_triplet_hn(triplet, similarity):
    # Where pairs lie in fine-tuning. Eq. 8 as it is written gives such a triplet a weight of 0.01.
    options = {} if triplet is None else {"triplet_weight": triplet}
    similarities = torch.tensor([[similarity, similarity + 0.02]], requires_grad=True)
    masks = (torch.tensor([[True, False]]), torch.tensor([[False, True]]))
    mined = goal_loss(similarities, *masks, symmetric=False, **options)
    given = goal_triplet_loss(similarities, *torch.tensor([[0], [0], [1]]), **options).sum()
    for value in (mined, given):
        (gradient,) = torch.autograd.grad(value, similarities)
        pull, push = gradient[0].tolist()
        assert -1 <= pull <= -0.25
        assert 0.25 <= push <= 1


@pytest.fixture(params=[False, True], ids=["subnormal numbers", "flushed to zero"])
def flush_denormal(request):
    if not torch.set_flush_denormal(request.param):
        pytest.skip("this processor cannot")
    yield
    torch.set_flush_denormal(False)


@ALL_COMBINATIONS
@pytest.mark.usefixtures("flush_denormal")
def test_the_value_is_zero_exactly_where_the_triplet_weight_is(triplet, pair):
    # tau * (s_n - s_p) passes through where the float32 logistic function and logarithm are subnormal and zero
    s_n = torch.linspace(-1, 1, 4001)
    similarities = torch.stack([torch.full_like(s_n, 0.95), s_n], dim=1).requires_grad_()
    masks = [torch.tensor([[True, False]]).expand(4001, 2), torch.tensor([[False, True]]).expand(4001, 2)]
    options = {"tau": 150.0, "margin": 0.25, "offset": 0.0}
    weight = triplet_weight(similarities[:, 0], similarities[:, 1], triplet, **options)
    assert (weight == 0).any()
    assert (weight > 0).any()
    values = goal_loss(similarities, *masks, triplet, pair, symmetric=False, reduction="none", **options)
    assert torch.equal(values > 0, weight > 0)
    everything = (torch.arange(4001), torch.zeros(4001, dtype=torch.long), torch.ones(4001, dtype=torch.long))
    given = goal_triplet_loss(similarities, *everything, triplet, pair, **options)
    assert torch.equal(given > 0, weight > 0)


@ALL_COMBINATIONS
def test_gradients_are_finite_at_the_ends(triplet, pair):
    masks = diagonal_masks(5)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for positive in (1.0, -1.0, 0.0):
            for negative in (1.0, -1.0, 0.0):
                for options in ({}, {"tau": 1e3}, {"eps": 3.0}, {"eps": 0.0}):
                    similarities = torch.where(masks[0], positive, negative).to(dtype).requires_grad_()
                    for mining in MININGS:
                        value = goal_loss(similarities, *masks, triplet, pair, mining=mining, **options)
                        (gradient,) = torch.autograd.grad(value, similarities)
                        assert value.isfinite()
                        assert gradient.dtype == dtype
                        assert gradient.isfinite().all(), (dtype, positive, negative, options)


def test_relative_terms_do_not_overflow():
    # exp(alpha * (s_p - R)) of about e^1000: the weight's limit is 0, not NaN
    similarities = torch.tensor([[1.0, -1.0, 0.9], [-1.0, -1.0, 0.9]], requires_grad=True)
    masks = torch.tensor([[True, True, False], [True, True, False]]), torch.tensor([[False, False, True]] * 2)
    for kind in ("sig_ms", "lin_ms"):
        value = goal_loss(similarities, *masks, "nca", kind, alpha=500.0, symmetric=False)
        (gradient,) = torch.autograd.grad(value, similarities)
        assert value.isfinite()
        assert not gradient.isnan().any()
        if kind == "sig_ms":
            assert gradient[0, 0] == 0


@ALL_COMBINATIONS
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mining", MININGS)
def test_anchors_without_negatives_are_exactly_zero_beside_others(triplet, pair, mining):
    masks = label_masks(5, 9)
    similarities = similarities_like(masks[0])
    without = ~masks[1].any(dim=1)
    assert without.sum() == 1
    with torch.autograd.detect_anomaly(check_nan=True):
        values = goal_loss(similarities, *masks, triplet, pair, mining=mining, symmetric=False, reduction="none")
        values.sum().backward()
    of_these = values[without[torch.where(masks[0])[0]]]
    assert torch.equal(of_these, torch.zeros(4, dtype=torch.float64))
    assert torch.equal(similarities.grad[without], torch.zeros(1, 9, dtype=torch.float64))
    assert values.count_nonzero() > 3


@pytest.mark.parametrize("masks", EMPTY.values(), ids=EMPTY.keys())
def test_nothing_to_compare_for_every_combination(masks):
    for triplet, pair in COMBINATIONS:
        for mining in MININGS:
            similarities = similarities_like(masks[0], torch.float32)
            value = goal_loss(similarities, *masks, triplet, pair, mining=mining)
            value.backward()
            assert value == 0
            assert torch.equal(similarities.grad, torch.zeros_like(similarities))


def test_memory_is_that_of_the_similarities():
    size = 128
    labels = torch.arange(size)
    texts = labels.repeat_interleave(5)
    positive_mask = labels[:, None] == texts
    similarities = torch.rand(size, 5 * size, requires_grad=True)
    with LargestTensor() as largest:
        for pair in PAIR_WEIGHTS:
            goal_loss(similarities, positive_mask, ~positive_mask, "cir", pair).backward()
    assert largest.elements == similarities.numel()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [0, 1])
def test_not_a_number_is_not_hidden_by_triplets_that_do_not_need_it(count, bad):
    similarities = torch.rand(3, 4)
    similarities[2, 3] = bad
    similarities.requires_grad_()
    values = goal_triplet_loss(similarities, *torch.tensor([[0], [1], [2]])[:, :count])
    assert values.isnan().all()
    values.sum().backward()
    if count:
        assert similarities.grad.isnan().any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"triplet_weight": "cos"}, "unknown triplet_weight 'cos'.*; known: cir, con, nca"),
        ({"pair_weight": "sigms"}, "unknown pair_weight 'sigms' .did you mean 'sig_ms'.*"),
        ({"mining": "easy"}, "unknown mining 'easy'; known: all, hardest"),
    ],
)
def test_unknown_names(options, message):
    for masks in (diagonal_masks(3), EMPTY["no negatives"], EMPTY["neither"]):
        with pytest.raises(ValueError, match=message):
            goal_loss(torch.rand(masks[0].shape), *masks, **options)
    options.pop("mining", None)
    if options:
        with pytest.raises(ValueError, match=message):
            goal_triplet_loss(torch.rand(3, 3), *torch.zeros(3, 1, dtype=torch.long), **options)


def test_weights_of_the_figures():
    """Points of Figures 2 and 3 of the paper, with its settings."""
    s_p, s_n = torch.tensor(0.7), torch.tensor(0.5)
    assert triplet_weight(s_p, s_n, "con", margin=0.21) == 1
    assert triplet_weight(s_p, s_n, "con", margin=0.19) == 0
    assert triplet_weight(s_n, s_n, "nca") == 0.5
    # equal weights lie on circles around s_p = 1, s_n = 0
    on_a_circle = triplet_weight(torch.tensor([0.5, 0.6, 1.0]), torch.tensor([0.0, 0.3, 0.5]), "cir")
    torch.testing.assert_close(on_a_circle, on_a_circle[:1].expand(3))
    half = pair_weights(torch.tensor(0.5), torch.tensor(0.5), "sig")
    assert half == (0.5, 0.5)
    high = pair_weights(torch.tensor(0.5), torch.tensor(0.5), "sig_ms", relative_positive=0.1, relative_negative=0.1)
    torch.testing.assert_close(torch.stack(high), torch.full((2,), 1 / 1.1))
    linear = pair_weights(torch.tensor(0.5), torch.tensor(0.5), "lin_ms", relative_positive=0.1, relative_negative=0.1)
    torch.testing.assert_close(torch.stack(linear), torch.tensor([0.45, 0.55]))
