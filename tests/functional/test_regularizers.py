import math
from functools import partial
from itertools import count

import pytest
import torch

from tests.helpers.seeds import first_that
from tests.helpers.sets import normal
from tests.reference import regularizers as reference
from vl_plugins.functional import circular_variance, diversity_loss, mmd_loss, uniformity_loss

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
SQUARED = pytest.mark.parametrize("squared", [False, True], ids=["distance", "squared distance"])
UPSTREAM = 3.0


def check(value, leaves, expected, gradients):
    """Compare a scalar and its gradients with those of the loops, each a nested list."""
    dtype = leaves[0].dtype
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    assert value.dtype == dtype
    torch.testing.assert_close(value.item(), expected, **tolerance)
    for actual, gradient in zip(torch.autograd.grad(UPSTREAM * value, leaves), gradients, strict=True):
        torch.testing.assert_close(actual.double(), UPSTREAM * torch.tensor(gradient, dtype=torch.float64), **tolerance)


@DTYPES
@SQUARED
@pytest.mark.parametrize("gamma", [0.5, 2.0])
@pytest.mark.parametrize("shapes", [((1, 1), (1, 1)), ((7, 5), (4, 5))], ids=str)
def test_mmd(shapes, gamma, squared, dtype):
    draws = ([normal(*shape, seed=seed + k, dtype=dtype) for k, shape in enumerate(shapes)] for seed in count(step=2))
    draws = ((x, y, *reference.mmd(x.tolist(), y.tolist(), gamma, squared)) for x, y in draws)
    x, y, value, gradients = first_that(lambda drawn: drawn[2] > 1e-3, draws)
    check(mmd_loss(x, y, gamma, squared=squared), (x, y), value, gradients)


@DTYPES
@SQUARED
def test_mmd_of_the_same_vectors_is_zero(squared, dtype):
    x = (normal(9, 33, dtype=dtype) + 2.0).detach().requires_grad_()
    for y in (x.detach(), x.detach().flip(0), x.detach().repeat(3, 1)):
        value = mmd_loss(x, y.requires_grad_(), squared=squared)
        assert 0 <= value < 10 * torch.finfo(dtype).eps
        for gradient in torch.autograd.grad(value, (x, y)):
            assert gradient.abs().max() < 10 * torch.finfo(dtype).eps


@DTYPES
@SQUARED
def test_mmd_of_coinciding_vectors(squared, dtype):
    """They have no pull on each other."""
    x, y = normal(6, 3, dtype=dtype).detach(), normal(5, 3, seed=1, dtype=dtype).detach()
    x[1], x[3] = x[4], y[2]
    x[0] = x[2] = y[0] = y[4] = 0.0
    leaves = x.requires_grad_(), y.requires_grad_()
    check(mmd_loss(*leaves, squared=squared), leaves, *reference.mmd(x.tolist(), y.tolist(), 0.5, squared))


@SQUARED
def test_second_derivatives_of_mmd(squared):
    assert torch.autograd.gradgradcheck(partial(mmd_loss, squared=squared), (normal(4, 3), normal(5, 3, seed=1)))


@SQUARED
@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("spread", [1e-2, 1e-4])
def test_mmd_of_near_vectors_in_single_precision(spread, offset, squared):
    """Clouds that are narrow, and far from zero."""
    gamma = 0.5 / spread**2 if squared else 0.5 / spread
    x, y = ((offset + normal(12, 6, seed=seed).detach() * spread).float().requires_grad_() for seed in (0, 1))
    value, gradients = reference.mmd(x.tolist(), y.tolist(), gamma, squared)
    actual = mmd_loss(x, y, gamma, squared=squared)
    torch.testing.assert_close(actual.item(), value, atol=2e-6, rtol=0)
    for gradient, expected in zip(torch.autograd.grad(actual, (x, y)), gradients, strict=True):
        torch.testing.assert_close(spread * gradient, spread * torch.tensor(expected), atol=1e-5, rtol=0)


