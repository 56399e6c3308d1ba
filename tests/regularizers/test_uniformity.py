import pytest
import torch
from pytorch_metric_learning import losses, reducers

from tests.helpers.loops import call_with, check
from tests.reference import regularizers as reference
from tests.regularizers.test_diversity import ELEMENTS, padded
from vl_plugins.components import create_component
from vl_plugins.losses import UnifiedLoss
from vl_plugins.regularizers import UniformityRegularizer

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


@DTYPES
@pytest.mark.parametrize("options", [{}, {"t": 0.5}], ids=str)
def test_elements_of_different_items(options, dtype):
    sets = padded(dtype)
    elements = [item[:number].tolist() for item, number in zip(sets, ELEMENTS, strict=True)]
    value, gradients = reference.uniformity(elements, options.get("t", 2.0))
    gradient = torch.zeros(sets.shape, dtype=torch.float64)
    for item, of_item in enumerate(gradients):
        if of_item:
            gradient[item, : len(of_item)] = torch.tensor(of_item, dtype=torch.float64)
    for call in (
        lambda: UniformityRegularizer(**options)(sets),
        lambda: UniformityRegularizer(set_size=3, **options)(sets.flatten(1)),
    ):
        # The value is negative, which the comparison takes for a case that shows nothing.
        check(-call(), [sets], -value, [-gradient])


@pytest.mark.parametrize("loss_class", [losses.ContrastiveLoss, UnifiedLoss])
def test_in_losses(loss_class):
    call = call_with(1)
    embeddings = call["embeddings"]
    plain = loss_class()(**call)
    value, gradients = reference.uniformity([[vector] for vector in embeddings.tolist()], 2.0)
    of_term = torch.tensor(gradients, dtype=torch.float64)[:, 0]
    loss = loss_class(embedding_regularizer=UniformityRegularizer(), embedding_reg_weight=0.1)
    (gradient,) = torch.autograd.grad(plain, embeddings, retain_graph=True)
    check(loss(**call), [embeddings], plain.item() + 0.1 * value, [gradient + 0.1 * of_term])


def test_nothing_to_compare_is_zero_in_the_graph():
    for shape in ((1, 3), (0, 3), (1, 2, 3)):
        embeddings = torch.ones(shape, requires_grad=True)
        value = UniformityRegularizer()(embeddings)
        assert value == 0
        assert torch.equal(torch.autograd.grad(value, embeddings)[0], torch.zeros(shape))


def test_not_a_number_is_not_hidden():
    for place in ((0, 0, 0), (3, 1, 2)):
        sets = padded().detach()
        sets[place] = float("nan")
        assert UniformityRegularizer()(sets).isnan()
    assert UniformityRegularizer()(torch.full((1, 3), float("nan"))).isnan()


def test_by_name_and_recorded():
    regularizer = create_component("regularizer", "UniformityRegularizer", t=3, set_size=2)
    assert (regularizer.t, regularizer.set_size) == (3.0, 2)
    assert regularizer._record_these == ["t", "set_size"]
    loss_dict = UniformityRegularizer(reducer=reducers.DoNothingReducer())(torch.eye(3))
    assert loss_dict["loss"]["reduction_type"] == "already_reduced"
    assert loss_dict["loss"]["losses"] == UniformityRegularizer()(torch.eye(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"t": 0}, "t must be a finite number > 0, got 0"), ({"set_size": 0}, "set_size must be an integer >= 1, got 0")],
)
def test_wrong_hyper_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        UniformityRegularizer(**options)
