"""Every loss in the host's wrapper for several processes, with and without references, a miner and a memory."""

import pytest
import torch
from pytorch_metric_learning.miners import MultiSimilarityMiner

from tests.helpers.loops import LOSSES, expected, own_losses
from tests.pml.processes import CASES, LABELS, MEMORY, OWN_LABELS, REF_LABELS, WORLD_SIZE, mined, share, steps
from tests.processes import in_processes
from tests.reference.distances import cosine
from vl_plugins.miners import HardestNegativeMiner


@pytest.fixture(scope="module")
def results():
    """``results[rank][name, case]`` is a list of ``(value, gradients)``."""
    results = in_processes(steps, WORLD_SIZE)
    assert all(len(of_rank) == len(CASES) * len(own_losses()) for of_rank in results)
    return results


def gathered(rank, step=0):
    """Embeddings, labels, references and their labels of both processes, the process's own first."""
    both = [share(rank, step), share(1 - rank, step)]
    together = [torch.cat(of_both) for of_both in zip(*both, strict=True)]
    return [part.detach() if part.is_floating_point() else part for part in together]


def whole_batch(rank, sets, miner=None):
    embeddings, labels, references, ref_labels = gathered(rank)
    call = {"embeddings": embeddings, "labels": labels}
    if sets == 2:
        call |= {"ref_emb": references, "ref_labels": ref_labels}
    if miner is not None:
        call["indices_tuple"] = miner(**call)
    return call


def compare(name, actual, value, gradients, what):
    """The host multiplies by the number of processes, because their gradients are averaged."""
    actual_value, actual_gradients = actual
    torch.testing.assert_close(actual_value.item(), WORLD_SIZE * value, msg=lambda text: f"{what}: {text}")
    assert value > 1e-3, what
    for of_leaf, gradient in zip(actual_gradients, gradients, strict=True):
        assert gradient.abs().max() > 1e-5, what
        torch.testing.assert_close(of_leaf, WORLD_SIZE * gradient, msg=lambda text: f"{what}: {text}")


MINERS = {"one set, miner": HardestNegativeMiner(), "two sets, miner": MultiSimilarityMiner(epsilon=0.5)}


@LOSSES
def test_each_process_computes_the_whole_batch(results, name):
    for case in ("one set", "two sets", "one set, miner", "two sets, miner", "host, one set", "host, two sets"):
        sets = 2 if "two" in case else 1
        for rank in range(WORLD_SIZE):
            value, gradients = expected(name, whole_batch(rank, sets, MINERS.get(case)))
            own = [gradients[0][: LABELS.shape[1]]] + [gradient[: REF_LABELS.shape[1]] for gradient in gradients[1:]]
            (actual,) = results[rank][name, case]
            compare(name, actual, value, own, f"{case}, rank {rank}")


def own_anchors(rank, sets):
    """The call of ``efficient=True``: own anchors, and pairs among those of all by hand."""
    embeddings, labels, *_ = share(rank)
    all_embeddings, all_labels, references, ref_labels = gathered(rank)
    if sets == 2:
        all_embeddings, all_labels = references, ref_labels
    anchors, candidates = torch.meshgrid(torch.arange(len(labels)), torch.arange(len(all_labels)), indexing="ij")
    same = labels[:, None] == all_labels
    kept = same if sets == 2 else same & (anchors != candidates)
    indices = anchors[kept], candidates[kept], anchors[~same], candidates[~same]
    return {
        "embeddings": embeddings.detach(),
        "labels": labels,
        "indices_tuple": indices,
        "ref_emb": all_embeddings,
        "ref_labels": all_labels,
    }


@LOSSES
def test_each_process_computes_its_own_anchors(results, name):
    miners = {
        "efficient, one set, miner": HardestNegativeMiner(),
        "efficient, two sets, miner": HardestNegativeMiner(k=2),
    }
    for case in ("efficient, one set", "efficient, two sets", "host, efficient, one set", *miners):
        sets = 2 if "two" in case else 1
        for rank in range(WORLD_SIZE):
            call = own_anchors(rank, sets)
            if case in miners:
                a, p, n = miners[case](*(call[key] for key in ("embeddings", "labels", "ref_emb", "ref_labels")))
                # Of one set, the other process's copies of the embeddings are none of these; the own ones are left out.
                kept = a != p if sets == 1 else a >= 0
                call["indices_tuple"] = a[kept], p[kept], n[kept]
            value, (of_anchors, of_candidates) = expected(name, call)
            if sets == 1:  # the own embeddings are among the candidates, with their gradient
                gradients = [of_anchors + of_candidates[: LABELS.shape[1]]]
            else:
                gradients = [of_anchors, of_candidates[: REF_LABELS.shape[1]]]
            (actual,) = results[rank][name, case]
            compare(name, actual, value, gradients, f"{case}, rank {rank}")


