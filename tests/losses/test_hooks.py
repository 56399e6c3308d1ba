"""What a call may know of its batch, in every way that a loss is computed: known positives, confidence, and more."""

import inspect
import itertools

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity

from tests.helpers.loops import OTHER_LABELS, REFERENCES, embeddings_of, make_loss
from tests.helpers.processes import in_processes
from tests.helpers.seeds import seeded
from tests.reference import losses as reference
from vl_plugins import create_loss, engine
from vl_plugins.distributed import Processes
from vl_plugins.errors import InputWarning
from vl_plugins.losses import GOALLoss, SigLIPLoss, TripletSHLoss, UnifiedLoss

LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
NAMES = ("unified", "triplet_hn", "triplet_sh", "siglip", "goal nca con", "unified RSP", "own SquaredHinge")
PARTS = ("known", "confidence", "negatives", "margin")


class PlainCosine(CosineSimilarity):
    """For which all similarities are computed."""


def cases():
    """Each loss with each part alone, and with all of them; with two or three as long forms."""
    for name in NAMES:
        parts = PARTS if name.startswith("unified") else PARTS[:3]
        for size in range(1, len(parts) + 1):
            for chosen in itertools.combinations(parts, size):
                marks = () if size in (1, len(parts)) else pytest.mark.slow
                yield pytest.param(name, chosen, id=f"{name}, {' and '.join(chosen)}", marks=marks)


def drawn(*shape, seed):
    return torch.rand(shape, dtype=torch.float64, generator=seeded(seed))


def make_call(parts, kind):
    """The arguments of a call; ids are few, so that many captions are known positives."""
    call = {"embeddings": embeddings_of(LABELS, seed=4)}
    if kind == "place":
        call["ref_emb"] = embeddings_of(LABELS.repeat_interleave(2), seed=5)
    else:
        call["labels"] = LABELS
    if kind == "labels":
        call |= {"ref_emb": embeddings_of(OTHER_LABELS, seed=5), "ref_labels": OTHER_LABELS}
    columns = len(call.get("ref_emb", LABELS))
    if "known" in parts:
        call["ref_ids"] = torch.randint(-1, 7, (columns,), generator=seeded(6))
        call["matching_ids"] = torch.randint(-1, 7, (len(LABELS), 2), generator=seeded(7))
    if "confidence" in parts:
        call["confidence"] = drawn(columns, seed=8)
    if "negatives" in parts:
        call["negatives"] = embeddings_of(torch.tensor([1, 7, 2]), seed=9)
    if "negatives" in parts and "known" in parts:
        call["negative_ids"] = torch.tensor([3, -1, 5])
    if "margin" in parts:
        call["margin"] = drawn(columns, seed=10).requires_grad_()
    return call


def leaves_of(call):
    return [call[name] for name in ("embeddings", "ref_emb", "negatives", "margin") if name in call]


