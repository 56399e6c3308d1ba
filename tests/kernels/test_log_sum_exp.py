"""The contrastive kernel; test_comparison.py has what it shares with that of hardest negatives."""

from functools import partial

import pytest
import torch

from tests.helpers.embeddings import KERNELS, formula_and_gradients, kernel_and_gradients, random_embeddings
from tests.helpers.pairs import assert_near, loops, rounding, upstream_like, value_and_gradients
from tests.reference import losses as reference
from vl_plugins.functional import unified_loss
from vl_plugins.kernels import comparison, equal_label_pairs, log_sum_exp, unified_losses_from_embeddings

BACKENDS = pytest.mark.parametrize("backend", ["dense", "tiled"])
unified_losses, _ = KERNELS["unified"]


@pytest.fixture(params=["CPU", "accelerator"])
def path(request, monkeypatch):
    """Several blocks of rows; exponentials with a common shift where that is possible, or never."""
    monkeypatch.setattr(comparison, "CPU_BLOCK", 1)
    monkeypatch.setattr(comparison, "LEAST_ROWS", 16)
    if request.param == "accelerator":
        monkeypatch.setattr(log_sum_exp, "_common_shift", lambda exponents: None)


@BACKENDS
@pytest.mark.parametrize("symmetric", [True, False])
def test_equal_to_the_loops(path, backend, symmetric):
    for rows, columns in ((20, 35), (35, 20)):
        *sides, labels, ref_labels = random_embeddings(rows, columns, 4, seed=rows)
        sides = [side.requires_grad_() for side in sides]
        similarities = torch.nn.functional.normalize(sides[0]) @ torch.nn.functional.normalize(sides[1]).T
        equal = labels[:, None] == ref_labels
        values, gradient = loops(
            reference.unified, similarities, (equal, ~equal), symmetric=symmetric, margin=0.3, scale=20.0
        )
        assert len(values) > 15
        expected = values, *torch.autograd.grad(similarities, sides, gradient)
        actual = kernel_and_gradients(
            unified_losses, *sides, labels, ref_labels, margin=0.3, scale=20.0, symmetric=symmetric, backend=backend
        )
        assert_near(actual, expected, 1e-11)


@BACKENDS
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_learned_margin_and_scale(path, backend, symmetric, normalize):
    *sides, labels, ref_labels = random_embeddings(40, 50, 6, seed=1)
    pairs = equal_label_pairs(labels, ref_labels)
    options = {"symmetric": symmetric, "normalize": normalize}
    largest = 1.0 if normalize else (sides[0] @ sides[1].T).abs().max()  # of the similarities
    for margin in (torch.tensor(0.3).double(), torch.linspace(0, 0.5, len(pairs[0])).double()):
        margin = margin.requires_grad_()
        margins = torch.zeros(40, 50).double().index_put(pairs, margin)
        for shape in ((), (1,)):
            scale = torch.full(shape, 15.0, dtype=torch.float64, requires_grad=True)
            run = partial(formula_and_gradients, unified_loss, *sides, labels, ref_labels, leaves=(margin, scale))
            expected = run(margin=margins, scale=scale, **options)
            run = partial(kernel_and_gradients, unified_losses, *sides, labels, ref_labels, leaves=(margin, scale))
            # The gradient by the scale is what is left of terms of this size.
            values = expected[0]
            size = (upstream_like(values) * (2 * largest + 0.5 + values)).sum().item() / 15
            for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, rounding(torch.float32, 15 * largest))):
                actual = run(margin=margin, scale=scale, backend=backend, dtype=dtype, **options)
                assert_near(actual[:-1], expected[:-1], tolerance)
                torch.testing.assert_close(actual[-1], expected[-1], rtol=0, atol=tolerance * size)


@BACKENDS
def test_only_the_scale_or_the_margin_needs_a_gradient(path, backend):
    *sides, labels, ref_labels = random_embeddings(40, 30, 4, seed=3)
    pairs = equal_label_pairs(labels, ref_labels)
    margin = torch.full((len(pairs[0]),), 0.2, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(50.0, dtype=torch.float64, requires_grad=True)
    margins = torch.zeros(40, 30).double().index_put(pairs, margin)
    run = partial(formula_and_gradients, unified_loss, *sides, labels, ref_labels, leaves=(margin, scale))
    _, _, _, margin_grad, scale_grad = run(margin=margins, scale=scale)
    for options, leaf, expected in (({"margin": margin}, margin, margin_grad), ({"scale": scale}, scale, scale_grad)):
        values = unified_losses(*sides, labels, ref_labels, backend=backend, **options)
        torch.testing.assert_close(value_and_gradients(values, [leaf])[1], expected)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
def test_extreme_scales(path, backend, scale, dtype):
    directions = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]).repeat(8, 1)
    arguments = directions, directions, torch.arange(40) // 2, torch.arange(40) // 2
    actual = kernel_and_gradients(unified_losses, *arguments, dtype=dtype, scale=scale, backend=backend)
    expected, *_ = formula_and_gradients(unified_loss, *arguments, scale=scale)
    torch.testing.assert_close(actual[0].double(), expected, rtol=1e-5, atol=1e-6)
    assert all(gradient.isfinite().all() for gradient in actual[1:])


