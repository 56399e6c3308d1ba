import pytest
import torch

from vl_plugins.encoders.leave_out import fraction, leave_out


def test_places_are_left_out_at_the_rate():
    torch.manual_seed(0)
    padding = torch.arange(20) >= torch.full((4000, 1), 15)
    mask = leave_out(padding, 0.2)
    assert mask[:, 15:].all()
    assert abs(mask[:, :15].float().mean() - 0.2) < 0.01
    assert (mask[:, :15].float().mean(dim=0) - 0.2).abs().max() < 0.03
    assert not torch.equal(leave_out(padding, 0.2), mask)


def test_one_place_stays_and_each_can_be_it():
    torch.manual_seed(0)
    padding = torch.tensor([[False, True, False], [True, True, True], [False, False, False]])
    there = sum((~leave_out(padding, 0.9999)).int() for _ in range(200))
    assert there.sum(dim=1).tolist() == [200, 0, 200]
    assert ((there > 0) == ~padding).all()


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, float("nan"), "0.2", True])
def test_rates_out_of_range(value):
    with pytest.raises(ValueError, match=r"^dropout must be"):
        fraction("dropout", value)
    assert fraction("dropout", 0) == 0
