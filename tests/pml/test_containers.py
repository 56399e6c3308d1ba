"""Every loss in what holds losses: MultipleLosses, and the wrappers that take a loss by its name."""

import pytest
import torch
from pytorch_metric_learning import losses, reducers
from pytorch_metric_learning.miners import MultiSimilarityMiner, TripletMarginMiner

from tests.helpers import components
from tests.helpers.loops import LOSSES, call_with, check, expected, leaves_of, make_loss
from vl_plugins.losses import wrappers

CONTRASTIVE = losses.ContrastiveLoss


@pytest.mark.parametrize("as_dict", [True, False], ids=["dict", "list"])
@LOSSES
def test_multiple_losses(name, as_dict):
    call = call_with(1)
    embeddings, labels = call["embeddings"], call["labels"]
    pairs, triplets = MultiSimilarityMiner(epsilon=0.5), TripletMarginMiner(margin=0.3)
    members = [make_loss(name), CONTRASTIVE(), make_loss(name, reducer=reducers.SumReducer())]
    weights, miners = [0.5, 2.0, 0.25], [pairs, None, triplets]
    if as_dict:
        keys = "abc"
        members, weights = dict(zip(keys, members, strict=True)), dict(zip(keys, weights, strict=True))
        miners = {"a": pairs, "c": triplets}

    theirs = 2 * CONTRASTIVE()(embeddings, labels)
    mined = [
        expected(name, call | {"indices_tuple": pairs(embeddings, labels)}),
        expected(name, call | {"indices_tuple": triplets(embeddings, labels)}, reducer=reducers.SumReducer()),
    ]
    value = theirs.item() + 0.5 * mined[0][0] + 0.25 * mined[1][0]
    gradient = torch.autograd.grad(theirs, embeddings)[0] + 0.5 * mined[0][1][0] + 0.25 * mined[1][1][0]
    check(losses.MultipleLosses(members, miners, weights)(embeddings, labels), [embeddings], value, [gradient])

    # Without miners of their own all take the same tuple.
    given = triplets(embeddings, labels)
    theirs = 2 * CONTRASTIVE()(embeddings, labels, given)
    mined = [
        expected(name, call | {"indices_tuple": given}, reducer=reducer) for reducer in (None, reducers.SumReducer())
    ]
    value = theirs.item() + 0.5 * mined[0][0] + 0.25 * mined[1][0]
    actual = losses.MultipleLosses(members, weights=weights)(embeddings, labels, given)
    torch.testing.assert_close(actual.item(), value)


@LOSSES
def test_multiple_losses_have_no_references(name):
    """They call each loss with one set; two modalities are two calls, or a sum."""
    call = call_with(2)
    with pytest.raises(TypeError, match="ref_emb"):
        losses.MultipleLosses([make_loss(name)])(**call)


def test_every_wrapper_of_the_host_that_takes_losses_by_name_has_one_of_ours():
    for wrapper_name, wrapper in components.classes("losses", losses.BaseLossWrapper).items():
        ours = getattr(wrappers, wrapper_name, None)
        if ours is None:
            pytest.fail(
                f"{wrapper_name} of the installed pytorch-metric-learning has no form in vl_plugins.losses.wrappers"
            )
        assert issubclass(ours, wrapper)
        assert set(wrapper.supported_losses()) < set(ours.supported_losses())


@LOSSES
def test_wrappers_of_wrappers(name):
    """A memory and a plain loss side by side."""
    call = call_with(1)
    embeddings, labels = call["embeddings"], call["labels"]
    memory = wrappers.CrossBatchMemory(make_loss(name), embedding_size=5, memory_size=6)
    value = losses.MultipleLosses([memory, make_loss(name)])(embeddings, labels)
    plain, (gradient,) = expected(name, call)
    # The memory holds the batch itself: the same value, but its copies have no gradient.
    copies = call | {
        "ref_emb": embeddings.detach(),
        "ref_labels": labels,
        "indices_tuple": tuple(index for index in _pairs(labels)),
    }
    of_memory, (of_anchors, _) = expected(name, copies)
    torch.testing.assert_close(of_memory, plain)
    check(value, leaves_of(call), plain + of_memory, [gradient + of_anchors])


def _pairs(labels):
    same = labels[:, None] == labels
    return (*torch.where(same & ~torch.eye(len(labels), dtype=torch.bool)), *torch.where(~same))
