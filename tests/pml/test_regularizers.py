"""Every loss with every regularizer of embeddings."""

import pytest
import torch
from pytorch_metric_learning import reducers

from tests.pml import components
from tests.pml.loops import LOSSES, TOLERANCE, call_with, check, expected, leaves_of, make_loss

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)


@DTYPES
@LOSSES
def test_every_regularizer_is_added_for_the_embeddings_alone(name, dtype):
    found = components.all_of("regularizer")
    assert len(found) >= 5
    for regularizer_name, regularizer in found.items():
        for sets in (1, 2):
            for reducer in (None, reducers.SumReducer(), reducers.MultipleReducers({"loss": reducers.SumReducer()})):
                what = f"{name}, {regularizer_name}, {sets} set(s), {reducer}"
                call = call_with(sets, dtype)
                loss = make_loss(name, embedding_regularizer=regularizer, embedding_reg_weight=0.25, reducer=reducer)
                value, gradients = expected(name, call, reducer=reducers.SumReducer() if reducer else None)
                twin = call["embeddings"].detach().double().requires_grad_()
                term = 0.25 * regularizer(twin)
                assert term.abs() > 1e-3, what
                (of_term,) = torch.autograd.grad(term, twin)
                gradients = [gradients[0] + of_term, *gradients[1:]]
                check(loss(**call), leaves_of(call), value + term.item(), gradients, 3 * TOLERANCE[dtype], what)


@LOSSES
def test_the_reducer_of_a_loss_may_be_one_for_each_term(name):
    regularizer = components.all_of("regularizer")["LpRegularizer"]
    loss = make_loss(name, embedding_regularizer=regularizer, reducer=reducers.DoNothingReducer())
    call = call_with(2)
    loss_dict = loss(**call)
    assert set(loss_dict) == {"loss", "embedding_reg_loss"}
    torch.testing.assert_close(loss_dict["embedding_reg_loss"]["losses"], call["embeddings"].norm(dim=1).mean())
    torch.testing.assert_close(loss_dict["loss"]["losses"].mean().item(), expected(name, call)[0])
