import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.functional.test_pairs import EMPTY, diagonal_masks, label_masks, pairs, similarities_like
from tests.memory import LargestTensor
from tests.reference import losses as reference
from vl_plugins.functional import Polynomial, soft_margin, triplet_hn_loss, unified_loss, vlc_loss

POSITIVES = torch.eye(7, dtype=torch.bool)
MASKS = (POSITIVES, ~POSITIVES)


def random_similarities(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(7, 7, dtype=torch.float64, generator=generator) - 1).requires_grad_()


def value_and_gradient(function, *leaves):
    value = function()
    return value, *torch.autograd.grad(3 * value, leaves)


def test_unified_is_cross_entropy_with_the_margin_on_negatives():
    similarities = random_similarities()
    target = torch.arange(7)

    def expected():
        logits = 10 * (similarities + 0.2 * MASKS[1].double())
        return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 10

    torch.testing.assert_close(
        value_and_gradient(lambda: unified_loss(similarities, *MASKS, margin=0.2, scale=10), similarities),
        value_and_gradient(expected, similarities),
        atol=1e-12,
        rtol=1e-10,
    )


def test_scaled_unified_without_margin_is_the_sum_of_the_cross_entropies():
    similarities = random_similarities()
    target = torch.arange(7)

    def expected():
        logits = 50 * similarities
        return cross_entropy(logits, target, reduction="sum") + cross_entropy(logits.T, target, reduction="sum")

    torch.testing.assert_close(
        value_and_gradient(lambda: 50 * unified_loss(similarities, *MASKS, 0.0, 50, reduction="sum"), similarities),
        value_and_gradient(expected, similarities),
        atol=1e-10,
        rtol=1e-10,
    )


def test_vlc_is_scaled_unified_without_margin():
    similarities = random_similarities()
    torch.testing.assert_close(
        value_and_gradient(lambda: vlc_loss(similarities, *MASKS, scale=50), similarities),
        value_and_gradient(lambda: 50 * unified_loss(similarities, *MASKS, margin=0.0, scale=50), similarities),
    )


def test_unified_at_a_large_scale_is_triplet_hn():
    similarities = random_similarities()
    unified = unified_loss(similarities, *MASKS, margin=0.2, scale=1e4, reduction="none")
    triplet = triplet_hn_loss(similarities, *MASKS, margin=0.2, reduction="none")
    assert triplet.max() > 0.5
    torch.testing.assert_close(unified, triplet, atol=1e-3, rtol=0)
    upstream = torch.arange(1.0, 8.0, dtype=torch.float64)
    gradients = [torch.autograd.grad(values, similarities, upstream)[0] for values in (unified, triplet)]
    assert (gradients[1] != 0).sum() > 7
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("loss", [unified_loss, vlc_loss])
def test_extreme_scale_and_similarities_stay_finite(loss, sign, dtype):
    similarities = (sign * (2 * torch.eye(7) - 1)).to(dtype).requires_grad_()
    value = loss(similarities, *MASKS, scale=1e4)
    value.backward()
    assert value.isfinite()
    assert similarities.grad.isfinite().all()
    if sign > 0:
        assert value == 0
    else:
        assert value > 4


def test_softplus_is_exact_where_torch_rounds_it_to_the_identity():
    # one negative, scale * difference = 21: log(1 + e^21) = 21 + log(1 + e^-21)
    similarities = torch.tensor([[0.0, 2.1]], dtype=torch.float64)
    positive_mask = torch.tensor([[True, False]])
    value = vlc_loss(similarities, positive_mask, ~positive_mask, scale=10, symmetric=False)
    assert value.item() == pytest.approx(21 + 7.582560422162385e-10, abs=1e-12)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anchor_without_negatives_is_exactly_zero_beside_others():
    similarities = random_similarities()
    negative_mask = MASKS[1].clone()
    negative_mask[2] = False
    with torch.autograd.detect_anomaly(check_nan=True):
        values = unified_loss(similarities, POSITIVES, negative_mask, symmetric=False, reduction="none")
        values.sum().backward()
    assert values[2] == 0
    assert torch.equal(similarities.grad[2], torch.zeros(7, dtype=torch.float64))
    assert similarities.grad.isfinite().all()
    assert (values > 0).sum() == 6