@BACKENDS
def test_a_row_far_below_the_others_has_its_own_exponentials(path, backend):
    """A shift shared by all would be the logarithm of zero there: scale times the spread is beyond float32."""
    embeddings = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(20, 1)
    arguments = embeddings, torch.tensor([[1.0, 0.01]]).repeat(40, 1), torch.arange(40), torch.arange(40)
    for scale in (100.0, 1e4):
        expected = formula_and_gradients(unified_loss, *arguments, scale=scale)
        actual = kernel_and_gradients(unified_losses, *arguments, dtype=torch.float32, scale=scale, backend=backend)
        # Elements of the gradients are differences of numbers that are nearly the same.
        assert_near(actual, expected, rounding(torch.float32, scale))
        assert (actual[0] > 0.2).all()


@BACKENDS
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_dot_products_far_from_zero(path, backend, scale):
    """Exponents around 500, where each block has a shift of its own, and around 30,000, too far apart for that."""
    *sides, labels, ref_labels = random_embeddings(40, 50, 6, seed=2)
    arguments = sides[0] / 5 + 9, sides[1] / 5 + 9, labels, ref_labels
    expected = formula_and_gradients(unified_loss, *arguments, scale=scale, normalize=False)
    largest = scale * (arguments[0] @ arguments[1].T).max()
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, rounding(torch.float32, largest))):
        actual = kernel_and_gradients(
            unified_losses, *arguments, dtype=dtype, scale=scale, normalize=False, backend=backend
        )
        assert_near(actual, expected, tolerance)


@BACKENDS
@pytest.mark.parametrize("normalize", [True, False])
def test_derivatives_of_all_inputs_by_differences(backend, normalize):
    *sides, labels, ref_labels = random_embeddings(5, 6, 3, seed=5, labels=3)
    labels[0] = ref_labels[0] = 7  # the first row has one positive
    pairs = equal_label_pairs(labels, ref_labels)
    scale = torch.tensor(5.0, dtype=torch.float64)
    leaves = [leaf.requires_grad_() for leaf in (*sides, torch.full((len(pairs[0]),), 0.1).double(), scale)]
    options = {"normalize": normalize, "backend": backend}
    for symmetric in (True, False):

        def losses(embeddings, ref_emb, margin, scale, symmetric=symmetric):
            return unified_losses_from_embeddings(
                embeddings, ref_emb, labels, ref_labels, pairs, margin, scale, symmetric=symmetric, **options
            )

        assert torch.autograd.gradcheck(losses, leaves, nondet_tol=1e-10)
        assert torch.autograd.gradgradcheck(losses, leaves)

    def losses_of_one_set(embeddings):
        return unified_losses(embeddings, embeddings, labels, labels, scale=5.0, same_set=True, **options)

    assert torch.autograd.gradcheck(losses_of_one_set, leaves[0], nondet_tol=1e-10)
    assert torch.autograd.gradgradcheck(losses_of_one_set, leaves[0])


@BACKENDS
def test_second_derivatives_without_negatives_are_zero(backend):
    labels = torch.zeros(3, dtype=torch.long)
    embeddings = random_embeddings(3, 4, 5)[0].requires_grad_()
    values = unified_losses(embeddings, torch.ones(3, 5).double(), labels, labels, backend=backend)
    (gradient,) = torch.autograd.grad(values, embeddings, upstream_like(values), create_graph=True)
    assert torch.autograd.grad(gradient.sum(), embeddings)[0].count_nonzero() == 0


@BACKENDS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_is_nan_for_all_pairs(path, backend, bad):
    for side in range(2):
        *sides, labels, ref_labels = random_embeddings(40, 40, 4, seed=8)
        sides[side][33, 1] = bad
        for normalize in (True, False):
            values, *gradients = kernel_and_gradients(
                unified_losses, *sides, labels, ref_labels, normalize=normalize, backend=backend
            )
            assert values.isnan().all()
            assert gradients[side].isnan().any()
