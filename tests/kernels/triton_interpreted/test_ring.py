import pytest
import torch
from torch import distributed

from tests.kernels.triton_cases import assert_gradients_near, vectors
from vl_plugins.distributed import Ring
from vl_plugins.distributed.torchrun import stop_processes
from vl_plugins.kernels import goal_loss, tiled, triplet_hn_loss, unified_loss


@pytest.fixture
def ring(tmp_path):
    """Of this process alone."""
    distributed.init_process_group("gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    yield Ring()
    stop_processes()


@pytest.mark.parametrize("loss", [unified_loss, triplet_hn_loss, goal_loss], ids=lambda loss: loss.__name__)
def test_blocks_are_compared_by_triton(small_tiles, ring, loss, monkeypatch):
    x, y = (vectors(count, 8, dtype=torch.float32, device="cpu", seed=count) for count in (20, 35))
    labels = torch.arange(20) % 7, torch.arange(35) % 5

    def value_and_gradients(**options):
        leaves = [side.clone().requires_grad_() for side in (x, y)]
        value = loss(*leaves, *labels, **options)
        return value.detach(), *torch.autograd.grad(value, leaves)

    expected = value_and_gradients(backend="functional")
    if loss is not goal_loss:  # whose sums over negatives have no kernel
        monkeypatch.delattr(tiled, "compared_tiles")
        monkeypatch.delattr("vl_plugins.kernels.mining.compared_tiles")
    assert_gradients_near(value_and_gradients(ring=ring), expected, 1e-4)
