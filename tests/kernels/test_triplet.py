"""Triplet-HN of embeddings, and what all losses of hardest negatives have in common."""

import math
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.functional.test_pairs import pairs as pairs_of
from tests.kernels.test_unified import assert_near, loss_and_gradients, plain, vectors
from tests.memory import LargestTensor, extra_bytes
from tests.reference import losses as reference
from vl_plugins import functional, tiles
from vl_plugins.kernels import dispatch, goal, hardest, tiled, triplet
from vl_plugins.kernels.mining import negative_statistics
from vl_plugins.kernels.pairs import equal_label_pairs
from vl_plugins.kernels.vectors import compare

triplet_hn_loss = triplet.triplet_hn_loss
LOSSES = {
    "triplet_hn": (triplet_hn_loss, functional.triplet_hn_loss),
    "goal": tuple(
        partial(loss, triplet_weight="cir", pair_weight="sig_ms") for loss in (goal.goal_loss, functional.goal_loss)
    ),
    "goal of no others": tuple(
        partial(loss, triplet_weight="nca", pair_weight="sig") for loss in (goal.goal_loss, functional.goal_loss)
    ),
}
ALL = pytest.mark.parametrize(("loss", "formulas"), LOSSES.values(), ids=LOSSES)


@pytest.fixture(params=["CPU", "accelerator"])
def path(request, monkeypatch):
    """Small shapes in several tiles, with and without questions to the device in between."""
    monkeypatch.setattr(tiles, "CPU_TILE", 1)  # of 16 x 16
    if request.param == "accelerator":
        monkeypatch.setattr(tiled, "_pairs_are_known", lambda comparison: False)


@pytest.mark.parametrize("symmetric", [True, False], ids=["both directions", "rows only"])
def test_equal_to_the_loops(path, symmetric):
    for rows, columns in ((20, 35), (35, 20)):
        x, y, *labels = vectors(rows, columns, 4, seed=rows, labels=12)
        x.requires_grad_(), y.requires_grad_()
        similarities = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(y).T
        positive_mask = labels[0][:, None] == labels[1]
        expected, derivatives = reference.pair_losses(
            reference.triplet_hn,
            similarities.tolist(),
            pairs_of(positive_mask),
            pairs_of(~positive_mask),
            symmetric=symmetric,
            margin=0.3,
        )
        assert len(expected) > 30
        upstream = {pair: 0.5 + 0.25 * k for k, pair in enumerate(expected)}
        of_similarities = reference.weighted_gradient(derivatives, upstream, rows, columns)
        gradients = torch.autograd.grad(similarities, (x, y), torch.tensor(of_similarities, dtype=x.dtype))

        values = triplet_hn_loss(x, y, *labels, 0.3, symmetric=symmetric, reduction="none", backend="tiled")
        torch.testing.assert_close(values, values.new_tensor(list(expected.values())), atol=1e-12, rtol=0)
        actual = torch.autograd.grad(values, (x, y), values.new_tensor(list(upstream.values())))
        torch.testing.assert_close(actual, gradients, atol=1e-10, rtol=1e-10)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.sampled_from([0, 1, 2, 5, 17, 40]),
    columns=st.sampled_from([0, 1, 3, 16, 33, 50]),
    dimension=st.sampled_from([2, 7, 12]),
    labels=st.sampled_from([1, 3, 1000]),
    seed=st.integers(0, 100),
    name=st.sampled_from(list(LOSSES)),
    normalize=st.booleans(),
    symmetric=st.booleans(),
    same_set=st.booleans(),
    reduction=st.sampled_from(["none", "mean", "sum"]),
    margin=st.sampled_from([0.0, 0.2, 2.0]),
    backend=st.sampled_from(["tiled", "dense", "functional", None]),
    pairs_are_known=st.booleans(),
)
def test_equal_to_the_formulas(
    rows,
    columns,
    dimension,
    labels,
    seed,
    name,
    normalize,
    symmetric,
    same_set,
    reduction,
    margin,
    backend,
    pairs_are_known,
):
    columns = rows if same_set else columns
    x, y, x_labels, y_labels = vectors(rows, columns, dimension, seed, labels=labels)
    if not normalize:
        x, y = x / 2, y / 2
    if same_set:
        y, y_labels = x, x_labels
    loss, formulas = LOSSES[name]
    options = {"margin": margin, "normalize": normalize, "symmetric": symmetric, "same_set": same_set}
    expected = loss_and_gradients(partial(plain, formulas), x, y, x_labels, y_labels, **options, reduction=reduction)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CPU_TILE", 1)
        patch.setattr(tiled, "_pairs_are_known", lambda comparison: pairs_are_known)
        actual = loss_and_gradients(loss, x, y, x_labels, y_labels, backend=backend, **options, reduction=reduction)
    assert_near(actual, expected, 1e-10)


