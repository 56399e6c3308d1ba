"""Losses of several processes against one process with the joined batch, in float64."""

import logging
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from open_clip.loss import ClipLoss

from tests.integrations.open_clip import distributed_gradients as joined
from tests.integrations.open_clip.distributed_gradients import Batch
from vl_plugins import create_loss
from vl_plugins.integrations.open_clip import launcher
from vl_plugins.integrations.open_clip.gathering import Processes
from vl_plugins.integrations.open_clip.loss import TwoTowerLoss, build_loss, create_pair_loss
from vl_plugins.integrations.open_clip.training import Training
from vl_plugins.losses import UnifiedLoss
from vl_plugins.registry import list_losses
from vl_plugins.utils.errors import UserError

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2}


def jobs(batch, cases=joined.CASES, dtypes=(torch.float64, torch.float32, torch.bfloat16)):
    return [
        # Stock knows one caption of each image.
        (name, batch._replace(captions=1) if joined.CASES[name] is ClipLoss else batch, dtype, flags)
        for name in cases
        for dtype in dtypes
        for flags in joined.FLAGS
        if name not in joined.RINGS or flags in ("neither", "both")  # of which it needs none
    ]


def check(work, world_size):
    found = joined.of_processes(work, world_size)
    assert len(found) == len(work) > 0
    for job, actual in zip(work, found, strict=True):
        assert joined.difference(actual, joined.reference(*job)) < TOLERANCE[job[2]], job


# Not of open_clip's loss, which cannot do it.
OURS = [name for name, made in joined.CASES.items() if made is not ClipLoss]
UNUSUAL = {
    "other sizes": Batch((4, 2)),
    "the same images in both": Batch((4, 4), image_ids=(3, 1, 7, 5, 7, 9, 1, 7)),
    "the same images in batches of other sizes": Batch((2, 5), image_ids=(3, 1, 3, 5, 7, 9, 3)),
}


def test_every_loss_is_among_the_cases():
    assert {getattr(made, "loss", None) for made in joined.CASES.values()} >= set(list_losses())


def test_gradients_of_two_processes_are_those_of_one():
    work = jobs(Batch((4, 4)), dtypes=(torch.float64, torch.bfloat16))
    work += [job for batch in UNUSUAL.values() for job in jobs(batch, OURS, (torch.float64,))]
    of_groups = Batch((4, 4), image_ids=(-(2**63), 1, -1, 5, -1, -(2**63), 0, 7))
    work += jobs(of_groups, ["unified"], (torch.float64,))
    check(work, 2)


@pytest.mark.slow
def test_gradients_of_four_processes_are_those_of_one():
    work = jobs(Batch((3, 3, 3, 3)))
    work += jobs(Batch((1, 4, 0, 2), image_ids=(1, 2, 3, 1, 1, 2, 6)), OURS, (torch.float64,))
    check(work, 4)


@pytest.mark.parametrize("flags", joined.FLAGS)
def test_one_process_needs_no_flags(flags):
    for job in jobs(Batch((6,)), dtypes=(torch.float64,)):
        if job[3] == flags:
            assert joined.difference(joined.averaged([joined.step(*job)], job[1]), joined.reference(*job)) < 1e-12, job


def test_the_reference_tells_flags_apart():
    """Each choice of flags has gradients of its own, so that none can stand in for another."""
    batch = Batch((4, 4))
    for name in ("unified", "triplet_hn", "smooth_chamfer of unified"):
        found = [joined.reference(name, batch, torch.float64, flags) for flags in ("neither", "--local-loss", "both")]
        for one, other in ((0, 1), (1, 2), (0, 2)):
            assert joined.difference(found[one], found[other]) > 0.1


def test_the_same_image_in_another_process_is_no_negative():
    """One process, whose loss sees an image twice, and its texts too."""
    images, texts = torch.eye(4)[[0, 1, 0]].double(), torch.eye(4)[[0, 1, 0]].double()
    loss = build_loss(joined.options("triplet_hn", margin=0.5))
    scale = torch.tensor(1.0)
    assert loss(images, texts, scale) > 0.5
    assert loss(images, texts, scale, image_ids=torch.tensor([4, 2, 4])) == 0