@pytest.mark.parametrize("loss", [unified_loss, vlc_loss])
def test_other_positives_are_not_negatives(loss):
    similarities = torch.tensor([[0.1, 0.9, 0.3]], dtype=torch.float64)
    positive_mask = torch.tensor([[True, True, False]])
    with_both = loss(similarities, positive_mask, ~positive_mask, symmetric=False, reduction="none")
    alone = torch.tensor([[True, False, False]])
    assert torch.equal(with_both[:1], loss(similarities, alone, ~positive_mask, symmetric=False, reduction="none"))


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-D", "1-D"])
@pytest.mark.parametrize("loss", [unified_loss, vlc_loss])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_learned_scale_receives_its_gradient(loss, shape, reduction):
    similarities = random_similarities()
    scale = torch.full(shape, 10.0, dtype=torch.float64, requires_grad=True)
    values = loss(similarities, *MASKS, scale=scale, reduction=reduction)
    assert values.shape == (() if reduction == "mean" else (7,))
    values.sum().backward()

    step = 1e-5
    above, below = (loss(similarities, *MASKS, scale=10 + delta, reduction=reduction).sum() for delta in (step, -step))
    torch.testing.assert_close(values, loss(similarities, *MASKS, scale=10, reduction=reduction))
    assert scale.grad.item() == pytest.approx(((above - below) / (2 * step)).item(), rel=1e-6)


@pytest.mark.parametrize("loss", [unified_loss, vlc_loss])
def test_learned_scale_stays_in_the_graph_without_pairs(loss):
    nothing = torch.zeros(7, 7, dtype=torch.bool)
    scale = torch.tensor(10.0, requires_grad=True)
    loss(random_similarities(), nothing, nothing, scale=scale).backward()
    assert scale.grad == 0


def test_scale_of_several_elements():
    with pytest.raises(ValueError, match=r"scale must have one element, got shape \(2,\)"):
        unified_loss(random_similarities(), *MASKS, scale=torch.ones(2))


SSP = ([0.5, -0.7, 0.2], [0.03, 0.9])
RSP = [0.1, 0.8, 0.5, -0.2]


def leaf(shape, dtype, low, high, seed):
    generator = torch.Generator().manual_seed(seed)
    values = low + (high - low) * torch.rand(shape, dtype=torch.float64, generator=generator)
    return values.to(dtype).requires_grad_()


def number(value):
    return lambda row, column, similarity: (value, 0.0)


def constant(tensor):
    table = tensor.tolist()
    return lambda row, column, similarity: (table[row][column], 0.0)


def of_similarity(coefficients):
    function = reference.polynomial(coefficients)
    return lambda row, column, similarity: function(similarity)


def rising_margin(similarities, positive_mask, negative_mask):
    return 0.1 + 0.3 * similarities


def margin_of_crowded_anchors(similarities, positive_mask, negative_mask):
    return 0.05 * negative_mask.sum(dim=1).double()


