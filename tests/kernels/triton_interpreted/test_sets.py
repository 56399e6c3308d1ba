from functools import partial

import pytest
import torch

from tests.kernels.triton_cases import TOLERANCE, check_sets, vectors
from vl_plugins.kernels import pairwise_smooth_chamfer
from vl_plugins.kernels.triton_sets import MAX_ELEMENTS

smooth_chamfer = partial(pairwise_smooth_chamfer, backend="triton")


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
    mask, ref_mask = masks(x, y) if masked else (None, None)
    check_sets(x, y, mask=mask, ref_mask=ref_mask, normalize=normalize)


@pytest.mark.parametrize(
    ("x_shape", "y_shape"),
    [((1, 1, 5), (3, 1)), ((5, MAX_ELEMENTS, 33), (3, MAX_ELEMENTS)), ((2, 9, 2), (33, 1)), ((0, 2, 4), (3, 2))],
    ids=str,
)
def test_tiles_as_on_a_device(x_shape, y_shape):
    check_sets(*sides(x_shape, y_shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("alpha", [1e-2, 1e4])
def test_extreme_alpha_and_cosines(alpha, dtype):
    x, y = sides((5, 3, 6), (4, 2), dtype)
    x[1], x[2, 0], x[3, 1] = x[0], -x[0, 0], 0
    y[1, 0], y[2] = x[0, 0], x[0, 0]
    check_sets(x, y, alpha, tolerance=max(TOLERANCE[dtype], 1e-6 * alpha))


@pytest.mark.parametrize("needed", ["x", "y"])
def test_gradients_of_one_side(small_tiles, needed):
    check_sets(*sides((9, 2, 4), (3, 3), torch.float16), needed=needed)


def test_not_a_number_is_hidden_by_masks_only():
    x, y = sides((3, 2, 4), (4, 3))
    x[1, 0, 0], y[2, 1] = torch.nan, torch.inf
    expected = torch.zeros(3, 4, dtype=torch.bool)
    expected[1] = expected[:, 2] = True
    assert torch.equal(smooth_chamfer(x, y).isnan(), expected)
    masks = {"mask": x.isfinite().all(2), "ref_mask": y.isfinite().all(2)}
    leaves = [side.requires_grad_() for side in (x, y)]
    similarities = smooth_chamfer(*leaves, **masks)
    gradients = torch.autograd.grad(similarities.sum(), leaves)
    assert all(tensor.isfinite().all() for tensor in (similarities, *gradients))
    assert gradients[0][1, 1].norm() > 0.01


def test_second_derivatives_are_those_of_the_formula():
    leaves = [side.requires_grad_() for side in sides((3, 2, 4), (4, 3))]
    found = []
    for backend in ("triton", "dense"):
        similarities = pairwise_smooth_chamfer(*leaves, backend=backend)
        gradients = torch.autograd.grad(similarities.square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), leaves))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_wrong_sets():
    x, y = sides((3, 2, 4), (4, 3))
    with pytest.raises(ValueError, match=r"^backend 'triton' needs embeddings of float32, .*, got float64"):
        smooth_chamfer(x.double(), y.double())
    with pytest.raises(ValueError, match=r"^backend 'triton' takes sets of at most 16 elements, got 17"):
        smooth_chamfer(x, torch.ones(1, 17, 4))
