import itertools
import math
from functools import partial

import pytest
import torch
from torch.nn.functional import cosine_similarity
from torch.nn.functional import normalize as unit

from tests.helpers.seeds import first_that, seeded
from tests.helpers.sets import normal, random_mask, value_and_gradients
from tests.reference import sets as reference
from vl_plugins.functional import chamfer_similarity, match_probability, mil_similarity, smooth_chamfer_similarity

SCALE, SHIFT = 3.0, -0.5
SIMILARITIES = {
    "smooth_chamfer": (smooth_chamfer_similarity, reference.smooth_chamfer),
    # Where exponentials of float32 would overflow.
    "smooth_chamfer 100": (
        partial(smooth_chamfer_similarity, alpha=100.0),
        partial(reference.smooth_chamfer, alpha=100.0),
    ),
    "chamfer": (chamfer_similarity, reference.chamfer),
    "mil": (mil_similarity, reference.mil),
    "match_probability": (
        partial(match_probability, scale=SCALE, shift=SHIFT),
        partial(reference.match_probability, scale=SCALE, shift=SHIFT),
    ),
}
NAMES = pytest.mark.parametrize("name", SIMILARITIES)


def sets_and_masks(dtype=torch.float64):
    embeddings, ref_emb = normal(4, 3, 4, dtype=dtype), normal(5, 2, 4, seed=1, dtype=dtype)
    return embeddings, ref_emb, {"mask": random_mask(embeddings, 2), "ref_mask": random_mask(ref_emb, 3)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", ["all pairs", "masked", "masked and paired"])
@NAMES
def test_loops(name, case, dtype):
    function, set_similarity = SIMILARITIES[name]
    embeddings, ref_emb, masks = sets_and_masks(dtype)
    masks = {} if case == "all pairs" else masks
    paired = case == "masked and paired"
    if paired:
        ref_emb, masks["ref_mask"] = ref_emb[:4].detach().requires_grad_(), masks["ref_mask"][:4].flip(0)
    actual = value_and_gradients(function(embeddings, ref_emb, paired=paired, **masks), (embeddings, ref_emb))
    twins = [sets.detach().double().requires_grad_() for sets in (embeddings, ref_emb)]
    expected = reference.matrix(set_similarity, *twins, *masks.values())
    expected = value_and_gradients(expected.diagonal() if paired else expected, twins)
    assert {tensor.dtype for tensor in actual} == {dtype}
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4}[dtype]
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=tolerance, rtol=tolerance)


@NAMES
def test_second_derivatives(name):
    function, _ = SIMILARITIES[name]
    sets = normal(3, 2, 4), normal(3, 3, 4, seed=1)
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    for paired in (False, True):
        similarity = partial(function, ref_mask=mask, paired=paired)
        assert torch.autograd.gradcheck(similarity, sets)
        assert torch.autograd.gradgradcheck(similarity, sets)


def test_learned_scale_and_shift():
    embeddings, ref_emb, masks = sets_and_masks()
    numbers = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (SCALE, SHIFT)]
    actual = value_and_gradients(match_probability(embeddings, ref_emb, *numbers, **masks), numbers)
    loops = partial(reference.match_probability, scale=numbers[0], shift=numbers[1])
    expected = value_and_gradients(reference.matrix(loops, embeddings, ref_emb, *masks.values()), numbers)
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=0)
    scale = torch.tensor([SCALE], dtype=torch.float64, requires_grad=True)  # of another type than the sets
    value = match_probability(embeddings.float(), ref_emb.float(), scale)
    (gradient,) = torch.autograd.grad(value.sum(), scale)
    assert (value.dtype, gradient.dtype, gradient.shape) == (torch.float32, torch.float64, (1,))


def gradients_by_cosines(function, cosines):
    """Of orthonormal y the gradient by x is that by the cosines."""
    x = torch.cat([cosines, torch.zeros_like(cosines[:, :1])], dim=1)[None].requires_grad_()
    y = torch.eye(x.shape[2], dtype=x.dtype)[None, :-1]
    return torch.autograd.grad(function(x, y, normalize=False).sum(), x)[0][0, :, :-1]


