import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity, LpDistance, SNRDistance
from pytorch_metric_learning.losses import CircleLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner, TripletMarginMiner
from pytorch_metric_learning.reducers import AvgNonZeroReducer, DoNothingReducer, MeanReducer, SumReducer

from tests.reference import distances as reference_distances
from tests.reference import goal as reference
from tests.reference import losses as reference_losses
from vl_plugins.functional import goal_loss
from vl_plugins.functional.goal import PAIR_WEIGHTS, TRIPLET_WEIGHTS, triplet_weight
from vl_plugins.losses import GOALLoss, TripletHNLoss

COMBINATIONS = [(triplet, pair) for triplet in TRIPLET_WEIGHTS for pair in PAIR_WEIGHTS]
ALL_COMBINATIONS = pytest.mark.parametrize(("triplet", "pair"), COMBINATIONS, ids=map("-".join, COMBINATIONS))
LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
OTHER_LABELS = torch.tensor([2, 0, 3, 1, 1, 4, 2, 3])
OPTIONS = {"margin": 0.3, "tau": 7.0, "offset": 0.1, "alpha": 3.0, "beta": 6.0, "lam": 0.4, "eps": 0.2}


def embeddings_of(labels, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(labels), 5, dtype=torch.float64, generator=generator).requires_grad_()


def call_with(sets):
    call = {"embeddings": embeddings_of(LABELS), "labels": LABELS}
    if sets == 2:
        call |= {"ref_emb": embeddings_of(OTHER_LABELS, seed=1), "ref_labels": OTHER_LABELS}
    return call


def expected(call, positives, negatives, symmetric, **options):
    """Return the mean of the loops' values and the gradients with respect to the embeddings."""
    leaves = [call[name] for name in ("embeddings", "ref_emb") if name in call]
    similarities = reference_distances.matrix(reference_distances.cosine, *leaves)
    rows = similarities.tolist()
    values, derivatives = reference_losses.pair_losses(
        reference.goal_hardest,
        rows,
        positives,
        negatives,
        symmetric=symmetric,
        batch_positives=[rows[i][p] for i, p in sorted(positives)],
        **options,
    )
    weights = dict.fromkeys(values, 1 / len(values))
    gradient = reference_losses.weighted_gradient(derivatives, weights, *similarities.shape)
    gradients = torch.autograd.grad(similarities, leaves, similarities.new_tensor(gradient))
    return sum(values.values()) / len(values), gradients


