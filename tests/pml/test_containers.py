"""Losses in what holds losses: MultipleLosses, and the wrappers that take a loss by its name."""

import pytest
import torch
from pytorch_metric_learning import losses, reducers
from pytorch_metric_learning.miners import MultiSimilarityMiner, TripletMarginMiner

from tests.helpers import components
from tests.helpers.loops import call_with, check, expected, make_loss
from vl_plugins.losses import wrappers


@pytest.mark.parametrize("name", ["unified", "goal"])
def test_multiple_losses(name):
    call = call_with(1)
    embeddings, labels = call["embeddings"], call["labels"]
    pairs, triplets = MultiSimilarityMiner(epsilon=0.5), TripletMarginMiner(margin=0.3)
    members = {"a": make_loss(name), "b": losses.ContrastiveLoss(), "c": make_loss(name, reducer=reducers.SumReducer())}
    weights = {"a": 0.5, "b": 2.0, "c": 0.25}

    theirs = 2 * losses.ContrastiveLoss()(embeddings, labels)
    one = expected(name, call | {"indices_tuple": pairs(embeddings, labels)})
    other = expected(name, call | {"indices_tuple": triplets(embeddings, labels)}, reducer=reducers.SumReducer())
    value = theirs.item() + 0.5 * one[0] + 0.25 * other[0]
    gradient = torch.autograd.grad(theirs, embeddings)[0] + 0.5 * one[1][0] + 0.25 * other[1][0]
    loss = losses.MultipleLosses(members, {"a": pairs, "c": triplets}, weights)
    check(loss(embeddings, labels), [embeddings], value, [gradient])


def test_every_wrapper_of_the_host_that_takes_losses_by_name_has_one_of_ours():
    for wrapper_name, wrapper in components.classes("losses", losses.BaseLossWrapper).items():
        ours = getattr(wrappers, wrapper_name, None)
        assert ours is not None, f"{wrapper_name} has no form in vl_plugins.losses.wrappers"
        assert issubclass(ours, wrapper)
        assert set(wrapper.supported_losses()) < set(ours.supported_losses())