@LOSSES
def test_the_host_leaves_out_the_pairs_of_equal_index(results, name):
    """Why there is a wrapper of ours: once the host keeps them, it can go."""
    for rank in range(WORLD_SIZE):
        call = own_anchors(rank, sets=2)
        anchors, positives, *negatives = call["indices_tuple"]
        others = anchors != positives
        assert (~others).sum() == LABELS.shape[1]
        value, gradients = expected(name, call | {"indices_tuple": (anchors[others], positives[others], *negatives)})
        (actual,) = results[rank][name, "host, efficient, two sets"]
        own = [gradients[0], gradients[1][: REF_LABELS.shape[1]]]
        compare(name, actual, value, own, f"rank {rank}")
        (ours,) = results[rank][name, "efficient, two sets"]
        assert not torch.allclose(actual[0], ours[0])


def hardest_triplets():
    """Return by loops the triplets of the joined batch: each image, its caption and the hardest other one."""
    shares = [share(rank, labels=OWN_LABELS, ref_labels=OWN_LABELS) for rank in range(WORLD_SIZE)]
    images, captions = (torch.cat([own[part] for own in shares]).detach() for part in (0, 2))
    triplets = []
    for a, image in enumerate(images):
        others = [c for c in range(len(captions)) if c != a]
        triplets.append((a, a, max(others, key=lambda c: cosine(image, captions[c]))))
    return triplets


def test_the_miner_keeps_the_pairs_of_equal_index():
    """Each image with its only caption: the host mines nothing, ours what one process mines in the joined batch."""
    rows = OWN_LABELS.shape[1]
    found, values = [], []
    for rank, ((of_host, host_value), (of_ours, value)) in enumerate(in_processes(mined, WORLD_SIZE)):
        assert [len(indices) for indices in of_host] == [0, 0, 0]
        assert host_value == 0
        # Own candidates come first: their places in the joined batch.
        places = [*range(rank * rows, (rank + 1) * rows), *range((1 - rank) * rows, (2 - rank) * rows)]
        found += [(places[a], places[p], places[n]) for a, p, n in zip(*map(torch.Tensor.tolist, of_ours), strict=True)]
        values.append(value)
    assert found == hardest_triplets()
    assert min(values) > 0.01


@pytest.mark.parametrize("case", ["memory", "memory, masked"])
@LOSSES
def test_memory_of_all_processes(results, name, case):
    for rank in range(WORLD_SIZE):
        queue = {}
        for step, actual in enumerate(results[rank][name, case]):
            embeddings, labels, *_ = gathered(rank, step)
            queued = torch.tensor([True, False, True, False] * 2) if "masked" in case else labels >= 0
            compared = ~queued if "masked" in case else queued
            first = sum(int(queued.sum()) for _ in range(step))
            places = [(first + number) % MEMORY for number in range(int(queued.sum()))]
            for place, embedding, label in zip(places, embeddings[queued], labels[queued], strict=True):
                queue[place] = embedding, label
            memory = torch.stack([queue[place][0] for place in sorted(queue)])
            memory_labels = torch.stack([queue[place][1] for place in sorted(queue)])
            anchor_labels = labels[compared]
            same = anchor_labels[:, None] == memory_labels
            itself = torch.zeros_like(same)
            if "masked" not in case:
                itself[torch.arange(len(places)), torch.tensor(places)] = True
            call = {
                "embeddings": embeddings[compared],
                "labels": anchor_labels,
                "indices_tuple": (*torch.where(same & ~itself), *torch.where(~same)),
                "ref_emb": memory,
                "ref_labels": memory_labels,
            }
            value, (of_anchors, _) = expected(name, call)
            gradient = torch.zeros_like(embeddings)
            gradient[compared] = of_anchors
            compare(name, actual, value, [gradient[: LABELS.shape[1]]], f"{case}, rank {rank}, step {step}")
        assert len(queue) == (16 if "masked" in case else MEMORY)