def test_ties_share_the_gradient():
    """Of two identical elements of x, and two of y."""
    cosines = torch.tensor([[0.5, 0.5, -0.2]] * 2, dtype=torch.float64)
    for function, expected in (
        (chamfer_similarity, [1 / 8 + 1 / 12, 1 / 8 + 1 / 12, 1 / 12]),
        (mil_similarity, [1 / 4, 1 / 4, 0]),
    ):
        expected = torch.tensor([expected] * 2, dtype=torch.float64)
        torch.testing.assert_close(gradients_by_cosines(function, cosines), expected)


@NAMES
def test_sets_of_one_are_compared_by_their_cosine(name):
    x, y = normal(5, 1, 4), normal(6, 1, 4, seed=1)
    expected = cosine_similarity(x, y[:, 0], dim=2)
    if name == "match_probability":
        expected = (SCALE * expected + SHIFT).sigmoid()
    torch.testing.assert_close(SIMILARITIES[name][0](x, y), expected, atol=1e-12, rtol=0)


def is_far_from_ties(sides):
    """Whether it is clear which elements of other sets are the nearest."""
    x, y = (unit(side.detach(), dim=2) for side in sides)
    cosines = torch.einsum("aid,cjd->acij", x, y)
    largest = [side.topk(2, dim=3).values for side in (cosines, cosines.transpose(2, 3))]
    return all((values[..., 0] - values[..., 1] > 1e-4).all() for values in largest)


def test_large_alpha_is_chamfer():
    draws = ((normal(5, 3, 4, seed=seed), normal(6, 4, 4, seed=seed + 1)) for seed in itertools.count(step=2))
    x, y = first_that(is_far_from_ties, draws)
    chamfer = chamfer_similarity(x, y)
    for alpha in (1.0, 16.0, 100.0, 1e4):
        difference = smooth_chamfer_similarity(x, y, alpha) - chamfer
        assert difference.min() > -1e-12
        assert difference.max() <= math.log(4) / alpha
    limit = value_and_gradients(smooth_chamfer_similarity(x, y, 1e6), (x, y))
    torch.testing.assert_close(limit, value_and_gradients(chamfer, (x, y)), atol=2e-6, rtol=0)


@NAMES
def test_only_directions_count_if_normalized(name):
    function, _ = SIMILARITIES[name]
    x, y = normal(4, 3, 6), normal(5, 2, 6, seed=1)
    lengths = 10 ** (4 * torch.rand(4, 3, 1, dtype=torch.float64, generator=seeded(0)) - 2)
    expected = value_and_gradients(function(x, y), (x, y))
    torch.testing.assert_close(function(lengths * x, y), expected[0], atol=1e-12, rtol=0)
    units = [unit(sets, dim=2) for sets in (x, y)]  # with torch's gradient
    torch.testing.assert_close(value_and_gradients(function(*units, normalize=False), (x, y)), expected)
    assert (function(2 * units[0], units[1], normalize=False) - expected[0]).abs().max() > 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@NAMES
def test_elements_that_are_not_in_a_set_have_no_influence(name, bad):
    function, _ = SIMILARITIES[name]
    *sets, masks = sets_and_masks()
    expected = function(*sets, **masks)
    assert 0 < (expected == 0).sum() < 20  # of empty sets
    sets = [
        side.detach().masked_fill(~mask[..., None], bad).requires_grad_()
        for side, mask in zip(sets, masks.values(), strict=True)
    ]
    similarities, *gradients = value_and_gradients(function(*sets, **masks), sets)
    assert torch.equal(similarities, expected)
    for gradient, mask in zip(gradients, masks.values(), strict=True):
        assert not gradient[~mask].any()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@NAMES
