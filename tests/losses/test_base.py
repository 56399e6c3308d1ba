"""The call that all losses share; their values with any distance and reducer are in ``tests/pml``."""

import pytest
import torch
from pytorch_metric_learning import distances, reducers, regularizers

from tests.helpers import components
from tests.helpers.loops import (
    LABELS,
    LOSSES,
    OTHER_LABELS,
    REFERENCES,
    call_with,
    calls,
    check_call,
    embeddings_of,
    leaves_of,
    make_loss,
)
from vl_plugins import losses
from vl_plugins.losses.base import PairLoss

WITH_SCALE = pytest.mark.parametrize("name", ["unified", "vlc"])
ALL_REDUCERS = [reducer for key, reducer in components.all_of("reducer").items() if key != "DoNothingReducer"]


def test_every_loss_has_loops():
    assert {type(make_loss(name)).__name__ for name in REFERENCES} == set(losses.__all__)


@LOSSES
def test_image_to_text_only(name):
    call = call_with(2)
    check_call(name, call, loss=make_loss(name, symmetric=False), symmetric=False)
    check_call(name, call | {"symmetric": False}, symmetric=False)
    check_call(name, call | {"symmetric": True}, loss=make_loss(name, symmetric=False))


@LOSSES
def test_labels_that_are_one_object_do_not_make_one_set(name):
    labels = torch.arange(6)
    images, texts = embeddings_of(labels), embeddings_of(labels, seed=1)
    call = {"embeddings": images, "labels": labels, "ref_emb": texts, "ref_labels": labels}
    check_call(name, call)


@LOSSES
def test_references_that_are_the_embeddings_are_one_set(name):
    call = call_with(1)
    reference = {"ref_emb": call["embeddings"], "ref_labels": LABELS.clone()}
    assert torch.equal(make_loss(name)(**call, **reference), make_loss(name)(**call))


@LOSSES
def test_labels_may_be_left_out_with_an_indices_tuple(name):
    for what, call in calls():
        if "indices_tuple" in call:
            check_call(name, call | {"labels": None, "ref_labels": None}, what=what)


@pytest.mark.parametrize("name", ["goal", "triplet_hn", "triplet_sh", "unified", "vlc"])
def test_losses_of_some_rows_and_of_the_others_add_up(name):
    call = call_with(2)
    positives = call["labels"][:, None] == call["ref_labels"]
    for options in ({}, {"reducer": reducers.SumReducer()}, {"embedding_regularizer": regularizers.LpRegularizer()}):
        loss = make_loss(name, symmetric=False, **options)
        total = 0
        for rows in (slice(2), slice(2, 6)):
            part = {key: call[key][rows] for key in ("embeddings", "labels")}
            total = total + loss(**(call | part)) * positives[rows].sum() / positives.sum()
        values = total, loss(**call)
        gradients = [torch.autograd.grad(value, call["ref_emb"])[0] for value in values]
        adds_up = torch.allclose(*values) and torch.allclose(*gradients)
        assert adds_up == loss.adds_up_over_rows() == (name != "goal" and not options)  # whose weights are relative
    own = type("Own", (type(loss),), {})
    assert not own().adds_up_over_rows(), "a subclass may have another formula"


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-D", "1-D"])
@WITH_SCALE
def test_scale_of_a_call(name, shape):
    options = REFERENCES[name].options | {"scale": 5.0}
    for what, call in calls():
        scale = torch.full(shape, 5.0, dtype=torch.float64, requires_grad=True)
        check_call(name, call | {"scale": scale}, options=options, what=what)
        check_call(name, call | {"scale": 5}, options=options, what=what)

        def value(scale, call=call):
            return make_loss(name)(**call, scale=scale)

        # A second backward pass computes the similarities again, in another order.
        assert torch.autograd.gradcheck(value, scale, nondet_tol=1e-12), what


