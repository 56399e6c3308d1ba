"""Calls whose embeddings, labels or scale do not fit: an error that names the argument."""

import warnings

import numpy as np
import pytest
import torch
from pytorch_metric_learning.losses import NTXentLoss
from pytorch_metric_learning.reducers import ClassWeightedReducer, PerAnchorReducer

from vl_plugins import create_loss, list_losses
from vl_plugins.distances import ChamferSimilarity, MatchProbability, MILSimilarity, SmoothChamferSimilarity
from vl_plugins.distributed import DistributedLoss
from vl_plugins.errors import InputWarning
from vl_plugins.losses import (
    CrossBatchMemory,
    CrossModalLoss,
    SelfSupervisedLoss,
    SmoothChamferLoss,
    UnifiedLoss,
    VLCLoss,
    Warmup,
)
from vl_plugins.miners import HardestNegativeMiner

LABELS = torch.tensor([0, 1, 2])
PAIRS = (LABELS, LABELS, LABELS, LABELS.roll(1))
LOSSES = pytest.mark.parametrize("name", list_losses())
WITH_SCALE, WITHOUT_SCALE = ("siglip", "unified", "vlc"), ("goal", "smooth_chamfer", "triplet_hn", "triplet_sh")
UNEQUAL_WIDTHS = r"embeddings and ref_emb must .*, got .*4\b.* and .*6\b"


def call_of(width=4, ref_width=4, **changes):
    generator = torch.Generator().manual_seed(0)
    sides = {
        "embeddings": torch.randn(3, width, generator=generator),
        "ref_emb": torch.randn(3, ref_width, generator=generator),
    }
    return {**sides, "labels": LABELS, "ref_labels": LABELS.clone(), **changes}


def callables():
    """Everything that compares embeddings with ``ref_emb`` by labels."""
    for name in list_losses():
        yield name, create_loss(name)
        yield f"{name}, across processes", create_loss(name, gather_across_devices=True)
    for loss in (NTXentLoss(), create_loss("unified")):
        yield f"{type(loss).__name__}, both ways", DistributedLoss(CrossModalLoss(loss))
        yield f"{type(loss).__name__}, one set", DistributedLoss(CrossModalLoss(loss, one_set=True))
    yield "base of the host", SmoothChamferLoss(NTXentLoss())
    yield "miner", HardestNegativeMiner()


CALLABLES = pytest.mark.parametrize("compare", [pytest.param(value, id=name) for name, value in callables()])


@CALLABLES
def test_unequal_widths(compare):
    with pytest.raises(ValueError, match=UNEQUAL_WIDTHS):
        compare(**call_of(4, 6))


@LOSSES
def test_unequal_widths_by_pairs(name):
    with pytest.raises(ValueError, match=UNEQUAL_WIDTHS):
        create_loss(name)(**call_of(4, 6), indices_tuple=PAIRS)


@LOSSES
def test_embeddings_of_numpy(name):
    embeddings = torch.randn(4, 8)
    with pytest.raises(ValueError, match="embeddings must be a tensor, got ndarray"):
        create_loss(name)(embeddings.numpy(), torch.arange(4), ref_emb=embeddings, ref_labels=torch.arange(4))


@pytest.mark.parametrize("distance", ["LpDistance", "DotProductSimilarity", "SNRDistance"])
def test_unequal_widths_by_other_distances(distance):
    with pytest.raises(ValueError, match=UNEQUAL_WIDTHS):
        create_loss("unified", distance=distance)(**call_of(4, 6))


@pytest.mark.parametrize("distance", [ChamferSimilarity, MatchProbability, MILSimilarity, SmoothChamferSimilarity])
@pytest.mark.parametrize("shape", [(3, 2), (3,)], ids=["sets", "packed"])
def test_unequal_widths_of_sets(distance, shape):
    with pytest.raises(ValueError, match=UNEQUAL_WIDTHS):
        distance()(torch.ones(*shape, 4), torch.ones(*shape, 6))


