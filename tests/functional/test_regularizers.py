import math

import pytest
import torch
from torch.nn.functional import normalize

from tests.memory import LargestTensor
from tests.reference import regularizers as reference
from vl_plugins.functional import circular_variance, diversity_loss, mmd_loss, regularizers, uniformity_loss

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
SQUARED = pytest.mark.parametrize("squared", [False, True], ids=["distance", "squared distance"])
CLOUDS = pytest.mark.parametrize("shapes", [((1, 1), (1, 1)), ((7, 5), (4, 5)), ((3, 2), (11, 2))], ids=str)
SETS = pytest.mark.parametrize("shape", [(1, 2, 2), (3, 4, 5), (5, 3, 2), (2, 7, 3)], ids=str)
UPSTREAM = 3.0


def leaf(shape, dtype=torch.float64, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, dtype=torch.float64, generator=generator)).to(dtype).requires_grad_()


def check(value, leaves, expected, gradients):
    """Compare a scalar and its gradients with those of the loops, each a nested list."""
    dtype = leaves[0].dtype
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    of_value = torch.autograd.grad(UPSTREAM * value, leaves)
    assert value.dtype == dtype
    torch.testing.assert_close(value.item(), expected, **tolerance)
    for actual, gradient in zip(of_value, gradients, strict=True):
        torch.testing.assert_close(actual.double(), UPSTREAM * torch.tensor(gradient, dtype=torch.float64), **tolerance)


@DTYPES
@SQUARED
@CLOUDS
@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_mmd(shapes, gamma, squared, dtype):
    x, y = (leaf(shape, dtype, seed) for seed, shape in enumerate(shapes))
    value, gradients = reference.mmd(x.tolist(), y.tolist(), gamma, squared)
    assert value > 1e-3
    check(mmd_loss(x, y, gamma, squared=squared), (x, y), value, gradients)


def test_mmd_has_the_kernel_of_the_published_code_by_default():
    x, y = leaf((7, 5)), leaf((4, 5), seed=1)
    assert torch.equal(mmd_loss(x, y), mmd_loss(x, y, 0.5, squared=False))


@DTYPES
@SQUARED
def test_mmd_in_blocks(squared, dtype, monkeypatch):
    x, y = leaf((23, 5), dtype), leaf((14, 5), dtype, seed=1)
    expected = reference.mmd(x.tolist(), y.tolist(), 0.5, squared)
    for elements in (1, 100, 23 * 8, 23 * 14):
        monkeypatch.setattr(regularizers, "KERNELS_AT_ONCE", elements)
        check(mmd_loss(x, y, squared=squared), (x, y), *expected)


@pytest.mark.parametrize("shapes", [((300, 8), (50, 8)), ((50, 8), (300, 8))], ids=str)
def test_memory_of_mmd_is_that_of_a_block(shapes, monkeypatch):
    monkeypatch.setattr(regularizers, "KERNELS_AT_ONCE", 3000)
    x, y = (leaf(shape, seed=seed) for seed, shape in enumerate(shapes))
    with LargestTensor() as largest:
        mmd_loss(x, y).backward()
    assert largest.elements == 3000
    assert regularizers.KERNELS_AT_ONCE < 300 * 300


@DTYPES
@SQUARED
def test_mmd_of_equal_clouds_is_exactly_zero_without_gradient(squared, dtype):
    for shape in ((1, 3), (6, 2), (40, 33)):
        for scale in (1e-3, 1.0, 100.0):
            x = (leaf(shape, dtype, scale=scale) + 2.0).detach().requires_grad_()
            y = x.detach().clone().requires_grad_()
            value = mmd_loss(x, y, squared=squared)
            assert value == 0
            for gradient in torch.autograd.grad(value, (x, y)):
                assert torch.equal(gradient, torch.zeros_like(x))


