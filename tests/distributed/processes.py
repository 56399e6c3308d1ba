"""What each process of :mod:`tests.distributed.test_ring` does, and the batches and calls that all of them know."""

import copy
import math
import warnings

import pytest
import torch
from pytorch_metric_learning.reducers import AvgNonZeroReducer, DoNothingReducer
from torch import distributed

from tests.memory import extra_bytes
from vl_plugins import create_loss, kernels, tiles
from vl_plugins.distributed import Ring
from vl_plugins.kernels import arrangement

# Anchors and candidates of each process.
SIZES = {
    2: ([7, 4], [12, 5]),
    4: ([5, 0, 19, 3], [8, 2, 0, 21]),
}
GROUPS = {2: [1], 4: [1, 3]}  # a process alone, and two of four
WIDTH = 5
LOSSES = {
    "unified": (kernels.unified_loss, {"margin": 0.1, "scale": 20.0}),
    "vlc": (kernels.vlc_loss, {"scale": 5.0}),
    "triplet_hn": (kernels.triplet_hn_loss, {"margin": 0.2}),
    "goal, con, con": (kernels.goal_loss, {"triplet_weight": "con", "pair_weight": "con", "margin": 0.3}),
    "goal, cir, sig_ms": (
        kernels.goal_loss,
        {"triplet_weight": "cir", "pair_weight": "sig_ms", "eps": 0.4, "alpha": 3.0},
    ),
    "goal, con, lin_ms": (kernels.goal_loss, {"triplet_weight": "con", "pair_weight": "lin_ms", "eps": 0.4}),
}

# Options of a call; "of_scale", "of_margin" and "weights" say that a tensor is given.
CASES = {
    "symmetric": {},
    "one direction": {"symmetric": False},
    "products": {"normalize": False},
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "classes": {"classes": 3},
    "nothing equal": {"classes": 0},
    "one label": {"classes": 1},
    "small tiles": {"tile": 1},
    "own group": {"group": True},
    "mean": {"reduction": "mean"},
}
CONTRASTIVE = {
    "learned scale": {"of_scale": True},
    "learned scale, float32": {"of_scale": True, "dtype": torch.float32, "symmetric": False},
    "large scale": {"scale": 1e4, "tile": 1},
}
OF_UNIFIED = {
    "margin of rows": {"of_margin": 1},
    "margin of pairs": {"of_margin": 2, "tile": 1},
    "weights": {"weights": True},
}
TIES = {"ties": {"normalize": False, "whole": True, "tile": 1}}
CALLS = {
    (name, case): options
    for name in LOSSES
    for case, options in (
        CASES | (CONTRASTIVE if name in ("unified", "vlc") else TIES) | (OF_UNIFIED if name == "unified" else {})
    ).items()
}

NAMES = {
    "unified": {"margin": 0.1, "scale": 20.0},
    "vlc": {"scale": 5.0},
    "triplet_hn": {"margin": 0.2},
    "goal": {"triplet_weight": "cir", "pair_weight": "sig_ms", "eps": 0.4},
}


def batch(world_size, *, classes=9, whole=False, dtype=torch.float64):
    """Return x, y, their labels, and what may be given with them, of all processes; lists with a part of each."""
    counts = SIZES[world_size]
    generator = torch.Generator().manual_seed(world_size)
    parts = []
    for side in counts:
        vectors = torch.randn(sum(side), WIDTH, dtype=torch.float64, generator=generator) + 0.3
        if whole:  # dot products that are exact, and often equal
            vectors = vectors.round().clamp(-1, 1)
        parts.append(vectors.to(dtype).split(side))
    for number, side in enumerate(counts):
        labels = torch.arange(sum(side)) + 1000 * number
        if classes:
            labels = torch.randint(classes, (sum(side),), generator=generator)
        parts.append(labels.split(side))
    of_rows = torch.rand(sum(counts[0]), dtype=torch.float64, generator=generator)
    of_pairs = torch.rand(sum(counts[0]), sum(counts[1]), dtype=torch.float64, generator=generator)
    return *parts, of_rows.split(counts[0]), of_pairs.split(counts[0])


