import math

import pytest
import torch
from pytorch_metric_learning import losses, reducers

from tests.helpers.loops import LOSSES, TOLERANCE, call_with, check, expected, leaves_of, make_loss
from tests.helpers.sets import normal
from tests.reference import regularizers as reference
from vl_plugins.losses import UnifiedLoss
from vl_plugins.registry import create_component
from vl_plugins.regularizers import DiversityRegularizer, MMDRegularizer, UniformityRegularizer

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
LOSS_CLASSES = pytest.mark.parametrize("loss_class", [losses.ContrastiveLoss, UnifiedLoss])
ELEMENTS = (3, 1, 2, 0, 3)


def padded(dtype=torch.float64, seed=0):
    """Sets of several sizes, (5, 3, 4), and their elements as lists."""
    sets = normal(5, 3, 4, seed=seed).detach()
    for item, number in zip(sets, ELEMENTS, strict=True):
        item[number:] = 0
    sets = sets.to(dtype).requires_grad_()
    return sets, [item[:number].tolist() for item, number in zip(sets, ELEMENTS, strict=True)]


def put_back(gradients):
    """Return the gradients of the elements as (5, 3, 4)."""
    whole = torch.zeros(5, 3, 4, dtype=torch.float64)
    for item, gradient in zip(whole, gradients, strict=True):
        if gradient:
            item[: len(gradient)] = torch.tensor(gradient, dtype=torch.float64)
    return whole


def mmd(images, texts, gamma=0.5, squared=False):
    """The loops' value and gradients, of clouds without padding."""
    clouds = [sets.flatten(0, 1).tolist() for sets in (images, texts)]
    value, gradients = reference.mmd_of_directions(*clouds, gamma, squared)
    sides = zip(gradients, (images, texts), strict=True)
    return value, [torch.tensor(gradient, dtype=torch.float64).view_as(sets) for gradient, sets in sides]


@DTYPES
@pytest.mark.parametrize("options", [{}, {"scale": 0.5}], ids=str)
def test_diversity(options, dtype):
    """Of the items with several elements."""
    sets, elements = padded(dtype)
    values, gradients = reference.diversity(elements, options.get("scale", 2.0))
    value, gradient = sum(values) / 3, put_back(gradients) / 3
    check(DiversityRegularizer(**options)(sets), [sets], value, [gradient])
    check(DiversityRegularizer(set_size=3, **options)(sets.flatten(1)), [sets], value, [gradient])
    found = DiversityRegularizer(reducer=reducers.DoNothingReducer(), **options)(sets)["loss"]
    assert found["reduction_type"] == "element"
    assert found["indices"].tolist() == [0, 2, 4]
    expected_losses = torch.tensor(values, dtype=torch.float64)[[0, 2, 4]]
    torch.testing.assert_close(found["losses"].double(), expected_losses, atol=TOLERANCE[dtype], rtol=0)
    # The labels of a regularizer are the numbers of the items.
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0, 1.5], dtype=dtype)
    weighted = DiversityRegularizer(reducer=reducers.ClassWeightedReducer(weights), **options)(sets)
    assert weighted.item() == pytest.approx((0.5 * values[0] + values[2] + 1.5 * values[4]) / 3, rel=1e-5)


@DTYPES
@pytest.mark.parametrize("options", [{}, {"t": 0.5}], ids=str)
def test_uniformity(options, dtype):
    sets, elements = padded(dtype)
    value, gradients = reference.uniformity(elements, options.get("t", 2.0))
    for packed in (False, True):
        actual = UniformityRegularizer(set_size=3, **options)(sets.flatten(1) if packed else sets)
        check(actual, [sets], value, [put_back(gradients)], least=-9.0)  # the value is negative


@DTYPES
@pytest.mark.parametrize("options", [{}, {"gamma": 2.0}, {"squared": True}], ids=str)
def test_mmd(options, dtype):
    images, texts = normal(5, 3, 4, dtype=dtype), normal(4, 2, 4, seed=1, dtype=dtype)
    check(MMDRegularizer(**options)(images, texts), [images, texts], *mmd(images, texts, **options))
    packed = MMDRegularizer(set_size=3, **options)(images.flatten(1), texts.flatten(1))
    check(packed, [images, texts], *mmd(images, texts, **options))
    with_padding = torch.cat([images, torch.zeros_like(images)], dim=1)
    check(MMDRegularizer(**options)(with_padding, texts), [images, texts], *mmd(images, texts, **options))
    plain = MMDRegularizer(**options)(images[:, 0], texts[:, 0])
    value, _ = mmd(images[:, :1], texts[:, :1], **options)
    torch.testing.assert_close(plain.item(), value, atol=TOLERANCE[dtype], rtol=0)
    assert MMDRegularizer()(torch.zeros(2, 3, 4, dtype=dtype), texts) == 0


