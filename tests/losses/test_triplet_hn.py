import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner
from pytorch_metric_learning.reducers import DoNothingReducer, MeanReducer

from vl_plugins.losses import TripletHNLoss

LABELS = torch.tensor([0, 1, 0, 2, 1, 0])
EMBEDDINGS = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TRIPLETS = (torch.tensor([0, 0, 4]), torch.tensor([2, 2, 1]), torch.tensor([1, 3, 5]))


def test_default_margin():
    assert TripletHNLoss().margin == 0.2


def test_given_triplets_are_used_as_they_are():
    loss = TripletHNLoss(margin=0.7, reducer=DoNothingReducer())(EMBEDDINGS, LABELS, TRIPLETS)["loss"]
    assert loss["reduction_type"] == "triplet"
    assert loss["indices"] is TRIPLETS
    similarities = CosineSimilarity()(EMBEDDINGS)
    expected = [
        max(0.0, 0.7 + similarities[a, n].item() - similarities[a, p].item())
        for a, p, n in zip(*(index.tolist() for index in TRIPLETS), strict=True)
    ]
    assert max(expected) > 0.5
    torch.testing.assert_close(loss["losses"].tolist(), expected)


def test_pairs_choose_the_hardest_among_the_given_negatives():
    easiest = torch.tensor([0]), torch.tensor([2]), torch.tensor([0, 1]), torch.tensor([3, 0])
    loss = TripletHNLoss(margin=0.7, reducer=DoNothingReducer())(EMBEDDINGS, LABELS, easiest)["loss"]
    assert loss["reduction_type"] == "pos_pair"
    similarities = CosineSimilarity()(EMBEDDINGS)
    torch.testing.assert_close(loss["losses"][0], 0.7 + similarities[0, 3] - similarities[0, 2])


def test_on_triplets_it_is_the_triplet_margin_loss_of_pytorch_metric_learning():
    triplets = BatchHardMiner()(EMBEDDINGS, LABELS)
    theirs = TripletMarginLoss(margin=0.2, distance=CosineSimilarity(), reducer=MeanReducer())
    expected = theirs(EMBEDDINGS, LABELS, triplets)
    assert expected > 0.1
    torch.testing.assert_close(TripletHNLoss(margin=0.2)(EMBEDDINGS, LABELS, triplets), expected)


def test_wrong_margin():
    with pytest.raises(ValueError, match="margin must be a finite number >= 0, got -1"):
        TripletHNLoss(margin=-1)
