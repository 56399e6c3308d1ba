"""Operations that a call takes, and how often it waits for the device: for equal labels, and for equal ids."""

import warnings

import pytest
import torch

from tests.helpers.operations import NEWEST, count
from vl_plugins import create_loss

# The most operations of a call by labels, by places, and by labels with ids.
LOSSES = [
    ("unified", 69, 60, 91),
    ("vlc", 66, 57, 88),
    ("triplet_hn", 63, 55, 85),
    ("goal", 74, 66, 96),
    ("smooth_chamfer", 252, 246, 269),
    ("siglip", 70, 64, 87),
    ("triplet_sh", 78, 72, 95),
]
WAITS = {"labels": 1, "places": 0, "ids": 2}


@NEWEST
@pytest.mark.parametrize("by", WAITS)
@pytest.mark.parametrize(("name", "by_labels", "by_places", "by_ids"), LOSSES)
def test_few_operations_and_waits(name, by_labels, by_places, by_ids, by):
    operations, waits = count(create_loss(name), (16, 3, 32) if name == "smooth_chamfer" else (64, 32), by)
    assert operations <= {"labels": by_labels, "places": by_places, "ids": by_ids}[by]
    assert waits == WAITS[by]


@NEWEST
def test_few_operations_of_the_terms_of_sets():
    plain, both = (
        create_loss("smooth_chamfer", **options) for options in ({"mmd_weight": 0, "diversity_weight": 0}, {})
    )
    assert count(both, (16, 3, 32))[0] - count(plain, (16, 3, 32))[0] <= 100


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, *_ in LOSSES])
def test_one_wait_for_a_gpu(name):
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
    assert len([warning for warning in caught if "synchroniz" in str(warning.message)]) == 1