@SQUARED
def test_mmd_of_the_same_vectors_in_another_order_or_repeated(squared):
    x = leaf((9, 4))
    for y in (x.detach().flip(0), x.detach().repeat(3, 1)):
        value = mmd_loss(x, y.requires_grad_(), squared=squared)
        gradients = torch.autograd.grad(value, (x, y))
        assert 0 <= value < 1e-14
        for gradient in gradients:
            assert gradient.abs().max() < 1e-14


@DTYPES
@SQUARED
def test_mmd_is_symmetric_and_not_negative(squared, dtype):
    for seed in range(20):
        x = leaf((6, 3), dtype, seed).detach()
        y = x + 10.0 ** -(seed % 8) * leaf((6, 3), dtype, 100 + seed).detach()
        value = mmd_loss(x, y, squared=squared)
        assert value >= 0
        # Of near vectors the square root magnifies the rounding.
        tolerance = {"atol": {torch.float64: 1e-9, torch.float32: 2e-5}[dtype], "rtol": 0}
        torch.testing.assert_close(mmd_loss(y, x, squared=squared), value, **tolerance)
        torch.testing.assert_close(mmd_loss(x[[3, 1, 5, 0, 2, 4]], y, squared=squared), value, **tolerance)


@DTYPES
@SQUARED
def test_coinciding_vectors_have_no_pull_on_each_other(squared, dtype):
    x, y = leaf((6, 3), dtype).detach(), leaf((5, 3), dtype, seed=1).detach()
    x[1] = x[4]
    x[3] = y[2]
    x[0] = x[2] = y[0] = y[4] = 0.0
    x, y = x.requires_grad_(), y.requires_grad_()
    check(mmd_loss(x, y, squared=squared), (x, y), *reference.mmd(x.tolist(), y.tolist(), gamma=0.5, squared=squared))


def test_mmd_of_collapsed_clouds_has_finite_gradients():
    for x, y in ((torch.ones(4, 3), torch.ones(5, 3)), (torch.ones(4, 3), torch.zeros(2, 3))):
        x, y = x.requires_grad_(), y.requires_grad_()
        for squared in (False, True):
            value = mmd_loss(x, y, squared=squared)
            distance = 0 if len(y) == 5 else 3 if squared else 3**0.5
            assert value.item() == pytest.approx(2 - 2 * math.exp(-0.5 * distance), abs=1e-6)
            assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(value, (x, y)))


@SQUARED
@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-4])
def test_mmd_of_near_vectors_in_single_precision(spread, offset, squared):
    """Clouds far from zero and narrow; then vectors of a wide one that nearly coincide."""
    x, y = (offset + leaf((12, 6), torch.float64, seed).detach() * spread for seed in (0, 1))
    x, y = (cloud.float().requires_grad_() for cloud in (x, y))
    value, gradients = reference.mmd(x.tolist(), y.tolist(), 0.5 / spread, squared)
    actual = mmd_loss(x, y, 0.5 / spread, squared=squared)
    if squared:
        value, gradients = reference.mmd(x.tolist(), y.tolist(), 0.5 / spread**2, squared)
        actual = mmd_loss(x, y, 0.5 / spread**2, squared=squared)
    torch.testing.assert_close(actual.item(), value, atol=2e-6, rtol=0)
    for gradient, of_loops in zip(torch.autograd.grad(actual, (x, y)), gradients, strict=True):
        torch.testing.assert_close(spread * gradient, spread * torch.tensor(of_loops), atol=1e-5, rtol=0)


@SQUARED
def test_mmd_of_narrow_clouds_is_not_drowned_by_the_rounding_of_one(squared):
    x, y = (1e-3 * leaf((12, 6), torch.float32, seed).detach() for seed in (0, 1))
    value, _ = reference.mmd(x.tolist(), y.tolist(), 0.5, squared)
    assert value < 1e-3
    torch.testing.assert_close(mmd_loss(x, y, squared=squared).item(), value, atol=0, rtol=2e-3)