def check(loss, call, value, gradients):
    leaves = [call[name] for name in ("embeddings", "ref_emb") if name in call]
    actual = loss(**call)
    assert value > 0.01
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)
    torch.testing.assert_close(actual.item(), value, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(torch.autograd.grad(actual, leaves), gradients, atol=1e-10, rtol=1e-10)


@ALL_COMBINATIONS
@pytest.mark.parametrize("sets", [1, 2], ids=["one set", "two sets"])
def test_by_labels(triplet, pair, sets):
    options = {"triplet_weight": triplet, "pair_weight": pair, **OPTIONS}
    call = call_with(sets)
    sets_of_pairs = reference_losses.pairs_of_labels(LABELS.tolist(), OTHER_LABELS.tolist() if sets == 2 else None)
    check(GOALLoss(**options), call, *expected(call, *sets_of_pairs, symmetric=sets == 2, **options))


@ALL_COMBINATIONS
@pytest.mark.parametrize("sets", [1, 2], ids=["one set", "two sets"])
def test_pairs_of_a_miner(triplet, pair, sets):
    options = {"triplet_weight": triplet, "pair_weight": pair, **OPTIONS}
    call = call_with(sets)
    indices = MultiSimilarityMiner(epsilon=0.5)(**call)
    a, p, b, n = (index.tolist() for index in indices)
    positives, negatives = set(zip(a, p, strict=True)), set(zip(b, n, strict=True))
    values = expected(call, positives, negatives, symmetric=False, **options)
    check(GOALLoss(**options), call | {"indices_tuple": indices}, *values)


@ALL_COMBINATIONS
@pytest.mark.parametrize("sets", [1, 2], ids=["one set", "two sets"])
def test_triplets_of_a_miner(triplet, pair, sets):
    call = call_with(sets)
    leaves = [call[name] for name in ("embeddings", "ref_emb") if name in call]
    triplets = TripletMarginMiner(margin=0.3)(**call)
    similarities = reference_distances.matrix(reference_distances.cosine, *leaves)
    rows = similarities.tolist()
    given = list(zip(*(index.tolist() for index in triplets), strict=True))
    assert len(given) >= 10
    batch_positives = [rows[a][p] for a, p in {(a, p) for a, p, _ in given}]
    values, gradient = [], torch.zeros_like(similarities)
    for a, p, n in given:
        negatives = sorted({other for b, _, other in given if b == a})
        value, derivatives = reference.goal_triplet(rows[a], p, n, negatives, batch_positives, triplet, pair, **OPTIONS)
        values.append(value)
        for column, derivative in derivatives.items():
            gradient[a, column] += derivative / len(given)
    gradients = torch.autograd.grad(similarities, leaves, gradient)
    loss = GOALLoss(triplet, pair, **OPTIONS)
    check(loss, call | {"indices_tuple": triplets}, sum(values) / len(values), gradients)

    loss.reducer = DoNothingReducer()
    out = loss(**call, indices_tuple=triplets)["loss"]
    assert out["reduction_type"] == "triplet"
    assert out["indices"] is triplets
    torch.testing.assert_close(out["losses"].tolist(), values)


@ALL_COMBINATIONS
def test_average_of_non_zero_keeps_the_triplets_with_a_weight(triplet, pair):
    # Steep weights, so that some are 0 in single precision too.
    options = {"triplet_weight": triplet, "margin": 0.2, "tau": 200.0, "offset": 0.0}
    call = {key: value.detach().float() if "emb" in key else value for key, value in call_with(2).items()}
    positive_mask = LABELS[:, None] == OTHER_LABELS
    triplets = torch.where(positive_mask[:, :, None] & ~positive_mask[:, None, :])
    similarities = CosineSimilarity()(call["embeddings"], call["ref_emb"])
    weights = triplet_weight(
        similarities[triplets[0], triplets[1]],
        similarities[triplets[0], triplets[2]],
        triplet,
        margin=0.2,
        tau=200.0,
        offset=0.0,
    )
    kept = weights > 0
    assert 0 < kept.sum() < len(kept)
    values = GOALLoss(pair_weight=pair, reducer=DoNothingReducer(), **options)(**call, indices_tuple=triplets)["loss"]
    average = GOALLoss(pair_weight=pair, reducer=AvgNonZeroReducer(), **options)
    value = average(**call, indices_tuple=triplets)
    torch.testing.assert_close(value, values["losses"][kept].mean())
    assert torch.equal(values["losses"] > 0, kept)

    # And by labels: the pairs whose hardest negative has a weight, in either direction.
    mined = GOALLoss(pair_weight=pair, reducer=DoNothingReducer(), **options)(**call)["loss"]["losses"]
    rows, columns = torch.where(positive_mask)
    hardest = similarities.masked_fill(positive_mask, -2)
    kept = sum(
        triplet_weight(similarities[positive_mask], negatives, triplet, margin=0.2, tau=200.0, offset=0.0) > 0
        for negatives in (hardest.max(dim=1).values[rows], hardest.max(dim=0).values[columns])
    ).bool()
    torch.testing.assert_close(average(**call), mined[kept].mean())


def test_con_con_is_the_triplet_loss():
    for sets in (1, 2):
        call = call_with(sets)
        ours, theirs = GOALLoss("con", "con", margin=0.4)(**call), TripletHNLoss(margin=0.4)(**call)
        assert theirs > 0.1
        torch.testing.assert_close(ours, theirs)
        leaves = [call[name] for name in ("embeddings", "ref_emb")[:sets]]
        torch.testing.assert_close(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves))