@SQUARED
def test_mmd_of_narrow_clouds_is_not_drowned_by_the_rounding_of_one(squared):
    x, y = (1e-3 * normal(12, 6, seed=seed, dtype=torch.float32).detach() for seed in (0, 1))
    value, _ = reference.mmd(x.tolist(), y.tolist(), 0.5, squared)
    assert value < 1e-3
    torch.testing.assert_close(mmd_loss(x, y, squared=squared).item(), value, atol=0, rtol=2e-3)
    assert mmd_loss(x, x + 1e-9 * y, squared=squared) >= 0


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.ones(3, 2, 4), torch.ones(3, 4), r"embeddings and ref_emb must .*, got \(3, 2, 4\) and \(3, 4\)"),
        (torch.ones(3, 4), torch.ones(3, 5), r"embeddings and ref_emb must .*, got \(3, 4\) and \(3, 5\)"),
        (torch.ones(3, 4), torch.ones(3, 4, device="meta"), "ref_emb must have the device .*, cpu, got meta"),
    ],
)
def test_wrong_clouds(x, y, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        mmd_loss(x, y)


MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
PADDINGS = pytest.mark.parametrize("padding", [0.0, 7.0, math.nan, math.inf])


def padded(padding, dtype=torch.float64):
    """Sets (5, 4, 3), and lists of the elements that the mask keeps."""
    sets = normal(5, 4, 3).detach().masked_fill(~MASK[..., None], padding).to(dtype)
    return sets.requires_grad_(), [item[mask].tolist() for item, mask in zip(sets, MASK, strict=True)]


def put_back(gradients):
    whole = torch.zeros(*MASK.shape, 3, dtype=torch.float64)
    whole[MASK] = torch.tensor([vector for item in gradients for vector in item], dtype=torch.float64)
    return whole.tolist()


@DTYPES
@PADDINGS
@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_diversity(scale, padding, dtype):
    sets, elements = padded(padding, dtype)
    value, gradients = reference.mean_diversity(elements, scale)
    assert value > 1e-4
    check(diversity_loss(sets, mask=MASK, scale=scale), (sets,), value, [put_back(gradients)])
    values = torch.tensor(reference.diversity(elements, scale)[0], dtype=torch.float64)
    assert values[3:].tolist() == [0, 0]
    actual = diversity_loss(sets, mask=MASK, scale=scale, reduction="none")
    torch.testing.assert_close(actual.double(), values, atol=1e-6, rtol=0)
    torch.testing.assert_close(diversity_loss(sets, mask=MASK, scale=scale, reduction="sum"), actual.sum())


@DTYPES
@PADDINGS
@pytest.mark.parametrize("t", [2.0, 0.5])
def test_uniformity(t, padding, dtype):
    sets, elements = padded(padding, dtype)
    value, gradients = reference.uniformity(elements, t)
    check(uniformity_loss(sets, t, mask=MASK), (sets,), value, [put_back(gradients)])


@PADDINGS
def test_circular_variance(padding):
    sets, elements = padded(padding)
    expected = [reference.circular_variance(vectors) for vectors in elements[:4]] + [0.0]
    torch.testing.assert_close(circular_variance(sets, mask=MASK), torch.tensor(expected, dtype=torch.float64))
    assert expected[0] > 1e-3


@DTYPES
def test_identical_and_opposite_elements(dtype):
    element = normal(50, 1, 7, dtype=dtype).detach()
    same, opposite = torch.cat([element, 2 * element, element / 3], dim=1), torch.cat([element, -3 * element], dim=1)
    for sets, diversity, variance in ((same, 1.0, 0.0), (opposite, math.exp(-8), 1.0)):
        sets.requires_grad_()
        value = diversity_loss(sets)
        torch.testing.assert_close(value.item(), diversity, atol=2e-6, rtol=0)
        assert torch.autograd.grad(value, sets)[0].abs().max() < 1e-5
        actual = circular_variance(sets)
        assert ((actual >= 0) & (actual <= 1)).all()
        torch.testing.assert_close(actual, torch.full_like(actual, variance), atol=1e-6, rtol=0)


def test_uniformity_is_in_its_range_and_does_not_underflow():
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    for t in (2.0, 1000.0):
        for embeddings, expected in ((torch.ones(4, 3), 0.0), (opposite, -4 * t), (torch.eye(3), -2 * t)):
            value = uniformity_loss(embeddings.requires_grad_(), t)
            torch.testing.assert_close(value.item(), expected, atol=1e-6 * t, rtol=1e-6)
            assert torch.autograd.grad(value, embeddings)[0].isfinite().all()


SCALARS = {
    "mmd": lambda sets: mmd_loss(sets[:2].flatten(0, 1), sets[2:].flatten(0, 1)),
    "diversity": diversity_loss,
    "uniformity": uniformity_loss,
    "uniformity of embeddings": lambda sets: uniformity_loss(sets[:, 0]),
}
ALL_SCALARS = pytest.mark.parametrize("name", SCALARS)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (SCALARS["mmd"], [(2, 4, 3), (0, 4, 3)]),
        (diversity_loss, [(4, 1, 3), (0, 3, 2), (3, 0, 2)]),
        (uniformity_loss, [(1, 3), (0, 3), (1, 2, 3), (3, 0, 3)]),
    ],
    ids=["mmd", "diversity", "uniformity"],
)
def test_nothing_to_compare_is_zero_in_the_graph(function, shapes):
    for shape in shapes:
        sets = normal(*shape)
        value = function(sets)
        assert value == 0
        assert torch.equal(torch.autograd.grad(value, sets)[0], torch.zeros_like(sets))
    value = function(torch.full(shapes[0], math.nan))
    assert value.isnan()


