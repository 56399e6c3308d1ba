"""A loss in both directions against the two calls it stands for."""

import pytest
import torch
from pytorch_metric_learning.losses import ContrastiveLoss, NTXentLoss, TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner
from pytorch_metric_learning.reducers import DoNothingReducer
from pytorch_metric_learning.utils import distributed

from vl_plugins import create_loss
from vl_plugins.distances import SmoothChamferSimilarity
from vl_plugins.losses import Warmup
from vl_plugins.losses.cross_modal import CrossModalLoss
from vl_plugins.miners import HardestNegativeMiner

LABELS = torch.tensor([4, 7, 9])
TEXT_LABELS = LABELS.repeat_interleave(2)
SYMMETRIC = pytest.mark.parametrize("symmetric", [True, False])


@pytest.fixture
def sides():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 5, generator=generator, dtype=torch.float64, requires_grad=True) for rows in (3, 6)]


def compare(loss, images, texts, miner=None, **options):
    return CrossModalLoss(loss, miner)(images, LABELS, None, texts, TEXT_LABELS, **options)


def check(value, expected, sides):
    assert value > 0
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, sides), torch.autograd.grad(expected, sides))


def test_a_loss_of_one_direction_is_called_for_both(sides):
    images, texts = sides
    loss = NTXentLoss()
    expected = loss(images, LABELS, None, texts, TEXT_LABELS) + loss(texts, TEXT_LABELS, None, images, LABELS)
    check(compare(loss, images, texts), expected, sides)


@SYMMETRIC
def test_a_loss_that_adds_directions_is_called_once(sides, symmetric):
    images, texts = sides
    loss = create_loss("unified", symmetric=symmetric)
    expected = loss(images, LABELS, ref_emb=texts, ref_labels=TEXT_LABELS, scale=3.0)
    check(compare(loss, images, texts, scale=3.0), expected, sides)


@SYMMETRIC
def test_a_miner_mines_each_direction(sides, symmetric):
    images, texts = sides
    loss, miner = create_loss("triplet_sh", symmetric=symmetric), BatchHardMiner()
    expected = loss(images, LABELS, miner(images, LABELS, texts, TEXT_LABELS), texts, TEXT_LABELS)
    if symmetric:
        expected = expected + loss(texts, TEXT_LABELS, miner(texts, TEXT_LABELS, images, LABELS), images, LABELS)
    check(compare(loss, images, texts, miner), expected, sides)


class EveryPair:
    """Mines all pairs, which a warm-up treats otherwise than the hardest ones alone."""

    def __call__(self, embeddings, labels, ref_emb, ref_labels):
        equal = labels[:, None] == ref_labels
        return *equal.nonzero().T, *(~equal).nonzero().T


IDS = torch.tensor([5, 6, 7, 5, 8, 8])  # the second text of the second image is the first one of the first image
MATCHING = torch.tensor([[8, -1], [-1, -1], [6, -1]])
# Which texts are no negatives of which images, besides their own.
KNOWN = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]], dtype=torch.bool)
POSITIVES = LABELS[:, None] == TEXT_LABELS
IDS_OF_CALL = {"ref_ids": IDS, "matching_ids": MATCHING}


@pytest.mark.parametrize("miner", [None, EveryPair()], ids=["all pairs", "a miner's"])
def test_known_positives_are_no_negatives_of_a_loss_of_the_host(sides, miner):
    images, texts = sides
    loss = ContrastiveLoss(pos_margin=0, neg_margin=3)
    positives, negatives = torch.where(POSITIVES), torch.where(~POSITIVES & ~KNOWN)
    expected = loss(images, LABELS, (*positives, *negatives), texts, TEXT_LABELS)
    expected = expected + loss(texts, TEXT_LABELS, (*positives[::-1], *negatives[::-1]), images, LABELS)
    check(compare(loss, images, texts, miner, **IDS_OF_CALL), expected, sides)
    assert compare(loss, images, texts, miner) != expected


@pytest.mark.parametrize("miner", [None, EveryPair(), HardestNegativeMiner(k=6)], ids=["all", "pairs", "triplets"])
def test_known_positives_are_no_negatives_of_a_loss_of_ours(sides, miner):
    images, texts = sides
    similarities = torch.nn.functional.normalize(images) @ torch.nn.functional.normalize(texts).T
    loss = create_loss("triplet_sh", reducer="SumReducer")
    expected = loss.from_similarities(similarities, POSITIVES, ~POSITIVES & ~KNOWN)
    check(compare(loss, images, texts, miner, **IDS_OF_CALL), expected, sides)


