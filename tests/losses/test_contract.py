"""What every loss promises, however it is computed: a table of losses, a table of ways, one test a promise."""

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
from pytorch_metric_learning import distances, reducers, regularizers

from benchmarks.measurement import extra_bytes
from tests.helpers import components
from tests.helpers.loops import (
    LABELS,
    REFERENCES,
    call_with,
    calls,
    check_call,
    draw_calls,
    embeddings_of,
    expected,
    leaves_of,
    make_loss,
    moved,
    shows_something,
    values_of,
)
from tests.helpers.seeds import first_that, seed_torch
from tests.reference import distances as similarity
from vl_plugins import engine
from vl_plugins.losses import PairLoss, soft_maximum

NAMES = [name for name in REFERENCES if name not in ("goal", "smooth_chamfer")]
ONE_OF_EACH = ["unified", "vlc", "triplet_hn", "triplet_sh", "goal nca con", "goal cir sig_ms", "goal nca lin_ms"]
ONE_OF_EACH += ["own SquaredHinge"]
# Take real distances too.
DIFFERENCES = ("unified", "vlc", "triplet_hn", "triplet_sh", "goal con con", "goal nca con", "own SquaredHinge")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class PlainCosine(distances.CosineSimilarity):
    """For which all similarities are computed."""


def needs_matrix(name):
    return any(word in name for word in ("triplet_sh", "warm", "_ms", "siglip", "SSP", "RSP"))


def compares_pairs(name):
    """Whether the loss of a pair depends on other rows, so that the matrix cannot be cut into blocks."""
    return "_ms" in name or name in ("goal", "goal warm")  # whose pair weight is sig_ms


def each_way(names):
    """Each loss, and the options for each way to compute it."""
    ways = {"chosen": {}, "dense": {"tiled": False}, "tiled": {"tiled": True}, "matrix": {"distance": PlainCosine()}}
    pairs = [(name, way) for name in names for way in ways if way != "tiled" or not compares_pairs(name)]
    cases = [pytest.param(name, ways[way], id=f"{name}, {way}") for name, way in pairs]
    return pytest.mark.parametrize(("name", "options"), cases)


EACH = pytest.mark.parametrize("name", NAMES)
SOME, SOME_WAYS = pytest.mark.parametrize("name", ONE_OF_EACH), each_way(ONE_OF_EACH)
# One loss of each kind of `negatives`: the base class computes what is tested with these. The others are long forms.
ONE_OF_A_KIND = ("unified", "triplet_hn", "triplet_sh", "goal cir sig_ms")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ONE_OF_EACH if name not in ONE_OF_A_KIND]
EACH_KIND = pytest.mark.parametrize("name", [*ONE_OF_A_KIND, *SLOW])


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(engine, "block_rows", lambda *_: 2)


def masks_of(call):
    masks = call["labels"][:, None] == call["ref_labels"]
    return masks, ~masks


@DEVICES
@each_way(NAMES)
def test_value_and_gradient_are_those_of_the_loops(name, options, device):
    """Of labels, pairs and triplets; one set and two; both precisions."""
    loss = make_loss(name, **options).to(device)
    for dtype in (torch.float64, torch.float32):
        for what, call in calls(dtype):
            if not (options.get("tiled") and "indices_tuple" in call):
                check_call(name, call, loss=loss, device=device, what=f"{dtype}, {what}")