@ALL
@pytest.mark.parametrize("backend", ["tiled", "functional"])
def test_single_precision(path, loss, formulas, backend):
    # Not of any numbers: rounding may move another negative to the top.
    x, y, *labels = vectors(40, 50, 6, seed=15, labels=12)
    for options in ({}, {"symmetric": False}, {"normalize": False}, {"margin": 0.7}):
        sides = (x, y) if options.get("normalize", True) else (x / 4, y / 4)
        expected = loss_and_gradients(partial(plain, formulas), *sides, *labels, reduction="none", **options)
        actual = loss_and_gradients(
            loss, *sides, *labels, dtype=torch.float32, backend=backend, reduction="none", **options
        )
        assert actual[0].dtype == torch.float32
        assert_near(actual, expected, 1e-5)


@ALL
def test_one_set(path, loss, formulas):
    x, _, labels, _ = vectors(40, 0, 4, seed=1, labels=15)
    x.requires_grad_()
    options = {"same_set": True, "symmetric": False, "reduction": "none"}
    expected = plain(formulas, x, x, labels, labels, **options)
    values = loss(x, x, labels, labels, backend="tiled", **options)
    torch.testing.assert_close(values, expected, atol=1e-10, rtol=0)
    upstream = torch.linspace(0.5, 2, len(values), dtype=values.dtype)
    actual, right = (torch.autograd.grad(tensor, x, upstream)[0] for tensor in (values, expected))
    assert right.abs().max() > 0.1
    torch.testing.assert_close(actual, right, atol=1e-10, rtol=0)


@ALL
def test_of_equally_hard_negatives_the_first_receives_the_gradient(path, loss, formulas):
    # Whole numbers: equal similarities are equal to the last bit, however they are summed up.
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-1, 2, (count, 3), generator=generator).double() / 2 for count in (40, 36))
    labels = torch.arange(40) // 2, torch.arange(36) // 2
    options = {"normalize": False, "reduction": "none"}
    expected = loss_and_gradients(partial(plain, formulas), x, y, *labels, **options)
    assert_near(loss_and_gradients(loss, x, y, *labels, backend="tiled", **options), expected, 1e-12)
    similarities = (x @ y.T).masked_fill(labels[0][:, None] == labels[1], -9)
    assert ((similarities == similarities.amax(dim=1, keepdim=True)).sum(dim=1) > 1).sum() > 20


@ALL
def test_anchors_without_negatives_or_positives_beside_others(path, loss, formulas):
    x, y, _, _ = vectors(5, 40, 4, seed=2)
    # Of rows only: all columns have the label of the last anchor or none that is in the rows.
    labels = torch.tensor([0, 0, 1, 2, 2]), torch.zeros(40, dtype=torch.long)
    for symmetric in (True, False):
        options = {"symmetric": symmetric, "reduction": "none"}
        expected = loss_and_gradients(partial(plain, formulas), x, y, *labels, **options)
        actual = loss_and_gradients(loss, x, y, *labels, backend="tiled", **options)
        assert len(expected[0]) == 80
        assert expected[0].any() == symmetric
        assert_near(actual, expected, 1e-10)


