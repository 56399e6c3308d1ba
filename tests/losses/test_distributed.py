"""Two processes: losses of the joined batch, whose value and gradients are those of one process with all rows."""

import pytest
import torch
from pytorch_metric_learning import losses as host
from pytorch_metric_learning.miners import MultiSimilarityMiner
from torch import distributed

from tests.helpers.loops import embeddings_of, make_loss
from tests.helpers.losses import own_losses
from tests.helpers.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.distributed import DistributedLoss, all_gather_rows, start_processes, stop_processes
from vl_plugins.losses import CrossBatchMemory

WORLD_SIZE = 2
# Images and texts of each process: unequal numbers, and labels that both have.
LABELS = [torch.tensor([10, 11, 12, 10]), torch.tensor([11, 20, 10])]
REF_LABELS = [torch.tensor([10, 11, 12, 13, 11]), torch.tensor([20, 10, 11])]
SETS = {"mmd_weight": 0.1}


def cases():
    """By name: a loss and whether a miner chooses; made anew in each process."""
    found = {name: (make_loss(name), False) for name in ("unified", "vlc", "triplet_hn", "triplet_sh", "goal")}
    found |= {f"own {name}": (make(), False) for name, make in own_losses().items()}
    found |= {
        "goal nca con": (create_loss("goal"), False),
        "triplet_hn warm": (create_loss("triplet_hn", warmup_steps=9), False),
        "smooth_chamfer": (create_loss("smooth_chamfer", **SETS), False),
        "average of those above 0": (create_loss("triplet_hn", reducer="AvgNonZeroReducer"), False),
        "miner": (create_loss("unified"), True),
        "NTXent": (host.NTXentLoss(), False),
        "NTXent, miner": (host.NTXentLoss(), True),
        "Contrastive": (host.ContrastiveLoss(), False),
    }
    return found


def share(rank, labels=LABELS, ref_labels=REF_LABELS):
    """Return embeddings, labels, references and their labels of one process."""
    return [
        part
        for number, side in enumerate((labels, ref_labels))
        for part in (embeddings_of(side[rank], seed=10 * number + rank), side[rank])
    ]


def value_and_gradients(loss, x, labels, y=None, ref_labels=None, **options):
    leaves = [side.detach().requires_grad_() for side in (x, y) if side is not None]
    value = loss(leaves[0], labels, *leaves[1:], *([] if y is None else [ref_labels]), **options)
    return value.detach(), torch.autograd.grad(value, leaves)


def in_one_process(rank):
    x, labels, y, ref_labels = share(rank)
    found = {}
    for name, (loss, has_miner) in cases().items():
        miner = MultiSimilarityMiner(epsilon=0.5) if has_miner else None
        found[name, 2] = value_and_gradients(DistributedLoss(loss), x, labels, y, ref_labels, miner=miner)
        if name != "smooth_chamfer":
            found[name, 1] = value_and_gradients(DistributedLoss(loss), x, labels, miner=miner)
    # Without labels: row i of the images belongs to rows 2 i and 2 i + 1 of the texts.
    texts = embeddings_of(torch.arange(2 * len(x)), seed=20 + rank)
    found["captions"] = value_and_gradients(create_loss("unified", gather_across_devices=True), x, None, texts)
    found["scale"] = value_and_gradients(
        create_loss("vlc", gather_across_devices=True), x, labels, y, ref_labels, scale=torch.tensor(7.0).double()
    )
    memory = CrossBatchMemory(create_loss("goal"), embedding_size=5, memory_size=20)
    found["memory"] = value_and_gradients(DistributedLoss(memory), x, labels)
    found["errors"], loss = [], create_loss("unified", gather_across_devices=True)
    for ids in (torch.arange(len(x)), torch.arange(len(x)) + 3 * rank):
        try:
            loss(x, ids, x.detach() + 1, ids)
        except ValueError as error:
            found["errors"].append(str(error))
    found["gathered"] = all_gather_rows(x.detach(), None, torch.arange(rank + 1))[1:]
    return found


def join_and_leave(rank, folder):
    """Leave just after something was sent, again and again: with torch 2.2 processes waited forever, now and then."""
    for number in range(10):
        stop_processes()
        store = f"{folder.as_uri()}/{number}"
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE)
        for _ in range(20):
            distributed.all_reduce(torch.ones(100))
    return rank


@pytest.fixture(scope="module")
def results():
    return in_processes(in_one_process, WORLD_SIZE)


