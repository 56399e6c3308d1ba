"""The wrappers against the loops of the losses."""

import copy
import itertools
import pickle

import pytest
import torch
from pytorch_metric_learning import miners
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu

from tests.helpers.loops import check, embeddings_of, expected, make_loss
from tests.helpers.seeds import first_that, seeded
from vl_plugins.losses import CrossBatchMemory, SelfSupervisedLoss, UnifiedLoss, VLCLoss
from vl_plugins.miners import HardestNegativeMiner

MEMORY = 11
MINERS = {
    "pairs": miners.MultiSimilarityMiner(epsilon=0.8),
    "triplets": miners.TripletMarginMiner(margin=0.5),
    "hardest": HardestNegativeMiner(k=2),
}


class Queue:
    """The memory by hand: a circular queue of embeddings and labels."""

    def __init__(self):
        self.rows, self.next = {}, 0

    def put(self, embeddings, labels):
        """Return the places of the embeddings, and all embeddings and labels in the queue."""
        places = [(self.next + number) % MEMORY for number in range(len(labels))]
        self.rows |= dict(zip(places, zip(embeddings.detach(), labels, strict=True), strict=True))
        self.next = (self.next + len(labels)) % MEMORY
        return places, *map(torch.stack, zip(*(self.rows[place] for place in sorted(self.rows)), strict=True))


def without_own_copies(indices, places):
    kept = [k for k, (anchor, other) in enumerate(zip(*indices[:2], strict=True)) if places[anchor] != other]
    positives = len(indices) if len(indices) == 3 else 2
    return *(index[kept] for index in indices[:positives]), *indices[positives:]


def all_pairs(labels, ref_labels):
    same = labels[:, None] == ref_labels
    return *same.nonzero().T, *(~same).nonzero().T


def batch(step, size=4, dtype=torch.float64):
    """Embeddings and labels, with triplets to mine if there are four or more."""
    draws = (draw_batch(1000 * number + step, size, dtype) for number in itertools.count())
    return first_that(lambda drawn: size < 4 or len(MINERS["triplets"](drawn[0].double(), drawn[1])[0]) > 0, draws)


def draw_batch(seed, size, dtype):
    labels = torch.randint(0, 3, (size,), generator=seeded(seed))
    return embeddings_of(labels, dtype, seed=100 + seed), labels


def memory_of(loss, **options):
    return CrossBatchMemory(loss, embedding_size=5, memory_size=MEMORY, **options)


@pytest.mark.parametrize(
    ("name", "miner", "given", "dtype"),
    [
        ("goal", None, None, torch.float64),
        ("smooth_chamfer", None, None, torch.float32),
        ("unified", "pairs", None, torch.float64),
        ("triplet_hn", "hardest", None, torch.float64),
        *(
            ("goal", miner, given, torch.float64)
            for miner in (None, "triplets")
            for given in (None, "pairs", "triplets")
        ),
    ],
)
def test_memory_filling_and_wrapping_around(name, miner, given, dtype):
    """Of all pairs or those of a miner, and more that are given, of the batch."""
    miner, given = MINERS.get(miner), MINERS.get(given)
    loss, queue, compared, values = memory_of(make_loss(name), miner=miner), Queue(), 0, []
    for step, size in enumerate([4, 3, 4, 4, 1, 5, 11, 4, 2]):
        embeddings, labels = batch(step, size, dtype)
        of_batch = given and given(embeddings, labels)
        actual = loss(embeddings, labels, of_batch)
        places, memory, memory_labels = queue.put(embeddings, labels)
        mined = miner(embeddings.detach(), labels, memory, memory_labels) if miner else all_pairs(labels, memory_labels)
        indices = without_own_copies(mined, places)
        if given:  # anchors are places in the batch, and all others in the queue
            a, p, *b, n = of_batch
            of_queue = a, torch.tensor(places)[p], *b, torch.tensor(places)[n]
            convert = lmu.convert_to_pairs if len(indices) == 4 else lmu.convert_to_triplets
            indices = tuple(map(torch.cat, zip(indices, convert(of_queue, labels), strict=True)))
        compared += len(indices[0])
        call = {"embeddings": embeddings, "labels": labels, "indices_tuple": indices}
        value, gradients = expected(name, call | {"ref_emb": memory, "ref_labels": memory_labels})
        check(actual, [embeddings], value, gradients[:1], what=name, least=-1)  # not each step has a loss
        values.append(value)
    assert max(values) > 0.01
    assert queue.next == 38 % MEMORY
    assert compared > 20


