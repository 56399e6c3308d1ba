"""Every loss with the tuples of every miner."""

import pytest
import torch

from tests.helpers import components
from tests.helpers.loops import LOSSES, call_with, check_call, draw_calls, make_loss, shows_something
from tests.helpers.seeds import first_that, seed_torch

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)


def has_tuples(call):
    return len(call["indices_tuple"][0]) > 0 and len(call["indices_tuple"][-1]) > 0


@DTYPES
@LOSSES
def test_tuples_of_every_miner(name, dtype):
    found = components.miners()
    assert len(found) >= 11
    for miner_name, miner in found.items():
        for sets in (1, 2):
            what = f"{miner_name}, {sets} set(s)"
            seed_torch(0)  # some miners sample
            calls = (call | {"indices_tuple": miner(**call)} for call in draw_calls(sets, dtype))
            call = first_that(lambda call: has_tuples(call) and shows_something(name, call), calls)
            check_call(name, call, what=what)
            without_labels = {key: value for key, value in call.items() if "labels" not in key}
            assert torch.equal(make_loss(name)(**without_labels), make_loss(name)(**call)), what


@LOSSES
def test_indices_of_any_integer_type_or_in_a_list(name):
    call = call_with(2)
    for miner in ("HardestNegativeMiner", "MultiSimilarityMiner"):
        indices_tuple = components.miners()[miner](**call)
        as_they_are = make_loss(name)(**call, indices_tuple=indices_tuple)
        for other in ([*indices_tuple], tuple(index.int() for index in indices_tuple)):
            assert torch.equal(make_loss(name)(**call, indices_tuple=other), as_they_are)
