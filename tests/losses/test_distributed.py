"""Two processes: losses of the joined batch, whose value and gradients are those of one process with all rows."""

import copy
import pickle

import pytest
import torch
from pytorch_metric_learning import losses as host
from pytorch_metric_learning.miners import MultiSimilarityMiner
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.loops import embeddings_of, make_loss
from tests.helpers.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.distributed import DistributedLoss, all_gather_rows, gathering, gathers, stop_processes
from vl_plugins.losses import CrossBatchMemory, CrossModalLoss, SelfSupervisedLoss, SmoothChamferLoss, Warmup
from vl_plugins.miners import HardestNegativeMiner

WORLD_SIZE = 2
# Images and texts of each process: unequal numbers, and labels that both have.
LABELS = [torch.tensor([10, 11, 12, 10]), torch.tensor([11, 20, 10])]
REF_LABELS = [torch.tensor([10, 11, 12, 13, 11]), torch.tensor([20, 10, 11])]
OURS = ("unified", "vlc", "triplet_hn", "triplet_sh", "goal", "goal nca con", "triplet_hn warm")
LOSSES = {name: lambda name=name: make_loss(name) for name in (*OURS, "siglip", "own SquaredHinge")}
LOSSES |= {
    "average of those above 0": lambda: create_loss("triplet_hn", reducer="AvgNonZeroReducer"),
    "NTXent": host.NTXentLoss,
    "Contrastive": host.ContrastiveLoss,
}
MINED = ("unified", "NTXent")
# The losses of this package, in which the process group is the loss's.
GATHERING = (*OURS, "siglip", "own SquaredHinge", "average of those above 0")
CASES = [f"{name}, {sets} set(s)" for name in LOSSES for sets in (1, 2)]
CASES += [f"{name}, {sets} set(s), mined" for name in MINED for sets in (1, 2)]
CASES += [f"{name}, {sets} set(s), gathered" for name in GATHERING for sets in (1, 2)]
CASES += ["smooth_chamfer", "captions", "captions, gathered", "1 or 2 captions", "scale", "memory"]
CASES += ["one set by both names", "negatives in one process", "two views of the wrapper"]
WRAPPERS = {
    "DistributedLoss of a loss that gathers": lambda: DistributedLoss(
        create_loss("unified", gather_across_devices=True)
    ),
    "sets of a base that gathers": lambda: SmoothChamferLoss(create_loss("unified", gather_across_devices=True)),
    "both ways of a loss that gathers": lambda: CrossModalLoss(create_loss("unified", gather_across_devices=True)),
    "a miner and a loss that gathers": lambda: CrossModalLoss(
        create_loss("triplet_hn", gather_across_devices=True), HardestNegativeMiner()
    ),
    "both ways that gather": lambda: gathering(CrossModalLoss(host.NTXentLoss())),
    "a miner and a base that gathers": lambda: CrossModalLoss(
        create_loss("smooth_chamfer", gather_across_devices=True), HardestNegativeMiner()
    ),
}
CASES += [*WRAPPERS, "smooth_chamfer, gathered", "host, then ours", "two views", "two views as one set"]


def rows(ranks, labels, seed):
    """Embeddings of the rows of some processes, and their labels."""
    sides = [embeddings_of(labels[rank], seed=seed + rank) for rank in ranks]
    return torch.cat(sides).detach(), torch.cat([labels[rank] for rank in ranks])