def test_only_embeddings_of_the_mask_are_queued_and_the_others_compared():
    loss, queue = memory_of(make_loss("unified")), Queue()
    for step in range(5):
        embeddings, labels = batch(40 + step, 8)
        mask = torch.tensor([True, False] * 4)
        gradient = torch.autograd.grad(loss(embeddings, labels, enqueue_mask=mask), embeddings)[0]
        _, memory, memory_labels = queue.put(embeddings[mask], labels[mask])
        call = {"embeddings": embeddings[~mask], "labels": labels[~mask], "ref_emb": memory}
        call |= {"ref_labels": memory_labels, "indices_tuple": all_pairs(labels[~mask], memory_labels)}
        torch.testing.assert_close(gradient[~mask], expected("unified", call)[1][0])
        assert not gradient[mask].any()


def test_miners_that_a_memory_cannot_use():
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    embeddings = embeddings_of(labels)
    loss = memory_of(VLCLoss(), miner=miners.BatchEasyHardMiner())
    with pytest.raises(ValueError, match="pos_strategy='easy' would choose each embedding's own copy"):
        loss(embeddings, labels)
    assert loss(embeddings, labels, enqueue_mask=torch.tensor([True, False] * 3)) > 0
    hard = miners.BatchEasyHardMiner(pos_strategy="hard", neg_strategy="hard")
    assert memory_of(VLCLoss(), miner=hard)(embeddings, labels) > 0


def test_nothing_to_queue_or_to_compare():
    loss = memory_of(make_loss("unified"))
    embeddings, labels = batch(1)
    nobody, everybody = torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    nothing = embeddings_of(labels[:0]), labels[:0]
    for call, mask, queued in (
        (nothing, None, 0),
        (nothing, nobody[:0], 0),
        ((embeddings, labels), nobody, 0),
        ((embeddings, labels), everybody, 4),
        (nothing, None, 4),
    ):
        value = loss(*call, enqueue_mask=mask)
        assert value == 0
        assert not torch.autograd.grad(value, call[0])[0].any()
        assert (loss.queue_idx, loss.has_been_filled) == (queued, False)


@pytest.mark.parametrize("steps", [2, 4], ids=["not full", "full"])
def test_a_copy_of_a_memory_goes_on_where_it_was(steps, tmp_path):
    loss, restored = memory_of(make_loss("goal")), memory_of(make_loss("goal")).double()
    for step in range(steps):
        loss(*batch(step))
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    restored.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    twins = restored, pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)
    for step in range(5, 8):
        value = loss(*batch(step))
        assert value > 0
        assert all(torch.equal(twin(*batch(step)), value) for twin in twins)


def test_ids_of_a_memory_are_those_of_its_embeddings(tmp_path):
    """A batch without ids takes the place of one with them; a checkpoint has them, one of version 0.3 has none."""
    loss = CrossBatchMemory(UnifiedLoss(), embedding_size=5, memory_size=8)
    for step, first in enumerate((0, 4, None, 20)):
        ids = {} if first is None else {"ref_ids": torch.arange(4) + first}
        embeddings, _ = batch(step)
        loss(embeddings[:4], torch.arange(4), **ids)
        if first is None:
            assert loss.id_memory.tolist() == [-1, -1, -1, -1, 4, 5, 6, 7]
    assert loss.id_memory.tolist() == [-1, -1, -1, -1, 20, 21, 22, 23]
    state, restored = loss.state_dict(), CrossBatchMemory(UnifiedLoss(), embedding_size=5, memory_size=8)
    restored.load_state_dict(state)
    assert torch.equal(restored.id_memory, loss.id_memory)
    assert restored.has_ids
    del state["id_memory"]
    restored.load_state_dict(state)
    assert (restored.id_memory == -1).all()


def test_old_copies_of_an_embedding_are_no_negatives_of_it():
    """They have its id, though another label."""
    embeddings, labels = batch(0)
    calls = [CrossBatchMemory(make_loss("triplet_hn"), embedding_size=5, memory_size=8) for _ in range(2)]
    with_copies, alone = calls
    with_copies(embeddings, labels + 10, ref_ids=torch.arange(4))
    value = with_copies(embeddings, labels, ref_ids=torch.arange(4))
    assert value == alone(embeddings, labels) > 0


