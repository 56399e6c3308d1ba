"""What all four losses have in common as pytorch-metric-learning losses."""

import copy
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers

from tests.reference import distances as reference_distances
from tests.reference import losses as reference
from vl_plugins.losses import TripletHNLoss, TripletSHLoss, UnifiedLoss, VLCLoss
from vl_plugins.losses.base import PairLoss

LOSSES = {
    "unified": (UnifiedLoss, reference.unified, {"margin": 0.2, "scale": 10.0}),
    "vlc": (VLCLoss, reference.vlc, {"scale": 10.0}),
    "triplet_hn": (TripletHNLoss, reference.triplet_hn, {"margin": 0.2}),
    "triplet_sh": (TripletSHLoss, reference.triplet_sh, {"margin": 0.2}),
}
CLASSES = pytest.mark.parametrize("loss_class", [loss for loss, _, _ in LOSSES.values()], ids=LOSSES.keys())
NAMES = pytest.mark.parametrize("name", LOSSES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
SETS = pytest.mark.parametrize("sets", [1, 2], ids=["one set", "two sets"])
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
OTHER_LABELS = torch.tensor([2, 0, 3, 1, 1, 4, 2, 3])
UPSTREAM = 3.0


def embeddings_of(labels, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(labels), 5, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def call_with(sets, dtype=torch.float64):
    call = {"embeddings": embeddings_of(LABELS, dtype), "labels": LABELS}
    if sets == 2:
        call |= {"ref_emb": embeddings_of(OTHER_LABELS, dtype, seed=1), "ref_labels": OTHER_LABELS}
    return call


def check(loss, call, similarity, loops, weights_of):
    """Compare value and gradients with the loops.

    ``loops(similarities)`` returns what :func:`tests.reference.losses.pair_losses` does, and ``weights_of(values)`` the
    weight of each value in the reduced loss.
    """
    leaves = [call[name] for name in ("embeddings", "ref_emb") if name in call]
    dtype = leaves[0].dtype
    actual = loss(**call)
    actual_gradients = torch.autograd.grad(UPSTREAM * actual, leaves)

    twins = [leaf.detach().double().requires_grad_() for leaf in leaves]
    similarities = reference_distances.matrix(similarity, *twins)
    values, derivatives = loops(similarities.tolist())
    weights = weights_of(values)
    expected = sum(weights[key] * value for key, value in values.items())
    upstream = {key: UPSTREAM * weight for key, weight in weights.items()}
    gradient = similarities.new_tensor(reference.weighted_gradient(derivatives, upstream, *similarities.shape))
    expected_gradients = torch.autograd.grad(similarities, twins, gradient)

    assert expected > 0.01
    assert actual.dtype == dtype
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(actual.item(), expected, **tolerance)
    torch.testing.assert_close([g.double() for g in actual_gradients], list(expected_gradients), **tolerance)


def pair_loops(name, positives, negatives, symmetric):
    _, pair_loss, options = LOSSES[name]
    assert len(positives) > 1
    assert len(negatives) > 1
    return partial(
        reference.pair_losses,
        pair_loss,
        positives=positives,
        negatives=negatives,
        symmetric=symmetric,
        **options,
    )


def triplet_loops(triplets, margin):
    assert len(triplets) > 1

    def loops(similarities):
        values, derivatives = {}, {}
        for a, p, n in triplets:
            values[a, p, n], of_row = reference.triplet(similarities[a], p, n, margin)
            derivatives[a, p, n] = {(a, c): derivative for c, derivative in of_row.items()}
        return values, derivatives

    return loops


def mean(values):
    return dict.fromkeys(values, 1 / len(values))


DISTANCES = {
    "cosine": (None, reference_distances.cosine),
    "dot product": (distances.DotProductSimilarity(normalize_embeddings=False), reference_distances.dot_product),
    "euclidean": (distances.LpDistance(p=2), reference_distances.negative_euclidean),
    "manhattan": (distances.LpDistance(p=1), reference_distances.negative_manhattan),
    "signal to noise": (distances.SNRDistance(), reference_distances.negative_signal_to_noise),
}


@DTYPES
@SETS
@pytest.mark.parametrize("distance", DISTANCES)
@NAMES
def test_labels_and_distances(name, distance, sets, dtype):
    distance, similarity = DISTANCES[distance]
    loss_class, _, options = LOSSES[name]
    other_labels = OTHER_LABELS.tolist() if sets == 2 else None
    loops = pair_loops(name, *reference.pairs_of_labels(LABELS.tolist(), other_labels), symmetric=sets == 2)
    check(loss_class(distance=distance, **options), call_with(sets, dtype), similarity, loops, mean)


@DTYPES
@NAMES
def test_image_to_text_only(name, dtype):
    loss_class, _, options = LOSSES[name]
    loops = pair_loops(name, *reference.pairs_of_labels(LABELS.tolist(), OTHER_LABELS.tolist()), symmetric=False)
    loss = loss_class(symmetric=False, **options)
    check(loss, call_with(2, dtype), reference_distances.cosine, loops, mean)


MINERS = {
    "MultiSimilarityMiner": miners.MultiSimilarityMiner(epsilon=0.5),
    "PairMarginMiner": miners.PairMarginMiner(pos_margin=0.6, neg_margin=1.6),
    "BatchEasyHardMiner": miners.BatchEasyHardMiner(pos_strategy="all", neg_strategy="hard"),
    "BatchHardMiner": miners.BatchHardMiner(),
    "TripletMarginMiner": miners.TripletMarginMiner(margin=0.3),
}


@DTYPES
@pytest.mark.parametrize("with_labels", [True, False], ids=["labels", "no labels"])
@SETS
@pytest.mark.parametrize("miner", MINERS)
@NAMES
def test_tuples_of_miners(name, miner, sets, with_labels, dtype):
    loss_class, _, options = LOSSES[name]
    call = call_with(sets, dtype)
    indices_tuple = MINERS[miner](**call)
    if not with_labels:
        call = {key: value for key, value in call.items() if "labels" not in key}
    indices = [index.tolist() for index in indices_tuple]
    if len(indices) == 3 and name.startswith("triplet"):
        loops = triplet_loops(list(zip(*indices, strict=True)), **options)
    else:
        positives = set(zip(indices[0], indices[1], strict=True))
        negatives = set(zip(indices[-2] if len(indices) == 4 else indices[0], indices[-1], strict=True))
        loops = pair_loops(name, positives, negatives, symmetric=False)
    call["indices_tuple"] = indices_tuple
    check(loss_class(**options), call, reference_distances.cosine, loops, mean)


def sum_weights(values):
    return dict.fromkeys(values, 1.0)


def between(low, high):
    def weights(values):
        kept = [key for key, value in values.items() if low < value < high]
        assert 0 < len(kept) < len(values)
        return {key: (key in kept) / len(kept) for key in values}

    return weights


def per_anchor(values):
    of_anchor = Counter(anchor for anchor, *_ in values)
    return {key: 1 / (of_anchor[key[0]] * len(LABELS)) for key in values}


CLASS_WEIGHTS = [0.5, 2.0, 1.0, 3.0]


def per_class(values):
    return {key: CLASS_WEIGHTS[LABELS[key[0]]] / len(values) for key in values}


REDUCERS = {
    "MeanReducer": (reducers.MeanReducer(), mean),
    "SumReducer": (reducers.SumReducer(), sum_weights),
    "ThresholdReducer": (reducers.ThresholdReducer(low=1.0, high=15.0), between(1.0, 15.0)),
    "PerAnchorReducer": (reducers.PerAnchorReducer(), per_anchor),
    "ClassWeightedReducer": (reducers.ClassWeightedReducer(torch.tensor(CLASS_WEIGHTS)), per_class),
    "DivisorReducer": (reducers.DivisorReducer(), mean),
}


@DTYPES
@SETS
@pytest.mark.parametrize("reducer", REDUCERS)
@NAMES
def test_reducers(name, reducer, sets, dtype):
    loss_class, _, options = LOSSES[name]
    reducer, weights_of = REDUCERS[reducer]
    other_labels = OTHER_LABELS[: len(LABELS)].tolist() if sets == 2 else None
    call = call_with(sets, dtype)
    if sets == 2:  # PerAnchorReducer has no room for more references than embeddings
        texts = call["ref_emb"][: len(LABELS)].detach().requires_grad_()
        call |= {"ref_emb": texts, "ref_labels": OTHER_LABELS[: len(LABELS)]}
    loops = pair_loops(name, *reference.pairs_of_labels(LABELS.tolist(), other_labels), symmetric=sets == 2)
    check(loss_class(reducer=reducer, **options), call, reference_distances.cosine, loops, weights_of)


@DTYPES
@pytest.mark.parametrize("name", ["triplet_hn", "triplet_sh"])
def test_average_of_non_zero_values(name, dtype):
    loss_class, _, options = LOSSES[name]
    loops = pair_loops(name, *reference.pairs_of_labels(LABELS.tolist()), symmetric=False)
    loss = loss_class(reducer=reducers.AvgNonZeroReducer(), **options)
    check(loss, call_with(1, dtype), reference_distances.cosine, loops, between(0, float("inf")))


@CLASSES
def test_do_nothing_reducer_gives_the_values(loss_class):
    call = call_with(2)
    values = loss_class(reducer=reducers.DoNothingReducer())(**call)["loss"]
    assert values["reduction_type"] == "pos_pair"
    anchors, positives = values["indices"]
    assert torch.equal(LABELS[anchors], OTHER_LABELS[positives])
    assert len(anchors) == (LABELS[:, None] == OTHER_LABELS).sum()
    torch.testing.assert_close(values["losses"].mean(), loss_class()(**call))


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
ALL_REDUCERS = {name: reducer for name, (reducer, _) in REDUCERS.items()} | {
    "AvgNonZeroReducer": reducers.AvgNonZeroReducer()
}


@SETS
@pytest.mark.parametrize("reducer", ALL_REDUCERS.values(), ids=ALL_REDUCERS.keys())
@pytest.mark.parametrize("case", EMPTY)
@CLASSES
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
@CLASSES
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
@CLASSES
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
def test_copies_give_the_same_value(loss_class):
    call = call_with(2)
    loss = loss_class(margin=0.3) if loss_class is not VLCLoss else loss_class(scale=30)
    expected = loss(**call)
    assert expected != loss_class()(**call)
    for twin in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        assert torch.equal(twin(**call), expected)
        twin.load_state_dict(loss.state_dict())


@CLASSES
def test_hyper_parameters_are_recorded(loss_class):
    loss = loss_class()
    assert set(loss._record_these) == {"margin", "scale"} & set(vars(loss))


@CLASSES
def test_it_works_beside_other_losses(loss_class):
    embeddings = embeddings_of(LABELS)
    both = losses.MultipleLosses([loss_class(), losses.ContrastiveLoss()])
    expected = loss_class()(embeddings, LABELS) + losses.ContrastiveLoss()(embeddings, LABELS)
    torch.testing.assert_close(both(embeddings, LABELS), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "labels and indices_tuple cannot both be None"),
        ({"ref_labels": None}, "ref_labels cannot be None when ref_emb is given without an indices_tuple"),
        ({"labels": LABELS[:4]}, r"labels must have the shape \(6,\), got \(4,\)"),
        ({"ref_labels": LABELS}, r"ref_labels must have the shape \(8,\), got \(6,\)"),
        ({"ref_emb": torch.ones(8, 3)}, r"ref_emb must have the dimension of embeddings, \(6, 5\), got \(8, 3\)"),
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