def variant(name, masks, dtype):
    """Return the options of ``unified_loss``, those of the loops, and the names of the derivatives by each leaf."""
    shape = masks[0].shape
    weights = leaf(shape, dtype, 0.5, 1.5, seed=1)
    weights_of_rows = leaf(shape[:1], dtype, 0.5, 1.5, seed=4)
    other_weights = leaf(shape, dtype, -0.5, 2.0, seed=2)
    margins = leaf(shape, dtype, 0.0, 0.5, seed=3)
    margin_of_row = leaf(shape[:1], dtype, 0.0, 0.5, seed=4)
    margin_of_all = leaf((), dtype, 0.1, 0.4, seed=5)
    both = ("positive weight", "negative weight")
    plain = {"margin": number(0.2), "weights": (number(1.0), number(1.0)), "relative": lambda x: (x, 1.0)}
    options, loops, leaves = {
        "weights": ({"weights": weights}, {"weights": (constant(weights),) * 2}, [(weights, both)]),
        "weights of anchors": (
            {"weights": weights_of_rows},
            {"weights": (constant(weights_of_rows[:, None].expand(shape)),) * 2},
            [(weights_of_rows, both)],
        ),
        "two weights": (
            {"weights": (weights, other_weights)},
            {"weights": (constant(weights), constant(other_weights))},
            [(weights, both[:1]), (other_weights, both[1:])],
        ),
        "function as weights": ({"weights": Polynomial(SSP[0])}, {"weights": (of_similarity(SSP[0]),) * 2}, []),
        "SSP": ({"weights": [Polynomial(c) for c in SSP]}, {"weights": [of_similarity(c) for c in SSP]}, []),
        "detached function and tensor": (
            {"weights": (lambda s: 1 + s.detach(), weights)},
            {"weights": (lambda r, c, s: (1 + s, 0.0), constant(weights))},
            [(weights, both[1:])],
        ),
        "one margin": (
            {"margin": margin_of_all},
            {"margin": number(margin_of_all.item())},
            [(margin_of_all, "margin")],
        ),
        "margin of anchors": (
            {"margin": margin_of_row},
            {"margin": constant(margin_of_row[:, None].expand(shape))},
            [(margin_of_row, "margin")],
        ),
        "margin of pairs": ({"margin": margins}, {"margin": constant(margins)}, [(margins, "margin")]),
        "function as margin": ({"margin": rising_margin}, {"margin": of_similarity([0.1, 0.3])}, []),
        "function of the masks": (
            {"margin": margin_of_crowded_anchors},
            {"margin": lambda r, c, s: (0.05 * sum(row == r for row, _ in pairs(masks[1])), 0.0)},
            [],
        ),
        "RSP": ({"relative": Polynomial(RSP)}, {"relative": reference.polynomial(RSP)}, []),
        "everything": (
            {"weights": (weights, Polynomial(SSP[1])), "margin": margin_of_row, "relative": Polynomial(RSP)},
            {
                "weights": (constant(weights), of_similarity(SSP[1])),
                "margin": constant(margin_of_row[:, None].expand(shape)),
                "relative": reference.polynomial(RSP),
            },
            [(weights, both[:1]), (margin_of_row, "margin")],
        ),
    }[name]
    return options, plain | loops, leaves


VARIANTS = (
    "weights",
    "weights of anchors",
    "two weights",
    "function as weights",
    "SSP",
    "detached function and tensor",
    "one margin",
    "margin of anchors",
    "margin of pairs",
    "function as margin",
    "function of the masks",
    "RSP",
    "everything",
)
ALL_VARIANTS = pytest.mark.parametrize("name", VARIANTS)
SYMMETRIC = pytest.mark.parametrize("symmetric", [True, False], ids=["both directions", "rows only"])
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def gradient_of_loops(derivatives, upstream, names, shape):
    """Return (A, C), the sum over the losses of upstream * derivative for the derivatives with one of the names."""
    gradient = torch.zeros(shape, dtype=torch.float64)
    for pair, of_pair in derivatives.items():
        for (name, row, column), derivative in of_pair.items():
            if name in names:
                gradient[row, column] += upstream[pair] * derivative
    return gradient


def masks_with_pairs_in_both(rows, columns):
    positive_mask, negative_mask = label_masks(rows, columns)
    return positive_mask, negative_mask | (positive_mask & (torch.arange(columns) % 2 == 0))


