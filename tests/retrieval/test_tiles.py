import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vl_plugins.retrieval.tiles import slices, tile_shape

CPU = torch.device("cpu")


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 2**19))
def test_shapes_of_tiles(rows, columns, elements):
    height, width = tile_shape((rows, columns), CPU, elements)
    assert height % 16 == width % 16 == 0
    assert height * width <= max(elements, 256) or (height == 16 and width == 16)
    # No more tiles than needed, of about the same size.
    assert height - 16 < rows or height == 16
    assert width - 16 < columns or width == 16


def test_an_accelerator_has_larger_tiles():
    shape = (10**6, 10**6)
    on_cpu, on_gpu = (tile_shape(shape, torch.device(name)) for name in ("cpu", "cuda"))
    assert on_gpu[0] > 3 * on_cpu[0]
    assert on_gpu[1] > 3 * on_cpu[1]


@pytest.mark.parametrize("length", [0, 1, 4, 5, 8])
def test_slices_cover_everything_once(length):
    parts = list(slices(length, 4))
    assert [index for part in parts for index in range(length)[part]] == list(range(length))
    assert all(part.stop - part.start == 4 for part in parts[:-1])