def test_widths_of_the_wrappers():
    call = call_of(4, 6)
    with pytest.raises(ValueError, match=r"embeddings must be \(B, 6\), got \(3, 4\)"):
        CrossBatchMemory(UnifiedLoss(), embedding_size=6)(call["embeddings"], LABELS)
    for symmetric in (True, False):
        with pytest.raises(ValueError, match=UNEQUAL_WIDTHS):
            SelfSupervisedLoss(UnifiedLoss(), symmetric=symmetric)(call["embeddings"], call["ref_emb"])


@pytest.mark.parametrize("name", ["unified", "triplet_sh", "goal"])
def test_sets_without_a_distance_of_sets(name):
    with pytest.raises(ValueError, match=r"embeddings must have the shape \(A, D\), got \(3, 2, 4\)"):
        create_loss(name)(torch.ones(3, 2, 4), LABELS)


@CALLABLES
def test_labels_of_numpy_and_lists(compare):
    """They are those of a tensor, also where they are unsigned or truth values."""
    tensor = torch.tensor([0, 1, 1])
    expected = compare(**call_of(labels=tensor, ref_labels=tensor.clone()))
    for labels in (tensor.numpy(), tensor.tolist(), tensor.numpy().astype("u1"), tensor.bool()):
        actual = compare(**call_of(labels=labels, ref_labels=labels))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_labels_that_torch_does_not_sort_in_a_large_batch(dtype):
    labels = torch.arange(300) % 2
    embeddings = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    loss = create_loss("triplet_hn")
    assert torch.equal(loss(embeddings, labels.to(dtype)), loss(embeddings, labels)) > 0


WRONG_LABELS = [
    ({"labels": torch.tensor([0, torch.nan, 1])}, "labels must be numbers, got NaN"),
    ({"ref_labels": np.array([np.nan, 1, 2])}, "ref_labels must be numbers, got NaN"),
    ({"labels": "abc"}, "labels must be a tensor, an array or a list of integers, got str"),
    ({"labels": ["a", "b", "c"]}, "labels must be a tensor, an array or a list of integers: "),
    ({"ref_labels": {0: 1}}, "ref_labels must be a tensor, an array or a list of integers, got dict"),
    ({"labels": LABELS[:2]}, "labels must have the length 3, got 2"),
    ({"ref_labels": LABELS[:, None]}, r"ref_labels must have the length 3, got \(3, 1\)"),
]


