import pytest
import torch

from tests.kernels.triton_cases import TOLERANCE, check_sets, vectors
from vl_plugins.kernels.triton_sets import MAX_ELEMENTS, smooth_chamfer_similarity

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def sides(x_shape, y_shape, dtype=torch.float32):
    return [vectors(*shape, dtype=dtype, device="cpu", seed=len(shape)) for shape in (x_shape, (*y_shape, x_shape[2]))]


def masks(*sides):
    """Some elements that are absent, of every fifth set all."""
    for seed, side in enumerate(sides):
        mask = torch.rand(side.shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.6
        mask[::5] = False
        yield mask


@DTYPES
@pytest.mark.parametrize("masked", [False, True], ids=["all elements", "some elements"])
@pytest.mark.parametrize("normalize", [True, False], ids=["cosines", "dot products"])
def test_several_tiles_and_parts(small_tiles, normalize, masked, dtype):
    x, y = sides((11, 3, 20), (7, 5), dtype)
    if not normalize:
        x, y = x / 4, y / 4
    x_mask, y_mask = masks(x, y) if masked else (None, None)
    check_sets(x, y, x_mask=x_mask, y_mask=y_mask, normalize=normalize)


@pytest.mark.parametrize(
    ("x_shape", "y_shape"),
    [((1, 1, 5), (3, 1)), ((17, 4, 16), (2, 2)), ((5, MAX_ELEMENTS, 33), (3, MAX_ELEMENTS)), ((2, 9, 1), (33, 1))],
    ids=str,
)
def test_tiles_as_on_a_device(x_shape, y_shape):
    check_sets(*sides(x_shape, y_shape))


@pytest.mark.parametrize(("x_shape", "y_shape"), [((0, 2, 4), (3, 2)), ((3, 2, 4), (0, 2)), ((3, 0, 4), (2, 1))], ids=str)
def test_nothing(x_shape, y_shape):
    check_sets(*sides(x_shape, y_shape))


@DTYPES
@pytest.mark.parametrize("alpha", [1e-2, 1.0, 1e4])
def test_extreme_alpha_and_cosines(alpha, dtype):
    x, y = sides((5, 3, 6), (4, 2), dtype)
    x[1], x[2, 0], x[3, 1] = x[0], -x[0, 0], 0
    y[1, 0], y[2] = x[0, 0], x[0, 0]
    check_sets(x, y, alpha, tolerance=max(TOLERANCE[dtype], 1e-6 * alpha))


@pytest.mark.parametrize("needed", ["x", "y"])
def test_gradients_of_one_side(small_tiles, needed):
    check_sets(*sides((9, 2, 4), (3, 3), torch.float16), needed=needed)


@pytest.mark.parametrize("size", [2.0**10, 2.0**-24])
def test_float16_gradients_of_any_size(size):
    x, y = sides((3, 2, 8), (4, 3), torch.float16)
    for factor in (1 / 8, size):
        x_leaf = (x / factor / 8).requires_grad_()  # whose gradient is 8 * factor times as large
        similarities = smooth_chamfer_similarity(x_leaf if factor == 1 / 8 else x_leaf, y)
        del similarities
    leaf = x.clone().requires_grad_()
    plain = torch.autograd.grad(smooth_chamfer_similarity(leaf, y).sum(), leaf)[0]
    assert plain.norm() > 0.1


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


def test_refused():
    x, y = sides((3, 2, 4), (4, 3))
    with pytest.raises(ValueError, match=r"x must be float32, float16 or bfloat16, and of the type of x, got torch.float64"):
        smooth_chamfer_similarity(x.double(), y.double())
    with pytest.raises(ValueError, match=r"y must be float32, float16 or bfloat16, and of the type of x, got torch.float16"):
        smooth_chamfer_similarity(x, y.half())
    with pytest.raises(ValueError, match=r"y must be sets of at most 16 elements, got 17"):
        smooth_chamfer_similarity(x, torch.ones(1, 17, 4))
    with pytest.raises(RuntimeError, match=r"no second derivatives"):
        torch.autograd.grad(smooth_chamfer_similarity(x.requires_grad_(), y).sum(), x, create_graph=True)
