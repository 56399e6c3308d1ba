import math
from functools import partial

import pytest
import torch
from torch.nn.functional import cosine_similarity
from torch.nn.functional import normalize as unit

from tests.capabilities import needs_float16_on_cpu
from tests.memory import LargestTensor, extra_bytes
from tests.reference import sets as reference
from vl_plugins.functional import (
    chamfer_similarity,
    match_probability,
    mil_similarity,
    set_similarity,
    smooth_chamfer_similarity,
)
from vl_plugins.functional.set_similarity import Elements, chamfer_pooling, mil_pooling, smooth_chamfer_pooling

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
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def random_sets(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def random_mask(sets, seed):
    """Of the sets one is full, one has all elements but the first, one is empty."""
    mask = torch.rand(sets.shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[:2], mask[1, 0], mask[-1] = True, False, False
    return mask


def upstream_like(similarities):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(similarities.shape, dtype=torch.float64, generator=generator).to(similarities)


def check(name, x, y, *, leaves=None, paired=False, **masks):
    """Compare similarities and gradients with the loops."""
    function, of_sets = SIMILARITIES[name]
    leaves = [x, y] if leaves is None else leaves
    actual = function(x, y, paired=paired, **masks)
    upstream = upstream_like(actual)
    gradients = torch.autograd.grad(actual, leaves, upstream)

    expected, of_loops = loops(of_sets, x, y, upstream, paired, masks)
    expected_gradients = [
        gradient for gradient, tensor in zip(of_loops, (x, y), strict=True) if any(tensor is leaf for leaf in leaves)
    ]

    tolerance = TOLERANCE[x.dtype]
    assert actual.dtype == x.dtype
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    for leaf, gradient, expected_gradient in zip(leaves, gradients, expected_gradients, strict=True):
        assert gradient.dtype == leaf.dtype
        torch.testing.assert_close(gradient.double(), expected_gradient, atol=10 * tolerance, rtol=10 * tolerance)


def loops(of_sets, x, y, upstream, paired, masks):
    """Return similarities and gradients; kept, because many tests compare the same sets."""
    tensors = (x, y, upstream, *masks.values())
    key = (of_sets, paired, *masks, *(tuple(tensor.flatten().tolist()) for tensor in tensors))
    if key not in KEPT:
        twins = [tensor.detach().double().requires_grad_() for tensor in (x, y)]
        similarities = reference.matrix(of_sets, *twins, **masks)
        similarities = similarities.diagonal() if paired else similarities
        KEPT[key] = similarities.detach(), torch.autograd.grad(similarities, twins, upstream.double())
    return KEPT[key]


KEPT = {}
SHAPES = {
    "unequal sets": (3, 5, 3, 2, 9),
    "one row": (1, 5, 2, 4, 3),
    "one column": (6, 1, 2, 3, 3),
    "one element in x": (4, 3, 1, 3, 4),
    "one element": (3, 4, 1, 1, 4),
    "one dimension": (3, 4, 2, 2, 1),
}


@DTYPES
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@NAMES
def test_loops(name, shape, dtype):
    a, c, k1, k2, d = shape
    x, y = random_sets(a, k1, d, dtype=dtype), random_sets(c, k2, d, seed=1, dtype=dtype)
    check(name, x, y)


# Elements in a tile, least rows: with 6 dimensions, 3 elements and 2 rows the derivatives of these wait in the memory
# of y's gradient, the other tiles are computed again.
TILES = {"pairs of rows": (36, 2), "row by row": (6, 1), "columns": (60, 3)}


@DTYPES
@pytest.mark.parametrize("masked", [False, True], ids=["all elements", "masked"])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@NAMES
def test_more_sets_than_a_tile(monkeypatch, name, tile, masked, dtype):
    monkeypatch.setattr(set_similarity, "CPU_TILE", tile[0])
    monkeypatch.setattr(set_similarity, "LEAST_ROWS", tile[1])
    x, y = random_sets(3, 3, 6, dtype=dtype), random_sets(5, 2, 6, seed=1, dtype=dtype)
    masks = {"x_mask": random_mask(x, 2), "y_mask": random_mask(y, 3)} if masked else {}
    check(name, x, y, **masks)


def test_tiles_of_these_sizes(monkeypatch):
    """That the test above has several tiles, ragged ones, and both with and without lent memory."""
    tensors = random_sets(3, 3, 6).detach(), random_sets(5, 2, 6).detach()
    found = {}
    for name, (elements, rows) in TILES.items():
        monkeypatch.setattr(set_similarity, "CPU_TILE", elements)
        monkeypatch.setattr(set_similarity, "LEAST_ROWS", rows)
        tiles = set_similarity._Tiles(*tensors, None, None, None, None)
        shapes = [tile.shape for tile in tiles]
        assert all(math.prod(shape) <= elements for shape in shapes)
        assert sum(a * c for a, _, _, c in shapes) == 3 * 5
        found[name] = (tiles.first_rows_fit, len(shapes), len({(a, c) for a, _, _, c in shapes}))
    assert found == {"pairs of rows": (True, 4, 4), "row by row": (True, 15, 1), "columns": (False, 2, 2)}


@pytest.mark.parametrize("which", ["both", "x", "y", "empty"])
@NAMES
def test_masks(name, which):
    x, y = random_sets(4, 3, 4), random_sets(5, 2, 4, seed=1)
    masks = {"x_mask": random_mask(x, 2), "y_mask": random_mask(y, 3)}
    if which == "empty":
        masks = {key: torch.zeros_like(mask) for key, mask in masks.items()}
    elif which != "both":
        masks = {f"{which}_mask": masks[f"{which}_mask"]}
    check(name, x, y, **masks)


@pytest.mark.parametrize("paired", [False, True], ids=["all", "paired"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@NAMES
def test_what_is_not_in_a_set_leaves_no_trace(name, bad, paired):
    function, _ = SIMILARITIES[name]
    x, y = random_sets(4, 3, 4), random_sets(4, 2, 4, seed=1)
    masks = {"x_mask": random_mask(x, 2), "y_mask": random_mask(y, 3)}
    expected = function(x, y, **masks, paired=paired)
    assert (expected == 0).sum() == (1 if paired else 7)
    bad_x, bad_y = (
        sets.detach().masked_fill(~mask[..., None], bad).requires_grad_()
        for sets, mask in ((x, masks["x_mask"]), (y, masks["y_mask"]))
    )
    actual = function(bad_x, bad_y, **masks, paired=paired)
    assert torch.equal(actual, expected)
    actual.sum().backward()
    for sets, mask in ((bad_x, masks["x_mask"]), (bad_y, masks["y_mask"])):
        assert torch.equal(sets.grad[~mask], torch.zeros_like(sets.grad[~mask]))
        assert sets.grad.isfinite().all()
        assert (sets.grad != 0).any()


@DTYPES
@pytest.mark.parametrize("masked", [False, True], ids=["all elements", "masked"])
@NAMES
def test_paired(name, masked, dtype):
    x, y = random_sets(5, 3, 4, dtype=dtype), random_sets(5, 2, 4, seed=1, dtype=dtype)
    masks = {"x_mask": random_mask(x, 2), "y_mask": random_mask(y, 3).flip(0)} if masked else {}
    check(name, x, y, paired=True, **masks)


@pytest.mark.parametrize("paired", [False, True], ids=["all", "paired"])
@pytest.mark.parametrize("leaf", ["x", "y"])
@pytest.mark.parametrize("sizes", [(3, 3), (3, 2)], ids=str)
@NAMES
def test_only_one_side_has_a_gradient(name, sizes, leaf, paired):
    """Also the smaller one, which is then the one that lends its memory."""
    x, y = random_sets(4, sizes[0], 6), random_sets(4, sizes[1], 6, seed=1)
    if leaf == "x":
        check(name, x, y.detach(), leaves=[x], paired=paired)
    else:
        check(name, x.detach(), y, leaves=[y], paired=paired)


@NAMES
def test_sides_swapped(name):
    function, _ = SIMILARITIES[name]
    x, y = random_sets(4, 3, 6), random_sets(5, 2, 6, seed=1)
    similarities = function(x, y)
    upstream = upstream_like(similarities)
    swapped = function(y, x)
    torch.testing.assert_close(swapped, similarities.T, atol=1e-12, rtol=0)
    torch.testing.assert_close(
        torch.autograd.grad(swapped, (x, y), upstream.T), torch.autograd.grad(similarities, (x, y), upstream)
    )


@NAMES
def test_one_tensor_on_both_sides(name):
    function, of_sets = SIMILARITIES[name]
    x = random_sets(4, 3, 6)
    actual, expected = function(x, x), reference.matrix(of_sets, x, x)
    upstream = upstream_like(actual)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)
    of_actual, of_expected = (torch.autograd.grad(value, x, upstream)[0] for value in (actual, expected))
    torch.testing.assert_close(of_actual, of_expected, atol=1e-9, rtol=0)


@NAMES
def test_tensors_with_gaps_in_memory(name):
    x = random_sets(6, 4, 5).transpose(0, 1)[::2]  # (2, 6, 5)
    y = random_sets(3, 5, 2, seed=1).transpose(1, 2)  # (3, 2, 5)
    assert not x.is_contiguous()
    assert not y.is_contiguous()
    check(name, x, y)
    expanded = random_sets(1, 2, 5).expand(3, 2, 5)
    check(name, x, expanded)


@NAMES
def test_gradient_of_one_number_and_a_second_time(name):
    """The upstream gradient has no memory of its own; what y's gradient held the first time is gone the second time."""
    function, _ = SIMILARITIES[name]
    x, y = random_sets(4, 3, 12), random_sets(5, 3, 12, seed=1)
    assert set_similarity._Tiles(x.detach(), y.detach(), None, None, None, None).first_rows_fit
    total = function(x, y).sum()
    first = [gradient.clone() for gradient in torch.autograd.grad(total, (x, y), retain_graph=True)]
    second = torch.autograd.grad(total, (x, y), retain_graph=True)
    third = torch.autograd.grad(2 * total, (x, y))
    expected = torch.autograd.grad(reference.matrix(SIMILARITIES[name][1], x, y).sum(), (x, y))
    torch.testing.assert_close(first, list(expected))
    torch.testing.assert_close(first, list(second), atol=1e-15, rtol=0)
    torch.testing.assert_close([2 * gradient for gradient in first], list(third), atol=1e-14, rtol=0)


@pytest.mark.parametrize("paired", [False, True], ids=["all", "paired"])
@NAMES
def test_gradcheck(name, paired):
    x, y = random_sets(3, 2, 4), random_sets(3, 3, 4, seed=1)
    mask = torch.tensor([[True, True, False]] * 3)
    assert torch.autograd.gradcheck(lambda x, y: SIMILARITIES[name][0](x, y, y_mask=mask, paired=paired), (x, y))


@pytest.mark.parametrize("paired", [False, True], ids=["all", "paired"])
def test_learned_scale_and_shift(paired):
    x, y = random_sets(5, 3, 4), random_sets(5, 2, 4, seed=1)
    scale, shift = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (SCALE, SHIFT))
    masks = {"x_mask": random_mask(x, 2), "y_mask": random_mask(y, 3)}

    def gradients(function):
        value = function()
        value = value.diagonal() if value.ndim == 2 and paired else value
        return value, *torch.autograd.grad(value, leaves, upstream_like(value))

    for leaves in ((x, y, scale, shift), (scale, shift), (scale,), (shift, y)):
        others = [tensor.requires_grad_(any(tensor is leaf for leaf in leaves)) for tensor in (x, y, scale, shift)]
        actual = gradients(lambda: match_probability(x, y, scale, shift, **masks, paired=paired))
        expected = gradients(
            lambda: reference.matrix(partial(reference.match_probability, scale=scale, shift=shift), x, y, **masks)
        )
        torch.testing.assert_close(actual, expected, atol=1e-9, rtol=0)
        assert all(other is not None for other in others)


def test_scale_of_another_type_and_of_one_element():
    x, y = random_sets(3, 2, 4, dtype=torch.float32), random_sets(4, 2, 4, seed=1, dtype=torch.float32)
    for scale in (torch.tensor([SCALE], requires_grad=True), torch.tensor(SCALE).double().requires_grad_()):
        value = match_probability(x, y, scale, SHIFT)
        value.sum().backward()
        assert torch.equal(value, match_probability(x, y, SCALE, SHIFT))
        assert scale.grad.dtype == scale.dtype
        assert scale.grad.shape == scale.shape


def softmaxes(cosines, alpha):
    """Eq. 8, one cosine at a time."""
    k1, k2 = cosines.shape
    e = [[math.exp(alpha * cosines[i, j].item()) for j in range(k2)] for i in range(k1)]
    return torch.tensor(
        [
            [e[i][j] / sum(e[i]) / (2 * k1) + e[i][j] / sum(row[j] for row in e) / (2 * k2) for j in range(k2)]
            for i in range(k1)
        ],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("alpha", [0.5, 16.0, 100.0])
def test_equation_8(alpha):
    """Of orthonormal y the gradient with respect to x is made of those with respect to the cosines."""
    cosines = 0.9 * torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5
    x = torch.cat([cosines, torch.zeros(3, 1, dtype=torch.float64)], dim=1)[None].requires_grad_()
    y = torch.eye(5, dtype=torch.float64)[None, :4]
    smooth_chamfer_similarity(x, y, alpha, normalize=False).backward()
    torch.testing.assert_close(x.grad[0, :, :4], softmaxes(cosines, alpha), atol=1e-12, rtol=1e-10)
    assert x.grad[0, :, :4].sum().item() == pytest.approx(1)

    tile = cosines[None, :, :, None].clone()
    smooth_chamfer_pooling(tile, torch.empty_like(tile), Elements(1 / 3), Elements(1 / 4), alpha, derivatives=True)
    torch.testing.assert_close(tile[0, :, :, 0], softmaxes(cosines, alpha), atol=1e-12, rtol=1e-10)


@NAMES
def test_sets_of_one_are_compared_by_their_cosine(name):
    x, y = random_sets(5, 1, 4), random_sets(6, 1, 4, seed=1)
    expected = cosine_similarity(x, y[:, 0], dim=2)
    if name == "match_probability":
        expected = (SCALE * expected + SHIFT).sigmoid()
    torch.testing.assert_close(SIMILARITIES[name][0](x, y), expected, atol=1e-12, rtol=0)


def test_large_alpha_is_chamfer():
    x, y = random_sets(5, 3, 4), random_sets(6, 4, 4, seed=1)
    chamfer = chamfer_similarity(x, y)
    for alpha in (1.0, 16.0, 100.0, 1e4):
        difference = smooth_chamfer_similarity(x, y, alpha) - chamfer
        assert difference.min() > -1e-12
        assert difference.max() <= (math.log(3) + math.log(4)) / (2 * alpha)
    of_smooth, of_chamfer = (
        torch.autograd.grad(similarities.sum(), (x, y))
        for similarities in (smooth_chamfer_similarity(x, y, 1e5), chamfer_similarity(x, y))
    )
    torch.testing.assert_close(of_smooth, of_chamfer, atol=1e-6, rtol=0)


@NAMES
def test_order_within_a_set_does_not_matter(name):
    function, _ = SIMILARITIES[name]
    x, y = random_sets(4, 3, 6), random_sets(5, 4, 6, seed=1)
    torch.testing.assert_close(function(x[:, [2, 0, 1]], y[:, [3, 1, 0, 2]]), function(x, y), atol=1e-12, rtol=0)


@NAMES
def test_length_of_elements_does_not_matter(name):
    function, _ = SIMILARITIES[name]
    x, y = random_sets(4, 3, 6), random_sets(5, 2, 6, seed=1)
    lengths = 10 ** (4 * torch.rand(4, 3, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 2)
    torch.testing.assert_close(function(lengths * x, y), function(x, y), atol=1e-12, rtol=0)
    unit_vectors = [unit(sets, dim=2) for sets in (x, y)]
    not_normalised = function(*unit_vectors, normalize=False)
    torch.testing.assert_close(not_normalised, function(x, y), atol=1e-12, rtol=0)
    torch.testing.assert_close(  # the gradient of normalize() is torch's
        torch.autograd.grad(not_normalised.square().sum(), (x, y)),
        torch.autograd.grad(function(x, y).square().sum(), (x, y)),
    )
    assert (function(2 * unit_vectors[0], unit_vectors[1], normalize=False) - not_normalised).abs().max() > 0.1


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (chamfer_pooling, [[1 / 8 + 1 / 12, 1 / 8 + 1 / 12, 1 / 12]] * 2),
        (mil_pooling, [[1 / 4, 1 / 4, 0]] * 2),
    ],
)
def test_equally_close_elements_share_the_gradient(pooling, expected):
    """Of two identical elements of x, and two of y."""
    tile = torch.tensor([[0.5, 0.5, -0.2]] * 2, dtype=torch.float64)[None, :, :, None]
    pooling(tile, torch.empty_like(tile), Elements(1 / 2), Elements(1 / 3), derivatives=True)
    torch.testing.assert_close(tile[0, :, :, 0], torch.tensor(expected, dtype=torch.float64))


def test_sums_of_large_exponentials():
    """exp(88) is a float32, three times that is none."""
    x = torch.ones(1, 3, 4, requires_grad=True)
    similarity = smooth_chamfer_similarity(x, x.detach(), 88.0)
    similarity.backward()
    assert similarity.item() == pytest.approx(1 + math.log(3) / 88)
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("alpha", [16.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_finite_where_exponentials_overflow(dtype, alpha):
    x = unit(random_sets(3, 2, 8), dim=2).detach().to(dtype).requires_grad_()
    y = torch.cat([x, -x]).detach().requires_grad_()  # identical and opposite sets
    similarities = smooth_chamfer_similarity(x, y, alpha)
    assert similarities.dtype == (dtype if dtype == torch.float64 else torch.float32)
    similarities.sum().backward()
    for tensor in (similarities, x.grad, y.grad):
        assert tensor.isfinite().all()
    assert similarities.min() < -0.1
    assert (similarities[:, :3].diagonal() - 1).abs().max() < math.log(2) / alpha
    if dtype == torch.float16:
        needs_float16_on_cpu()
    for similarity in reference.EXP_AND_POOL.values():
        overflows = not similarity(x.detach(), y.detach(), alpha).isfinite().all()
        # the largest float16 is exp(11.09), the largest float32 exp(88.7), as that of bfloat16
        assert overflows == (dtype == torch.float16 or (alpha == 100 and dtype != torch.float64))


@HALF
@NAMES
def test_half_precision(name, dtype):
    function, _ = SIMILARITIES[name]
    options = {"alpha": 64.0} if name == "smooth_chamfer" else {}
    x, y = (unit(random_sets(6, k, 32, seed=k), dim=2).detach().to(dtype).requires_grad_() for k in (3, 4))
    expected = function(x.double(), y.double(), **options)
    actual = function(x, y, **options)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=0)
    upstream = upstream_like(actual)
    gradients = torch.autograd.grad(actual, (x, y), upstream)
    of_expected = torch.autograd.grad(expected, (x, y), upstream.double())
    assert [gradient.dtype for gradient in gradients] == [dtype, dtype]
    torch.testing.assert_close(gradients, of_expected, atol=1e-2, rtol=1e-2)


@HALF
@pytest.mark.parametrize("paired", [False, True], ids=["all", "paired"])
@NAMES
def test_autocast_computes_in_single_precision(name, paired, dtype):
    function, _ = SIMILARITIES[name]
    x, y = random_sets(4, 3, 6, dtype=torch.float32), random_sets(4, 2, 6, seed=1, dtype=torch.float32)
    expected = function(x, y, paired=paired)
    of_expected = torch.autograd.grad(expected.square().sum(), (x, y))
    with torch.autocast("cpu", dtype=dtype):
        actual = function(x, y, paired=paired)
        assert torch.equal(actual, expected)
        of_actual = torch.autograd.grad(actual.square().sum(), (x, y))  # backward under autocast too
    torch.testing.assert_close(of_actual, of_expected, atol=1e-6, rtol=1e-5)


def test_two_types_are_compared_in_the_larger():
    x, y = random_sets(4, 3, 6), random_sets(5, 2, 6, seed=1, dtype=torch.float16)
    value = smooth_chamfer_similarity(x, y)
    assert value.dtype == torch.float64
    value.sum().backward()
    assert (x.grad.dtype, y.grad.dtype) == (torch.float64, torch.float16)


@pytest.mark.parametrize("paired", [False, True], ids=["all", "paired"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@NAMES
def test_identical_opposite_and_zero_elements_have_finite_gradients(name, dtype, paired):
    function, _ = SIMILARITIES[name]
    ones = torch.ones(2, 3, 4)
    for x, y in ((ones, ones), (ones, -ones), (0 * ones, ones), (0 * ones, 0 * ones), (1e-7 * ones, 6e4 * ones)):
        x, y = x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()
        similarities = function(x, y, paired=paired)
        similarities.sum().backward()
        assert similarities.isfinite().all()
        for sets in (x, y):
            assert sets.grad.isfinite().all()
            assert sets.any() or not sets.grad.any()
        if not x.any() and name in ("chamfer", "mil"):
            assert not similarities.any()


@pytest.mark.parametrize("paired", [False, True], ids=["all", "paired"])
@pytest.mark.parametrize("alpha", [1.0, 100.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@NAMES
def test_not_a_number_is_never_hidden(name, bad, alpha, paired):
    function, _ = SIMILARITIES[name]
    if name.startswith("smooth_chamfer"):
        function = partial(smooth_chamfer_similarity, alpha=alpha)
    for side, masked in ((0, False), (1, False), (0, True), (1, True)):
        sets = [random_sets(4, 3, 6).detach(), random_sets(4, 2, 6, seed=1).detach()]
        sets[side][2, 1, 3] = bad
        for tensor in sets:
            tensor.requires_grad_()
        masks = {"x_mask": torch.ones(4, 3, dtype=torch.bool), "y_mask": torch.ones(4, 2, dtype=torch.bool)}
        if masked:
            masks["x_mask"][2, 0] = masks["y_mask"][2, 0] = False
        similarities = function(*sets, **(masks if masked else {}), paired=paired)
        if paired:
            bad_ones = torch.arange(4) == 2
        else:
            bad_ones = (torch.arange(4) == 2)[:, None].expand(4, 4)
            bad_ones = bad_ones.T if side else bad_ones
        assert torch.equal(similarities.isnan(), bad_ones)
        similarities.sum().backward()
        assert sets[side].grad[2, 1].isnan().any()


@pytest.mark.parametrize("shapes", [((0, 3, 4), (5, 2, 4)), ((5, 3, 4), (0, 2, 4)), ((0, 3, 4), (0, 2, 4))], ids=str)
@NAMES
def test_empty_batches(name, shapes):
    x, y = (random_sets(*shape) for shape in shapes)
    similarities = SIMILARITIES[name][0](x, y)
    assert similarities.shape == (len(x), len(y))
    similarities.sum().backward()
    assert not x.grad.any()
    assert not y.grad.any()
    if len(x) == len(y):
        assert SIMILARITIES[name][0](x, y, paired=True).shape == (0,)


@pytest.mark.parametrize("paired", [False, True], ids=["all", "paired"])
@pytest.mark.parametrize("sizes", [(0, 2), (2, 0), (0, 0)], ids=str)
@NAMES
def test_sets_without_elements_are_similar_to_nothing(name, sizes, paired):
    x, y = (random_sets(3, size, 4) for size in sizes)
    similarities = SIMILARITIES[name][0](x, y, paired=paired)
    assert torch.equal(similarities, torch.zeros_like(similarities))
    assert similarities.shape == ((3,) if paired else (3, 3))
    similarities.sum().backward()
    assert not x.grad.any()
    assert not y.grad.any()


@NAMES
def test_nothing_is_kept_without_gradients(name):
    function, _ = SIMILARITIES[name]
    x, y = random_sets(4, 3, 6), random_sets(5, 2, 6, seed=1)
    expected = function(x, y)
    with torch.no_grad():
        without = function(x, y)
    assert torch.equal(without, expected)
    assert not without.requires_grad
    long_x, long_y = random_sets(3, 1, 1000), random_sets(30, 1, 1000, seed=1)
    with torch.no_grad():
        assert extra_bytes(lambda: function(long_x, long_y)) < 30_000  # y has 240,000


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_callers(backend):
    torch.compiler.reset()
    x, y = random_sets(4, 3, 6), random_sets(4, 2, 6, seed=1)

    def caller(x, y):
        similarities = smooth_chamfer_similarity(2 * x, y), match_probability(x, 2 * y, x.sum()), mil_similarity(x, y)
        paired = chamfer_similarity(x, 3 * y, paired=True)
        return sum(similarity.square().sum() for similarity in (*similarities, paired))

    actual, expected = (function(x, y) for function in (torch.compile(caller, backend=backend), caller))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, (x, y)), torch.autograd.grad(expected, (x, y)))


def test_tiles_are_not_compiled():
    """They would be unrolled; of sets of one, nothing else in them would stop the compiler."""
    torch.compiler.reset()
    compiled = []

    def backend(graph, inputs):
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        compiled.extend(str(node.target) for part in parts for node in part.graph.nodes)
        return graph.forward

    x, y = random_sets(4, 1, 6), random_sets(5, 1, 6, seed=1)
    torch.compile(lambda x, y: mil_similarity(x.square(), y).cos(), backend=backend)(x, y)
    assert any("square" in name for name in compiled)
    assert any("cos" in name for name in compiled)
    assert not any("amax" in name for name in compiled), compiled


@pytest.mark.parametrize("masked", [False, True], ids=["all elements", "masked"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalised here", "unit vectors"])
@NAMES
def test_no_tensor_is_larger_than_a_tile_or_the_inputs(monkeypatch, name, normalize, masked):
    monkeypatch.setattr(set_similarity, "CPU_TILE", 2**12)
    monkeypatch.setattr(set_similarity, "LEAST_ROWS", 16)
    x, y = random_sets(80, 4, 24, dtype=torch.float32), random_sets(90, 3, 24, seed=1, dtype=torch.float32)
    masks = {"x_mask": random_mask(x, 2), "y_mask": random_mask(y, 3)} if masked else {}
    with LargestTensor() as largest:
        SIMILARITIES[name][0](x, y, normalize=normalize, **masks).sum().backward()
    assert largest.elements == max(x.numel(), 80 * 90)


def test_a_fifth_of_the_memory_of_exponentials_and_pooling():
    x, y = (
        unit(random_sets(count, 4, 1024, dtype=torch.float32), dim=2).detach().requires_grad_() for count in (200, 1000)
    )
    upstream = torch.ones(200, 1000)

    def bytes_of(similarity):
        return extra_bytes(
            lambda: torch.autograd.grad(similarity(x, y), (x, y), upstream),
            kept=upstream.nbytes + x.nbytes + y.nbytes,
        )

    theirs = [bytes_of(similarity) for similarity in reference.EXP_AND_POOL.values()]
    assert min(theirs) > 1.5e7
    for normalize in (True, False):
        ours = bytes_of(partial(smooth_chamfer_similarity, normalize=normalize))
        assert ours < min(theirs) / 5


@pytest.mark.slow
def test_memory_of_five_thousand_images_and_their_captions():
    """20,000 times 100,000 cosines are 8 GB."""
    x, y = torch.randn(5_000, 4, 1024), torch.randn(25_000, 4, 1024)
    with torch.no_grad():
        extra = extra_bytes(lambda: smooth_chamfer_similarity(x, y), kept=4 * 5_000 * 25_000)
    assert extra < 1e8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": torch.ones(4, 6)}, r"x and y must have the shapes \(A, K1, D\) .*, got \(4, 6\) and \(4, 2, 6\)"),
        ({"y": torch.ones(4, 2, 5)}, r"x and y must have the shapes .*, got \(4, 3, 6\) and \(4, 2, 5\)"),
        ({"y": torch.ones(4, 2, 6, device="meta")}, "y must be on the device of x, cpu, got meta"),
        ({"y": torch.ones(5, 2, 6), "paired": True}, r"paired .* equally many sets, got \(4, 3, 6\) and \(5, 2, 6\)"),
        ({"x_mask": torch.ones(4, 3)}, r"x_mask must be a bool tensor of shape \(4, 3\), got torch.float32 of"),
        ({"y_mask": torch.ones(4, 3).bool()}, r"y_mask must be a bool .* \(4, 2\), got torch.bool of shape \(4, 3\)"),
        ({"y_mask": torch.ones(4, 2, device="meta").bool()}, "y_mask must be on the device of y, cpu, got meta"),
    ],
)
@NAMES
def test_wrong_sets_and_masks(name, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        SIMILARITIES[name][0](**({"x": torch.ones(4, 3, 6), "y": torch.ones(4, 2, 6)} | options))


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan])
def test_wrong_alpha(alpha):
    with pytest.raises(ValueError, match=r"^alpha must be > 0, got"):
        smooth_chamfer_similarity(torch.ones(4, 3, 6), torch.ones(4, 2, 6), alpha)


@pytest.mark.parametrize("name", ["scale", "shift"])
def test_several_scales(name):
    with pytest.raises(ValueError, match=rf"^{name} must have one element, got shape \(2,\)"):
        match_probability(torch.ones(4, 3, 6), torch.ones(4, 2, 6), **{name: torch.ones(2)})


@pytest.mark.parametrize("paired", [False, True])
def test_second_derivatives_are_refused_not_wrong(paired):
    """A sum's upstream gradient is a constant, of which torch would take the second derivatives for zero."""
    x, y = (torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    total = smooth_chamfer_similarity(x, y, paired=paired).sum()
    with pytest.raises(RuntimeError, match="no second derivatives: leave out create_graph=True"):
        torch.autograd.grad(total, (x, y), create_graph=True)
