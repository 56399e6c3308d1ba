import pickle

import pytest
import torch
from pytorch_metric_learning import distances
from pytorch_metric_learning.reducers import DoNothingReducer

from tests.helpers.loops import LABELS, OTHER_LABELS, call_with, embeddings_of
from tests.helpers.seeds import seeded
from tests.reference import distances as reference
from vl_plugins.losses import TripletHNLoss
from vl_plugins.miners import HardestNegativeMiner

DISTANCES = {
    "cosine": ({}, reference.cosine),
    "Euclidean": ({"distance": distances.LpDistance()}, reference.negative_euclidean),
}


def mined(similarities, labels, other_labels, k):
    """By hand: a list of rows of similarities, and lists of labels; ``other_labels`` is None for one set."""
    found = []
    one_set = other_labels is None
    for a, row in enumerate(similarities):
        negatives = [n for n, label in enumerate(labels if one_set else other_labels) if label != labels[a]]
        negatives.sort(key=lambda n: (-row[n], n))
        for p, label in enumerate(labels if one_set else other_labels):
            if label == labels[a] and not (one_set and p == a):
                found += [(a, p, n) for n in negatives[:k]]
    return found


def triplets(indices_tuple):
    assert [index.dtype for index in indices_tuple] == [torch.long] * 3
    return list(zip(*(index.tolist() for index in indices_tuple), strict=True))


@pytest.mark.parametrize("k", [1, 2, 100])
@pytest.mark.parametrize("sets", [1, 2], ids=["one set", "two sets"])
@pytest.mark.parametrize("distance", DISTANCES)
def test_triplets_of_every_positive_pair(distance, sets, k):
    options, similarity = DISTANCES[distance]
    call = call_with(sets)
    similarities = reference.matrix(similarity, *(call[name] for name in ("embeddings", "ref_emb")[:sets])).tolist()
    by_hand = mined(similarities, LABELS.tolist(), OTHER_LABELS.tolist() if sets == 2 else None, k)
    assert len(by_hand) >= 4
    miner = pickle.loads(pickle.dumps(HardestNegativeMiner(k, **options)))
    assert triplets(miner(**call)) == by_hand
    assert not any(index.requires_grad for index in miner(**call))
    if sets == 1:
        assert triplets(miner(*call.values(), call["embeddings"], LABELS.clone())) == by_hand


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_triplet_hn_of_its_triplets_is_triplet_hn_by_labels(dtype):
    """Also the ties of half precision are resolved as the loss does."""
    generator = seeded(0)
    images, texts = (torch.randn(64, 8, generator=generator).to(dtype) for _ in range(2))
    labels = torch.arange(64)
    loss = TripletHNLoss(symmetric=False, products="float32", reducer=DoNothingReducer())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = loss(images, labels, HardestNegativeMiner()(images, labels, texts, labels), texts, labels)
        by_labels = loss(images, labels, ref_emb=texts, ref_labels=labels)
    # Other negatives would differ by what half precision rounds, a thousand times as much.
    torch.testing.assert_close(given["loss"]["losses"], by_labels["loss"]["losses"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_of_equal_negatives_the_first_counts(k):
    labels = torch.tensor([0, 1, 0, 2])
    expected = [(0, 2, 1), (0, 2, 3), (2, 0, 1), (2, 0, 3)]
    assert triplets(HardestNegativeMiner(k)(torch.eye(4), labels)) == expected[:: 2 if k == 1 else 1]


@pytest.mark.parametrize(
    "labels", [([0, 1, 2],), ([0, 0, 0],), ([],), ([], [0, 1]), ([0, 1], []), ([0, 1], [2, 3])], ids=str
)
def test_nothing_to_choose(labels):
    sides = [torch.tensor(side, dtype=torch.long) for side in labels]
    assert triplets(HardestNegativeMiner(3)(*(part for side in sides for part in (embeddings_of(side), side)))) == []


def test_nan_is_not_left_out():
    x = torch.eye(3)
    x[0, 0] = torch.nan
    anchors, _, _ = HardestNegativeMiner()(x, torch.arange(3), torch.eye(3), torch.arange(3))
    assert anchors.tolist() == [0, 1, 2]
