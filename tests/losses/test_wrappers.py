import copy
import pickle

import pytest
import torch
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils import common_functions, distributed

from tests.helpers.loops import LOSSES, call_with, check, embeddings_of, expected, make_loss, own_losses
from vl_plugins.losses import UnifiedLoss, VLCLoss
from vl_plugins.losses.base import PairLoss
from vl_plugins.losses.wrappers import (
    CrossBatchMemory,
    DistributedLossWrapper,
    DistributedMinerWrapper,
    SelfSupervisedLoss,
)
from vl_plugins.miners import HardestNegativeMiner

WRAPPERS = pytest.mark.parametrize("wrapper", [CrossBatchMemory, SelfSupervisedLoss])
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
MEMORY = 11


class Queue:
    """The memory by hand: a ring of embeddings and labels."""

    def __init__(self):
        self.places, self.next = {}, 0

    def put(self, embeddings, labels):
        """Return the places of the embeddings."""
        places = []
        for embedding, label in zip(embeddings.detach(), labels, strict=True):
            self.places[self.next] = embedding, label
            places.append(self.next)
            self.next = (self.next + 1) % MEMORY
        return places

    def content(self):
        kept = [self.places[place] for place in sorted(self.places)]
        return torch.stack([embedding for embedding, _ in kept]), torch.stack([label for _, label in kept])


def without_own_copies(indices, places):
    anchors, positives, *negatives = (index.tolist() for index in indices)
    kept = [k for k, (a, p) in enumerate(zip(anchors, positives, strict=True)) if places[a] != p]
    of_triplets = len(negatives) == 1
    columns = [anchors, positives, *(negatives if of_triplets else [])]
    columns = [[column[k] for k in kept] for column in columns] + ([] if of_triplets else negatives)
    return tuple(torch.tensor(column, dtype=torch.long) for column in columns)


def all_pairs(labels, ref_labels):
    pairs = [(a, c) for a in range(len(labels)) for c in range(len(ref_labels))]
    positives = [(a, c) for a, c in pairs if labels[a] == ref_labels[c]]
    negatives = [(a, c) for a, c in pairs if labels[a] != ref_labels[c]]
    return tuple(torch.tensor(column) for side in (positives, negatives) for column in zip(*side, strict=True))


def batch(step, size=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 3, (size,), generator=generator)
    return embeddings_of(labels, dtype, seed=100 + step), labels


def expected_call(embeddings, labels, indices, queue):
    memory, memory_labels = queue.content()
    call = {"embeddings": embeddings, "labels": labels, "indices_tuple": indices}
    return call | {"ref_emb": memory, "ref_labels": memory_labels}


def check_step(name, actual, embeddings, call, what, **how):
    value, gradients = expected(name, call)
    check(actual, [embeddings], value, gradients[:1], what=f"{name}, {what}", **how)


MINERS = {
    "no miner": None,
    "pairs": miners.MultiSimilarityMiner(epsilon=0.8),
    "triplets": miners.TripletMarginMiner(margin=0.5),
    "BatchHardMiner": miners.BatchHardMiner(),
    "HardestNegativeMiner": HardestNegativeMiner(k=2),
}


@DTYPES
@pytest.mark.parametrize("miner", MINERS)
@LOSSES
def test_memory_filling_and_wrapping_around(name, miner, dtype):
    miner = MINERS[miner]
    loss = CrossBatchMemory(make_loss(name), embedding_size=5, memory_size=MEMORY, miner=miner)
    queue, compared = Queue(), 0
    for step, size in enumerate([4, 3, 4, 4, 1, 5, 11, 4, 2]):
        embeddings, labels = batch(step, size, dtype)
        actual = loss(embeddings, labels)
        places = queue.put(embeddings, labels)
        memory, memory_labels = queue.content()
        if miner is None:
            indices = all_pairs(labels, memory_labels)
        else:
            indices = miner(embeddings.detach(), labels, memory, memory_labels)
        indices = without_own_copies(indices, places)
        compared += len(indices[0])
        call = expected_call(embeddings, labels, indices, queue)
        check_step(name, actual, embeddings, call, f"step {step}", least=-1)
    assert queue.next == 38 % MEMORY
    assert compared > 20


