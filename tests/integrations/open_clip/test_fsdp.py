"""A model with heads, sharded over two processes, is trained as one process trains it, and loads anywhere."""

import json

import open_clip
import pytest
import torch
from torch import nn

from tests.integrations.open_clip import sharded
from tests.processes import in_processes
from vl_plugins.integrations.checkpoints import load_model

NUMBERS = {
    "linear": ["clip.logit_scale", "clip.logit_bias"],
    "set": ["clip.logit_scale", "clip.logit_bias", "similarity.scale", "similarity.shift"],
}
EACH_HEAD = pytest.mark.parametrize("head", sharded.HEADS)


@pytest.fixture(scope="module")
def results():
    """``results[rank][head]`` is the steps, a list of ``(value, gradients)``, and the state dict."""
    if sharded.fully_shard is None:
        pytest.skip(f"torch {torch.__version__} has no torch.distributed.fsdp.fully_shard")
    return in_processes(sharded.steps_and_states, sharded.WORLD_SIZE)


@pytest.fixture(scope="module")
def alone():
    """For each head the model that one process has trained on the whole batches, and the steps."""
    models = {}
    for head in sharded.HEADS:
        model = sharded.make_model(head)
        models[head] = model, sharded.train(model, sharded.make_loss(model), slice(None))
    return models


@EACH_HEAD
def test_gradients_are_those_of_one_process(results, alone, head):
    """Also those of the similarity, whose parameters the loss uses outside of the model's ``forward``."""
    _, expected = alone[head]
    assert len(expected) == sharded.STEPS
    for step, (value, gradients) in enumerate(expected):
        # The local losses are of parts of the batch, and fully_shard averages as the gradients are averaged.
        values = [of_rank[head][0][step][0] for of_rank in results]
        torch.testing.assert_close(sum(values) / sharded.WORLD_SIZE, value, atol=1e-5, rtol=1e-5)
        assert not torch.equal(*values)
        for of_rank in results:
            found = of_rank[head][0][step][1]
            assert found.keys() == gradients.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=f"{name} of step {step}")
    assert all(gradients[name].abs() > 1e-6 for name in NUMBERS[head] if name != "clip.logit_bias")


@EACH_HEAD
def test_a_full_state_dict_is_loaded_into_a_model_that_is_not_sharded(results, alone, head, tmp_path):
    for of_rank in results:
        assert of_rank[head][1]["_extra_state"] == results[0][head][1]["_extra_state"]
    state = results[0][head][1]
    assert [tuple(state[name].shape) for name in NUMBERS[head]] == [(1,)] * len(NUMBERS[head])
    check_loaded(state, head, alone, tmp_path)


@EACH_HEAD
def test_numbers_of_either_shape_are_loaded(alone, head, tmp_path):
    """What the test above does, with a version of torch that cannot shard."""
    check_loaded(alone[head][0].state_dict(), head, alone, tmp_path)


def check_loaded(state, head, alone, tmp_path):
    torch.save({"state_dict": state}, tmp_path / "epoch_1.pt")
    loaded, _, _ = load_model(tmp_path / "epoch_1.pt")
    expected = dict(alone[head][0].named_parameters())
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    assert all(found[name].shape == () for name in NUMBERS[head])
    for name, parameter in found.items():
        torch.testing.assert_close(parameter, expected[name].view_as(parameter), atol=1e-5, rtol=1e-4, msg=name)
    images, texts = sharded.batch(9)
    with torch.no_grad():
        ours, theirs = loaded(images, texts), alone[head][0].eval()(images, texts)
    for name in ("image_features", "text_features"):
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("saved", [(), (1,)], ids=str)
@pytest.mark.parametrize("made", [(), (1,)], ids=str)
def test_a_model_without_heads(saved, made, tmp_path):
    """The logit scale and bias of open_clip's own models are read in either shape into either."""
    sharded.make_model("linear")  # so that open_clip knows the name
    config = open_clip.get_model_config("vl-tiny")
    name = f"vl-tiny-{len(made)}-{len(saved)}"
    config |= {"nonscalar_logit_scale": made == (1,), "init_logit_bias": -10.0}
    (tmp_path / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path)
    model = open_clip.create_model(name, load_weights=False)
    for number, value in (("logit_scale", 1.5), ("logit_bias", -2.5)):
        assert getattr(model, number).shape == made
        setattr(model, number, nn.Parameter(torch.full(saved, value)))
    torch.save({"state_dict": model.state_dict()}, tmp_path / "epoch_1.pt")
    loaded, _, _ = load_model(tmp_path / "epoch_1.pt", name)
    for number, value in (("logit_scale", 1.5), ("logit_bias", -2.5)):
        assert torch.equal(getattr(loaded, number), torch.full(made, value))
