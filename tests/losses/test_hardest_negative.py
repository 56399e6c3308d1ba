"""Given triplets and pairs, and the warm-up without mining, of the losses that search for hardest negatives."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from tests.helpers.loops import REFERENCES, call_with, calls, check_call, make_loss
from tests.reference import goal, losses
from vl_plugins.losses import TripletHNLoss

MINING = pytest.mark.parametrize("name", ["goal", "triplet_hn"])
# With all negatives.
WARM = {
    "goal": replace(REFERENCES["goal"], pair=goal.goal_all),
    "triplet_hn": replace(REFERENCES["triplet_hn"], pair=losses.triplet_sh),
}


@MINING
def test_all_negatives_count_during_the_warm_up_but_for_given_triplets(name):
    for what, call in calls():
        loss = make_loss(name, warmup_steps=2)
        for calls_so_far in range(3):
            check_call(WARM[name] if calls_so_far < 2 else name, call, loss=loss, what=what)
        assert loss.training_calls == (0 if "triplets" in what else 3)


@MINING
def test_only_training_with_gradients_counts_and_is_warm(name):
    call, loss = call_with(2), make_loss(name, warmup_steps=1)
    mined = make_loss(name)(**call)
    with torch.no_grad():
        torch.testing.assert_close(loss(**call), mined)
    torch.testing.assert_close(loss.eval()(**call), mined)
    assert loss.training_calls == 0
    assert loss.train()(**call) > mined + 0.01
    torch.testing.assert_close(loss(**call), mined)


@MINING
def test_copies_and_checkpoints_go_on_where_the_loss_was(name, tmp_path):
    loss = make_loss(name, warmup_steps=3)
    for _ in range(2):
        warm = loss(**call_with(2))
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    fresh = make_loss(name, warmup_steps=3)
    fresh.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    for twin in (fresh, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert twin(**call_with(2)) == warm
        assert twin(**call_with(2)) < warm - 0.01
        assert twin.training_calls.dtype == torch.int64


@pytest.mark.parametrize("option", [{"margin": -1}, {"margin": float("nan")}, {"warmup_steps": 1.5}])
def test_wrong_hyper_parameters(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be a.* >= 0, got"):
        TripletHNLoss(**option)
    assert (TripletHNLoss().margin, TripletHNLoss().warmup_steps) == (0.2, 0)
