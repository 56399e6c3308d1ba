"""A loss in both directions against the two calls it stands for."""

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss, MultipleLosses, NTXentLoss, ProxyAnchorLoss
from pytorch_metric_learning.miners import BatchEasyHardMiner, BatchHardMiner
from pytorch_metric_learning.utils import distributed

from vl_plugins import create_loss
from vl_plugins.errors import UserError
from vl_plugins.integrations.cross_modal import check_takes_references, cross_modal_loss

LABELS = torch.tensor([4, 7, 9])
TEXT_LABELS = LABELS.repeat_interleave(2)
SYMMETRIC = pytest.mark.parametrize("symmetric", [True, False])


@pytest.fixture
def sides():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 5, generator=generator, dtype=torch.float64, requires_grad=True) for rows in (3, 6)]


def check(value, expected, sides):
    assert value > 0
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, sides), torch.autograd.grad(expected, sides))


def test_a_loss_of_one_direction_is_called_for_both(sides):
    images, texts = sides
    loss = NTXentLoss()
    expected = loss(images, LABELS, None, texts, TEXT_LABELS) + loss(texts, TEXT_LABELS, None, images, LABELS)
    check(cross_modal_loss(loss, images, LABELS, texts, TEXT_LABELS), expected, sides)


@SYMMETRIC
def test_a_loss_that_adds_directions_is_called_once(sides, symmetric):
    images, texts = sides
    loss = create_loss("unified", symmetric=symmetric)
    expected = loss(images, LABELS, ref_emb=texts, ref_labels=TEXT_LABELS, scale=3.0)
    check(cross_modal_loss(loss, images, LABELS, texts, TEXT_LABELS, scale=3.0), expected, sides)


@SYMMETRIC
def test_a_miner_mines_each_direction(sides, symmetric):
    images, texts = sides
    loss, miner = create_loss("triplet_sh", symmetric=symmetric), BatchHardMiner()
    expected = loss(images, LABELS, miner(images, LABELS, texts, TEXT_LABELS), texts, TEXT_LABELS)
    if symmetric:
        expected = expected + loss(texts, TEXT_LABELS, miner(texts, TEXT_LABELS, images, LABELS), images, LABELS)
    check(cross_modal_loss(loss, images, LABELS, texts, TEXT_LABELS, miner), expected, sides)


class EveryPair:
    """Mines all pairs, which a warm-up treats otherwise than the hardest ones alone."""

    def __call__(self, embeddings, labels, ref_emb, ref_labels):
        equal = labels[:, None] == ref_labels
        return *equal.nonzero().T, *(~equal).nonzero().T


@pytest.mark.parametrize("miner", [None, EveryPair()], ids=["labels", "a miner"])
def test_both_directions_are_one_step_of_a_warm_up(sides, miner):
    images, texts = sides
    loss = create_loss("triplet_hn", margin=0.5, warmup_steps=2)
    summed, hardest = create_loss("triplet_sh", margin=0.5), create_loss("triplet_hn", margin=0.5)
    for plain in (summed, summed, hardest, hardest):
        expected = cross_modal_loss(plain, images, LABELS, texts, TEXT_LABELS)
        check(cross_modal_loss(loss, images, LABELS, texts, TEXT_LABELS, miner), expected, sides)
    assert loss.step == 4


@pytest.mark.parametrize("mines", [False, True])
def test_regularization_is_added_once(mines):
    images, texts, *slots = (torch.randn(rows, 2, 5, dtype=torch.float64) for rows in (3, 6, 3, 6))
    loss = create_loss("smooth_chamfer", base="unified", mmd_weight=0.5, diversity_weight=0.25)
    miner = BatchHardMiner(distance=loss.distance) if mines else None
    compared = cross_modal_loss(loss.base, images, LABELS, texts, TEXT_LABELS, miner)
    terms = loss.regularization(images, texts, *slots)
    assert set(terms) == {"mmd_loss", "diversity_loss"}
    value = cross_modal_loss(loss, images, LABELS, texts, TEXT_LABELS, miner, *slots)
    torch.testing.assert_close(value, compared + sum(terms.values()))


def test_the_same_labels_for_both_sides_do_not_make_them_one_set(sides):
    images, texts = sides[0], sides[1][:3]
    expected = cross_modal_loss(NTXentLoss(), images, LABELS, texts, LABELS.clone())
    assert cross_modal_loss(NTXentLoss(), images, LABELS, texts, LABELS) == expected > 0


def test_a_loss_without_references(sides):
    with pytest.raises(UserError, match="MultipleLosses takes no ref_emb"):
        check_takes_references(MultipleLosses([NTXentLoss()]))
    with pytest.raises(UserError, match=r"ProxyAnchorLoss takes no ref_emb .*one_set: true"):
        cross_modal_loss(ProxyAnchorLoss(num_classes=10, embedding_size=5), sides[0], LABELS, sides[1], TEXT_LABELS)


def test_miners_that_fail(sides):
    miner = distributed.DistributedMinerWrapper(BatchHardMiner(), efficient=True)
    with pytest.raises(ValueError, match=r"drops pairs of an image and its own caption: .*DistributedLoss"):
        cross_modal_loss(ContrastiveLoss(), sides[0], LABELS, sides[1], TEXT_LABELS, miner)
    miner = BatchEasyHardMiner(allowed_pos_range=5)
    with pytest.raises(UserError, match="miner BatchEasyHardMiner fails, see its options: 'int' object is not"):
        cross_modal_loss(ContrastiveLoss(), sides[0], LABELS, sides[1], TEXT_LABELS, miner)
