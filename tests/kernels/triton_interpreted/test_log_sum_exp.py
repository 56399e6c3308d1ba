import pytest
import torch

from tests.kernels.triton_cases import TOLERANCE, assert_gradients_near, check_unified, vectors
from vl_plugins.kernels import equal_label_pairs, unified_losses_from_embeddings


def sides(rows, columns, width, dtype=torch.float32):
    return [vectors(count, width, dtype=dtype, device="cpu", seed=count) for count in (rows, columns)]


def some_labels(rows, columns):
    return torch.arange(rows) % 7, torch.arange(columns) % 5


@pytest.mark.parametrize(
    ("dtype", "normalize", "symmetric"),
    [(torch.float32, True, True), (torch.float16, False, True), (torch.float16, True, False)],
    ids=str,
)
def test_several_tiles_and_parts(small_tiles, dtype, normalize, symmetric):
    scale = 20.0 if normalize else 0.5
    options = {"normalize": normalize, "symmetric": symmetric}
    check_unified(*sides(18, 17, 20, dtype), *some_labels(18, 17), scale, **options)


def test_one_set(small_tiles):
    (x, _), labels = sides(33, 1, 5), torch.arange(33) % 4
    check_unified(x, x, labels, labels, same_set=True, symmetric=False)


@pytest.mark.parametrize("shape", [(1, 3, 5), (3, 1, 2), (17, 33, 16), (0, 3, 4), (3, 0, 4), (2, 3, 0)], ids=str)
def test_one_tile_and_less(shape):
    check_unified(*sides(*shape), *some_labels(*shape[:2]))


@pytest.mark.parametrize("labels", ["one", "disjoint", "other types"])
def test_labels(small_tiles, labels):
    side_labels = {
        "one": (torch.zeros(5, dtype=torch.long), torch.zeros(18, dtype=torch.long)),
        "disjoint": (torch.arange(5), torch.arange(18) + 2**40),
        "other types": (torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool), (torch.arange(18) % 3).to(torch.int32)),
    }[labels]
    check_unified(*sides(5, 18, 7), *side_labels, 2.0)


def test_rows_that_are_not_contiguous():
    check_unified(*(side[:, ::3] for side in sides(5, 6, 12)), *some_labels(5, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_extreme_scales_and_cosines(scale, dtype):
    x, y = sides(18, 20, 6, dtype)
    # the same, the opposite, zero
    x[1], x[2], x[3], x[4] = x[0], -x[0], 0, y[7]
    y[1], y[17] = x[0], x[0]
    # Of two logits of 10,000 in float32 the difference is known to three digits.
    check_unified(x, y, *some_labels(18, 20), scale, tolerance=max(TOLERANCE[dtype], 1e-6 * scale))


def losses_of(x, y, *labels):
    return unified_losses_from_embeddings(x, y, *labels, equal_label_pairs(*labels), backend="triton")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_not_finite_is_nan_for_all_pairs(bad):
    x, y = sides(5, 6, 4)
    x[2, 1] = bad
    leaves = [side.requires_grad_() for side in (x, y)]
    values = losses_of(*leaves, torch.arange(5), torch.arange(6))
    assert values.isnan().all()
    assert all(gradient.isnan().any() for gradient in torch.autograd.grad(values.sum(), leaves))


def test_backward_twice_and_second_derivatives():
    leaves = [side.requires_grad_() for side in sides(5, 6, 4)]
    loss = losses_of(*leaves, *some_labels(5, 6)).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert first[0].norm() > 0.01
    assert all(map(torch.equal, first, torch.autograd.grad(loss, leaves, retain_graph=True)))
    assert_gradients_near(torch.autograd.grad(loss, leaves, create_graph=True), first, 1e-5)