def compute(*ranks):
    """Value and gradients of each case, of the rows of one of the processes, or of all."""
    (x, labels), (y, ref_labels) = rows(ranks, LABELS, 0), rows(ranks, REF_LABELS, 10)
    texts, _ = rows(ranks, [side.repeat_interleave(2) for side in LABELS], 20)
    found = {}

    def add(case, loss, *sides, gathers=False, **options):
        leaves = [
            side.clone().requires_grad_() if side is not None and side.is_floating_point() else side for side in sides
        ]
        x, labels, *refs = leaves
        wrap = {True: gathering, False: DistributedLoss, None: lambda loss: loss}[gathers]
        value = wrap(loss)(x, labels, None, *refs, **options)
        inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found[case] = value.detach(), torch.autograd.grad(value, inputs)

    for name, make in LOSSES.items():
        add(f"{name}, 1 set(s)", make(), x, labels)
        add(f"{name}, 2 set(s)", make(), x, labels, y, ref_labels)
    for name in GATHERING:
        add(f"{name}, 1 set(s), gathered", LOSSES[name](), x, labels, gathers=True)
        add(f"{name}, 2 set(s), gathered", LOSSES[name](), x, labels, y, ref_labels, gathers=True)
    for name in MINED:
        miner = MultiSimilarityMiner(epsilon=0.5)
        add(f"{name}, 1 set(s), mined", LOSSES[name](), x, labels, miner=miner)
        add(f"{name}, 2 set(s), mined", LOSSES[name](), x, labels, y, ref_labels, miner=miner)
    add("smooth_chamfer", create_loss("smooth_chamfer", mmd_weight=0.1), x, labels, y, ref_labels)
    sets = create_loss("smooth_chamfer", base="unified", mmd_weight=0.1)
    add("smooth_chamfer, gathered", sets, x, labels, y, ref_labels, gathers=True)
    add("host, then ours", Warmup(host.ContrastiveLoss(), make_loss("goal"), 3), x, labels, gathers=True)
    # Without labels: row i of the images belongs to rows 2 i and 2 i + 1 of the texts.
    add("captions", create_loss("unified"), x, None, texts)
    add("captions, gathered", create_loss("unified"), x, None, texts, gathers=True)
    # One caption of each image in the first process, two in the second, some of them equal.
    captions = [side.repeat_interleave(rank + 1) for rank, side in enumerate(LABELS)]
    y, _ = rows(ranks, captions, 30)
    ref_ids = torch.cat([torch.arange(len(captions[rank])) % 3 for rank in ranks])
    images = ref_images = None
    if len(ranks) > 1:
        images = torch.arange(len(x))
        ref_images = images.repeat_interleave(torch.cat([torch.full((len(LABELS[rank]),), rank + 1) for rank in ranks]))
    add("1 or 2 captions", create_loss("unified"), x, images, y, ref_images, gathers=True, ref_ids=ref_ids)
    y, _ = rows(ranks, REF_LABELS, 10)
    add("scale", create_loss("vlc"), x, labels, y, ref_labels, scale=torch.tensor(7.0).double())
    for name, symmetric in (("two views", False), ("two views as one set", True)):
        loss = create_loss("unified", gather_across_devices=len(ranks) == 1)
        leaves = [side.clone().requires_grad_() for side in (x, x.roll(1, dims=1))]
        value = SelfSupervisedLoss(loss, symmetric=symmetric)(*leaves)
        found[name] = value.detach(), torch.autograd.grad(value, leaves)
    loss = create_loss("SelfSupervisedLoss", loss="unified", gather_across_devices=len(ranks) == 1)
    leaves = [side.clone().requires_grad_() for side in (x, x.roll(1, dims=1))]
    value = loss(*leaves)
    found["two views of the wrapper"] = value.detach(), torch.autograd.grad(value, leaves)
    leaf = x.clone().requires_grad_()
    value = DistributedLoss(create_loss("unified"))(leaf, labels, ref_emb=leaf, ref_labels=labels)
    found["one set by both names"] = value.detach(), torch.autograd.grad(value, [leaf])
    negatives = torch.cat([embeddings_of(torch.arange(3 * rank), seed=40).detach() for rank in ranks])
    add("negatives in one process", create_loss("unified"), x, labels, y, ref_labels, gathers=True, negatives=negatives)
    # The outermost loss gathers, and what it calls does not.
    for case, wrap in WRAPPERS.items():
        add(case, wrap(), x, labels, y, ref_labels, gathers=None)
    add("memory", CrossBatchMemory(create_loss("goal"), embedding_size=5, memory_size=20), x, labels)
    return found