@pytest.mark.parametrize("miner", ["no miner", "pairs", "triplets"])
@pytest.mark.parametrize("given", ["pairs", "triplets"])
@LOSSES
def test_indices_of_the_batch_are_added(name, given, miner):
    miner, given = MINERS[miner], MINERS[given]
    loss = CrossBatchMemory(make_loss(name), embedding_size=5, memory_size=MEMORY, miner=miner)
    queue = Queue()
    for step in range(5):
        embeddings, labels = batch(20 + step, 6)
        indices = given(embeddings, labels)
        assert len(indices[0]) > 0
        actual = loss(embeddings, labels, indices)
        places = queue.put(embeddings, labels)
        memory, memory_labels = queue.content()
        mined = miner(embeddings.detach(), labels, memory, memory_labels) if miner else all_pairs(labels, memory_labels)
        mined = without_own_copies(mined, places)
        in_memory = [torch.tensor([places[i] for i in index.tolist()], dtype=torch.long) for index in indices]
        anchors, _, *others = indices
        if len(indices) == 3:
            in_memory = [anchors, in_memory[1], in_memory[2]]
        else:
            in_memory = [anchors, in_memory[1], others[0], in_memory[3]]
        labels_of_pairs = labels[anchors], memory_labels[in_memory[1]]
        assert torch.equal(*labels_of_pairs)
        if len(mined) == 4 and len(in_memory) == 3:
            in_memory = [*in_memory[:2], in_memory[0], in_memory[2]]
        elif len(mined) == 3 and len(in_memory) == 4:
            a, p, b, n = (index.tolist() for index in in_memory)
            joined = [(i, j, k) for i, j in zip(a, p, strict=True) for m, k in zip(b, n, strict=True) if i == m]
            in_memory = torch.tensor(joined).T
        together = tuple(torch.cat(both) for both in zip(mined, in_memory, strict=True))
        check_step(name, actual, embeddings, expected_call(embeddings, labels, together, queue), f"step {step}")


@LOSSES
def test_only_embeddings_of_the_mask_are_queued_and_the_others_compared(name):
    loss = CrossBatchMemory(make_loss(name), embedding_size=5, memory_size=MEMORY)
    queue = Queue()
    for step in range(5):
        embeddings, labels = batch(40 + step, 8)
        mask = torch.tensor([True, False] * 4)
        actual = loss(embeddings, labels, enqueue_mask=mask)
        queue.put(embeddings[mask], labels[mask])
        anchors = embeddings.detach()[~mask].requires_grad_()
        call = expected_call(anchors, labels[~mask], all_pairs(labels[~mask], queue.content()[1]), queue)
        value, (gradient, _) = expected(name, call)
        whole = torch.zeros_like(embeddings).index_put((~mask,), gradient)
        check(actual, [embeddings], value, [whole], what=f"{name}, step {step}")


def test_miners_of_the_easiest_positive():
    embeddings, labels = batch(1, 6)
    loss = CrossBatchMemory(VLCLoss(), 5, MEMORY, miner=miners.BatchEasyHardMiner())
    with pytest.raises(
        ValueError, match="BatchEasyHardMiner with pos_strategy='easy' would choose each embedding's own"
    ):
        loss(embeddings, labels)
    mask = torch.tensor([True, False] * 3)
    assert loss(embeddings, labels, enqueue_mask=mask) > 0
    hard = miners.BatchEasyHardMiner(pos_strategy="hard", neg_strategy="hard")
    assert CrossBatchMemory(VLCLoss(), 5, MEMORY, miner=hard)(embeddings, labels) > 0


@pytest.mark.parametrize("wrapper", [distributed.DistributedMinerWrapper, DistributedMinerWrapper])
def test_miners_of_several_processes(wrapper):
    """Its indices would be those of the queues of all processes, one after the other."""
    loss = CrossBatchMemory(VLCLoss(), 5, MEMORY, miner=wrapper(HardestNegativeMiner(), efficient=True))
    with pytest.raises(ValueError, match="wrap the CrossBatchMemory in a DistributedLossWrapper"):
        loss(*batch(1, 6))


@LOSSES
def test_nothing_to_queue_or_to_compare(name):
    loss = CrossBatchMemory(make_loss(name), embedding_size=5, memory_size=MEMORY)
    embeddings, labels = batch(1)
    nobody, everybody = torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    none, no_labels = embeddings_of(labels[:0]), labels[:0]
    for call, mask, queued in (
        ((none, no_labels), None, 0),
        ((none, no_labels), nobody[:0], 0),
        ((embeddings, labels), nobody, 0),
        ((embeddings, labels), everybody, 4),
        ((none, no_labels), None, 4),
    ):
        value = loss(*call, enqueue_mask=mask)
        assert value == 0
        assert not torch.autograd.grad(value, call[0])[0].any()
        assert (loss.queue_idx, loss.has_been_filled) == (queued, False)
    unlike = CrossBatchMemory(make_loss(name), embedding_size=5, memory_size=MEMORY)
    assert unlike(embeddings_of(torch.tensor([0, 1, 2])), torch.tensor([0, 1, 2])) == 0


