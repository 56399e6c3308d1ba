import pytest
import torch

from tests.kernels.triton_cases import TOLERANCE, check_hardest, check_sets, check_unified, vectors
from vl_plugins import kernels
from vl_plugins.kernels import equal_label_pairs, unified_losses_from_embeddings

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
SHAPES = pytest.mark.parametrize(
    "shape", [(1, 3, 5), (3, 1, 8), (17, 33, 16), (129, 127, 77), (1000, 1537, 512), (4096, 4096, 768)], ids=str
)


def sides(rows, columns, width, dtype):
    return [vectors(count, width, dtype=dtype, device="cuda", seed=count) for count in (rows, columns)]


def some_labels(rows, columns):
    return torch.arange(rows, device="cuda") % 997, torch.arange(columns, device="cuda") % 1009


@DTYPES
@SHAPES
@pytest.mark.parametrize("normalize", [True, False], ids=["cosines", "dot products"])
def test_unified(shape, dtype, normalize):
    scale = 50.0 if normalize else 50.0 / shape[2]
    # Sums of that many products in float32 shift logits of 50 by some 1e-5.
    tolerance = max(3e-5, TOLERANCE[dtype])
    for symmetric in (True, False):
        options = {"normalize": normalize, "symmetric": symmetric, "tolerance": tolerance}
        check_unified(*sides(*shape, dtype), *some_labels(*shape[:2]), scale, **options)


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_extreme_scales(dtype, scale):
    x, y = sides(300, 200, 64, dtype)
    x[1], x[2], x[3], y[:100] = x[0], -x[0], 0, x[:100]
    # Of two logits of 10,000 in float32 the difference is known to three digits.
    check_unified(x, y, *some_labels(300, 200), scale, tolerance=max(3e-3, 2e-6 * scale))


@pytest.mark.parametrize("parts", [2**12, 2**20])
def test_parts_of_rows(monkeypatch, parts):
    from vl_plugins.kernels import triton_tiles

    monkeypatch.setattr(triton_tiles, "WORKSPACE_BYTES", parts)
    check_unified(*sides(700, 900, 96, torch.bfloat16), *some_labels(700, 900))
    check_sets(*(side.view(-1, 2, 96) for side in sides(700, 900, 96, torch.bfloat16)))


@DTYPES
@SHAPES
def test_hardest_negatives(shape, dtype):
    check_hardest(*(side.round() for side in sides(*shape, dtype)), *some_labels(*shape[:2]))


@DTYPES
@pytest.mark.parametrize("masked", [False, True], ids=["all elements", "some elements"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 3, 1, 5), (5, 3, 7, 5, 77), (100, 16, 90, 16, 64), (300, 4, 500, 4, 512)], ids=str
)
def test_sets(shape, masked, dtype):
    a, k1, c, k2, width = shape
    x, y = vectors(a, k1, width, dtype=dtype, device="cuda"), vectors(c, k2, width, dtype=dtype, device="cuda", seed=1)
    masks = [None, None]
    if masked:
        masks = [torch.rand(side.shape[:2], device="cuda") < 0.6 for side in (x, y)]
    for alpha, normalize in ((16.0, True), (0.1, False)):
        check_sets(x, y, alpha, mask=masks[0], ref_mask=masks[1], normalize=normalize)


def test_same_bits_twice_and_nothing_waits_for_the_device():
    x, y = (side.requires_grad_() for side in sides(1000, 1000, 256, torch.bfloat16))
    labels = torch.arange(1000, device="cuda")
    pairs = equal_label_pairs(labels, labels)
    scale = torch.tensor(50.0, dtype=torch.float64, device="cuda", requires_grad=True)

    def step():
        arguments = x, y, labels, labels, pairs
        losses = unified_losses_from_embeddings(*arguments, 0.2, scale, backend="triton")
        hardest = kernels.mine_hardest_negatives(*arguments, backend="triton").negative_similarities
        sets = kernels.pairwise_smooth_chamfer(x.view(-1, 4, 256), y.view(-1, 4, 256), backend="triton")
        total = losses.sum() + hardest.sum() + sets.sum()
        return total, *torch.autograd.grad(total, (x, y, scale))

    first = step()
    assert first[1].norm() > 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, first, second))


def test_memory():
    x, y = (torch.randn(65536, 768, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    labels = torch.arange(65536, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    losses = unified_losses_from_embeddings(x, y, labels, labels, (labels, labels), backend="triton")
    gradients = torch.autograd.grad(losses.sum(), (x, y))
    assert all(gradient.isfinite().all() for gradient in gradients)
    # A matrix of all similarities would take 8 GB in half precision.
    assert torch.cuda.max_memory_allocated() < 2 * 10**9