@pytest.mark.parametrize(
    ("rows", "columns", "equal"), [(0, 4, True), (4, 0, True), (0, 0, True), (1, 1, True), (4, 6, True), (3, 5, False)]
)
@ALL
def test_nothing_to_compare_is_zero_with_zero_gradients(loss, formulas, rows, columns, equal):
    x, y, *_ = vectors(rows, columns, 3, seed=3)
    labels = torch.zeros(rows).long(), torch.zeros(columns).long() + (0 if equal else 1)
    for reduction in ("mean", "sum"):
        for tensor in loss_and_gradients(loss, x, y, *labels, reduction=reduction, backend="tiled"):
            assert torch.equal(tensor, torch.zeros_like(tensor))


@ALL
@pytest.mark.parametrize("backend", ["tiled", "functional"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_not_a_number_is_never_hidden(loss, formulas, backend, bad, side):
    for labels in (torch.zeros(4, dtype=torch.long), torch.arange(4)):  # nothing to compare, and something
        for normalize in (True, False):
            sides = [torch.eye(4), torch.eye(4)]
            sides[side][2, 1] = bad
            value, *gradients = loss_and_gradients(
                loss, *sides, labels, labels, dtype=torch.float32, backend=backend, normalize=normalize
            )
            assert value.isnan()
            assert gradients[side].isnan().any()


@ALL
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_embeddings(path, loss, formulas, dtype):
    x, y, *labels = vectors(50, 70, 8, seed=4, labels=30)
    x, y = (side.to(dtype) for side in (x, y))
    expected = loss_and_gradients(partial(plain, formulas), x.double(), y.double(), *labels)
    value, *gradients = loss_and_gradients(loss, x, y, *labels, dtype=dtype, backend="tiled")
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected[0], rtol=1e-5, atol=0)
    for actual, right in zip(gradients, expected[1:], strict=True):
        assert actual.dtype == dtype
        assert (actual.double() - right).norm() < 3e-3 * right.norm()


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_opposite_equal_and_zero_vectors_are_finite(path, loss, formulas, dtype):
    directions = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]).repeat(8, 1)
    labels = torch.arange(40) // 2
    values = loss_and_gradients(loss, directions, directions, labels, labels, dtype=dtype, backend="tiled")
    assert all(value.isfinite().all() for value in values)
    of_zeros = values[1].view(8, 5, 2)[:, 3]
    assert torch.equal(of_zeros, torch.zeros_like(of_zeros))
    assert values[1].any()


@ALL
def test_embeddings_in_another_layout(loss, formulas):
    x, y, *labels = vectors(9, 12, 6, seed=5)
    strided = torch.stack([x, x], dim=2)[:, :, 0], y.T.contiguous().T
    assert not any(side.is_contiguous() for side in strided)
    expected = loss_and_gradients(loss, x, y, *labels, backend="tiled")
    sides = [side.detach().requires_grad_() for side in strided]
    value = loss(*sides, *labels, backend="tiled")
    for actual, right in zip((value, *torch.autograd.grad(value * 0.5, sides)), expected, strict=True):
        torch.testing.assert_close(actual, right)


@ALL
def test_one_side_needs_no_gradient(loss, formulas):
    x, y, *labels = vectors(40, 30, 4, seed=6)
    value, *expected = loss_and_gradients(loss, x, y, *labels, backend="tiled")
    for side in range(2):
        sides = [tensor.clone().requires_grad_(number == side) for number, tensor in enumerate((x, y))]
        (gradient,) = torch.autograd.grad(0.5 * loss(*sides, *labels, backend="tiled"), (sides[side],))
        torch.testing.assert_close(gradient, expected[side])
    of_constants = loss(x, y, *labels, backend="tiled")
    assert torch.equal(of_constants, value)
    assert not of_constants.requires_grad