@ALL_VARIANTS
@SYMMETRIC
def test_variants_equal_the_loops(name, symmetric):
    # one positive per row; several, in rows and in columns, beside rows and columns without some
    for masks in (diagonal_masks(6), label_masks(5, 9), label_masks(9, 5), masks_with_pairs_in_both(9, 5)):
        for dtype, tolerance in TOLERANCE.items():
            options, loops, leaves = variant(name, masks, dtype)
            similarities = similarities_like(masks[0], dtype)
            expected, derivatives = reference.unified_variants(
                similarities.tolist(), *map(pairs, masks), symmetric=symmetric, scale=5.0, **loops
            )
            assert len(expected) > 5
            upstream = {pair: 0.5 + 0.25 * k for k, pair in enumerate(expected)}

            actual = unified_loss(similarities, *masks, scale=5.0, symmetric=symmetric, reduction="none", **options)
            gradients = torch.autograd.grad(
                actual,
                [similarities, *(tensor for tensor, _ in leaves)],
                similarities.new_tensor(list(upstream.values())),
            )

            assert actual.dtype == dtype
            close = {"atol": tolerance, "rtol": tolerance, "check_dtype": False}
            torch.testing.assert_close(actual, torch.tensor(list(expected.values()), dtype=torch.float64), **close)
            for gradient, (tensor, names) in zip(gradients, [(similarities, "similarity"), *leaves], strict=True):
                of_pairs = gradient_of_loops(derivatives, upstream, names, similarities.shape)
                assert of_pairs.abs().max() > 0.01
                torch.testing.assert_close(gradient, of_pairs.reshape(*tensor.shape, -1).sum(dim=-1), **close)


def test_one_weight_margin_or_function_that_changes_nothing_gives_the_same_bits():
    masks = label_masks(9, 5)
    for dtype in TOLERANCE:
        similarities = similarities_like(masks[0], dtype)
        ones = torch.ones_like(similarities)
        expected = value_and_gradient(lambda: unified_loss(similarities, *masks), similarities)  # noqa: B023
        for same in (
            {"weights": ones},
            {"weights": (Polynomial([1]), ones)},
            {"margin": 0.2 * ones},
            {"margin": 0.2 * ones[:, 0]},
            {"margin": 0.2 * ones[0, 0]},
            {"margin": lambda *pairs: 0.2},
        ):
            actual = value_and_gradient(lambda: unified_loss(similarities, *masks, **same), similarities)  # noqa: B023
            assert all(map(torch.equal, actual, expected)), same


@pytest.mark.parametrize("relative", [lambda x: x, Polynomial([0, 1])], ids=["function", "polynomial"])
@SYMMETRIC
def test_identity_of_the_relative_similarities_is_the_plain_loss(relative, symmetric):
    masks = masks_with_pairs_in_both(9, 5)
    for dtype, tolerance in TOLERANCE.items():
        similarities = similarities_like(masks[0], dtype)
        values = [
            unified_loss(similarities, *masks, symmetric=symmetric, relative=function, reduction="none")
            for function in (relative, None)
        ]
        torch.testing.assert_close(*values, atol=tolerance, rtol=tolerance)
        gradients = [torch.autograd.grad(value.square().sum(), similarities)[0] for value in values]
        torch.testing.assert_close(*gradients, atol=tolerance, rtol=tolerance)


def test_weighted_with_margins_is_the_cross_entropy_of_weighted_logits():
    similarities = random_similarities()
    weights = leaf((7, 7), torch.float64, 0.5, 1.5, seed=1)
    margins = leaf((7,), torch.float64, 0.0, 0.5, seed=2)
    target = torch.arange(7)

    def expected():
        by_row = 10 * (similarities * weights + margins[:, None] * MASKS[1])
        by_column = 10 * (similarities * weights + margins * MASKS[1])
        return (cross_entropy(by_row, target) + cross_entropy(by_column.T, target)) / 10

    leaves = (similarities, weights, margins)
    torch.testing.assert_close(
        value_and_gradient(
            lambda: unified_loss(similarities, *MASKS, margin=margins, scale=10, weights=weights), *leaves
        ),
        value_and_gradient(expected, *leaves),
        atol=1e-12,
        rtol=1e-10,
    )


