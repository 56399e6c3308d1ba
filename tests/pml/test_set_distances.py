"""Similarities of sets as the distance of every loss and miner, with sets as they are and packed."""

import inspect
import itertools
from functools import partial

import pytest
import torch
from pytorch_metric_learning import losses as host_losses
from pytorch_metric_learning.distances import BaseDistance
from pytorch_metric_learning.losses.mixins import WeightMixin
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN

from tests.helpers import components
from tests.helpers.loops import LABELS, LOSSES, OTHER_LABELS, check_call, embeddings_of, expected, leaves_of, make_loss
from tests.helpers.seeds import first_that, seed_torch
from tests.reference import sets as reference
from vl_plugins import distances
from vl_plugins.losses import wrappers

K, REF_K, WIDTH = 2, 3, 4

# By class name: its options, and the loops.
SIMILARITIES = {
    "ChamferSimilarity": ({}, reference.chamfer),
    "MILSimilarity": ({}, reference.mil),
    "MatchProbability": ({"scale": 10.0, "shift": -3.0}, partial(reference.match_probability, scale=10.0, shift=-3.0)),
    "SmoothChamferSimilarity": ({}, reference.smooth_chamfer),
}
NAMES = pytest.mark.parametrize("distance_name", distances.__all__)

# What losses without class weights need, or what suits a similarity.
ARGUMENTS = {
    "ContrastiveLoss": {"pos_margin": 1.0, "neg_margin": 0.0},
    "RankedListLoss": {"margin": 0.5, "Tn": 1, "alpha": 0.9},
}
CLASS_WEIGHT_ARGUMENTS = {"num_classes", "descriptors_dim", "l"}


def make_distance(distance_name, **options):
    return getattr(distances, distance_name)(**(SIMILARITIES[distance_name][0] | options))


def make_sets(labels, size, seed, dtype=torch.float64):
    return embeddings_of(labels, dtype, seed, dimension=size * WIDTH).detach().view(-1, size, WIDTH)


def two_sides():
    return make_sets(LABELS, K, seed=0), make_sets(OTHER_LABELS, REF_K, seed=1)


def host_losses_with(distance):
    """Return ``{name: loss}`` of all the host's losses that take this distance, but those with class weights."""
    found = {}
    for name, loss_class in components.classes("losses", host_losses.BaseMetricLossFunction).items():
        parameters = inspect.signature(loss_class.__init__).parameters.values()
        required = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
        required -= {"self", "kwargs", "args", *ARGUMENTS.get(name, ())}
        has_weights = required & CLASS_WEIGHT_ARGUMENTS or issubclass(loss_class, WeightMixin)
        if has_weights or loss_class is host_losses.GenericPairLoss:  # a base class
            continue
        assert not required, f"{name} needs {required}: add them to ARGUMENTS"
        try:
            found[name] = loss_class(**ARGUMENTS.get(name, {}), distance=distance)
        except (AssertionError, ValueError) as error:
            if "requires the distance metric to be" not in str(error) and "cannot use a distance" not in str(error):
                raise
    assert {"ContrastiveLoss", "NTXentLoss", "RankedListLoss", "TripletMarginLoss"} <= set(found)
    assert len(found) >= 13
    return found


class Lookup(BaseDistance):
    """Similarities that the loops computed, of the first items to all, which may be of different shapes."""

    def __init__(self, items, similarities):
        super().__init__(is_inverted=True)
        self.items, self.similarities = items, similarities

    def forward(self, query_emb, ref_emb=None):
        rows, columns = self.find(query_emb), self.find(query_emb if ref_emb is None else ref_emb)
        return self.similarities[rows][:, columns]

    def find(self, embeddings):
        return [
            next(i for i, item in enumerate(self.items) if item.shape == sets.shape and torch.equal(item, sets))
            for sets in embeddings
        ]


def value_and_gradients(loss, leaves, packed):
    """Of the loss of one side, or two; None if the loss takes one side only."""
    sides = [leaf.flatten(1) for leaf in leaves] if packed else leaves
    references = {"ref_emb": sides[1], "ref_labels": OTHER_LABELS} if len(sides) == 2 else {}
    try:
        value = loss(sides[0], LABELS, **references)
    except ValueError as error:
        if not references or "ref_emb is not supported for this loss function" not in str(error):
            raise
        return None
    return value.detach(), *torch.autograd.grad(3 * value, leaves)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@NAMES
def test_every_loss_of_the_host(distance_name):
    images, texts = (side.requires_grad_() for side in two_sides())
    similarities = torch.stack(
        [SIMILARITIES[distance_name][1](one, other) for one in images for other in (*images, *texts)]
    ).view(len(images), -1)
    table = similarities.detach().requires_grad_()
    ours = host_losses_with(make_distance(distance_name, set_size=K))
    theirs = host_losses_with(Lookup([*images, *texts], table))
    with_references = 0
    for name, loss in ours.items():
        for leaves in ([images], [images, texts]):
            what = f"{name}, {len(leaves)} side(s)"
            actual = value_and_gradients(loss, leaves, packed=False)
            if actual is None:
                continue
            with_references += len(leaves) == 2
            references = {"ref_emb": texts, "ref_labels": OTHER_LABELS} if len(leaves) == 2 else {}
            value = theirs[name](images, LABELS, **references)
            assert value.abs() > 1e-6, what
            (weights,) = torch.autograd.grad(3 * value, table)
            gradients = torch.autograd.grad(similarities, leaves, weights, retain_graph=True)
            for found in (actual, value_and_gradients(loss, leaves, packed=True)):
                for one, other in zip(found, (value.detach(), *gradients), strict=True):
                    torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8, msg=what)
    assert with_references >= 10


