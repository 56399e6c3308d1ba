import pickle

import pytest
import torch
from pytorch_metric_learning import distances, miners
from pytorch_metric_learning.reducers import DoNothingReducer
from pytorch_metric_learning.utils import loss_and_miner_utils

from tests.helpers.loops import LABELS, OTHER_LABELS, call_with, embeddings_of
from tests.reference import distances as reference
from vl_plugins.components import create_component, list_components
from vl_plugins.functional import triplet_hn_loss
from vl_plugins.losses import TripletHNLoss
from vl_plugins.miners import HardestNegativeMiner

SETS = pytest.mark.parametrize("sets", [1, 2], ids=["one set", "two sets"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
KS = pytest.mark.parametrize("k", [1, 2, 3, 100])


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


DISTANCES = {
    "default": ({}, reference.cosine),
    "dot product": (
        {"distance": distances.DotProductSimilarity(normalize_embeddings=False)},
        reference.dot_product,
    ),
    "Euclidean": ({"distance": distances.LpDistance()}, reference.negative_euclidean),
    "signal to noise": ({"distance": distances.SNRDistance()}, reference.negative_signal_to_noise),
}


@KS
@SETS
@pytest.mark.parametrize("distance", DISTANCES)
def test_triplets_of_every_positive_pair(distance, sets, k):
    options, similarity = DISTANCES[distance]
    call = call_with(sets)
    similarities = reference.matrix(similarity, *(call[name] for name in ("embeddings", "ref_emb")[:sets])).tolist()
    by_hand = mined(similarities, LABELS.tolist(), OTHER_LABELS.tolist() if sets == 2 else None, k)
    assert len(by_hand) >= 4
    miner = HardestNegativeMiner(k, **options)
    assert triplets(miner(**call)) == by_hand
    assert not any(index.requires_grad for index in miner(**call))


@SETS
def test_the_hosts_miner_of_pairs_finds_the_same_negatives(sets):
    call = call_with(sets)
    pairs = miners.BatchEasyHardMiner(pos_strategy="all", neg_strategy="hard", distance=distances.CosineSimilarity())
    theirs = loss_and_miner_utils.convert_to_triplets(pairs(**call), LABELS)
    assert sorted(triplets(theirs)) == triplets(HardestNegativeMiner()(**call))


@SETS
def test_batch_hard_miner_keeps_one_positive_of_each_anchor(sets):
    """Why there is another miner."""
    call = call_with(sets)
    theirs = triplets(miners.BatchHardMiner(distance=distances.CosineSimilarity())(**call))
    ours = triplets(HardestNegativeMiner()(**call))
    assert set(theirs) <= set(ours)
    assert len(theirs) == len({a for a, _, _ in ours})
    assert sets == 1 or len(ours) > len(theirs)


@DTYPES
@SETS
@pytest.mark.parametrize("distance", ["default", "Euclidean"])
def test_triplet_hn_of_its_triplets_is_triplet_hn_by_labels(distance, sets, dtype):
    options, _ = DISTANCES[distance]
    call = call_with(sets, dtype)
    leaves = [call[name] for name in ("embeddings", "ref_emb")[:sets]]
    loss = TripletHNLoss(margin=0.4, symmetric=False, **options)
    by_labels = loss(**call)
    given = loss(**call, indices_tuple=HardestNegativeMiner(**options)(**call))
    assert by_labels > 0.1
    torch.testing.assert_close(given, by_labels)
    torch.testing.assert_close(torch.autograd.grad(given, leaves), torch.autograd.grad(by_labels, leaves))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_ties_of_half_precision_are_resolved_as_the_loss_does(dtype):
    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(64, 8, generator=generator).to(dtype) for _ in range(2))
    labels = torch.arange(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = HardestNegativeMiner()(images, labels, texts, labels)
        loss = TripletHNLoss(symmetric=False, reducer=DoNothingReducer())
        by_labels = loss(images, labels, ref_emb=texts, ref_labels=labels)["loss"]["losses"]
        of_triplets = loss(images, labels, given, texts, labels)["loss"]["losses"]
    # Other negatives would differ by what half precision rounds, a thousand times as much.
    torch.testing.assert_close(of_triplets, by_labels, rtol=1e-6, atol=1e-6)


def test_of_equal_negatives_the_first_counts():
    embeddings = torch.eye(4)
    labels = torch.tensor([0, 1, 0, 2])
    expected = [(0, 2, 1), (0, 2, 3), (2, 0, 1), (2, 0, 3)]
    for k in (1, 2, 3):
        assert triplets(HardestNegativeMiner(k)(embeddings, labels)) == expected[:: 2 if k == 1 else 1]
    same = torch.ones(40, 3)
    assert set(HardestNegativeMiner()(same, torch.arange(40) % 20)[2].tolist()) == {0, 1}


def test_one_tensor_of_labels_for_two_sets_keeps_the_diagonal():
    labels = torch.arange(5)
    images, texts = embeddings_of(labels), embeddings_of(labels, seed=1)
    anchors, positives, _ = HardestNegativeMiner()(images, labels, texts, labels)
    assert torch.equal(anchors, labels)
    assert torch.equal(positives, labels)


def test_the_embeddings_as_references_are_one_set():
    call = call_with(1)
    for dtype in (torch.float64, torch.float16):
        embeddings = call["embeddings"].to(dtype)
        expected = triplets(HardestNegativeMiner(2)(embeddings, LABELS))
        assert triplets(HardestNegativeMiner(2)(embeddings, LABELS, embeddings, LABELS.clone())) == expected
        assert all(a != p for a, p, _ in expected)


@pytest.mark.parametrize(
    ("labels", "other_labels"),
    [
        ([0, 1, 2], None),  # no positives
        ([0, 0, 0], None),  # no negatives
        ([0], None),
        ([], None),
        ([], [0, 1]),
        ([0, 1], []),
        ([0, 1], [2, 3]),
        ([0, 0], [0, 0]),
    ],
)
def test_nothing_to_choose(labels, other_labels):
    call = [embeddings_of(torch.tensor(labels, dtype=torch.long)), torch.tensor(labels)]
    if other_labels is not None:
        call += [embeddings_of(torch.tensor(other_labels, dtype=torch.long)), torch.tensor(other_labels)]
    for k in (1, 3):
        assert triplets(HardestNegativeMiner(k)(*call)) == []


def test_anchors_without_positives_or_negatives_beside_others():
    labels, other_labels = torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1])
    call = embeddings_of(labels), labels, embeddings_of(other_labels, seed=1), other_labels
    assert [(a, p) for a, p, _ in triplets(HardestNegativeMiner()(*call))] == [(0, 0), (0, 1), (1, 2)]
    # Of the negatives of anchor 0 there is one, of anchor 1 there are two.
    assert [a for a, _, _ in triplets(HardestNegativeMiner(2)(*call))] == [0, 0, 1, 1]