@WITH_SCALE
def test_scale_has_a_gradient_without_pairs(name):
    call = {"embeddings": embeddings_of(LABELS), "labels": 0 * LABELS, "ref_emb": embeddings_of(LABELS)}
    no_pairs = {"indices_tuple": (LABELS[:0],) * 4}
    for case in ({"ref_labels": LABELS + 10}, {"ref_labels": 0 * LABELS}, no_pairs):  # no positives, no negatives
        for reducer in (None, reducers.AvgNonZeroReducer()):
            scale = torch.tensor(5.0, requires_grad=True)
            value = make_loss(name, reducer=reducer)(**call, **case, scale=scale)
            assert (value, *torch.autograd.grad(value, scale)) == (0, 0)


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("unified", torch.ones(2), r"scale must have one element, got shape \(2,\)"),
        ("unified", 0, "scale must be a finite number > 0, got 0"),
        ("vlc", "learned", "scale must be a finite number > 0, got 'learned'"),
        ("triplet_hn", torch.tensor(5.0), "TripletHNLoss has no scale"),
        ("smooth_chamfer", 5.0, "TripletHNLoss has no scale"),
    ],
)
def test_wrong_scales(name, scale, message):
    with pytest.raises(ValueError, match=message):
        make_loss(name)(**call_with(2), scale=scale)
    if name in ("unified", "vlc"):
        with pytest.raises(ValueError, match="scale must be a finite number > 0"):
            make_loss(name, scale=scale)


EMPTY = {
    "no positives": (torch.arange(4), None),
    "all labels equal": (torch.zeros(4, dtype=torch.long), None),
    "one item": (torch.zeros(1, dtype=torch.long), None),
    "no items": (torch.zeros(0, dtype=torch.long), None),
    "no triplets": (torch.arange(4), (torch.zeros(0, dtype=torch.long),) * 3),
    "no pairs": (torch.arange(4), (torch.zeros(0, dtype=torch.long),) * 4),
}


@pytest.mark.parametrize("case", EMPTY)
@LOSSES
def test_nothing_to_compare(name, case):
    labels, indices_tuple = EMPTY[case]
    for sets in (1, 2):
        call = {"embeddings": embeddings_of(labels), "labels": labels, "indices_tuple": indices_tuple}
        if sets == 2:
            ref_labels = labels + (10 if case == "no positives" else 0)
            call |= {"ref_emb": embeddings_of(labels, seed=1), "ref_labels": ref_labels}
        for reducer in ALL_REDUCERS:
            loss = make_loss(name, reducer=reducer)
            value = loss(**call)
            assert value == 0
            for gradient in torch.autograd.grad(value, leaves_of(call)):
                assert torch.equal(gradient, torch.zeros_like(gradient))
            for key in ("embeddings", "ref_emb")[: sets if len(labels) else 0]:
                bad = call[key].detach().clone()
                bad[0, 0] = torch.nan
                assert loss(**(call | {key: bad})).isnan()


@LOSSES
def test_nan_is_never_hidden(name):
    call = call_with(2, candidates=len(LABELS))
    for distance in (distances.CosineSimilarity(), distances.DotProductSimilarity(), distances.LpDistance()):
        if REFERENCES[name].needs_similarity and not distance.is_inverted:
            continue
        for reducer in ALL_REDUCERS:
            loss = make_loss(name, distance=distance, reducer=reducer)
            for key, row, number in (("embeddings", 0, torch.nan), ("ref_emb", 3, torch.inf)):
                bad = call[key].detach().clone()
                bad[row, 2] = number
                value = loss(**(call | {key: bad.requires_grad_()}))
                assert value.isnan()
                assert torch.autograd.grad(value, bad)[0].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@LOSSES
def test_half_precision_is_computed_in_float32_and_rounded_once(name, dtype):
    call = call_with(2, dtype)
    single = call | {key: call[key].detach().float().requires_grad_() for key in ("embeddings", "ref_emb")}
    loss = make_loss(name, embedding_regularizer=regularizers.LpRegularizer())
    expected = loss(**single)
    gradients = torch.autograd.grad(expected, leaves_of(single))
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            actual = loss(**call)
        assert actual.dtype == torch.float32
        assert torch.equal(actual, expected)
        for gradient, other in zip(torch.autograd.grad(actual, leaves_of(call)), gradients, strict=True):
            assert torch.equal(gradient, other.to(dtype))


