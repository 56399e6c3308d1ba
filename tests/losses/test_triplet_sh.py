import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import TripletMarginMiner
from pytorch_metric_learning.reducers import SumReducer

from vl_plugins.losses import TripletSHLoss

LABELS = torch.tensor([0, 1, 0, 2, 1, 0])
EMBEDDINGS = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_default_margin():
    assert TripletSHLoss().margin == 0.2


@pytest.mark.parametrize("mined", [False, True])
def test_its_sum_is_that_of_pytorch_metric_learning_over_all_triplets(mined):
    """Mined triplets are those that violate the margin, so that both sums are the same."""
    triplets = TripletMarginMiner(margin=0.2, distance=CosineSimilarity())(EMBEDDINGS, LABELS) if mined else None
    theirs = TripletMarginLoss(margin=0.2, distance=CosineSimilarity(), reducer=SumReducer())
    expected = theirs(EMBEDDINGS, LABELS)
    assert expected > 1
    torch.testing.assert_close(TripletSHLoss(margin=0.2, reducer=SumReducer())(EMBEDDINGS, LABELS, triplets), expected)


def test_wrong_margin():
    with pytest.raises(ValueError, match="margin must be a finite number >= 0, got nan"):
        TripletSHLoss(margin=float("nan"))
