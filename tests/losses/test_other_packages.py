"""The same values and gradients as losses of open_clip and pytorch-metric-learning."""

import pytest
import torch
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.reducers import MeanReducer, SumReducer

from tests.helpers.seeds import seeded
from vl_plugins.losses import GOALLoss, TripletHNLoss, TripletSHLoss, VLCLoss

LABELS = torch.tensor([0, 1, 0, 2, 1, 0])
EMBEDDINGS = torch.randn(6, 5, dtype=torch.float64, generator=seeded(0)).requires_grad_()


def check(ours, theirs, leaves=(EMBEDDINGS,)):
    assert theirs > 1e-3
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves))


def test_vlc_is_twice_the_loss_of_open_clip():
    clip_loss = pytest.importorskip("open_clip.loss").ClipLoss()
    images, texts = EMBEDDINGS, EMBEDDINGS.detach().flip(0, 1).requires_grad_()
    scale, labels = torch.tensor(30.0, dtype=torch.float64, requires_grad=True), torch.arange(6)
    theirs = 2 * clip_loss(*(torch.nn.functional.normalize(side) for side in (images, texts)), scale)
    check(VLCLoss()(images, labels, ref_emb=texts, ref_labels=labels, scale=scale), theirs, (images, texts, scale))


def test_triplet_hn_of_given_triplets_is_the_triplet_margin_loss():
    triplets = miners.BatchHardMiner()(EMBEDDINGS, LABELS)
    theirs = losses.TripletMarginLoss(margin=0.2, distance=CosineSimilarity(), reducer=MeanReducer())
    check(TripletHNLoss(margin=0.2)(EMBEDDINGS, LABELS, triplets), theirs(EMBEDDINGS, LABELS, triplets))


def test_the_sum_of_triplet_sh_is_the_triplet_margin_loss_of_all_triplets():
    options = {"margin": 0.2, "reducer": SumReducer()}
    theirs = losses.TripletMarginLoss(distance=CosineSimilarity(), **options)
    check(TripletSHLoss(**options)(EMBEDDINGS, LABELS), theirs(EMBEDDINGS, LABELS))


def test_goal_of_cir_and_lin_is_circle_loss_on_one_triplet_per_anchor():
    embeddings = EMBEDDINGS.detach().abs().requires_grad_()
    triplets = torch.tensor([0, 1, 4]), torch.tensor([5, 4, 1]), torch.tensor([3, 2, 2])
    theirs = losses.CircleLoss(m=0, gamma=8, reducer=SumReducer())(embeddings, LABELS, triplets) / 8
    ours = GOALLoss(triplet_weight="cir", pair_weight="lin", tau=8, offset=1, reducer=SumReducer())
    check(ours(embeddings, LABELS, triplets), theirs, (embeddings,))
