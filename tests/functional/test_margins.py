import math

import pytest
import torch

from vl_plugins.functional import soft_margin


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
def test_value_and_gradient(dtype, tolerance):
    confidence = torch.linspace(0, 1, 6, dtype=dtype).reshape(2, 3).requires_grad_()
    value = soft_margin(confidence, margin=0.4, base=5.0)
    (gradient,) = torch.autograd.grad(3 * value.sum(), confidence)
    expected = [[0.4 * (5**y - 1) / 4 for y in row] for row in confidence.tolist()]
    slopes = [[3 * 0.4 * 5**y * math.log(5) / 4 for y in row] for row in confidence.tolist()]
    torch.testing.assert_close(value, torch.tensor(expected, dtype=dtype), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=dtype), atol=tolerance, rtol=tolerance)


def test_defaults_and_half_precision():
    confidence = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float16)
    torch.testing.assert_close(soft_margin(confidence), torch.tensor([0.0, (math.sqrt(10) - 1) / 9 * 0.2, 0.2]))


def test_small_confidences_and_bases_near_one_do_not_cancel():
    # (b^y - 1) / (b - 1) -> y as b -> 1, and log(b) / (b - 1) * y for small y
    confidence = torch.tensor([1e-12, 0.5], dtype=torch.float64)
    torch.testing.assert_close(soft_margin(confidence, margin=1.0, base=1 + 2**-40), confidence, atol=0, rtol=1e-11)
    tiny = soft_margin(torch.tensor(2.0**-30), margin=1.0, base=10)
    assert tiny.item() == pytest.approx(math.log(10) / 9 / 2**30, rel=1e-6)


@pytest.mark.parametrize("base", [1, -2, math.nan, math.inf])
def test_wrong_base(base):
    with pytest.raises(ValueError, match="base must be a finite number > 1, got"):
        soft_margin(torch.ones(2), base=base)
