import copy
import pickle
from fractions import Fraction

import pytest
import torch

from vl_plugins.functional import Polynomial


@pytest.mark.parametrize("coefficients", [[2], [0, 1], [0.5, -0.7], [1, 0, 0.5], [0.25, -3, 0, 2, 1]], ids=str)
def test_value_and_derivative(coefficients):
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    value = Polynomial(coefficients)(x)
    expected = [
        [float(sum(Fraction(c) * Fraction(v) ** k for k, c in enumerate(coefficients))) for v in row]
        for row in x.tolist()
    ]
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64))
    if len(coefficients) > 1:
        (gradient,) = torch.autograd.grad(value.sum(), x)
        expected = sum(k * c * x.detach() ** (k - 1) for k, c in enumerate(coefficients) if k > 0)
        torch.testing.assert_close(gradient, torch.as_tensor(expected, dtype=torch.float64).expand_as(x))


def test_type_of_the_input_is_kept():
    assert Polynomial([1, 2])(torch.ones(2, dtype=torch.float32)).dtype == torch.float32
    assert Polynomial([1])(torch.ones(2, 3, dtype=torch.float64)).dtype == torch.float64


def test_copies_are_equal():
    polynomial = Polynomial([0, 1, 0.5])
    assert pickle.loads(pickle.dumps(polynomial)) == copy.deepcopy(polynomial) == Polynomial((0.0, 1.0, 0.5))
    assert polynomial != Polynomial([0, 1])
    assert repr(polynomial) == "Polynomial(coefficients=(0.0, 1.0, 0.5))"
    assert len({polynomial, Polynomial([0, 1, 0.5])}) == 1


@pytest.mark.parametrize(
    "coefficients", [[], [float("nan")], [1, float("inf")], ["1"], [True], "12", 3, None, [[1, 2]]], ids=str
)
def test_wrong_coefficients(coefficients):
    with pytest.raises(ValueError, match="coefficients must be one or more finite numbers, got "):
        Polynomial(coefficients)