def members(options, world_size):
    """Return the processes that take part."""
    return GROUPS[world_size] if options.get("group") else list(range(world_size))


def upstream(rank, values):
    """Return a gradient by the values of a process, which differs by process and pair."""
    return torch.linspace(0.5, 2, values.numel(), dtype=torch.float64).view(values.shape) * (rank + 1)


def arguments(options, world_size, rank):
    """Return x, y, their labels, the options of the loss and its leaves, all of one process."""
    options = {name: value for name, value in options.items() if name not in ("tile", "group")}
    of_batch = {name: options.pop(name) for name in ("classes", "whole", "dtype") if name in options}
    x, y, x_labels, y_labels, of_rows, of_pairs = (part[rank] for part in batch(world_size, **of_batch))
    tensors = {}
    if options.pop("of_scale", False):
        tensors["scale"] = torch.tensor(15.0, dtype=torch.float64)
    if ndim := options.pop("of_margin", 0):
        tensors["margin"] = of_rows if ndim == 1 else of_pairs
    if options.pop("weights", False):
        tensors["weights"] = of_rows + 0.5
    x, y, *leaves = (tensor.clone().requires_grad_() for tensor in (x, y, *tensors.values()))
    return x, y, x_labels, y_labels, options | dict(zip(tensors, leaves, strict=True)), [x, y, *leaves]


def call(name, case, rank, world_size, groups):
    """Return the values of a process and its gradients."""
    options = CALLS[name, case]
    loss, of_loss = LOSSES[name]
    x, y, x_labels, y_labels, given, leaves = arguments(options, world_size, rank)
    with pytest.MonkeyPatch.context() as patch:
        if "tile" in options:
            patch.setattr(tiles, "CPU_TILE", options["tile"])
        values = loss(
            x,
            y,
            x_labels,
            y_labels,
            **{**of_loss, "reduction": "none", **given},
            ring=Ring(groups[world_size] if options.get("group") else None),
        )
        (values * upstream(rank, values)).sum().backward()
    assert values.dtype == torch.promote_types(x.dtype, torch.float32)
    return values.detach(), [leaf.grad for leaf in leaves]


def steps(name, rank, world_size):
    """Return value and gradients of steps with the same labels, the last with copies of them in one process.

    And of each step whether labels were gathered, and how many of them.
    """
    loss = create_loss(name, **NAMES[name])
    loss.ring = Ring()
    loss = copy.deepcopy(loss)
    x_labels, y_labels = (part[rank] for part in batch(world_size)[2:4])
    gathered, results = [], []
    with pytest.MonkeyPatch.context() as patch:
        search = arrangement.equal_label_pairs
        patch.setattr(arrangement, "equal_label_pairs", lambda *labels: gathered.append(step) or search(*labels))
        for step in range(4):
            x, y = (part[rank].clone().requires_grad_() for part in batch(world_size)[:2])
            if step == 3 and rank == 0:
                x_labels = x_labels.clone()
            value = loss(x, x_labels, ref_emb=y, ref_labels=y_labels)
            (value * (rank + 1)).backward()
            results.append((value.detach(), [x.grad, y.grad]))
    return results, gathered


def nothing_to_learn_in_one(rank):
    """Return the gradients where the losses of process 0 are zero and its reducer keeps none, by the row maximum."""
    loss = create_loss("triplet_hn", reducer=AvgNonZeroReducer(), symmetric=False)
    loss.ring = Ring()
    x = torch.eye(8)[2 * rank : 2 * rank + 2].clone().requires_grad_()
    y = (torch.eye(8) if rank == 0 else torch.eye(8).flip(0))[2 * rank : 2 * rank + 2].clone().requires_grad_()
    labels = torch.arange(2) + 2 * rank
    value = loss(x, labels, ref_emb=y, ref_labels=labels)
    value.backward()
    return value.detach(), [x.grad, y.grad]


def not_a_number(name, side, rank, world_size):
    """Return the mean of each process where an embedding of process 0 is not finite."""
    loss, of_loss = LOSSES[name]
    x, y, *labels = (part[rank].clone() for part in batch(world_size)[:4])
    if rank == 0:
        (x, y)[side][1, 0] = math.nan if side else math.inf
    return loss(x, y, *labels, **of_loss, ring=Ring()).item()