@EACH
def test_a_matrix_of_similarities(name):
    """Value and gradient, both directions and one; second derivatives, but for GOAL, whose weights are constants."""
    call = call_with(2)
    for symmetric in (True, False):
        value, gradients = expected(name, call, symmetric=symmetric)
        similarities = distances.CosineSimilarity()(*leaves_of(call))
        found = make_loss(name, symmetric=symmetric).from_similarities(similarities, *masks_of(call))
        torch.testing.assert_close(found.item(), value, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(torch.autograd.grad(found, leaves_of(call)), tuple(gradients))
    if "goal" not in name:
        leaf = similarities.detach().requires_grad_()
        loss, masks = make_loss(name), masks_of(call)
        assert torch.autograd.gradgradcheck(lambda s: loss.from_similarities(s, *masks), leaf, fast_mode=True)
        values = make_loss(name, reducer=reducers.DoNothingReducer()).from_similarities(leaf, *masks_of(call))
        by_hand = [value for _, value in values_of(name, leaf, call)]
        torch.testing.assert_close(values["loss"]["losses"], torch.stack(by_hand))


@SOME
def test_second_derivatives_of_embeddings(name):
    """Of what needs a matrix they are right; blocks raise an error."""
    call = call_with(2)
    leaves = leaves_of(call)
    if not needs_matrix(name):
        with pytest.raises(RuntimeError, match=r"no derivative .create_graph=True.*from_similarities"):
            torch.autograd.grad(make_loss(name)(**call), leaves, create_graph=True)
    loss = make_loss(name, distance=PlainCosine())

    def value(x, y):
        return loss(**(call | {"embeddings": x, "ref_emb": y}))

    assert "goal" in name or torch.autograd.gradgradcheck(value, leaves)


@SOME_WAYS
def test_one_direction_and_the_scale_of_a_call(name, options):
    call, loss, one_way = call_with(2), make_loss(name, **options), make_loss(name, symmetric=False, **options)
    check_call(name, call, loss=one_way, symmetric=False)
    check_call(name, call | {"symmetric": False}, loss=loss, symmetric=False)
    check_call(name, call | {"symmetric": True}, loss=one_way)
    pairs = tuple(index for mask in masks_of(call) for index in mask.nonzero().unbind(dim=1))
    if not options.get("tiled"):
        torch.testing.assert_close(loss(**call, indices_tuple=pairs, symmetric=True), loss(**call))
    if "scale" not in REFERENCES[name].options:
        with pytest.raises(ValueError, match="has no scale"):
            loss(**call, scale=5.0)
        return
    five = REFERENCES[name].options | {"scale": 5.0}
    learned = [torch.full(shape, 5.0, dtype=torch.float64, requires_grad=True) for shape in ((), (1,))]
    for scale in (5, *learned):
        check_call(name, call | {"scale": scale}, loss=loss, options=five)
    for scale in learned:  # a second backward pass computes the similarities again, in another order
        assert torch.autograd.gradcheck(lambda scale: loss(**call, scale=scale), scale, nondet_tol=1e-12)


EMPTY = {
    "no positives": (torch.arange(4), torch.arange(4) + 10),
    "no negatives": (torch.zeros(4, dtype=torch.long), torch.zeros(3, dtype=torch.long)),
    "no rows": (torch.arange(0), torch.arange(3)),
    "no columns": (torch.arange(3), torch.arange(0)),
}


@SOME_WAYS
def test_nothing_to_compare_is_zero_unless_something_is_not_finite(name, options):
    for case, (labels, ref_labels) in EMPTY.items():
        for reducer in (reducers.MeanReducer(), reducers.AvgNonZeroReducer()):
            sides = [embeddings_of(side, seed=seed) for seed, side in enumerate((labels, ref_labels))]
            call = {"embeddings": sides[0], "labels": labels, "ref_emb": sides[1], "ref_labels": ref_labels}
            loss = make_loss(name, reducer=reducer, **options)
            value = loss(**call)
            assert value == 0, case
            assert not any(gradient.any() for gradient in torch.autograd.grad(value, sides)), case
            for side in sides:
                if len(side):
                    side.data[0, 0] = torch.nan
                    assert loss(**call).isnan(), case
                    side.data[0, 0] = 0


@SOME_WAYS
def test_what_is_not_finite_is_never_hidden(name, options):
    """Also in an anchor without positives, by pairs of a miner, or where a reducer drops it."""
    pairs = (torch.arange(3), torch.arange(3), torch.arange(3), torch.arange(3) + 1)
    for reducer in (reducers.MeanReducer(), reducers.AvgNonZeroReducer(), reducers.ThresholdReducer(low=0.1)):
        loss = make_loss(name, reducer=reducer, symmetric=False, **options)
        for key, row, number in (("embeddings", 0, torch.nan), ("ref_emb", 3, torch.inf), ("ref_emb", 8, -torch.inf)):
            call = call_with(2)
            call[key].data[row, 2] = number
            value = loss(**call)
            assert value.isnan()
            assert torch.autograd.grad(value, call[key])[0].isnan().any()
            assert loss(**(call | {"labels": call["labels"] + (call["labels"] == 0) * 50})).isnan()
            assert options.get("tiled") or loss(**call, indices_tuple=pairs).isnan()


@DEVICES
@SOME_WAYS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_float32_and_rounded_once(name, options, dtype, device):
    tolerance = {"rtol": 0, "atol": 0} if device == "cpu" else {}
    call, loss = moved(call_with(2, dtype), device), make_loss(name, products="float32", **options).to(device)
    single = moved(call, device, torch.float32)
    value = loss(**single)
    gradients = [gradient.to(dtype) for gradient in torch.autograd.grad(value, leaves_of(single))]
    for autocast in (False, True):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            actual = loss(**call)
        torch.testing.assert_close(actual, value, **tolerance)  # float32
        torch.testing.assert_close([*torch.autograd.grad(actual, leaves_of(call))], gradients, **tolerance)


@SOME
def test_finite_at_the_extremes(name):
    """Opposite and zero vectors, large scales; a zero vector has no gradient, by labels as by pairs."""
    directions = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]).repeat(4, 1)
    labels = torch.arange(20) // 2
    same = labels[:, None] == labels
    pairs = (*same.nonzero().T, *(~same).nonzero().T)
    cases = [({"tiled": False}, (None, pairs))]
    if not needs_matrix(name):
        cases.append(({"tiled": True}, (None,)))
    if "scale" in REFERENCES[name].options:
        cases.append(({"scale": 1e4}, (None, pairs)))
    for options, given in cases:
        loss = make_loss(name, **options)
        for dtype in (torch.float32, torch.float16):
            for indices in given:
                leaf = directions.to(dtype).requires_grad_()
                value = loss(leaf, labels, indices, ref_emb=leaf.detach(), ref_labels=labels)
                (gradient,) = torch.autograd.grad(value, leaf)
                assert value > 0
                assert gradient.isfinite().all()
                assert not gradient.view(4, 5, 2)[:, 3].any()


