"""The losses on a GPU: value and gradient against the loops in float64, and no wait of the host but one."""

import warnings

import pytest
import torch

from tests.helpers.loops import call_with, calls, check_call, leaves_of
from tests.helpers.losses import EACH, LOSSES, SOME, make, needs_matrix
from vl_plugins import create_loss, negatives

pytestmark = pytest.mark.gpu


def on_gpu(call, dtype=None):
    moved = {}
    for name, value in call.items():
        if isinstance(value, torch.Tensor):
            value = value.detach().to("cuda", dtype if value.is_floating_point() else None)
            value = value.requires_grad_() if value.is_floating_point() else value
        elif isinstance(value, tuple):
            value = tuple(index.cuda() for index in value)
        moved[name] = value
    return moved


@EACH
def test_value_and_gradient_are_those_of_the_loops(name, monkeypatch):
    reference = LOSSES[name][1]
    for tiled in (None, False) if needs_matrix(name) else (None, False, True):
        if tiled:
            monkeypatch.setattr(negatives, "block_rows", lambda *_: 2)
        loss = make(name, tiled=tiled).cuda()
        for dtype in (torch.float64, torch.float32):
            for what, call in calls(dtype):
                if tiled and "indices_tuple" in call:
                    continue

                def moved(call=call, loss=loss, **_):
                    given = on_gpu(call)
                    value = loss(**given)
                    gradients = torch.autograd.grad(value, leaves_of(given), retain_graph=True)
                    return _Bridge.apply(value.cpu(), *gradients, *leaves_of(call))

                check_call(reference, call, loss=moved, what=f"{tiled}, {dtype}, {what}")


class _Bridge(torch.autograd.Function):
    """A value and gradients that were computed elsewhere, for leaves on the CPU."""

    @staticmethod
    def forward(ctx, value, *gradients_and_leaves):
        half = len(gradients_and_leaves) // 2
        ctx.save_for_backward(*(gradient.cpu() for gradient in gradients_and_leaves[:half]))
        return value.detach().clone()

    @staticmethod
    def backward(ctx, upstream):
        gradients = [upstream * gradient for gradient in ctx.saved_tensors]
        return None, *(None for _ in gradients), *gradients


@SOME
def test_half_precision_and_autocast(name):
    for dtype in (torch.bfloat16, torch.float16):
        call = on_gpu(call_with(2), dtype)
        single = on_gpu(call_with(2, dtype), torch.float32)
        loss = make(name).cuda()
        expected = loss(**single)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            actual = loss(**call)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected)
        for gradient, other in zip(
            torch.autograd.grad(actual, leaves_of(call)), torch.autograd.grad(expected, leaves_of(single)), strict=True
        ):
            torch.testing.assert_close(gradient, other.to(dtype))


@pytest.mark.parametrize("name", ["unified", "vlc", "triplet_hn", "goal"])
def test_one_wait(name):
    """``nonzero`` finds the pairs of equal labels; its size is known to the device alone."""
    loss, labels = create_loss(name).cuda(), torch.arange(64, device="cuda")
    sides = [torch.randn(64, 32, device="cuda", requires_grad=True) for _ in range(2)]

    def call():
        loss(sides[0], labels, ref_emb=sides[1], ref_labels=labels.clone()).backward()

    call()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([warning for warning in caught if "synchroniz" in str(warning.message)]) == 1


@pytest.mark.parametrize("name", ["unified", "goal cir sig_ms"])
def test_compiled(name):
    call, loss = on_gpu(call_with(2, torch.float32)), make(name).cuda()
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(loss)(**call), loss(**call))