@pytest.mark.parametrize("name", [*own_losses(), "the host's"])
def test_half_precision_under_autocast_of_any_device(name, monkeypatch):
    def steps(loss, dtype):
        total = 0
        for step in range(3):
            embeddings, labels = batch(step, dtype=torch.bfloat16)
            total = total + loss(embeddings.detach().to(dtype), labels)
        return total

    def new():
        loss = losses.NTXentLoss() if name == "the host's" else make_loss(name)
        return CrossBatchMemory(loss, embedding_size=5, memory_size=MEMORY, miner=HardestNegativeMiner())

    single = steps(new(), torch.float32)
    assert single > 0.01
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(steps(new(), torch.bfloat16), single)
        # The host does so under autocast of an accelerator, and then finds two types.
        monkeypatch.setattr(common_functions, "to_dtype", lambda tensor, **_: tensor)
        assert torch.equal(steps(new(), torch.bfloat16), single)


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
@LOSSES
def test_a_copy_of_a_memory_goes_on_where_it_was(name, how, tmp_path):
    for steps in (2, 4):  # before it is full, and after
        loss = CrossBatchMemory(make_loss(name), embedding_size=5, memory_size=MEMORY)
        for step in range(steps):
            loss(*batch(step))
        if how == "state_dict":
            torch.save(loss.state_dict(), tmp_path / "loss.pt")
            twin = CrossBatchMemory(make_loss(name), embedding_size=5, memory_size=MEMORY).double()
            twin.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
        else:
            twin = pickle.loads(pickle.dumps(loss)) if how == "pickle" else copy.deepcopy(loss)
        for step in range(5, 8):
            expected_value = loss(*batch(step))
            assert expected_value > 0
            assert torch.equal(twin(*batch(step)), expected_value)
        loss.reset_queue()
        assert loss(*batch(9)) == CrossBatchMemory(make_loss(name), 5, MEMORY)(*batch(9))


@pytest.mark.parametrize("miner", ["no miner", "pairs", "triplets"])
def test_the_losses_of_the_host_give_what_its_wrappers_give(miner):
    ours, theirs = (
        wrapper(losses.NTXentLoss(), 5, MEMORY, miner=MINERS[miner])
        for wrapper in (CrossBatchMemory, losses.CrossBatchMemory)
    )
    for step in range(6):
        embeddings, labels = batch(step)
        value = theirs(embeddings, labels)
        assert value > 0
        torch.testing.assert_close(ours(embeddings, labels), value)
    ours, theirs = (wrapper(losses.NTXentLoss()) for wrapper in (SelfSupervisedLoss, losses.SelfSupervisedLoss))
    images, texts = batch(1)[0], batch(2)[0]
    assert torch.equal(ours(images, texts), theirs(images, texts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(3)}, r"embeddings must have the shape \(3, 5\), got \(4, 5\)"),
        ({"labels": [0, 1, 2, 0]}, "^labels must be a tensor, got list"),
        ({"embeddings": torch.ones(4, 6)}, r"embeddings must have the shape \(4, 5\), got \(4, 6\)"),
        ({"embeddings": torch.ones(12, 5), "labels": torch.ones(12)}, "memory_size must be at least .*, 12, got 11"),
        (
            {"enqueue_mask": torch.ones(3, dtype=torch.bool)},
            r"enqueue_mask must be .* \(4,\), got torch.bool of .* \(3,\)",
        ),
        ({"enqueue_mask": torch.ones(4)}, r"enqueue_mask must be a bool tensor .* got torch.float32 of"),
        (
            {
                "embeddings": torch.ones(13, 5),
                "labels": torch.ones(13),
                "enqueue_mask": torch.arange(13) > 0,
            },
            "memory_size must be at least .*, 12, got 11",
        ),
        (
            {"enqueue_mask": torch.ones(4, dtype=torch.bool), "indices_tuple": (torch.arange(2),) * 3},
            "indices_tuple and enqueue_mask are mutually exclusive",
        ),
    ],
)
def test_wrong_input_of_a_memory_leaves_it_as_it_is(change, message):
    loss = CrossBatchMemory(UnifiedLoss(), embedding_size=5, memory_size=MEMORY)
    embeddings, labels = batch(1)
    with pytest.raises(ValueError, match=message):
        loss(**({"embeddings": embeddings, "labels": labels} | change))
    assert loss.queue_idx == 0


@pytest.mark.parametrize(
    "wrapper",
    [DistributedLossWrapper(losses.NTXentLoss()), DistributedMinerWrapper(miners.MultiSimilarityMiner())],
    ids=["loss", "miner"],
)
def test_labels_for_several_processes_are_tensors(wrapper):
    embeddings, labels = torch.eye(3), torch.arange(3)
    with pytest.raises(ValueError, match="labels must be a tensor, got list"):
        wrapper(embeddings, labels.tolist())
    with pytest.raises(ValueError, match="ref_labels must be a tensor, got ndarray"):
        wrapper(embeddings, labels, ref_emb=embeddings.clone(), ref_labels=labels.numpy())