@pytest.mark.parametrize("distance", [1e-1, 1e-2, 3e-3, 1e-3, 1e-5])
def test_mmd_of_nearly_coinciding_vectors_in_single_precision(distance):
    x = normalize(leaf((12, 64), torch.float32).detach(), dim=1).requires_grad_()
    y = (x.detach() + distance * normalize(leaf((12, 64), torch.float32, seed=1).detach(), dim=1)).requires_grad_()
    value, gradients = reference.mmd(x.tolist(), y.tolist(), gamma=0.5, squared=False)
    actual = mmd_loss(x, y)
    # 12 of the 144 pairs of the two clouds are near, and count twice.
    torch.testing.assert_close(actual.item(), value, atol=2 / 12 * 1e-3, rtol=0)
    for gradient, of_loops in zip(torch.autograd.grad(actual, (x, y)), gradients, strict=True):
        of_loops = torch.tensor(of_loops)
        if distance >= 3e-3:
            torch.testing.assert_close(gradient, of_loops, atol=0.1 * of_loops.abs().max().item(), rtol=0)
        assert gradient.norm(dim=1).max() <= 1.1 * 0.5 * 2 / 144


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_mmd_of_an_empty_cloud_is_zero_in_the_graph(sizes):
    x, y = (leaf((size, 3), seed=seed) for seed, size in enumerate(sizes))
    value = mmd_loss(x, y)
    assert value == 0
    for cloud, gradient in zip((x, y), torch.autograd.grad(value, (x, y)), strict=True):
        assert torch.equal(gradient, torch.zeros_like(cloud))


def test_mmd_of_a_cloud_without_a_gradient():
    x, y = leaf((6, 3)), leaf((5, 3), seed=1)
    both = torch.autograd.grad(mmd_loss(x, y), (x, y))
    assert torch.equal(torch.autograd.grad(mmd_loss(x, y.detach()), x)[0], both[0])
    assert torch.equal(torch.autograd.grad(mmd_loss(x.detach(), y), y)[0], both[1])
    with torch.no_grad():
        assert mmd_loss(x, y) > 0