@pytest.mark.parametrize(
    ("loss", "splits"),
    [
        *[(joined.CASES[name], True) for name in ("unified", "vlc, scale=learned", "triplet_sh", "goal, nca and sig")],
        (joined.CASES["smooth_chamfer of triplet_hn"], True),
        (joined.CASES["goal, cir and sig_ms"], False),
        (joined.CASES["goal, con and lin_ms"], False),
        (joined.CASES["unified of a miner"], False),
        (joined.CASES["triplet_hn, AvgNonZeroReducer"], False),
        (joined.options("unified", relative=[0, 1]), False),
        (joined.options("unified", margin=lambda similarities: similarities), False),
    ],
)
def test_rows_are_shared_out_where_that_gives_the_same(loss, splits):
    assert build_loss(loss, local_loss=True, rank=1, world_size=2).by_rows == splits
    assert not build_loss(loss, local_loss=False, rank=1, world_size=2).by_rows
    assert not build_loss(loss, local_loss=True).by_rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (joined.options("unified", miner="BatchHardMiner"), "BatchHardMiner chooses the pairs"),
        (joined.options("smooth_chamfer", head="set"), "SmoothChamferLoss needs all features at once"),
        (joined.options("unified", head="set"), "SmoothChamferSimilarity is neither CosineSimilarity nor"),
        (joined.options("unified", reducer="AvgNonZeroReducer"), "by MeanReducer and without a regularizer"),
        (joined.options("triplet_hn", warmup_steps=3), "all negatives count during the warm-up"),
        (joined.options("triplet_sh"), "TripletSHLoss needs all similarities"),
    ],
)
def test_what_a_ring_cannot_do_is_refused_at_the_start(options, message):
    with pytest.raises(UserError, match=f"--exchange ring cannot be used, because .*{message}.*: leave it out"):
        build_loss(replace(options, exchange="ring"))


def test_one_process_needs_no_ring():
    loss = build_loss(joined.options("unified", exchange="ring"))
    assert not loss.through_ring
    assert loss.pair_loss.ring is None


def test_a_loss_with_another_formula_is_not_shared_out():
    class WithItsOwnFormula(UnifiedLoss):
        def pair_losses(self, similarities, positive_mask, negative_mask, *, symmetric):
            return similarities[positive_mask] - similarities.mean()

    split, own = (
        TwoTowerLoss("loss", loss, local_loss=True, world_size=2) for loss in (UnifiedLoss(), WithItsOwnFormula())
    )
    assert split.by_rows
    assert not own.by_rows
    regularized = create_loss("unified", embedding_regularizer="LpRegularizer")
    assert not TwoTowerLoss("loss", regularized, local_loss=True, world_size=2).by_rows


@pytest.mark.parametrize(
    ("local_loss", "gather_with_grad", "rank", "exchange", "warned"),
    [
        (True, False, 0, None, True),
        (True, False, 1, None, False),
        (True, False, 0, "ring", False),
        (True, True, 0, None, False),
        (False, False, 0, None, False),
    ],
)
def test_a_local_loss_without_gradients_of_others_is_warned_of(
    local_loss, gather_with_grad, rank, exchange, warned, caplog
):
    """Its direction is not that of the loss, in open_clip neither."""
    options = joined.options("unified", exchange=exchange)
    args = Namespace(local_loss=local_loss, gather_with_grad=gather_with_grad, rank=rank, world_size=2)
    vars(args).update(horovod=False, accum_freq=1, log_every_n_steps=1)
    launcher._create_loss(args, options=options, loss=create_pair_loss(options), training=Training())
    assert ("points in another direction than the loss's; add --gather-with-grad" in caplog.text) is warned


class Told(Processes):
    """Two processes, of which the other says what it is given to say."""

    def __init__(self, *others):
        super().__init__(world_size=2)
        self.others = list(others)

    def _tell(self, numbers):
        return [numbers.tolist(), self.others.pop(0)]


def test_batches_of_different_sizes_are_warned_of_once(caplog):
    processes = Told(*[[3, 2, 0, -1]] * 3)
    shares = [processes.join(number, 2 * number).share for number in (3, 2, 1)]
    assert shares == [1, 0.8, 0.5]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "batches of different sizes, [2, 3] images" in record.message


def test_a_process_without_images_need_not_give_ids():
    processes = Told([3, 2, 0, 3], [7, 4, 7])
    batch = processes.join(0, 0)
    assert (batch.sizes, batch.captions_per_image, batch.share) == ((0, 3), 2, 0)
    assert batch.labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("other", "given", "message"),
    [
        ([3, 2, 0, -1], (3, 7), "got 7 texts for 3 images in process 0"),
        ([3, 2, 1, -1], (3, 6), "got 7 texts for 3 images in process 1"),
        ([3, 1, 0, -1], (3, 6), "captions per image must be the same in all processes"),
        ([3, 2, 0, 3], (3, 6), "image_ids must be given in all processes or in none"),
        ([3, 2, 0, 3], (3, 6, torch.arange(4)), "image_ids must be one for each of 3 images, got 4 in process 0"),
        ([3, 2, 0, 2], (3, 6, torch.arange(3)), "image_ids must be one for each of 3 images, got 2 in process 1"),
    ],
)
def test_batches_that_do_not_fit_each_other(other, given, message):
    with pytest.raises(ValueError, match=message):
        Told(other).join(*given)
