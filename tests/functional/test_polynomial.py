import copy
import math
import pickle

import pytest
import torch

from vl_plugins.functional import Polynomial


@pytest.mark.parametrize("coefficients", [[2], [0.5, -0.7], [0.25, -3, 0, 2, 1]], ids=str)
def test_value_and_derivative(coefficients):
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    value = Polynomial(coefficients)(x)
    torch.testing.assert_close(value, sum(c * x**k for k, c in enumerate(coefficients)))
    if len(coefficients) > 1:
        expected = sum(k * c * x.detach() ** (k - 1) for k, c in enumerate(coefficients) if k > 0)
        torch.testing.assert_close(torch.autograd.grad(value.sum(), x)[0], expected)
    assert Polynomial(coefficients)(x.float()).dtype == torch.float32


def test_copies_are_equal():
    polynomial = Polynomial([0, 1, 0.5])
    assert pickle.loads(pickle.dumps(polynomial)) == copy.deepcopy(polynomial) == Polynomial((0.0, 1.0, 0.5))
    assert polynomial != Polynomial([0, 1])
    assert repr(polynomial) == "Polynomial(coefficients=(0.0, 1.0, 0.5))"
    assert len({polynomial, Polynomial([0, 1, 0.5])}) == 1


@pytest.mark.parametrize("coefficients", [[], [math.nan], ["1"], [True], "12", 3, None, [[1, 2]]], ids=str)
def test_wrong_coefficients(coefficients):
    with pytest.raises(ValueError, match=r"^coefficients must be .* finite number"):
        Polynomial(coefficients)
