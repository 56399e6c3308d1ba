"""A loss in both directions against the two calls it stands for."""

import pytest
import torch
from pytorch_metric_learning.losses import (
    ContrastiveLoss,
    FastAPLoss,
    MultipleLosses,
    NTXentLoss,
    ProxyAnchorLoss,
    SelfSupervisedLoss,
)
from pytorch_metric_learning.miners import BatchEasyHardMiner, BatchHardMiner
from pytorch_metric_learning.utils import distributed

from vl_plugins import create_loss
from vl_plugins.losses.cross_modal import check_takes_references, cross_modal_loss
from vl_plugins.utils.errors import UserError

LABELS = torch.tensor([4, 7, 9])
TEXT_LABELS = LABELS.repeat_interleave(2)


@pytest.fixture
def sides():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 5, generator=generator, dtype=torch.float64, requires_grad=True) for rows in (3, 6)]


def value_and_gradients(value, sides):
    return [value.detach(), *torch.autograd.grad(value, sides)]


@pytest.mark.parametrize("make", [NTXentLoss, ContrastiveLoss])
def test_a_loss_of_one_direction_is_called_for_both(sides, make):
    images, texts = sides
    expected = make()(images, LABELS, None, texts, TEXT_LABELS) + make()(texts, TEXT_LABELS, None, images, LABELS)
    value = cross_modal_loss(make(), images, LABELS, texts, TEXT_LABELS)
    torch.testing.assert_close(value_and_gradients(value, sides), value_and_gradients(expected, sides))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["unified", "vlc", "triplet_hn", "goal"])
def test_a_loss_that_adds_directions_is_called_once(sides, name, symmetric):
    images, texts = sides
    loss = create_loss(name, symmetric=symmetric)
    expected = loss(images, LABELS, ref_emb=texts, ref_labels=TEXT_LABELS)
    value = cross_modal_loss(loss, images, LABELS, texts, TEXT_LABELS)
    assert value > 0
    torch.testing.assert_close(value_and_gradients(value, sides), value_and_gradients(expected, sides))


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_miner_mines_each_direction(sides, symmetric):
    images, texts = sides
    loss, miner = create_loss("triplet_sh", symmetric=symmetric), BatchHardMiner()
    expected = loss(images, LABELS, miner(images, LABELS, texts, TEXT_LABELS), texts, TEXT_LABELS)
    if symmetric:
        expected = expected + loss(texts, TEXT_LABELS, miner(texts, TEXT_LABELS, images, LABELS), images, LABELS)
    value = cross_modal_loss(loss, images, LABELS, texts, TEXT_LABELS, miner=miner)
    torch.testing.assert_close(value_and_gradients(value, sides), value_and_gradients(expected, sides))


@pytest.mark.parametrize("miner", [None, BatchHardMiner()])
def test_regularization_is_added_once(miner):
    generator = torch.Generator().manual_seed(0)
    images, texts, image_slots, text_slots = (
        torch.randn(rows, 2, 5, generator=generator, dtype=torch.float64) for rows in (3, 6, 3, 6)
    )
    loss = create_loss("smooth_chamfer", base="unified", mmd_weight=0.5, diversity_weight=0.25)
    if miner is not None:
        miner = BatchHardMiner(distance=loss.distance)
    compared = cross_modal_loss(loss.base, images, LABELS, texts, TEXT_LABELS, miner=miner)
    terms = loss.regularization(images, texts, image_slots, text_slots)
    assert set(terms) == {"mmd_loss", "diversity_loss"}
    value = cross_modal_loss(
        loss, images, LABELS, texts, TEXT_LABELS, miner=miner, image_slots=image_slots, text_slots=text_slots
    )
    torch.testing.assert_close(value, compared + sum(terms.values()))


def test_the_same_labels_for_both_sides_do_not_make_them_one_set(sides):
    images, texts = sides[0], sides[1][:3]
    loss = NTXentLoss()
    expected = cross_modal_loss(loss, images, LABELS, texts, LABELS.clone())
    assert expected > 0
    assert cross_modal_loss(loss, images, LABELS, texts, LABELS) == expected


@pytest.mark.parametrize("loss", [MultipleLosses([NTXentLoss()]), SelfSupervisedLoss(NTXentLoss())])
def test_a_loss_without_references_is_refused(loss):
    with pytest.raises(UserError, match=f"{type(loss).__name__} takes no ref_emb"):
        check_takes_references(loss)


@pytest.mark.parametrize("loss", [ProxyAnchorLoss(num_classes=10, embedding_size=5), FastAPLoss()])
def test_a_loss_that_refuses_references_when_called(sides, loss):
    images, texts = sides
    with pytest.raises(UserError, match=f"{type(loss).__name__} takes no ref_emb .*MetricLossOnly"):
        cross_modal_loss(loss, images, LABELS, texts, TEXT_LABELS)


def test_the_hosts_miner_of_several_processes_is_refused(sides):
    """It would drop each image's own caption, see tests/pml/test_distributed.py."""
    images, texts = sides
    miner = distributed.DistributedMinerWrapper(BatchHardMiner(), efficient=True)
    with pytest.raises(ValueError, match=r"use vl_plugins\.losses\.wrappers\.DistributedMinerWrapper"):
        cross_modal_loss(ContrastiveLoss(), images, LABELS, texts, TEXT_LABELS, miner=miner)


def test_a_miner_with_an_option_of_a_wrong_type(sides):
    images, texts = sides
    miner = BatchEasyHardMiner(allowed_pos_range=5)
    with pytest.raises(UserError, match="miner BatchEasyHardMiner fails, see its options: 'int' object is not"):
        cross_modal_loss(ContrastiveLoss(), images, LABELS, texts, TEXT_LABELS, miner=miner)
