import pickle

import numpy as np
import pytest
import torch

from tests.encoders.trunks import assert_keeps_the_promises_of_trunks
from vl_plugins.encoders import FeatureTrunk
from vl_plugins.errors import UserError


def test_promises():
    assert_keeps_the_promises_of_trunks(FeatureTrunk(width=6, dropout=0.5), torch.rand(3, 4, 6))
    assert FeatureTrunk().example_inputs(2).shape == (2, 36, 2048)


def test_rows_of_zeros_are_padding():
    features = torch.rand(2, 4, 3)
    features[0, 2] = 0
    features[1, 1, :2] = 0
    output = FeatureTrunk(width=3, dropout=0.9).eval()(features)
    assert output.local is features
    assert FeatureTrunk(width=3, dropout=0.9).train()(features).padding_mask.sum() > 1
    assert output.padding_mask.tolist() == [[False, False, True, False], [False] * 4]
    assert (output.grid, output.has_positions) == (None, True)


def test_arrays_become_tensors():
    transform = pickle.loads(pickle.dumps(FeatureTrunk(width=3).image_transform(True)))
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    array.flags.writeable = False
    tensor = transform(array)
    assert tensor.dtype == torch.float32
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    for shape in ((2, 4), (3,), (1, 2, 3)):
        with pytest.raises(UserError, match=r"^features must have the shape \(N, 3\) .*, got \("):
            transform(np.zeros(shape))


@pytest.mark.parametrize(("option", "value"), [("width", 0), ("dropout", 1.0), ("dropout", float("nan"))])
def test_wrong_options(option, value):
    with pytest.raises(ValueError, match=f"^{option} must be"):
        FeatureTrunk(**{option: value})
