"""Every loss with the tuples of every miner."""

import pytest
import torch

from tests.helpers import components
from tests.helpers.loops import LOSSES, call_with, check_call, make_loss

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)


@DTYPES
@LOSSES
def test_tuples_of_every_miner(name, dtype):
    found = components.miners()
    assert len(found) >= 11
    for miner_name, miner in found.items():
        for sets in (1, 2):
            torch.manual_seed(0)  # some miners sample
            call = call_with(sets, dtype)
            indices_tuple = miner(**call)
            what = f"{miner_name}, {sets} set(s)"
            assert len(indices_tuple[0]) > 0, what
            assert len(indices_tuple[-1]) > 0, what
            call["indices_tuple"] = indices_tuple
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
