"""Every loss with every distance: value and gradient of each kind of call."""

import pytest
import torch
from pytorch_metric_learning import distances

from tests.helpers import components
from tests.helpers.loops import LOSSES, REFERENCES, calls, check_call, make_loss
from tests.reference import distances as reference

FORMULAS = {
    "CosineSimilarity": reference.cosine,
    "DotProductSimilarity": reference.cosine,  # it normalizes too, unless told not to
    "LpDistance": reference.negative_euclidean,
    "SNRDistance": reference.negative_signal_to_noise,
}
VARIANTS = {
    "not normalized dot product": (distances.DotProductSimilarity(normalize_embeddings=False), reference.dot_product),
    "Manhattan": (distances.LpDistance(p=1), reference.negative_manhattan),
    "squared cosine": (
        distances.CosineSimilarity(power=2),
        lambda query, other: reference.cosine(query, other).square(),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@LOSSES
def test_every_distance(name, dtype):
    found = components.all_of("distance")
    assert set(found) == set(FORMULAS), "a new distance needs a formula in tests/reference/distances.py"
    cases = {key: (distance, FORMULAS[key]) for key, distance in found.items()} | VARIANTS
    for key, (distance, similarity) in cases.items():
        if REFERENCES[name].needs_similarity and not distance.is_inverted:
            with pytest.raises(ValueError, match=f"needs a similarity .* got {type(distance).__name__}"):
                make_loss(name, distance=distance)
            continue
        loss = make_loss(name, distance=distance)
        for what, call in calls(dtype):
            if key == "not normalized dot product":  # else the exponentials of GOAL overflow in the loops
                call |= {k: (0.3 * value).detach().requires_grad_() for k, value in call.items() if "emb" in k}
            check_call(name, call, loss=loss, similarity=similarity, what=f"{key}, {what}")
