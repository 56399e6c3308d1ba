"""What all losses have in common as pytorch-metric-learning losses; their values in any call are in ``tests/pml``."""

from functools import partial

import pytest
import torch
from pytorch_metric_learning import distances, reducers, regularizers

from tests.pml.loops import LOSSES as NAMES
from tests.pml.loops import call_with as matrix_call
from tests.pml.loops import check_call, make_loss
from vl_plugins.losses import GOALLoss, SmoothChamferLoss, TripletHNLoss, TripletSHLoss, UnifiedLoss, VLCLoss
from vl_plugins.losses.base import PairLoss

LOSSES = {
    "goal": GOALLoss,
    "smooth_chamfer": SmoothChamferLoss,
    "triplet_hn": TripletHNLoss,
    "triplet_sh": TripletSHLoss,
    "unified": UnifiedLoss,
    "vlc": VLCLoss,
}
CLASSES = pytest.mark.parametrize("loss_class", LOSSES.values(), ids=LOSSES.keys())
# GOAL takes real distances only with weights of differences.
OF_ANY_DISTANCE = pytest.mark.parametrize(
    "loss_class",
    (LOSSES | {"goal": partial(GOALLoss, triplet_weight="nca", pair_weight="con")}).values(),
    ids=LOSSES.keys(),
)
# The regularizers of smooth_chamfer are of all embeddings, whichever pairs there are.
OF_PAIRS = pytest.mark.parametrize(
    "loss_class",
    (LOSSES | {"smooth_chamfer": partial(SmoothChamferLoss, mmd_weight=0, diversity_weight=0)}).values(),
    ids=LOSSES.keys(),
)
SETS = pytest.mark.parametrize("sets", [1, 2], ids=["one set", "two sets"])

LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
OTHER_LABELS = torch.tensor([2, 0, 3, 1, 1, 4, 2, 3])


def embeddings_of(labels, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(labels), 5, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def call_with(sets, dtype=torch.float64):
    call = {"embeddings": embeddings_of(LABELS, dtype), "labels": LABELS}
    if sets == 2:
        call |= {"ref_emb": embeddings_of(OTHER_LABELS, dtype, seed=1), "ref_labels": OTHER_LABELS}
    return call


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@NAMES
def test_image_to_text_only(name, dtype):
    check_call(name, matrix_call(2, dtype), loss=make_loss(name, symmetric=False), symmetric=False)


@CLASSES
def test_one_labels_object_for_both_modalities_keeps_the_diagonal(loss_class):
    labels = torch.arange(6)
    images, texts = embeddings_of(labels), embeddings_of(labels, seed=1)
    loss = loss_class()
    same_object = loss(images, labels, ref_emb=texts, ref_labels=labels)
    assert same_object > 0.1
    assert torch.equal(same_object, loss(images, labels, ref_emb=texts, ref_labels=labels.clone()))


@CLASSES
def test_references_that_are_the_embeddings_are_one_set(loss_class):
    embeddings = embeddings_of(LABELS, torch.float16)
    loss = loss_class()
    expected = loss(embeddings, LABELS)
    assert expected > 0.1
    assert torch.equal(loss(embeddings, LABELS, ref_emb=embeddings, ref_labels=LABELS.clone()), expected)


@CLASSES
def test_swapping_images_and_texts(loss_class):
    call = call_with(2)
    images, texts = call["embeddings"], call["ref_emb"]
    swapped = loss_class()(texts, OTHER_LABELS, ref_emb=images, ref_labels=LABELS)
    torch.testing.assert_close(swapped, loss_class()(**call))


@CLASSES
def test_order_of_the_batch_does_not_matter(loss_class):
    embeddings = embeddings_of(LABELS)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(loss_class()(embeddings[order], LABELS[order]), loss_class()(embeddings, LABELS))


EMPTY = {
    "no positives": (torch.arange(4), None),
    "all labels equal": (torch.zeros(4, dtype=torch.long), None),
    "one item": (torch.zeros(1, dtype=torch.long), None),
    "no items": (torch.zeros(0, dtype=torch.long), None),
    "no triplets": (torch.arange(4), (torch.zeros(0, dtype=torch.long),) * 3),
    "no pairs": (torch.arange(4), (torch.zeros(0, dtype=torch.long),) * 4),
}
ALL_REDUCERS = {
    "AvgNonZeroReducer": reducers.AvgNonZeroReducer(),
    "ClassWeightedReducer": reducers.ClassWeightedReducer(torch.tensor([0.5, 2.0, 1.0, 3.0])),
    "DivisorReducer": reducers.DivisorReducer(),
    "MeanReducer": reducers.MeanReducer(),
    "PerAnchorReducer": reducers.PerAnchorReducer(),
    "SumReducer": reducers.SumReducer(),
    "ThresholdReducer": reducers.ThresholdReducer(low=1.0, high=15.0),
}


@SETS
@pytest.mark.parametrize("reducer", ALL_REDUCERS.values(), ids=ALL_REDUCERS.keys())
@pytest.mark.parametrize("case", EMPTY)
@OF_PAIRS
def test_nothing_to_compare(loss_class, case, reducer, sets):
    labels, indices_tuple = EMPTY[case]
    loss = loss_class(reducer=reducer)
    images = embeddings_of(labels)
    call = {"embeddings": images, "labels": labels, "indices_tuple": indices_tuple}
    leaves = [images]
    if sets == 2:
        leaves.append(embeddings_of(labels, seed=1))
        other_labels = labels + (10 if case == "no positives" else 0)
        call |= {"ref_emb": leaves[1], "ref_labels": other_labels}

    value = loss(**call)
    value.backward()
    assert value == 0
    for leaf in leaves:
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))

    if len(labels) > 0:
        for leaf in leaves:
            with torch.no_grad():
                leaf[0, 0] = float("nan")
            assert loss(**call).isnan()
            with torch.no_grad():
                leaf[0, 0] = 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "distance", [distances.CosineSimilarity(), distances.DotProductSimilarity(), distances.LpDistance()]
)
@pytest.mark.parametrize("reducer", ALL_REDUCERS.values(), ids=ALL_REDUCERS.keys())
@OF_ANY_DISTANCE
def test_not_a_number_is_never_hidden(loss_class, reducer, distance, bad):
    call = call_with(2)
    call |= {key: call[key][: len(LABELS)] for key in ("ref_emb", "ref_labels")}
    loss = loss_class(distance=distance, reducer=reducer)
    for key in ("embeddings", "ref_emb"):
        for row in (0, 3):
            embeddings = call[key].detach().clone()
            embeddings[row, 2] = bad
            embeddings.requires_grad_()
            value = loss(**(call | {key: embeddings}))
            value.backward()
            assert value.isnan()
            assert embeddings.grad.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@CLASSES
