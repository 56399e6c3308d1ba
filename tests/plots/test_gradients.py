import copy
import math

import pytest
import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.distances import LpDistance

from vl_plugins import create_loss
from vl_plugins.losses import TripletHNLoss
from vl_plugins.plots.gradients import gradient_sizes

# Of different numbers, so that swapped axes do not fit; no difference of two is a margin used here.
POSITIVES = [-0.83, -0.2, 0.31, 0.62, 0.9]
NEGATIVES = [-0.41, 0.05, 0.57, 0.88]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def distance(cosine):
    """Euclidean, of unit vectors; its derivative by the cosine is -1 / distance."""
    return math.sqrt(2 - 2 * cosine)


def same(value):
    return value, value


def step(violation, slope_p=1.0, slope_n=1.0):
    return (slope_p, slope_n) if violation > 0 else (0.0, 0.0)


# Of ours and of PML's: loss, |dL/ds_p| and |dL/ds_n|.
CLOSED_FORMS = {
    "triplet_hn": (create_loss("triplet_hn", margin=0.2), lambda p, n: step(0.2 + n - p)),
    "unified": (
        create_loss("unified", margin=0.1, scale=7),
        lambda p, n: same(sigmoid(7 * (0.1 + n - p))),
    ),
    "a distance": (
        TripletHNLoss(margin=0.2, distance=LpDistance()),
        lambda p, n: step(0.2 + distance(p) - distance(n), 1 / distance(p), 1 / distance(n)),
    ),
    "ContrastiveLoss": (
        losses.ContrastiveLoss(pos_margin=0, neg_margin=1),
        lambda p, n: (1 / distance(p), 1 / distance(n) if distance(n) < 1 else 0.0),
    ),
    "goal": (
        create_loss("goal", triplet_weight="nca", pair_weight="lin", tau=3),
        lambda p, n: (sigmoid(3 * (n - p)) * (1 - p), sigmoid(3 * (n - p)) * abs(n)),
    ),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name):
    loss, closed_form = CLOSED_FORMS[name]
    sizes = gradient_sizes(loss, torch.tensor(POSITIVES).double(), torch.tensor(NEGATIVES).double())
    assert len(sizes) == 2
    for side, size in enumerate(sizes):
        expected = [[closed_form(s_p, s_n)[side] for s_p in POSITIVES] for s_n in NEGATIVES]
        assert any(value > 0 for row in expected for value in row)
        torch.testing.assert_close(size, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_the_loss_is_left_as_it_is():
    loss = create_loss("goal", warmup_steps=5)
    before = copy.deepcopy(loss.state_dict())
    gradient_sizes(loss, torch.tensor(POSITIVES), torch.tensor(NEGATIVES))
    assert loss.training
    assert loss.state_dict() == before
