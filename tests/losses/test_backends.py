"""Which backend a loss of pytorch-metric-learning takes; that their values are right is in ``tests/kernels``."""

import copy
import io
import pickle

import pytest
import torch
from pytorch_metric_learning import distances
from pytorch_metric_learning.reducers import AvgNonZeroReducer, SumReducer

from tests.pml.loops import call_with, check_call, make_loss
from vl_plugins import create_loss
from vl_plugins.distances import SmoothChamferSimilarity
from vl_plugins.functional import Polynomial, triplet_hn_loss
from vl_plugins.kernels import BACKENDS, dispatch, pairs
from vl_plugins.losses import GOALLoss, TripletHNLoss, TripletSHLoss, UnifiedLoss, VLCLoss
from vl_plugins.losses.hardest_negative import HardestNegativeLoss

NAMES = ("goal", "triplet_hn", "unified", "vlc")
EVERYWHERE = [backend for backend in BACKENDS if backend != "triton"]


@pytest.fixture
def log(caplog):
    dispatch.log_choice.cache_clear()
    caplog.set_level("INFO", logger="vl_plugins")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sets", [1, 2], ids=["one set", "two sets"])
def test_all_backends_compute_the_loss(name, backend, sets):
    check_call(name, call_with(sets), loss=make_loss(name, backend=backend))
    check_call(name, call_with(sets, torch.float32), loss=make_loss(name, backend=backend))