def test_variants_at_a_large_scale_are_triplet_hn_of_the_same():
    similarities = random_similarities()
    positive_weights, negative_weights = (leaf((7, 7), torch.float64, 0.5, 1.5, seed) for seed in (1, 2))
    margins = leaf((7,), torch.float64, 0.0, 0.5, seed=3)
    weighted = torch.where(POSITIVES, positive_weights, negative_weights) * similarities
    upstream = torch.arange(1.0, 8.0, dtype=torch.float64)
    leaves = (similarities, positive_weights, negative_weights, margins)

    def hinges(of_difference):
        of_pairs = weighted.diag()
        by_row, by_column = (
            of_difference(matrix - of_pairs[:, None]).masked_fill(POSITIVES, -9).max(dim=1).values
            for matrix in (weighted, weighted.T)
        )
        return (by_row + margins).relu() + (by_column + margins).relu()

    weights = {"weights": (positive_weights, negative_weights)}
    for relative in (None, Polynomial([0, 0.8, 0.3])):
        values = unified_loss(similarities, *MASKS, margins, 1e5, relative=relative, reduction="none", **weights)
        expected = hinges(relative or torch.clone)
        assert (expected > 0.1).sum() > 3
        torch.testing.assert_close(values, expected, atol=1e-4, rtol=0)
        gradients = [torch.autograd.grad(v, leaves, upstream, retain_graph=True) for v in (values, expected)]
        torch.testing.assert_close(*gradients, atol=1e-6, rtol=0)

    margin = 0.2 * torch.ones(7)
    triplet = triplet_hn_loss(weighted, *MASKS, margin=0.2, reduction="none")
    weighted_unified = unified_loss(similarities, *MASKS, margin, 1e4, reduction="none", **weights)
    torch.testing.assert_close(weighted_unified, triplet, atol=1e-3, rtol=0)


def test_margin_of_a_row_belongs_to_its_pairs_in_both_directions():
    # Only the column of the pair (1, 1) has a negative, and the row's own margin counts there.
    similarities = torch.tensor([[0.5, 0.4], [0.5, 0.5]], dtype=torch.float64)
    negative_mask = torch.tensor([[False, True], [False, False]])
    positive_mask = torch.tensor([[False, False], [False, True]])
    for margin in (torch.tensor([0.0, 0.3]), torch.tensor([[9.0, 9.0], [9.0, 0.3]])):
        value = unified_loss(similarities, positive_mask, negative_mask, margin=margin, scale=1e4)
        assert value.item() == pytest.approx(0.2, abs=1e-6)


def test_functions_are_called_once_with_single_precision():
    seen = []

    def weights(similarities):
        seen.append(similarities)
        return torch.ones_like(similarities)

    def margin(similarities, positive_mask, negative_mask):
        seen.append(similarities)
        assert torch.equal(positive_mask, masks[0])
        assert torch.equal(negative_mask, masks[1])
        return 0.2

    masks = label_masks(5, 9)
    unified_loss(similarities_like(masks[0], torch.float16), *masks, weights=weights, margin=margin)
    assert [(tensor.shape, tensor.dtype) for tensor in seen] == [((5, 9), torch.float32)] * 2


@ALL_VARIANTS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_variants_are_computed_in_single(name, dtype):
    masks = label_masks(5, 9)
    results = []
    for factory in (lambda tensor: tensor, lambda tensor: tensor.detach().float().requires_grad_()):
        options, _, leaves = variant(name, masks, dtype)
        twins = {tensor: factory(tensor) for tensor, _ in leaves}
        similarities = factory(similarities_like(masks[0], dtype))
        options = {
            key: tuple(twins.get(item, item) for item in option)
            if isinstance(option, (tuple, list))
            else twins.get(option, option)
            for key, option in options.items()
        }
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = unified_loss(similarities, *masks, **options)
        results.append((value, *torch.autograd.grad(value, [similarities, *twins.values()])))
    half, single = results
    assert half[0].dtype == single[0].dtype == torch.float32
    for of_half, of_single in zip(half[1:], single[1:], strict=True):
        assert of_half.dtype == dtype
        assert torch.equal(of_half, of_single.to(dtype))
    assert torch.equal(half[0], single[0])


