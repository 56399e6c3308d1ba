import numpy as np
import pytest
import torch

from vl_plugins.utils.checks import adaptive_margin, finite, finite_tensor, integer, non_negative, positive


@pytest.mark.parametrize("value", [0.5, 1, np.float32(0.5)])
@pytest.mark.parametrize("check", [finite, non_negative, positive])
def test_right_values_become_floats(check, value):
    checked = check("margin", value)
    assert checked == value
    assert type(checked) is float


def test_zero():
    assert non_negative("margin", 0) == 0
    with pytest.raises(ValueError, match="scale must be a finite number > 0, got 0"):
        positive("scale", 0)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "0.2", None, True])
@pytest.mark.parametrize("check", [non_negative, positive])
def test_wrong_values(check, value):
    with pytest.raises(ValueError, match=f"margin must be a finite number >=? 0, got {value!r}"):
        check("margin", value)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), "0.2", None, True])
def test_not_finite(value):
    assert finite("offset", -0.5) == -0.5
    with pytest.raises(ValueError, match=f"offset must be a finite number, got {value!r}"):
        finite("offset", value)


@pytest.mark.parametrize("value", [0, -1, 1.0, "1", None, True])
def test_integers(value):
    assert integer("k", 1, least=1) == 1
    with pytest.raises(ValueError, match=f"k must be an integer >= 1, got {value!r}"):
        integer("k", value, least=1)


def test_right_margins():
    assert type(adaptive_margin("margin", np.float32(0.5))) is float
    assert adaptive_margin("margin", 0) == 0
    for value in (torch.tensor(0.0), torch.tensor([0.0, 0.5]), torch.zeros(0), max):
        assert adaptive_margin("margin", value) is value


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), True])
def test_wrong_numbers_as_margins(value):
    with pytest.raises(ValueError, match=f"margin must be a finite number >= 0, got {value!r}"):
        adaptive_margin("margin", value)


@pytest.mark.parametrize("value", ["0.2", None, [0.2]])
def test_wrong_types_of_margins(value):
    with pytest.raises(ValueError, match="margin must be a number, a tensor or a function, got"):
        adaptive_margin("margin", value)


def test_wrong_tensors():
    with pytest.raises(ValueError, match=r"margin must be >= 0 everywhere, .* minimum -0\.25$"):
        adaptive_margin("margin", torch.tensor([0.5, -0.25]))
    for bad in (float("nan"), float("inf")):
        for check in (adaptive_margin, finite_tensor):
            with pytest.raises(ValueError, match="margin must be finite everywhere, got a tensor with NaN or infinity"):
                check("margin", torch.tensor([0.5, bad]))
    negative = torch.tensor([-1.0])
    assert finite_tensor("weights", negative) is negative
