import torch

from tests.encoders.trunks import assert_keeps_the_promises_of_trunks
from vl_plugins.encoders import FeatureTrunk, drop_positions


def test_rows_of_zeros_are_padding():
    features = torch.rand(2, 4, 3)
    features[0, 2] = 0
    features[1, 1, :2] = 0
    trunk = FeatureTrunk(width=3, dropout=0.9)
    assert trunk.train()(features).padding_mask.sum() > 1
    output = trunk.eval()(features)
    assert output.local is features
    assert output.padding_mask.tolist() == [[False, False, True, False], [False] * 4]
    assert_keeps_the_promises_of_trunks(FeatureTrunk(width=6, dropout=0.5), torch.rand(3, 4, 6))


def test_positions_are_dropped_at_the_rate_but_one_stays():
    padding = torch.arange(20) >= torch.full((4000, 1), 15)
    mask = drop_positions(padding, 0.2)
    assert mask[:, 15:].all()
    assert abs(mask[:, :15].float().mean() - 0.2) < 0.01
    padding = torch.tensor([[False, True, False], [True, True, True], [False, False, False]])
    there = sum((~drop_positions(padding, 0.9999)).int() for _ in range(200))
    assert there.sum(dim=1).tolist() == [200, 0, 200]
    assert ((there > 0) == ~padding).all()
