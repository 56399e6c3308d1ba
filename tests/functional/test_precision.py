import torch

from vl_plugins.numerics import full_precision, zero_or_nan


def test_full_precision():
    half, single, double = (torch.ones(2, dtype=dtype) for dtype in (torch.float16, torch.float32, torch.float64))
    assert full_precision(half)[0].dtype == torch.float32
    assert full_precision(single)[0] is single
    assert [tensor.dtype for tensor in full_precision(half, double)] == [torch.float64, torch.float64]


def test_zero_of_finite_elements():
    tensor = torch.tensor([60000.0, -1.0, 60000.0], dtype=torch.float32, requires_grad=True)
    zero = zero_or_nan(tensor)
    zero.backward()
    assert zero == 0
    assert torch.equal(tensor.grad, torch.zeros(3))
    assert zero_or_nan(torch.zeros(0)) == 0


def test_nan_of_any_other_element():
    for bad in (float("nan"), float("inf"), float("-inf")):
        tensor = torch.tensor([1.0, bad], requires_grad=True)
        nan = zero_or_nan(tensor)
        nan.backward()
        assert nan.isnan()
        assert tensor.grad.isnan().any()
