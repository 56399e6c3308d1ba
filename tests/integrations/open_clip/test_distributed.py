"""Losses of several processes against one process with the joined batch, in float64."""

import itertools
from argparse import Namespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss

from tests.helpers.open_clip_training import loss_options
from tests.helpers.processes import in_processes
from vl_plugins.integrations.open_clip.data import Steps
from vl_plugins.integrations.open_clip.loss import build_loss
from vl_plugins.registry import list_losses

D, K = 16, 4
LOGIT_SCALE = 14.0


def options(loss, **fields):
    names = {name: fields.pop(name) for name in ("miner", "reducer", "distance", "head") if name in fields}
    return loss_options(loss, fields, **names)


CASES = {
    "ClipLoss of open_clip": ClipLoss,
    "unified": options("unified", scale=20),
    "unified, scale=learned": options("unified", scale="learned"),
    "vlc, scale=learned": options("vlc", scale="learned"),
    "triplet_hn": options("triplet_hn", margin=0.3),
    "triplet_hn, warm-up": options("triplet_hn", margin=0.3, warmup_steps=10**6),
    "triplet_sh": options("triplet_sh", margin=0.3),
    "goal, nca and sig": options("goal", triplet_weight="nca", pair_weight="sig"),
    "goal, cir and sig_ms": options("goal", triplet_weight="cir", pair_weight="sig_ms"),
    "goal, con and lin_ms": options("goal", triplet_weight="con", pair_weight="lin_ms"),
    "unified of a miner": options("unified", scale=20, miner="MultiSimilarityMiner"),
    "triplet_hn, AvgNonZeroReducer": options("triplet_hn", margin=0.1, reducer="AvgNonZeroReducer"),
    "unified, image to text only": options("unified", scale=20, symmetric=False),
    "NTXentLoss of PML": options("NTXentLoss", temperature=0.1),
    "smooth_chamfer of triplet_hn": options("smooth_chamfer", head="set", mmd_weight=0.3, diversity_weight=0.2),
    "smooth_chamfer of unified": options("smooth_chamfer", head="set", base="unified", scale=20),
    "unified of match_probability": options("unified", head="set", distance="match_probability", scale=20),
}

LOCAL = {"whole batch": False, "--local-loss": True}


class Batch(NamedTuple):
    """Sizes of the processes' shares, captions of an image, and numbers of the images where some are the same."""

    sizes: tuple[int, ...]
    captions: int = 2
    image_ids: tuple[int, ...] | None = None

    def shares(self):
        """Return the images of each process, and its texts."""
        bounds = [sum(self.sizes[:rank]) for rank in range(len(self.sizes) + 1)]
        return [
            (slice(start, stop), slice(self.captions * start, self.captions * stop))
            for start, stop in itertools.pairwise(bounds)
        ]


def make_loss(name, rank=0, world_size=1, local_loss=False, image_ids=None):
    if CASES[name] is ClipLoss:
        return ClipLoss(local_loss, gather_with_grad=True, rank=rank, world_size=world_size)
    steps = Steps()
    if image_ids is not None:
        steps.batches.append(torch.tensor(image_ids, dtype=torch.long))
    return build_loss(Namespace(**vars(CASES[name]) | {"local_loss": local_loss}), steps)


def inputs(name, batch, dtype):
    """Return leaves of the type ``dtype``, by the names of open_clip's outputs; the scale is float64, or float32."""
    generator = torch.Generator().manual_seed(1)
    compares_sets = getattr(CASES[name], "head", None) == "set"
    shape = (K, D) if compares_sets else (D,)
    leaves = {}
    for tower, number in (("image", sum(batch.sizes)), ("text", batch.captions * sum(batch.sizes))):
        drawn = torch.randn(number, *shape, generator=generator, dtype=torch.float64)
        leaves[f"{tower}_features"] = F.normalize(drawn, dim=-1)
        if compares_sets:
            leaves[f"{tower}_slots"] = drawn
    leaves = {key: leaf.to(dtype).requires_grad_() for key, leaf in leaves.items()}
    scale_type = torch.promote_types(dtype, torch.float32)
    leaves["logit_scale"] = torch.tensor(LOGIT_SCALE, dtype=scale_type, requires_grad=True)
    return leaves


def gradients(loss, leaves, share=None):
    """Return the gradients of one step by the leaves, and the value; ``share`` is a process's."""
    given = dict(leaves)
    if share is not None:
        images, texts = share
        given = {
            key: leaf if leaf.ndim == 0 else leaf[images if key.startswith("image") else texts]
            for key, leaf in leaves.items()
        }
    for leaf in leaves.values():
        leaf.grad = None
    value = sum(loss(**given, output_dict=True).values())
    value.backward()
    return {key: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for key, leaf in leaves.items()}


def reference(name, batch, dtype):
    """Return the gradients that the processes' average should be: those of one process in float64."""
    rounded = {key: leaf.detach() for key, leaf in inputs(name, batch, dtype).items()}
    exact = {key: leaf.double().requires_grad_() for key, leaf in rounded.items()}
    return gradients(make_loss(name, image_ids=batch.image_ids).double(), exact)