def test_wrong_input_of_a_memory_leaves_it_as_it_is():
    loss, (embeddings, labels) = memory_of(UnifiedLoss()), batch(1)
    with pytest.raises(ValueError, match="memory_size must be at least"):
        loss(torch.ones(12, 5), torch.ones(12))
    with pytest.raises(ValueError, match=r"enqueue_mask must be torch\.bool"):
        loss(embeddings, labels, enqueue_mask=torch.ones(4))
    assert loss.queue_idx == 0


@pytest.mark.parametrize("symmetric_loss", [True, False])
@pytest.mark.parametrize("name", ["unified", "goal"])
def test_self_supervised(name, symmetric_loss):
    images, texts = (embeddings_of(torch.arange(6), seed=seed) for seed in (0, 1))
    labels = torch.arange(6)
    # One set: each of both kinds is an anchor, and all others but its counterpart are its negatives.
    together = torch.cat([images, texts]).detach().requires_grad_()
    value, (gradient,) = expected(name, {"embeddings": together, "labels": torch.cat([labels, labels])})
    one_set = SelfSupervisedLoss(make_loss(name, symmetric=symmetric_loss), symmetric=True)
    check(one_set(images, texts), [images, texts], value, gradient.split(6))

    call = {"embeddings": images, "labels": labels, "ref_emb": texts, "ref_labels": labels}
    two_sets = SelfSupervisedLoss(make_loss(name, symmetric=symmetric_loss), symmetric=False)
    check(two_sets(images, texts), [images, texts], *expected(name, call, symmetric=symmetric_loss))
    for loss in (one_set, two_sets):
        with pytest.raises(ValueError, match="embeddings and ref_emb must have the same shape, got"):
            loss(images, texts[:5])


@pytest.mark.parametrize("name", ["unified", "triplet_hn", "triplet_sh"])
def test_two_batches_of_a_memory_before_their_gradients(name):
    """The second one changes the queue, to which the first one was compared."""
    together, apart = (CrossBatchMemory(make_loss(name), embedding_size=5, memory_size=8) for _ in range(2))
    batches = [(rows[:4].detach(), labels[:4]) for rows, labels in map(batch, range(2))]
    found, expected = [], []
    for rows, labels in batches:
        for leaves, memory in ((found, together), (expected, apart)):
            leaves.append(rows.clone().requires_grad_())
            value = memory(leaves[-1], labels)
            if memory is apart:
                value.backward()
            elif len(leaves) == 1:
                first = value
            else:
                (first + value).backward()
    for side, own in zip(found, expected, strict=True):
        torch.testing.assert_close(side.grad, own.grad)


def test_ids_of_anchors_that_are_not_queued():
    """A queued embedding with the id of an anchor is no negative of it, whatever its label."""
    anchors, queued = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)).double()
    call = torch.cat([anchors, queued]), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    is_queued, ids = torch.arange(8) >= 4, torch.tensor([50, 51, 52, 53, 51, 52, 53, 50])
    loss = make_loss("unified", symmetric=False)
    expected = loss(
        anchors, call[1][:4], ref_emb=queued, ref_labels=call[1][4:], ref_ids=ids[4:], matching_ids=ids[:4, None]
    )
    memory = CrossBatchMemory(loss, embedding_size=5, memory_size=8)
    torch.testing.assert_close(memory(*call, enqueue_mask=is_queued, ref_ids=ids), expected)
    assert memory(*call, enqueue_mask=is_queued) > expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"matching_ids": [[1]] * 4}, "matching_ids need ref_ids, the ids of the embeddings"),
        ({"negative_ids": [1]}, "CrossBatchMemory takes no negative_ids: the embeddings in its queue"),
        ({"margin": [0.1] * 4}, "CrossBatchMemory takes no margin: the embeddings in its queue"),
        ({"ref_emb": torch.ones(4, 5)}, "CrossBatchMemory takes no ref_emb: the embeddings in its queue"),
        ({"scale": -1.0}, "scale must be a finite number > 0"),
        ({"bias": 3.0}, "UnifiedLoss: unknown argument 'bias'"),
    ],
)
def test_a_wrong_call_leaves_a_memory_as_it_is(options, message):
    loss = CrossBatchMemory(UnifiedLoss(), embedding_size=5, memory_size=8)
    with pytest.raises(ValueError, match=message):
        loss(torch.ones(4, 5), torch.arange(4), **options)
    assert loss.queue_idx == 0
