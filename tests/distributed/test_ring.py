"""Losses through a ring of processes, against the formulas on the joined batch in one process."""

import copy
import functools
import math
import pickle

import pytest
import torch
from pytorch_metric_learning import distances, reducers

from tests.distributed import processes
from tests.distributed.processes import CALLS, LOSSES, MEMORY, NAMES, SIZES, arguments, batch, members, upstream
from tests.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.distances import SmoothChamferSimilarity
from vl_plugins.distributed import Ring
from vl_plugins.losses import TripletHNLoss, UnifiedLoss

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 1e-2}
WORLD_SIZES = pytest.mark.parametrize("world_size", list(SIZES))


@pytest.fixture(scope="module")
def results():
    """``results(world_size)[rank][case]``, of processes that are started once."""
    return functools.cache(functools.partial(in_processes, processes.run))


def joined(name, case, world_size):
    """Return values and gradients of each member, by the formulas on the vectors of all in one process."""
    options = CALLS[name, case]
    ranks = members(options, world_size)
    loss, of_loss = LOSSES[name]
    parts = [arguments(options, world_size, rank) for rank in ranks]
    x, y, x_labels, y_labels = (torch.cat(part).detach() for part in list(zip(*parts, strict=True))[:4])
    x, y = (side.double().requires_grad_() for side in (x, y))
    given = dict(parts[0][4])
    leaves = [x, y]
    for kind in ("scale", "margin", "weights"):
        if isinstance(given.get(kind), torch.Tensor):
            own = [part[4][kind].detach() for part in parts]
            if kind == "margin" and own[0].ndim == 2:
                # Of all candidates, whoever takes part.
                own = [of_pairs[:, : len(y)] for of_pairs in own]
            given[kind] = (own[0] if kind == "scale" else torch.cat(own)).requires_grad_()
            leaves.append(given[kind])
    reduction = given.pop("reduction", "none")
    values = loss(x, y, x_labels, y_labels, **{**of_loss, **given}, reduction="none", backend="functional")
    counts = [len(part[0]) for part in parts]
    rows = torch.where(x_labels[:, None] == y_labels)[0]
    owners = torch.repeat_interleave(torch.arange(len(ranks)), torch.tensor(counts))[rows]
    own = [values[owners == place] for place in range(len(ranks))]
    if reduction == "mean":
        own = [part.sum() / max(1, len(part)) for part in own]
    total = sum((part * upstream(rank, part)).sum() for rank, part in zip(ranks, own, strict=True))
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    numbers = counts, [len(part[1]) for part in parts]
    sides = [gradient.split(side) for gradient, side in zip(gradients[:2], numbers, strict=True)]
    return own, sides, gradients[2:], leaves[2:]


def assert_near(actual, expected, tolerance, what):
    assert actual.shape == expected.shape, what
    if expected.numel():
        error = (actual.double() - expected).abs().max().item()
        assert error <= tolerance * max(expected.abs().max().item(), 1e-2), (what, error)


@WORLD_SIZES
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_of_one_process(results, world_size, name):
    cases = [case for of_loss, case in CALLS if of_loss == name]
    assert len(cases) >= 12
    for case in cases:
        options = CALLS[name, case]
        ranks = members(options, world_size)
        tolerance = TOLERANCE[options.get("dtype", torch.float64)]
        values, sides, of_tensors, tensors = joined(name, case, world_size)
        actual = [results(world_size)[rank][name, case] for rank in ranks]
        for place, (of_rank, (x_gradient, y_gradient, *_)) in enumerate(actual):
            # Values are in single precision, whatever the vectors.
            of_values = TOLERANCE[of_rank.dtype]
            assert_near(of_rank, values[place], of_values, (case, "values", place))
            assert_near(x_gradient, sides[0][place], tolerance, (case, "x", place))
            assert_near(y_gradient, sides[1][place], tolerance, (case, "y", place))
        for number, (expected, tensor) in enumerate(zip(of_tensors, tensors, strict=True)):
            parts = [gradients[2 + number] for _, gradients in actual]
            together = sum(parts) if tensor.ndim == 0 else torch.cat(parts)
            assert_near(together, expected, tolerance, (case, "tensor", number))
    assert any(value.numel() and value.max() > 0.1 for value in joined(name, "symmetric", world_size)[0])


