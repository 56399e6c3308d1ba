"""What all losses have in common: agreement with the loops, reduction, directions, empty cases, NaN and checks."""

from functools import partial

import pytest
import torch

from tests.helpers.memory import LargestTensor
from tests.helpers.pairs import EMPTY, diagonal_masks, label_masks, loops, similarities_like, value_and_gradients
from tests.helpers.seeds import seeded
from tests.reference import losses as reference
from vl_plugins.functional import Polynomial, goal_loss, triplet_hn_loss, triplet_sh_loss, unified_loss, vlc_loss
from vl_plugins.functional.goal import Objective

# The loops of GOAL and of Unified's variants are compared in test_goal.py and test_unified.py.
WITH_LOOPS = {
    "unified": (unified_loss, reference.unified, {"margin": 0.2, "scale": 20.0}),
    "vlc": (vlc_loss, reference.vlc, {"scale": 20.0}),
    "triplet_hn": (triplet_hn_loss, reference.triplet_hn, {"margin": 0.2}),
    "triplet_sh": (triplet_sh_loss, reference.triplet_sh, {"margin": 0.2}),
}
ALL = {
    **{name: partial(function, **options) for name, (function, _, options) in WITH_LOOPS.items()},
    "goal-con-con": partial(goal_loss, objective=Objective("con", "con")),
    "goal-cir-sig_ms": partial(goal_loss, objective=Objective("cir", "sig_ms")),
    "goal-nca-lin_ms-all": partial(goal_loss, objective=Objective("nca", "lin_ms"), mining="all"),
    "unified-variants": partial(
        unified_loss,
        margin=lambda similarities, *masks: 0.1 + 0.3 * similarities,
        scale=5.0,
        weights=(Polynomial([0.5, -0.7, 0.2]), lambda similarities: 1 + similarities.detach()),
        relative=Polynomial([0.1, 0.8, 0.5, -0.2]),
    ),
}
LOSSES = pytest.mark.parametrize("loss", ALL.values(), ids=ALL.keys())
SHIFT_INVARIANT = pytest.mark.parametrize("loss", list(ALL.values())[:5], ids=list(ALL)[:5])
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.mark.parametrize("name", WITH_LOOPS)
def test_value_and_gradient_equal_the_loops(name):
    loss, pair_loss, options = WITH_LOOPS[name]
    for masks in (diagonal_masks(6), label_masks(5, 9), label_masks(9, 5)):
        for symmetric in (True, False):
            for dtype, tolerance in TOLERANCE.items():
                similarities = similarities_like(masks[0], dtype)
                expected = loops(pair_loss, similarities, masks, symmetric=symmetric, **options)
                assert len(expected[0]) > 5
                values = loss(similarities, *masks, **options, symmetric=symmetric, reduction="none")
                actual = value_and_gradients(values, [similarities])
                torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_the_first_of_equally_hard_negatives_receives_the_gradient():
    similarities = torch.tensor([[0.5, 0.7, 0.7, 0.7]], requires_grad=True)
    positive_mask = torch.tensor([[True, False, False, False]])
    triplet_hn_loss(similarities, positive_mask, ~positive_mask, symmetric=False).backward()
    assert similarities.grad[0].tolist() == [-1, 1, 0, 0]


@LOSSES
def test_reductions_and_directions(loss):
    masks = label_masks(5, 9)
    similarities = similarities_like(masks[0])
    values = loss(similarities, *masks, reduction="none")
    torch.testing.assert_close(loss(similarities, *masks, reduction="sum"), values.sum())
    torch.testing.assert_close(loss(similarities, *masks), values.mean())
    transposed = [tensor.T for tensor in (similarities, *masks)]
    one_way, other_way = (loss(*sides, symmetric=False) for sides in ((similarities, *masks), transposed))
    assert abs(one_way - other_way) > 1e-6
    torch.testing.assert_close(values.mean(), one_way + other_way)
    torch.testing.assert_close(loss(*transposed), one_way + other_way)


@LOSSES
@pytest.mark.parametrize("seed", range(5))
def test_order_of_rows_and_columns_does_not_matter(loss, seed):
    tensors = similarities_like(label_masks(5, 9)[0]), *label_masks(5, 9)
    generator = seeded(seed)
    rows, columns = torch.randperm(5, generator=generator), torch.randperm(9, generator=generator)
    torch.testing.assert_close(loss(*(tensor[rows][:, columns] for tensor in tensors)), loss(*tensors))


@SHIFT_INVARIANT
@pytest.mark.parametrize("shift", [-5.0, 0.3, 40.0])
def test_shifting_all_similarities_changes_nothing(loss, shift):
    masks = label_masks(5, 9)
    similarities = similarities_like(masks[0])
    torch.testing.assert_close(loss(similarities + shift, *masks), loss(similarities, *masks))