def difference(actual, expected):
    """Return the largest difference of gradients, relative to the largest gradient."""
    differences = []
    for key, gradient in expected.items():
        largest = gradient.abs().max().item()
        differences.append((actual[key].double() - gradient).abs().max().item() / (largest or 1))
    return max(differences)


def averaged(gradients_by_rank, batch):
    """Return the gradients of the joined batch that DistributedDataParallel's average over processes amounts to."""
    # Each process has zeros where the features are not its own.
    return {
        key: sum(found[key].double() for found in gradients_by_rank) / len(batch.sizes) for key in gradients_by_rank[0]
    }


def step(name, batch, dtype, rows, rank=0):
    share = batch.shares()[rank]
    image_ids = None if batch.image_ids is None else batch.image_ids[share[0]]
    loss = make_loss(name, rank, len(batch.sizes), LOCAL[rows], image_ids)
    if dtype == torch.float64:
        loss = loss.double()
    return gradients(loss, inputs(name, batch, dtype), share)


def steps(rank, work):
    return [step(*job, rank=rank) for job in work]


def averaged_gradients(work, world_size):
    """Return the averaged gradients of each job, ``(name, batch, dtype, rows)``."""
    by_rank = [steps(0, work)] if world_size == 1 else in_processes(steps, world_size, work)
    return [averaged(found, job[1]) for found, job in zip(zip(*by_rank, strict=True), work, strict=True)]


TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2}


def jobs(batch, cases=CASES, dtypes=(torch.float64,)):
    return [
        # Stock knows one caption of each image.
        (name, batch._replace(captions=1) if CASES[name] is ClipLoss else batch, dtype, rows)
        for name in cases
        for dtype in dtypes
        for rows in LOCAL
    ]


def check(work, world_size):
    found = averaged_gradients(work, world_size)
    assert len(found) == len(work) > 0
    for job, actual in zip(work, found, strict=True):
        assert difference(actual, reference(*job[:3])) < TOLERANCE[job[2]], job


# One of own rows, one of own rows with regularization, one of the whole batch, one of another package.
SOME = ["unified", "smooth_chamfer of unified", "unified of a miner", "NTXentLoss of PML"]
OURS = [name for name in CASES if CASES[name] is not ClipLoss]
UNUSUAL = [
    Batch((4, 2)),
    Batch((4, 4), image_ids=(3, 1, 7, 5, 7, 9, 1, 7)),
    Batch((2, 5), image_ids=(-(2**63), 1, -(2**63), 5, -1, 9, -(2**63))),
]


def test_every_loss_is_among_the_cases():
    assert {getattr(made, "loss", None) for made in CASES.values()} >= set(list_losses())


def test_gradients_of_two_processes_are_those_of_one():
    work = jobs(Batch((4, 4)))
    work += jobs(Batch((4, 4)), ["ClipLoss of open_clip", *SOME], (torch.float32, torch.bfloat16))
    work += jobs(UNUSUAL[1], OURS)
    work += [job for batch in UNUSUAL for job in jobs(batch, SOME)]
    check(work, 2)


@pytest.mark.slow
def test_gradients_of_four_processes_are_those_of_one():
    work = jobs(Batch((3, 3, 3, 3)), dtypes=TOLERANCE)
    work += jobs(Batch((1, 4, 0, 2), image_ids=(1, 2, 3, 1, 1, 2, 6)), SOME)
    check(work, 4)


def test_the_same_image_in_another_process_is_no_negative():
    """One process, whose loss sees an image twice, and its texts too."""
    images, texts = torch.eye(4)[[0, 1, 0]].double(), torch.eye(4)[[0, 1, 0]].double()
    steps, scale = Steps(), torch.tensor(1.0)
    loss = build_loss(options("triplet_hn", margin=0.5), steps)
    assert loss(images, texts, scale) > 0.5
    steps.batches.append(torch.tensor([4, 2, 4]))
    assert loss(images, texts, scale) == 0


@pytest.mark.parametrize(
    ("loss", "own_rows"),
    [
        (CASES["unified"], True),
        (CASES["goal, nca and sig"], True),
        (CASES["smooth_chamfer of triplet_hn"], True),
        (CASES["goal, cir and sig_ms"], False),
        (CASES["unified of a miner"], False),
        (CASES["triplet_hn, AvgNonZeroReducer"], False),
        (CASES["triplet_hn, warm-up"], False),
        (CASES["NTXentLoss of PML"], False),
        (options("unified", embedding_regularizer="LpRegularizer"), False),
    ],
)
def test_own_rows_are_compared_where_that_gives_the_same(loss, own_rows):
    for local_loss in (True, False):
        made = build_loss(Namespace(**vars(loss) | {"local_loss": local_loss}))
        assert made.compares_own_rows == (local_loss and own_rows)
