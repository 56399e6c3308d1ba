import pytest
import torch
from pytorch_metric_learning import losses, reducers

from tests.helpers import components
from tests.helpers.loops import check
from tests.reference import regularizers as reference
from vl_plugins.components import create_component
from vl_plugins.losses import UnifiedLoss
from vl_plugins.regularizers import DiversityRegularizer

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
ELEMENTS = (3, 1, 2, 0, 3)


def padded(dtype=torch.float64):
    """Sets of several sizes, (5, 3, 4)."""
    generator = torch.Generator().manual_seed(0)
    sets = torch.randn(5, 3, 4, dtype=torch.float64, generator=generator)
    for item, elements in zip(sets, ELEMENTS, strict=True):
        item[elements:] = 0
    return sets.to(dtype).requires_grad_()


def of_loops(sets, scale=2.0):
    """The values of the items, and their gradients, (5, 3, 4) each."""
    values, gradients = reference.diversity(
        [item[:elements].tolist() for item, elements in zip(sets, ELEMENTS, strict=True)], scale
    )
    whole = []
    for item, gradient in enumerate(gradients):
        of_item = torch.zeros(sets.shape, dtype=torch.float64)
        if gradient:
            of_item[item, : len(gradient)] = torch.tensor(gradient, dtype=torch.float64)
        whole.append(of_item)
    return values, whole


@DTYPES
@pytest.mark.parametrize("options", [{}, {"scale": 0.5}], ids=str)
def test_mean_of_the_items_with_several_elements(options, dtype):
    sets = padded(dtype)
    values, gradients = of_loops(sets, **options)
    value, gradient = sum(values) / 3, sum(gradients) / 3
    check(DiversityRegularizer(**options)(sets), [sets], value, [gradient])
    check(DiversityRegularizer(set_size=3, **options)(sets.flatten(1)), [sets], value, [gradient])


@DTYPES
def test_one_value_for_each_item_that_has_one(dtype):
    sets = padded(dtype)
    values, _ = of_loops(sets)
    given = DiversityRegularizer(reducer=reducers.DoNothingReducer())(sets)["loss"]
    assert given["reduction_type"] == "element"
    assert given["indices"].tolist() == [0, 2, 4]
    torch.testing.assert_close(given["losses"].double(), torch.tensor([values[0], values[2], values[4]]).double())


def test_every_reducer():
    sets = padded()
    of_items = [value for value in of_loops(sets)[0] if value > 0]
    found = components.all_of("reducer")
    # The labels of a regularizer are the numbers of the items.
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0, 1.5], dtype=torch.float64)
    found["ThresholdReducer"] = reducers.ThresholdReducer(low=0.0)
    found["ClassWeightedReducer"] = reducers.ClassWeightedReducer(weights)
    means = {
        "AvgNonZeroReducer": sum(of_items) / 3,
        "ClassWeightedReducer": (0.5 * of_items[0] + of_items[1] + 1.5 * of_items[2]) / 3,
        "DivisorReducer": sum(of_items) / 3,
        "MeanReducer": sum(of_items) / 3,
        "MultipleReducers": sum(of_items),
        "SumReducer": sum(of_items),
        "ThresholdReducer": sum(of_items) / 3,
    }
    assert min(of_items) > 1e-3
    for name, expected in means.items():
        actual = DiversityRegularizer(reducer=found[name])(sets)
        torch.testing.assert_close(actual.item(), expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("shape", [(4, 1, 3), (4, 3), (0, 3, 2), (0, 3)], ids=str)
def test_nothing_to_compare_is_zero_in_the_graph(shape):
    embeddings = torch.ones(shape, requires_grad=True)
    value = DiversityRegularizer()(embeddings)
    assert value == 0
    assert torch.equal(torch.autograd.grad(value, embeddings)[0], torch.zeros(shape))
    assert DiversityRegularizer()(torch.full((1, *shape[1:]), float("nan"))).isnan()


@pytest.mark.parametrize("loss_class", [losses.ContrastiveLoss, losses.TripletMarginLoss, UnifiedLoss])
def test_in_losses_of_packed_sets(loss_class):
    sets, labels = padded(), torch.tensor([0, 1, 0, 1, 0])
    packed = sets.flatten(1)
    plain = loss_class()(packed, labels)
    regularizer = DiversityRegularizer(set_size=3)
    actual = loss_class(embedding_regularizer=regularizer, embedding_reg_weight=0.5)(packed, labels)
    values, gradients = of_loops(sets)
    (gradient,) = torch.autograd.grad(plain, sets, retain_graph=True)
    check(actual, [sets], plain.item() + 0.5 * sum(values) / 3, [gradient + 0.5 * sum(gradients) / 3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_single_under_autocast_too(dtype):
    sets = padded(dtype)
    expected = DiversityRegularizer()(sets.detach().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = DiversityRegularizer()(sets)
    assert torch.equal(actual, expected)
    assert torch.autograd.grad(actual, sets)[0].dtype == dtype


def test_not_a_number_is_not_hidden():
    for place in ((0, 0, 0), (1, 0, 2), (3, 1, 2)):
        sets = padded().detach()
        sets[place] = float("nan")
        assert DiversityRegularizer()(sets).isnan()


def test_by_name_and_recorded():
    regularizer = create_component("regularizer", "DiversityRegularizer", scale=3, reducer="SumReducer")
    assert (regularizer.scale, regularizer.set_size, type(regularizer.reducer)) == (3.0, 1, reducers.SumReducer)
    assert regularizer._record_these == ["scale", "set_size"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": -1}, "scale must be a finite number > 0, got -1"),
        ({"set_size": 1.0}, "set_size must be an integer >= 1, got 1.0"),
    ],
)
def test_wrong_hyper_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        DiversityRegularizer(**options)


@pytest.mark.parametrize("shape", [(5, 7), (5,), (5, 2, 2, 2)], ids=str)
def test_wrong_shapes(shape):
    with pytest.raises(ValueError, match=r"embeddings must be sets \(B, K, D\) .*\(B, 2 \* D\).*, got \(5,"):
        DiversityRegularizer(set_size=2)(torch.ones(shape))