@LOSSES
def test_nothing_to_compare_is_zero_with_zero_gradients(loss):
    for masks in EMPTY.values():
        for reduction in ("mean", "sum"):
            similarities = similarities_like(masks[0], torch.float32)
            value = loss(similarities, *masks, reduction=reduction)
            value.backward()
            assert value == 0
            assert torch.equal(similarities.grad, torch.zeros_like(similarities))


@LOSSES
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_a_number_is_never_hidden(loss, bad):
    cases = diagonal_masks(3), label_masks(5, 9), EMPTY["no positives"], EMPTY["no negatives"], EMPTY["neither"]
    for masks in cases:
        for position in range(masks[0].numel()):
            similarities = similarities_like(masks[0]).detach()
            similarities.view(-1)[position] = bad
            values = loss(similarities.requires_grad_(), *masks, reduction="none")
            assert values.isnan().all()
            value = loss(similarities, *masks)
            value.backward()
            assert value.isnan()
            assert similarities.grad.isnan().any()


@LOSSES
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anchor_without_negatives_is_exactly_zero_beside_others(loss):
    positive_mask, negative_mask = diagonal_masks(7)
    negative_mask[2] = False
    similarities = similarities_like(positive_mask)
    with torch.autograd.detect_anomaly(check_nan=True):
        values = loss(similarities, positive_mask, negative_mask, symmetric=False, reduction="none")
        values.sum().backward()
    assert values[2] == 0
    assert similarities.grad[2].count_nonzero() == 0
    assert values.any()


@LOSSES
def test_half_precision_is_computed_in_single(loss):
    masks = label_masks(5, 9)
    for dtype in (torch.float16, torch.bfloat16):
        half = similarities_like(masks[0], dtype).detach().requires_grad_()
        single = half.detach().float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value, expected = loss(half, *masks), loss(single, *masks)
        value.backward()
        expected.backward()
        assert value.dtype == torch.float32
        assert torch.equal(value, expected)
        assert torch.equal(half.grad, single.grad.to(dtype))


@pytest.mark.parametrize("name", ALL)
def test_largest_tensors(name):
    positive_mask = torch.arange(10)[:, None] == torch.arange(80) // 8
    similarities = similarities_like(positive_mask)
    with LargestTensor() as largest:
        ALL[name](similarities, positive_mask, ~positive_mask).backward()
    # One row of candidates, or of other pairs, for each of the 80 positive pairs.
    rows = 80 if name in ("triplet_sh", "goal-cir-sig_ms", "goal-nca-lin_ms-all", "unified-variants") else 10
    assert largest.elements == rows * 80


@LOSSES
def test_non_contiguous_input(loss):
    masks = label_masks(5, 9)
    similarities = similarities_like(masks[0])
    strided = [torch.stack([tensor, tensor], dim=2)[:, :, 0] for tensor in (similarities, *masks)]
    assert torch.equal(loss(*strided), loss(similarities, *masks))


@pytest.mark.parametrize("name", ["unified", "vlc", "triplet_hn", "triplet_sh", "unified-variants"])
def test_first_and_second_derivatives_with_a_learned_scale(name):
    """Not of GOAL, whose gradient is not that of its value."""
    masks = label_masks(4, 5)
    similarities = similarities_like(masks[0])
    scale = torch.full((1,), 5.0, dtype=torch.float64, requires_grad=True)
    # Instead of detached weights, which finite differences do not know as constants.
    options = {"weights": Polynomial([0.5, -0.7, 0.2])} if name == "unified-variants" else {}
    has_scale = not name.startswith("triplet")

    def loss(similarities, scale):
        return ALL[name](similarities, *masks, reduction="none", **options, **({"scale": scale} if has_scale else {}))

    inputs = similarities, scale if has_scale else None
    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)


def test_compiled():
    masks = label_masks(5, 9)
    similarities = similarities_like(masks[0])
    for name in ("unified-variants", "goal-cir-sig_ms"):
        torch._dynamo.reset()
        compiled = torch.compile(ALL[name], backend="eager")
        actual, expected = (value_and_gradients(f(similarities, *masks), [similarities]) for f in (compiled, ALL[name]))
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("similarities", torch.rand(3), r"must have the shape \(anchors, candidates\), got \(3,\)"),
        ("positive_mask", torch.ones(3, 4).bool(), r"must have the shape \(3, 3\), got \(3, 4\)"),
        ("negative_mask", torch.ones(3, 3), "must have the dtype torch.bool, got torch.float32"),
        ("positive_mask", torch.ones(3, 3, device="meta").bool(), "must have the device cpu, got meta"),
        ("reduction", "avg", "must be one of 'mean', 'sum', 'none', got 'avg'"),
    ],
)
@LOSSES
def test_wrong_input(loss, argument, value, message):
    positive_mask, negative_mask = diagonal_masks(3)
    right = {"similarities": torch.rand(3, 3), "positive_mask": positive_mask, "negative_mask": negative_mask}
    with pytest.raises(ValueError, match=f"^{argument} {message}"):
        loss(**(right | {argument: value}))