class MaximalCosine(distances.BaseDistance):
    """Similarity of sets: the largest cosine of two elements, of (B, K, D) or packed as (B, K * D)."""

    def __init__(self, elements):
        super().__init__(is_inverted=True)
        self.elements = elements

    def check_shapes(self, query_emb, ref_emb):
        pass

    def normalize(self, embeddings, dim=1, **kwargs):
        unpacked = embeddings.reshape(len(embeddings), self.elements, -1)
        return super().normalize(unpacked, dim=-1, **kwargs)

    def get_norm(self, embeddings, dim=1, **kwargs):
        return super().get_norm(embeddings, dim=-1, **kwargs)

    def compute_mat(self, query_emb, ref_emb):
        return torch.einsum("akd,cld->ackl", query_emb, ref_emb).flatten(2).max(dim=2).values


@SETS
@KS
def test_embedding_sets(k, sets):
    elements = 3
    queries = embeddings_of(LABELS, dimension=elements * 4).reshape(-1, elements, 4)
    others = embeddings_of(OTHER_LABELS, seed=1, dimension=elements * 4).reshape(-1, elements, 4)
    references = others if sets == 2 else queries
    similarities = [
        [max(reference.cosine(x, y).item() for x in query for y in other) for other in references] for query in queries
    ]
    by_hand = mined(similarities, LABELS.tolist(), OTHER_LABELS.tolist() if sets == 2 else None, k)
    miner = HardestNegativeMiner(k, distance=MaximalCosine(elements))
    for shape in ((elements, 4), (elements * 4,)):
        call = [queries.reshape(-1, *shape), LABELS]
        call += [others.reshape(-1, *shape), OTHER_LABELS] if sets == 2 else []
        assert triplets(miner(*call)) == by_hand
        loss = TripletHNLoss(symmetric=False, distance=MaximalCosine(elements))
        if k == 1:
            given = loss(*call[:2], miner(*call), *call[2:])
            torch.testing.assert_close(given, loss(*call[:2], None, *call[2:]))
            assert given > 0.1


