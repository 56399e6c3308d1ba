"""Losses of several processes against one process with the joined batch, in float64."""

import itertools
from argparse import Namespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss
from pytorch_metric_learning.losses import NTXentLoss

from tests.helpers.processes import in_processes
from vl_plugins.integrations.open_clip import launcher
from vl_plugins.integrations.open_clip.loss import TwoTowerLoss, build_loss
from vl_plugins.integrations.open_clip.options import PluginOptions
from vl_plugins.losses import UnifiedLoss
from vl_plugins.registry import list_losses

D, K = 16, 4
LOGIT_SCALE = 14.0


def options(loss, **fields):
    names = {name: fields.pop(name) for name in ("miner", "reducer", "distance", "head") if name in fields}
    return PluginOptions(loss=loss, loss_kwargs=fields, **names)


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
    "NTXentLoss of PML": lambda **gathering: TwoTowerLoss("nt_xent", NTXentLoss(0.1), **gathering),
    "smooth_chamfer of triplet_hn": options("smooth_chamfer", head="set", mmd_weight=0.3, diversity_weight=0.2),
    "smooth_chamfer of unified": options("smooth_chamfer", head="set", base="unified", scale=20),
    "unified of match_probability": options("unified", head="set", distance="match_probability", scale=20),
}

FLAGS = {
    "neither": {"local_loss": False, "gather_with_grad": False},
    "--local-loss": {"local_loss": True, "gather_with_grad": False},
    "--gather-with-grad": {"local_loss": False, "gather_with_grad": True},
    "both": {"local_loss": True, "gather_with_grad": True},
}


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


def make_loss(name, **gathering):
    made = CASES[name]
    return build_loss(made, **gathering) if isinstance(made, PluginOptions) else made(**gathering)


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


def gradients(loss, leaves, share=None, image_ids=None):
    """Return the gradients of one step by the leaves, and the value; ``share`` is a process's."""
    given = dict(leaves)
    if share is not None:
        images, texts = share
        given = {
            key: leaf if leaf.ndim == 0 else leaf[images if key.startswith("image") else texts]
            for key, leaf in leaves.items()
        }
    if image_ids is not None:
        given["image_ids"] = torch.tensor(image_ids)[share[0] if share else slice(None)]
    for leaf in leaves.values():
        leaf.grad = None
    value = sum(loss(**given, output_dict=True).values())
    value.backward()
    return {key: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for key, leaf in leaves.items()}


def reference(name, batch, dtype, flags):
    """Return the gradients that the processes' average should be: those of one process in float64, by stock's rules.

    Without gradients through gathered features these are divided by the number of processes; with ``--local-loss``
    alone they are those of anchors as if all candidates were constant.
    """
    rounded = {key: leaf.detach() for key, leaf in inputs(name, batch, dtype).items()}
    exact = {key: leaf.double().requires_grad_() for key, leaf in rounded.items()}
    loss = make_loss(name).double()
    anchors_only = flags == "--local-loss" and len(batch.sizes) > 1 and _is_split(name)
    if not anchors_only:
        found = gradients(loss, exact, image_ids=batch.image_ids)
        factor = 1.0 if FLAGS[flags]["gather_with_grad"] else 1 / len(batch.sizes)
        return {key: gradient if key == "logit_scale" else gradient * factor for key, gradient in found.items()}
    pair_loss = getattr(loss, "pair_loss", None)
    if pair_loss is None:  # ClipLoss: half of each direction
        images, texts, scale = exact.values()
        labels = torch.arange(len(images))
        sum(
            0.5 * F.cross_entropy(scale * one @ other.detach().T, labels)
            for one, other in ((images, texts), (texts, images))
        ).backward()
        return {key: leaf.grad for key, leaf in exact.items()}
    # Each direction is a call of its own, with candidates without a gradient.
    call = {"symmetric": False} | ({"scale": exact["logit_scale"]} if loss.learned_scale else {})
    images, texts = exact["image_features"], exact["text_features"]
    ids = torch.tensor(batch.image_ids) if batch.image_ids else torch.arange(len(images))
    text_labels = ids.repeat_interleave(batch.captions)
    total = pair_loss(images, ids, ref_emb=texts.detach(), ref_labels=text_labels, **call)
    if loss.symmetric:
        total = total + pair_loss(texts, text_labels, ref_emb=images.detach(), ref_labels=ids, **call)
    if hasattr(loss.loss, "regularization"):
        # Of gathered features, in which only those of the process itself have a gradient.
        terms = loss.loss.regularization(images, texts, exact["image_slots"], exact["text_slots"])
        total = total + sum(terms.values()) / len(batch.sizes)
    (total + 0 * exact["logit_scale"]).backward()
    return {key: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for key, leaf in exact.items()}


