"""What all losses have in common: agreement with the loops, reduction, directions, empty cases, NaN and checks."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import losses as reference
from vl_plugins.functional import goal_loss, triplet_hn_loss, triplet_sh_loss, unified_loss, vlc_loss

LOSSES = {
    "unified": (unified_loss, reference.unified, {"margin": 0.2, "scale": 20.0}),
    "vlc": (vlc_loss, reference.vlc, {"scale": 20.0}),
    "triplet_hn": (triplet_hn_loss, reference.triplet_hn, {"margin": 0.2}),
    "triplet_sh": (triplet_sh_loss, reference.triplet_sh, {"margin": 0.2}),
}
# GOAL's loops need the whole batch, so test_goal.py compares with them.
GOAL = {
    "goal-cir-sig_ms": partial(goal_loss, triplet_weight="cir", pair_weight="sig_ms"),
    "goal-con-con": partial(goal_loss, triplet_weight="con", pair_weight="con"),
    "goal-nca-lin_ms-all": partial(goal_loss, triplet_weight="nca", pair_weight="lin_ms", mining="all"),
}
ALL = {name: function for name, (function, _, _) in LOSSES.items()} | GOAL
FUNCTIONS = pytest.mark.parametrize("loss", ALL.values(), ids=ALL.keys())
OF_DIFFERENCES = pytest.mark.parametrize("loss", [*list(ALL.values())[:4], GOAL["goal-con-con"]])
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def diagonal_masks(size):
    positive_mask = torch.eye(size, dtype=torch.bool)
    return positive_mask, ~positive_mask


def label_masks(rows, columns):
    """Several positives for most anchors; row 0 has no negatives, row 1 no positives, column 0 neither."""
    torch.manual_seed(rows * columns)
    positive_mask = torch.randint(3, (rows, 1)) == torch.randint(3, (1, columns))
    negative_mask = ~positive_mask
    negative_mask[0] = False
    positive_mask[0, 1] = True
    positive_mask[1] = False
    positive_mask[:, 0] = negative_mask[:, 0] = False
    return positive_mask, negative_mask


def similarities_like(mask, dtype=torch.float64):
    torch.manual_seed(7)
    return (2 * torch.rand(mask.shape, dtype=torch.float64) - 1).to(dtype).requires_grad_()


def pairs(mask):
    return {tuple(pair) for pair in mask.nonzero().tolist()}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["both directions", "rows only"])
@pytest.mark.parametrize(
    "masks", [diagonal_masks(6), label_masks(5, 9), label_masks(9, 5)], ids=["one", "wide", "tall"]
)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_the_loops(name, masks, symmetric, dtype):
    loss, pair_loss, options = LOSSES[name]
    positive_mask, negative_mask = masks
    similarities = similarities_like(positive_mask, dtype)
    expected, derivatives = reference.pair_losses(
        pair_loss, similarities.tolist(), pairs(positive_mask), pairs(negative_mask), symmetric=symmetric, **options
    )
    assert len(expected) > 5
    upstream = {pair: 0.5 + 0.25 * k for k, pair in enumerate(expected)}

    actual = loss(similarities, *masks, **options, symmetric=symmetric, reduction="none")
    actual.backward(torch.tensor(list(upstream.values()), dtype=dtype))

    assert list(expected) == list(zip(*(index.tolist() for index in torch.where(positive_mask)), strict=True))
    expected = torch.tensor(list(expected.values()), dtype=dtype)
    gradient = torch.tensor(reference.weighted_gradient(derivatives, upstream, *similarities.shape), dtype=dtype)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(actual, expected, **tolerance)
    torch.testing.assert_close(similarities.grad, gradient, **tolerance)


@FUNCTIONS
def test_reductions(loss):
    masks = label_masks(5, 9)
    similarities = similarities_like(masks[0])
    values = loss(similarities, *masks, reduction="none")
    assert values.shape == (masks[0].sum(),)
    torch.testing.assert_close(loss(similarities, *masks, reduction="sum"), values.sum())
    torch.testing.assert_close(loss(similarities, *masks), values.mean())


@FUNCTIONS
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**16))
def test_order_of_rows_and_columns_does_not_matter(loss, seed):
    positive_mask, negative_mask = label_masks(5, 9)
    similarities = similarities_like(positive_mask)
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.randperm(5, generator=generator), torch.randperm(9, generator=generator)
    permuted = [tensor[rows][:, columns] for tensor in (similarities, positive_mask, negative_mask)]
    torch.testing.assert_close(loss(*permuted), loss(similarities, positive_mask, negative_mask))


@FUNCTIONS
def test_swapping_rows_and_columns(loss):
    masks = label_masks(5, 9)
    similarities = similarities_like(masks[0])
    transposed = [tensor.T for tensor in (similarities, *masks)]
    both = loss(similarities, *masks)
    torch.testing.assert_close(loss(*transposed), both)
    one_way = loss(similarities, *masks, symmetric=False)
    other_way = loss(*transposed, symmetric=False)
    assert abs(one_way - other_way) > 1e-3
    torch.testing.assert_close(one_way + other_way, both)


@OF_DIFFERENCES
@settings(deadline=None, max_examples=25)
@given(shift=st.floats(-5, 5))
def test_shifting_all_similarities_changes_nothing(loss, shift):
    masks = label_masks(5, 9)
    similarities = similarities_like(masks[0])
    torch.testing.assert_close(loss(similarities + shift, *masks), loss(similarities, *masks))


EMPTY = {
    "no positives": (torch.zeros(3, 4, dtype=torch.bool), torch.ones(3, 4, dtype=torch.bool)),
    "no negatives": (torch.ones(3, 4, dtype=torch.bool), torch.zeros(3, 4, dtype=torch.bool)),
    "neither": (torch.zeros(3, 4, dtype=torch.bool), torch.zeros(3, 4, dtype=torch.bool)),
    "one item": (torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool)),
    "no rows": (torch.zeros(0, 4, dtype=torch.bool), torch.zeros(0, 4, dtype=torch.bool)),
    "no columns": (torch.zeros(3, 0, dtype=torch.bool), torch.zeros(3, 0, dtype=torch.bool)),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("masks", EMPTY.values(), ids=EMPTY.keys())
@FUNCTIONS
def test_nothing_to_compare_is_zero_with_zero_gradients(loss, masks, reduction):
    similarities = similarities_like(masks[0], torch.float32)
    value = loss(similarities, *masks, reduction=reduction)
    value.backward()
    assert value == 0
    assert torch.equal(similarities.grad, torch.zeros_like(similarities))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("masks", [diagonal_masks(3), label_masks(5, 9), *list(EMPTY.values())[:4]])
@FUNCTIONS
def test_not_a_number_is_never_hidden(loss, masks, bad):
    for position in range(masks[0].numel()):
        similarities = similarities_like(masks[0]).detach()
        similarities.view(-1)[position] = bad
        similarities.requires_grad_()
        for reduction in ("mean", "sum"):
            value = loss(similarities, *masks, reduction=reduction)
            assert value.isnan()
        value.backward()
        assert similarities.grad.isnan().any()
        assert loss(similarities, *masks, reduction="none").isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@FUNCTIONS
def test_half_precision_is_computed_in_single(loss, dtype):
    masks = diagonal_masks(6)
    similarities = similarities_like(masks[0]).detach().to(dtype).requires_grad_()
    value = loss(similarities, *masks)
    value.backward()
    assert value.dtype == torch.float32
    assert similarities.grad.dtype == dtype
    single = similarities.detach().float().requires_grad_()
    expected = loss(single, *masks)
    expected.backward()
    assert torch.equal(value, expected)
    assert torch.equal(similarities.grad, single.grad.to(dtype))


@FUNCTIONS
def test_equal_similarities_have_finite_gradients(loss):
    masks = diagonal_masks(4)
    similarities = torch.ones(4, 4, requires_grad=True)
    loss(similarities, *masks).backward()
    assert similarities.grad.isfinite().all()
    assert similarities.grad.abs().sum() > 0


@FUNCTIONS
def test_non_contiguous_input(loss):
    masks = label_masks(5, 9)
    similarities = similarities_like(masks[0])
    strided = [torch.stack([tensor, tensor], dim=2)[:, :, 0] for tensor in (similarities, *masks)]
    assert not strided[0].is_contiguous()
    assert torch.equal(loss(*strided), loss(similarities, *masks))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"similarities": torch.rand(3)}, r"similarities must have the shape \(anchors, candidates\), got \(3,\)"),
        (
            {"positive_mask": torch.ones(3, 4, dtype=torch.bool)},
            r"positive_mask must have the shape \(3, 3\), got \(3, 4\)",
        ),
        (
            {"negative_mask": torch.ones(3, dtype=torch.bool)},
            r"negative_mask must have the shape \(3, 3\), got \(3,\)",
        ),
        ({"negative_mask": torch.ones(3, 3)}, "negative_mask must have the dtype torch.bool, got torch.float32"),
        (
            {"positive_mask": torch.ones(3, 3, dtype=torch.bool, device="meta")},
            "positive_mask must have the device cpu, got meta",
        ),
        ({"reduction": "avg"}, "reduction must be one of 'mean', 'sum', 'none', got 'avg'"),
    ],
)
@FUNCTIONS
def test_wrong_input(loss, change, message):
    positive_mask, negative_mask = diagonal_masks(3)
    right = {"similarities": torch.rand(3, 3), "positive_mask": positive_mask, "negative_mask": negative_mask}
    with pytest.raises(ValueError, match=message):
        loss(**(right | change))
