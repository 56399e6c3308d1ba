"""What all kernels have in common, and how their backend is chosen."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.reducers import AvgNonZeroReducer, MeanReducer

from tests.helpers.embeddings import KERNELS, formula_and_gradients, is_clear, kernel_and_gradients, random_embeddings
from tests.helpers.memory import extra_bytes
from tests.helpers.pairs import assert_near, rounding, upstream_like, value_and_gradients
from tests.helpers.seeds import first_that, seeded
from vl_plugins import kernels
from vl_plugins.kernels import comparison, equal_label_pairs
from vl_plugins.losses import GOALLoss, TripletHNLoss, UnifiedLoss, VLCLoss

BACKENDS = pytest.mark.parametrize("backend", ["dense", "tiled"])
ALL = pytest.mark.parametrize(("kernel", "formula"), KERNELS.values(), ids=KERNELS)


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "CPU_BLOCK", 1)
        patch.setattr(comparison, "LEAST_ROWS", 16)
        yield


@BACKENDS
@ALL
@settings(max_examples=40, derandomize=True)
@given(
    rows=st.sampled_from([0, 1, 2, 17, 40]),
    columns=st.sampled_from([0, 1, 3, 33, 50]),
    labels=st.sampled_from([1, 3, 1000]),
    seed=st.integers(0, 100),
    normalize=st.booleans(),
    symmetric=st.booleans(),
    same_set=st.booleans(),
)
def test_equal_to_the_formulas(kernel, formula, backend, rows, columns, labels, seed, normalize, symmetric, same_set):
    sides_and_labels = random_embeddings(rows, columns, 7, seed, labels=labels)
    if same_set:
        sides_and_labels = sides_and_labels[0], sides_and_labels[0], *[sides_and_labels[2]] * 2
    if not normalize:
        sides_and_labels = *(side / 2 for side in sides_and_labels[:2]), *sides_and_labels[2:]
    options = {"normalize": normalize, "symmetric": symmetric, "same_set": same_set}
    expected = formula_and_gradients(formula, *sides_and_labels, **options)
    actual = kernel_and_gradients(kernel, *sides_and_labels, backend=backend, **options)
    assert_near(actual, expected, 1e-9)


@BACKENDS
@ALL
def test_single_and_half_precision(kernel, formula, backend):
    # By exponents up to the scale, 50; in half precision gradients are rounded.
    tolerances = {torch.float32: rounding(torch.float32, 50), torch.float16: 3e-3, torch.bfloat16: 1e-2}
    for dtype, tolerance in tolerances.items():
        draws = (random_embeddings(50, 70, 8, seed=seed, labels=30) for seed in itertools.count(4))
        draws = ([*(side.to(dtype) for side in drawn[:2]), *drawn[2:]] for drawn in draws)
        sides_and_labels = first_that(lambda drawn: is_clear(*drawn), draws)
        expected = formula_and_gradients(formula, *sides_and_labels)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = kernel_and_gradients(kernel, *sides_and_labels, dtype=dtype, backend=backend)
        assert actual[0].dtype == torch.float32
        assert actual[1].dtype == actual[2].dtype == dtype
        torch.testing.assert_close(actual[0].double(), expected[0], rtol=1e-5, atol=rounding(torch.float32, 4))
        assert_near(actual[1:], expected[1:], tolerance)


@BACKENDS
@ALL
def test_opposite_equal_and_zero_vectors(kernel, formula, backend):
    directions = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]).repeat(8, 1)
    labels = torch.arange(40) // 2
    for dtype in (torch.float32, torch.float16):
        values = kernel_and_gradients(kernel, directions, directions, labels, labels, dtype=dtype, backend=backend)
        assert all(value.isfinite().all() for value in values)
        assert values[1].view(8, 5, 2)[:, 3].count_nonzero() == 0
        assert values[1].any()


@BACKENDS
@ALL
def test_anchors_without_negatives_or_positives_beside_others(kernel, formula, backend):
    sides = random_embeddings(5, 40, 4, seed=2)[:2]
    # All columns have the label of the first two rows: these rows have no negatives, the others no positives.
    labels = torch.tensor([0, 0, 1, 2, 2]), torch.zeros(40, dtype=torch.long)
    for symmetric in (True, False):
        expected = formula_and_gradients(formula, *sides, *labels, symmetric=symmetric)
        assert len(expected[0]) == 80
        assert expected[0].any() == symmetric
        actual = kernel_and_gradients(kernel, *sides, *labels, symmetric=symmetric, backend=backend)
        assert_near(actual, expected, 1e-10)


@BACKENDS
@ALL
def test_layout_and_sides_without_gradient(kernel, formula, backend):
    *sides, labels, ref_labels = random_embeddings(20, 15, 6, seed=5)
    strided = torch.stack([sides[0], sides[0]], dim=2)[:, :, 0], sides[1].T.contiguous().T
    assert not any(side.is_contiguous() for side in strided)
    values, *expected = kernel_and_gradients(kernel, *sides, labels, ref_labels, backend=backend)
    for number in range(2):
        leaves = [side.detach().requires_grad_(k == number) for k, side in enumerate(strided)]
        actual = kernel(*leaves, labels, ref_labels, backend=backend)
        assert torch.equal(actual, values)
        (gradient,) = torch.autograd.grad(actual, leaves[number], upstream_like(actual))
        torch.testing.assert_close(gradient, expected[number])
    assert not kernel(*sides, labels, ref_labels, backend=backend).requires_grad


@BACKENDS
@ALL
def test_the_graph_can_be_used_again_but_not_with_other_vectors(kernel, formula, backend):
    embeddings, *others = random_embeddings(40, 30, 4, seed=7)
    embeddings.requires_grad_()
    value = kernel(embeddings, *others, backend=backend).sum()
    first = torch.autograd.grad(value, embeddings, retain_graph=True)
    second = torch.autograd.grad(3 * value, embeddings, retain_graph=True)
    torch.testing.assert_close(second[0], 3 * first[0])
    with torch.no_grad():
        embeddings += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@BACKENDS
@ALL
@pytest.mark.parametrize("case", ["cosines", "dot products", "same set"])
def test_second_derivatives(kernel, formula, backend, case):
    *sides, labels, ref_labels = random_embeddings(20, 15, 4, seed=16)
    options = {"normalize": case != "dot products", "same_set": case == "same set"}
    if case == "same set":
        sides, ref_labels = [sides[0], sides[0]], labels

    products = []
    for function in (partial(kernel_and_gradients, kernel, backend=backend), partial(formula_and_gradients, formula)):
        leaves = [side.clone().requires_grad_() for side in sides]
        _, *gradients = function(*leaves, labels, ref_labels, create_graph=True, **options)
        length = sum(gradient.square().sum() for gradient in gradients)
        products.append((*gradients, *torch.autograd.grad(length, leaves)))
    assert all(tensor.abs().max() > 0.1 for tensor in products[1])
    assert_near(*products, 1e-10)


LOSSES = (UnifiedLoss, VLCLoss, TripletHNLoss, GOALLoss)


@pytest.mark.parametrize("loss_class", LOSSES)
@pytest.mark.parametrize("reducer", [MeanReducer, AvgNonZeroReducer])
@BACKENDS
def test_not_a_number_is_never_hidden(loss_class, reducer, backend):
    loss = loss_class(reducer=reducer(), backend=backend)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for side in range(2):
            # nothing to compare, and pairs of other vectors only
            for labels in (torch.zeros(4).long(), torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 7, 1])):
                sides = [torch.eye(4), torch.eye(4)]
                sides[side][2, 1] = bad
                sides = [tensor.requires_grad_() for tensor in sides]
                value = loss(sides[0], labels, ref_emb=sides[1], ref_labels=labels % 7)
                assert value.isnan()
                assert torch.autograd.grad(value, sides)[side].isnan().any()


def megabytes(kernel, backend, number):
    labels = torch.arange(number)
    sides = [torch.randn(number, 32, requires_grad=True) for _ in range(2)]
    return extra_bytes(lambda: kernel(*sides, labels, labels, backend=backend).sum().backward()) / 1e6


@ALL
def test_memory_of_tiled_grows_with_the_vectors(kernel, formula, monkeypatch):
    monkeypatch.setattr(comparison, "CPU_BLOCK", 2**16)
    small, large = (megabytes(kernel, "tiled", number) for number in (1024, 2048))
    assert large < 0.3 * 4 * 2048**2 / 1e6
    assert large < 2.2 * small


def test_memory_of_dense_is_about_one_matrix():
    matrix = 4 * 2048**2 / 1e6
    assert matrix < megabytes(KERNELS["unified"][0], "dense", 2048) < 1.3 * matrix


def test_pairs_of_equal_labels():
    generator = seeded(0)
    for rows, columns in ((40, 36), (5, 50), (0, 3), (3, 0)):
        for dtype, ref_dtype in ((torch.int64, torch.uint8), (torch.bool, torch.bool), (torch.float32, torch.int64)):
            labels = torch.randint(4, (rows,), generator=generator).to(dtype)
            ref_labels = torch.randint(4, (columns,), generator=generator).to(ref_dtype)
            found = equal_label_pairs(labels, ref_labels)
            assert all(map(torch.equal, found, torch.where(labels[:, None] == ref_labels)))
            expected = torch.where((labels[:, None] == labels) & ~torch.eye(rows, dtype=torch.bool))
            assert all(map(torch.equal, equal_label_pairs(labels, labels, same_set=True), expected))
    assert equal_label_pairs(torch.tensor([300]), torch.tensor([44], dtype=torch.uint8))[0].numel() == 0


def test_the_backend_is_chosen_by_size_and_logged_once(monkeypatch, caplog):
    embeddings, ref_emb = torch.ones(10, 4), torch.ones(20, 4)
    comparison.log_choice.cache_clear()
    monkeypatch.setattr(comparison, "DENSE_BYTES", 4 * 10 * 20)
    with caplog.at_level("INFO", logger="vl_plugins"):
        for _ in range(2):
            assert comparison.choose_backend(None, embeddings, ref_emb, name="one") == "dense"
        assert comparison.choose_backend(None, embeddings.half(), ref_emb.half(), name="one") == "dense"
        assert comparison.choose_backend(None, embeddings.double(), ref_emb.double(), name="one") == "tiled"
        assert comparison.choose_backend("tiled", embeddings, ref_emb, name="two") == "tiled"
    assert [record.getMessage() for record in caplog.records] == [
        "one: backend dense on cpu",
        "one: backend tiled on cpu",
        "two: backend tiled on cpu",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.ones(3)}, r"embeddings must be floating point of shape \(B, D\), got torch.float32 of \(3,\)"),
        ({1: torch.ones(5, 4).long()}, r"ref_emb must be floating point of shape \(B, D\), got torch.int64 of"),
        ({1: torch.ones(5, 3)}, "ref_emb must have the dimension of embeddings, 4, got 3"),
        ({1: torch.ones(5, 4, device="meta")}, "ref_emb must have the device of embeddings, cpu, got meta"),
        ({2: torch.arange(4)}, r"labels must have the shape \(3,\) on cpu, got \(4,\) on cpu"),
        ({3: torch.arange(5, device="meta")}, r"ref_labels must have the shape \(5,\) on cpu, got .* on meta"),
        ({"backend": "fast"}, "unknown backend 'fast'"),
    ],
)
@pytest.mark.parametrize("kernel", [kernels.unified_losses_from_embeddings, kernels.mine_hardest_negatives])
def test_wrong_input(kernel, change, message):
    arguments = {0: torch.ones(3, 4), 1: torch.ones(5, 4), 2: torch.arange(3), 3: torch.arange(5)} | change
    backend = arguments.pop("backend", "tiled")
    pairs = torch.arange(3), torch.arange(3)
    with pytest.raises(ValueError, match=f"^{message}"):
        kernel(*arguments.values(), pairs, backend=backend)


def test_compiled_callers_have_the_same_values():
    *sides, labels, ref_labels = random_embeddings(9, 12, 6, seed=11, labels=3)
    sides = [side.requires_grad_() for side in sides]

    def caller(embeddings, ref_emb):
        return sum(kernel(embeddings + 1, ref_emb, labels, ref_labels) for kernel, _ in KERNELS.values())

    actual, expected = (
        value_and_gradients(function(*sides), sides)
        for function in (torch.compile(caller, backend="aot_eager"), caller)
    )
    torch.testing.assert_close(actual, expected)
