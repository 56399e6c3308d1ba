"""What this suite does not know must fail, not be left out."""

import pytest
from pytorch_metric_learning import reducers

from tests.pml import components, loops


class NewReducer(reducers.MeanReducer):
    def __init__(self, temperature):
        super().__init__()


class NewReducerWithDefaults(reducers.MeanReducer):
    pass


def test_a_component_whose_arguments_are_unknown(monkeypatch):
    monkeypatch.setattr(reducers, "NewReducerWithDefaults", NewReducerWithDefaults, raising=False)
    assert type(components.all_of("reducer")["NewReducerWithDefaults"]) is NewReducerWithDefaults
    monkeypatch.setattr(reducers, "NewReducer", NewReducer, raising=False)
    with pytest.raises(pytest.fail.Exception, match=r"NewReducer\(\{\}\) .* cannot be made, .*'temperature'"):
        components.all_of("reducer")


def test_a_loss_without_loops(monkeypatch):
    assert set(loops.own_losses()) == set(loops.REFERENCES)
    monkeypatch.delitem(loops.REFERENCES, "vlc")
    with pytest.raises(pytest.fail.Exception, match="add the loops of loss 'vlc' to REFERENCES"):
        loops.make_loss("vlc")


def test_loops_that_are_not_those_of_the_loss():
    for name in loops.own_losses():
        call = loops.call_with(2)
        value, gradients = loops.expected(name, call)
        loss, leaves = loops.make_loss(name)(**call), loops.leaves_of(call)
        loops.check(loss, leaves, value, gradients)
        wrong = [gradients[0], -gradients[1]]
        for expected in ((1.001 * value, gradients), (value, wrong), (value, [1.01 * part for part in gradients])):
            with pytest.raises(AssertionError):
                loops.check(loops.make_loss(name)(**call), leaves, *expected)