@LOSS_CLASSES
def test_diversity_and_uniformity_in_losses(loss_class):
    sets, _ = padded()
    labels = torch.tensor([0, 1, 0, 1, 0])
    plain = loss_class()(sets.flatten(1), labels)
    (gradient,) = torch.autograd.grad(plain, sets)
    for regularizer in (DiversityRegularizer(set_size=3), UniformityRegularizer(set_size=3)):
        term = 0.1 * regularizer(sets)
        (term_gradient,) = torch.autograd.grad(term, sets)
        loss = loss_class(embedding_regularizer=regularizer, embedding_reg_weight=0.1)
        check(loss(sets.flatten(1), labels), [sets], (plain + term).item(), [gradient + term_gradient], least=-9.0)


@LOSSES
def test_losses_of_this_package_pass_their_references_to_mmd(name):
    index = torch.tensor([0, 1, 5])
    pairs = (index, torch.tensor([1, 4, 5]), index, torch.tensor([2, 3, 6]))
    for indices_tuple, reducer in ((None, None), (None, reducers.SumReducer()), (pairs, None)):
        call = call_with(2) | {"indices_tuple": indices_tuple}
        loss = make_loss(name, embedding_regularizer=MMDRegularizer(), embedding_reg_weight=0.25, reducer=reducer)
        value, gradients = expected(name, call, reducer=reducer)
        term, term_gradients = mmd(*(leaf[:, None] for leaf in leaves_of(call)))
        assert term > 0.01
        gradients = [one + 0.25 * other[:, 0] for one, other in zip(gradients, term_gradients, strict=True)]
        check(loss(**call), leaves_of(call), value + 0.25 * term, gradients)


def test_mmd_needs_two_modalities():
    message = "^MMDRegularizer compares the embeddings of two modalities, got embeddings without ref_emb: .* vl_plugins"
    loss = make_loss("unified", embedding_regularizer=MMDRegularizer())
    loss(**call_with(2))
    one = call_with(1)
    for call in (one, one | {"ref_emb": one["embeddings"], "ref_labels": one["labels"]}):
        with pytest.raises(ValueError, match=message):
            loss(**call)
    with pytest.raises(ValueError, match=message):  # the host's losses keep ref_emb to themselves
        losses.ContrastiveLoss(embedding_regularizer=MMDRegularizer())(**call_with(2))


REGULARIZERS = {
    "diversity": DiversityRegularizer(),
    "mmd": lambda sets: MMDRegularizer()(sets[:3], sets[3:]),
    "uniformity": UniformityRegularizer(),
}


@pytest.mark.parametrize("name", REGULARIZERS)
def test_half_precision_and_not_a_number(name):
    sets, _ = padded(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = REGULARIZERS[name](sets)
    assert torch.equal(value, REGULARIZERS[name](sets.detach().float()))
    assert torch.autograd.grad(value, sets)[0].dtype == torch.bfloat16
    for place in ((0, 0, 0), (1, 0, 2), (3, 1, 2)):
        sets = padded()[0].detach()
        sets[place] = math.nan
        assert REGULARIZERS[name](sets).isnan()


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 3), (0, 3, 2), (0, 3)], ids=str)
@pytest.mark.parametrize("name", ["diversity", "uniformity"])
def test_nothing_to_compare_is_zero_in_the_graph(name, shape):
    embeddings = torch.ones(shape, requires_grad=True)
    value = REGULARIZERS[name](embeddings)
    assert value == 0
    assert torch.equal(torch.autograd.grad(value, embeddings)[0], torch.zeros(shape))


@pytest.mark.parametrize("name", ["DiversityRegularizer", "MMDRegularizer", "UniformityRegularizer"])
def test_options(name):
    option = {"DiversityRegularizer": "scale", "MMDRegularizer": "gamma", "UniformityRegularizer": "t"}[name]
    regularizer = create_component("regularizer", name, **{option: 3}, set_size=2, reducer="SumReducer")
    assert (getattr(regularizer, option), regularizer.set_size) == (3, 2)
    assert isinstance(regularizer.reducer, reducers.SumReducer)
    assert set(regularizer._record_these) == {option, "set_size"}
    for wrong in (option, "set_size"):
        with pytest.raises(ValueError, match=f"{wrong} must be"):
            create_component("regularizer", name, **{wrong: 0})
    with pytest.raises(ValueError, match=r"embeddings must be sets \(B, K, D\) .*\(B, 2 \* D\).*, got \(5, 7\)"):
        regularizer(torch.ones(5, 7), *([torch.ones(5, 6)] if option == "gamma" else []))