def test_results_of_functions_in_half_precision_are_used_in_single():
    masks = label_masks(5, 9)
    similarities = similarities_like(masks[0], torch.float32)
    for option, half in (
        ("weights", lambda s: s.half()),
        ("relative", lambda x: x.half()),
        ("margin", lambda s, *masks: s.half()),
    ):
        value = unified_loss(similarities, *masks, **{option: half})
        single = unified_loss(similarities, *masks, **{option: lambda *arguments: half(*arguments).float()})  # noqa: B023
        assert value.dtype == torch.float32
        assert torch.equal(value, single)


@ALL_VARIANTS
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", EMPTY)
def test_variants_with_nothing_to_compare_are_zero_with_zero_gradients(name, case, reduction):
    masks = EMPTY[case]
    options, _, leaves = variant(name, masks, torch.float32)
    similarities = similarities_like(masks[0], torch.float32)
    value = unified_loss(similarities, *masks, reduction=reduction, **options)
    value.backward()
    assert value == 0
    for tensor in (similarities, *(tensor for tensor, _ in leaves)):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@ALL_VARIANTS
def test_anchor_without_negatives_is_exactly_zero_beside_others_in_the_variants(name):
    positive_mask, negative_mask = POSITIVES, MASKS[1].clone()
    negative_mask[2] = False
    for dtype in TOLERANCE:
        options, _, leaves = variant(name, (positive_mask, negative_mask), dtype)
        similarities = similarities_like(positive_mask, dtype)
        with torch.autograd.detect_anomaly(check_nan=True):
            values = unified_loss(
                similarities, positive_mask, negative_mask, symmetric=False, reduction="none", **options
            )
            values.sum().backward()
        assert values[2] == 0
        assert (values > 0).sum() == 6
        for tensor in (similarities, *(tensor for tensor, _ in leaves)):
            assert tensor.grad.isfinite().all()
            if tensor.ndim > 0:
                assert tensor.grad[2].count_nonzero() == 0


@ALL_VARIANTS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_a_number_is_never_hidden_by_the_variants(name, bad):
    for masks in (label_masks(5, 9), *list(EMPTY.values())[:4]):
        options, _, _ = variant(name, masks, torch.float32)
        for position in range(masks[0].numel()):
            similarities = similarities_like(masks[0], torch.float32).detach()
            similarities.view(-1)[position] = bad
            similarities.requires_grad_()
            value = unified_loss(similarities, *masks, **options)
            value.backward()
            assert value.isnan()
            assert similarities.grad.isnan().any()


@SYMMETRIC
@pytest.mark.parametrize("relative", [None, Polynomial(RSP)], ids=["plain", "RSP"])
@pytest.mark.parametrize("option", ["weights", "positive weights", "negative weights", "margin", "margin of anchors"])
def test_nan_of_weights_and_margins_comes_out_exactly_where_it_is_read(option, relative, symmetric):
    positive_mask, negative_mask = label_masks(5, 9)
    reads = {
        "weights": positive_mask | negative_mask,
        "positive weights": positive_mask,
        "negative weights": negative_mask,
        "margin": positive_mask,
        "margin of anchors": positive_mask.any(dim=1),
    }[option]
    assert reads.any()
    assert not reads.all()
    similarities = similarities_like(positive_mask)
    for position in reads.new_ones(reads.shape).nonzero().tolist():
        tensor = torch.ones(reads.shape, dtype=torch.float64)
        tensor[tuple(position)] = float("nan")
        tensor.requires_grad_()
        ones = torch.ones_like(similarities)
        options = {
            "weights": {"weights": tensor},
            "positive weights": {"weights": (tensor, ones)},
            "negative weights": {"weights": (ones, tensor)},
        }.get(option, {"margin": tensor})
        value = unified_loss(
            similarities, positive_mask, negative_mask, symmetric=symmetric, relative=relative, **options
        )
        gradients = torch.autograd.grad(value, (similarities, tensor))
        assert value.isnan() == reads[tuple(position)]
        for gradient in gradients:
            assert gradient.isnan().any() == reads[tuple(position)]