@DTYPES
@pytest.mark.parametrize("symmetric_loss", [True, False])
@LOSSES
def test_self_supervised(name, symmetric_loss, dtype):
    images, texts = (embeddings_of(torch.arange(6), dtype, seed=seed) for seed in (0, 1))
    labels = torch.arange(6)
    # One set: each of both kinds is an anchor, and all others but its counterpart are its negatives.
    together = torch.cat([images, texts]).detach().requires_grad_()
    value, (gradient,) = expected(name, {"embeddings": together, "labels": torch.cat([labels, labels])})
    one_set = SelfSupervisedLoss(make_loss(name, symmetric=symmetric_loss), symmetric=True)
    check(one_set(images, texts), [images, texts], value, gradient.split(6))

    call = {"embeddings": images, "labels": labels, "ref_emb": texts, "ref_labels": labels}
    two_sets = SelfSupervisedLoss(make_loss(name, symmetric=symmetric_loss), symmetric=False)
    check(two_sets(images, texts), [images, texts], *expected(name, call, symmetric=symmetric_loss))


def test_counterparts_are_as_many():
    for symmetric in (True, False):
        with pytest.raises(ValueError, match=r"ref_emb must have the shape of embeddings, \(4, 5\), got \(3, 5\)"):
            SelfSupervisedLoss(UnifiedLoss(), symmetric)(torch.ones(4, 5), torch.ones(3, 5))


class OtherPairLoss(PairLoss):
    def pair_losses(self, similarities, positive_mask, negative_mask, *, symmetric):
        return 1 - similarities[positive_mask]


class NoPairLoss(losses.BaseMetricLossFunction):
    pass


def wrapped(wrapper, loss):
    return wrapper(loss, 5, MEMORY) if issubclass(wrapper, losses.CrossBatchMemory) else wrapper(loss)


@WRAPPERS
def test_losses_that_a_wrapper_takes(wrapper):
    for name in losses_of_the_host(wrapper):
        wrapped(wrapper, getattr(losses, name)())
    embeddings = torch.eye(5)[:2]
    other = wrapped(wrapper, OtherPairLoss())
    if wrapper is SelfSupervisedLoss:
        assert other(embeddings, embeddings.flip(0)) == 1
    else:
        assert other(embeddings, torch.zeros(2)) == 1
    assert "OtherPairLoss" in wrapper.supported_losses()
    with pytest.raises(
        ValueError, match=f"{wrapper.__name__} does not take a NoPairLoss; it takes AngularLoss.*Unified"
    ):
        wrapped(wrapper, NoPairLoss())
    for loss in (losses.NPairsLoss(), losses.VICRegLoss()):
        with pytest.raises(ValueError, match="does not take a"):
            wrapped(wrapper, loss)


def losses_of_the_host(wrapper):
    names = getattr(losses, wrapper.__name__).supported_losses()
    assert len(names) > 10
    return names


def test_the_host_refuses_ours():
    """Once it takes any loss, these wrappers can go."""
    for wrapper in (losses.CrossBatchMemory, losses.SelfSupervisedLoss):
        with pytest.raises(Exception, match="not supported for UnifiedLoss"):
            wrapped(wrapper, UnifiedLoss())


def test_what_the_host_does_with_indices_of_the_batch_and_its_memory():
    """Why the base class is corrected: once it does this right, the corrections can go."""
    loss = losses.CrossBatchMemory(losses.ContrastiveLoss(), 5, MEMORY)
    embeddings, labels = batch(1)
    loss(embeddings, torch.arange(4))
    seen = {}
    loss.loss.register_forward_hook(lambda module, arguments, output: seen.update(arguments=arguments))
    labels = torch.tensor([7, 7, 8, 8])
    given = tuple(torch.tensor(index) for index in ([0], [1], [2]))
    loss(embeddings, labels, given)
    _, _, (anchors, positives, _, _), _, memory_labels = seen["arguments"]
    assert labels[anchors[-1]] == 7
    assert memory_labels[positives[-1]] == 1  # that of the first batch
    assert common_functions.shift_indices_tuple(given, 4)[1] == 5  # where it is

    loss = losses.CrossBatchMemory(losses.ContrastiveLoss(), 5, MEMORY)
    loss(embeddings, labels, enqueue_mask=torch.zeros(4, dtype=torch.bool))
    assert loss.has_been_filled


def test_memory_of_two_modalities():
    """Captions in the queue, images compared with them: image to text over several batches."""
    call = call_with(2)
    loss = CrossBatchMemory(UnifiedLoss(scale=10), embedding_size=5, memory_size=9)
    both = torch.cat([call["embeddings"], call["ref_emb"]])
    labels = torch.cat([call["labels"], call["ref_labels"]])
    value = loss(both, labels, enqueue_mask=torch.arange(15) >= 6)
    torch.testing.assert_close(value, UnifiedLoss(scale=10, symmetric=False)(**call))
