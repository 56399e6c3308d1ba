"""Two losses that are not in the package, those of docs/guides/own_loss.md, get all that the package's losses have."""

import math

import pytest
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.reducers import SumReducer

from tests.helpers.loops import Reference, call_with, calls, check_call, embeddings_of
from tests.helpers.losses import own_losses
from tests.reference import distances
from vl_plugins import negatives
from vl_plugins.losses import PairLoss


def squared_hinge(row, positive, negatives, margin, scale):
    """A squared hinge of the soft maximum of the negatives, by loops."""
    if not negatives:
        return 0.0, {}
    largest = max(row[n] for n in negatives)
    exponentials = {n: math.exp(scale * (row[n] - largest)) for n in negatives}
    total = sum(exponentials.values())
    violation = max(0.0, margin + largest + math.log(total) / scale - row[positive])
    derivatives = {n: 2 * violation * exponential / total for n, exponential in exponentials.items()}
    return violation**2, {**derivatives, positive: -2 * violation}


def sigmoid(row, positive, negatives, scale, bias):
    """Zhai et al. 2023, Eq. 1: minus the logarithm of a sigmoid for each pair."""
    value, derivatives = 0.0, {}
    for column, sign in [(positive, 1), *((n, -1) for n in negatives)]:
        term = math.exp(-sign * (scale * row[column] + bias))
        value += math.log1p(term)
        derivatives[column] = -sign * scale * term / (1 + term)
    return value, derivatives


LOOPS = {
    "SquaredHinge": Reference(squared_hinge, options={"margin": 0.3, "scale": 10.0}),
    "SigmoidLoss": Reference(sigmoid, options={"scale": 4.0, "bias": -1.0}),
}
EACH = pytest.mark.parametrize("name", LOOPS)


@pytest.fixture(scope="module")
def classes():
    found = own_losses()
    assert all(issubclass(loss, PairLoss) for loss in found.values())
    return found


@EACH
def test_value_and_gradient_of_every_call(classes, name, monkeypatch):
    monkeypatch.setattr(negatives, "block_rows", lambda *_: 2)
    make, reference = classes[name], LOOPS[name]
    for what, call in calls():
        check_call(reference, call, loss=make(**reference.options), what=what)
        reduced = make(**reference.options, distance=LpDistance(), reducer=SumReducer(), symmetric=False)
        how = {"reducer": SumReducer(), "similarity": distances.negative_euclidean, "symmetric": False}
        check_call(reference, call, loss=reduced, what=what, **how)
    tiled = make(**reference.options, tiled=True)
    if name == "SigmoidLoss":
        with pytest.raises(ValueError, match="tiled=True needs"):
            tiled(**call_with(2))
    else:
        check_call(reference, call_with(2), loss=tiled)


@EACH
def test_scale_of_a_call(classes, name):
    options = LOOPS[name].options
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    call = call_with(2) | {"scale": scale}
    check_call(LOOPS[name], call, loss=classes[name](**options), options=options | {"scale": 3.0})
    assert torch.autograd.gradcheck(lambda scale: classes[name](**options)(**(call | {"scale": scale})), scale)


@EACH
def test_a_matrix_and_its_second_derivatives(classes, name):
    loss, call = classes[name](**LOOPS[name].options), call_with(2)
    positives = call["labels"][:, None] == call["ref_labels"]
    leaf = torch.linspace(-1, 1, positives.numel(), dtype=torch.float64).sin().reshape(positives.shape).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda s: loss.from_similarities(s, positives, ~positives), leaf)


def test_a_loss_that_is_already_reduced():
    loss = PairLoss()
    loss.negatives, loss.matrix_losses = "matrix", lambda similarities, *_: similarities.mean()
    with pytest.raises(ValueError, match="matrix_losses must return shape"):
        loss(**call_with(1))


def test_the_sigmoid_loss_is_twice_that_of_open_clip(classes):
    siglip_loss = pytest.importorskip("open_clip.loss").SigLipLoss()
    labels = torch.arange(6)
    images, texts = (torch.nn.functional.normalize(embeddings_of(labels, seed=seed)).float() for seed in (0, 1))
    # One loss for each pair: that of SigLIP has each negative once, this one once for its row and once for its column.
    ours = classes["SigmoidLoss"]()(images, labels, ref_emb=texts, ref_labels=labels)
    torch.testing.assert_close(ours, 2 * siglip_loss(images, texts, 10.0, -10.0))
