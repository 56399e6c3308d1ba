import math

import pytest
import torch

from vl_plugins.modules import sinusoidal_positions, sinusoidal_positions_2d


def in_formulas(position, channel, dim):
    """Section 3.5 of Vaswani et al. 2017."""
    phase = position / 10000 ** (2 * (channel // 2) / dim)
    return math.sin(phase) if channel % 2 == 0 else math.cos(phase)


@pytest.mark.parametrize("dim", [1, 6, 7])
def test_positions_are_the_formula(dim):
    actual = sinusoidal_positions(20001, dim)
    assert actual.dtype == torch.float32
    for position in (0, 1, 8, 20000):
        expected = torch.tensor([in_formulas(position, channel, dim) for channel in range(dim)])
        torch.testing.assert_close(actual[position], expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("dim", [2, 3, 8, 11])
def test_half_of_the_channels_is_for_each_axis(dim):
    height, width, half = 3, 4, math.ceil(dim / 2)
    feature_map = sinusoidal_positions_2d(height, width, dim).T.reshape(1, dim, height, width)
    for row in range(height):
        for column in range(width):
            expected = [in_formulas(row, channel, half) for channel in range(half)]
            expected += [in_formulas(column, channel, dim - half) for channel in range(dim - half)]
            actual = feature_map[0, :, row, column]
            torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-7, rtol=0)


def test_arguments_out_of_range():
    with pytest.raises(ValueError, match="length must be an integer >= 1, got 0"):
        sinusoidal_positions(0, 4)
    with pytest.raises(ValueError, match="dim must be an integer >= 2, got 1"):
        sinusoidal_positions_2d(2, 2, 1)