def test_second_derivatives_of_mmd_are_refused():
    x = leaf((6, 3))
    with pytest.raises(RuntimeError, match="mmd_loss has no second derivatives"):
        torch.autograd.grad(mmd_loss(x, leaf((5, 3), seed=1)), x, create_graph=True)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.ones(3, 2, 4), torch.ones(3, 4), r"x must have the shape \(vectors, dimension\), got \(3, 2, 4\)"),
        (torch.ones(3, 4), torch.ones(4), r"y must have the shape \(vectors, dimension\), got \(4,\)"),
        (torch.ones(3, 4), torch.ones(3, 5), "y must have the dimension of x, 4, got 5"),
        (torch.ones(3, 4), torch.ones(3, 4, device="meta"), "y must have the device of x, cpu, got meta"),
    ],
)
def test_wrong_clouds(x, y, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        mmd_loss(x, y)


@DTYPES
@SETS
@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_diversity(shape, scale, dtype):
    sets = leaf(shape, dtype)
    value, gradients = reference.mean_diversity(sets.tolist(), scale)
    assert value > 1e-4
    check(diversity_loss(sets, scale=scale), (sets,), value, [gradients])
    values, gradients = reference.diversity(sets.tolist(), scale)
    upstream = torch.arange(1, len(sets) + 1, dtype=torch.float64)
    actual = diversity_loss(sets, scale=scale, reduction="none")
    assert actual.shape == (len(sets),)
    weighted = [
        [[weight * component for component in vector] for vector in of_item]
        for weight, of_item in zip(upstream.tolist(), gradients, strict=True)
    ]
    total = (upstream @ torch.tensor(values, dtype=torch.float64)).item()
    check((upstream.to(dtype) * actual).sum(), (sets,), total, [weighted])
    torch.testing.assert_close(diversity_loss(sets, scale=scale, reduction="sum"), actual.sum())


def test_diversity_has_the_scale_of_the_paper_by_default():
    sets = leaf((3, 4, 5))
    assert torch.equal(diversity_loss(sets), diversity_loss(sets, scale=2.0))


@DTYPES
def test_identical_elements_have_diversity_one(dtype):
    sets = leaf((3, 1, 5), dtype).detach().expand(3, 4, 5).clone().requires_grad_()
    value = diversity_loss(sets)
    torch.testing.assert_close(value.item(), 1.0, atol=2e-6, rtol=0)
    (gradient,) = torch.autograd.grad(value, sets)
    assert gradient.abs().max() < 1e-5
    opposite = torch.tensor([[[1.0, 0.0], [-3.0, 0.0]]], dtype=dtype)
    torch.testing.assert_close(diversity_loss(opposite).item(), math.exp(-8), atol=1e-8, rtol=1e-5)


@pytest.mark.parametrize("shape", [(4, 1, 3), (0, 3, 2), (3, 0, 2), (0, 1, 3)], ids=str)
def test_diversity_of_single_elements_is_exactly_zero_in_the_graph(shape):
    sets = leaf(shape)
    for reduction in ("mean", "sum", "none"):
        value = diversity_loss(sets, reduction=reduction).sum()
        assert value == 0
        assert torch.equal(torch.autograd.grad(value, sets)[0], torch.zeros_like(sets))


MASK = torch.tensor(
    [
        [True, True, True, True],
        [True, False, True, True],
        [False, False, True, True],
        [False, True, False, False],
        [False, False, False, False],
    ]
)


def ragged(sets):
    """Lists of the elements that the mask keeps, and a function that puts their gradients back."""
    kept = [[vector for vector, belongs in zip(*item, strict=True) if belongs] for item in zip(sets, MASK, strict=True)]

    def put_back(gradients):
        whole = torch.zeros(sets.shape, dtype=torch.float64)
        whole[MASK] = torch.tensor([vector for of_item in gradients for vector in of_item], dtype=torch.float64)
        return whole.tolist()

    return [[vector.tolist() for vector in vectors] for vectors in kept], put_back


PADDINGS = pytest.mark.parametrize("padding", [0.0, 7.0, float("nan"), float("inf")])


def padded(padding, dtype=torch.float64):
    return leaf((5, 4, 3), dtype).detach().masked_fill(~MASK[..., None], padding).requires_grad_()


@DTYPES
@PADDINGS
def test_diversity_of_sets_of_several_sizes(padding, dtype):
    sets = padded(padding, dtype)
    elements, put_back = ragged(sets)
    assert [len(vectors) for vectors in elements] == [4, 3, 2, 1, 0]
    value, gradients = reference.mean_diversity(elements, 2.0)
    check(diversity_loss(sets, mask=MASK), (sets,), value, [put_back(gradients)])
    values, _ = reference.diversity(elements, 2.0)
    actual = diversity_loss(sets, mask=MASK, reduction="none")
    torch.testing.assert_close(actual.double(), torch.tensor(values).double(), atol=1e-6, rtol=0)
    assert values[3:] == [0, 0]


@DTYPES
@PADDINGS
def test_uniformity_of_sets_of_several_sizes(padding, dtype):
    sets = padded(padding, dtype)
    elements, put_back = ragged(sets)
    value, gradients = reference.uniformity(elements, 2.0)
    check(uniformity_loss(sets, mask=MASK), (sets,), value, [put_back(gradients)])


@PADDINGS
def test_circular_variance_of_sets_of_several_sizes(padding):
    sets = padded(padding)
    elements, _ = ragged(sets)
    expected = [reference.circular_variance(vectors) for vectors in elements[:4]] + [0.0]
    torch.testing.assert_close(circular_variance(sets, mask=MASK), torch.tensor(expected, dtype=torch.float64))
    assert expected[0] > 0.1


@DTYPES
@pytest.mark.parametrize("t", [2.0, 0.5])
@pytest.mark.parametrize("shape", [(2, 2), (7, 5), (12, 3)], ids=str)
def test_uniformity_of_embeddings_is_that_of_all_pairs(shape, t, dtype):
    embeddings = leaf(shape, dtype)
    value, gradients = reference.uniformity([[vector] for vector in embeddings.tolist()], t)
    check(uniformity_loss(embeddings, t), (embeddings,), value, [[vector for (vector,) in gradients]])
    of_torch = torch.pdist(normalize(embeddings, dim=1)).pow(2).mul(-t).exp().mean().log()
    torch.testing.assert_close(uniformity_loss(embeddings, t), of_torch)


@DTYPES
@pytest.mark.parametrize("shape", [(2, 1, 2), (3, 4, 5), (5, 3, 2)], ids=str)
def test_uniformity_of_sets_is_that_of_elements_of_different_items(shape, dtype):
    sets = leaf(shape, dtype)
    value, gradients = reference.uniformity(sets.tolist(), 2.0)
    check(uniformity_loss(sets), (sets,), value, [gradients])


def test_uniformity_is_in_its_range_and_does_not_underflow():
    same = torch.ones(4, 3, requires_grad=True)
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], requires_grad=True)
    for t in (2.0, 1000.0):
        for embeddings, expected in ((same, 0.0), (opposite, -4 * t), (torch.eye(3).requires_grad_(), -2 * t)):
            value = uniformity_loss(embeddings, t)
            torch.testing.assert_close(value.item(), expected, atol=1e-6 * t, rtol=1e-6)
            assert torch.autograd.grad(value, embeddings)[0].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (0, 2, 3), (1, 2, 3), (3, 0, 3)], ids=str)