def test_cir_lin_is_circle_loss_on_one_triplet_per_anchor():
    embeddings = embeddings_of(LABELS).detach().abs().requires_grad_()
    triplets = (torch.tensor([0, 1, 4]), torch.tensor([5, 4, 1]), torch.tensor([2, 3, 2]))
    circle = CircleLoss(m=0, gamma=8, reducer=SumReducer())(embeddings, LABELS, triplets) / 8
    ours = GOALLoss("cir", "lin", tau=8, offset=1, reducer=SumReducer())(embeddings, LABELS, triplets)
    torch.testing.assert_close(ours, circle)
    torch.testing.assert_close(torch.autograd.grad(ours, embeddings), torch.autograd.grad(circle, embeddings))


def test_defaults():
    loss = GOALLoss()
    assert (loss.triplet_weight, loss.pair_weight) == ("nca", "con")
    numbers = ("margin", "tau", "offset", "alpha", "beta", "lam", "eps", "warmup_steps")
    assert [getattr(loss, name) for name in numbers] == [0.2, 10.0, 0.5, 2.0, 10.0, 0.5, 0.1, 0]
    assert isinstance(loss.reducer, MeanReducer)
    assert set(loss._record_these) == set(numbers) - {"warmup_steps"}
    call = call_with(2)
    positive_mask = LABELS[:, None] == OTHER_LABELS
    similarities = CosineSimilarity()(call["embeddings"], call["ref_emb"])
    torch.testing.assert_close(loss(**call), goal_loss(similarities, positive_mask, ~positive_mask))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"triplet_weight": "circle"}, "unknown triplet_weight 'circle'"),
        ({"pair_weight": "ms"}, "unknown pair_weight 'ms'"),
        ({"tau": 0}, "tau must be a finite number > 0, got 0"),
        ({"margin": -1}, "margin must be a finite number >= 0, got -1"),
        ({"alpha": float("inf")}, "alpha must be a finite number >= 0, got inf"),
        ({"beta": -2}, "beta must be a finite number >= 0, got -2"),
        ({"eps": -0.1}, "eps must be a finite number >= 0, got -0.1"),
        ({"lam": "0.5"}, "lam must be a finite number, got '0.5'"),
        ({"offset": float("nan")}, "offset must be a finite number, got nan"),
        ({"warmup_steps": 1.5}, "warmup_steps must be an integer >= 0, got 1.5"),
    ],
)
def test_wrong_hyper_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        GOALLoss(**options)


@ALL_COMBINATIONS
def test_only_similarities_for_weights_that_are_not_of_differences(triplet, pair):
    GOALLoss(triplet, pair, distance=DotProductSimilarity())
    for distance in (LpDistance(), SNRDistance()):
        if (triplet, pair) in (("con", "con"), ("nca", "con")):
            value = GOALLoss(triplet, pair, distance=distance)(**call_with(2))
            assert value.isfinite()
        else:
            with pytest.raises(ValueError, match=f"needs a similarity such as .*, got {type(distance).__name__}"):
                GOALLoss(triplet, pair, distance=distance)


@ALL_COMBINATIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_identical_embeddings_and_autocast(triplet, pair, dtype):
    labels = torch.arange(6)
    for tau in (10.0, 1e3):
        for spread in (0.0, 1.0):
            torch.manual_seed(0)
            images, texts = ((1 + spread * torch.randn(6, 5)).to(dtype).requires_grad_() for _ in range(2))
            with torch.autocast("cpu", dtype=dtype):
                value = GOALLoss(triplet, pair, tau=tau)(images, labels, ref_emb=texts, ref_labels=labels)
            value.backward()
            assert value.dtype == torch.float32
            assert value.isfinite()
            for leaf in (images, texts):
                assert leaf.grad.dtype == dtype
                assert leaf.grad.isfinite().all()