def in_one_process(rank):
    found, (x, _) = compute(rank), rows([rank], LABELS, 0)
    found["errors"], loss = [], create_loss("unified", gather_across_devices=True)
    for ids in (torch.arange(len(x)), torch.arange(len(x)) + 3 * rank):
        try:
            loss(x, ids, ref_emb=x + 1, ref_labels=ids)
        except ValueError as error:
            found["errors"].append(str(error))
    # What one process has and the other has not: an argument of ours, and one of a wrapped loss.
    confidence = {} if rank == 0 else {"confidence": torch.ones(len(x))}
    for compare in (create_loss("unified", gather_across_devices=True), DistributedLoss(create_loss("unified"))):
        try:
            compare(x, ref_emb=x + 1, **confidence)
        except ValueError as error:
            found["errors"].append(str(error))
    # What would end in one process and wait in the other.
    pairs = (torch.tensor([0]), torch.tensor([0]), torch.tensor([0]), torch.tensor([1]))
    labels = torch.arange(len(x)) + 5 * rank
    types = torch.int64 if rank == 0 else torch.float64
    for options in ({"indices_tuple": pairs}, {"symmetric": False}, {"labels": labels.to(types)}):
        if rank == 0 or "labels" in options:
            call = {"labels": labels, "ref_emb": x + 1} | options
        else:
            call = {"labels": labels, "ref_emb": x + 1}
        try:
            create_loss("unified", gather_across_devices=True)(x, **call)
        except ValueError as error:
            found["errors"].append(str(error))
    learned = {"learn_scale": True, "scale": 20.0 + rank}
    sets = create_loss("smooth_chamfer", base="unified", gather_across_devices=True)
    indices = tuple(torch.tensor([place]) for place in (0, 0, 1))
    step_differs = [create_loss("triplet_hn", warmup_steps=5), create_loss("smooth_chamfer", warmup_steps=5)]
    step_differs[0].step = step_differs[1].base.step = 10 * rank
    gathering(step_differs[1])
    for compare, options in (
        (DistributedLoss(step_differs[0]), {}),
        (step_differs[1], {}),
        (DistributedLoss(create_loss("unified")), {"symmetric": rank == 0}),
        (DistributedLoss(create_loss("unified", **learned)), {}),
        (create_loss("smooth_chamfer", base="unified", gather_across_devices=True, **learned), {}),
        (Warmup(create_loss("vlc"), create_loss("unified"), steps=rank), {"gathers": True}),
        (sets, {"indices_tuple": indices}),
        (sets, {"copies": labels}),
        (DistributedLoss(create_loss("unified")), {"copies": labels}),
        (create_loss("unified", gather_across_devices=True), {"copies": labels}),
    ):
        if options.pop("gathers", False):
            compare.gather_across_devices = True
        try:
            compare(x, labels, ref_emb=x + 1, ref_labels=labels, **options)
        except ValueError as error:
            found["errors"].append(str(error))
    # Of one class, which is no number of a row.
    found["one class"] = create_loss("unified", gather_across_devices=True)(x, [0] * len(x))
    found["backward without rows"] = run_backward_without_rows(rank)
    found["gradient of the scale"] = train_warm_up(rank)
    found["nan"] = find_nan(rank)
    found["one row"] = create_loss("unified", gather_across_devices=True)(x[:1], [0], ref_emb=x[1:2], ref_labels=[0])
    found["ids"] = ids_of_each_kind(rank, x, labels)
    found["empty"] = create_loss("unified", gather_across_devices=True)(x[:rank], list(range(rank)), ref_emb=x[:rank])
    found["no lists"] = create_loss("unified", gather_across_devices=True)(
        x[:rank], ref_emb=x[:rank], ref_ids=[1, 2][:rank], matching_ids=[[1], [2]][:rank]
    )
    found["gathered"] = all_gather_rows(x, None, torch.arange(rank + 1))[1:]
    # More than the processes say of them in one message.
    found["many tensors"] = [
        [tensor.tolist() for tensor in all_gather_rows(*[torch.full((rank + 1,), number) for number in range(size)])]
        for size in (60, 300)
    ]
    found["labels by class"] = labels_by_class(rank)
    found["queue"] = queue_in_data_parallel(rank)
    found["without pairs"] = rows_without_pairs(rank)
    found["half precision"] = rows_of_one_process_in_half_precision(rank)
    found["nothing in common"] = nothing_in_common(rank)
    return found


def labels_by_class(rank):
    """Errors for labels of three rows, in the first call and in that of a copy."""
    loss, x = create_loss("unified", gather_across_devices=True), torch.eye(6)
    errors = []
    calls = [([0, 0, 1, 1, 2, 2], False), ([0, 1, 2, 0, 1, 2], False), (range(6), False), (range(6), True)]
    for labels, are_global in calls:
        for of_call in (loss, copy.deepcopy(loss)):
            of_call.global_labels = are_global
            try:
                of_call(x, list(labels), ref_emb=x.flip(0), ref_labels=list(labels))
                errors.append("")
            except ValueError as error:
                errors.append(str(error)[:33])
    wrapped = DistributedLoss(create_loss("unified"), global_labels=True)
    wrapped(x, list(range(6)), ref_emb=x, ref_labels=list(range(6)))
    return errors


