import pytest
from pytorch_metric_learning.distances import DotProductSimilarity, LpDistance

from tests.helpers.loops import GOAL_OPTIONS, call_with, calls, check_call
from vl_plugins import create_loss
from vl_plugins.functional.goal import PAIR_WEIGHTS, TRIPLET_WEIGHTS, Objective
from vl_plugins.losses import GOALLoss

COMBINATIONS = [(triplet, pair) for triplet in TRIPLET_WEIGHTS for pair in PAIR_WEIGHTS]
ALL_COMBINATIONS = pytest.mark.parametrize(("triplet", "pair"), COMBINATIONS, ids=map("-".join, COMBINATIONS))


@ALL_COMBINATIONS
def test_all_objectives(triplet, pair):
    options = GOAL_OPTIONS | {"triplet_weight": triplet, "pair_weight": pair, "offset": 0.1, "alpha": 3.0, "lam": 0.4}
    for what, call in calls():
        check_call("goal", call, loss=GOALLoss(**options), options=options, what=what)


@ALL_COMBINATIONS
def test_only_weights_of_differences_take_real_distances(triplet, pair):
    options = {"triplet_weight": triplet, "pair_weight": pair}
    assert GOALLoss(**options, distance=DotProductSimilarity())(**call_with(2)).isfinite()
    if (triplet, pair) in (("con", "con"), ("nca", "con")):
        assert GOALLoss(**options, distance=LpDistance())(**call_with(2)).isfinite()
    else:
        with pytest.raises(ValueError, match=r"needs a similarity such as .*, got LpDistance"):
            GOALLoss(**options, distance=LpDistance())


def test_options_are_those_of_the_objective():
    assert GOALLoss().objective == Objective()
    loss = create_loss("goal", triplet_weight="cir", tau=5, warmup_steps=3, symmetric=False)
    assert (loss.objective, loss.warmup_steps, loss.symmetric) == (Objective("cir", tau=5), 3, False)
    with pytest.raises(ValueError, match="tau must be a finite number > 0, got 0"):
        GOALLoss(tau=0)
    with pytest.raises(ValueError, match=r"unknown option 'margn' of loss 'goal' \(did you mean 'margin'\?\)"):
        create_loss("goal", margn=0.2)
