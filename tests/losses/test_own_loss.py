"""What the contract does not ask of the losses of docs/guides/own_loss.md, which are not in the package."""

import pytest
import torch

from tests.helpers.loops import call_with, embeddings_of
from tests.helpers.losses import own_losses
from vl_plugins.losses import PairLoss


def test_a_loss_that_is_already_reduced():
    loss = PairLoss()
    loss.negatives, loss.matrix_losses = "matrix", lambda similarities, *_: similarities.mean()
    with pytest.raises(ValueError, match="matrix_losses must return shape"):
        loss(**call_with(1))


def test_the_sigmoid_loss_is_twice_that_of_open_clip():
    siglip_loss = pytest.importorskip("open_clip.loss").SigLipLoss()
    labels = torch.arange(6)
    images, texts = (torch.nn.functional.normalize(embeddings_of(labels, seed=seed)).float() for seed in (0, 1))
    # One loss for each pair: that of SigLIP has each negative once, this one once for its row and once for its column.
    ours = own_losses()["SigmoidLoss"]()(images, labels, ref_emb=texts, ref_labels=labels)
    torch.testing.assert_close(ours, 2 * siglip_loss(images, texts, 10.0, -10.0))
