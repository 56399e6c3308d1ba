"""What a loss should be for a call of pytorch-metric-learning, by the loops of the papers."""

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from pytorch_metric_learning.miners import MultiSimilarityMiner, TripletMarginMiner
from pytorch_metric_learning.reducers import MeanReducer

from tests.helpers.losses import own_losses
from tests.helpers.seeds import first_that, seeded
from tests.reference import distances, goal, losses
from vl_plugins import create_loss
from vl_plugins.losses.goal import PAIR_WEIGHTS, TRIPLET_WEIGHTS

LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
OTHER_LABELS = torch.tensor([2, 0, 3, 1, 1, 0, 2, 3, 1])
MINERS = {"labels": None, "pairs": MultiSimilarityMiner(epsilon=0.5), "triplets": TripletMarginMiner(margin=0.3)}
UPSTREAM = 3.0
LEAST = 1e-3
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


@dataclass(frozen=True)
class Reference:
    """The loops of one loss.

    Attributes:
        loss: its name, or that of a class of :func:`tests.helpers.losses.own_losses`.
        pair: called as the functions of :mod:`tests.reference.losses`, with the similarities of all positive pairs as
            ``batch_positives`` where it has such a parameter.
        triplet: called for a given triplet as :func:`losses.triplet` is, with the anchor's negatives and
            ``batch_positives`` where it has such parameters; None for a loss that takes triplets for pairs.
        options: of the loss and the loops.
        loss_options: of the loss alone.
    """

    loss: str
    pair: Callable
    triplet: Callable | None = None
    options: dict[str, Any] = field(default_factory=dict)
    loss_options: dict[str, Any] = field(default_factory=dict)


def goal_reference(triplet_weight="cir", pair_weight="sig_ms", pair=goal.goal_hardest, **loss_options):
    options = {"triplet_weight": triplet_weight, "pair_weight": pair_weight}
    options |= {"margin": 0.3, "tau": 7.0, "offset": 0.0, "eps": 0.2}
    return Reference("goal", pair, goal.goal_triplet, options, loss_options)


# Coefficients of polynomials.
SSP, RSP = ([0.5, -0.7, 0.2], [0.03, 0.9]), [0.1, 0.8, 0.5, -0.2]
OF_SSP = {"weights": tuple(map(losses.polynomial, SSP))}
OF_RSP = {"relative": losses.polynomial(RSP)}
NO_REGULARIZATION, WARM = {"mmd_weight": 0.0, "diversity_weight": 0.0}, {"warmup_steps": 10**6}
REFERENCES = {
    "triplet_hn": Reference("triplet_hn", losses.triplet_hn, losses.triplet, {"margin": 0.3}),
    "triplet_hn warm": Reference("triplet_hn", losses.triplet_sh, losses.triplet, {"margin": 0.3}, WARM),
    "triplet_sh": Reference("triplet_sh", losses.triplet_sh, losses.triplet, {"margin": 0.3}),
    "unified": Reference("unified", losses.unified, options={"margin": 0.3, "scale": 10.0}),
    "unified SSP": Reference(
        "unified", partial(losses.unified, **OF_SSP), None, {"margin": 0.3, "scale": 10.0}, {"weights": SSP}
    ),
    "unified RSP": Reference(
        "unified", partial(losses.unified, **OF_RSP), None, {"margin": 0.3, "scale": 10.0}, {"relative": RSP}
    ),
    "vlc": Reference("vlc", losses.vlc, options={"scale": 10.0}),
    "goal": goal_reference(),
    "goal warm": goal_reference(pair=goal.goal_all, **WARM),
    **{f"goal {triplet} {pair}": goal_reference(triplet, pair) for triplet in TRIPLET_WEIGHTS for pair in PAIR_WEIGHTS},
    # Of sets of one element: the triplet loss of cosines.
    "smooth_chamfer": Reference(
        "smooth_chamfer", losses.triplet_hn, losses.triplet, {"margin": 0.3}, NO_REGULARIZATION
    ),
    "own SquaredHinge": Reference("SquaredHinge", losses.squared_hinge, options={"margin": 0.3, "scale": 10.0}),
    "siglip": Reference(
        "siglip", losses.siglip, options={"scale": 4.0, "bias": -1.0}, loss_options={"symmetric": True}
    ),
}