def test_uniformity_of_fewer_than_two_items_is_zero_in_the_graph(shape):
    embeddings = leaf(shape)
    value = uniformity_loss(embeddings)
    assert value == 0
    assert torch.equal(torch.autograd.grad(value, embeddings)[0], torch.zeros_like(embeddings))


@DTYPES
@SETS
def test_circular_variance(shape, dtype):
    sets = leaf(shape, dtype).detach()
    expected = torch.tensor([reference.circular_variance(elements) for elements in sets.tolist()], dtype=torch.float64)
    assert (expected > 0.05).all()
    actual = circular_variance(sets)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype], rtol=0)


@DTYPES
def test_circular_variance_of_the_same_and_of_opposite_directions(dtype):
    element = leaf((500, 1, 7), dtype).detach()
    same = torch.cat([element, 2 * element, element / 3], dim=1)
    for sets, expected in ((same, 0.0), (element, 0.0), (torch.cat([element, -3 * element], dim=1), 1.0)):
        actual = circular_variance(sets)
        assert ((actual >= 0) & (actual <= 1)).all()
        torch.testing.assert_close(actual, torch.full_like(actual, expected), atol=1e-6, rtol=0)
    assert circular_variance(element[:0]).shape == (0,)


SCALARS = {
    "mmd": lambda sets: mmd_loss(sets[:2].flatten(0, 1), sets[2:].flatten(0, 1)),
    "diversity": diversity_loss,
    "uniformity": uniformity_loss,
    "uniformity of embeddings": lambda sets: uniformity_loss(sets[:, 0]),
}
ALL_SCALARS = pytest.mark.parametrize("name", SCALARS)


@ALL_SCALARS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_single_under_autocast_too(name, dtype):
    half = leaf((5, 4, 64), dtype)
    single = half.detach().float().requires_grad_()
    expected = SCALARS[name](single)
    (gradient,) = torch.autograd.grad(UPSTREAM * expected, single)
    assert gradient.abs().max() > 1e-4
    for sets in (half, single):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value, variance = SCALARS[name](sets), circular_variance(sets)
        assert value.dtype == torch.float32
        assert torch.equal(value, expected)
        assert torch.equal(torch.autograd.grad(UPSTREAM * value, sets)[0], gradient.to(sets.dtype))
        assert torch.equal(variance, circular_variance(single))