@pytest.mark.parametrize("miner", [None, EveryPair()], ids=["labels", "a miner"])
def test_both_directions_are_one_step_of_a_warm_up(sides, miner):
    images, texts = sides
    loss = create_loss("triplet_hn", margin=0.5, warmup_steps=2)
    summed, hardest = create_loss("triplet_sh", margin=0.5), create_loss("triplet_hn", margin=0.5)
    for plain in (summed, summed, hardest, hardest):
        expected = compare(plain, images, texts)
        check(compare(loss, images, texts, miner), expected, sides)
    assert loss.step == 4


@pytest.mark.parametrize("mines", [False, True])
def test_regularization_is_added_once(mines):
    images, texts, *slots = (torch.randn(rows, 2, 5, dtype=torch.float64) for rows in (3, 6, 3, 6))
    loss = create_loss("smooth_chamfer", base="unified", mmd_weight=0.5, diversity_weight=0.25)
    miner = BatchHardMiner(distance=loss.distance) if mines else None
    compared = compare(loss.base, images, texts, miner)
    terms = loss.regularization(images, texts, *slots)
    assert set(terms) == {"mmd_loss", "diversity_loss"}
    value = compare(loss, images, texts, miner, slots=slots[0], ref_slots=slots[1])
    torch.testing.assert_close(value, compared + sum(terms.values()))


def test_a_miner_that_drops_own_captions():
    miner = distributed.DistributedMinerWrapper(BatchHardMiner(), efficient=True)
    with pytest.raises(ValueError, match="drops pairs of an image and its own caption"):
        CrossModalLoss(ContrastiveLoss(), miner)


def test_options_of_one_set(sides):
    """They reach the loss; ids, which it does not take, are no silent ones."""
    images, texts = sides
    loss = CrossModalLoss(create_loss("unified"), one_set=True)
    call = images, LABELS, None, texts, TEXT_LABELS
    both = torch.cat([images, texts]), torch.cat([LABELS, TEXT_LABELS])
    torch.testing.assert_close(loss(*call, scale=3.0), create_loss("unified")(*both, scale=3.0))
    with pytest.raises(ValueError, match="ref_ids cannot be given with one_set=True"):
        loss(*call, ref_ids=TEXT_LABELS)
    with pytest.raises(ValueError, match="matching_ids need ref_ids"):
        compare(create_loss("unified"), images, texts, matching_ids=LABELS[:, None])


def test_numbers_of_each_text_with_a_miner(sides):
    """They are of the candidates in one direction, and would be of the anchors in the other."""
    images, texts = sides
    confidence = torch.rand(6, dtype=torch.float64)
    for values in (confidence, confidence.tolist(), confidence.numpy()):
        with pytest.raises(ValueError, match="confidence cannot be given with a miner or a loss"):
            compare(create_loss("triplet_hn"), images, texts, HardestNegativeMiner(), confidence=values)
    loss, miner = create_loss("triplet_hn", symmetric=False), HardestNegativeMiner()
    pairs = miner(images, LABELS, texts, TEXT_LABELS)
    expected = loss(images, LABELS, pairs, texts, TEXT_LABELS, confidence=confidence)
    check(compare(loss, images, texts, miner, confidence=confidence), expected, sides)


def test_known_positives_that_a_loss_does_not_want(sides):
    images, texts = sides
    loss, miner = create_loss("triplet_hn", known_positives=False), HardestNegativeMiner(k=6)
    ids = torch.zeros(6, dtype=torch.long)
    assert compare(loss, images, texts, miner, ref_ids=ids) == compare(loss, images, texts, miner) > 0
    warm = create_loss("triplet_hn", known_positives=False, warmup_steps=1)
    for _ in range(2):
        assert compare(warm, images, texts, miner, ref_ids=ids) > 0
    loss = create_loss("triplet_hn")
    assert compare(loss, images, texts, miner, ref_ids=ids) == 0


