import math

import pytest
import torch

from vl_plugins.modules import sinusoidal_positions, sinusoidal_positions_2d


def in_formulas(position, channel, dim):
    """Section 3.5 of Vaswani et al. 2017."""
    phase = position / 10000 ** (2 * (channel // 2) / dim)
    return math.sin(phase) if channel % 2 == 0 else math.cos(phase)


@pytest.mark.parametrize("dim", [1, 2, 6, 7, 64])
def test_positions_are_the_formula(dim):
    actual = sinusoidal_positions(9, dim)
    expected = torch.tensor([[in_formulas(position, channel, dim) for channel in range(dim)] for position in range(9)])
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-7, rtol=0)


def test_far_positions_are_exact():
    actual = sinusoidal_positions(20001, 8)
    expected = torch.tensor([in_formulas(20000, channel, 8) for channel in range(8)])
    torch.testing.assert_close(actual[-1], expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("dim", [2, 3, 8, 10, 11])
def test_half_of_the_channels_is_for_each_axis(dim):
    height, width = 3, 4
    actual = sinusoidal_positions_2d(height, width, dim)
    assert actual.shape == (height * width, dim)
    assert actual.dtype == torch.float32
    of_rows = math.ceil(dim / 2)
    for row in range(height):
        for column in range(width):
            expected = [in_formulas(row, channel, of_rows) for channel in range(of_rows)]
            expected += [in_formulas(column, channel, dim - of_rows) for channel in range(dim - of_rows)]
            torch.testing.assert_close(actual[row * width + column], torch.tensor(expected), atol=1e-7, rtol=0)


def test_places_are_in_the_order_of_a_flattened_map():
    feature_map = sinusoidal_positions_2d(3, 5, 16).T.reshape(1, 16, 3, 5)
    assert torch.equal(feature_map[0, :8, 1, 0], feature_map[0, :8, 1, 4]), "a row"
    assert torch.equal(feature_map[0, 8:, 0, 2], feature_map[0, 8:, 2, 2]), "a column"
    assert len(feature_map.flatten(2)[0].T.unique(dim=0)) == 15


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (sinusoidal_positions, (0, 4), "length must be an integer >= 1, got 0"),
        (sinusoidal_positions, (3, 0), "dim must be an integer >= 1, got 0"),
        (sinusoidal_positions, (3, 2.0), r"dim must be an integer >= 1, got 2\.0"),
        (sinusoidal_positions_2d, (0, 2, 4), "height must be an integer >= 1, got 0"),
        (sinusoidal_positions_2d, (2, 0, 4), "width must be an integer >= 1, got 0"),
        (sinusoidal_positions_2d, (2, 2, 1), "dim must be an integer >= 2, got 1"),
    ],
)
def test_bad_arguments_are_named(function, arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        function(*arguments)
