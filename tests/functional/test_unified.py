import itertools
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.helpers.pairs import (
    EMPTY,
    diagonal_masks,
    index_pairs,
    label_masks,
    similarities_like,
    upstream_like,
    value_and_gradients,
)
from tests.helpers.seeds import first_that
from tests.helpers.unified_variants import VARIANTS, gradient_of_loops, leaf, variant
from tests.reference import losses as reference
from vl_plugins.functional import triplet_hn_loss, unified_loss, vlc_loss
from vl_plugins.functional.unified import unified_pair_losses

MASKS = diagonal_masks(7)
ALL_VARIANTS = pytest.mark.parametrize("name", VARIANTS)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def random_similarities():
    return similarities_like(MASKS[0])


def test_weighted_with_margins_is_the_cross_entropy_of_weighted_logits():
    similarities = random_similarities()
    weights = leaf((7, 7), torch.float64, 0.5, 1.5, seed=1)
    margins = leaf((7,), torch.float64, 0.0, 0.5, seed=2)
    leaves = similarities, weights, margins
    by_row = 10 * (similarities * weights + margins[:, None] * MASKS[1])
    by_column = 10 * (similarities * weights + margins * MASKS[1])
    target = torch.arange(7)
    expected = (cross_entropy(by_row, target) + cross_entropy(by_column.T, target)) / 10
    actual = unified_loss(similarities, *MASKS, margin=margins, scale=10, weights=weights)
    torch.testing.assert_close(value_and_gradients(actual, leaves), value_and_gradients(expected, leaves))


def test_vlc_is_the_sum_of_the_cross_entropies_and_scaled_unified_without_margin():
    similarities, target = random_similarities(), torch.arange(7)
    expected = sum(cross_entropy(50 * logits, target) for logits in (similarities, similarities.T))
    for actual in (
        vlc_loss(similarities, *MASKS, scale=50),
        50 * unified_loss(similarities, *MASKS, margin=0.0, scale=50),
    ):
        torch.testing.assert_close(
            value_and_gradients(actual, [similarities]), value_and_gradients(expected, [similarities])
        )


def is_far_from_ties(similarities, margin=0.2, gap=1e-3):
    """Whether the hardest negatives, and which pairs violate the margin, are clear."""
    hardest = [side.masked_fill(MASKS[0], -2).topk(2, dim=1).values for side in (similarities, similarities.T)]
    violations = [values[:, 0] - similarities.diagonal() + margin for values in hardest]
    return all((values[:, 0] - values[:, 1] > gap).all() for values in hardest) and all(
        (values.abs() > gap).all() for values in violations
    )


def test_unified_at_a_large_scale_is_triplet_hn():
    similarities = first_that(is_far_from_ties, (similarities_like(MASKS[0], seed=seed) for seed in itertools.count()))
    unified = unified_loss(similarities, *MASKS, margin=0.2, scale=1e5, reduction="none")
    triplet = triplet_hn_loss(similarities, *MASKS, margin=0.2, reduction="none")
    assert triplet.max() > 0.5
    actual, expected = (value_and_gradients(values, [similarities]) for values in (unified, triplet))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def masks_with_pairs_in_both(rows, columns):
    positive_mask, negative_mask = label_masks(rows, columns)
    return positive_mask, negative_mask | (positive_mask & (torch.arange(columns) % 2 == 0))


@ALL_VARIANTS
def test_variants_equal_the_loops(name):
    for masks, symmetric, dtype in (
        (label_masks(5, 9), True, torch.float64),
        (label_masks(9, 5), False, torch.float64),
        (masks_with_pairs_in_both(9, 5), True, torch.float64),
        (diagonal_masks(6), True, torch.float32),
        (label_masks(9, 5), True, torch.float32),
    ):
        options, loops, leaves = variant(name, masks, dtype)
        similarities = similarities_like(masks[0], dtype)
        expected, derivatives = reference.unified_variants(
            similarities.tolist(), *map(index_pairs, masks), symmetric=symmetric, scale=5.0, **loops
        )
        assert len(expected) > 5
        values = unified_loss(similarities, *masks, scale=5.0, symmetric=symmetric, reduction="none", **options)
        upstream = dict(zip(expected, upstream_like(values).tolist(), strict=True))
        assert values.dtype == dtype
        close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(values, values.new_tensor(list(expected.values())), **close)
        leaves = [(similarities, "similarity"), *leaves]
        _, *gradients = value_and_gradients(values, [tensor for tensor, _ in leaves])
        for gradient, (tensor, names) in zip(gradients, leaves, strict=True):
            right = gradient_of_loops(derivatives, upstream, names, masks[0].shape)
            assert right.abs().max() > 0.01
            right = right.reshape(*tensor.shape, -1).sum(dim=-1)
            torch.testing.assert_close(gradient, right.to(dtype), **close)


