"""What every trunk promises."""

import io

import torch

from vl_plugins.modules import TowerFeatures


def assert_keeps_the_promises_of_trunks(trunk, *, dtype=torch.bfloat16, without_gradient=()):
    """Check shapes, determinism, autocast, state dict and gradients on the trunk's own example inputs.

    ``without_gradient`` names the parameters that get none.
    """
    inputs = trunk.example_inputs(3, torch.Generator().manual_seed(0))
    assert len(inputs) == 3
    assert torch.equal(trunk.example_inputs(3, torch.Generator().manual_seed(0)), inputs)
    assert len(trunk.train()(trunk.example_inputs(2)).local) == 2
    trunk.eval()
    features = trunk(inputs)
    assert_shapes(trunk, features)
    for first, second in zip(features, trunk(inputs), strict=True):
        assert first is second is None or torch.equal(torch.as_tensor(first), torch.as_tensor(second))
    assert_autocast(trunk, inputs, features, dtype)
    assert_state_dict(trunk)

    if any(True for _ in trunk.parameters()):
        weighted(trunk(inputs)).backward()
    missing = [name for name, parameter in trunk.named_parameters() if parameter.grad is None]
    assert sorted(missing) == sorted(without_gradient)


def assert_shapes(trunk, features):
    assert isinstance(features, TowerFeatures)
    items, places, width = features.local.shape
    assert (items, width) == (3, trunk.local_width)
    if trunk.pooled_width is None:
        assert features.pooled is None
    else:
        assert features.pooled.shape == (3, trunk.pooled_width)
    if features.padding_mask is not None:
        assert features.padding_mask.shape == (3, places)
        assert features.padding_mask.dtype == torch.bool
    if features.grid is not None:
        assert features.grid[0] * features.grid[1] == places
    assert features.has_positions or features.grid is not None, "a head could add no positions"


def assert_autocast(trunk, inputs, expected, dtype):
    with torch.autocast("cpu", dtype=dtype):
        features = trunk(inputs)
    there = slice(None) if expected.padding_mask is None else ~expected.padding_mask
    for actual, exact in ((features.local[there], expected.local[there]), (features.pooled, expected.pooled)):
        if exact is not None:
            assert (actual.float() - exact).norm() < 0.05 * exact.norm()


def assert_state_dict(trunk):
    stream = io.BytesIO()
    torch.save(trunk.state_dict(), stream)
    stream.seek(0)
    trunk.load_state_dict(torch.load(stream, weights_only=True))


def weighted(features):
    """A number to which each part of the features contributes."""
    total = features.local.square().sum()
    return total if features.pooled is None else total + features.pooled.square().sum()
