import importlib
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory import extra_bytes
from vl_plugins.kernels import tiled, tiles
from vl_plugins.kernels.mining import negative_statistics
from vl_plugins.kernels.pairs import equal_label_pairs
from vl_plugins.kernels.vectors import compare

KINDS = (None, "lin_ms", "sig_ms")


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "CPU_TILE", 1)  # of 16 x 16


@pytest.fixture(params=[True, False], ids=["pairs by index", "pairs by mask"])
def ways(request, small_tiles, monkeypatch):
    """Several tiles, with the positive pairs of each known, and as on an accelerator."""
    monkeypatch.setattr(tiled, "_pairs_are_known", lambda comparison: request.param)


def comparison_of(x, y, x_labels, y_labels, *, normalize=False):
    return compare(x, y, x_labels, y_labels, equal_label_pairs(x_labels, y_labels), normalize=normalize)


def whole_numbers(rows, columns, width, classes, dtype, seed):
    """Vectors of few whole numbers, whose dot products are exact and often equal, and labels."""
    generator = torch.Generator().manual_seed(seed)
    vectors = (torch.randint(-3, 4, (count, width), generator=generator).to(dtype) for count in (rows, columns))
    return *vectors, *(torch.randint(classes, (count,), generator=generator) for count in (rows, columns))


def by_loops(similarities, is_negative, kind, floor, beta):
    """Return hardest, index, chosen and total of one anchor, from lists."""
    negatives = [index for index, negative in enumerate(is_negative) if negative]
    if not negatives:
        return -math.inf, 0, 0, 0.0
    index = max(negatives, key=lambda n: similarities[n])  # the first of equals
    hardest = similarities[index]
    chosen = [n for n in negatives if similarities[n] > floor]
    if kind == "lin_ms":
        total = math.fsum(similarities[n] for n in chosen)
    else:
        total = math.fsum(math.exp(beta * (similarities[n] - hardest)) for n in chosen if n != index)
    return hardest, index, len(chosen), total


def assert_equal_to_loops(actual, similarities, negative_mask, kind, floor, beta):
    expected = [
        by_loops(values, mask, kind, floor, beta)
        for values, mask in zip(similarities.tolist(), negative_mask.tolist(), strict=True)
    ]
    hardest, index, chosen, total = (list(values) for values in zip(*expected, strict=True)) if expected else [[]] * 4
    assert actual.hardest.dtype == similarities.dtype
    assert actual.hardest.tolist() == hardest
    assert actual.index.tolist() == index
    if kind is None:
        assert actual.chosen is None
        assert actual.total is None
        return
    assert actual.chosen.tolist() == chosen
    assert actual.total.dtype == similarities.dtype
    tolerance = {"rtol": 1e-12 if similarities.dtype == torch.float64 else 2e-6, "atol": 1e-30}
    torch.testing.assert_close(actual.total, similarities.new_tensor(total), **tolerance)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(1, 5),
    st.sampled_from([1, 2, 7]),
    st.sampled_from(KINDS),
    st.booleans(),
    st.integers(-20, 20),
    st.sampled_from([0.0, 0.25, 3.0]),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_equal_to_the_loops(rows, columns, width, classes, kind, symmetric, floor, beta, dtype, pairs_are_known, seed):
    x, y, x_labels, y_labels = whole_numbers(rows, columns, width, classes, dtype, seed)
    options = {} if kind is None else {"kind": kind, "floor": torch.tensor(floor, dtype=dtype), "beta": beta}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CPU_TILE", 1)
        patch.setattr(tiled, "_pairs_are_known", lambda comparison: pairs_are_known)
        of_rows, of_columns = negative_statistics(
            comparison_of(x, y, x_labels, y_labels), symmetric=symmetric, **options
        )
    similarities, negative_mask = x @ y.T, x_labels[:, None] != y_labels
    assert_equal_to_loops(of_rows, similarities, negative_mask, kind, floor, beta)
    if symmetric:
        assert_equal_to_loops(of_columns, similarities.T, negative_mask.T, kind, floor, beta)
    else:
        assert of_columns is None


