"""``--precision`` with our losses and heads on the CPU."""

import copy
import functools
import tempfile
from argparse import Namespace

import open_clip_train.main as trainer
import pytest
import torch

from vl_plugins.integrations.open_clip.launcher import main

# Adam's epsilon for models that are not called ViT, 1e-8, is 0 in float16, and 0 / 0 its step where a gradient is 0.
TINY = "--model vl-tiny --device cpu --eps 1e-6 --batch-size 8 --workers 0".split()
TINY += "--epochs 1 --warmup 0 --logs none".split()
LOSSES = {
    "unified": ["--loss", "unified"],
    "goal": ["--loss", "goal"],
    "smooth_chamfer of sets": ["--head", "set", "--loss", "smooth_chamfer"],
    "unified of a linear head": ["--head", "linear", "--loss", "unified"],
}
CASES = [(precision, "unified") for precision in ("amp", "amp_bf16", "bf16", "fp16", "pure_bf16")]
CASES += [("pure_bf16", "smooth_chamfer of sets"), ("pure_bf16", "unified of a linear head"), ("bf16", "goal")]


@pytest.fixture(scope="module")
def step(toy_shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return functools.partial(train_step, [*TINY, "--train-data", f"{toy_shards}/toy-train-000000.tar"], folder)


def train_step(common, folder, precision, flags):
    """Return what one training step of the launcher did: gradients, and what the loss took and gave."""
    seen = Namespace(gradients={}, taken=None, given=None, loss=None)
    host_train = trainer.train_one_epoch

    def train_one_epoch(model, data, loss, *args, **kwargs):
        def hook(module, args, kwargs, output):
            seen.taken, seen.given = kwargs, dict(output)  # the trainer adds their sum

        seen.loss = loss
        handle = loss.register_forward_hook(hook, with_kwargs=True)
        host_train(model, data, loss, *args, **kwargs)
        handle.remove()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                seen.gradients[name] = parameter.grad.double()  # the scaler has divided it by its scale

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_one_epoch", train_one_epoch)
        patch.chdir(tempfile.mkdtemp(dir=folder))  # the trainer names runs by the second
        assert main([*common, "--precision", precision, *flags]) == 0
    return seen


@pytest.fixture(scope="module")
def in_float32(step):
    """One step in float32 for each name of ``LOSSES``, made when it is asked for."""
    return functools.cache(lambda name: step("fp32", LOSSES[name]))


@pytest.mark.parametrize(("precision", "name"), CASES)
def test_one_step(precision, name, step, in_float32):
    try:
        made, failure = step(precision, LOSSES[name]), None
    except RuntimeError as error:
        failure = str(error)
    if failure is not None:
        with pytest.raises(RuntimeError) as host_error:
            step(precision, [])
        assert failure == str(host_error.value), "open_clip itself must fail alike"
        pytest.skip(f"open_clip itself: {failure}")

    feature_dtype = torch.bfloat16 if "bf" in precision else torch.float16
    if "head" not in " ".join(LOSSES[name]):  # a head ends in float32
        assert made.taken["image_features"].dtype == feature_dtype
    exact = {
        key: value.detach().double() if isinstance(value, torch.Tensor) else value for key, value in made.taken.items()
    }
    expected = copy.deepcopy(made.loss).double()(**exact)
    assert list(made.given) == list(expected)
    for term, value in made.given.items():
        assert value.dtype == torch.float32
        # Computed in half precision it would be off by a thousandth.
        torch.testing.assert_close(value.double(), expected[term], rtol=1e-5, atol=1e-6)

    assert made.gradients.keys() == in_float32(name).gradients.keys()
    gradient, plain = (torch.cat([g.flatten() for g in s.gradients.values()]) for s in (made, in_float32(name)))
    tolerance = {torch.bfloat16: 0.1, torch.float16: 0.02}[feature_dtype]
    assert (gradient - plain).norm() <= tolerance * plain.norm()
