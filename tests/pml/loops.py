"""What any loss of this package should be for any call of pytorch-metric-learning, by the loops of the papers."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pytorch_metric_learning.reducers import MeanReducer

from tests.reference import distances, goal, losses
from vl_plugins import create_loss, list_losses
from vl_plugins.registry import find_loss

LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
OTHER_LABELS = torch.tensor([2, 0, 3, 1, 1, 0, 2, 3, 1])
UPSTREAM = 3.0


@dataclass(frozen=True)
class Reference:
    """The loops of one loss.

    ``pair`` is called as the functions of :mod:`tests.reference.losses`, with the similarities of all positive pairs as
    ``batch_positives`` where it asks for them. ``triplet`` is called for given triplets, as :func:`losses.triplet` is,
    with the anchor's negatives and ``batch_positives`` where it asks for them; None for a loss that takes triplets as
    pairs.
    """

    pair: Callable
    triplet: Callable | None = None
    options: dict[str, Any] = field(default_factory=dict)
    smooth: bool = False
    """Twice differentiable, and its gradient is that of its value."""
    only_similarities: bool = False
    """Refuses distances that are not inverted."""
    of_loss: dict[str, Any] = field(default_factory=dict)
    """More options of the loss, which the loops do not have."""


GOAL_OPTIONS = {"triplet_weight": "cir", "pair_weight": "sig_ms", "margin": 0.3, "tau": 7.0, "offset": 0.0, "eps": 0.2}

# A loss that is not here fails the whole suite.
REFERENCES = {
    "goal": Reference(goal.goal_hardest, goal.goal_triplet, GOAL_OPTIONS, only_similarities=True),
    # Of sets of one element, without the regularizers: the triplet loss of cosines.
    "smooth_chamfer": Reference(
        losses.triplet_hn,
        losses.triplet,
        {"margin": 0.3},
        of_loss={"mmd_weight": 0.0, "diversity_weight": 0.0},
    ),
    "triplet_hn": Reference(losses.triplet_hn, losses.triplet, {"margin": 0.3}),
    "triplet_sh": Reference(losses.triplet_sh, losses.triplet, {"margin": 0.3}),
    "unified": Reference(losses.unified, options={"margin": 0.3, "scale": 10.0}, smooth=True),
    "vlc": Reference(losses.vlc, options={"scale": 10.0}, smooth=True),
}


def own_losses():
    """The names of all losses of this distribution."""
    names = [name for name in list_losses() if find_loss(name).dist.name == "vl_plugins"]
    assert len(names) >= 5
    return names


LOSSES = pytest.mark.parametrize("name", own_losses())
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def reference_of(name):
    if name not in REFERENCES:
        pytest.fail(f"add the loops of loss {name!r} to REFERENCES in tests/pml/loops.py")
    return REFERENCES[name]


def make_loss(name, **options):
    reference = reference_of(name)
    return create_loss(name, **reference.options, **reference.of_loss, **options)


def embeddings_of(labels, dtype=torch.float64, seed=0, dimension=5):
    """Random embeddings that lie near others of the same label, but not always nearest."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(100, dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    noise = torch.randn(len(labels), dimension, dtype=torch.float64, generator=generator)
    return (centers[labels] + 1.5 * noise).to(dtype).requires_grad_()


def call_with(sets, dtype=torch.float64):
    """The arguments of a loss or miner: one set, or two of 6 and 9."""
    call = {"embeddings": embeddings_of(LABELS, dtype), "labels": LABELS}
    if sets == 2:
        call |= {"ref_emb": embeddings_of(OTHER_LABELS, dtype, seed=1), "ref_labels": OTHER_LABELS}
    return call


def leaves_of(call):
    return [call[name] for name in ("embeddings", "ref_emb") if call.get(name) is not None]


def given_pairs(indices_tuple):
    """The sets of positive and negative pairs of a miner's tuple."""
    indices = [index.tolist() for index in indices_tuple]
    return set(zip(*indices[:2], strict=True)), set(
        zip(*(indices[2:] if len(indices) == 4 else indices[::2]), strict=True)
    )


def values_and_derivatives(name, similarities, call, symmetric):
    """Return the loss of each positive pair or triplet, as a list of ``(indices, value, {(a, c): derivative})``.

    Args:
        similarities: a list of rows.
        call: the arguments of the loss; its embeddings are not looked at.
        symmetric: also the columns are anchors, where two sets are compared by labels.
    """
    reference = reference_of(name)
    indices_tuple = call.get("indices_tuple")
    if indices_tuple is not None and len(indices_tuple) == 3 and reference.triplet is not None:
        return _triplets(reference, similarities, list(zip(*(index.tolist() for index in indices_tuple), strict=True)))
    labels, ref_labels = call.get("labels"), call.get("ref_labels")
    two_sets = call.get("ref_emb") is not None
    if indices_tuple is None:
        positives, negatives = losses.pairs_of_labels(labels.tolist(), ref_labels.tolist() if two_sets else None)
    else:
        positives, negatives = given_pairs(indices_tuple)
    options = dict(reference.options)
    if "batch_positives" in inspect.signature(reference.pair).parameters:
        options["batch_positives"] = [similarities[a][p] for a, p in sorted(positives)]
    symmetric = symmetric and two_sets and indices_tuple is None
    values, derivatives = losses.pair_losses(
        reference.pair, similarities, positives, negatives, symmetric=symmetric, **options
    )
    return [(pair, values[pair], derivatives[pair]) for pair in sorted(values)]