@EACH_KIND
def test_distances_and_miners(name):
    formulas = {
        "CosineSimilarity": similarity.cosine,
        "DotProductSimilarity": similarity.cosine,
        "LpDistance": similarity.negative_euclidean,
        "SNRDistance": similarity.negative_signal_to_noise,
    }
    for key, distance in components.all_of("distance").items():
        if not distance.is_inverted and name not in DIFFERENCES:
            with pytest.raises(ValueError, match="needs a similarity"):
                make_loss(name, distance=distance)
            continue
        check_call(name, call_with(2), loss=make_loss(name, distance=distance), similarity=formulas[key], what=key)
    dot = distances.DotProductSimilarity(normalize_embeddings=False)
    call = call_with(2)
    for leaf in leaves_of(call):
        leaf.data.mul_(0.3)
    for options in ({}, {} if needs_matrix(name) else {"tiled": True}):
        check_call(name, call, loss=make_loss(name, distance=dot, **options), similarity=similarity.dot_product)
    for key, miner in components.all_of("miner").items():
        for sets in (1, 2):
            seed_torch(0)  # some miners sample
            drawn = (call | {"indices_tuple": miner(**call)} for call in draw_calls(sets))
            call = first_that(partial(is_mined, name), drawn)
            check_call(name, call, loss=make_loss(name), what=key)
            unlabelled = {key: value for key, value in call.items() if "labels" not in key}
            assert torch.equal(make_loss(name)(**unlabelled), make_loss(name)(**call))


def is_mined(name, call):
    pairs = call["indices_tuple"]
    return len(pairs[0]) > 0 and len(pairs[-1]) > 0 and shows_something(name, call)


