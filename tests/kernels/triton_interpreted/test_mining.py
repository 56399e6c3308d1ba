import pytest
import torch

from tests.kernels.triton_cases import check_hardest
from vl_plugins.kernels.triton_mining import hardest_negatives
from vl_plugins.kernels.vectors import compare


def integers(count, width, dtype=torch.float32):
    return torch.randint(-1, 2, (count, width), generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["both directions", "rows only"])
def test_several_tiles_and_parts(small_tiles, symmetric, dtype):
    labels = torch.arange(33) % 4, torch.arange(40) % 3
    check_hardest(integers(33, 5, dtype), integers(40, 5, dtype), *labels, symmetric=symmetric)


@pytest.mark.parametrize("shape", [(1, 3, 5), (3, 1, 1), (17, 33, 16), (0, 3, 4), (3, 0, 4), (2, 3, 0)], ids=str)
def test_one_tile_and_less(shape):
    rows, columns, width = shape
    check_hardest(integers(rows, width), integers(columns, width), torch.arange(rows) % 3, torch.arange(columns) % 2)


def test_without_negatives(small_tiles):
    # beyond the first tile there are no negatives, or only there
    check_hardest(integers(3, 4), integers(40, 4), torch.tensor([0, 1, 0]), (torch.arange(40) >= 16).long())
    check_hardest(integers(40, 4), integers(3, 4), (torch.arange(40) >= 16).long(), torch.tensor([0, 1, 0]))
    check_hardest(integers(3, 4), integers(40, 4), torch.zeros(3).long(), torch.zeros(40).long())


def test_cosines():
    x, y = integers(9, 5) + 0.25, 3 * integers(7, 5) - 0.5
    labels = torch.arange(9) % 3, torch.arange(7) % 4
    comparison = compare(x, y, *labels, labels, normalize=True)
    (values, index), _ = hardest_negatives(comparison, symmetric=False)
    cosines = torch.nn.functional.cosine_similarity(x[:, None].double(), y.double(), dim=2)
    expected = cosines.masked_fill(labels[0][:, None] == labels[1], -torch.inf).max(1)
    torch.testing.assert_close(values.double(), expected.values, rtol=0, atol=1e-6)
    assert torch.equal(index, expected.indices)


def test_indices_beside_nan_are_those_of_candidates(small_tiles):
    x, y = integers(3, 4), integers(18, 4)
    x[1] = torch.nan
    comparison = compare(x, y, torch.arange(3), torch.arange(18) + 3, ((), ()), normalize=False)
    rows, columns = hardest_negatives(comparison, symmetric=True)
    assert rows[1].ge(0).all()
    assert rows[1].lt(18).all()
    assert columns[1].ge(0).all()
    assert columns[1].lt(3).all()
    assert torch.equal(rows[0][::2], (x @ y.T).amax(1)[::2])


def test_float64_is_left_to_the_tiles():
    x, y = integers(3, 4, torch.float64), integers(5, 4, torch.float64)
    comparison = compare(x, y, torch.arange(3), torch.arange(5) + 3, ((), ()), normalize=False)
    rows, columns = hardest_negatives(comparison, symmetric=True)
    for actual, dim in ((rows, 1), (columns, 0)):
        assert actual[0].dtype == torch.float64
        assert all(map(torch.equal, actual, (x @ y.T).max(dim)))
