import math

import pytest
import torch

from tests.functional.test_set_similarity import random_sets
from vl_plugins import create_loss
from vl_plugins.distances import ChamferSimilarity, MatchProbability, MILSimilarity, SmoothChamferSimilarity
from vl_plugins.functional import (
    chamfer_similarity,
    match_probability,
    mil_similarity,
    smooth_chamfer_similarity,
)


@pytest.mark.parametrize(
    ("distance", "function", "options"),
    [
        (SmoothChamferSimilarity(), smooth_chamfer_similarity, {"alpha": 16.0}),
        (SmoothChamferSimilarity(alpha=3), smooth_chamfer_similarity, {"alpha": 3.0}),
        (ChamferSimilarity(), chamfer_similarity, {}),
        (MILSimilarity(), mil_similarity, {}),
        (MatchProbability(), match_probability, {"scale": 1.0, "shift": 0.0}),
        (MatchProbability(2.0, -1.0, learnable=False), match_probability, {"scale": 2.0, "shift": -1.0}),
    ],
)
def test_functions(distance, function, options):
    x, y = random_sets(4, 3, 6), random_sets(5, 2, 6, seed=1)
    assert torch.equal(distance(x, y), function(x, y, **options))
    assert torch.equal(distance.pairwise_distance(x, y[:4]), function(x, y[:4], paired=True, **options))


def test_alpha_is_recorded():
    distance = SmoothChamferSimilarity(alpha=3)
    assert distance.alpha == 3
    assert "alpha" in distance._record_these


def test_learnable_probabilities():
    """An optimizer of the loss's parameters raises the probability of what matches."""
    distance = MatchProbability(scale=2.0, shift=-1.0)
    loss = create_loss("triplet_sh", distance=distance)
    assert dict(loss.named_parameters()).keys() == {"distance.scale", "distance.shift"}
    x = random_sets(6, 3, 6, dtype=torch.float32).detach()
    y = x + 0.5 * random_sets(6, 3, 6, seed=1, dtype=torch.float32).detach()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.5)
    labels = torch.arange(6)
    values = []
    for _ in range(3):
        value = loss(x, labels, ref_emb=y, ref_labels=labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[0] > values[1] > values[2]
    assert distance.scale > 2
    assert distance.shift != -1


def test_probabilities_that_are_not_learnable():
    assert list(MatchProbability(learnable=False).parameters()) == []


@pytest.mark.parametrize(
    ("distance_class", "options", "message"),
    [
        (SmoothChamferSimilarity, {"alpha": 0}, "alpha must be a finite number > 0, got 0"),
        (SmoothChamferSimilarity, {"alpha": math.inf}, "alpha must be a finite number > 0, got inf"),
        (MatchProbability, {"scale": math.nan}, "scale must be a finite number, got nan"),
        (MatchProbability, {"shift": math.inf}, "shift must be a finite number, got inf"),
    ],
)
def test_wrong_hyper_parameters(distance_class, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        distance_class(**options)
