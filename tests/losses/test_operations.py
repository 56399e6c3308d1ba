"""Operations that a call takes, and how often it waits for the device: for equal labels, and for equal ids."""

import warnings

import pytest
import torch

from tests.helpers.operations import NEWEST, count
from vl_plugins import create_loss

# matrix_losses of siglip and triplet_sh finds the positive pairs again, the latter in each direction.
LOSSES = [
    ("unified", 71, 0),
    ("vlc", 68, 0),
    ("triplet_hn", 64, 0),
    ("goal", 75, 0),
    ("smooth_chamfer", 253, 0),
    ("siglip", 72, 1),
    ("triplet_sh", 90, 2),
]


@NEWEST
@pytest.mark.parametrize(("by", "waits", "further"), [("labels", 1, 0), ("places", 0, -5), ("ids", 2, 11)])
@pytest.mark.parametrize(("name", "most", "own_waits"), LOSSES)
def test_few_operations_and_waits(name, most, own_waits, by, waits, further):
    operations, found = count(create_loss(name), (16, 3, 32) if name == "smooth_chamfer" else (64, 32), by)
    assert operations <= most + further
    assert found == waits + own_waits


@NEWEST
def test_few_operations_of_the_terms_of_sets():
    plain, both = (
        create_loss("smooth_chamfer", **options) for options in ({"mmd_weight": 0, "diversity_weight": 0}, {})
    )
    assert count(both, (16, 3, 32))[0] - count(plain, (16, 3, 32))[0] <= 100


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "own_waits"), [(name, own_waits) for name, _, own_waits in LOSSES])
def test_one_wait_for_a_gpu(name, own_waits):
    """``nonzero`` finds the pairs of equal labels; its size is known to the device alone."""
    loss, labels = create_loss(name).cuda(), torch.arange(64, device="cuda")
    shape = (64, 3, 32) if name == "smooth_chamfer" else (64, 32)
    sides = [torch.randn(*shape, device="cuda", requires_grad=True) for _ in range(2)]

    def call():
        loss(sides[0], labels, ref_emb=sides[1], ref_labels=labels.clone()).backward()

    call()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([warning for warning in caught if "synchroniz" in str(warning.message)]) == 1 + own_waits