def test_nan_of_a_function_of_relative_similarities_comes_out():
    similarities = random_similarities()
    assert unified_loss(similarities, *MASKS, relative=lambda x: x.log()).isnan()


@ALL_VARIANTS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_scale_and_similarities_stay_finite_in_the_variants(name, sign, dtype):
    options, _, leaves = variant(name, MASKS, dtype)
    similarities = (sign * (2 * torch.eye(7) - 1)).to(dtype).requires_grad_()
    value = unified_loss(similarities, *MASKS, scale=1e4, **options)
    value.backward()
    assert value.isfinite()
    for tensor in (similarities, *(tensor for tensor, _ in leaves)):
        assert tensor.grad.isfinite().all()


@ALL_VARIANTS
def test_learned_scale_receives_its_gradient_in_the_variants(name):
    masks = label_masks(5, 9)
    options, _, _ = variant(name, masks, torch.float64)
    similarities = similarities_like(masks[0])

    def loss(scale):
        return unified_loss(similarities, *masks, scale=scale, **options)

    scale = torch.tensor([10.0], dtype=torch.float64, requires_grad=True)
    value = loss(scale)
    value.backward()
    torch.testing.assert_close(value, loss(10))
    step = 1e-5
    assert abs(scale.grad.item()) > 1e-4
    assert scale.grad.item() == pytest.approx(((loss(10 + step) - loss(10 - step)) / (2 * step)).item(), rel=1e-5)


@ALL_VARIANTS
def test_non_contiguous_input_of_the_variants(name):
    masks = label_masks(5, 9)
    options, _, _ = variant(name, masks, torch.float64)
    similarities = similarities_like(masks[0])

    def strided(tensor):
        return torch.stack([tensor, tensor], dim=-1)[..., 0] if isinstance(tensor, torch.Tensor) else tensor

    strided_options = {
        key: tuple(map(strided, option)) if isinstance(option, (tuple, list)) else strided(option)
        for key, option in options.items()
    }
    actual = unified_loss(strided(similarities), *map(strided, masks), **strided_options)
    assert torch.equal(actual, unified_loss(similarities, *masks, **options))


@ALL_VARIANTS
def test_only_relative_similarities_need_one_row_of_candidates_per_positive_pair(name):
    captions = 8
    positive_mask = torch.arange(10)[:, None] == torch.arange(10 * captions) // captions
    masks = (positive_mask, ~positive_mask)
    similarities = similarities_like(positive_mask)
    options, _, _ = variant(name, masks, torch.float64)
    with LargestTensor() as largest:
        unified_loss(similarities, *masks, **options).backward()
    assert largest.elements == similarities.numel() * (captions if "relative" in options else 1)


SLOW_VARIANTS = [pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*SLOW_VARIANTS[:-1], VARIANTS[-1]])
def test_compiled_variants_have_the_same_values(name, backend):
    torch._dynamo.reset()
    masks = label_masks(5, 9)
    similarities = similarities_like(masks[0])
    options, _, _ = variant(name, masks, torch.float64)
    compiled = torch.compile(unified_loss, backend=backend)
    torch.testing.assert_close(
        value_and_gradient(lambda: compiled(similarities, *masks, **options), similarities),
        value_and_gradient(lambda: unified_loss(similarities, *masks, **options), similarities),
    )