@ALL
def test_the_graph_can_be_used_again_but_not_with_other_vectors(loss, formulas):
    x, y, *labels = vectors(20, 15, 4, seed=7)
    x.requires_grad_()
    value = loss(x, y, *labels, backend="tiled")
    first = torch.autograd.grad(value, x, retain_graph=True)
    second = torch.autograd.grad(3 * value, x, retain_graph=True)
    torch.testing.assert_close(second[0], 3 * first[0])
    with torch.no_grad():
        x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@ALL
def test_second_derivatives(loss, formulas):
    x, y, *labels = vectors(20, 15, 4, seed=16)
    x, y = (side.requires_grad_() for side in (x, y))
    for sides, options in (
        ((x, y, *labels), {}),
        ((x, y, *labels), {"normalize": False}),
        ((x, x, labels[0], labels[0]), {"same_set": True, "symmetric": False}),
    ):
        results = []
        for backend in ("tiled", "functional"):
            value = loss(*sides, backend=backend, **options)
            gradients = torch.autograd.grad(value.square(), sides[:2], create_graph=True)
            length = sum(gradient.square().sum() for gradient in gradients)
            results.append((*gradients, *torch.autograd.grad(length, sides[:2])))
        assert all(tensor.abs().max() > 0.01 for tensor in results[1])
        assert_near(*results, 1e-10)


@ALL
def test_autocast_changes_nothing(loss, formulas):
    x, y, *labels = vectors(9, 12, 6, seed=8)
    run = partial(loss_and_gradients, loss, x, y, *labels, dtype=torch.float32, backend="tiled")
    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run()
    assert all(map(torch.equal, actual, expected))


def test_sums_do_not_overflow_half_precision():
    # 3000 anchors share one hardest negative, each with a gradient of 40 in one direction.
    x, y = torch.zeros(3000, 2), torch.zeros(3001, 2)
    x[:, 0], y[-1, 0] = 40, 0.5
    labels = torch.arange(3000), torch.arange(3001)
    value, *gradients = loss_and_gradients(
        triplet_hn_loss, x, y, *labels, normalize=False, dtype=torch.float16, backend="tiled"
    )
    assert value.isfinite()
    assert gradients[0].isfinite().all()
    assert gradients[1][-1].tolist() == [20, 0]


@ALL
def test_known_pairs_are_not_searched(loss, formulas, monkeypatch):
    x, y, *labels = vectors(9, 12, 4, seed=9)
    expected = loss(x, y, *labels, backend="tiled")
    known = equal_label_pairs(*labels)
    monkeypatch.setattr(hardest, "equal_label_pairs", None)
    assert torch.equal(loss(x, y, *labels, pairs=known, backend="tiled"), expected)


def test_triton_searches_the_hardest_negatives(monkeypatch):
    searched = []

    def hardest_negatives(comparison, *, symmetric):
        searched.append(symmetric)
        rows, columns = negative_statistics(comparison, symmetric=symmetric)
        return rows[:2], columns and columns[:2]

    module = SimpleNamespace(hardest_negatives=hardest_negatives)
    monkeypatch.setitem(sys.modules, "vl_plugins.kernels.triton_mining", module)
    monkeypatch.setattr(dispatch, "triton_is_usable", lambda device: True)
    x, y, *labels = vectors(9, 12, 4, seed=10)
    for loss, _ in LOSSES.values():
        for symmetric in (True, False):
            expected, actual = (
                loss_and_gradients(loss, x, y, *labels, symmetric=symmetric, backend=backend)
                for backend in ("tiled", "triton")
            )
            assert all(map(torch.equal, actual, expected))
    assert searched == [True, False] * 2  # not where others have to be summed up