def queue_in_data_parallel(rank):
    """The labels and embeddings in the queue of a process, after three steps under DistributedDataParallel."""
    torch.manual_seed(0)
    queue = CrossBatchMemory(create_loss("unified"), embedding_size=4, memory_size=20)
    model = DistributedDataParallel(TowerAndQueue(queue))
    for step in range(3):
        rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(2 * step + rank))
        model(rows, torch.arange(3) + 100 * rank + 10 * step).backward()
    return queue.label_memory[:9].tolist()


class TowerAndQueue(torch.nn.Module):
    def __init__(self, queue):
        super().__init__()
        self.tower, self.queue = torch.nn.Linear(5, 4), queue

    def forward(self, rows, labels):
        return self.queue(self.tower(rows), labels)


def rows_of_one_process_in_half_precision(rank):
    """The mean over the processes, of which one has rows, of each loss."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()[: 3 - 3 * rank].requires_grad_()
    values = []
    for name in ("siglip", "unified", "triplet_sh"):
        value = create_loss(name, gather_across_devices=True)(x, ref_emb=x.detach().flip(0))
        value.backward()
        total = value.detach().clone()
        distributed.all_reduce(total)
        values.append(total.item() / WORLD_SIZE)
    return values


def nothing_in_common(rank):
    """Losses by labels of which none occurs twice, in any process."""
    found = []
    for name in ("siglip", "unified"):
        loss, x = create_loss(name, gather_across_devices=True), torch.eye(3, requires_grad=True)
        labels = torch.arange(3) + 100 * rank + 1
        value = loss(x, labels, ref_emb=torch.eye(3), ref_labels=labels + 50)
        found.append((value.item(), torch.autograd.grad(value, x)[0].abs().sum().item()))
    return found


def rows_without_pairs(rank):
    """Value and gradient of SigLIP, where one process has rows and captions, but no pair."""
    labels = [[0, 1], [7, 8]][rank]
    x, y = (
        torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * rank + side))
        for side in (0, 1)
    )
    loss = create_loss("siglip", gather_across_devices=True)
    x.requires_grad_()
    value = loss(x, labels, ref_emb=y, ref_labels=[[0, 1], [5, 6]][rank])
    return value.detach(), torch.autograd.grad(value, x)[0], x.detach(), y


def find_nan(rank):
    """Return whether the losses of one direction are NaN, although the other process has what is NaN."""
    x = torch.eye(3)
    if rank == 1:
        x[0, 0] = torch.nan
    losses = [
        create_loss(name, symmetric=False, gather_across_devices=True) for name in ("siglip", "vlc", "triplet_hn")
    ]
    return [loss(x, ref_emb=torch.eye(3)).isnan().item() for loss in losses]


def ids_of_each_kind(rank, x, labels):
    """Return for three losses the mean over the processes with ids of each kind, whose lists are of unequal lengths."""
    lists = [[0, 1], [], [2], [5]][: len(x)] if rank == 0 else [[3]] * len(x)
    padded = torch.tensor([(*row, *[-1] * (2 - len(row))) for row in lists])
    found = []
    for loss in (
        create_loss("unified", gather_across_devices=True),
        DistributedLoss(create_loss("unified")),
        DistributedLoss(CrossModalLoss(create_loss("unified"))),
    ):
        for kind in (list, tuple, torch.tensor):
            for matching_ids in (lists, padded, [torch.tensor(row) for row in lists]):
                ids = {"ref_ids": kind(labels.tolist()), "matching_ids": matching_ids}
                value = loss(x, labels, ref_emb=x + 1, ref_labels=labels.clone(), **ids)
                distributed.all_reduce(value)
                found.append(value.item() / WORLD_SIZE)
    return found


def run_backward_without_rows(rank):
    """Run the backward pass with rows in the first process only, whose gradients both have to gather."""
    x = torch.eye(3).requires_grad_() if rank == 0 else torch.zeros(0, 3)
    loss = create_loss("unified", gather_across_devices=True)(x, ref_emb=x.roll(1, dims=0))
    loss.backward()
    return loss.requires_grad


def train_warm_up(rank):
    """Train for three steps, of which the last one alone learns a scale; return its gradients."""
    torch.manual_seed(0)
    warm = Warmup(create_loss("triplet_sh"), create_loss("unified", learn_scale=True), steps=2)
    warm.gather_across_devices = True
    model, gradients = DistributedDataParallel(TowerAndLoss(warm)), []
    for step in range(3):
        images, texts = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(2 * step + rank))
        model.zero_grad()
        model(images, texts).backward()
        gradients.append(warm.then.log_scale.grad.item())
    return gradients


class TowerAndLoss(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.tower, self.loss = torch.nn.Linear(5, 4), loss

    def forward(self, images, texts):
        return self.loss(self.tower(images), ref_emb=self.tower(texts))


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


@pytest.fixture(scope="module")
def expected():
    return compute(*range(WORLD_SIZE))


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process_with_all_rows(results, expected, case):
    """DistributedDataParallel averages the gradients, which the processes therefore have twice."""
    value, gradients = expected[case]
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(sum(result[case][0] for result in results) / WORLD_SIZE, value, **close)
    for side, gradient in enumerate(gradients):
        both = torch.cat([result[case][1][side] for result in results]) / WORLD_SIZE
        torch.testing.assert_close(both, gradient, **close)
        assert gradient.abs().max() > 1e-4


def test_labels_that_would_join_strangers_unequal_arguments_and_unequal_rows(results):
    for found in results:
        labels, ours, wrapped, mined, symmetric, types, *others = found["errors"]
        assert labels.startswith("labels are 0 to B - 1 in every process, so images of different processes would be")
        *scales, warm, indices, sets, any_loss, own = others[3:]
        for error in (ours, wrapped, mined, symmetric, types, *others[:3], warm):
            assert error.startswith(
                "the processes give different arguments; this one gives embeddings torch.float64 5, "
            )
        assert found["empty"] == 0
        assert [error.split(" in each process, [2.99")[0] for error in scales] == [
            "log_scale has another value",
            "base.log_scale has another value",
        ]
        assert indices.startswith("indices_tuple would be of this process only: create the loss without gather")
        for error in (sets, any_loss, own):
            assert error == "copies are places of one process: create the loss without gather_across_devices"
        assert found["one class"] == 0
        assert found["nan"] == [True] * 3
        assert found["one row"] == 0
        assert found["ids"] == pytest.approx([found["ids"][0]] * 27)
        assert found["no lists"] == 0
        assert found["backward without rows"]
        *warming_up, after = found["gradient of the scale"]
        assert warming_up == [0, 0]
        assert after != 0
        nothing, counts = found["gathered"]
        assert nothing is None
        assert counts.tolist() == [0, 0, 1]


def test_many_tensors(results):
    for found in results:
        assert found["many tensors"] == [[[number] * 3 for number in range(size)] for size in (60, 300)]


def test_what_the_caller_says_of_labels_decides(results):
    """Only 0 to B - 1 in every process is an error, unless the caller says that labels are global."""
    places = ["labels are 0 to B - 1 in every pro"[:33]] * 2
    for found in results:
        assert found["labels by class"] == [*[""] * 4, *places, "", ""]


def test_each_process_has_its_own_queue(results):
    """DistributedDataParallel copies buffers of the first process to the others."""
    for rank, found in enumerate(results):
        assert found["queue"] == [100 * rank + 10 * step + row for step in range(3) for row in range(3)]


def test_rows_of_a_process_without_pairs_count(results):
    values, gradients, images, texts = zip(*[found["without pairs"] for found in results], strict=True)
    x = torch.cat(images).requires_grad_()
    loss = create_loss("siglip")
    expected = loss(x, [0, 1, 7, 8], ref_emb=torch.cat(texts), ref_labels=[0, 1, 5, 6])
    torch.testing.assert_close(sum(values) / WORLD_SIZE, expected.detach())
    torch.testing.assert_close(torch.cat(gradients) / WORLD_SIZE, torch.autograd.grad(expected, x)[0])


def test_a_process_without_rows_in_half_precision(results):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = [create_loss(name)(x, ref_emb=x.flip(0)).item() for name in ("siglip", "unified", "triplet_sh")]
    for found in results:
        assert found["half precision"] == pytest.approx(expected, rel=1e-5)
    empty = torch.zeros(0, 4).bfloat16()
    assert create_loss("siglip")(empty, ref_emb=empty.clone()) == 0


@pytest.mark.filterwarnings("ignore:no pair")
def test_nothing_in_common_is_zero(results):
    for found in results:
        assert found["nothing in common"] == [(0.0, 0.0)] * 2


def test_the_queue_of_one_process():
    loss = CrossBatchMemory(create_loss("unified"), 3)
    loss.loss.gather_across_devices = True
    with pytest.raises(ValueError, match="the queue is that of one process"):
        loss(torch.eye(3), torch.arange(3))


def test_a_loss_of_a_process_group_cannot_be_saved(tmp_path):
    stop_processes()
    distributed.init_process_group("gloo", init_method=f"{tmp_path.as_uri()}/store", rank=0, world_size=1)
    try:
        loss = create_loss("unified", gather_across_devices=distributed.new_group([0]))
        with pytest.raises(TypeError, match=r"save loss.state_dict\(\), or set loss.gather_across_devices to False"):
            pickle.dumps(loss)
        loss.gather_across_devices = True
        assert pickle.loads(pickle.dumps(loss)).gather_across_devices is True
    finally:
        stop_processes()


def test_a_loss_can_be_told_later_to_gather():
    losses = (
        create_loss("unified"),
        create_loss("smooth_chamfer"),
        create_loss("triplet_hn", warmup_steps=1),
        Warmup(host.NTXentLoss(), create_loss("vlc"), steps=1),
        SelfSupervisedLoss(create_loss("unified")),
        DistributedLoss(host.NTXentLoss()),
    )
    for loss in losses:
        for is_on in (True, False, True):
            loss.gather_across_devices = is_on
            assert gathers(loss) is loss.gather_across_devices is is_on
        with pytest.raises(ValueError, match="must be True, False or a ProcessGroup"):
            loss.gather_across_devices = "yes"


def test_processes_leave_at_once(tmp_path):
    assert in_processes(join_and_leave, WORLD_SIZE, tmp_path) == [0, 1]


def test_one_process_calls_the_loss(expected):
    stop_processes()
    loss, x, labels = create_loss("unified", gather_across_devices=True), torch.eye(3), torch.arange(3)
    for options in ({}, {"labels": labels}, {"labels": labels, "ref_labels": labels}):
        torch.testing.assert_close(loss(x, ref_emb=x.roll(1, dims=0), **options), torch.tensor(2.4))
    # pytorch-metric-learning takes one object with both names for one set, and leaves out the pairs (i, i).
    theirs = DistributedLoss(host.NTXentLoss())
    separate = host.NTXentLoss()(x, labels, ref_emb=x.roll(1, dims=0), ref_labels=labels.clone())
    assert theirs(x, labels, ref_emb=x.roll(1, dims=0), ref_labels=labels) == separate > 0

    (x, labels), (y, ref_labels) = rows([0, 1], LABELS, 0), rows([0, 1], REF_LABELS, 10)
    texts, ids = rows([0, 1], [side.repeat_interleave(2) for side in LABELS], 20)[0], torch.arange(len(x))
    mined = MultiSimilarityMiner(epsilon=0.5)(x, labels, y, ref_labels)
    for case, value in (
        ("one set by both names", create_loss("unified")(x, labels)),
        ("unified, 2 set(s), mined", make_loss("unified")(x, labels, mined, y, ref_labels)),
        ("captions", create_loss("unified")(x, ids, None, texts, ids.repeat_interleave(2))),
    ):
        assert torch.equal(expected[case][0], value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "labels must be given with one set"),
        ({"ref_emb": torch.ones(4, 2)}, "4 is not a multiple of 3"),
        ({"ref_emb": torch.ones(3, 2), "ref_labels": torch.arange(3)}, "labels must be given with ref_labels"),
        ({"labels": torch.arange(2)}, "labels must have the length 3, got 2"),
        ({"labels": torch.arange(3), "ref_emb": torch.ones(6, 2), "ref_labels": torch.arange(3)}, "length 6, got 3"),
    ],
)
def test_counts_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        create_loss("unified", gather_across_devices=True)(torch.ones(3, 2), **options)
