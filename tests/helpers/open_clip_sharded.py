"""What each of two processes does in ``test_fsdp.py``."""

import open_clip
import torch
from torch import nn

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

WORLD_SIZE = 2
BATCH = 4
HEADS = {"linear": {"dim": 24}, "set": {"num_slots": 2, "num_iters": 2, "hidden_dim": 8}}
STEPS = 2


def make_model(head, shape=(1,)):
    """vl-tiny with a head; logit scale, logit bias and the numbers of its similarity have the shape () or (1,)."""
    check_model("vl-tiny")
    torch.manual_seed(0)
    options = {"init_logit_bias": -1.0}
    clip = open_clip.create_model("vl-tiny", output_dict=True, load_weights=False, **options)
    similarity = MatchProbability(2.0, 0.5) if head == "set" else None
    model = add_heads(clip, head, HEADS[head], similarity)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 0:
                setattr(module, name, nn.Parameter(parameter.detach().reshape(shape)))
    return model


def make_loss(model, **options):
    distance = {} if model.similarity is None else {"distance": model.similarity}
    return TwoTowerLoss("unified", create_loss("unified", **distance), learned_scale=True, **options)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 64, 64, generator=generator)
    return images, torch.randint(1, 400, (BATCH, 32), generator=generator)


def train(model, loss, part, gather=lambda tensor: tensor):
    """Return value and gradients of each step; the second finds parameters that the first has updated."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    results = []
    for step in range(STEPS):
        optimizer.zero_grad()
        images, texts = batch(step)
        value = loss(**model(images[part], texts[part]))
        value.backward()
        optimizer.step()
        gradients = {name: gather(parameter.grad) for name, parameter in model.named_parameters()}
        results.append((value.detach(), gradients))
    return results


def steps_and_state(rank):
    """Return the steps with sets, and the whole state of the model after them."""
    size = BATCH // WORLD_SIZE
    model = make_model("set")
    for block in model.visual.transformer.resblocks:
        fully_shard(block)
    fully_shard(model)
    loss = make_loss(model, local_loss=True)
    part = slice(rank * size, (rank + 1) * size)
    steps = train(model, loss, part, gather=lambda gradient: gradient.full_tensor())
    return steps, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