@WORLD_SIZES
@pytest.mark.parametrize("name", NAMES)
def test_each_process_reduces_its_own_pairs(results, world_size, name):
    x, y, x_labels, y_labels = (torch.cat(part) for part in batch(world_size)[:4])
    x, y = x.requires_grad_(), y.requires_grad_()
    loss = create_loss(name, reducer=reducers.DoNothingReducer(), backend="functional", **NAMES[name])
    found = loss(x, x_labels, ref_emb=y, ref_labels=y_labels)["loss"]
    counts = SIZES[world_size]
    owners = torch.repeat_interleave(torch.arange(world_size), torch.tensor(counts[0]))[found["indices"][0]]
    means = [
        found["losses"][owners == rank].mean() if (owners == rank).any() else torch.zeros(())
        for rank in range(world_size)
    ]
    total = sum((rank + 1) * mean for rank, mean in enumerate(means))
    gradients = torch.autograd.grad(total, (x, y))
    gradients = [gradient.split(side) for gradient, side in zip(gradients, counts, strict=True)]
    for rank in range(world_size):
        steps, gathered = results(world_size)[rank]["steps", name]
        assert len(steps) == 4
        assert gathered == [0, 3]
        for value, (x_gradient, y_gradient) in steps:
            assert_near(value, means[rank].detach(), 1e-9, rank)
            assert_near(x_gradient, gradients[0][rank], 1e-9, rank)
            assert_near(y_gradient, gradients[1][rank], 1e-9, rank)


@WORLD_SIZES
def test_not_a_number_is_seen_by_all(results, world_size):
    for name in LOSSES:
        for side in range(2):
            found = [of_rank["nan", name, side] for of_rank in results(world_size)]
            assert len(found) == world_size
            assert all(map(math.isnan, found)), (name, side, found)


def test_a_process_without_losses_takes_part_in_the_backward_pass(results):
    (value, (of_x, of_y)), (other_value, (of_other_x, of_other_y)) = (of_rank["nothing"] for of_rank in results(2))
    # Rows 0 and 1 find their texts; of rows 2 and 3 those are elsewhere, and all others are as far: 0.2 each.
    assert value == 0
    torch.testing.assert_close(other_value, torch.tensor(0.2))
    assert of_x.abs().max() == 0
    # Their hardest negative is the first of equals, text 0, which is in the other process.
    assert of_y[0, 2:4].min() > 0
    assert of_y[1].abs().max() == 0
    assert of_other_x.abs().max() > 0
    assert of_other_y.abs().max() > 0


def test_errors_are_raised_in_all_processes(results):
    said = [of_rank["errors"] for of_rank in results(2)]
    assert said[0] == said[1]
    assert len(said[0]) == 5
    assert all(text.startswith("all processes of a ring have to give x and y of one width") for text in said[0])


def test_a_collapse_is_seen_by_the_process_that_has_pairs(results):
    first, second = (of_rank["collapse"] for of_rank in results(2))
    assert first == []
    assert len(second) == 1


@pytest.mark.parametrize("name", ["unified", "triplet_hn"])
def test_memory_does_not_grow_with_the_number_of_processes(results, name):
    vectors = 4 * MEMORY["number"] * MEMORY["width"]
    tile = 4 * MEMORY["tile"]
    of_four, of_three, gathered = (results(4)[0][kind, name] for kind in ("memory", "of three", "gathered"))
    # Gradients of both sides, two blocks, the gradients of three, and a contribution.
    assert of_four < 8 * vectors + 4 * tile
    assert of_four < 1.05 * of_three
    assert of_four < 0.5 * gathered