def make_loss(name, **options):
    reference = REFERENCES[name]
    create = own_losses()[reference.loss] if name.startswith("own") else partial(create_loss, reference.loss)
    return create(**(reference.options | reference.loss_options | options))


def embeddings_of(labels, dtype=torch.float64, seed=0, dimension=5):
    """Random embeddings that lie near others of the same label, but not always nearest."""
    generator = seeded(seed)
    centers = torch.randn(100, dimension, dtype=torch.float64, generator=seeded(99))
    noise = torch.randn(len(labels), dimension, dtype=torch.float64, generator=generator)
    return (centers[labels] + 1.5 * noise).to(dtype).requires_grad_()


def draw_call(sets, dtype, candidates, number):
    """The arguments of a loss or miner: one set of 6, or two; others for each number."""
    call = {"embeddings": embeddings_of(LABELS, dtype, seed=2 * number), "labels": LABELS}
    if sets == 2:
        ref_labels = OTHER_LABELS[:candidates]
        call |= {"ref_emb": embeddings_of(ref_labels, dtype, seed=2 * number + 1), "ref_labels": ref_labels}
    return call


def draw_calls(sets, dtype=torch.float64, candidates=9):
    return (draw_call(sets, dtype, candidates, number) for number in itertools.count())


def call_with(sets, dtype=torch.float64, candidates=9):
    """The arguments of a loss or miner, in which negatives are nearer than positives, for the miners too."""
    return draw_call(sets, dtype, candidates, _number_of_call(sets, candidates))


@functools.cache
def _number_of_call(sets, candidates):
    def is_hard(number):
        call = draw_call(sets, torch.float64, candidates, number)
        for miner in MINERS.values():
            indices = {} if miner is None else {"indices_tuple": miner(**call)}
            if indices and len(indices["indices_tuple"][0]) < 3:
                return False
            # More than the margin of 0.3: there is a pair whose negative is nearer.
            if expected("triplet_hn", call | indices)[0] < 0.35:
                return False
        return True

    return first_that(is_hard, itertools.count())


def calls(dtype=torch.float64, candidates=9):
    """``(what, arguments)`` of all kinds of calls: one set or two, by labels, pairs or triplets."""
    for sets in (1, 2):
        for kind, miner in MINERS.items():
            call = call_with(sets, dtype, candidates)
            if miner is not None:
                call["indices_tuple"] = miner(**call)
            yield f"{kind} of {sets} set(s)", call


def moved(call, device="cuda", dtype=None):
    """The arguments on another device; embeddings are leaves, of ``dtype`` if it is given."""

    def move(value):
        if isinstance(value, tuple):
            return tuple(map(move, value))
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().to(device, dtype or value.dtype).requires_grad_()
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return {name: move(value) for name, value in call.items()}


def leaves_of(call):
    return [call[name] for name in ("embeddings", "ref_emb") if call.get(name) is not None]


def values_of(name, similarities, call, *, options=None, symmetric=True):
    """Return the loss of each positive pair or triplet, as a list of ``(indices, value)``.

    Args:
        name: of the loss.
        similarities: (A, C), float64.
        call: the arguments of the loss; its embeddings are not looked at.
        options: instead of those of the reference.
        symmetric: also the columns are anchors, where two sets are compared by labels.
    """
    reference = REFERENCES[name]
    options = dict(reference.options if options is None else options)
    two_sets, indices_tuple = call.get("ref_emb") is not None, call.get("indices_tuple")
    if indices_tuple is None:
        ref_labels = call["ref_labels"].tolist() if two_sets else None
        positives, negatives = losses.pairs_of_labels(call["labels"].tolist(), ref_labels)
    else:
        indices = [index.tolist() for index in indices_tuple]
        positives = set(zip(*indices[:2], strict=True))
        negatives = set(zip(indices[-2] if len(indices) == 4 else indices[0], indices[-1], strict=True))
    are_triplets = indices_tuple is not None and len(indices_tuple) == 3 and reference.triplet is not None
    parameters = inspect.signature(reference.triplet if are_triplets else reference.pair).parameters
    if "batch_positives" in parameters:
        options["batch_positives"] = [similarities[pair].item() for pair in sorted(positives)]
    if not are_triplets:
        symmetric = symmetric and two_sets and indices_tuple is None
        pairs = positives, negatives
        return list(losses.pair_losses(reference.pair, similarities, *pairs, symmetric=symmetric, **options).items())
    found = []
    for a, p, n in zip(*indices, strict=True):
        if "negatives" in parameters:
            options["negatives"] = sorted(other for row, other in negatives if row == a)
        found.append(((a, p, n), reference.triplet(similarities[a], p, n, **options)))
    return found