def test_by_class_name():
    assert "HardestNegativeMiner" in list_components("miner")
    miner = create_component("miner", "HardestNegativeMiner", k=2, distance="LpDistance")
    assert type(miner) is HardestNegativeMiner
    assert miner.k == 2
    assert type(miner.distance) is distances.LpDistance
    assert type(HardestNegativeMiner().distance) is distances.CosineSimilarity
    assert HardestNegativeMiner().k == 1
    assert HardestNegativeMiner()._record_these == ["k"]
    assert triplets(pickle.loads(pickle.dumps(miner))(**call_with(2))) == triplets(miner(**call_with(2)))


@pytest.mark.parametrize("k", [0, -1, 1.0, True, "1", None])
def test_wrong_k(k):
    with pytest.raises(ValueError, match="k must be an integer >= 1, got"):
        HardestNegativeMiner(k)


def test_references_need_labels():
    with pytest.raises(ValueError, match="ref_labels cannot be None when ref_emb is given"):
        HardestNegativeMiner()(torch.eye(3), torch.arange(3), torch.eye(3))


def test_labels_are_tensors():
    with pytest.raises(ValueError, match="labels must be a tensor, got list"):
        HardestNegativeMiner()(torch.eye(3), [0, 1, 2])
    with pytest.raises(ValueError, match="ref_labels must be a tensor, got ndarray"):
        HardestNegativeMiner()(torch.eye(3), torch.arange(3), torch.eye(3), torch.arange(3).numpy())


def test_statistics():
    miner = HardestNegativeMiner(k=2, collect_stats=True)
    found = triplets(miner(**call_with(2)))
    assert miner.num_triplets == len(found) > 10


@pytest.mark.parametrize("captions", [1, 3])
@pytest.mark.parametrize("symmetric", [True, False])
def test_in_the_launcher(captions, symmetric):
    pytest.importorskip("open_clip")
    from vl_plugins.integrations.open_clip.loss import build_loss
    from vl_plugins.integrations.open_clip.options import PluginOptions

    options = PluginOptions(
        loss="triplet_hn",
        loss_kwargs={"symmetric": symmetric, "margin": 0.3},
        miner="HardestNegativeMiner",
        miner_kwargs={"k": 1},
        reducer=None,
        reducer_kwargs={},
    )
    labels = torch.arange(4)
    images, texts = embeddings_of(labels), embeddings_of(labels.repeat_interleave(captions), seed=1)
    value = build_loss(options)(images, texts, torch.tensor(1.0))
    similarities = distances.CosineSimilarity()(images, texts)
    positive_mask = labels[:, None] == labels.repeat_interleave(captions)
    expected = triplet_hn_loss(similarities, positive_mask, ~positive_mask, 0.3, symmetric=symmetric)
    assert expected > 0.1
    torch.testing.assert_close(value, expected)
