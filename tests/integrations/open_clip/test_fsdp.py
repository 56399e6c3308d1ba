"""A model with heads, sharded over two processes, is trained as one process trains it, and loads anywhere."""

import json

import open_clip
import pytest
import torch
from torch import nn

from tests.helpers import open_clip_sharded as sharded
from tests.helpers.processes import in_processes
from vl_plugins.integrations.checkpoints import load_model

NUMBERS = ["clip.logit_scale", "clip.logit_bias", "similarity.scale", "similarity.shift"]


@pytest.mark.skipif(sharded.fully_shard is None, reason="torch.distributed.fsdp.fully_shard is public since torch 2.6")
def test_a_sharded_training_and_its_state(tmp_path):
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
    assert all(gradients[name].abs() > 1e-6 for name in NUMBERS if name != "clip.logit_bias")

    state, other_state = (state for _, state in results)
    assert state["_extra_state"] == other_state["_extra_state"]
    check_loaded(state, model, tmp_path)


def check_loaded(state, model, folder):
    """Check the model that is loaded from a state, whose numbers have the shape (1,)."""
    assert [state[name].shape for name in NUMBERS] == [(1,)] * len(NUMBERS)
    torch.save({"state_dict": state}, folder / "epoch_1.pt")
    loaded, _, _ = load_model(folder / "epoch_1.pt")
    expected, found = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    assert all(found[name].shape == () for name in NUMBERS)
    for name, parameter in found.items():
        torch.testing.assert_close(parameter, expected[name].view_as(parameter), atol=1e-5, rtol=1e-4, msg=name)


def test_numbers_of_either_shape_are_loaded(tmp_path):
    """Also with a version of torch that cannot shard."""
    model = sharded.make_model("set")
    check_loaded(model.state_dict(), model, tmp_path)


@pytest.mark.parametrize(("saved", "made"), [((), (1,)), ((1,), ())], ids=str)
def test_a_model_without_heads(saved, made, tmp_path):
    """The logit scale and bias of open_clip's own models are read in either shape into either."""
    sharded.make_model("linear")  # so that open_clip knows the name
    name = f"vl-tiny-{len(made)}-{len(saved)}"
    config = {"nonscalar_logit_scale": made == (1,), "init_logit_bias": -10.0}
    (tmp_path / f"{name}.json").write_text(json.dumps(open_clip.get_model_config("vl-tiny") | config))
    open_clip.add_model_config(tmp_path)
    model = open_clip.create_model(name, load_weights=False)
    for number, value in (("logit_scale", 1.5), ("logit_bias", -2.5)):
        assert getattr(model, number).shape == made
        setattr(model, number, nn.Parameter(torch.full(saved, value)))
    torch.save({"state_dict": model.state_dict()}, tmp_path / "epoch_1.pt")
    loaded, _, _ = load_model(tmp_path / "epoch_1.pt", name)
    assert torch.equal(loaded.logit_scale, torch.full(made, 1.5))
    assert torch.equal(loaded.logit_bias, torch.full(made, -2.5))