def test_there_are_ties_between_and_within_tiles(ways):
    x, y = torch.ones(20, 3), torch.ones(50, 3)
    y[:3] = 0  # the first of equals is in the first tile, not at its start
    y[7] = 0
    y_labels = torch.ones(50, dtype=torch.long)
    y_labels[3] = 0
    of_rows, of_columns = negative_statistics(comparison_of(x, y, torch.zeros(20).long(), y_labels), symmetric=True)
    assert of_rows.index.tolist() == [4] * 20
    assert of_columns.index.tolist() == [0] * 50
    assert of_columns.hardest.tolist() == [0, 0, 0, -math.inf] + [3 if k != 7 else 0 for k in range(4, 50)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("beta", [10.0, 60.0, 1e4])
def test_what_is_far_below_the_hardest_is_not_lost_beside_it(ways, dtype, beta):
    # The hardest is alone at the top: its own term, 1, would swallow all others.
    similarities = torch.linspace(-0.25, 0.25, 64, dtype=torch.float64).flip(0)
    similarities[[5, 40]] = torch.tensor([0.5, 0.75], dtype=torch.float64)
    y = torch.stack([similarities, torch.zeros(64)], dim=1).to(dtype)
    comparison = comparison_of(torch.tensor([[1.0, 0.0]], dtype=dtype), y, torch.zeros(1).long(), torch.ones(64).long())
    of_rows, _ = negative_statistics(
        comparison, symmetric=True, kind="sig_ms", floor=torch.tensor(0.0, dtype=dtype), beta=beta
    )
    assert of_rows.index.item() == 40
    assert of_rows.chosen.item() == 33
    terms = [math.exp(beta * (s - 0.75)) for k, s in enumerate(y[:, 0].tolist()) if s > 0 and k != 40]
    assert of_rows.total.item() == pytest.approx(math.fsum(terms), rel=1e-12 if dtype == torch.float64 else 1e-6)
    if beta < 1e4:
        assert of_rows.total > 0


def test_the_easier_of_two_tiles_counts_with_its_hardest_only_if_that_is_chosen(ways):
    # Similarities 0.5 in the first tile, 0.2 and 0.1 in the second; of the floors one is between the two.
    y = torch.full((20, 1), 0.5)
    y[16:18], y[18:] = 0.2, 0.1
    comparison = comparison_of(torch.ones(1, 1), y, torch.zeros(1).long(), torch.ones(20).long())
    for floor, chosen, total in (
        (0.3, 16, 15),
        (0.15, 18, 15 + 2 * math.exp(-3)),
        (0.0, 20, 15 + 2 * math.exp(-3) + 2 * math.exp(-4)),
        (0.6, 0, 0),
    ):
        of_rows, _ = negative_statistics(
            comparison, symmetric=False, kind="sig_ms", floor=torch.tensor(floor), beta=10.0
        )
        assert of_rows.chosen.item() == chosen
        assert of_rows.total.item() == pytest.approx(total, rel=1e-6)


def test_cosines_of_vectors_of_no_direction_are_zero(ways):
    x, y = torch.zeros(3, 2), torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    of_rows, of_columns = negative_statistics(
        comparison_of(x, y, torch.zeros(3).long(), torch.ones(2).long(), normalize=True), symmetric=True
    )
    assert of_rows.hardest.tolist() == [0, 0, 0]
    assert of_columns.hardest.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_compared_in_single(ways, dtype):
    torch.manual_seed(0)
    x, y = torch.randn(20, 8).to(dtype), torch.randn(33, 8).to(dtype)
    labels = torch.arange(20), torch.arange(33)
    half = negative_statistics(comparison_of(x, y, *labels, normalize=True), symmetric=True)
    single = negative_statistics(comparison_of(x.float(), y.float(), *labels, normalize=True), symmetric=True)
    for actual, expected in zip(half, single, strict=True):
        assert torch.equal(actual.index, expected.index)
        torch.testing.assert_close(actual.hardest, expected.hardest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_indices_are_those_of_candidates_whatever_the_vectors(ways, kind, bad):
    for x_or_y in (0, 1):
        vectors = torch.randn(20, 3), torch.randn(18, 3)
        vectors[x_or_y][-1] = bad
        labels = torch.zeros(20).long(), torch.ones(18).long()
        of_rows, of_columns = negative_statistics(
            comparison_of(*vectors, *labels), symmetric=True, kind=kind, floor=torch.tensor(0.0), beta=10.0
        )
        assert 0 <= of_rows.index.min() <= of_rows.index.max() < 18
        assert 0 <= of_columns.index.min() <= of_columns.index.max() < 20


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_that_of_a_few_tiles(kind):
    labels = torch.arange(1500)
    comparison = comparison_of(torch.randn(1500, 4), torch.randn(1500, 4), labels, labels)
    options = {"symmetric": True, "kind": kind, "floor": torch.tensor(0.0), "beta": 1.0}
    extra = extra_bytes(lambda: negative_statistics(comparison, **options))
    assert extra < 3.5 * 4 * tiles.CPU_TILE
    assert extra < 1500 * 1500 * 4


def test_triton_searches_where_there_is_nothing_to_sum_up(monkeypatch):
    name = "vl_plugins.kernels.triton_mining"
    calls = []

    def hardest_negatives(comparison, *, symmetric):
        calls.append(symmetric)
        values = torch.full((2,), 0.5), torch.ones(2, dtype=torch.long)
        return values, values if symmetric else None

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(hardest_negatives=hardest_negatives))
    assert importlib.import_module(name).hardest_negatives is hardest_negatives
    comparison = comparison_of(torch.eye(2), torch.eye(2), torch.arange(2), torch.arange(2))
    for symmetric in (True, False):
        of_rows, of_columns = negative_statistics(comparison, symmetric=symmetric, backend="triton")
        assert of_rows.hardest.tolist() == [0.5, 0.5]
        assert of_rows.index.tolist() == [1, 1]
        assert of_rows.chosen is None
        assert (of_columns is not None) == symmetric
    assert calls == [True, False]
    options = {"kind": "lin_ms", "floor": torch.tensor(-1.0), "beta": 1.0}
    of_rows, _ = negative_statistics(comparison, symmetric=True, backend="triton", **options)
    assert of_rows.hardest.tolist() == [0, 0]
    assert calls == [True, False]