PROBLEMS = {
    "triplet_sh": (lambda: create_loss("triplet_sh"), "TripletSHLoss needs all similarities"),
    "distance": (lambda: TripletHNLoss(distance=distances.LpDistance()), "LpDistance is neither"),
    "sets": (lambda: TripletHNLoss(distance=SmoothChamferSimilarity()), "SmoothChamferSimilarity is neither"),
    "margin": (lambda: UnifiedLoss(margin=lambda *_: 0.1), "the margin is a function"),
    "weights": (lambda: UnifiedLoss(weights=[1.0]), "weights are not one for each row"),
    "relative": (lambda: UnifiedLoss(relative=[0.0, 1.0]), "relative similarities"),
    "subclass": (lambda: OfTheirOwn(), "OfTheirOwn needs all similarities"),
    "warm-up": (lambda: create_loss("goal", warmup_steps=2), "all negatives count during the warm-up"),
}


class OfTheirOwn(UnifiedLoss):
    def pair_losses(self, similarities, positive_mask, negative_mask, *, symmetric):
        return super().pair_losses(similarities, positive_mask, negative_mask, symmetric=symmetric) / 2


def with_ring(loss):
    loss.ring = Ring()  # which asks for a process group only when it is used
    return loss


def two_sets(loss, **options):
    labels = torch.arange(4)
    return loss(torch.eye(4), labels, ref_emb=torch.eye(4).flip(0), ref_labels=labels, **options)


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_a_ring_cannot_compute_says_so(case):
    create, problem = PROBLEMS[case]
    loss = with_ring(create())
    assert problem in loss.kernel_problem()
    with pytest.raises(ValueError, match=f"^a ring of processes cannot be used, because {problem}"):
        two_sets(loss)
    loss.ring = None
    assert two_sets(loss).isfinite()


def test_a_ring_can_be_used_after_the_warm_up():
    loss = create_loss("triplet_hn", warmup_steps=2)
    for _ in range(2):
        assert "warm-up" in with_ring(loss).kernel_problem()
        loss.ring = None
        two_sets(loss)
    loss = with_ring(loss)
    assert loss.kernel_problem() is None
    loss.calls_per_step = 2
    assert "warm-up" in loss.kernel_problem()


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_a_ring_cannot_serve(name):
    index = torch.tensor([0])
    for indices in ((index, index, index + 1), (index, index, index, index + 1)):
        with pytest.raises(ValueError, match="because pairs are given as an indices_tuple: set the attribute to None"):
            two_sets(with_ring(create_loss(name)), indices_tuple=indices)
    with pytest.raises(ValueError, match="because there is no ref_emb"):
        with_ring(create_loss(name))(torch.eye(4), torch.arange(4))
    with pytest.raises(ValueError, match="PerAnchorReducer takes no more ref_emb than embeddings, and a ring has"):
        two_sets(with_ring(create_loss(name, reducer=reducers.PerAnchorReducer())))
    for backend in ("dense", "functional"):
        with pytest.raises(ValueError, match=f"backend '{backend}' takes all candidates at once"):
            two_sets(with_ring(create_loss(name, backend=backend)))
    with pytest.raises(ValueError, match="backend 'triton' needs Triton"):
        two_sets(with_ring(create_loss(name, backend="triton")))


@pytest.mark.parametrize("name", LOSSES)
def test_functions_that_a_ring_cannot_serve(name):
    loss, of_loss = LOSSES[name]
    given = torch.eye(3), torch.eye(3), torch.arange(3), torch.arange(3)
    with pytest.raises(ValueError, match="same_set cannot be used with a ring of processes"):
        loss(*given, **of_loss, same_set=True, ring=Ring())
    with pytest.raises(ValueError, match="backend 'dense' takes all candidates at once"):
        loss(*given, **of_loss, backend="dense", ring=Ring())


def test_a_loss_with_a_ring_can_be_copied_and_saved():
    loss = with_ring(create_loss("unified"))
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert isinstance(twin.ring, Ring)
        assert twin.ring is not loss.ring