def expected(name, call, *, reducer=None, similarity=distances.cosine, **how):
    """Return the reduced loss and its gradients with respect to the embeddings, in float64.

    The loops give the values, ``reducer`` reduces them (PML's own, MeanReducer by default), and the gradients go
    through the similarities of :mod:`tests.reference.distances`.
    """
    reducer = reducer or MeanReducer()
    twins, similarities = similarities_of(similarity, [leaf.detach().double() for leaf in leaves_of(call)])
    leaf = similarities.detach().requires_grad_()
    items = values_of(name, leaf, call, **how)
    reduced = torch.zeros(())
    if items:
        info = {
            "losses": torch.stack([value for _, value in items]),
            "indices": tuple(torch.tensor([indices for indices, _ in items]).T),
            "reduction_type": "triplet" if len(items[0][0]) == 3 else "pos_pair",
            "divisor": len(items),
        }
        reduced = reducer({"loss": info}, twins[0].detach(), call.get("labels"))
    if not reduced.requires_grad:  # of nothing
        return 0.0, [torch.zeros_like(twin) for twin in twins]
    (gradient,) = torch.autograd.grad(reduced, leaf)
    return reduced.item(), torch.autograd.grad(similarities, twins, gradient, retain_graph=True)


def similarities_of(similarity, embeddings):
    """Return leaves and the matrix of their similarities; kept, because most calls compare the same embeddings."""
    key = (similarity, *(tuple(leaf.flatten().tolist()) for leaf in embeddings))
    if key not in _KEPT:
        twins = [leaf.clone().requires_grad_() for leaf in embeddings]
        _KEPT[key] = twins, distances.matrix(similarity, *twins)
    return _KEPT[key]


_KEPT = {}


def shows_something(name, call, **how):
    """Whether a loss and its gradients are large enough to be compared."""
    value, gradients = expected(name, call, **how)
    return value > LEAST and max(gradient.abs().max() for gradient in gradients) > LEAST


def check(actual, leaves, value, gradients, what="", least=LEAST):
    """Compare a loss and its gradients, with an upstream gradient that is not 1, with what is expected."""
    tolerance = TOLERANCE[leaves[0].dtype]
    assert value > least, f"{what}: the case shows nothing"
    assert max(gradient.abs().max() for gradient in gradients) > least, f"{what}: the case shows nothing"
    assert actual.dtype == leaves[0].dtype
    close = {"atol": tolerance, "rtol": tolerance, "msg": lambda text: f"{what}: {text}"}
    torch.testing.assert_close(actual.item(), value, **close)
    close |= {"atol": 10 * tolerance, "rtol": 10 * tolerance}
    for actual_gradient, gradient in zip(torch.autograd.grad(UPSTREAM * actual, leaves), gradients, strict=True):
        torch.testing.assert_close(actual_gradient.cpu().double(), UPSTREAM * gradient, **close)


def check_call(name, call, *, loss=None, what="", device="cpu", **how):
    """Compare ``loss(**call)`` with the loops."""
    loss = make_loss(name) if loss is None else loss
    value, gradients = expected(name, call, **how)
    call = call if device == "cpu" else moved(call, device)
    check(loss(**call), leaves_of(call), value, gradients, what=f"{name} {what}")