def test_pair_losses_are_exact():
    # log(1 + e^21) = 21 + log(1 + e^-21), which softplus rounds to 21; 0 without negatives
    negative_lse = torch.tensor([[21.0, -math.inf], [-40.0, 1000.0]], dtype=torch.float64)
    values = unified_pair_losses(negative_lse, torch.zeros(2, dtype=torch.float64), 0.0, scale=10)
    expected = [[2.1 + 7.582560422162385e-11, 0], [4.248354255291589e-19, 100]]
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float64), atol=0, rtol=1e-15)


@pytest.mark.parametrize("name", ["plain", "vlc", *VARIANTS])
def test_extreme_scale_and_similarities_stay_finite(name):
    for dtype in (torch.float16, torch.float32, torch.float64):
        for sign in (1, -1):
            options, _, leaves = variant(name, MASKS, dtype) if name in VARIANTS else ({}, None, [])
            leaves = [(sign * (2 * torch.eye(7) - 1)).to(dtype).requires_grad_(), *(tensor for tensor, _ in leaves)]
            value = (vlc_loss if name == "vlc" else unified_loss)(leaves[0], *MASKS, scale=1e4, **options)
            assert value.isfinite()
            assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(value, leaves))
            if name in ("plain", "vlc"):
                assert value == 0 if sign > 0 else value > 4


@ALL_VARIANTS
def test_variants_with_nothing_to_compare_are_zero_with_zero_gradients(name):
    for masks in EMPTY.values():
        options, _, leaves = variant(name, masks, torch.float32)
        leaves = [similarities_like(masks[0], torch.float32), *(tensor for tensor, _ in leaves)]
        scale = torch.tensor(10.0, requires_grad=True)
        value = unified_loss(leaves[0], *masks, scale=scale, **options)
        assert value == 0
        for gradient in torch.autograd.grad(value, [*leaves, scale]):
            assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("option", ["weights", "positive weights", "negative weights", "margin", "margin of rows"])
def test_nan_of_weights_and_margins_comes_out_exactly_where_it_is_read(option):
    positive_mask, negative_mask = label_masks(5, 9)
    similarities = similarities_like(positive_mask)
    ones = torch.ones_like(similarities)
    reads, options = {
        "weights": (positive_mask | negative_mask, lambda tensor: {"weights": tensor}),
        "positive weights": (positive_mask, lambda tensor: {"weights": (tensor, ones)}),
        "negative weights": (negative_mask, lambda tensor: {"weights": (ones, tensor)}),
        "margin": (positive_mask, lambda tensor: {"margin": tensor}),
        "margin of rows": (positive_mask.any(dim=1), lambda tensor: {"margin": tensor}),
    }[option]
    for position in map(tuple, torch.ones_like(reads).nonzero().tolist()):
        tensor = torch.ones(reads.shape, dtype=torch.float64)
        tensor[position] = float("nan")
        tensor.requires_grad_()
        value = unified_loss(similarities, positive_mask, negative_mask, **options(tensor))
        for result in (value, *torch.autograd.grad(value, (similarities, tensor))):
            assert result.isnan().any() == reads[position]


def test_functions_are_called_once_in_single_precision_and_so_is_what_they_return():
    masks = label_masks(5, 9)
    similarities = similarities_like(masks[0], torch.float16)
    called = []

    def function(values, *masks_given):
        called.append((values.dtype, masks_given))
        return values.half()

    for option in ("weights", "relative", "margin"):
        called.clear()
        value = unified_loss(similarities, *masks, symmetric=False, **{option: function})
        single = unified_loss(similarities, *masks, symmetric=False, **{option: lambda s, *masks: s.half().float()})
        assert called == [(torch.float32, masks if option == "margin" else ())]
        assert value.dtype == torch.float32
        assert torch.equal(value, single)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": torch.ones(2)}, r"scale must have one element, got shape \(2,\)"),
        ({"margin": torch.ones(6)}, r"margin must have the shape \(7,\), got \(6,\)"),
        ({"margin": lambda s, p, n: torch.ones(8)}, r"margin must have the shape .*, got \(8,\)"),
        ({"margin": torch.ones(7, device="meta")}, "margin must have the device cpu, got meta"),
        ({"margin": [0.1] * 7}, r"margin must be a number, a tensor or a function that returns one, got \[0.1, "),
        ({"weights": torch.ones(6)}, r"weights must have the shape \(7,\), got \(6,\)"),
        ({"weights": lambda s: s[:6]}, r"weights must have the shape \(7, 7\), got \(6, 7\)"),
        ({"weights": lambda s: 2.0}, "weights must be a tensor or a function that returns one, got 2.0"),
        ({"weights": (torch.ones(7, 7),)}, "weights must be one or a pair, for positives and negatives, got 1"),
        ({"weights": (torch.ones(6), torch.ones(7))}, r"weights of the positives must have the shape \(7,\), got"),
        ({"relative": lambda x: x.sum()}, r"relative similarities must have the shape \(7, 7\), got \(\)"),
    ],
)
def test_wrong_margins_weights_and_functions(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        unified_loss(random_similarities(), *MASKS, **options)
