"""What every trunk promises."""

import torch

from vl_plugins.modules import TowerFeatures


def assert_keeps_the_promises_of_trunks(trunk, inputs):
    """Check shapes, determinism, autocast and gradients on three inputs."""
    assert len(trunk.train()(inputs[:2]).local) == 2
    trunk.eval()
    features = trunk(inputs)
    assert isinstance(features, TowerFeatures)
    items, places, width = features.local.shape
    assert (items, width) == (3, trunk.local_width)
    assert trunk.pooled_width == (None if features.pooled is None else features.pooled.shape[1])
    assert features.padding_mask is None or features.padding_mask.shape == (3, places)
    assert features.grid is None or features.grid[0] * features.grid[1] == places
    assert features.has_positions or features.grid is not None, "a head could add no positions"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = trunk(inputs)
    present = slice(None) if features.padding_mask is None else ~features.padding_mask
    for actual, exact in ((rounded.local[present], features.local[present]), (rounded.pooled, features.pooled)):
        if exact is not None:
            assert (actual.float() - exact).norm() < 0.05 * exact.norm()
    total = sum(part.square().sum() for part in trunk(inputs)[:2] if part is not None)
    if total.requires_grad:
        total.backward()
    assert [name for name, parameter in trunk.named_parameters() if parameter.grad is None] == []
