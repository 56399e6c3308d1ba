import warnings

import pytest
import torch

from tests.helpers.operations import NEWEST, count
from vl_plugins import create_loss

MOST = pytest.mark.parametrize(("name", "most"), [("unified", 70), ("vlc", 70), ("triplet_hn", 60), ("goal", 72)])


@NEWEST
@MOST
def test_few_operations_and_one_wait(name, most):
    operations, waits = count(create_loss(name), (64, 32))
    assert operations <= most
    assert waits == 1  # where labels are equal


@pytest.mark.gpu
@MOST
def test_one_wait_for_a_gpu(name, most):
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
