"""Similarities of sets as the distance of every loss and miner, with sets as they are and packed."""

import inspect

import pytest
import torch
from pytorch_metric_learning import distances as host_distances
from pytorch_metric_learning import losses as host_losses
from pytorch_metric_learning.losses.mixins import WeightMixin
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN

from tests.helpers import components
from tests.helpers.loops import LABELS, LOSSES, OTHER_LABELS, check_call, embeddings_of, expected, leaves_of, make_loss
from tests.reference import sets as reference
from vl_plugins import distances
from vl_plugins.losses import wrappers

K, REF_K, WIDTH = 2, 3, 4


def match_probability(xs, ys):
    return reference.match_probability(xs, ys, scale=10.0, shift=-3.0)


# By class name: how it is made, and the loops.
SIMILARITIES = {
    "ChamferSimilarity": ({}, reference.chamfer),
    "MILSimilarity": ({}, reference.mil),
    "MatchProbability": ({"scale": 10.0, "shift": -3.0}, match_probability),
    "SmoothChamferSimilarity": ({}, reference.smooth_chamfer),
}
NAMES = pytest.mark.parametrize("distance_name", distances.__all__)
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["sets", "packed"])

# What losses without class weights need, or what suits a similarity.
ARGUMENTS = {
    "ContrastiveLoss": {"pos_margin": 1.0, "neg_margin": 0.0},
    "RankedListLoss": {"margin": 0.5, "Tn": 1, "alpha": 0.9},
}
OF_CLASS_WEIGHTS = {"num_classes", "descriptors_dim", "l"}


def distance_of(distance_name, **options):
    return getattr(distances, distance_name)(**(SIMILARITIES[distance_name][0] | options))


def losses_that_take(distance):
    """Return ``{name: loss}`` of all host's losses with this distance.

    Left out are those with class weights, which are vectors and not sets, and those that demand a certain distance.
    """
    found, demanding = {}, []
    for name, loss_class in components.classes("losses", host_losses.BaseMetricLossFunction).items():
        parameters = inspect.signature(loss_class.__init__).parameters.values()
        required = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
        required -= {"self", "kwargs", "args", *ARGUMENTS.get(name, ())}
        has_weights = required & OF_CLASS_WEIGHTS or issubclass(loss_class, WeightMixin)
        if has_weights or loss_class is host_losses.GenericPairLoss:  # a base class
            continue
        assert not required, f"{name} needs {required}: say in ARGUMENTS which"
        try:
            found[name] = loss_class(**ARGUMENTS.get(name, {}), distance=distance)
        except (AssertionError, ValueError) as error:
            if "requires the distance metric to be" not in str(error) and "cannot use a distance" not in str(error):
                raise
            demanding.append(name)
    assert "CircleLoss" in demanding
    assert {"ContrastiveLoss", "NTXentLoss", "RankedListLoss", "TripletMarginLoss"} <= set(found)
    assert len(found) >= 13
    return found


class Lookup(host_distances.BaseDistance):
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


def sets_of(labels, size, seed, dtype=torch.float64):
    return embeddings_of(labels, dtype, seed, dimension=size * WIDTH).detach().view(-1, size, WIDTH)


@pytest.fixture(scope="module")
def items():
    """Sets of both sides; by distance the loops' similarities of the first to all, and the derivatives of each."""
    images = sets_of(LABELS, K, seed=0).requires_grad_()
    texts = sets_of(OTHER_LABELS, REF_K, seed=1).requires_grad_()
    everything = [*images, *texts]
    found = {}
    for name, (_, of_sets) in SIMILARITIES.items():
        similarities = [of_sets(one, other) for one in images for other in everything]
        derivatives = [
            torch.autograd.grad(similarity, (images, texts), materialize_grads=True) for similarity in similarities
        ]
        found[name] = (
            torch.stack(similarities).detach().view(len(images), len(everything)),
            [torch.stack(of_side) for of_side in zip(*derivatives, strict=True)],
        )
    return images.detach(), texts.detach(), found