def _triplets(reference, similarities, triplets):
    parameters = inspect.signature(reference.triplet).parameters
    options = dict(reference.options)
    if "batch_positives" in parameters:
        options["batch_positives"] = [similarities[a][p] for a, p in sorted({(a, p) for a, p, _ in triplets})]
    found = []
    for a, p, n in triplets:
        if "negatives" in parameters:
            options["negatives"] = sorted({other for b, _, other in triplets if b == a})
        value, of_row = reference.triplet(similarities[a], p, n, **options)
        found.append(((a, p, n), value, {(a, c): derivative for c, derivative in of_row.items()}))
    return found


def expected(name, call, *, reducer=None, similarity=distances.cosine, symmetric=True):
    """Return the reduced loss and its gradients with respect to the embeddings, in float64.

    The loops give the values, ``reducer`` reduces them (the host's own, MeanReducer by default), and the derivatives go
    through the similarities of :mod:`tests.reference.distances`.
    """
    reducer = reducer or MeanReducer()
    twins, similarities = similarities_of(similarity, [leaf.detach().double() for leaf in leaves_of(call)])
    items = values_and_derivatives(name, similarities.tolist(), call, symmetric)
    if not items:
        return 0.0, [torch.zeros_like(twin) for twin in twins]
    values = twins[0].new_tensor([value for _, value, _ in items]).requires_grad_()
    of_triplets = len(items[0][0]) == 3
    loss_dict = {
        "loss": {
            "losses": values,
            "indices": tuple(torch.tensor([indices for indices, _, _ in items]).T),
            "reduction_type": "triplet" if of_triplets else "pos_pair",
            "divisor": len(items),
        }
    }
    reduced = reducer(loss_dict, twins[0].detach(), call.get("labels"))
    weights = torch.autograd.grad(reduced, values)[0].tolist()
    gradient = [[0.0] * similarities.shape[1] for _ in range(len(similarities))]
    for weight, (_, _, derivatives) in zip(weights, items, strict=True):
        for (a, c), derivative in derivatives.items():
            gradient[a][c] += weight * derivative
    return reduced.item(), torch.autograd.grad(
        similarities, twins, similarities.new_tensor(gradient), retain_graph=True
    )


def similarities_of(similarity, embeddings):
    """Return leaves and the matrix of their similarities; kept, because most calls compare the same embeddings."""
    key = (similarity, *(tuple(leaf.flatten().tolist()) for leaf in embeddings))
    if key not in _KEPT:
        twins = [leaf.clone().requires_grad_() for leaf in embeddings]
        _KEPT[key] = twins, distances.matrix(similarity, *twins)
    return _KEPT[key]


_KEPT = {}


def check(actual, leaves, value, gradients, tolerance=None, what="", least=1e-3):
    """Compare a loss and its gradients, with an upstream gradient that is not 1, with what is expected."""
    dtype = leaves[0].dtype
    tolerance = tolerance or TOLERANCE[dtype]
    assert value > least, f"{what}: the case shows nothing"
    assert max(gradient.abs().max() for gradient in gradients) > least, f"{what}: the case shows nothing"
    assert actual.dtype == dtype
    of_actual = torch.autograd.grad(UPSTREAM * actual, leaves)

    def message(text):
        return f"{what}: {text}"

    torch.testing.assert_close(actual.item(), value, atol=tolerance, rtol=tolerance, msg=message)
    for of_leaf, gradient in zip(of_actual, gradients, strict=True):
        assert of_leaf.isfinite().all()
        torch.testing.assert_close(
            of_leaf.double(), UPSTREAM * gradient, atol=10 * tolerance, rtol=10 * tolerance, msg=message
        )


def check_call(name, call, *, loss=None, what="", tolerance=None, **how):
    """Compare ``loss(**call)`` with the loops."""
    loss = make_loss(name) if loss is None else loss
    check(loss(**call), leaves_of(call), *expected(name, call, **how), tolerance=tolerance, what=f"{name} {what}")


def distance_of(name, distance):
    """Return a loss with this distance, or check that it is refused, and return None."""
    if reference_of(name).only_similarities and not distance.is_inverted:
        with pytest.raises(ValueError, match=f"needs a similarity .* got {type(distance).__name__}"):
            make_loss(name, distance=distance)
        return None
    return make_loss(name, distance=distance)
