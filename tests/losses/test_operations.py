import pytest

from tests.helpers.operations import NEWEST, count
from vl_plugins import create_loss

MOST = pytest.mark.parametrize(("name", "most"), [("unified", 70), ("vlc", 70), ("triplet_hn", 60), ("goal", 72)])


@NEWEST
@MOST
def test_few_operations_and_one_wait(name, most):
    operations, waits = count(create_loss(name), (64, 32))
    assert operations <= most
    assert waits == 1  # where labels are equal
