"""Every loss with every reducer, for pairs, triplets and labels."""

import pytest
import torch
from pytorch_metric_learning import reducers
from pytorch_metric_learning.miners import MultiSimilarityMiner, TripletMarginMiner

from tests.pml import components
from tests.pml.loops import LABELS, LOSSES, call_with, check_call, leaves_of, make_loss, reference_of
from tests.pml.loops import values_and_derivatives as loops
from tests.reference import distances as reference_distances

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
MINERS = {"labels": None, "pairs": MultiSimilarityMiner(epsilon=0.5), "triplets": TripletMarginMiner(margin=0.3)}


def calls(dtype=torch.float64):
    """``(sets, kind of tuple, arguments)`` of every way to call a loss; as many references as embeddings."""
    for sets in (1, 2):
        for kind, miner in MINERS.items():
            call = call_with(sets, dtype)
            if sets == 2:  # more than PerAnchorReducer takes
                ref_emb = call["ref_emb"].detach()[: len(LABELS)].requires_grad_()
                call |= {"ref_emb": ref_emb, "ref_labels": call["ref_labels"][: len(LABELS)]}
            if miner is not None:
                call["indices_tuple"] = miner(**call)
            yield sets, kind, call


def gives_triplets(name, kind):
    return kind == "triplets" and reference_of(name).triplet is not None


@DTYPES
@LOSSES
def test_every_reducer(name, dtype):
    found = components.all_of("reducer")
    assert len(found) >= 9
    checked = 0
    for reducer_name, reducer in found.items():
        loss = make_loss(name, reducer=reducer)
        for sets, kind, call in calls(dtype):
            what = f"{reducer_name}, {sets} set(s), {kind}"
            if reducer_name == "DoNothingReducer":
                check_values(name, loss(**call), call, what)
            elif reducer_name == "PerAnchorReducer" and gives_triplets(name, kind):
                with pytest.raises(NotImplementedError, match="Triplet reduction not supported"):
                    loss(**call)
            else:
                check_call(name, call, loss=loss, reducer=reducer, what=what)
            checked += 1
    assert checked == 6 * len(found)


def check_values(name, loss_dict, call, what):
    """Compare what a loss hands to the reducer with the loops."""
    assert list(loss_dict) == ["loss"], what
    given = loss_dict["loss"]
    similarities = reference_distances.matrix(
        reference_distances.cosine, *(leaf.detach().double() for leaf in leaves_of(call))
    )
    items = loops(name, similarities.tolist(), call, symmetric=True)
    assert len(items) >= 3, what
    assert given["reduction_type"] == ("triplet" if len(items[0][0]) == 3 else "pos_pair"), what
    assert given["divisor"] == len(items), what
    assert list(zip(*(index.tolist() for index in given["indices"]), strict=True)) == [item[0] for item in items], what
    values = torch.tensor([value for _, value, _ in items], dtype=torch.float64)
    torch.testing.assert_close(given["losses"].double(), values, atol=1e-5, rtol=1e-5)


@LOSSES
def test_more_references_than_embeddings_per_anchor(name):
    more = call_with(2)
    fewer = {
        "embeddings": more["ref_emb"],
        "labels": more["ref_labels"],
        "ref_emb": more["embeddings"],
        "ref_labels": more["labels"],
    }
    for inner in (None, reducers.SumReducer()):
        reducer = reducers.PerAnchorReducer(inner)
        check_call(name, fewer, loss=make_loss(name, reducer=reducer), reducer=reducer)
        nested = reducers.MultipleReducers({"loss": reducer})
        for of_loss in (reducer, nested):
            with pytest.raises(ValueError, match="PerAnchorReducer takes no more ref_emb than embeddings, 6, got 9"):
                make_loss(name, reducer=of_loss)(**more)


@LOSSES
def test_classes_are_those_of_the_anchors_and_needed(name):
    reducer = components.all_of("reducer")["ClassWeightedReducer"]
    call = call_with(2)
    call["indices_tuple"] = TripletMarginMiner(margin=0.3)(**call)
    check_call(name, call, loss=make_loss(name, reducer=reducer), reducer=reducer)
    call |= {"labels": None, "ref_labels": None}
    for of_loss in (reducer, reducers.MultipleReducers({"loss": reducer})):
        with pytest.raises(ValueError, match="ClassWeightedReducer needs labels, got None"):
            make_loss(name, reducer=of_loss)(**call)


@LOSSES
def test_a_reducer_that_was_used_before_keeps_nothing(name):
    for reducer_name, reducer in components.all_of("reducer").items():
        if reducer_name == "DoNothingReducer":
            continue
        loss = make_loss(name, reducer=reducer)
        call = next(call for _, _, call in calls())
        first = loss(**call)
        loss(**{key: value[:3] for key, value in call.items()})
        assert torch.equal(loss(**call), first), reducer_name