@EACH_KIND
def test_reducers_and_regularizers(name):
    for key, reducer in components.all_of("reducer").items():
        for what, call in calls(candidates=len(LABELS)):
            triplets_each = key == "PerAnchorReducer" and "triplets" in what and REFERENCES[name].triplet
            if key != "DoNothingReducer" and not triplets_each:
                check_call(name, call, loss=make_loss(name, reducer=reducer), reducer=reducer, what=f"{key}, {what}")
    for key, regularizer in components.all_of("regularizer").items():
        call = call_with(2)
        term = 0.25 * regularizer(call["embeddings"])
        loss = make_loss(name, embedding_regularizer=regularizer, embedding_reg_weight=0.25)
        torch.testing.assert_close(loss(**call), make_loss(name)(**call) + term, msg=key)
    for sets in (1, 2):
        call = call_with(sets)
        means = [leaf.mean() for leaf in leaves_of(call)]
        found = make_loss(name, embedding_regularizer=Pull(), embedding_reg_weight=0.5)(**call)
        torch.testing.assert_close(found, make_loss(name)(**call) + 0.5 * means[0] * means[-1])


class Pull(regularizers.BaseRegularizer):
    """The mean of the embeddings times that of the other modality, which no regularizer of the host sees."""

    takes_ref_emb = True

    def forward(self, embeddings, ref_emb=None):
        return embeddings.mean() * (embeddings if ref_emb is None else ref_emb).mean()


@SOME
def test_row_chunks_of_a_batch(name):
    """The full-batch loss is the pair-weighted mean of its row chunks, exactly where the loss says so."""
    call = call_with(2)
    positives = masks_of(call)[0]
    for options in ({}, {"reducer": reducers.SumReducer()}):
        loss = make_loss(name, symmetric=False, **options)
        total = 0
        for rows in (slice(2), slice(2, 6)):
            part = {key: call[key][rows] for key in ("embeddings", "labels")}
            total = total + loss(**(call | part)) * positives[rows].sum() / positives.sum()
        values = total, loss(**call)
        gradients = [torch.autograd.grad(value, call["ref_emb"])[0] for value in values]
        adds_up = torch.allclose(*values) and torch.allclose(*gradients)
        assert adds_up == loss.compares_own_rows == (not compares_pairs(name) and not options)


@pytest.mark.parametrize("name", [*ONE_OF_EACH[:-1], "triplet_hn warm"])
def test_copies(name, tmp_path):
    loss, call = make_loss(name, collect_stats=True), call_with(2)
    value = loss(**call)
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    restored = make_loss(name)
    restored.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    for twin in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss), restored, make_loss(name).half()):
        torch.testing.assert_close(twin(**call), value, rtol=1e-12, atol=1e-12)  # statistics need the matrix


@DEVICES
@pytest.mark.parametrize("name", ["unified", "goal cir sig_ms", "triplet_hn warm"])
def test_compiled(name, device):
    call, loss = moved(call_with(2), device), make_loss(name).to(device)
    value = loss(**call)
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(**call), value)


@pytest.mark.parametrize("name", ["unified", "triplet_hn"])
def test_memory(name, monkeypatch):
    """Blocks keep two rows of blocks; one matrix becomes its own gradient."""
    monkeypatch.undo()
    monkeypatch.setattr(engine, "CPU_BLOCK", 2**16)
    sides = [torch.randn(1024, 32, requires_grad=True) for _ in range(2)]
    labels, extra = torch.arange(1024), {}
    for tiled in (False, True):
        call = partial(make_loss(name, tiled=tiled), sides[0], labels, ref_emb=sides[1], ref_labels=labels)
        extra[tiled] = extra_bytes(lambda call=call: call().backward())
    matrix = 4 * 1024**2
    assert extra[True] < 0.4 * matrix
    assert extra[False] < 1.5 * matrix


@pytest.mark.parametrize("name", ["unified", "triplet_hn"])
def test_a_loss_that_is_kept_keeps_no_embeddings(name):
    """Such as in a list of a training's losses."""
    embeddings = torch.randn(8, 4, requires_grad=True)
    images = embeddings * 2
    value = make_loss(name)(images, ref_emb=embeddings.detach().roll(1))
    value.backward()
    storage = weakref.ref(images)
    del images
    gc.collect()
    assert storage() is None