def test_soft_margin_of_confidences():
    similarities = random_similarities()
    confidence = torch.tensor([0.0, 1.0, 0.5, 1.0, 0.0, 0.25, 1.0], dtype=torch.float64)
    values = unified_loss(similarities, *MASKS, margin=soft_margin(confidence), reduction="none")
    certain = unified_loss(similarities, *MASKS, margin=0.2, reduction="none")
    without = unified_loss(similarities, *MASKS, margin=0.0, reduction="none")
    torch.testing.assert_close(values[confidence == 1], certain[confidence == 1])
    assert torch.equal(values[confidence == 0], without[confidence == 0])


ON_ANOTHER_DEVICE = torch.ones(7, 7, device="meta")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"margin": torch.ones(6)}, r"margin must have the shape \(\), \(7,\) or \(7, 7\), got \(6,\)"),
        ({"margin": torch.ones(7, 1)}, r"margin must have the shape .*, got \(7, 1\)"),
        ({"margin": torch.ones(7, 7, 1)}, r"margin must have the shape .*, got \(7, 7, 1\)"),
        ({"margin": lambda s, p, n: torch.ones(8)}, r"margin must have the shape .*, got \(8,\)"),
        ({"margin": ON_ANOTHER_DEVICE}, "margin must have the device cpu, got meta"),
        (
            {"margin": lambda s, p, n: None},
            "margin must be a number, a tensor or a function that returns one, got None",
        ),
        ({"margin": [0.1] * 7}, r"margin must be a number, a tensor or a function .*, got \[0.1, "),
        ({"weights": torch.ones(6)}, r"weights must have the shape \(7,\), got \(6,\)"),
        ({"weights": lambda s: s[:6]}, r"weights must have the shape \(7, 7\), got \(6, 7\)"),
        ({"weights": 2.0}, "weights must be a tensor or a function that returns one, got 2.0"),
        ({"weights": lambda s: 2.0}, "weights must be a tensor or a function that returns one, got 2.0"),
        ({"weights": ON_ANOTHER_DEVICE}, "weights must have the device cpu, got meta"),
        ({"weights": (torch.ones(7, 7),)}, "weights must be one or a pair, for positives and negatives, got 1"),
        (
            {"weights": (torch.ones(6), torch.ones(7, 7))},
            r"weights of the positives must have the shape \(7,\), got \(6,\)",
        ),
        (
            {"weights": (torch.ones(7, 7), torch.ones(7, 6))},
            r"weights of the negatives must have the shape \(7, 7\), got \(7, 6\)",
        ),
        ({"relative": lambda x: x.sum()}, r"relative similarities must have the shape \(7, 7\), got \(\)"),
        ({"relative": lambda x: None}, "relative similarities must be a tensor or a function .*, got None"),
    ],
)
def test_wrong_margins_weights_and_functions(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        unified_loss(random_similarities(), *MASKS, **options)


@ALL_VARIANTS
def test_wrong_masks_of_the_variants(name):
    options, _, _ = variant(name, MASKS, torch.float64)
    with pytest.raises(ValueError, match=r"^negative_mask must have the shape \(7, 7\), got \(7, 6\)"):
        unified_loss(random_similarities(), POSITIVES, MASKS[1][:, :6], **options)
    with pytest.raises(ValueError, match=r"^similarities must have the shape \(anchors, candidates\), got \(7,\)"):
        unified_loss(random_similarities()[0], *MASKS, **options)


def test_margin_of_one_number_may_be_on_another_device():
    # As torch has it for the operands of an operation.
    similarities = torch.rand(7, 7, device="meta")
    masks = [mask.to("meta") for mask in MASKS]
    with pytest.raises(NotImplementedError, match="nonzero"):  # the checks are passed; the rest needs real numbers
        unified_loss(similarities, *masks, margin=torch.tensor(0.2))
