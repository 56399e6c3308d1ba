import pytest
import torch

from tests.kernels.triton_cases import assert_near, check_hardest
from vl_plugins.kernels.pairs import equal_label_pairs
from vl_plugins.kernels.triton_mining import hardest_negatives
from vl_plugins.kernels.vectors import compare


def integers(count, width, dtype=torch.float32):
    return torch.randint(-1, 2, (count, width), generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize(("dtype", "symmetric"), [(torch.float32, True), (torch.float16, False)], ids=str)
def test_several_tiles_and_parts(small_tiles, dtype, symmetric):
    labels = torch.arange(33) % 4, torch.arange(40) % 3
    check_hardest(integers(33, 5, dtype), integers(40, 5, dtype), *labels, symmetric=symmetric)


@pytest.mark.parametrize("shape", [(1, 3, 5), (0, 3, 4), (3, 0, 4), (2, 3, 0)], ids=str)
def test_one_tile_and_less(shape):
    rows, columns, width = shape
    check_hardest(integers(rows, width), integers(columns, width), torch.arange(rows) % 3, torch.arange(columns) % 2)


def test_without_negatives(small_tiles):
    # beyond the first tile there are no negatives, or only there
    few, many = torch.tensor([0, 1, 0]), (torch.arange(18) >= 16).long()
    check_hardest(integers(3, 4), integers(18, 4), few, many)
    check_hardest(integers(18, 4), integers(3, 4), many, few)
    check_hardest(integers(3, 4), integers(18, 4), 0 * few, 0 * many)


def test_cosines():
    x, y = integers(9, 5) + 0.25, 3 * integers(7, 5) - 0.5
    labels = torch.arange(9) % 3, torch.arange(7) % 4
    comparison = compare(x, y, *labels, labels, normalize=True)
    (values, index), _ = hardest_negatives(comparison, symmetric=False)
    cosines = torch.nn.functional.cosine_similarity(x[:, None].double(), y.double(), dim=2)
    expected = cosines.masked_fill(labels[0][:, None] == labels[1], -torch.inf).max(1)
    assert_near(values, expected.values, relative=0, absolute=1e-6)
    assert torch.equal(index, expected.indices)


def test_float64_is_left_to_the_tiles():
    x, y = integers(3, 4, torch.float64), integers(5, 4, torch.float64)
    labels = torch.arange(3), torch.arange(5) % 2
    comparison = compare(x, y, *labels, equal_label_pairs(*labels), normalize=False)
    rows, columns = hardest_negatives(comparison, symmetric=True)
    for actual, dim in ((rows, 1), (columns, 0)):
        assert actual[0].dtype == torch.float64
        expected = (x @ y.T).masked_fill(labels[0][:, None] == labels[1], -torch.inf).max(dim)
        assert all(map(torch.equal, actual, expected))
