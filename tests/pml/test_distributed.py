"""Losses in the wrappers for several processes against the loops, with and without references, miner and memory."""

import pytest
import torch
from pytorch_metric_learning.utils import distributed

from tests.helpers.loops import embeddings_of, expected, make_loss
from tests.helpers.processes import in_processes
from vl_plugins.losses.wrappers import CrossBatchMemory, DistributedLossWrapper, DistributedMinerWrapper
from vl_plugins.miners import HardestNegativeMiner

WORLD_SIZE = 2
NAMES = pytest.mark.parametrize("name", ["unified", "goal"])
RANKS = pytest.mark.parametrize("rank", range(WORLD_SIZE))
# Row i of a process's embeddings has the label of its row i of references.
LABELS = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 1]])
REF_LABELS = torch.tensor([[0, 1, 2, 0, 1], [1, 2, 0, 1, 2]])
# Each image with its only caption, at the same place of the same process.
OWN_LABELS = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
# Sets, efficient, miner.
CASES = {
    "one set": (1, False, None),
    "two sets": (2, False, None),
    "two sets, miner": (2, False, HardestNegativeMiner(k=2)),
    "efficient, one set": (1, True, None),
    "efficient, two sets": (2, True, None),
    "efficient, two sets, miner": (2, True, HardestNegativeMiner(k=2)),
}


def share(rank, step=0, labels=LABELS, ref_labels=REF_LABELS):
    """Return embeddings, labels, references and their labels of one process."""
    embeddings, references = (
        embeddings_of(kind[rank], seed=10 * step + 2 * rank + number)
        for number, kind in enumerate((labels, ref_labels))
    )
    return embeddings, labels[rank], references, ref_labels[rank]


def value_and_gradients(name, rank, sets, efficient, miner, wrapper=DistributedLossWrapper):
    embeddings, labels, *references = share(rank)
    references = references if sets == 2 else [None, None]
    indices = DistributedMinerWrapper(miner, efficient)(embeddings, labels, *references) if miner else None
    value = wrapper(make_loss(name), efficient)(embeddings, labels, indices, *references)
    return value.detach(), torch.autograd.grad(value, [embeddings, *references[: sets - 1]])


def memory_steps(rank):
    loss = DistributedLossWrapper(CrossBatchMemory(make_loss("goal"), embedding_size=5, memory_size=18))
    results = []
    for step in range(4):
        embeddings, labels, *_ = share(rank, step)
        value = loss(embeddings, labels, enqueue_mask=torch.tensor([True, False, True, False]))
        results.append((value.detach(), torch.autograd.grad(value, [embeddings])))
    return results


def own_captions(rank):
    """Return what the wrappers of the host and ours mine of images with one caption each."""
    embeddings, labels, *references = share(rank, labels=OWN_LABELS, ref_labels=OWN_LABELS)
    wrappers = distributed.DistributedMinerWrapper, DistributedMinerWrapper
    return [wrapper(HardestNegativeMiner(), efficient=True)(embeddings, labels, *references) for wrapper in wrappers]


def steps(rank):
    results = {
        (name, case): value_and_gradients(name, rank, *CASES[case]) for name in ("unified", "goal") for case in CASES
    }
    host = value_and_gradients("unified", rank, 2, True, None, distributed.DistributedLossWrapper)
    return results | {"host": host, "memory": memory_steps(rank), "own captions": own_captions(rank)}


@pytest.fixture(scope="module")
def results():
    return in_processes(steps, WORLD_SIZE)


def gathered(rank, step=0, **labels):
    """Embeddings, labels, references and their labels of both processes, the process's own first."""
    both = [share(rank, step, **labels), share(1 - rank, step, **labels)]
    together = [torch.cat(parts) for parts in zip(*both, strict=True)]
    return [part.detach() if part.is_floating_point() else part for part in together]


def compare(actual, value, gradients):
    """The host multiplies by the number of processes, because their gradients are averaged."""
    assert value > 1e-3
    torch.testing.assert_close(actual[0].item(), WORLD_SIZE * value)
    for own, gradient in zip(actual[1], gradients, strict=True):
        torch.testing.assert_close(own, WORLD_SIZE * gradient[: len(own)])


@RANKS
@pytest.mark.parametrize("case", [case for case in CASES if "efficient" not in case])
@NAMES
def test_each_process_computes_the_whole_batch(results, name, case, rank):
    sets, _, miner = CASES[case]
    embeddings, labels, references, ref_labels = gathered(rank)
    call = {"embeddings": embeddings, "labels": labels}
    call |= {"ref_emb": references, "ref_labels": ref_labels} if sets == 2 else {}
    call |= {"indices_tuple": miner(**call)} if miner else {}
    compare(results[rank][name, case], *expected(name, call))


def own_anchors(rank, sets, miner=None, drop_equal_places=False):
    """The call of ``efficient=True``: own anchors, and pairs among those of all by hand."""
    embeddings, labels, *_ = share(rank)
    candidates, candidate_labels = gathered(rank)[2 * sets - 2 : 2 * sets]
    call = {"embeddings": embeddings.detach(), "labels": labels, "ref_emb": candidates, "ref_labels": candidate_labels}
    same = labels[:, None] == candidate_labels
    positives = same.clone()
    if sets == 1 or drop_equal_places:
        positives.fill_diagonal_(False)
    pairs = (*torch.where(positives), *torch.where(~same))
    return call | {"indices_tuple": miner(**call) if miner else pairs}


@RANKS
@pytest.mark.parametrize("case", [case for case in CASES if "efficient" in case])
@NAMES
def test_each_process_computes_its_own_anchors(results, name, case, rank):
    sets, _, miner = CASES[case]
    value, (anchors, candidates) = expected(name, own_anchors(rank, sets, miner))
    # Of one set, the own embeddings are among the candidates, with their gradient.
    gradients = [anchors, candidates] if sets == 2 else [anchors + candidates[: len(anchors)]]
    compare(results[rank][name, case], value, gradients)


@RANKS
def test_the_host_leaves_out_the_pairs_of_equal_index(results, rank):
    """Why there is a wrapper of ours: once the host keeps them, it can go."""
    compare(results[rank]["host"], *expected("unified", own_anchors(rank, 2, drop_equal_places=True)))


@RANKS
def test_the_miner_keeps_the_pairs_of_equal_index(results, rank):
    """Each image with its only caption: the host mines nothing, ours what one process mines in the joined batch."""
    host, ours = results[rank]["own captions"]
    assert [len(indices) for indices in host] == [0, 0, 0]
    images, labels, *captions = gathered(rank, labels=OWN_LABELS, ref_labels=OWN_LABELS)
    assert len(ours[0]) == 4
    for actual, indices in zip(ours, HardestNegativeMiner()(images, labels, *captions), strict=True):
        assert torch.equal(actual, indices[:4])


@RANKS
def test_memory_of_all_processes(results, rank):
    queue = []
    for step, actual in enumerate(results[rank]["memory"]):
        embeddings, labels, *_ = gathered(rank, step)
        queued = torch.tensor([True, False] * 4)
        queue.append((embeddings[queued], labels[queued]))
        memory, memory_labels = (torch.cat(parts) for parts in zip(*queue, strict=True))
        same = labels[~queued][:, None] == memory_labels
        call = {"embeddings": embeddings[~queued], "labels": labels[~queued], "ref_emb": memory}
        call |= {"ref_labels": memory_labels, "indices_tuple": (*torch.where(same), *torch.where(~same))}
        value, (anchors, _) = expected("goal", call)
        compare(actual, value, [torch.zeros_like(embeddings).index_put((~queued,), anchors)])