def labels_of(call):
    """The labels of both sides, as lists; those of places are the numbers of the rows."""
    rows = len(call["embeddings"])
    if "ref_labels" in call:
        return call["labels"].tolist(), call["ref_labels"].tolist()
    if "labels" in call:
        return call["labels"].tolist(), call["labels"].tolist()
    columns = len(call["ref_emb"])
    return list(range(rows)), [column // (columns // rows) for column in range(columns)]


def pairs_of(call):
    """The sets of positive pairs, of negative ones, and of those of further negatives, which follow the columns."""
    labels, ref_labels = labels_of(call)
    positives, negatives = reference.pairs_of_labels(labels, ref_labels if "ref_emb" in call else None)
    further = range(len(ref_labels), len(ref_labels) + len(call.get("negatives", ())))
    more = set(itertools.product(range(len(labels)), further))
    if "ref_ids" not in call:
        return positives, negatives, more
    ids = call["ref_ids"].tolist() + call.get("negative_ids", torch.full((len(further),), -1)).tolist()
    for row in range(len(labels)):
        own = {ids[column] for r, column in positives if r == row} | set(call["matching_ids"][row].tolist())
        if "ref_emb" not in call:
            own.add(ids[row])
        known = {(row, column) for column, id_ in enumerate(ids) if id_ >= 0 and id_ in own}
        negatives, more = negatives - known, more - known
    return positives, negatives, more


def expected(name, call):
    """The value by loops, whose graph goes to the embeddings and margins of the call."""
    formula, options = REFERENCES[name].pair, dict(REFERENCES[name].options)
    x, y = call["embeddings"], call.get("ref_emb", call["embeddings"])
    x, y, more = (side / side.norm(dim=1, keepdim=True) for side in (x, y, call.get("negatives", y[:0])))
    similarities = x @ torch.cat([y, more]).T
    positives, negatives, further = pairs_of(call)
    turned = [{(column, row) for row, column in pairs} for pairs in (positives, negatives)]
    if "batch_positives" in inspect.signature(formula).parameters:
        options["batch_positives"] = [similarities[pair].item() for pair in sorted(positives)]
    values, candidates = [], negatives | further
    share = reference.share_of_unpaired(formula, similarities, positives, candidates, options)
    if "ref_emb" in call:
        share = share + reference.share_of_unpaired(formula, similarities.T, *turned, options)
    for row, column in sorted(positives):
        own = options | ({"margin": call["margin"][column]} if "margin" in call else {})
        value = reference.value_of_pair(formula, similarities, positives, candidates, row, column, own)
        if "ref_emb" in call:
            value = value + reference.value_of_pair(formula, similarities.T, *turned, column, row, own)
        values.append(value * call["confidence"][column] if "confidence" in call else value)
    return torch.stack(values).mean() + share


@pytest.mark.parametrize("kind", ["labels", "place", "one set"])
@pytest.mark.parametrize(("name", "parts"), list(cases()))
def test_value_and_gradients_are_those_of_the_loops(name, parts, kind, monkeypatch):
    """In all ways that the loss is computed."""
    monkeypatch.setattr(engine, "block_rows", lambda *_: 2)
    call = make_call(parts, kind)
    leaves, value = leaves_of(call), expected(name, call)
    gradients = torch.autograd.grad(value, leaves)
    assert value > 1e-3
    ways = {"chosen": {}, "tiled": {"tiled": True}, "matrix": {"distance": PlainCosine()}}
    for few in (2**16, 0):
        monkeypatch.setattr(engine, "FEW", few)
        for way, options in ways.items():
            actual = make_loss(name, **options)(**call)
            close = {"rtol": 1e-9, "atol": 1e-9, "msg": lambda text, way=way, few=few: f"{way}, {few}: {text}"}
            torch.testing.assert_close(actual, value.detach(), **close)
            torch.testing.assert_close(torch.autograd.grad(actual, leaves), gradients, **close)


@pytest.mark.parametrize("name", ["triplet_sh", "siglip"])
def test_ids_of_further_negatives_in_one_tile(name):
    """Further negatives are no anchors, so their known positives are not those of a row."""
    call = make_call(("known", "negatives"), "place")
    options = {"symmetric": True}
    actual = make_loss(name, tiled=True, **options)(**call)
    torch.testing.assert_close(actual, make_loss(name, tiled=False, **options)(**call))


def test_known_positives_can_be_switched_off():
    call = make_call(("known",), "labels")
    without = {name: value for name, value in call.items() if not name.endswith("_ids")}
    assert make_loss("unified", known_positives=False)(**call) == make_loss("unified")(**without)
    assert make_loss("unified")(**call) != make_loss("unified")(**without)


# Several processes

PROCESSES = 3
ROWS = [(0, 3), (3, 4), (4, 6)]  # of each process


def part_of(call, rank, kind):
    """The rows of one process, with the columns of these rows."""
    first, last = ROWS[rank]
    rows = slice(first, last)
    captions = len(call.get("ref_emb", LABELS)) // len(LABELS)
    columns = rows if kind == "one set" else slice(first * captions, last * captions)
    if kind == "labels":
        columns = slice(*[(0, 4), (4, 4), (4, 9)][rank])
    further = slice(rank, rank + 1)
    slices = {"embeddings": rows, "labels": rows, "matching_ids": rows, "negatives": further, "negative_ids": further}
    part = {name: value[slices.get(name, columns)] for name, value in call.items()}
    return {name: value.detach().requires_grad_(value.requires_grad) for name, value in part.items()}


def compute_part(rank, names, kinds):
    found = {}
    for name, kind in itertools.product(names, kinds):
        parts = PARTS if name.startswith("unified") else PARTS[:3]
        call = part_of(make_call(parts, kind), rank, kind)
        if rank == 1:  # more columns of matching ids than the others
            call["matching_ids"] = torch.nn.functional.pad(call["matching_ids"], (0, 2), value=-1)
        loss = make_loss(name)
        loss.processes = Processes(True)
        value = loss(**call)
        found[name, kind] = value.item(), torch.autograd.grad(value, leaves_of(call))
    return found


KINDS = ("labels", "place", "one set")
IN_PROCESSES = ("unified", "triplet_hn", "siglip", "goal nca con", "triplet_sh")


@pytest.fixture(scope="module")
def parts_of_processes():
    return in_processes(compute_part, PROCESSES, IN_PROCESSES, KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_three_processes_together_are_the_loops(parts_of_processes, name, kind):
    """With unequal rows, none of some sides in one of them, and all that a call may know."""
    parts = PARTS if name.startswith("unified") else PARTS[:3]
    call = make_call(parts, kind)
    value = expected(name, call)
    gradients = torch.autograd.grad(value, leaves_of(call))
    found = [part[name, kind] for part in parts_of_processes]
    close = {"rtol": 1e-9, "atol": 1e-9}
    mean = torch.tensor([value for value, _ in found], dtype=torch.float64).mean()
    torch.testing.assert_close(mean, value.detach(), **close)
    for side, gradient in enumerate(gradients):
        joined = torch.cat([gradients_of[side] for _, gradients_of in found]) / PROCESSES
        torch.testing.assert_close(joined, gradient, **close)


@pytest.mark.parametrize("base", [UnifiedLoss, GOALLoss, SigLIPLoss, TripletSHLoss])
def test_a_subclass_with_a_matrix_loss_of_its_own(base):
    """It is called, and on the whole matrix, whatever the class above it needs."""

    class Own(base):
        counts_unpaired_rows = False

        def matrix_losses(self, similarities, positive_mask, negative_mask, **numbers):
            assert similarities.shape == (4, 4)
            return similarities[positive_mask] * 0 + 7

    loss = Own()
    assert not loss.by_row
    value = loss(torch.eye(4), ref_emb=torch.eye(4), symmetric=False)
    assert value == 7


@pytest.mark.parametrize("name", ["goal", "triplet_hn"])
def test_triplets_of_known_positives_only(name):
    options = {"pair_weight": "sig_ms", "tau": 1} if name == "goal" else {}
    x, y = torch.eye(3, requires_grad=True), torch.eye(3)
    triplet = torch.tensor([0]), torch.tensor([0]), torch.tensor([1])
    value = create_loss(name, **options)(x, None, triplet, y, ref_ids=[5, 5, 6])
    assert value == 0
    assert not torch.autograd.grad(value, x)[0].any()


@pytest.mark.parametrize("name", ["margin", "confidence"])
def test_numbers_of_captions_have_gradients_without_pairs(name):
    """DistributedDataParallel waits for those of all parameters."""
    numbers = torch.ones(3, requires_grad=True)
    call = {"ref_emb": torch.eye(3), "ref_labels": [4, 5, 6], name: numbers}
    with pytest.warns(InputWarning, match="no pair"):
        create_loss("unified")(torch.eye(3), [0, 1, 2], **call).backward()
    assert (numbers.grad == 0).all()
