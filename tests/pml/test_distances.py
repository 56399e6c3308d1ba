"""Every loss with every distance."""

import pytest
import torch
from pytorch_metric_learning import distances
from pytorch_metric_learning.miners import MultiSimilarityMiner, TripletMarginMiner

from tests.pml import components
from tests.pml.loops import LOSSES, call_with, check_call, distance_of, make_loss
from tests.reference import distances as reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)

# By formula. A distance that is not here is compared with its own pairwise_distance.
FORMULAS = {
    "CosineSimilarity": reference.cosine,
    "DotProductSimilarity": reference.cosine,  # it normalizes too, unless told not to
    "LpDistance": reference.negative_euclidean,
    "SNRDistance": reference.negative_signal_to_noise,
}
VARIANTS = {
    "not normalized dot product": (
        distances.DotProductSimilarity(normalize_embeddings=False),
        reference.dot_product,
    ),
    "Manhattan": (distances.LpDistance(p=1), reference.negative_manhattan),
    "squared Euclidean": (
        distances.LpDistance(power=2),
        lambda query, other: -reference.negative_euclidean(query, other).square(),
    ),
    "squared cosine": (
        distances.CosineSimilarity(power=2),
        lambda query, other: reference.cosine(query, other).square(),
    ),
}


def by_its_own_pairs(distance):
    sign = 1 if distance.is_inverted else -1

    def similarity(query, other):
        pair = (distance.maybe_normalize(embedding[None]) for embedding in (query, other))
        return sign * distance.pairwise_distance(*pair)[0] ** distance.power

    return similarity


@DTYPES
@LOSSES
def test_every_distance(name, dtype):
    cases = {
        distance_name: (distance, FORMULAS.get(distance_name, by_its_own_pairs(distance)))
        for distance_name, distance in components.all_of("distance").items()
    }
    assert len(cases) >= 4
    worked = []
    for distance_name, (distance, similarity) in (cases | VARIANTS).items():
        loss = distance_of(name, distance)
        if loss is None:
            continue
        tolerance = None if distance_name in FORMULAS or distance_name in VARIANTS else 1e-4
        for sets in (1, 2):
            for miner in (None, TripletMarginMiner(margin=0.3), MultiSimilarityMiner(epsilon=0.5)):
                call = call_with(sets, dtype)
                if distance_name == "not normalized dot product":  # else the exponentials of GOAL overflow in the loops
                    call |= {
                        key: (0.3 * value).detach().requires_grad_() for key, value in call.items() if "emb" in key
                    }
                if miner is not None:
                    call["indices_tuple"] = miner(**call)
                what = f"{distance_name}, {sets} set(s), {type(miner).__name__}"
                check_call(name, call, loss=loss, similarity=similarity, what=what, tolerance=tolerance)
        worked.append(distance_name)
    assert len(worked) >= 4


@pytest.mark.parametrize("name", ["CosineSimilarity", "LpDistance", "SNRDistance"])
def test_a_distance_without_a_formula_is_compared_with_its_own_pairs(name):
    distance = getattr(distances, name)()
    call = call_with(2)
    similarity = by_its_own_pairs(distance)
    check_call(
        "triplet_sh", call, loss=make_loss("triplet_sh", distance=distance), similarity=similarity, tolerance=1e-4
    )
    wrong = lambda query, other: 1.01 * similarity(query, other)  # noqa: E731
    with pytest.raises(AssertionError):
        check_call(
            "triplet_sh", call, loss=make_loss("triplet_sh", distance=distance), similarity=wrong, tolerance=1e-4
        )


@LOSSES
def test_batched_distance_is_no_distance(name):
    batched = distances.BatchedDistance(distances.CosineSimilarity(), iter_fn=lambda *_: None)
    with pytest.raises((AttributeError, TypeError)):
        make_loss(name, distance=batched)(**call_with(2))
