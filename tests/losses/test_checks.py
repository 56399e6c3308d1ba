import numpy as np
import pytest

from vl_plugins.losses.checks import non_negative, positive


@pytest.mark.parametrize("value", [0.5, 1, np.float32(0.5)])
@pytest.mark.parametrize("check", [non_negative, positive])
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
