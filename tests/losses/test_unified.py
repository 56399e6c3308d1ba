"""Margins, weights and functions of UnifiedLoss; the formulas themselves are tested in ``tests/functional``."""

import copy
import pickle

import pytest
import torch
import yaml
from pytorch_metric_learning.distances import CosineSimilarity
from torch import nn

from tests.helpers.loops import call_with, calls, leaves_of
from vl_plugins import create_loss
from vl_plugins.functional import Polynomial, unified_loss
from vl_plugins.integrations.key_values import parse_key_values
from vl_plugins.losses import UnifiedLoss

POLYNOMIALS = (Polynomial([0.5, -0.7]), Polynomial([0.03, 0.9]))


def plain(call, **options):
    """The formula on all similarities."""
    embeddings, ref_emb = call["embeddings"], call.get("ref_emb", call["embeddings"])
    similarities = CosineSimilarity()(embeddings, ref_emb)
    if "indices_tuple" in call:
        anchors, positives, *negatives = call["indices_tuple"]
        masks = torch.zeros(2, *similarities.shape, dtype=torch.bool)
        masks[0][anchors, positives] = True
        masks[1][tuple(negatives) if len(negatives) == 2 else (anchors, *negatives)] = True
    else:
        same = call["labels"][:, None] == call.get("ref_labels", call["labels"])
        masks = (same & ~torch.eye(6, dtype=torch.bool) if ref_emb is embeddings else same), ~same
    symmetric = ref_emb is not embeddings and "indices_tuple" not in call
    return unified_loss(similarities, *masks, symmetric=symmetric, **options)


def rising_margin(similarities, positive_mask, negative_mask):
    return 0.1 + 0.3 * similarities


class LearnedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, similarities):
        return 1 + self.slope * similarities


def leaf(*shape):
    return torch.linspace(0.1, 0.5, torch.Size(shape).numel()).reshape(shape).requires_grad_()


# Of 6 anchors and C candidates.
VARIANTS = {
    "learned margin": lambda columns: {"margin": leaf()},
    "margins of rows": lambda columns: {"margin": leaf(6)},
    "margins of pairs": lambda columns: {"margin": leaf(6, columns)},
    "margin function": lambda columns: {"margin": rising_margin},
    "weights of rows": lambda columns: {"weights": leaf(6)},
    "weights of pairs": lambda columns: {"weights": leaf(6, columns)},
    "weights of both kinds": lambda columns: {"weights": (LearnedWeights(), leaf(6, columns))},
    "all functions": lambda columns: {"margin": rising_margin, "weights": POLYNOMIALS, "relative": POLYNOMIALS[1]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_in_all_calls(variant):
    for what, call in calls():
        options = VARIANTS[variant](len(leaves_of(call)[-1]))
        loss = UnifiedLoss(**options, scale=10)
        tensors = [each for value in options.values() for each in (value if isinstance(value, tuple) else [value])]
        leaves = leaves_of(call) + [each for each in tensors if isinstance(each, torch.Tensor)]
        leaves += [each.slope for each in tensors if isinstance(each, LearnedWeights)]
        expected, actual = plain(call, **options, scale=10), loss(**call)
        assert abs(expected - plain(call, scale=10)) > 1e-5, what
        gradients = [torch.autograd.grad(3 * value, leaves) for value in (actual, expected)]
        assert all(gradient.abs().max() > 1e-4 for gradient in gradients[1]), what
        torch.testing.assert_close(actual, expected, atol=1e-7, rtol=1e-7)
        torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-6)


def test_defaults():
    loss = UnifiedLoss()
    assert (loss.margin, loss.scale, loss.symmetric) == (0.2, 50.0, True)
    torch.testing.assert_close(loss(**call_with(2)), plain(call_with(2), margin=0.2, scale=50.0))


def test_options_from_a_command_line_and_from_yaml():
    expected = UnifiedLoss(relative=Polynomial([0, 1, 0.5]), weights=POLYNOMIALS)(**call_with(2))
    for options in (
        parse_key_values("relative=[0,1,0.5] weights=([0.5,-0.7],[0.03,0.9])".split(), "--loss-kwargs"),
        yaml.safe_load("{relative: [0, 1, 0.5], weights: [[0.5, -0.7], [0.03, 0.9]]}"),
    ):
        assert torch.equal(create_loss("unified", **options)(**call_with(2)), expected)
    assert UnifiedLoss(weights=(0.5, -0.7)).weights == POLYNOMIALS[0]
    assert UnifiedLoss(weights=(torch.sigmoid, [0.03, 0.9])).weights == (torch.sigmoid, POLYNOMIALS[1])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"margin": -0.1}, "margin must be a finite number >= 0, got -0.1"),
        ({"margin": "0.2"}, "margin must be a number, a tensor or a function, got '0.2'"),
        ({"margin": torch.tensor([0.1, -0.2])}, "margin must be >= 0 everywhere, got a tensor with the minimum -0.2"),
        ({"margin": torch.tensor(float("inf"))}, "margin must be finite everywhere"),
        ({"weights": torch.full((2, 2), float("nan"))}, "weights must be finite everywhere"),
        ({"weights": (torch.tensor(2.0), torch.exp)}, r"weights of the positives must have the shape .*, got \(\)"),
        ({"weights": (torch.sigmoid, "1")}, "weights of the negatives must be a function or the coefficients of a p"),
        ({"weights": (0.5, torch.sigmoid)}, "weights must be a function or the coefficients of a polynomial: coeff"),
        ({"weights": ([1], [1], [1])}, "weights must be a function or .*: coefficients must be "),
        ({"relative": ["1e-3"]}, "relative must be a function or .*: coefficients must be .*'1e-3'"),
    ],
)
def test_wrong_options(option, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        UnifiedLoss(**option)


@pytest.mark.parametrize("option", [{"margin": leaf(5)}, {"margin": leaf(6, 8)}, {"weights": leaf(6, 8)}])
def test_tensors_of_another_batch(option):
    (name, value) = next(iter(option.items()))
    with pytest.raises(ValueError, match=rf"{name}.* must .*\(6,( 9)?\), got \({str(tuple(value.shape))[1:-1]}\)"):
        UnifiedLoss(**option)(**call_with(2))


@pytest.mark.parametrize("variant", ["all functions", "margins of pairs", "weights of both kinds"])
def test_copies_and_compiled_losses(variant):
    loss, call = UnifiedLoss(**VARIANTS[variant](9)), call_with(2)
    expected = loss(**call)
    for twin in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        twin.load_state_dict(loss.state_dict())
        assert torch.equal(twin(**call), expected)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(loss, backend="eager")(**call), expected)


def test_learned_parameters_are_those_of_the_loss():
    margin, module = nn.Parameter(torch.tensor(0.3)), LearnedWeights()
    assert list(UnifiedLoss(margin=margin).parameters()) == [margin]
    for weights in (module, (torch.sigmoid, module), (module, module)):
        loss = UnifiedLoss(weights=weights)
        assert list(loss.parameters()) == [module.slope]
        twin = copy.deepcopy(loss)
        with torch.no_grad():
            next(twin.parameters()).fill_(0.0)
        assert abs(twin(**call_with(2)) - loss(**call_with(2))) > 1e-6
    assert list(UnifiedLoss(weights=([1], [1])).state_dict()) == []


def test_only_numbers_and_tensors_are_recorded():
    assert UnifiedLoss(margin=torch.ones(2))._record_these == ["margin", "scale"]
    assert UnifiedLoss(margin=rising_margin)._record_these == ["scale"]