@NAMES
def test_every_miner(distance_name):
    images, texts = two_sides()
    compared = 0
    for name, miner in components.miners().items():
        if name == "EmbeddingsAlreadyPackagedAsTriplets":  # looks at no embeddings
            continue
        try:
            type(miner)(**components.ARGUMENTS.get(name, dict)(), distance=make_distance(distance_name))
        except AssertionError as error:
            if "requires the distance metric to be" not in str(error):
                raise
            continue
        miner.distance = make_distance(distance_name, set_size=K)
        for sides in ((images,), (images, texts)):
            found = []
            for embeddings in (sides, [side.flatten(1) for side in sides]):
                seed_torch(0)
                references = (embeddings[1], OTHER_LABELS) if len(sides) == 2 else ()
                found.append(miner(embeddings[0], LABELS, *references))
            assert len(found[0]) == len(found[1]) >= 3
            assert all(map(torch.equal, *found)), name
            compared += len(found[0][0]) > 0
    assert compared >= 12


def test_hardest_negatives_of_sets():
    """One miner by the loops; the others are the host's."""
    images, texts = two_sides()
    miner = components.miners()["HardestNegativeMiner"]
    miner.distance = make_distance("SmoothChamferSimilarity")
    same = LABELS[:, None] == OTHER_LABELS
    hardest = reference.matrix(reference.smooth_chamfer, images, texts).masked_fill(same, -2).argmax(1)
    anchors, positives = torch.where(same)
    found = miner(images, LABELS, texts, OTHER_LABELS)
    assert all(map(torch.equal, found, (anchors, positives, hardest[anchors])))


@LOSSES
def test_every_loss_of_ours(name):
    for distance_name in distances.__all__:
        loss = make_loss(name, distance=make_distance(distance_name, set_size=K))
        for count in (1, 2):
            sides = [side.requires_grad_() for side in two_sides()[:count]]
            call = {"embeddings": sides[0], "labels": LABELS}
            if count == 2:
                call |= {"ref_emb": sides[1], "ref_labels": OTHER_LABELS}
            what = f"{distance_name}, {count} side(s)"
            check_call(name, call, loss=loss, similarity=SIMILARITIES[distance_name][1], what=what)
            found = [value_and_gradients(loss, leaves_of(call), packed) for packed in (False, True)]
            assert all(map(torch.equal, *found)), what


def packed_smooth_chamfer(query, other):
    unpacked = (side.view(-1, WIDTH) for side in (query, other))
    return reference.elements_that_are_not_zero(reference.smooth_chamfer)(*unpacked)


@LOSSES
def test_memory_of_packed_sets(name):
    """Padding stays padding in the queue."""
    distance = distances.SmoothChamferSimilarity(set_size=K)
    loss = make_loss(name, distance=distance)
    memory = wrappers.CrossBatchMemory(loss, embedding_size=K * WIDTH, memory_size=20)
    before, batch = make_sets(OTHER_LABELS, K, 1), make_sets(LABELS, K, 0)
    before[2, 1] = batch[3, 1] = 0
    batch = batch.flatten(1).requires_grad_()
    memory(before.flatten(1), OTHER_LABELS)
    value = memory(batch, LABELS)

    labels = torch.cat([OTHER_LABELS, LABELS])
    same = LABELS[:, None] == labels
    positives = same.clone()
    positives[torch.arange(6), torch.arange(9, 15)] = False  # each one's own copy
    call = {
        "embeddings": batch,
        "labels": LABELS,
        "ref_emb": torch.cat([before.flatten(1), batch.detach()]),
        "ref_labels": labels,
        "indices_tuple": (*torch.where(positives), *torch.where(~same)),
    }
    expected_value, gradients = expected(name, call, similarity=packed_smooth_chamfer)
    assert expected_value > 1e-3
    torch.testing.assert_close(value.item(), expected_value)
    torch.testing.assert_close(torch.autograd.grad(value, batch)[0], gradients[0])


@pytest.mark.parametrize("batch_size", [None, 4], ids=["at once", "in batches"])
@NAMES
def test_accuracy_by_sets(distance_name, batch_size):
    """The host's calculator wants two dimensions."""
    similarity = SIMILARITIES[distance_name][1]

    def precision_of(sides):
        closest = reference.matrix(similarity, *sides).argmax(1)
        return (OTHER_LABELS[closest] == LABELS).double().mean().item()

    draws = ((make_sets(LABELS, K, seed), make_sets(OTHER_LABELS, K, seed + 1)) for seed in itertools.count(step=2))
    images, texts = sides = first_that(lambda sides: 0 < precision_of(sides) < 1, draws)
    knn = CustomKNN(make_distance(distance_name, set_size=K), batch_size=batch_size)
    calculator = AccuracyCalculator(include=("precision_at_1",), k=1, knn_func=knn)
    with torch.no_grad():
        found = calculator.get_accuracy(images.flatten(1), LABELS, texts.flatten(1), OTHER_LABELS)
    assert found["precision_at_1"] == pytest.approx(precision_of(sides))
