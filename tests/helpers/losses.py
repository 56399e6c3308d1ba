"""The losses of the package and of the documentation, and the ways to compute each."""

import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pytorch_metric_learning import distances

from tests.helpers.loops import REFERENCES, Reference
from tests.reference import goal, losses
from vl_plugins import create_loss
from vl_plugins.losses.goal import PAIR_WEIGHTS, TRIPLET_WEIGHTS

__all__ = [
    "DIFFERENCES",
    "EACH",
    "EACH_AND_OWN",
    "LOSSES",
    "SOME",
    "PlainCosine",
    "make",
    "needs_matrix",
    "own_losses",
    "ways",
]


def squared_hinge(row, positive, negatives, margin, scale):
    """A squared hinge of the soft maximum of the negatives, by loops."""
    if not negatives:
        return 0 * row[positive]
    soft_maximum = torch.log(sum(torch.exp(scale * row[n]) for n in negatives)) / scale
    return (margin + soft_maximum - row[positive]).relu() ** 2


def sigmoid(row, positive, negatives, scale, bias):
    """Zhai et al. 2023, Eq. 1: minus the logarithm of a sigmoid for each pair."""
    signs = {positive: 1} | dict.fromkeys(negatives, -1)
    return sum(torch.log1p(torch.exp(-sign * (scale * row[column] + bias))) for column, sign in signs.items())


class PlainCosine(distances.CosineSimilarity):
    """For which all similarities are computed."""


GOAL = REFERENCES["goal"]
LOSSES = {name: (name, reference) for name, reference in REFERENCES.items() if name not in ("goal", "smooth_chamfer")}
LOSSES |= {
    f"goal {triplet} {pair}": (
        "goal",
        replace(GOAL, options=GOAL.options | {"triplet_weight": triplet, "pair_weight": pair}),
    )
    for triplet in TRIPLET_WEIGHTS
    for pair in PAIR_WEIGHTS
}
LOSSES["triplet_hn warm"] = (
    "triplet_hn",
    Reference(losses.triplet_sh, losses.triplet, {"margin": 0.3}, {"warmup_steps": 10**6}),
)
LOSSES["goal warm"] = ("goal", replace(GOAL, pair=goal.goal_all, loss_options={"warmup_steps": 10**6}))
ONE_OF_EACH = ["unified", "vlc", "triplet_hn", "triplet_sh", "goal nca con", "goal cir sig_ms", "goal nca lin_ms"]
ONE_OF_EACH += ["own SquaredHinge"]
WAYS = {"chosen": {}, "dense": {"tiled": False}, "tiled": {"tiled": True}, "matrix": {"distance": PlainCosine()}}
NEEDS_MATRIX = ("triplet_sh", "warm", "_ms", "SigmoidLoss")
# Take real distances too.
DIFFERENCES = ("unified", "vlc", "triplet_hn", "triplet_sh", "goal con con", "goal nca con", "own SquaredHinge")
EACH = pytest.mark.parametrize("name", list(LOSSES))
LOSSES["own SquaredHinge"] = "SquaredHinge", Reference(squared_hinge, options={"margin": 0.3, "scale": 10.0})
LOSSES["own SigmoidLoss"] = "SigmoidLoss", Reference(sigmoid, options={"scale": 4.0, "bias": -1.0})
EACH_AND_OWN = pytest.mark.parametrize("name", LOSSES)
SOME = pytest.mark.parametrize("name", ONE_OF_EACH)


def make(name, **options):
    key, reference = LOSSES[name]
    create = own_losses()[key] if name.startswith("own") else functools.partial(create_loss, key)
    return create(**(reference.options | reference.loss_options | options))


def needs_matrix(name):
    return any(word in name for word in NEEDS_MATRIX)


def ways(name):
    """Yield each way to compute a loss, and its options."""
    for way, options in WAYS.items():
        if way != "tiled" or not needs_matrix(name):
            yield way, options


@functools.cache
def own_losses():
    """The classes by name of docs/guides/own_loss.md, whose code runs as it stands."""
    guide = Path(__file__).parents[2] / "docs" / "guides" / "own_loss.md"
    names = {}
    for code in re.findall(r"^```python\n(.*?)^```", guide.read_text(), flags=re.MULTILINE | re.DOTALL):
        exec(code, names)
    return {name: names[name] for name in ("SquaredHinge", "SigmoidLoss")}