@LOSSES
def test_two_types_of_embeddings_are_compared_in_the_larger(name):
    call = call_with(2)
    call["ref_emb"] = call["ref_emb"].detach().half().requires_grad_()
    value = make_loss(name)(**call)
    assert value.dtype == torch.float64
    assert torch.autograd.grad(value, call["ref_emb"])[0].dtype == torch.float16


@LOSSES
def test_identical_embeddings_have_finite_gradients(name):
    embeddings = torch.ones(6, 5, requires_grad=True)
    for distance in (distances.CosineSimilarity(), distances.LpDistance()):
        if REFERENCES[name].needs_similarity and not distance.is_inverted:
            continue
        for other in ({}, {"ref_emb": torch.ones(6, 5), "ref_labels": LABELS}):
            value = make_loss(name, distance=distance)(embeddings, LABELS, **other)
            assert value > 0
            assert torch.autograd.grad(value, embeddings)[0].isfinite().all()


class Pull(regularizers.BaseRegularizer):
    """The mean of the embeddings times that of the other modality, which no regularizer of PML sees."""

    takes_ref_emb = True

    def forward(self, embeddings, ref_emb=None):
        return embeddings.mean() * (1 if ref_emb is None else ref_emb.mean())


@LOSSES
def test_regularizers_that_take_references(name):
    for sets in (1, 2):
        call = call_with(sets)
        leaves = leaves_of(call)
        term = 0.5 * leaves[0].mean() * (leaves[1].mean() if sets == 2 else 1)
        found = make_loss(name, embedding_regularizer=Pull(), embedding_reg_weight=0.5)(**call)
        expected = make_loss(name)(**call) + term
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))


@LOSSES
def test_statistics_and_recorded_hyper_parameters(name):
    call = call_with(2)
    loss = make_loss(name, distance=distances.CosineSimilarity(collect_stats=True), collect_stats=True)
    check_call(name, call, loss=loss)
    norm = call["embeddings"].norm(dim=1).mean().item()
    assert loss.distance.initial_avg_query_norm == pytest.approx(norm)
    recorded = set(getattr(loss, "_record_these", ()))
    assert recorded == {key for key, value in vars(loss).items() if isinstance(value, float)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "^labels must be given without an indices_tuple, got None"),
        ({"ref_labels": None}, "^ref_labels must be given without an indices_tuple, got None"),
        ({"labels": LABELS.tolist()}, "^labels must be a tensor, got list"),
        ({"ref_labels": OTHER_LABELS.numpy()}, "^ref_labels must be a tensor, got ndarray"),
        ({"labels": LABELS[:4]}, r"^labels must have the shape \(6,\), got \(4,\)"),
        ({"ref_labels": LABELS}, r"^ref_labels must have the shape \(9,\), got \(6,\)"),
        (
            {"ref_emb": torch.ones(9, 3)},
            r"ref_emb must have the dimension of embeddings, \(6, 5\), got \(9, 3\)|"
            r"embeddings must be sets .*, got \(6, 5\) and \(9, 3\)",
        ),
        ({"ref_emb": torch.ones(9, 5, device="meta")}, "ref_emb must be on the device of embeddings, cpu, got meta"),
        ({"indices_tuple": (LABELS, LABELS)}, r"indices_tuple must have 3 tensors .* or 4 .*, got 2"),
    ],
)
@LOSSES
def test_wrong_input(name, change, message):
    with pytest.raises(ValueError, match=message):
        make_loss(name)(**(call_with(2) | change))


def test_pair_loss_is_to_be_derived_from():
    with pytest.raises(NotImplementedError):
        PairLoss()(**call_with(1))