def test_autocast_computes_in_single_precision(loss_class, dtype):
    call = call_with(2, dtype)
    single = {key: value.detach().float() if "emb" in key else value for key, value in call.items()}
    images, texts = (single[key].requires_grad_() for key in ("embeddings", "ref_emb"))
    loss = loss_class(embedding_regularizer=regularizers.LpRegularizer())
    expected = loss(**single)
    expected.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = loss(**call)
    actual.backward()
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)
    assert torch.equal(call["embeddings"].grad, images.grad.to(dtype))
    assert torch.equal(call["ref_emb"].grad, texts.grad.to(dtype))


@CLASSES
def test_two_types_of_embeddings_are_compared_in_the_larger(loss_class):
    call = call_with(2)
    call["ref_emb"] = call["ref_emb"].detach().half().requires_grad_()
    value = loss_class()(**call)
    value.backward()
    assert value.dtype == torch.float64
    assert call["ref_emb"].grad.dtype == torch.float16


@pytest.mark.parametrize("distance", [distances.CosineSimilarity(), distances.LpDistance()])
@OF_ANY_DISTANCE
def test_identical_embeddings_have_finite_gradients(loss_class, distance):
    embeddings = torch.ones(6, 5, requires_grad=True)
    for texts in ({}, {"ref_emb": torch.ones(6, 5), "ref_labels": LABELS}):
        value = loss_class(distance=distance)(embeddings, LABELS, **texts)
        value.backward()
        assert value > 0
        assert embeddings.grad.isfinite().all()


@CLASSES
def test_embedding_regularizer_and_statistics(loss_class):
    call = call_with(2)
    plain = loss_class(reducer=reducers.SumReducer())(**call)
    loss = loss_class(
        reducer=reducers.SumReducer(),
        embedding_regularizer=regularizers.LpRegularizer(),
        embedding_reg_weight=0.5,
        distance=distances.CosineSimilarity(collect_stats=True),
        collect_stats=True,
    )
    mean_norm = call["embeddings"].norm(dim=1).mean()
    torch.testing.assert_close(loss(**call), plain + 0.5 * mean_norm)
    assert loss.distance.initial_avg_query_norm == pytest.approx(mean_norm.item())


@CLASSES
def test_hyper_parameters_are_recorded(loss_class):
    loss = loss_class()
    assert set(loss._record_these) == {name for name, value in vars(loss).items() if isinstance(value, float)} != set()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "labels and indices_tuple cannot both be None"),
        ({"ref_labels": None}, "ref_labels cannot be None when ref_emb is given without an indices_tuple"),
        ({"labels": LABELS.tolist()}, "^labels must be a tensor, got list: torch.as_tensor"),
        ({"ref_labels": OTHER_LABELS.numpy()}, "^ref_labels must be a tensor, got ndarray: torch.as_tensor"),
        ({"labels": LABELS[:4]}, r"labels must have the shape \(6,\), got \(4,\)"),
        ({"ref_labels": LABELS}, r"ref_labels must have the shape \(8,\), got \(6,\)"),
        (
            {"ref_emb": torch.ones(8, 3)},
            r"ref_emb must have the dimension of embeddings, \(6, 5\), got \(8, 3\)|"
            r"embeddings must be sets .*, got \(6, 5\) and \(8, 3\)",
        ),
        ({"ref_emb": torch.ones(8, 5, device="meta")}, "ref_emb must be on the device of embeddings, cpu, got meta"),
        ({"indices_tuple": (LABELS, LABELS)}, r"indices_tuple must have 3 tensors .* or 4 .*, got 2"),
    ],
)
@CLASSES
def test_wrong_input(loss_class, change, message):
    with pytest.raises(ValueError, match=message):
        loss_class()(**(call_with(2) | change))


def test_pair_loss_is_to_be_derived_from():
    with pytest.raises(NotImplementedError):
        PairLoss()(embeddings_of(LABELS), LABELS)
