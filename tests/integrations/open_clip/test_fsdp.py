"""A model with heads, sharded over two processes, is trained as one process trains it."""

import pytest
import torch

from tests.helpers import open_clip_sharded as sharded
from tests.helpers.processes import in_processes

NUMBERS = ["logit_scale", "logit_bias", "similarity.scale", "similarity.shift"]


@pytest.mark.skipif(sharded.fully_shard is None, reason="torch.distributed.fsdp.fully_shard is public since torch 2.6")
def test_a_sharded_training_and_its_state():
    """Gradients of the similarity too, whose parameters the loss uses outside of the model's ``forward``."""
    model = sharded.make_model("set")
    expected = sharded.train(model, sharded.make_loss(model), slice(None))
    results = in_processes(sharded.steps_and_state, sharded.WORLD_SIZE)
    assert len(expected) == sharded.STEPS
    for step, (value, gradients) in enumerate(expected):
        # The local losses are of parts of the batch, and fully_shard averages as the gradients are averaged.
        values = [steps[step][0] for steps, _ in results]
        torch.testing.assert_close(sum(values) / sharded.WORLD_SIZE, value, atol=1e-5, rtol=1e-5)
        assert not torch.equal(*values)
        for steps, _ in results:
            found = steps[step][1]
            assert found.keys() == gradients.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=f"{name} of step {step}")
    assert all(gradients[name].abs() > 1e-6 for name in NUMBERS if name != "logit_bias")

    for state in (state for _, state in results):
        assert [state[name].shape for name in NUMBERS] == [(1,)] * len(NUMBERS)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(state[name], parameter.data, atol=1e-5, rtol=1e-4, msg=name)