def _is_split(name):
    """Return whether the loss is computed of the processes' own rows where that is asked for."""
    loss = make_loss(name, local_loss=True, rank=0, world_size=2)
    return getattr(loss, "compares_own_rows", True)


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


def step(name, batch, dtype, flags, rank=0):
    gathering = {**FLAGS[flags], "rank": rank, "world_size": len(batch.sizes)}
    loss = make_loss(name, **gathering)
    if dtype == torch.float64:
        loss = loss.double()
    return gradients(loss, inputs(name, batch, dtype), batch.shares()[rank], batch.image_ids)


def steps(rank, work):
    return [step(*job, rank=rank) for job in work]


def averaged_gradients(work, world_size):
    """Return the averaged gradients of each job, ``(name, batch, dtype, flags)``."""
    by_rank = [steps(0, work)] if world_size == 1 else in_processes(steps, world_size, work)
    return [averaged(found, job[1]) for found, job in zip(zip(*by_rank, strict=True), work, strict=True)]


TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2}


def jobs(batch, cases=CASES, dtypes=(torch.float64,)):
    return [
        # Stock knows one caption of each image.
        (name, batch._replace(captions=1) if CASES[name] is ClipLoss else batch, dtype, flags)
        for name in cases
        for dtype in dtypes
        for flags in FLAGS
    ]


def check(work, world_size):
    found = averaged_gradients(work, world_size)
    assert len(found) == len(work) > 0
    for job, actual in zip(work, found, strict=True):
        assert difference(actual, reference(*job)) < TOLERANCE[job[2]], job


# One of own rows, one of own rows with regularization, one of the whole batch, one of another package.
SOME = ["unified", "smooth_chamfer of unified", "unified of a miner", "NTXentLoss of PML"]
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
    work += [job for batch in UNUSUAL for job in jobs(batch, SOME)]
    check(work, 2)


@pytest.mark.slow
def test_gradients_of_four_processes_are_those_of_one():
    work = jobs(Batch((3, 3, 3, 3)), dtypes=TOLERANCE)
    work += jobs(Batch((1, 4, 0, 2), image_ids=(1, 2, 3, 1, 1, 2, 6)), SOME)
    check(work, 4)


def test_one_process_needs_no_flags():
    check(jobs(Batch((6,)), SOME), 1)


def test_the_reference_tells_flags_apart():
    """Each choice of flags has gradients of its own, so that none can stand in for another."""
    batch = Batch((4, 4))
    for name in ("unified", "triplet_hn", "smooth_chamfer of unified"):
        found = [reference(name, batch, torch.float64, flags) for flags in ("neither", "--local-loss", "both")]
        for one, other in ((0, 1), (1, 2), (0, 2)):
            assert difference(found[one], found[other]) > 0.1


def test_the_same_image_in_another_process_is_no_negative():
    """One process, whose loss sees an image twice, and its texts too."""
    images, texts = torch.eye(4)[[0, 1, 0]].double(), torch.eye(4)[[0, 1, 0]].double()
    loss = build_loss(options("triplet_hn", margin=0.5))
    scale = torch.tensor(1.0)
    assert loss(images, texts, scale) > 0.5
    assert loss(images, texts, scale, image_ids=torch.tensor([4, 2, 4])) == 0


class WithItsOwnFormula(UnifiedLoss):
    pass


@pytest.mark.parametrize(
    ("loss", "own_rows"),
    [
        (CASES["unified"], True),
        (CASES["goal, nca and sig"], True),
        (CASES["smooth_chamfer of triplet_hn"], True),
        (CASES["goal, cir and sig_ms"], False),
        (CASES["unified of a miner"], False),
        (CASES["triplet_hn, AvgNonZeroReducer"], False),
        (options("unified", relative=[0, 1]), False),
        (options("unified", margin=lambda similarities: similarities), False),
        (options("unified", embedding_regularizer="LpRegularizer"), False),
        (lambda **gathering: TwoTowerLoss("loss", WithItsOwnFormula(), **gathering), False),
    ],
)
def test_own_rows_are_compared_where_that_gives_the_same(loss, own_rows):
    make = loss if callable(loss) else lambda **gathering: build_loss(loss, **gathering)
    assert make(local_loss=True, rank=1, world_size=2).compares_own_rows == own_rows
    assert not make(local_loss=False, rank=1, world_size=2).compares_own_rows


@pytest.mark.parametrize("warned", [True, False])
def test_a_local_loss_without_gradients_of_others_is_warned_of(warned, caplog):
    """Its direction is not that of the loss, in open_clip neither."""
    args = Namespace(local_loss=True, gather_with_grad=not warned, rank=0, world_size=2)
    launcher._announce_loss(None, options("unified"), args)
    assert ("points in another direction than the loss's; add --gather-with-grad" in caplog.text) is warned
