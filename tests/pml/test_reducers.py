"""Every loss with every reducer, for labels, pairs and triplets; embedding regularizers."""

import pytest
import torch
from pytorch_metric_learning import reducers

from tests.helpers import components
from tests.helpers.loops import (
    LABELS,
    LOSSES,
    REFERENCES,
    TOLERANCE,
    call_with,
    calls,
    check,
    check_call,
    expected,
    leaves_of,
    make_loss,
    similarities_of,
    values_and_derivatives,
)
from tests.reference.distances import cosine


@LOSSES
def test_every_reducer(name):
    found = components.all_of("reducer")
    assert len(found) >= 9
    for reducer_name, reducer in found.items():
        loss = make_loss(name, reducer=reducer)
        for kind, call in calls(candidates=len(LABELS)):  # PerAnchorReducer takes no more
            what = f"{reducer_name}, {kind}"
            if reducer_name == "DoNothingReducer":
                check_loss_dict(name, loss(**call), call, what)
            elif reducer_name == "PerAnchorReducer" and "triplets" in kind and REFERENCES[name].triplet:
                with pytest.raises(NotImplementedError, match="Triplet reduction not supported"):
                    loss(**call)
            else:
                check_call(name, call, loss=loss, reducer=reducer, what=what)


def check_loss_dict(name, loss_dict, call, what):
    """Compare what a loss hands to the reducer with the loops."""
    assert list(loss_dict) == ["loss"], what
    given = loss_dict["loss"]
    _, similarities = similarities_of(cosine, [leaf.detach() for leaf in leaves_of(call)])
    items = values_and_derivatives(name, similarities.tolist(), call)
    assert len(items) >= 3, what
    assert given["reduction_type"] == ("triplet" if len(items[0][0]) == 3 else "pos_pair"), what
    assert given["divisor"] == len(items), what
    assert list(zip(*(index.tolist() for index in given["indices"]), strict=True)) == [item[0] for item in items], what
    torch.testing.assert_close(given["losses"].tolist(), [value for _, value, _ in items], atol=1e-10, rtol=1e-10)


@LOSSES
def test_reducers_that_cannot_reduce_a_call(name):
    more, per_anchor = call_with(2), reducers.PerAnchorReducer()
    fewer = dict(zip(("ref_emb", "ref_labels", "embeddings", "labels"), more.values(), strict=True))
    check_call(name, fewer, loss=make_loss(name, reducer=per_anchor), reducer=per_anchor)
    unlabelled = dict(calls())["triplets of 2 set(s)"] | {"labels": None, "ref_labels": None}
    by_class = components.all_of("reducer")["ClassWeightedReducer"]
    for reducer, call, message in (
        (per_anchor, more, "PerAnchorReducer takes no more ref_emb than embeddings, 6, got 9"),
        (by_class, unlabelled, "ClassWeightedReducer needs labels, got None"),
    ):
        for each in (reducer, reducers.MultipleReducers({"loss": reducer})):
            with pytest.raises(ValueError, match=message):
                make_loss(name, reducer=each)(**call)


@LOSSES
def test_every_regularizer_is_added_for_the_embeddings_alone(name):
    found = components.all_of("regularizer")
    assert len(found) >= 5
    call = call_with(2)
    for key, regularizer in found.items():
        for reducer in (None, reducers.SumReducer(), reducers.MultipleReducers({"loss": reducers.SumReducer()})):
            loss = make_loss(name, embedding_regularizer=regularizer, embedding_reg_weight=0.25, reducer=reducer)
            value, gradients = expected(name, call, reducer=reducer and reducers.SumReducer())
            twin = call["embeddings"].detach().requires_grad_()
            term = 0.25 * regularizer(twin)
            assert term.abs() > 1e-3, key
            gradients = [gradients[0] + torch.autograd.grad(term, twin)[0], gradients[1]]
            tolerance = 3 * TOLERANCE[torch.float64]
            check(loss(**call), leaves_of(call), value + term.item(), gradients, tolerance, f"{key}, {reducer}")
    loss = make_loss(name, embedding_regularizer=found["LpRegularizer"], reducer=reducers.DoNothingReducer())
    terms = loss(**call)
    assert set(terms) == {"loss", "embedding_reg_loss"}
    torch.testing.assert_close(terms["embedding_reg_loss"]["losses"], call["embeddings"].norm(dim=1).mean())