def value_and_gradients(loss, images, texts, packed):
    """Of the loss with one side, or two; None if the loss takes one side only."""
    leaves = [sets.detach().flatten(1) if packed else sets.detach() for sets in (images, texts) if sets is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    more = {} if texts is None else {"ref_emb": leaves[1], "ref_labels": OTHER_LABELS}
    try:
        value = loss(leaves[0], LABELS, **more)
    except ValueError as error:
        if texts is None or "ref_emb is not supported for this loss function" not in str(error):
            raise
        return None
    gradients = torch.autograd.grad(3 * value, leaves)
    return value.detach(), [gradient.view_as(sets) for gradient, sets in zip(gradients, (images, texts), strict=False)]


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@PACKED
@NAMES
def test_every_loss_of_the_host(items, distance_name, packed):
    images, texts, found = items
    similarities, derivatives = found[distance_name]
    similarities = similarities.clone().requires_grad_()
    ours = losses_that_take(distance_of(distance_name, set_size=K))
    theirs = losses_that_take(Lookup([*images, *texts], similarities))
    assert ours.keys() == theirs.keys()
    with_references = []
    for name, loss in ours.items():
        for other in (None, texts):
            actual = value_and_gradients(loss, images, other, packed)
            if actual is None:
                continue
            with_references.append(other is not None)
            more = {} if other is None else {"ref_emb": texts, "ref_labels": OTHER_LABELS}
            value = theirs[name](images, LABELS, **more)
            assert value.abs() > 1e-6, name
            weights = torch.autograd.grad(3 * value, similarities)[0].flatten()
            gradients = [weights @ of_side.flatten(1) for of_side in derivatives]

            def message(text, name=name, other=other):
                return f"{name}, {'one set' if other is None else 'two sets'}: {text}"

            torch.testing.assert_close(actual[0], value.detach(), atol=1e-9, rtol=1e-9, msg=message)
            for of_side, gradient in zip(actual[1], gradients, strict=False):
                torch.testing.assert_close(of_side.flatten(), gradient, atol=1e-8, rtol=1e-8, msg=message)
    assert with_references.count(True) >= 10
    assert with_references.count(False) == len(ours)


@NAMES
def test_every_miner(distance_name):
    images, texts = sets_of(LABELS, K, seed=0), sets_of(OTHER_LABELS, REF_K, seed=1)
    compared = []
    for name, miner in components.miners().items():
        if name == "EmbeddingsAlreadyPackagedAsTriplets":  # looks at no embeddings
            continue
        try:
            type(miner)(**components.ARGUMENTS.get(name, dict)(), distance=distance_of(distance_name))
        except AssertionError as error:
            if "requires the distance metric to be" not in str(error):
                raise
            continue
        miner.distance = distance_of(distance_name, set_size=K)
        for more in ({}, {"ref_emb": texts, "ref_labels": OTHER_LABELS}):
            found = []
            for packed in (False, True):
                torch.manual_seed(0)
                sides = {"embeddings": images, **more}
                if packed:
                    sides = {key: value.flatten(1) if "emb" in key else value for key, value in sides.items()}
                found.append(miner(labels=LABELS, **sides))
            assert len(found[0]) == len(found[1]) >= 3
            assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), name
            compared.append(len(found[0][0]) > 0)
    assert compared.count(True) >= 12


def test_hardest_negatives_of_sets():
    """One miner by the loops; the others are the host's."""
    images, texts = sets_of(LABELS, K, seed=0), sets_of(OTHER_LABELS, REF_K, seed=1)
    miner = components.miners()["HardestNegativeMiner"]
    miner.distance = distance_of("SmoothChamferSimilarity")
    similarities = reference.matrix(reference.smooth_chamfer, images, texts)
    triplets = list(zip(*(index.tolist() for index in miner(images, LABELS, texts, OTHER_LABELS)), strict=True))
    positives = torch.where(LABELS[:, None] == OTHER_LABELS)
    hardest = similarities.masked_fill(LABELS[:, None] == OTHER_LABELS, -2).argmax(1).tolist()
    assert triplets == [(a, p, hardest[a]) for a, p in zip(*(index.tolist() for index in positives), strict=True)]