def test_mmd_of_two_types_is_computed_in_the_larger():
    x, y = leaf((6, 3)), leaf((5, 3), torch.float16, seed=1)
    value = mmd_loss(x, y)
    assert value.dtype == torch.float64
    assert torch.autograd.grad(value, y)[0].dtype == torch.float16


@ALL_SCALARS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_a_number_is_never_hidden(name, bad):
    for place in ((0, 0, 0), (3, 0, 2)):
        sets = leaf((4, 3, 5)).detach()
        sets[place] = bad
        sets.requires_grad_()
        value = SCALARS[name](sets)
        assert value.isnan()
        assert torch.autograd.grad(value, sets)[0].isnan().any()


@pytest.mark.parametrize("shape", [(4, 1, 3), (1, 4, 3)], ids=str)
def test_not_a_number_is_not_hidden_where_there_is_nothing_to_compare(shape):
    sets = torch.full(shape, float("nan"))
    for function in (
        lambda sets: diversity_loss(sets[:, :1]),
        lambda sets: uniformity_loss(sets[:1]),
        lambda sets: mmd_loss(sets[0], sets[0, :0]),
    ):
        value = function(sets.requires_grad_())
        assert value.isnan()
        assert torch.autograd.grad(value, sets)[0].isnan().any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_a_number_is_the_circular_variance_of_its_own_set(bad):
    sets = leaf((3, 4, 5)).detach()
    sets[1, 2, 0] = bad
    assert circular_variance(sets).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["diversity", "uniformity", "uniformity of embeddings"])
def test_vectors_without_a_direction_have_no_gradient(name):
    sets = leaf((4, 3, 5)).detach()
    sets[1] = 0.0
    sets[2, 0] = 1e-14
    sets.requires_grad_()
    (gradient,) = torch.autograd.grad(SCALARS[name](sets), sets)
    assert gradient.isfinite().all()
    assert not gradient[1].any()
    assert not gradient[2, 0].any()
    assert gradient[0].any()
    assert circular_variance(sets)[1] == 1


@pytest.mark.parametrize("function", [diversity_loss, uniformity_loss, circular_variance])
@pytest.mark.parametrize(
    ("sets", "mask", "message"),
    [
        (torch.ones(3), None, r"sets must have the shape \(items, elements, dimension\), got \(3,\)"),
        (torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bool), r"sets must have the shape .*, got \(3, 4\)"),
        (torch.ones(3, 4, 5), torch.ones(3, 5, dtype=torch.bool), r"mask must have the shape \(3, 4\), got \(3, 5\)"),
        (torch.ones(3, 4, 5), torch.ones(3, 4), "mask must have the dtype torch.bool, got torch.float32"),
        (
            torch.ones(3, 4, 5),
            torch.ones(3, 4, dtype=torch.bool, device="meta"),
            "mask must have the device cpu, got meta",
        ),
    ],
)
def test_wrong_sets_and_masks(function, sets, mask, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        function(sets, mask=mask)


def test_wrong_reduction():
    with pytest.raises(ValueError, match=r"unknown reduction 'men' \(did you mean 'mean'\?\)"):
        diversity_loss(torch.ones(3, 4, 5), reduction="men")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SCALARS))
def test_compiled(name):
    torch.compiler.reset()
    sets = leaf((5, 4, 3))
    expected = SCALARS[name](sets)
    value = torch.compile(SCALARS[name], backend="aot_eager")(sets)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, sets), torch.autograd.grad(expected, sets))


def test_non_contiguous_sets():
    sets = leaf((3, 5, 4)).detach()
    for name, function in SCALARS.items():
        value = function(sets.mT.contiguous())
        torch.testing.assert_close(function(sets.mT), value, msg=name)