@pytest.mark.parametrize("backend", ["dense", "tiled"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reducer", [SumReducer, AvgNonZeroReducer])
@pytest.mark.parametrize("distance", [distances.CosineSimilarity, distances.DotProductSimilarity])
def test_reducers_and_products(name, backend, reducer, distance):
    call = call_with(2)
    leaves = call["embeddings"], call["ref_emb"]
    options = {"distance": distance(), "margin": 0.01} if name != "vlc" else {"distance": distance()}
    values = [create_loss(name, backend=each, reducer=reducer(), **options)(**call) for each in ("functional", backend)]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*(torch.autograd.grad(3 * value, leaves) for value in values))


@pytest.mark.parametrize("name", NAMES)
def test_the_choice_is_logged_once(name, log):
    loss, call = make_loss(name), call_with(2)
    for _ in range(3):
        loss(**call)
    rows, columns = len(call["embeddings"]), len(call["ref_emb"])
    expected = [f"{type(loss).__name__}: backend dense ({rows} x {columns} similarities on cpu)"]
    assert log() == expected
    make_loss(name, backend="tiled")(**call)
    assert log() == expected


PROBLEMS = {
    "triplet_sh": (TripletSHLoss(), "TripletSHLoss needs all similarities"),
    "real distance": (
        TripletHNLoss(distance=distances.LpDistance()),
        "LpDistance is neither CosineSimilarity nor DotProductSimilarity",
    ),
    "sets": (
        GOALLoss("cir", "sig_ms", distance=SmoothChamferSimilarity()),
        "SmoothChamferSimilarity is neither CosineSimilarity nor DotProductSimilarity",
    ),
    "power": (
        VLCLoss(distance=distances.CosineSimilarity(power=2)),
        "the distance has p=2 and power=2, not 2 and 1",
    ),
    "norm": (VLCLoss(distance=distances.CosineSimilarity(p=1)), "the distance has p=1 and power=1, not 2 and 1"),
    "statistics": (
        VLCLoss(distance=distances.CosineSimilarity(collect_stats=True)),
        "the distance collects statistics",
    ),
    "relative": (UnifiedLoss(relative=[0, 1]), "relative similarities are a row of candidates for each pair"),
    "margin": (UnifiedLoss(margin=lambda *_: 0.1), "the margin is a function of all similarities"),
    "function": (UnifiedLoss(weights=Polynomial([1.0])), "weights are not one for each row"),
    "matrix": (UnifiedLoss(weights=torch.ones(6, 8)), "weights are not one for each row"),
    "pair": (UnifiedLoss(weights=(Polynomial([1.0]), torch.ones(6))), "weights are not one for each row"),
}


class ASimilarityOfTheirOwn(distances.CosineSimilarity):
    def compute_mat(self, query_emb, ref_emb):
        return super().compute_mat(query_emb, ref_emb) / 2


def embeddings(number, seed):
    return torch.randn(number, 5, generator=torch.Generator().manual_seed(seed))


def two_sets(loss, **options):
    labels, other_labels = torch.tensor([0, 1, 2, 3, 1, 0]), torch.tensor([2, 0, 3, 1, 1, 4, 2, 3])
    return loss(embeddings(6, 0), labels, ref_emb=embeddings(8, 1), ref_labels=other_labels, **options)


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_needs_all_similarities_gets_them_or_says_so(case, log):
    loss, problem = PROBLEMS[case]
    assert loss.kernel_problem() == problem
    assert two_sets(loss).isfinite()
    assert [line for line in log() if "pairwise_smooth_chamfer" not in line] == []
    loss = copy.deepcopy(loss)
    loss.backend = "tiled"
    with pytest.raises(ValueError, match=f"^backend 'tiled' cannot be used, because {problem}: leave it out$"):
        two_sets(loss)
    loss.backend = "functional"
    assert two_sets(loss).isfinite()


def test_a_subclass_of_a_distance_is_not_taken_for_it():
    loss, halved = VLCLoss(), VLCLoss(distance=ASimilarityOfTheirOwn())
    assert "ASimilarityOfTheirOwn" in halved.kernel_problem()
    loss.scale = 25.0
    torch.testing.assert_close(two_sets(halved), two_sets(loss))


class HalfOfAll(UnifiedLoss):
    def pair_losses(self, similarities, positive_mask, negative_mask, *, symmetric):
        return super().pair_losses(similarities, positive_mask, negative_mask, symmetric=symmetric) / 2


class OfHalfSimilarities(VLCLoss):
    def similarities(self, embeddings, ref_emb):
        return super().similarities(embeddings, ref_emb) / 2


class HalfTriplets(TripletHNLoss):
    def mined_losses(self, *masks, mining, symmetric):
        return super().mined_losses(*masks, mining=mining, symmetric=symmetric) / 2


class OfTheirOwn(HardestNegativeLoss):
    def mined_losses(self, similarities, positive_mask, negative_mask, *, mining, symmetric):
        return triplet_hn_loss(similarities, positive_mask, negative_mask, 0.2, symmetric=symmetric, reduction="none")

    def collapsed_losses(self, positive_similarities):
        return torch.full_like(positive_similarities, 0.2)


class OnlyAnotherDefault(UnifiedLoss):
    def __init__(self, scale=20.0, **kwargs):
        super().__init__(scale=scale, **kwargs)


def test_subclasses_with_formulas_of_their_own():
    halves = UnifiedLoss(), VLCLoss(scale=25.0), TripletHNLoss()
    for subclass, base in zip((HalfOfAll(), OfHalfSimilarities(scale=50.0), HalfTriplets()), halves, strict=True):
        factor = 1 if isinstance(base, VLCLoss) else 2
        torch.testing.assert_close(factor * two_sets(subclass), two_sets(base))
        assert subclass.kernel_problem() == f"{type(subclass).__name__} needs all similarities"
    torch.testing.assert_close(two_sets(OfTheirOwn()), two_sets(TripletHNLoss()))
    assert OnlyAnotherDefault().kernel_problem() is None
    torch.testing.assert_close(two_sets(OnlyAnotherDefault()), two_sets(UnifiedLoss(scale=20.0)))


@pytest.mark.parametrize("name", NAMES)
def test_a_miners_pairs_are_compared_by_the_formulas(name, log):
    triplets = torch.tensor([0]), torch.tensor([1]), torch.tensor([0])
    four = torch.tensor([0]), torch.tensor([1]), torch.tensor([0]), torch.tensor([0])
    assert two_sets(create_loss(name), indices_tuple=four).isfinite()
    assert log() == []
    with pytest.raises(ValueError, match="backend 'dense' cannot be used, because pairs are given as an indices_tuple"):
        two_sets(create_loss(name, backend="dense"), indices_tuple=four)
    if name in ("unified", "vlc"):
        with pytest.raises(ValueError, match="pairs are given as an indices_tuple"):
            two_sets(create_loss(name, backend="dense"), indices_tuple=triplets)


@pytest.mark.parametrize("name", [*NAMES, "triplet_sh"])
def test_wrong_names_of_backends(name):
    with pytest.raises(
        ValueError, match="unknown backend 'tilde' \\(did you mean 'tiled'\\?\\); known: dense, functional, tiled"
    ):
        create_loss(name, backend="tilde")
    with pytest.raises(ValueError, match="unknown backend 'functional'; known: dense, tiled, triton"):
        create_loss("smooth_chamfer", backend="functional")


def test_the_backend_of_smooth_chamfer_is_that_of_its_similarity():
    loss = create_loss("smooth_chamfer", backend="tiled", base="unified")
    assert (loss.distance.backend, loss.base.backend) == ("tiled", None)
    with pytest.raises(ValueError, match="backend 'triton' cannot be used, because it needs Triton"):
        two_sets(create_loss("smooth_chamfer", backend="triton"))
    with pytest.raises(ValueError, match="backend cannot be given beside a MILSimilarity as distance"):
        create_loss("smooth_chamfer", backend="tiled", distance="mil")


def test_labels_that_stay_are_searched_for_pairs_once(monkeypatch):
    calls = []
    search = pairs.equal_label_pairs
    monkeypatch.setattr(pairs, "equal_label_pairs", lambda *labels: calls.append(labels) or search(*labels))
    loss, call = make_loss("unified"), call_with(2)
    values = [loss(**call) for _ in range(3)]
    assert len(calls) == 1
    assert values[0] == values[1] == values[2]
    call["labels"] = call["labels"].clone()
    assert loss(**call) == values[0]
    assert len(calls) == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_used_loss_can_be_copied_and_saved(name):
    loss, call = make_loss(name), call_with(2)
    expected = loss(**call)
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(twin(**call), expected)
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    loss.load_state_dict(torch.load(file, weights_only=True))


@pytest.mark.parametrize("name", ["goal", "triplet_hn"])
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_warm_up_counts_all_negatives_in_every_backend(name, backend):
    values = []
    for each in ("functional", backend):
        loss = create_loss(name, backend=each, warmup_steps=1)
        values.append([two_sets(loss) for _ in range(2)])
    torch.testing.assert_close(*values)
    assert values[0][0] > 1.5 * values[0][1]
