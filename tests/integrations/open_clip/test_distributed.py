"""Losses of several processes against one process with the joined batch, in float64."""

from argparse import Namespace

import pytest
import torch
from open_clip.loss import ClipLoss

from tests.integrations.open_clip import distributed_gradients as joined
from tests.integrations.open_clip.distributed_gradients import Batch
from vl_plugins import create_loss
from vl_plugins.integrations.open_clip import launcher
from vl_plugins.integrations.open_clip.loss import TwoTowerLoss, build_loss
from vl_plugins.losses import UnifiedLoss
from vl_plugins.registry import list_losses

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2}


def jobs(batch, cases=joined.CASES, dtypes=(torch.float64,)):
    return [
        # Stock knows one caption of each image.
        (name, batch._replace(captions=1) if joined.CASES[name] is ClipLoss else batch, dtype, flags)
        for name in cases
        for dtype in dtypes
        for flags in joined.FLAGS
    ]


def check(work, world_size):
    found = joined.averaged_gradients(work, world_size)
    assert len(found) == len(work) > 0
    for job, actual in zip(work, found, strict=True):
        assert joined.difference(actual, joined.reference(*job)) < TOLERANCE[job[2]], job


# One of own rows, one of own rows with regularization, one of the whole batch, one of another package.
SOME = ["unified", "smooth_chamfer of unified", "unified of a miner", "NTXentLoss of PML"]
UNUSUAL = [
    Batch((4, 2)),
    Batch((4, 4), image_ids=(3, 1, 7, 5, 7, 9, 1, 7)),
    Batch((2, 5), image_ids=(-(2**63), 1, -(2**63), 5, -1, 9, -(2**63))),
]


def test_every_loss_is_among_the_cases():
    assert {getattr(made, "loss", None) for made in joined.CASES.values()} >= set(list_losses())


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
    ("loss", "own_rows"),
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
def test_own_rows_are_compared_where_that_gives_the_same(loss, own_rows):
    assert build_loss(loss, local_loss=True, rank=1, world_size=2).compares_own_rows == own_rows
    assert not build_loss(loss, local_loss=False, rank=1, world_size=2).compares_own_rows
    assert not build_loss(loss, local_loss=True).compares_own_rows


def test_a_loss_with_another_formula_is_computed_of_the_whole_batch():
    class WithItsOwnFormula(UnifiedLoss):
        pass

    regularized = create_loss("unified", embedding_regularizer="LpRegularizer")
    losses = UnifiedLoss(), WithItsOwnFormula(), regularized
    two_towers = [TwoTowerLoss("loss", loss, local_loss=True, world_size=2) for loss in losses]
    assert [each.compares_own_rows for each in two_towers] == [True, False, False]


@pytest.mark.parametrize(
    ("local_loss", "gather_with_grad", "rank", "warned"),
    [(True, False, 0, True), (True, False, 1, False), (True, True, 0, False), (False, False, 0, False)],
)
def test_a_local_loss_without_gradients_of_others_is_warned_of(local_loss, gather_with_grad, rank, warned, caplog):
    """Its direction is not that of the loss, in open_clip neither."""
    options = joined.options("unified")
    args = Namespace(local_loss=local_loss, gather_with_grad=gather_with_grad, rank=rank, world_size=2)
    vars(args).update(accum_freq=1, log_every_n_steps=1)
    launcher._announce_loss(None, options, args)
    assert ("points in another direction than the loss's; add --gather-with-grad" in caplog.text) is warned
