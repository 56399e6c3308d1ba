import pytest
import torch

from vl_plugins.functional import vlc_loss
from vl_plugins.losses import VLCLoss

LABELS = torch.arange(6)


def random_embeddings(seed):
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(6, 5, dtype=torch.float64, generator=generator)
    return (embeddings / embeddings.norm(dim=1, keepdim=True)).requires_grad_()


def test_it_is_twice_the_loss_of_open_clip():
    clip_loss = pytest.importorskip("open_clip.loss").ClipLoss()
    images, texts = random_embeddings(0), random_embeddings(1)
    scale = torch.tensor(30.0, dtype=torch.float64, requires_grad=True)
    loss = VLCLoss()
    loss.scale = scale
    value = loss(images, LABELS, ref_emb=texts, ref_labels=LABELS)
    expected = 2 * clip_loss(images, texts, scale)
    torch.testing.assert_close(value, expected, atol=1e-10, rtol=1e-10)
    # Along the sphere: the cosine's gradient has no radial part, open_clip takes its inputs as already normalised.
    gradients = torch.autograd.grad(3 * value, (images, texts, scale))
    images_gradient, texts_gradient, scale_gradient = torch.autograd.grad(3 * expected, (images, texts, scale))
    expected_gradients = (tangent(images_gradient, images), tangent(texts_gradient, texts), scale_gradient)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-10, rtol=1e-10)


def tangent(gradient, embeddings):
    return gradient - (gradient * embeddings).sum(dim=1, keepdim=True) * embeddings


def test_defaults():
    images, texts = random_embeddings(0), random_embeddings(1)
    loss = VLCLoss()
    positives = torch.eye(6, dtype=torch.bool)
    assert (loss.scale, loss.symmetric) == (50.0, True)
    torch.testing.assert_close(
        loss(images, LABELS, ref_emb=texts, ref_labels=LABELS), vlc_loss(images @ texts.T, positives, ~positives, 50)
    )


@pytest.mark.parametrize("scale", [0, -1, float("inf"), "50"])
def test_wrong_scale(scale):
    with pytest.raises(ValueError, match="scale must be a finite number > 0"):
        VLCLoss(scale=scale)
