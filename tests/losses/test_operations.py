"""Operations that a call takes, and where it waits for the device: once, where labels are equal."""

import warnings

import pytest
import torch

from tests.helpers.operations import NEWEST, count
from vl_plugins import create_loss

LOSSES = [("unified", 71), ("vlc", 70), ("triplet_hn", 61), ("goal", 72), ("smooth_chamfer", 250)]


@NEWEST
@pytest.mark.parametrize(("name", "most"), LOSSES)
def test_few_operations_and_one_wait(name, most):
    operations, waits = count(create_loss(name), (16, 3, 32) if name == "smooth_chamfer" else (64, 32))
    assert operations <= most
    assert waits == 1


@NEWEST
def test_few_operations_of_the_terms_of_sets():
    plain, both = (
        create_loss("smooth_chamfer", **options) for options in ({"mmd_weight": 0, "diversity_weight": 0}, {})
    )
    assert count(both, (16, 3, 32))[0] - count(plain, (16, 3, 32))[0] <= 100


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["unified", "vlc", "triplet_hn", "goal"])
def test_one_wait_for_a_gpu(name):
    """``nonzero`` finds the pairs of equal labels; its size is known to the device alone."""
    loss, labels = create_loss(name).cuda(), torch.arange(64, device="cuda")
    sides = [torch.randn(64, 32, device="cuda", requires_grad=True) for _ in range(2)]

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
    assert len([warning for warning in caught if "synchroniz" in str(warning.message)]) == 1