def test_other_labels_for_the_same_set():
    with pytest.raises(ValueError, match="ref_labels must be the labels"):
        make_loss("unified")(**(call_with(1) | {"ref_labels": LABELS + 1}))


@pytest.mark.parametrize("name", [*filter(compares_pairs, ONE_OF_EACH), "unified"])
def test_tiles_that_cannot_be(name):
    options, call = ({"distance": PlainCosine()} if name == "unified" else {}), call_with(2)
    with pytest.raises(ValueError, match="tiled=True needs"):
        make_loss(name, tiled=True, **options)(**call)
    with pytest.raises(ValueError, match="tiled=True needs"):
        make_loss("unified", tiled=True)(**call, indices_tuple=(LABELS,) * 4)


class MeanOfMatrix(PairLoss):
    def matrix_losses(self, similarities, positive_mask, negative_mask):
        return similarities.mean()


class MeanOfPairs(PairLoss):
    def of_pairs(self, positive, negative):
        return (negative - positive).mean()


@pytest.mark.parametrize(("loss", "hook"), [(MeanOfMatrix, "matrix_losses"), (MeanOfPairs, "of_pairs")])
def test_a_loss_that_is_already_reduced(loss, hook):
    message = rf"{hook} of {loss.__name__} must return one loss of each positive pair or triplet, \(\d+,\), got \(\)"
    with pytest.raises(ValueError, match=message):
        loss()(**call_with(1))


def test_one_set_and_two():
    call, loss = call_with(1), make_loss("unified")
    twice = {"ref_emb": call["embeddings"], "ref_labels": LABELS.clone()}
    assert torch.equal(loss(**call, **twice), loss(**call))
    images, texts = embeddings_of(LABELS), embeddings_of(LABELS, seed=1)
    check_call("unified", {"embeddings": images, "labels": LABELS, "ref_emb": texts, "ref_labels": LABELS})


@pytest.mark.parametrize("reducer", [reducers.MeanReducer, reducers.AvgNonZeroReducer])
def test_a_usual_mask_value_in_a_matrix(reducer):
    """The smallest number stands where a pair is not to be compared; two of them add up to minus infinity."""
    similarities = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    positive_mask, negative_mask = torch.eye(4).bool(), ~torch.eye(4).bool()
    negative_mask[0, 2:] = False
    masked = similarities.masked_fill(~(positive_mask | negative_mask), torch.finfo(torch.float32).min)
    values = []
    for matrix in (similarities, masked):
        value = make_loss("unified", reducer=reducer()).from_similarities(matrix, positive_mask, negative_mask)
        values.append((value, torch.autograd.grad(value, similarities)[0]))
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("mask", [torch.ones(3, 4), torch.ones(4, 3, dtype=torch.bool)])
def test_masks_of_another_shape_or_type(mask):
    similarities, right = torch.rand(3, 4), torch.ones(3, 4, dtype=torch.bool)
    for name, masks in (("positive_mask", (mask, right)), ("negative_mask", (right, mask))):
        with pytest.raises(ValueError, match=f"{name} must be torch.bool"):
            make_loss("unified").from_similarities(similarities, *masks)


def test_a_pair_in_both_masks():
    masks = torch.ones(3, 3, dtype=torch.bool), ~torch.eye(3, dtype=torch.bool)
    with pytest.raises(ValueError, match="a pair is in both positive_mask and negative_mask"):
        make_loss("unified").from_similarities(torch.rand(3, 3), *masks)


def test_a_soft_maximum_needs_a_scale():
    with pytest.raises(TypeError, match="of_negatives = soft_maximum needs a scale; derive the class from ScaledLoss"):
        type("Own", (PairLoss,), {"of_negatives": soft_maximum})


def test_pairs_of_equal_labels_of_a_large_batch():
    generator = torch.Generator().manual_seed(0)
    labels, ref_labels = (torch.randint(-40, 40, (size,), generator=generator) for size in (300, 400))
    found = torch.stack(engine.label_pairs(labels, ref_labels.int())[:2])
    assert torch.equal(found, (labels[:, None] == ref_labels).nonzero().T)