@CALLABLES
@pytest.mark.parametrize(("change", "message"), WRONG_LABELS)
def test_wrong_labels(compare, change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        compare(**call_of(**change))


@LOSSES
def test_missing_labels(name):
    loss, call = create_loss(name), call_of()
    with pytest.raises(ValueError, match="labels must be given with ref_labels"):
        loss(**call | {"labels": None})
    with pytest.raises(ValueError, match="labels must be given with one set of embeddings"):
        loss(call["embeddings"])
    with pytest.raises(ValueError, match="ref_labels must be the labels, because ref_emb is the embeddings or missing"):
        loss(**call | {"labels": None, "ref_emb": None})
    for labels in (None, LABELS):
        with pytest.raises(ValueError, match=r"row i of the embeddings: 4 is not a multiple of 3$"):
            loss(call["embeddings"], labels, ref_emb=torch.ones(4, 4))


WRONG_SCALES = [
    (-1, "must be a finite number > 0, got -1"),
    (0.0, "must be a finite number > 0, got 0.0"),
    ("learned", "must be a finite number > 0, got 'learned'"),
    (torch.tensor(-2.0, requires_grad=True), "must be a finite number > 0, got -2.0"),
    (torch.tensor([0.0]), "must be a finite number > 0, got 0.0"),
    (torch.tensor(torch.nan), "must be a finite number > 0, got nan"),
    (torch.ones(2), r"must be a number or a tensor of one element, got the shape \(2,\)"),
]


@pytest.mark.parametrize(("scale", "message"), WRONG_SCALES)
@pytest.mark.parametrize("name", WITH_SCALE)
def test_a_scale_that_is_not_above_zero(name, scale, message):
    loss, call = create_loss(name), call_of()
    for compare in (loss, DistributedLoss(loss), DistributedLoss(CrossModalLoss(loss)), SmoothChamferLoss(loss)):
        with pytest.raises(ValueError, match=f"^scale {message}"):
            compare(**call, scale=scale)
    masks = torch.eye(3, dtype=torch.bool), ~torch.eye(3, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"^scale {message}"):
        loss.from_similarities(torch.eye(3), *masks, scale=scale)


@pytest.mark.parametrize("name", WITHOUT_SCALE)
def test_a_scale_for_a_loss_without_one(name):
    for compare in (create_loss(name), create_loss(name, gather_across_devices=True)):
        with pytest.raises(ValueError, match=r"has no scale; losses that have one: siglip, unified, vlc$"):
            compare(**call_of(), scale=5.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_SCALE)
def test_a_scale_on_a_gpu(name):
    """It is checked in the first call; later ones do not wait for it, and give NaN."""
    call = {key: value.cuda() for key, value in call_of().items()}
    scale = torch.tensor(5.0, device="cuda", requires_grad=True)
    with pytest.raises(ValueError, match=r"scale must be a finite number > 0, got -5\.0"):
        create_loss(name)(**call, scale=-scale)
    loss = create_loss(name)
    expected = loss(**call, scale=5.0)
    for _ in range(2):
        torch.testing.assert_close(loss(**call, scale=scale), expected)
    assert loss(**call, scale=-scale).isnan()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss(**call, scale=scale).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([warning for warning in caught if "synchroniz" in str(warning.message)]) == 1


def test_ids_that_do_not_fit():
    if hasattr(torch, "uint64"):
        ids = np.array([2**63 + 1] * 3, np.uint64)
        with pytest.raises(ValueError, match=r"ref_ids must .* int64, .*, got torch\.uint64"):
            create_loss("unified")(**call_of(ref_ids=ids))
    nothing = create_loss("unified")(torch.ones(0, 4), ref_emb=torch.ones(0, 4), ref_ids=[])
    assert nothing == 0


SETS = {"embeddings": torch.ones(3, 2, 4), "ref_emb": torch.ones(3, 2, 4)}
EYE = torch.eye(3).bool()
WRONG = {
    "one confidence for all": (
        lambda: create_loss("unified")(**call_of(confidence=0.5)),
        "confidence must be a tensor, an array or a list of numbers, got float",
    ),
    "words as ids": (
        lambda: create_loss("unified")(**call_of(ref_ids=["a cat", "a dog", "a cow"])),
        "ref_ids must be a tensor, an array or a list of integers that fit into int64, such as vl_plugins",
    ),
    "ids beyond int64": (
        lambda: create_loss("unified")(**call_of(ref_ids=[2**63 + 5] * 3)),
        "ref_ids must be a tensor, an array or a list of integers that fit into int64, such as vl_plugins",
    ),
    "a confidence below 0": (
        lambda: create_loss("unified")(**call_of(confidence=[0.5, -1.0, 1.0])),
        "confidence must be >= 0, got -1",
    ),
    "an integer confidence below 0": (
        lambda: create_loss("unified")(**call_of(confidence=torch.tensor([1, -1, 1]))),
        "confidence must be >= 0, got -1",
    ),
    "a switch of tiles that is a word": (
        lambda: UnifiedLoss(tiled="no"),
        "UnifiedLoss: tiled must be True or False, got 'no'",
    ),
    "no embeddings": (lambda: UnifiedLoss()(None, ref_emb=None), "embeddings must be a tensor, got NoneType"),
    "words as confidence": (
        lambda: create_loss("unified")(**call_of(confidence=["a", "b", "c"])),
        "confidence must be a tensor, an array or a list of numbers: ",
    ),
    "a margin below 0": (
        lambda: create_loss("unified")(**call_of(margin=torch.tensor([0.2, -0.5, 0.1]))),
        "margin must be >= 0, got -0.5",
    ),
    "negatives of each image": (
        lambda: create_loss("unified")(**call_of(negatives=torch.ones(3, 2, 4))),
        r"negatives must have the shape \(N, D\), got \(3, 2, 4\); \.flatten\(0, 1\) makes rows",
    ),
    "embeddings as labels": (
        lambda: create_loss("unified")(torch.ones(3, 4), torch.ones(3, 4)),
        r"labels must have the length 3, got \(3, 4\); embeddings go to ref_emb=",
    ),
    "two index tensors": (
        lambda: create_loss("unified")(**call_of(indices_tuple=(LABELS, LABELS))),
        "indices_tuple must be .*, got 2 tensors",
    ),
    "an unknown argument": (
        lambda: create_loss("unified")(**call_of(caption_ids=LABELS)),
        r"UnifiedLoss: unknown argument 'caption_ids' \(did you mean '.*_ids'\?\); known: confidence, ",
    ),
    "a temperature in a call": (
        lambda: create_loss("unified")(**call_of(temperature=0.05)),
        r"UnifiedLoss: unknown option temperature; scale = 1 / temperature = 20$",
    ),
    "ids with a matrix": (
        lambda: create_loss("unified").from_similarities(torch.eye(3), EYE, ~EYE, ref_ids=LABELS),
        "ref_ids belongs to a call with embeddings, not to from_similarities",
    ),
    "a margin of each caption for the hardest negative": (
        lambda: setattr(create_loss("triplet_hn"), "margin", torch.ones(3)),
        "margin of TripletHNLoss must be one number; UnifiedLoss takes one for each caption: ",
    ),
    "a margin of each caption that is set": (
        lambda: setattr(create_loss("unified"), "margin", torch.ones(3)),
        "margin of UnifiedLoss must be one number; one for each caption belongs to the call: ",
    ),
    "an attribute of the base of sets": (
        lambda: setattr(SmoothChamferLoss("unified"), "symmetric", False),
        "symmetric belongs to the base of SmoothChamferLoss: set that of loss.base",
    ),
    "pairs of unequal lengths": (
        lambda: create_loss("unified")(**call_of(indices_tuple=(LABELS, LABELS[:1], LABELS, LABELS.roll(1)))),
        r"indices_tuple must have equally many anchors and others, got \[3, 1, 3, 3\]",
    ),
    "an index below 0": (
        lambda: create_loss("unified")(**call_of(indices_tuple=(LABELS, LABELS, LABELS - 1))),
        "indices_tuple must be indices of rows, got -1",
    ),
    "a scale in the body of a class": (
        lambda: type("Own", (UnifiedLoss,), {"scale": 20.0}),
        r"Own: give the scale to the constructor, super\(\)\.__init__\(scale=20\.0\)",
    ),
    "slots of one side": (
        lambda: create_loss("smooth_chamfer")(**SETS, labels=LABELS, slots=torch.ones(3, 2, 5)),
        r"slots and ref_slots must have the same width, got \[4, 5\]: give both, or neither",
    ),
    "slots of other sets": (
        lambda: create_loss("smooth_chamfer")(SETS["embeddings"], LABELS, slots=torch.ones(2, 2, 4)),
        r"slots must be \(3, K, D\), got \(2, 2, 4\)",
    ),
    "labels twice": (
        lambda: DistributedLoss(UnifiedLoss())(torch.ones(3, 4), LABELS, torch.ones(3, 4), LABELS, ref_labels=LABELS),
        "ref_emb or ref_labels is given twice",
    ),
    "a margin of a warm-up": (
        lambda: setattr(create_loss("triplet_hn", warmup_steps=1), "margin", 0.5),
        "margin belongs to the losses of a warm-up: set that of loss.first and loss.then",
    ),
    "a learned scale by name": (
        lambda: UnifiedLoss(scale="learned"),
        r"scale must be a number; learn_scale=True learns it, and a call takes a tensor",
    ),
    "a parameter as scale": (
        lambda: setattr(UnifiedLoss(), "scale", torch.nn.Parameter(torch.tensor(5.0))),
        r"scale must be a number; learn_scale=True learns it",
    ),
    "a learned scale that is set": (
        lambda: setattr(UnifiedLoss(learn_scale=True), "scale", 10),
        r"loss\.log_scale\.data\.fill_\(math\.log\(scale\)\)",
    ),
    "three weights": (lambda: UnifiedLoss(weights=[1, 2, 3]), "weights must be two functions, .*, got 3"),
    "an unknown option": (
        lambda: UnifiedLoss(margn=0.3),
        r"UnifiedLoss: unknown option 'margn' \(did you mean 'margin'\?\); known: ",
    ),
    "a reducer by name": (
        lambda: UnifiedLoss(reducer="SumReducer"),
        "UnifiedLoss: reducer must be a module, got 'SumReducer'; names are for create_loss",
    ),
    "a group by name": (
        lambda: UnifiedLoss(gather_across_devices="true"),
        "gather_across_devices must be True, False or a ProcessGroup, got 'true'",
    ),
    "a warm-up of names": (
        lambda: Warmup("triplet_sh", "triplet_hn", 5),
        "Warmup takes two losses, got 'triplet_sh'; create_loss makes one by its name",
    ),
    "a warm-up of less than no steps": (lambda: Warmup(VLCLoss(), VLCLoss(), -1), "steps must be an integer >= 0"),
    "two modalities by a name": (lambda: CrossModalLoss("NTXentLoss"), "loss must be a loss, got 'NTXentLoss'; create"),
    "two modalities of numpy": (
        lambda: CrossModalLoss(UnifiedLoss())(np.ones((3, 4)), LABELS, ref_emb=torch.ones(3, 4), ref_labels=LABELS),
        "embeddings must be a tensor, got ndarray",
    ),
    "two modalities of unequal widths": (
        lambda: CrossModalLoss(NTXentLoss())(torch.ones(3, 4), LABELS, ref_emb=torch.ones(3, 5), ref_labels=LABELS),
        "embeddings and ref_emb must have the same width, got 4 and 5",
    ),
    "a miner's pairs of two modalities": (
        lambda: CrossModalLoss(UnifiedLoss())(**call_of(indices_tuple=PAIRS)),
        r"indices_tuple must be None: CrossModalLoss\(loss, miner\) calls the miner",
    ),
    "labels of the captions only": (
        lambda: CrossModalLoss(NTXentLoss())(**call_of(labels=None)),
        "labels must be given with ref_labels",
    ),
    "a name for the loss of a queue": (lambda: CrossBatchMemory("unified", 3), "loss must be a loss, got 'unified'"),
    "a name for a loss of processes": (lambda: DistributedLoss("unified"), "loss must be a loss, got 'unified'"),
    "a name for the loss of views": (lambda: SelfSupervisedLoss("unified"), "loss must be a loss, got 'unified'"),
    "a queue that gathers": (
        lambda: setattr(CrossBatchMemory(UnifiedLoss(), 3), "gather_across_devices", True),
        "the queue of CrossBatchMemory is that of one process: it cannot gather",
    ),
    "a margin of sets": (
        lambda: setattr(create_loss("smooth_chamfer"), "margin", 0.3),
        "margin belongs to the base of SmoothChamferLoss: set that of loss.base",
    ),
    "a matrix for sets": (
        lambda: create_loss("smooth_chamfer").from_similarities(torch.eye(3)),
        r"SmoothChamferLoss needs embeddings: loss.base.from_similarities\(...\) takes a matrix",
    ),
    "a switch that is a word": (
        lambda: UnifiedLoss(symmetric="no"),
        "UnifiedLoss: symmetric must be True or False, got 'no'",
    ),
    "a margin with a gradient": (
        lambda: create_loss("triplet_hn", margin=torch.nn.Parameter(torch.tensor(0.2))),
        r"margin must be a finite number >= 0, got Parameter of the shape \(\)$",
    ),
    "a list of margins for the loss": (
        lambda: setattr(UnifiedLoss(), "margin", [0.1, 0.2]),
        "margin of UnifiedLoss must be one number; one for each caption belongs to the call",
    ),
    "a miner instead of its pairs": (
        lambda: UnifiedLoss()(torch.eye(3), LABELS, HardestNegativeMiner(), torch.eye(3), LABELS),
        r"indices_tuple must be pairs or triplets, miner\(embeddings, labels, ref_emb, ref_labels\), not the miner",
    ),
    "captions of each image as one tensor": (
        lambda: UnifiedLoss()(torch.eye(3), ref_emb=torch.ones(3, 5, 3)),
        r"ref_emb must have the shape \(C, D\), got \(3, 5, 3\); .flatten\(0, 1\) makes rows of the captions",
    ),
    "anchors for a reducer of a square": (
        lambda: UnifiedLoss(reducer=PerAnchorReducer())(torch.eye(3), ref_emb=torch.ones(6, 3)),
        "PerAnchorReducer needs at least as many images as captions, got 3 and 6",
    ),
    "a second bias": (
        lambda: create_loss("siglip", learn_bias=True)(torch.eye(3), ref_emb=torch.eye(3), bias=-3.0),
        r"bias is the loss's own parameter \(learn_bias=True\); a call cannot give another one",
    ),
    "weights that are numbers": (
        lambda: UnifiedLoss(weights=[0.5, 0.3]),
        "weights and relative must be functions or lists of coefficients, got 0.5",
    ),
    "half of a warm-up gathers": (
        lambda: Warmup(UnifiedLoss(gather_across_devices=True), UnifiedLoss(), 1),
        "gather_across_devices is given to one loss of the warm-up only: give it to both, or set",
    ),
    "labels of one side for a miner": (
        lambda: HardestNegativeMiner()(torch.eye(3), LABELS, torch.eye(3)),
        "ref_labels must be given with the embeddings: a miner finds pairs by their labels",
    ),
    "vectors below sets": (
        lambda: create_loss("smooth_chamfer")(**SETS, labels=LABELS, negatives=torch.ones(2, 4)),
        r"negatives must be \(N, K, D\), as the candidates, got \(2, 4\)",
    ),
    "packed sets of another size": (
        lambda: create_loss("smooth_chamfer", set_size=2)(**call_of(), negatives=torch.ones(2, 6)),
        r"negatives must be \(N, 4\), got \(2, 6\)",
    ),
    "copies by place": (
        lambda: create_loss("unified")(**call_of(labels=None, ref_labels=None, copies=LABELS)),
        "copies need labels",
    ),
    "similarities of numpy": (
        lambda: create_loss("unified").from_similarities(np.eye(3), EYE, ~EYE),
        "similarities must be a tensor, got ndarray",
    ),
    "masks of numpy": (
        lambda: create_loss("unified").from_similarities(torch.eye(3), EYE.numpy(), ~EYE.numpy()),
        r"positive_mask must be torch\.bool \(3, 3\), got bool",
    ),
    "a matrix without embeddings": (
        lambda: create_loss("unified", embedding_regularizer="LpRegularizer").from_similarities(
            torch.eye(3), EYE, ~EYE
        ),
        "embedding_regularizer needs embeddings, not similarities",
    ),
    "a mask of numpy for a queue": (
        lambda: CrossBatchMemory(UnifiedLoss(), 4)(torch.ones(3, 4), LABELS, enqueue_mask=np.ones(3, bool)),
        r"enqueue_mask must be torch\.bool \(3,\), got bool",
    ),
    "embeddings of numpy for a queue": (
        lambda: CrossBatchMemory(UnifiedLoss(), 4)(np.ones((3, 4)), LABELS),
        "embeddings must be a tensor, got ndarray",
    ),
    "embeddings of numpy for all processes": (
        lambda: DistributedLoss(NTXentLoss())(np.ones((3, 4)), LABELS),
        "embeddings must be a tensor, got ndarray",
    ),
    "texts that are no multiple": (
        lambda: DistributedLoss(UnifiedLoss())(torch.ones(4, 2), ref_emb=torch.ones(9, 2)),
        "9 is not a multiple of 4",
    ),
    "a scale that is set": (lambda: setattr(UnifiedLoss(), "scale", -5), "scale must be a finite number > 0, got -5"),
    "weights of classes by place": (
        lambda: UnifiedLoss(reducer=ClassWeightedReducer(torch.ones(9)))(**call_of(labels=None, ref_labels=None)),
        "ClassWeightedReducer needs labels",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_wrong_calls(case):
    call, message = WRONG[case]
    with pytest.raises((ValueError, TypeError, AttributeError), match=message):
        call()


@pytest.mark.parametrize(
    ("labels", "number_of_pairs"),
    [([[0, 1, 2], [3, 4, 5]], "no pair"), ([[0, 0, 0], [0, 0, 0]], "every pair"), ([[0, 1, 2]], "no pair")],
)
def test_labels_without_anything_to_learn_warn_once(labels, number_of_pairs):
    loss, x = UnifiedLoss(), torch.eye(3)
    sides = {"ref_emb": x.flip(0), "ref_labels": labels[1]} if len(labels) == 2 else {}
    message = f"^{number_of_pairs} of a batch of 3 is positive, so its loss is 0"
    with pytest.warns(InputWarning, match=message) as caught:
        assert loss(x, labels[0], **sides) + loss(x, labels[0], **sides) == 0
    assert len(caught) == 1
    assert caught[0].filename == __file__  # of the caller
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        UnifiedLoss()(x, [0, 0, 1])
        CrossBatchMemory(UnifiedLoss(), 3)(x, LABELS)  # the first batch of a queue


def test_labels_without_anything_to_learn_in_one_set_with_further_negatives():
    with pytest.warns(InputWarning, match="^no pair of a batch of 3 is positive"):
        UnifiedLoss()(torch.eye(3), [0, 1, 2], negatives=torch.ones(2, 3))


@pytest.mark.parametrize(
    "wrap",
    [CrossModalLoss, lambda loss: Warmup(loss, loss, 1), SmoothChamferLoss],
    ids=["both ways", "a warm-up", "a base"],
)
def test_one_tensor_of_labels_for_both_sides(wrap):
    """To a loss of pytorch-metric-learning, it says that there is one set."""
    loss, call = wrap(NTXentLoss()), call_of()
    value = loss(call["embeddings"], LABELS, None, call["ref_emb"], LABELS)
    assert value == loss(call["embeddings"], LABELS, None, call["ref_emb"], LABELS.clone()) > 0


def test_the_order_of_arguments_until_version_0_3():
    call, miner = call_of(ref_labels=LABELS.roll(1)), HardestNegativeMiner()
    first, loss = (call["embeddings"], LABELS, call["ref_emb"]), DistributedLoss(create_loss("triplet_hn"))
    expected = loss(**call)
    assert loss(*first, call["ref_labels"]) == loss(*first, ref_labels=call["ref_labels"]) == expected
    mined = loss(**call, miner=miner)
    assert loss(*first, call["ref_labels"], miner) == mined != expected


def test_lists_of_labels_for_two_modalities():
    images, texts = call_of()["embeddings"], call_of()["ref_emb"]
    loss = CrossModalLoss(create_loss("triplet_hn"), HardestNegativeMiner())
    value = loss(images, [0, 1, 2], None, texts, np.arange(3), ref_ids=[5, 6, 5])
    assert value == loss(images, LABELS, None, texts, LABELS.clone(), ref_ids=torch.tensor([5, 6, 5]))


def test_a_loss_of_the_host_takes_captions_by_place():
    images, texts, loss = torch.randn(3, 4), torch.randn(6, 4), CrossModalLoss(NTXentLoss())
    expected = loss(images, LABELS, ref_emb=texts, ref_labels=LABELS.repeat_interleave(2))
    assert loss(images, ref_emb=texts) == loss(images, LABELS, ref_emb=texts) == expected


def test_a_loss_shows_its_numbers():
    shown = repr(create_loss("unified", margin=torch.nn.Parameter(torch.tensor(0.1)), scale=20))
    assert shown.splitlines()[1].strip() == "scale=20.0, margin=0.1"


@LOSSES
@pytest.mark.parametrize("case", ["one image", "equal captions", "a miner's pairs", "labels"])
def test_nan_is_not_hidden(name, case):
    """Even where the embedding that has it is compared with nothing."""
    call = call_of(labels=None, ref_labels=None)
    call["embeddings"][2, 0] = torch.nan
    if case == "one image":
        call = {"embeddings": call["embeddings"][2:], "ref_emb": call["ref_emb"][:1]}
    elif case == "equal captions":
        call["ref_ids"] = [1, 1, 1]
    elif case == "a miner's pairs":
        call["indices_tuple"] = tuple(pairs[:2] for pairs in PAIRS)
    else:
        call |= {"labels": LABELS, "ref_labels": LABELS.clone()}
    assert create_loss(name)(**call).isnan()