def test_the_choice_of_the_backend_is_logged(caplog):
    with caplog.at_level("INFO", logger="vl_plugins"):
        for name, (loss, _) in LOSSES.items():
            dispatch.log_choice.cache_clear()
            loss(torch.ones(2, 3), torch.ones(4, 3), torch.arange(2), torch.arange(4))
            message = f"{name.split()[0]}_loss: backend dense (2 x 4 similarities on cpu)"
            assert caplog.records[-1].getMessage() == message


@ALL
def test_largest_tensors(loss, formulas, monkeypatch):
    x, y, *labels = vectors(700, 900, 4, seed=11, labels=1000)
    monkeypatch.setattr(tiles, "CPU_TILE", 2**14)
    sides = [side.clone().requires_grad_() for side in (x, y)]
    with LargestTensor() as largest:
        loss(*sides, *labels, backend="dense").backward()
    assert largest.elements == math.prod(tiles.tile_shape((700, 900), x.device))


@ALL
def test_memory_grows_with_the_vectors(loss, formulas, monkeypatch):
    monkeypatch.setattr(tiles, "CPU_TILE", 2**14)

    def megabytes(number):
        x, y, *_ = vectors(number, number, 8, seed=12)
        x, y = (side.float().requires_grad_() for side in (x, y))
        labels = torch.arange(number)
        return extra_bytes(lambda: loss(x, y, labels, labels, backend="tiled").backward()) / 1e6

    small, large = megabytes(700), megabytes(1400)
    assert large < 0.5 * 4 * 1400**2 / 1e6
    assert large < 2 * small


def test_similarities_of_any_pairs_have_a_gradient():
    x, y, *labels = vectors(7, 5, 3, seed=13)
    generator = torch.Generator().manual_seed(13)
    rows, columns = (torch.randint(count, (20,), generator=generator) for count in (7, 5))
    upstream = torch.linspace(-1, 2, 20, dtype=x.dtype)
    for normalize in (True, False):
        x, y = (side.detach().requires_grad_() for side in (x, y))
        sides = [torch.nn.functional.normalize(side) if normalize else side for side in (x, y)]
        expected = (sides[0][rows] * sides[1][columns]).sum(dim=1)
        comparison = compare(x, y, *labels, (rows, columns), normalize=normalize)
        actual = hardest.with_gradient(expected.detach(), x, y, comparison)
        assert torch.equal(actual, expected)
        torch.testing.assert_close(
            torch.autograd.grad(actual, (x, y), upstream), torch.autograd.grad(expected, (x, y), upstream)
        )


@pytest.mark.slow  # test_unified.py compiles the same parts
def test_compiled_callers_have_the_same_values():
    x, y, *labels = vectors(9, 12, 6, seed=14)
    pairs = equal_label_pairs(*labels)

    def caller(x, y):
        return 2 * goal.goal_loss(x + 1, y, *labels, "cir", "sig_ms", pairs=pairs, backend="tiled")

    expected = loss_and_gradients(caller, x, y)
    actual = loss_and_gradients(torch.compile(caller, backend="eager"), x, y)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3)}, r"x must be floating point of shape \(number, D\), got torch.float32 of \(3,\)"),
        ({"x_labels": torch.arange(4)}, r"x_labels must have the shape \(3,\) on cpu, got \(4,\) on cpu"),
        ({"same_set": True}, "same_set needs y to be x, got 3 and 5 vectors"),
        ({"reduction": "average"}, "reduction must be one of 'mean', 'sum', 'none', got 'average'"),
        ({"backend": "fast"}, "unknown backend 'fast'"),
        ({"backend": "triton"}, "backend 'triton' needs Triton and embeddings on a CUDA GPU"),
    ],
)
@ALL
def test_wrong_input(loss, formulas, change, message):
    right = {"x": torch.ones(3, 4), "y": torch.ones(5, 4), "x_labels": torch.arange(3), "y_labels": torch.arange(5)}
    with pytest.raises(ValueError, match=f"^{message}"):
        loss(**right | {"backend": "tiled"} | change)
