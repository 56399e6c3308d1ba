"""The similarity of order embeddings against loops, in losses of both directions, and in retrieval."""

import pytest
import torch
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.reducers import SumReducer

from tests.helpers.seeds import seeded
from vl_plugins import create_loss, distances
from vl_plugins.distances import OrderSimilarity
from vl_plugins.integrations.components import create_loss_and_miner
from vl_plugins.losses.cross_modal import CrossModalLoss
from vl_plugins.retrieval.features import Features, describe_similarity

LABELS = torch.tensor([4, 7, 9])
TEXT_LABELS = LABELS.repeat_interleave(2)
MARGIN = 0.05


@pytest.fixture
def sides():
    generator = seeded(0)
    return [torch.randn(rows, 5, generator=generator, dtype=torch.float64, requires_grad=True) for rows in (3, 6)]


def by_hand(images, captions):
    """Similarities (I, C), in loops."""
    rows = []
    for image in images:
        row = []
        for caption in captions:
            unit_image, unit_caption = image.abs() / image.norm(), caption.abs() / caption.norm()
            row.append(-sum(max(c - i, 0 * c) ** 2 for i, c in zip(unit_image, unit_caption, strict=True)))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def hinges(similarities, hardest):
    """The hinges of images as anchors, then of captions, summed: of the hardest negative, or of all."""
    value = 0
    for matrix, labels, other_labels in (
        (similarities, LABELS, TEXT_LABELS),
        (similarities.T, TEXT_LABELS, LABELS),
    ):
        for anchor, row in zip(labels, matrix, strict=True):
            negatives = row[other_labels != anchor]
            if hardest:
                negatives = negatives.max()[None]
            for positive in row[other_labels == anchor]:
                value = value + (MARGIN + negatives - positive).clamp(min=0).sum()
    return value


def check(value, expected, sides):
    assert value > 0
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, sides), torch.autograd.grad(expected, sides))


@pytest.mark.parametrize("captions_first", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_similarities_and_their_gradients(sides, monkeypatch, captions_first, blocks):
    if blocks:
        monkeypatch.setattr(distances, "MATRIX_BYTES", 0)
        monkeypatch.setattr(distances, "block_rows", lambda size, device, least: 2)
    images, captions = sides
    similarity = OrderSimilarity(captions_first=captions_first)
    found = similarity(captions, images).T if captions_first else similarity(images, captions)
    expected = by_hand(images, captions)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(3, 6, generator=seeded(1), dtype=torch.float64)
    gradients = [torch.autograd.grad((matrix * weights).sum(), sides) for matrix in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_a_caption_that_says_less_than_the_image_shows_fits():
    image, less, more = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.2, 0.5]]), torch.tensor([[0.5, 0.7]])
    similarity = OrderSimilarity(normalize_embeddings=False)
    assert similarity(image, less).item() == 0
    assert similarity(image, more).item() == pytest.approx(-0.04)


@pytest.mark.parametrize(("name", "hardest"), [("triplet_hn", True), ("triplet_sh", False)])
def test_losses_compare_images_with_captions_in_both_directions(sides, name, hardest):
    images, captions = sides
    loss = create_loss(name, margin=MARGIN, distance=OrderSimilarity(), reducer="SumReducer")
    value = loss(images, LABELS, ref_emb=captions, ref_labels=TEXT_LABELS)
    check(value, hinges(by_hand(images, captions), hardest), sides)


def test_a_loss_that_is_called_by_direction_compares_images_with_captions_too(sides):
    images, captions = sides
    loss = TripletMarginLoss(margin=MARGIN, distance=OrderSimilarity(), reducer=SumReducer())
    value = CrossModalLoss(loss)(images, LABELS, None, captions, TEXT_LABELS)
    check(value, hinges(by_hand(images, captions), hardest=False), sides)


def test_a_miner_compares_as_the_loss_does(sides):
    images, captions = sides
    specification = {"name": "triplet_sh", "margin": MARGIN, "distance": "OrderSimilarity", "reducer": "SumReducer"}
    loss, miner = create_loss_and_miner(specification, "HardestNegativeMiner")
    value = CrossModalLoss(loss, miner)(images, LABELS, None, captions, TEXT_LABELS)
    check(value, hinges(by_hand(images, captions), hardest=True), sides)
    assert not loss.distance.captions_first


def test_one_set_has_no_images_and_captions(sides):
    with pytest.raises(ValueError, match="compares images with captions, not one set"):
        create_loss("triplet_hn", distance=OrderSimilarity())(sides[0], torch.tensor([1, 1, 2]))


def test_retrieval_uses_it(sides):
    units = [side.detach() / side.detach().norm(dim=1, keepdim=True) for side in sides]
    features = Features(
        images=units[0],
        captions=units[1],
        image_of_caption=torch.arange(3).repeat_interleave(2),
        description=describe_similarity(OrderSimilarity()),
    )
    torch.testing.assert_close(features.similarities().of_captions(torch.arange(6)), by_hand(*units).T)


@pytest.mark.parametrize("absolute", [True, False])
def test_a_zero_vector_has_a_small_gradient(absolute):
    images = torch.tensor([[0.6, 0.8], [0.0, 0.0]], requires_grad=True)
    OrderSimilarity(absolute=absolute)(images, torch.eye(2)).sum().backward()
    assert images.grad.abs().max() < 10