def joined(parts):
    return [torch.cat(side).detach() for side in zip(*parts, strict=True)]


def check(results, key, value, gradients):
    """DistributedDataParallel averages the gradients, which the processes therefore have twice."""
    torch.testing.assert_close(sum(result[key][0] for result in results) / WORLD_SIZE, value, rtol=1e-10, atol=1e-10)
    for side, gradient in enumerate(gradients):
        both = torch.cat([result[key][1][side] for result in results]) / WORLD_SIZE
        torch.testing.assert_close(both, gradient, rtol=1e-10, atol=1e-10)
        assert gradient.abs().max() > 1e-4


@pytest.mark.parametrize("name", cases())
def test_gradients_are_those_of_one_process_with_all_rows(results, name):
    loss, has_miner = cases()[name]
    for sets in (2, 1) if name != "smooth_chamfer" else (2,):
        sides = joined([share(rank) for rank in range(WORLD_SIZE)])[: 2 * sets]
        indices = MultiSimilarityMiner(epsilon=0.5)(*sides) if has_miner else None

        def call(x, labels, *others, loss=loss, indices=indices):
            return loss(x, labels, indices, *others)

        check(results, (name, sets), *value_and_gradients(call, *sides))


def test_rows_without_labels_belong_together_by_their_order(results):
    images = torch.cat([share(rank)[0] for rank in range(WORLD_SIZE)])
    texts = torch.cat(
        [embeddings_of(torch.arange(2 * len(LABELS[rank])), seed=20 + rank) for rank in range(WORLD_SIZE)]
    )
    labels = torch.arange(len(images))

    def call(x, labels, y, ref_labels):
        return create_loss("unified")(x, labels, None, y, ref_labels)

    expected = value_and_gradients(call, images, labels, texts, labels.repeat_interleave(2))
    check(results, "captions", *expected)
    one = value_and_gradients(create_loss("unified", gather_across_devices=True), images, None, texts)
    torch.testing.assert_close(one, expected)


def test_options_of_a_call_and_a_memory(results):
    sides = joined([share(rank) for rank in range(WORLD_SIZE)])

    def call(x, labels, y, ref_labels):
        return create_loss("vlc", scale=7)(x, labels, None, y, ref_labels)

    check(results, "scale", *value_and_gradients(call, *sides))
    memory = CrossBatchMemory(create_loss("goal"), embedding_size=5, memory_size=20)
    check(results, "memory", *value_and_gradients(memory, *sides[:2]))


def test_labels_that_would_join_strangers_and_unequal_rows(results):
    for found in results:
        (error,) = found["errors"]
        assert error.startswith("labels are 0 to B - 1 in every process, so images of different processes would be")
        nothing, counts = found["gathered"]
        assert nothing is None
        assert counts.tolist() == [0, 0, 1]


def test_processes_leave_at_once(tmp_path):
    assert in_processes(join_and_leave, WORLD_SIZE, tmp_path) == [0, 1]


def test_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert start_processes() == (0, 1)
    stop_processes()
    loss, x = create_loss("unified", gather_across_devices=True), torch.eye(3)
    labels = torch.arange(3)
    for options in ({}, {"labels": labels}, {"labels": labels, "ref_labels": labels}):
        torch.testing.assert_close(loss(x, ref_emb=x.roll(1, dims=0), **options), torch.tensor(2.4))
    # pytorch-metric-learning takes one object with both names for one set, and leaves out the pairs (i, i).
    theirs = DistributedLoss(host.NTXentLoss())
    separate = host.NTXentLoss()(x, labels, ref_emb=x.roll(1, dims=0), ref_labels=labels.clone())
    assert theirs(x, labels, ref_emb=x.roll(1, dims=0), ref_labels=labels) == separate > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "labels must be given with one set"),
        ({"ref_emb": torch.ones(4, 2)}, "ref_emb must have k rows for each of the 3 embeddings, got 4"),
        ({"ref_emb": torch.ones(3, 2), "ref_labels": torch.arange(3)}, "labels must be given .* with ref_labels"),
        ({"labels": torch.arange(2)}, "labels must have the length 3, got 2"),
        ({"labels": torch.arange(3), "ref_emb": torch.ones(6, 2), "ref_labels": torch.arange(3)}, "length 6, got 3"),
    ],
)
def test_counts_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        create_loss("unified", gather_across_devices=True)(torch.ones(3, 2), **options)
