import pytest
import torch

from tests.kernels.triton_cases import TOLERANCE, assert_gradients_near, assert_near, check_contrast, vectors
from vl_plugins.kernels import triton_log_sum_exp, unified_loss
from vl_plugins.kernels.log_sum_exp import contrast
from vl_plugins.kernels.pairs import equal_label_pairs
from vl_plugins.kernels.vectors import compare

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def sides(rows, columns, width, dtype):
    return [vectors(count, width, dtype=dtype, device="cpu", seed=count) for count in (rows, columns)]


def some_labels(rows, columns):
    return torch.arange(rows) % 7, torch.arange(columns) % 5


@pytest.mark.parametrize(
    ("dtype", "normalize", "symmetric"),
    [
        (torch.float32, True, True),
        (torch.float16, False, True),
        (torch.float16, True, False),
    ],
    ids=str,
)
def test_several_tiles_and_parts(small_tiles, dtype, normalize, symmetric):
    x, y = sides(18, 17, 20, dtype)
    scale = 20.0 if normalize else 0.5
    options = {"normalize": normalize, "symmetric": symmetric, "needed": ("x", "y", "scale")}
    check_contrast(x, y, *some_labels(18, 17), scale, **options)


@pytest.mark.parametrize("shape", [(1, 3, 5), (3, 1, 2), (17, 33, 16), (0, 3, 4), (3, 0, 4), (2, 3, 0)], ids=str)
def test_one_tile_and_less(shape):
    check_contrast(*sides(*shape, torch.float32), *some_labels(*shape[:2]))


@pytest.mark.parametrize("labels", ["one", "disjoint", "other types"])
def test_labels(small_tiles, labels):
    x, y = sides(5, 18, 7, torch.float32)
    of_x, of_y = {
        "one": (torch.zeros(5, dtype=torch.long), torch.zeros(18, dtype=torch.long)),
        "disjoint": (torch.arange(5), torch.arange(18) + 2**40),
        "other types": (torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool), (torch.arange(18) % 3).to(torch.int32)),
    }[labels]
    check_contrast(x, y, of_x, of_y, 2.0)


@pytest.mark.parametrize("needed", ["x", "y", ("scale",)], ids=str)
def test_gradients_of_some(small_tiles, needed):
    check_contrast(*sides(18, 5, 6, torch.float16), *some_labels(18, 5), needed=needed)


def test_rows_that_are_not_contiguous():
    x, y = (side[:, ::3] for side in sides(5, 6, 12, torch.float32))
    check_contrast(x, y, *some_labels(5, 6))


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_extreme_scales_and_cosines(scale, dtype):
    x, y = sides(18, 20, 6, dtype)
    # the same, the opposite, no direction
    x[1], x[2], x[3], x[4] = x[0], -x[0], 0, y[7]
    y[1], y[17] = x[0], x[0]
    # Of two logits of 10,000 in float32 the difference is known to three digits.
    check_contrast(x, y, *some_labels(18, 20), scale, tolerance=max(TOLERANCE[dtype], 1e-6 * scale))


def test_float16_gradients_of_any_size():
    x, y = sides(6, 9, 8, torch.float16)
    labels = some_labels(6, 9)
    comparison = compare(x * 0.01, y * 0.01, *labels, equal_label_pairs(*labels), normalize=True)
    scale = torch.tensor(20.0, dtype=torch.float64)  # as it is on a GPU
    kept = triton_log_sum_exp.log_sum_exps(comparison, scale, symmetric=True, keep=False)
    results = []
    for size in (1, 2.0**30, 2.0**-30):
        gradients = [torch.full_like(side, torch.nan, dtype=torch.float32) for side in (x, y)]
        upstream = [torch.full_like(values, size) for values in (kept.rows, kept.columns, kept.positives)]
        triton_log_sum_exp.log_sum_exp_gradients(comparison, scale, kept, *upstream, *gradients)
        results.append([gradient / size for gradient in gradients])
    assert results[0][0].isfinite().all()
    for other in results[1:]:
        assert_gradients_near(other, results[0], 1e-6)
    upstream = [torch.zeros_like(values) for values in (kept.rows, kept.columns, kept.positives)]
    triton_log_sum_exp.log_sum_exp_gradients(comparison, scale, kept, *upstream, *gradients)
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_not_finite_is_nan(bad):
    x, y = sides(5, 6, 4, torch.float32)
    x[2, 1] = bad
    labels = torch.arange(5), torch.arange(6)
    of_all = contrast(x, y, *labels, equal_label_pairs(*labels), 9.0, symmetric=True, normalize=True, backend="triton")
    assert of_all.rows.isnan().tolist() == [False, False, True, False, False]
    assert of_all.columns.isnan().tolist() == [True, True, False, True, True, True]


def test_float64_is_left_to_the_tiles():
    x, y = (side.double() for side in sides(5, 6, 4, torch.float32))
    check_contrast(x, y, *some_labels(5, 6), tolerance=1e-12)


def test_backward_twice():
    x, y = (side.requires_grad_() for side in sides(5, 6, 4, torch.float32))
    loss = unified_loss(x, y, *some_labels(5, 6), backend="triton")
    first = torch.autograd.grad(loss, (x, y), retain_graph=True)
    assert first[0].norm() > 0.01
    assert all(map(torch.equal, first, torch.autograd.grad(loss, (x, y))))


@DTYPES
@pytest.mark.parametrize("options", [{"symmetric": False}, {"same_set": True, "reduction": "sum"}], ids=str)
def test_unified_loss(options, dtype):
    x, y = sides(9, 9, 5, dtype)
    labels = torch.arange(9) % 4
    results = []
    for backend, to in (("triton", dtype), ("functional", torch.float64)):
        leaves = [side.to(to, copy=True).requires_grad_() for side in (x, y)]
        both = (leaves[0], leaves[0]) if "same_set" in options else leaves
        loss = unified_loss(*both, labels, labels, backend=backend, **options)
        results.append((loss, torch.autograd.grad(2.5 * loss, both[: 1 if "same_set" in options else 2])))
    (loss, gradients), (expected_loss, expected_gradients) = results
    assert_near(loss, expected_loss, relative=1e-5, absolute=0)
    assert_gradients_near(gradients, expected_gradients, TOLERANCE[dtype])