def test_not_a_number_is_never_hidden(name, bad, side):
    sets = [normal(4, 3, 6).detach(), normal(4, 2, 6, seed=1).detach()]
    sets[side][2, 1, 3] = bad
    similarities = SIMILARITIES[name][0](*(tensor.requires_grad_() for tensor in sets))
    expected = (torch.arange(4) == 2)[:, None].expand(4, 4)
    assert torch.equal(similarities.isnan(), expected.T if side else expected)
    assert torch.autograd.grad(similarities.sum(), sets[side])[0][2, 1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@NAMES
def test_half_precision_and_autocast_compute_in_single(name, dtype):
    function, _ = SIMILARITIES[name]
    half = [unit(normal(6, k, 32, seed=k), dim=2).detach().to(dtype).requires_grad_() for k in (3, 4)]
    single = [side.detach().float().requires_grad_() for side in half]
    expected, *gradients = value_and_gradients(function(*single), single)
    for sets in (half, single):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = function(*sets)
        assert torch.equal(actual, expected)
        for actual_gradient, gradient in zip(value_and_gradients(actual, sets)[1:], gradients, strict=True):
            assert torch.equal(actual_gradient, gradient.to(sets[0].dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@NAMES
def test_extreme_elements_have_finite_derivatives(name, dtype):
    function, _ = SIMILARITIES[name]
    ones = torch.ones(2, 3, 4)
    for x, y in ((ones, ones), (ones, -ones), (0 * ones, ones), (0 * ones, 0 * ones), (1e-7 * ones, 6e4 * ones)):
        sets = x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()
        similarities = function(*sets)
        gradients = torch.autograd.grad(similarities.sum(), sets, create_graph=True)
        second = torch.autograd.grad(sum(gradient.float().sum() for gradient in gradients), sets)
        assert all(tensor.isfinite().all() for tensor in (similarities, *gradients, *second))
        assert all(side.any() or not gradient.any() for side, gradient in zip(sets, gradients, strict=True))
        if not x.any() and name in ("chamfer", "mil"):
            assert not similarities.any()


@pytest.mark.parametrize(
    "shapes", [((0, 3, 4), (5, 2, 4)), ((5, 3, 4), (0, 2, 4)), ((3, 0, 4), (3, 2, 4)), ((3, 2, 4), (3, 0, 4))], ids=str
)
@NAMES
def test_nothing_to_compare(name, shapes):
    x, y = (normal(*shape) for shape in shapes)
    similarities, *gradients = value_and_gradients(SIMILARITIES[name][0](x, y), (x, y))
    assert torch.equal(similarities, similarities.new_zeros(len(x), len(y)))
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.slow
def test_compiled():
    torch.compiler.reset()
    sets = normal(4, 3, 6), normal(4, 2, 6, seed=1)

    def caller(x, y):
        similarities = smooth_chamfer_similarity(2 * x, y), match_probability(x, 2 * y, x.sum()), mil_similarity(x, y)
        return sum(similarities) + chamfer_similarity(x, 3 * y, paired=True)

    expected = value_and_gradients(caller(*sets), sets)
    actual = value_and_gradients(torch.compile(caller, fullgraph=True)(*sets), sets)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embeddings": torch.ones(4, 6)}, r"embeddings and ref_emb must .*, got \(4, 6\) and \(4, 2, 6\)"),
        ({"ref_emb": torch.ones(4, 2, 5)}, r"embeddings and ref_emb must .*, got \(4, 3, 6\) and \(4, 2, 5\)"),
        ({"ref_emb": torch.ones(4, 2, 6, device="meta")}, "ref_emb must have the device of embeddings, cpu, got meta"),
        ({"ref_emb": torch.ones(5, 2, 6), "paired": True}, "paired sets must be equally many, got 4 .*, 5"),
        ({"mask": torch.ones(4, 3)}, r"mask must be torch.bool of shape \(4, 3\) on cpu, got torch.float32 of"),
        ({"ref_mask": torch.ones(4, 3).bool()}, r"ref_mask must be .* on cpu, got torch.bool of shape \(4, 3\)"),
        ({"mask": torch.ones(4, 3, device="meta").bool()}, r"mask must be .* on cpu, got .* on meta"),
    ],
)
def test_wrong_sets_and_masks(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        mil_similarity(**({"embeddings": torch.ones(4, 3, 6), "ref_emb": torch.ones(4, 2, 6)} | options))


def test_wrong_numbers():
    sets = torch.ones(4, 3, 6), torch.ones(4, 2, 6)
    for alpha in (0.0, math.nan):
        with pytest.raises(ValueError, match=r"^alpha must be a finite number > 0"):
            smooth_chamfer_similarity(*sets, alpha)
    with pytest.raises(ValueError, match=r"^scale and shift must have one element, got \(\) and \(2,\)"):
        match_probability(*sets, shift=torch.ones(2))