def call_with(packed, sets, dtype=torch.float64):
    call = {"embeddings": sets_of(LABELS, K, 0, dtype), "labels": LABELS}
    if sets == 2:
        call |= {"ref_emb": sets_of(OTHER_LABELS, REF_K, 1, dtype), "ref_labels": OTHER_LABELS}
    return {
        key: (value.flatten(1) if packed else value).requires_grad_() if "emb" in key else value
        for key, value in call.items()
    }


def of_packed(query, other):
    return reference.smooth_chamfer(query.view(-1, WIDTH), other.view(-1, WIDTH))


@LOSSES
def test_every_loss_of_ours(name):
    for distance_name in distances.__all__:
        loss = make_loss(name, distance=distance_of(distance_name, set_size=K))
        for sets in (1, 2):
            call, packed = call_with(False, sets), call_with(True, sets)
            what = f"{distance_name}, {sets} set(s)"
            check_call(name, call, loss=loss, similarity=SIMILARITIES[distance_name][1], what=what)
            value, packed_value = loss(**call), loss(**packed)
            assert torch.equal(packed_value, value), what
            gradients = [
                torch.autograd.grad(*pair) for pair in ((value, leaves_of(call)), (packed_value, leaves_of(packed)))
            ]
            for of_sets, of_packed_sets in zip(*gradients, strict=True):
                assert torch.equal(of_sets.flatten(1), of_packed_sets), what


@LOSSES
def test_memory_of_packed_sets(name):
    memory = wrappers.CrossBatchMemory(
        make_loss(name, distance=distances.SmoothChamferSimilarity(set_size=K)),
        embedding_size=K * WIDTH,
        memory_size=20,
    )
    batches = [
        sets_of(labels, K, seed).flatten(1).requires_grad_() for labels, seed in ((OTHER_LABELS, 1), (LABELS, 0))
    ]
    memory(batches[0], OTHER_LABELS)
    value = memory(batches[1], LABELS)

    queue, labels = torch.cat([batch.detach() for batch in batches]), torch.cat([OTHER_LABELS, LABELS])
    same = LABELS[:, None] == labels
    positives = same.clone()
    positives[torch.arange(6), torch.arange(9, 15)] = False  # each one's own copy
    call = {
        "embeddings": batches[1],
        "labels": LABELS,
        "ref_emb": queue,
        "ref_labels": labels,
        "indices_tuple": (*torch.where(positives), *torch.where(~same)),
    }
    expected_value, gradients = expected(name, call, similarity=of_packed)
    assert expected_value > 1e-3
    torch.testing.assert_close(value.item(), expected_value)
    torch.testing.assert_close(torch.autograd.grad(value, batches[1])[0], gradients[0])


@pytest.mark.parametrize("batch_size", [None, 4], ids=["at once", "in batches"])
@NAMES
def test_accuracy_by_sets(distance_name, batch_size):
    """The host's calculator wants two dimensions."""
    images, texts = sets_of(LABELS, K, seed=0), sets_of(OTHER_LABELS, K, seed=1)
    calculator = AccuracyCalculator(
        include=("precision_at_1",),
        k=1,
        knn_func=CustomKNN(distance_of(distance_name, set_size=K), batch_size=batch_size),
    )
    with torch.no_grad():
        found = calculator.get_accuracy(images.flatten(1), LABELS, texts.flatten(1), OTHER_LABELS)
    closest = reference.matrix(SIMILARITIES[distance_name][1], images, texts).argmax(1)
    precision = (OTHER_LABELS[closest] == LABELS).double().mean().item()
    assert 0 < precision < 1
    assert found["precision_at_1"] == pytest.approx(precision)