@ALL_SCALARS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_and_autocast_compute_in_single(name, dtype):
    half = normal(5, 4, 64, dtype=dtype)
    single = half.detach().float().requires_grad_()
    expected = SCALARS[name](single)
    (gradient,) = torch.autograd.grad(UPSTREAM * expected, single)
    assert gradient.abs().max() > 1e-4
    for sets in (half, single):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value, variance = SCALARS[name](sets), circular_variance(sets)
        assert torch.equal(value, expected)
        assert torch.equal(torch.autograd.grad(UPSTREAM * value, sets)[0], gradient.to(sets.dtype))
        assert torch.equal(variance, circular_variance(single))


@ALL_SCALARS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_a_number_is_never_hidden(name, bad):
    for place in ((0, 0, 0), (3, 0, 2)):
        sets = normal(4, 3, 5).detach()
        sets[place] = bad
        value = SCALARS[name](sets.requires_grad_())
        assert value.isnan()
        assert torch.autograd.grad(value, sets)[0].isnan().any()
        assert circular_variance(sets).isnan().tolist() == [item == place[0] for item in range(4)]


@ALL_SCALARS
def test_zero_vectors_have_no_gradient_and_finite_second_derivatives(name):
    sets = normal(4, 3, 5).detach()
    sets[1] = 0.0
    sets[2, 0] = 1e-14
    (gradient,) = torch.autograd.grad(SCALARS[name](sets.requires_grad_()), sets, create_graph=True)
    assert gradient[0].any()
    assert name == "mmd" or not gradient[1].any()
    assert name == "mmd" or not gradient[2, 0].any()
    assert torch.autograd.grad(gradient.square().sum(), sets)[0].isfinite().all()
    assert circular_variance(sets)[1] == 1


@pytest.mark.parametrize("function", [diversity_loss, uniformity_loss, circular_variance])
@pytest.mark.parametrize(
    ("sets", "mask", "message"),
    [
        (torch.ones(3), None, r"sets must have the shape \(items, elements, dimension\), got \(3,\)"),
        (torch.ones(3, 4), torch.ones(3, 4).bool(), r"sets must have the shape .*, got \(3, 4\)"),
        (torch.ones(3, 4, 5), torch.ones(3, 5).bool(), r"mask must be .* \(3, 4\) on cpu, got .* \(3, 5\)"),
    ],
)
def test_wrong_sets_and_masks(function, sets, mask, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        function(sets, mask=mask)


def test_wrong_reduction():
    with pytest.raises(ValueError, match=r"unknown reduction 'men' \(did you mean 'mean'\?\)"):
        diversity_loss(torch.ones(3, 4, 5), reduction="men")


@pytest.mark.slow
def test_compiled():
    torch.compiler.reset()
    sets = normal(5, 4, 3)

    def caller(sets):
        return sum(function(sets) for function in SCALARS.values())

    actual, expected = torch.compile(caller, backend="aot_eager")(sets), caller(sets)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, sets), torch.autograd.grad(expected, sets))
