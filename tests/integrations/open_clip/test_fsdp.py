"""A model with heads, sharded over two processes, is trained as one process trains it."""

import open_clip
import pytest
import torch
from torch import nn

from tests.helpers.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.distances import MatchProbability
from vl_plugins.integrations.open_clip.heads import add_heads
from vl_plugins.integrations.open_clip.loss import TwoTowerLoss
from vl_plugins.integrations.open_clip.models import check_model

try:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
except ImportError:
    fully_shard = None  # as a public function since torch 2.6

WORLD_SIZE, BATCH, STEPS = 2, 4, 2
NUMBERS = ["logit_scale", "logit_bias", "similarity.scale", "similarity.shift"]


def make_model():
    """Return vl-tiny with a set head; logit scale, logit bias and the numbers of its similarity have the shape (1,)."""
    check_model("vl-tiny")
    torch.manual_seed(0)
    clip = open_clip.create_model("vl-tiny", output_dict=True, load_weights=False, init_logit_bias=-1.0)
    options = {"num_slots": 2, "num_iters": 2, "hidden_dim": 8}
    model = add_heads(clip, "set", options, MatchProbability(2.0, 0.5))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 0:
                setattr(module, name, nn.Parameter(parameter.detach().reshape(1)))
    return model


def train(model, part, gather=lambda tensor: tensor):
    """Return value and gradients of each step; the second finds parameters that the first has updated."""
    metric_loss = create_loss("unified", distance=model.similarity)
    loss = TwoTowerLoss("unified", metric_loss, model_numbers=["scale"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    results = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(BATCH, 3, 64, 64, generator=generator)
        texts = torch.randint(1, 400, (BATCH, 32), generator=generator)
        optimizer.zero_grad()
        value = loss(**model(images[part], texts[part]))
        value.backward()
        optimizer.step()
        gradients = {name: gather(parameter.grad) for name, parameter in model.named_parameters()}
        results.append((value.detach(), gradients))
    return results


def train_sharded(rank):
    """Return the steps, and the whole state of the model after them."""
    model, size = make_model(), BATCH // WORLD_SIZE
    for block in model.visual.transformer.resblocks:
        fully_shard(block)
    fully_shard(model)
    steps = train(model, slice(rank * size, (rank + 1) * size), lambda gradient: gradient.full_tensor())
    return steps, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


@pytest.mark.skipif(fully_shard is None, reason="torch.distributed.fsdp.fully_shard is public since torch 2.6")
def test_a_sharded_training_and_its_state():
    """Gradients of the similarity too, whose parameters the loss uses outside of the model's ``forward``."""
    model = make_model()
    expected = train(model, slice(None))
    results = in_processes(train_sharded, WORLD_SIZE)
    assert len(expected) == STEPS
    for step, (value, gradients) in enumerate(expected):
        # Each process computes the loss of the batch, and fully_shard averages the gradients.
        values = [steps[step][0] for steps, _ in results]
        torch.testing.assert_close(sum(values) / WORLD_SIZE, value, atol=1e-5, rtol=1e-5)
        for steps, _ in results:
            torch.testing.assert_close(steps[step][1], gradients, atol=1e-5, rtol=1e-4)
    assert all(gradients[name].abs() > 1e-6 for name in NUMBERS if name != "logit_bias")
    for _, state in results:
        assert [state[name].shape for name in NUMBERS] == [(1,)] * len(NUMBERS)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(state[name], parameter.data, atol=1e-5, rtol=1e-4, msg=name)
