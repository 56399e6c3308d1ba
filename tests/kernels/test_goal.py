"""GOAL of embeddings; test_triplet.py has what it shares with other losses of hardest negatives."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.functional.test_goal import COMBINATIONS, OTHER_OPTIONS, of_loops
from tests.kernels.test_unified import assert_near, loss_and_gradients, plain, vectors
from tests.reference import goal as reference
from vl_plugins import functional, tiles
from vl_plugins.functional.goal import PAIR_WEIGHTS, TRIPLET_WEIGHTS, triplet_weight
from vl_plugins.kernels import tiled
from vl_plugins.kernels.goal import goal_loss
from vl_plugins.kernels.triplet import triplet_hn_loss

ALL_COMBINATIONS = pytest.mark.parametrize(("triplet", "pair"), COMBINATIONS, ids=map("-".join, COMBINATIONS))
RELATIVE = pytest.mark.parametrize("pair", ["sig_ms", "lin_ms"])


@pytest.fixture(params=["CPU", "accelerator"])
def path(request, monkeypatch):
    """Small shapes in several tiles, with and without questions to the device in between."""
    monkeypatch.setattr(tiles, "CPU_TILE", 1)  # of 16 x 16
    if request.param == "accelerator":
        monkeypatch.setattr(tiled, "_pairs_are_known", lambda comparison: False)


@ALL_COMBINATIONS
@pytest.mark.parametrize("options", [reference.DEFAULTS, OTHER_OPTIONS], ids=["options of the paper", "other options"])
def test_equal_to_the_loops(monkeypatch, triplet, pair, options):
    monkeypatch.setattr(tiles, "CPU_TILE", 1)
    x, y, *labels = vectors(20, 35, 4, seed=0, labels=12)
    x.requires_grad_(), y.requires_grad_()
    similarities = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(y).T
    positive_mask = labels[0][:, None] == labels[1]
    for symmetric in (True, False):
        values, gradient = of_loops(
            similarities.detach(),
            (positive_mask, ~positive_mask),
            reference.goal_hardest,
            symmetric=symmetric,
            triplet_weight=triplet,
            pair_weight=pair,
            **options,
        )
        assert len(values) > 30
        expected = torch.autograd.grad(similarities, (x, y), gradient, retain_graph=True)
        actual = goal_loss(
            x, y, *labels, triplet, pair, symmetric=symmetric, reduction="none", backend="tiled", **options
        )
        torch.testing.assert_close(actual, values, atol=1e-11, rtol=1e-11)
        upstream = torch.arange(1, len(values) + 1, dtype=values.dtype)
        torch.testing.assert_close(torch.autograd.grad(actual, (x, y), upstream), expected, atol=1e-9, rtol=1e-10)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.sampled_from([0, 1, 2, 5, 17, 40]),
    columns=st.sampled_from([0, 1, 3, 16, 33, 50]),
    labels=st.sampled_from([1, 3, 1000]),
    seed=st.integers(0, 100),
    triplet=st.sampled_from(TRIPLET_WEIGHTS),
    pair=st.sampled_from(PAIR_WEIGHTS),
    steepness=st.sampled_from([0.0, 2.0, 20.0]),
    tau=st.sampled_from([1.0, 10.0, 50.0]),
    eps=st.sampled_from([0.0, 0.1, 0.7, 3.0]),
    symmetric=st.booleans(),
    same_set=st.booleans(),
    pairs_are_known=st.booleans(),
)
def test_equal_to_the_formulas(
    rows,
    columns,
    labels,
    seed,
    triplet,
    pair,
    steepness,
    tau,
    eps,
    symmetric,
    same_set,
    pairs_are_known,
):
    columns = rows if same_set else columns
    x, y, x_labels, y_labels = vectors(rows, columns, 6, seed, labels=labels)
    if same_set:
        y, y_labels = x, x_labels
    options = {"triplet_weight": triplet, "pair_weight": pair, "alpha": steepness, "beta": steepness, "tau": tau}
    options |= {"eps": eps, "symmetric": symmetric, "same_set": same_set, "reduction": "none"}
    expected = loss_and_gradients(partial(plain, functional.goal_loss), x, y, x_labels, y_labels, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CPU_TILE", 1)
        patch.setattr(tiled, "_pairs_are_known", lambda comparison: pairs_are_known)
        actual = loss_and_gradients(goal_loss, x, y, x_labels, y_labels, backend="tiled", **options)
    assert_near(actual, expected, 1e-10)


@ALL_COMBINATIONS
def test_single_precision(path, triplet, pair):
    # Not of any numbers: rounding may move a pair across a threshold, and another negative to the top.
    x, y, *labels = vectors(40, 50, 6, seed=1, labels=12)
    for symmetric in (True, False):
        options = {"triplet_weight": triplet, "pair_weight": pair, "symmetric": symmetric, "reduction": "none"}
        expected = loss_and_gradients(partial(plain, functional.goal_loss), x, y, *labels, **options)
        actual = loss_and_gradients(goal_loss, x, y, *labels, dtype=torch.float32, backend="tiled", **options)
        assert actual[0].dtype == torch.float32
        assert_near(actual, expected, 1e-5)


@RELATIVE
@pytest.mark.parametrize("steepness", [2.0, 60.0])
def test_ties_and_similarities_at_the_thresholds(path, pair, steepness):
    # Whole numbers over 8 and a slack of such a one: dot products are exact, equal ones and thresholds are met exactly.
    options = {"triplet_weight": "nca", "pair_weight": pair, "eps": 0.5, "alpha": steepness, "beta": steepness}
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randint(-2, 3, (count, 3), generator=generator).double() / 4 for count in (40, 36))
        labels = torch.randint(8, (40,), generator=generator), torch.randint(8, (36,), generator=generator)
        run = partial(loss_and_gradients, normalize=False, reduction="none", **options)
        expected = run(partial(plain, functional.goal_loss), x, y, *labels)
        assert expected[1].abs().max() > 0.1
        assert_near(run(goal_loss, x, y, *labels, backend="tiled"), expected, 1e-10)
        assert_near(run(goal_loss, x, y, *labels, backend="tiled", dtype=torch.float32), expected, 1e-4)


@ALL_COMBINATIONS
def test_equal_and_opposite_embeddings_have_finite_gradients(triplet, pair):
    labels = torch.arange(5)
    x = torch.tensor([[1.0, 0.0]]).repeat(5, 1)
    for y in (x, -x):
        for options in ({}, {"tau": 1e4}, {"alpha": 1e4, "beta": 1e4}, {"eps": 3.0}, {"eps": 0.0}):
            values = loss_and_gradients(
                goal_loss, x, y, labels, labels, triplet, pair, dtype=torch.float16, backend="tiled", **options
            )
            assert all(value.isfinite().all() for value in values), options


@pytest.mark.parametrize("triplet", TRIPLET_WEIGHTS)
def test_the_value_is_zero_exactly_where_the_triplet_weight_is(triplet):
    # tau * (s_n - s_p) passes through where the float32 logistic function and logarithm are subnormal and zero
    s_n = torch.linspace(-1, 1, 2001)
    s_p = torch.full_like(s_n, 0.95)
    options = {"tau": 150.0, "margin": 0.25, "offset": 0.0}
    weight = triplet_weight(s_p, s_n, triplet, **options)
    assert (weight == 0).any()
    assert (weight > 0).any()
    options |= {"normalize": False, "symmetric": False, "reduction": "none", "backend": "tiled"}
    values = goal_loss(
        torch.stack([s_p, s_n], dim=1),
        torch.eye(2),
        torch.zeros(2001).long(),
        torch.arange(2),
        triplet,
        "con",
        **options,
    )
    assert torch.equal(values > 0, weight > 0)


def test_con_con_is_triplet_hn():
    x, y, *labels = vectors(30, 40, 4, seed=1, labels=12)
    options = {"margin": 0.3, "reduction": "none", "backend": "tiled"}
    theirs = loss_and_gradients(triplet_hn_loss, x, y, *labels, **options)
    assert theirs[0].count_nonzero() > 10
    ours = loss_and_gradients(goal_loss, x, y, *labels, "con", "con", **options)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_unknown_names():
    labels = torch.arange(3)
    for options, message in (
        ({"triplet_weight": "cos"}, "unknown triplet_weight 'cos'.*; known: cir, con, nca"),
        ({"pair_weight": "sigms"}, "unknown pair_weight 'sigms' .did you mean 'sig_ms'.*"),
    ):
        for backend in ("functional", "tiled"):
            for y_labels in (labels, labels + 3):  # something and nothing to compare
                with pytest.raises(ValueError, match=message):
                    goal_loss(torch.eye(3), torch.eye(3), labels, y_labels, backend=backend, **options)
