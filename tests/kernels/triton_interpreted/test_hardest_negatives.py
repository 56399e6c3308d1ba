import pytest
import torch

from tests.helpers.embeddings import KERNELS, formula_and_gradients, kernel_and_gradients
from tests.kernels.triton_cases import TOLERANCE, assert_gradients_near, assert_near, check_hardest, vectors


def integers(count, width, dtype=torch.float32):
    return torch.randint(-1, 2, (count, width), generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize(("dtype", "symmetric"), [(torch.float32, True), (torch.float16, False)], ids=str)
def test_several_tiles_and_parts(small_tiles, dtype, symmetric):
    labels = torch.arange(33) % 4, torch.arange(40) % 3
    check_hardest(integers(33, 5, dtype), integers(40, 5, dtype), *labels, symmetric=symmetric)


@pytest.mark.parametrize("shape", [(1, 3, 5), (3, 1, 2), (2, 3, 0)], ids=str)
def test_one_tile(shape):
    rows, columns, width = shape
    check_hardest(integers(rows, width), integers(columns, width), torch.arange(rows) % 3, torch.arange(columns) % 2)


def test_without_negatives(small_tiles):
    # beyond the first tile there are no negatives, or only there
    few, many = torch.tensor([0, 1, 0]), (torch.arange(18) >= 16).long()
    check_hardest(integers(3, 4), integers(18, 4), few, many)
    check_hardest(integers(18, 4), integers(3, 4), many, few)
    check_hardest(integers(3, 4), integers(18, 4), 0 * few, 0 * many)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # Triton does not interpret bfloat16
@pytest.mark.parametrize("name", ["triplet_hn", "goal"])
def test_losses(small_tiles, name, dtype):
    kernel, formula = KERNELS[name]
    sides = [vectors(count, 8, dtype=dtype, device="cpu", seed=count) / 4 for count in (20, 35)]
    for labels in ((torch.arange(20) % 7, torch.arange(35) % 5), (torch.arange(20), torch.arange(35) + 20)):
        for options in ({"normalize": True}, {"normalize": False}):
            actual = kernel_and_gradients(kernel, *sides, *labels, dtype=dtype, backend="triton", **options)
            expected = formula_and_gradients(formula, *sides, *labels, **options)
            assert actual[0].dtype == torch.float32
            assert_near(actual[0], expected[0], relative=1e-5, absolute=1e-5)
            assert_gradients_near(actual[1:], expected[1:], TOLERANCE[dtype])
