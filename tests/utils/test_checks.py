import numpy as np
import pytest
import torch

from vl_plugins.utils.checks import adaptive_margin, finite, finite_tensor, integer, non_negative, positive


@pytest.mark.parametrize("value", [0.5, 1, np.float32(0.5)])
@pytest.mark.parametrize("check", [finite, non_negative, positive, adaptive_margin])
def test_numbers_become_floats(check, value):
    checked = check("margin", value)
    assert (checked, type(checked)) == (value, float)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.2", None, True])
@pytest.mark.parametrize("check", [finite, non_negative, positive])
def test_not_a_number(check, value):
    with pytest.raises(ValueError, match=f"^margin must be a finite number.*, got {value!r}$"):
        check("margin", value)


def test_bounds():
    assert (finite("offset", -0.5), non_negative("margin", 0)) == (-0.5, 0)
    with pytest.raises(ValueError, match=r"^margin must be a finite number >= 0, got -0\.1$"):
        non_negative("margin", -0.1)
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"^scale must be a finite number > 0, got {value}$"):
            positive("scale", value)


@pytest.mark.parametrize("value", [0, 1.0, "1", None, True])
def test_integers(value):
    assert integer("k", 1, least=1) == 1
    with pytest.raises(ValueError, match=f"^k must be an integer >= 1, got {value!r}$"):
        integer("k", value, least=1)


def test_tensors_and_functions_as_margins():
    for value in (torch.tensor(0.0), torch.tensor([0.0, 0.5]), torch.zeros(0), max):
        assert adaptive_margin("margin", value) is value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "a finite number >= 0, got True"),
        (-0.1, r"a finite number >= 0, got -0\.1"),
        ([0.2], r"a number, a tensor or a function, got \[0\.2\]"),
        (torch.tensor([0.5, -0.25]), r">= 0 everywhere, got a tensor with the minimum -0\.25"),
        (torch.tensor([0.5, float("nan")]), "finite everywhere, got a tensor with NaN or infinity"),
    ],
)
def test_wrong_margins(value, expected):
    with pytest.raises(ValueError, match=f"^margin must be {expected}$"):
        adaptive_margin("margin", value)


def test_finite_tensors():
    assert finite_tensor("weights", torch.tensor([-1.0])).item() == -1
    with pytest.raises(ValueError, match=r"^weights must be finite everywhere, got a tensor with NaN or infinity$"):
        finite_tensor("weights", torch.tensor([float("-inf")]))
