"""``torch.compile`` of the model and of :class:`TwoTowerLoss`: the same numbers, and nothing compiled twice."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import normalize

from vl_plugins import create_loss, list_losses
from vl_plugins.integrations.open_clip.loss import TwoTowerLoss
from vl_plugins.registry import find, options_of

B, D = 6, 8
STEPS = 5
# With the model's logit scale as the scale of the loss, where it has one: other numbers in each step.
CASES = [(name, "scale" in options_of(find("loss", name))) for name in list_losses()]
# It has the most to compile, which takes as long as for all others.
LONG = {"smooth_chamfer"}


class Towers(nn.Module):
    """The smallest thing with open_clip's output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(D, D), nn.Linear(D, D)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, texts):
        return {
            "image_features": normalize(self.image(images), dim=1),
            "text_features": normalize(self.text(texts), dim=1),
            "logit_scale": self.logit_scale.exp(),
        }


def train(model, loss, trained):
    """Return values, gradients and the number of functions compiled so far, of each step."""
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    results, compiled = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        terms = loss(**model(*torch.randn(2, B, D, generator=generator)), output_dict=True)
        sum(terms.values()).backward()
        gradients = [parameter.grad.clone() for parameter in trained.parameters()]
        results.append(({name: term.detach() for name, term in terms.items()}, gradients))
        optimizer.step()
        compiled.append(counters["frames"]["total"])
    return results, compiled


@pytest.mark.parametrize(
    ("name", "learned"), [pytest.param(*case, marks=pytest.mark.slow if case[0] in LONG else ()) for case in CASES]
)
def test_compiled(name, learned):
    torch._dynamo.reset()
    counters.clear()
    towers = Towers()
    plain = copy.deepcopy(towers)
    expected, _ = train(plain, TwoTowerLoss(name, create_loss(name), learned_scale=learned), plain)
    loss = TwoTowerLoss(name, create_loss(name), learned_scale=learned)
    found, compiled = train(torch.compile(towers, backend="eager"), torch.compile(loss, backend="eager"), towers)
    for step, (terms, gradients) in enumerate(expected):
        torch.testing.assert_close(found[step], (terms, gradients), atol=1e-5, rtol=1e-4, msg=f"step {step}")
    has_gradient = {name: bool(parameter.grad.any()) for name, parameter in towers.named_parameters()}
    assert has_gradient == {name: learned or name != "logit_scale" for name in has_gradient}
    assert compiled[0] > 1
    # In the second step the loss knows its labels already.
    assert compiled[1:] == [compiled[1]] * (STEPS - 1)
