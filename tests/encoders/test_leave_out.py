import torch

from vl_plugins.encoders.leave_out import leave_out


def test_places_are_left_out_at_the_rate():
    torch.manual_seed(0)
    padding = torch.arange(20) >= torch.full((4000, 1), 15)
    mask = leave_out(padding, 0.2)
    assert mask[:, 15:].all()
    assert abs(mask[:, :15].float().mean() - 0.2) < 0.01


def test_one_place_stays_and_each_can_be_it():
    torch.manual_seed(0)
    padding = torch.tensor([[False, True, False], [True, True, True], [False, False, False]])
    there = sum((~leave_out(padding, 0.9999)).int() for _ in range(200))
    assert there.sum(dim=1).tolist() == [200, 0, 200]
    assert ((there > 0) == ~padding).all()
