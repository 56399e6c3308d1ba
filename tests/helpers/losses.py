"""The losses of the package and of the documentation, and the ways to compute each."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from pytorch_metric_learning import distances

from tests.helpers.loops import REFERENCES, Reference
from tests.reference import goal, losses
from vl_plugins import create_loss
from vl_plugins.losses.goal import PAIR_WEIGHTS, TRIPLET_WEIGHTS

__all__ = ["DIFFERENCES", "EACH", "LOSSES", "SOME", "PlainCosine", "make", "needs_matrix", "own_losses", "ways"]


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
WAYS = {"chosen": {}, "dense": {"tiled": False}, "tiled": {"tiled": True}, "matrix": {"distance": PlainCosine()}}
NEEDS_MATRIX = ("triplet_sh", "warm", "_ms")
DIFFERENCES = ("unified", "vlc", "triplet_hn", "triplet_sh", "goal con con", "goal nca con")  # take real distances too
EACH = pytest.mark.parametrize("name", LOSSES)
SOME = pytest.mark.parametrize("name", ONE_OF_EACH)


def make(name, **options):
    key, reference = LOSSES[name]
    return create_loss(key, **(reference.options | reference.loss_options | options))


def needs_matrix(name):
    return any(word in name for word in NEEDS_MATRIX)


def ways(name):
    """Yield each way to compute a loss, and its options."""
    for way, options in WAYS.items():
        if way != "tiled" or not needs_matrix(name):
            yield way, options


def own_losses():
    """The classes by name of docs/guides/own_loss.md, whose code runs as it stands."""
    guide = Path(__file__).parents[2] / "docs" / "guides" / "own_loss.md"
    names = {}
    for code in re.findall(r"^```python\n(.*?)^```", guide.read_text(), flags=re.MULTILINE | re.DOTALL):
        exec(code, names)
    return {name: names[name] for name in ("SquaredHinge", "SigmoidLoss")}