def test_a_warm_up_of_sets(sides):
    images, texts = sides
    sets = [create_loss("smooth_chamfer", base=base) for base in ("triplet_sh", "triplet_hn")]
    slots = {"slots": torch.randn(3, 2, 5), "ref_slots": torch.randn(6, 2, 5)}
    for options in ({}, slots):
        expected = sets[0](images, LABELS, None, texts, TEXT_LABELS, **options)
        check(compare(Warmup(*sets, 1), images, texts, **options), expected, sides)
    with pytest.raises(ValueError, match="with a miner, the warm-up belongs to the base of SmoothChamferLoss"):
        CrossModalLoss(Warmup(*sets, 1), HardestNegativeMiner())


@pytest.mark.parametrize("miner", [None, EveryPair()], ids=["labels", "a miner"])
@pytest.mark.parametrize(
    "make_losses",
    [
        lambda: (create_loss("triplet_sh"), ContrastiveLoss()),
        lambda: (ContrastiveLoss(), create_loss("triplet_sh")),
        lambda: (create_loss("triplet_sh", symmetric=False), create_loss("triplet_sh", margin=0.5)),
    ],
    ids=["ours first", "the host's first", "one direction first"],
)
def test_directions_are_those_of_the_loss_of_the_call(sides, make_losses, miner):
    images, texts = sides
    losses = make_losses()
    warm = Warmup(*make_losses(), 1)
    for loss in losses:
        torch.testing.assert_close(compare(warm, images, texts, miner), compare(loss, images, texts, miner))


@pytest.mark.parametrize("name", ["triplet_hn", "unified"])
def test_the_direction_of_a_call_with_a_miner(sides, name):
    images, texts = sides
    miner = HardestNegativeMiner()
    for symmetric in (True, False):
        for of_loss in (True, False):
            expected = compare(create_loss(name, symmetric=symmetric), images, texts, miner)
            loss = create_loss(name, symmetric=of_loss)
            check(compare(loss, images, texts, miner, symmetric=symmetric), expected, sides)


@pytest.mark.parametrize(
    "loss",
    [TripletMarginLoss(distance=SmoothChamferSimilarity()), create_loss("triplet_hn", distance="smooth_chamfer")],
)
def test_packed_sets_of_unequal_sizes(loss):
    """Each side is the query once, whose size a packed set cannot say."""
    images, texts = torch.randn(3, 2, 4), torch.randn(6, 4, 4)
    miner = BatchHardMiner(distance=SmoothChamferSimilarity())
    sets = compare(loss, images, texts, miner)
    loss.distance.set_size = miner.distance.set_size = 2
    assert compare(loss, images.flatten(1), texts.flatten(1), miner) == pytest.approx(sets.item(), rel=1e-6)
    loss.distance.set_size = 1


def test_a_loss_of_the_host_is_computed_in_full_precision(sides):
    images, texts = (side.bfloat16() for side in sides)
    assert compare(NTXentLoss(), images, texts) == compare(NTXentLoss(), images.float(), texts.float())


def test_known_positives_of_a_miner_that_leaves_out_positives():
    """An image's captions are true of it, whether the miner chose them or not."""
    images, texts = torch.eye(3), torch.eye(6)[:, :3] + 0.1
    ids = torch.tensor([1, 2, 2, 3, 4, 5])  # the second caption of the first image is the first one of the second
    triplet = torch.tensor([0]), torch.tensor([0]), torch.tensor([2])
    loss = create_loss("triplet_hn", symmetric=False, margin=2.0)
    assert loss(images, LABELS, triplet, texts, TEXT_LABELS) > 0
    assert loss(images, LABELS, triplet, texts, TEXT_LABELS, ref_ids=ids) == 0
    assert loss(images, None, triplet, texts, ref_ids=ids) > 0  # nothing says that the caption is the image's


def test_reducers_that_do_not_reduce(sides):
    with pytest.raises(ValueError, match="DoNothingReducer gives no number that could be added up: symmetric=False"):
        compare(NTXentLoss(reducer=DoNothingReducer()), *sides)


def test_slots_of_one_set():
    images, texts, *slots = (torch.randn(rows, 2, 5) for rows in (3, 6, 3, 6))
    loss = create_loss("smooth_chamfer")
    value = CrossModalLoss(loss, one_set=True)(
        images, LABELS, None, texts, TEXT_LABELS, slots=slots[0], ref_slots=slots[1]
    )
    both = torch.cat([images, texts]), torch.cat([LABELS, TEXT_LABELS])
    torch.testing.assert_close(value, loss(*both, slots=torch.cat(slots)))
