"""Operations that a call takes, and where it waits for the device: once, where labels are equal."""

import pytest

from tests.helpers.operations import NEWEST, count
from vl_plugins import create_loss

LOSSES = [("unified", 70), ("vlc", 70), ("triplet_hn", 60), ("goal", 72), ("smooth_chamfer", 250)]


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
