"""``torch.compile`` of :class:`TwoTowerLoss`: the same numbers, and nothing compiled twice."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.functional import normalize

from vl_plugins import create_loss, list_losses
from vl_plugins.integrations.open_clip.loss import TwoTowerLoss
from vl_plugins.registry import find, options_of

B, D, STEPS = 6, 8, 5
# It has the most to compile, which takes as long as for all others.
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name == "smooth_chamfer" else name for name in list_losses()]


def train(loss):
    """Return loss, gradients and the number of functions compiled so far, of each step with another logit scale."""
    generator = torch.Generator().manual_seed(1)
    results, compiled = [], []
    for step in range(STEPS):
        images, texts = normalize(torch.randn(2, B, D, generator=generator), dim=-1).requires_grad_()
        scale = torch.tensor(2.0 + step, requires_grad=True)
        value = loss(images, texts, scale)
        results.append((value.detach(), torch.autograd.grad(value, (images, texts, scale))))
        compiled.append(counters["frames"]["total"])
    return results, compiled


@pytest.mark.parametrize("name", NAMES)
def test_compiled(name):
    torch._dynamo.reset()
    counters.clear()
    learned = "scale" in options_of(find("loss", name))  # with the model's logit scale
    plain, loss = (TwoTowerLoss(name, create_loss(name), learned_scale=learned) for _ in range(2))
    expected, _ = train(plain)
    found, compiled = train(torch.compile(loss, backend="eager"))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert all(bool(gradients[2]) == learned for _, gradients in found)
    assert compiled[0] >= 1
    # In the second step the loss knows its labels already.
    assert compiled[1:] == [compiled[1]] * (STEPS - 1)
