"""Weighted means of tensors, against the same in NumPy."""

import numpy as np
import pytest
import torch

from vl_plugins.integrations.merging import average


def tensors(seed, dtype=torch.float32, batches=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, 5, generator=generator).to(dtype)
    return {"weight": weight, "logit_scale": torch.tensor(seed + 0.3), "num_batches_tracked": torch.tensor(batches)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mean_is_that_of_float64_rounded_once(dtype):
    models = [tensors(seed, dtype, batches=seed) for seed in range(3)]
    shares = (0.2, 0.5, 0.3)
    mean = average(models, shares)
    arrays = [model["weight"].double().numpy() for model in models]
    expected = torch.from_numpy(np.average(arrays, axis=0, weights=shares)).to(dtype)
    assert mean["weight"].dtype == dtype
    assert torch.equal(mean["weight"], expected)
    assert mean["logit_scale"].item() == pytest.approx(1.4)
    assert mean["num_batches_tracked"].item() == 1  # of the largest share


def test_of_equal_models_nothing_changes():
    model = tensors(0)
    mean = average([model] * 3, [1 / 3] * 3)
    assert all(torch.equal(mean[name], tensor) for name, tensor in model.items())


def test_types_that_differ():
    """The mean has the wider type, and a share of 1 the model's own."""
    models = [tensors(0, torch.bfloat16), tensors(1)]
    assert average(models, (0.9, 0.1))["weight"].dtype == torch.float32
    for shares, model in (((1.0, 0.0), models[0]), ((0.0, 1.0), models[1])):
        mean = average(models, shares)
        assert all(mean[name] is tensor for name, tensor in model.items())
