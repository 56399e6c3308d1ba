"""What each of two processes does in :mod:`tests.pml.test_distributed`."""

import torch
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.utils import distributed

from tests.helpers.loops import embeddings_of, make_loss, own_losses
from vl_plugins.losses import UnifiedLoss
from vl_plugins.losses.wrappers import CrossBatchMemory, DistributedLossWrapper, DistributedMinerWrapper
from vl_plugins.miners import HardestNegativeMiner

WORLD_SIZE = 2
MEMORY = 18  # two batches of both processes and a bit
# Row i of a process's embeddings has the label of its row i of references.
LABELS = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 1]])
REF_LABELS = torch.tensor([[0, 1, 2, 0, 1], [1, 2, 0, 1, 2]])
# Each image with its only caption, at the same place of the same process.
OWN_LABELS = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])


def share(rank, step=0, labels=LABELS, ref_labels=REF_LABELS):
    """Return embeddings, labels, references and their labels of one process."""
    labels, ref_labels = labels[rank], ref_labels[rank]
    embeddings, references = (
        embeddings_of(of_labels, seed=10 * step + 2 * rank + kind)
        for kind, of_labels in enumerate((labels, ref_labels))
    )
    return embeddings, labels, references, ref_labels


def one_set(wrapper, efficient, miner=None):
    def step(name, rank):
        embeddings, labels, *_ = share(rank)
        indices = DistributedMinerWrapper(miner, efficient)(embeddings, labels) if miner else None
        value = wrapper(make_loss(name), efficient)(embeddings, labels, indices)
        return [(value.detach(), torch.autograd.grad(value, [embeddings]))]

    return step


def two_sets(wrapper, efficient, miner=None, miner_wrapper=DistributedMinerWrapper):
    def step(name, rank):
        embeddings, labels, *references = share(rank)
        indices = miner_wrapper(miner, efficient)(embeddings, labels, *references) if miner else None
        value = wrapper(make_loss(name), efficient)(embeddings, labels, indices, *references)
        leaves = [embeddings, references[0]]
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        return [
            (value.detach(), [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)])
        ]

    return step


def memory(masked):
    def step(name, rank):
        loss = DistributedLossWrapper(CrossBatchMemory(make_loss(name), embedding_size=5, memory_size=MEMORY))
        results = []
        for number in range(4):
            embeddings, labels, *_ = share(rank, number)
            mask = torch.tensor([True, False, True, False]) if masked else None
            value = loss(embeddings, labels, enqueue_mask=mask)
            results.append((value.detach(), torch.autograd.grad(value, [embeddings])))
        return results

    return step


CASES = {
    "one set": one_set(DistributedLossWrapper, False),
    "two sets": two_sets(DistributedLossWrapper, False),
    "one set, miner": one_set(DistributedLossWrapper, False, HardestNegativeMiner()),
    "two sets, miner": two_sets(DistributedLossWrapper, False, MultiSimilarityMiner(epsilon=0.5)),
    "efficient, one set": one_set(DistributedLossWrapper, True),
    "efficient, two sets": two_sets(DistributedLossWrapper, True),
    "efficient, one set, miner": one_set(DistributedLossWrapper, True, HardestNegativeMiner()),
    "efficient, two sets, miner": two_sets(DistributedLossWrapper, True, HardestNegativeMiner(k=2)),
    "host, one set": one_set(distributed.DistributedLossWrapper, False),
    "host, two sets": two_sets(distributed.DistributedLossWrapper, False),
    "host, efficient, one set": one_set(distributed.DistributedLossWrapper, True),
    "host, efficient, two sets": two_sets(distributed.DistributedLossWrapper, True),
    "host, efficient, two sets, miner": two_sets(
        DistributedLossWrapper, True, HardestNegativeMiner(k=2), distributed.DistributedMinerWrapper
    ),
    "memory": memory(masked=False),
    "memory, masked": memory(masked=True),
}


def steps(rank):
    return {(name, case): step(name, rank) for name in own_losses() for case, step in CASES.items()}


def mined(rank):
    """Return what each wrapper's ``HardestNegativeMiner(k=1)`` mines of images and their captions, and a loss of it."""
    embeddings, labels, *references = share(rank, labels=OWN_LABELS, ref_labels=OWN_LABELS)
    loss = DistributedLossWrapper(UnifiedLoss(), efficient=True)
    results = []
    for wrapper in (distributed.DistributedMinerWrapper, DistributedMinerWrapper):
        triplets = wrapper(HardestNegativeMiner(), efficient=True)(embeddings, labels, *references)
        results.append((triplets, loss(embeddings, labels, triplets, *references).item()))
    return results
