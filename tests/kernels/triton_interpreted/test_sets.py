import pytest
import torch

from tests.kernels.triton_cases import TOLERANCE, assert_gradients_near, check_sets, vectors
from vl_plugins.kernels import triton_sets
from vl_plugins.kernels.smooth_chamfer import MAX_ELEMENTS
from vl_plugins.kernels.triton_sets import smooth_chamfer_similarity

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def sides(x_shape, y_shape, dtype=torch.float32):
    return [vectors(*shape, dtype=dtype, device="cpu", seed=len(shape)) for shape in (x_shape, (*y_shape, x_shape[2]))]


def masks(*sides):
    """Some elements that are absent, of every fifth set all."""
    for seed, side in enumerate(sides):
        mask = torch.rand(side.shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.6
        mask[::5] = False
        yield mask


@pytest.mark.parametrize(
    ("dtype", "normalize", "masked"),
    [(torch.float32, True, True), (torch.float16, True, False), (torch.float16, False, True)],
    ids=str,
)
def test_several_tiles_and_parts(small_tiles, dtype, normalize, masked):
    x, y = sides((7, 3, 20), (3, 5), dtype)
    if not normalize:
        x, y = x / 4, y / 4
    x_mask, y_mask = masks(x, y) if masked else (None, None)
    check_sets(x, y, x_mask=x_mask, y_mask=y_mask, normalize=normalize)


@pytest.mark.parametrize(
    ("x_shape", "y_shape"),
    [((1, 1, 5), (3, 1)), ((17, 4, 16), (2, 2)), ((5, MAX_ELEMENTS, 33), (3, MAX_ELEMENTS)), ((2, 9, 2), (33, 1))],
    ids=str,
)
def test_tiles_as_on_a_device(x_shape, y_shape):
    check_sets(*sides(x_shape, y_shape))


@pytest.mark.parametrize(
    ("x_shape", "y_shape"), [((0, 2, 4), (3, 2)), ((3, 2, 4), (0, 2)), ((3, 0, 4), (2, 1))], ids=str
)
def test_nothing(x_shape, y_shape):
    check_sets(*sides(x_shape, y_shape))


@DTYPES
@pytest.mark.parametrize("alpha", [1e-2, 1e4])
def test_extreme_alpha_and_cosines(alpha, dtype):
    x, y = sides((5, 3, 6), (4, 2), dtype)
    x[1], x[2, 0], x[3, 1] = x[0], -x[0, 0], 0
    y[1, 0], y[2] = x[0, 0], x[0, 0]
    check_sets(x, y, alpha, tolerance=max(TOLERANCE[dtype], 1e-6 * alpha))


@pytest.mark.parametrize("needed", ["x", "y"])
def test_gradients_of_one_side(small_tiles, needed):
    check_sets(*sides((9, 2, 4), (3, 3), torch.float16), needed=needed)


def test_float16_gradients_of_any_size():
    x, y = sides((3, 2, 8), (4, 3), torch.float16)
    x_sets, y_sets = (triton_sets._sets(sets, None, normalize=True) for sets in (x * 0.01, y * 0.01))
    results = []
    for size in (1, 2.0**30, 2.0**-30):
        gradients = [torch.full_like(sets.vectors, torch.nan, dtype=torch.float32) for sets in (x_sets, y_sets)]
        triton_sets._write_gradients(x_sets, y_sets, 16.0, torch.full((3, 4), size), *gradients)
        results.append([gradient / size for gradient in gradients])
    assert results[0][0].isfinite().all()
    for other in results[1:]:
        assert_gradients_near(other, results[0], 1e-6)


def test_not_finite_is_nan_unless_it_is_absent():
    x, y = sides((3, 2, 4), (4, 3))
    x[1, 0, 0] = torch.nan
    y[2, 1] = torch.inf
    similarities = smooth_chamfer_similarity(x, y)
    expected = torch.zeros(3, 4, dtype=torch.bool)
    expected[1] = expected[:, 2] = True
    assert torch.equal(similarities.isnan(), expected)
    x_mask, y_mask = torch.ones(3, 2, dtype=torch.bool), torch.ones(4, 3, dtype=torch.bool)
    x_mask[1, 0] = y_mask[2, 1] = False
    leaves = [side.requires_grad_() for side in (x, y)]
    similarities = smooth_chamfer_similarity(*leaves, x_mask=x_mask, y_mask=y_mask)
    assert similarities.isfinite().all()
    gradients = torch.autograd.grad(similarities.sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[0][1, 1].norm() > 0.01


def test_a_set_without_elements_takes_no_part():
    x, y = (side.requires_grad_() for side in sides((3, 2, 4), (4, 3)))
    x_mask = torch.tensor([[True, True], [False, False], [True, False]])
    similarities = smooth_chamfer_similarity(x, y, x_mask=x_mask)
    assert (similarities[1] == 0).all()
    x_gradient, y_gradient = torch.autograd.grad(similarities[::2].sum(), (x, y), retain_graph=True)
    # The logarithm of 0 has an infinite derivative.
    of_logarithms = torch.autograd.grad(torch.log(similarities).sum(), (x, y))
    assert all(gradient.isfinite().all() for gradient in of_logarithms)
    assert y_gradient.norm() > 0.1
    assert (x_gradient[1] == 0).all()


def test_refused():
    x, y = sides((3, 2, 4), (4, 3))
    with pytest.raises(
        ValueError, match=r"x must be float32, float16 or bfloat16, and of the type of x, got torch.float64"
    ):
        smooth_chamfer_similarity(x.double(), y.double())
    with pytest.raises(
        ValueError, match=r"y must be float32, float16 or bfloat16, and of the type of x, got torch.float16"
    ):
        smooth_chamfer_similarity(x, y.half())
    with pytest.raises(ValueError, match=r"y must be sets of at most 16 elements, got 17"):
        smooth_chamfer_similarity(x, torch.ones(1, 17, 4))
    with pytest.raises(RuntimeError, match=r"no second derivatives"):
        torch.autograd.grad(smooth_chamfer_similarity(x.requires_grad_(), y).sum(), x, create_graph=True)