def errors(rank):
    """Return what is said, in all processes, where they differ, and of what a ring cannot do."""
    labels, ring = torch.arange(3), Ring()
    said = []

    def expect(kind, *arguments, **options):
        with pytest.raises(kind) as caught:
            kernels.unified_loss(*arguments, labels, labels, ring=ring, **options)
        said.append(str(caught.value))

    x, y = torch.eye(3), torch.eye(3)
    expect(ValueError, x.double() if rank else x, y.double() if rank else y)
    expect(ValueError, *([x[:, :2], y[:, :2]] if rank else [x, y]))
    expect(ValueError, x, y.clone().requires_grad_() if rank else y)
    expect(ValueError, x, y, scale=torch.tensor(50.0, requires_grad=bool(rank)))
    expect(ValueError, x, y, symmetric=bool(rank))
    for loss in (kernels.unified_loss, kernels.triplet_hn_loss):
        x.requires_grad_()
        value = loss(x, y, labels, labels, ring=ring)
        with pytest.raises(RuntimeError, match=r"^second derivatives \(create_graph\) cannot"):
            torch.autograd.grad(value, x, create_graph=True)
    loss = create_loss("unified", reducer=DoNothingReducer())
    loss.ring = ring
    with pytest.raises(ValueError, match="with a ring the reducer has to return a tensor, DoNothingReducer does not"):
        loss(x, labels, ref_emb=y, ref_labels=labels)
    return said


def warnings_of_collapse(rank):
    """Return what is said of a collapsed model where one process has no pairs to watch."""
    loss = create_loss("goal", triplet_weight="cir", pair_weight="sig_ms")
    loss.ring = Ring()
    # Process 0 has no anchors, and every other positive of those of process 1.
    x, y = torch.ones(2 * rank, 2), torch.ones(2, 2)
    labels = torch.arange(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(110):
            loss(x, labels[: len(x)], ref_emb=y, ref_labels=labels)
    return [str(warning.message) for warning in caught if "collapsed" in str(warning.message)]


MEMORY = {"tile": 2**14, "number": 512, "width": 256}


def memory(name, ring):
    """Return how many bytes forward and backward pass take in process 0, without a ring by gathering all vectors."""
    number = MEMORY["number"]
    x, y = (torch.randn(number, MEMORY["width"]).requires_grad_() for _ in range(2))
    labels = torch.arange(number) + number * distributed.get_rank()
    loss, of_loss = LOSSES[name]

    def step():
        if ring is not None:
            loss(x, y, labels, labels, **of_loss, ring=ring).backward()
            return
        # With gradients: what this process adds to those of the others is as large as their vectors.
        sides = [Ring().gather(side.detach()).flatten(0, 1).requires_grad_() for side in (x, y)]
        all_labels = torch.arange(number * distributed.get_world_size())
        loss(*sides, all_labels, all_labels, **of_loss, backend="tiled").backward()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CPU_TILE", MEMORY["tile"])
        return extra_bytes(step) if distributed.get_rank() == 0 else step()


def run(rank):
    world_size = distributed.get_world_size()
    groups = {world_size: distributed.new_group(GROUPS[world_size])}
    results = {}
    for (name, case), options in CALLS.items():
        if rank in members(options, world_size):
            results[name, case] = call(name, case, rank, world_size, groups)
    for name in NAMES:
        results["steps", name] = steps(name, rank, world_size)
    for name in LOSSES:
        for side in range(2):
            results["nan", name, side] = not_a_number(name, side, rank, world_size)
    if world_size == 2:
        results["nothing"] = nothing_to_learn_in_one(rank)
        results["errors"] = errors(rank)
        results["collapse"] = warnings_of_collapse(rank)
    else:
        three = distributed.new_group([0, 1, 2])
        for name in ("unified", "triplet_hn"):
            results["memory", name] = memory(name, Ring())
            results["gathered", name] = memory(name, None)
            if rank < 3:
                results["of three", name] = memory(name, Ring(three))
            distributed.barrier()
    return results
