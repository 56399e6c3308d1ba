"""Errors of losses whose matrix products are in half precision, against the same loss in float64.

    OMP_NUM_THREADS=1 python -m benchmarks.products

Each number is a relative error under autocast: of the gradient with respect to the image features, as the norm of the
difference divided by the norm of the gradient in float64, or of the loss. It is the root mean square over batches of
other features.

The features are unit vectors (B, 512) in float32, as open_clip passes them. In the rows "rounded", they are numbers of
autocast's type, in float64 too, so that only what the loss itself rounds counts. In the rows "float32" they are not, so
that rounding the features counts as well.

The loss is multiplied by a power of two before the backward pass, as a GradScaler does for float16, and the gradients
are divided by it.
"""

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.losses import PEERS, SCALE, Loss, place_loss
from vl_plugins.losses import UnifiedLoss, VLCLoss

DIMENSION = 512
LOSS_SCALE = 2.0**16  # where a GradScaler starts
# The cosines of unrelated features have a standard deviation of 0.1, those of pairs a mean of 0.4, so that in a large
# batch some texts are closer to an image than its own.
LATENT_DIMENSION = 100
NOISE = 2.3
MOST_BATCHES = 16
ROWS_OF_BATCHES = 4096  # small batches are repeated until they have so many rows


class Errors(NamedTuple):
    """Relative errors of a loss; also their root mean squares over batches."""

    gradient: float
    value: float


def all_losses() -> dict[str, Loss]:
    """Return the losses of the tables by label, the first cell of a row in Markdown."""
    losses = {"open_clip's `ClipLoss`": PEERS["clip"]()}
    for kind in (VLCLoss, UnifiedLoss):
        for products in ("autocast", "float32"):
            loss = kind(scale=SCALE, products=products)
            losses[f"`{kind.__name__}`, products {products}"] = place_loss(loss)
    return losses


def features(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return unit features of images and texts in float32, (B, D) each; the texts are the images with noise."""
    generator = torch.Generator().manual_seed(seed)
    to_features = torch.randn(LATENT_DIMENSION, DIMENSION, generator=generator)
    latent_images = torch.randn(size, LATENT_DIMENSION, generator=generator)
    noise = torch.randn(size, LATENT_DIMENSION, generator=generator)
    latent_texts = latent_images + NOISE * noise
    images = normalize(latent_images @ to_features, dim=1)
    texts = normalize(latent_texts @ to_features, dim=1)
    return images, texts


def value_and_gradient(
    loss: Loss, images: Tensor, texts: Tensor, autocast: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return a loss, and its gradient with respect to the images, in float64.

    Args:
        loss: a loss of the tables.
        images, texts: (B, D).
        autocast: the type of autocast, None for none.
    """
    images = images.clone().requires_grad_()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        value = loss(images, texts, torch.arange(len(images)))
    (gradient,) = torch.autograd.grad(LOSS_SCALE * value, images)
    return value.detach().double(), gradient.double() / LOSS_SCALE


def errors_of_batch(loss: Loss, images: Tensor, texts: Tensor, autocast: torch.dtype) -> Errors:
    """Return the errors of a loss under autocast for one batch."""
    exact_value, exact_gradient = value_and_gradient(loss, images.double(), texts.double())
    value, gradient = value_and_gradient(loss, images, texts, autocast)
    of_gradient = (gradient - exact_gradient).norm() / exact_gradient.norm()
    of_value = (value - exact_value).abs() / exact_value
    return Errors(of_gradient.item(), of_value.item())


def errors(loss: Loss, size: int, autocast: torch.dtype, is_rounded: bool) -> Errors:
    """Return the root mean square of the errors over batches of a size.

    Args:
        loss: a loss of the tables.
        size: images in a batch.
        autocast: the type of autocast.
        is_rounded: whether the features are numbers of that type.
    """
    batches = max(1, min(MOST_BATCHES, ROWS_OF_BATCHES // size))
    gradient_squares = 0.0
    value_squares = 0.0
    for seed in range(batches):
        images, texts = features(size, seed)
        if is_rounded:
            images = images.to(autocast).float()
            texts = texts.to(autocast).float()
        of_batch = errors_of_batch(loss, images, texts, autocast)
        gradient_squares += of_batch.gradient**2
        value_squares += of_batch.value**2
    return Errors(math.sqrt(gradient_squares / batches), math.sqrt(value_squares / batches))


def print_row(cells: Sequence[str]) -> None:
    """Print a row of a table in Markdown."""
    print(f"| {' | '.join(cells)} |", flush=True)


def print_table(autocast: torch.dtype, sizes: Sequence[int]) -> None:
    """Print the errors under one type of autocast."""
    columns = ["features", "loss"]
    for quantity in ("gradient", "value"):
        for size in sizes:
            columns.append(f"{quantity}, B = {size:,}")
    print(f"\n{autocast}\n")
    print_row(columns)
    print_row(["---", "---"] + ["---:"] * (len(columns) - 2))
    for name, is_rounded in (("rounded", True), ("float32", False)):
        for label, loss in all_losses().items():
            gradient_cells = []
            value_cells = []
            for size in sizes:
                of_size = errors(loss, size, autocast, is_rounded)
                gradient_cells.append(f"{of_size.gradient:.1e}")
                value_cells.append(f"{of_size.value:.1e}")
            print_row([name, label, *gradient_cells, *value_cells])


def print_features(sizes: Sequence[int]) -> None:
    """Print how similar the features are, of the first batch of each size."""
    for size in sizes:
        images, texts = features(size, seed=0)
        similarities = images @ texts.T
        positives = similarities.diagonal()
        closest = similarities.argmax(dim=1)
        recall = (closest == torch.arange(size)).float().mean()
        print(f"B = {size:,}: cosine of pairs {positives.mean():.2f} ± {positives.std():.2f}, R@1 {100 * recall:.0f} %")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(64, 256, 1024, 4096))
    parser.add_argument("--types", nargs="+", choices=("bfloat16", "float16"), default=("bfloat16", "float16"))
    arguments = parser.parse_args(argv)

    print(f"torch {torch.__version__}, CPU, D {DIMENSION}, scale {SCALE:g}")
    print_features(arguments.batch_sizes)
    for name in arguments.types:
        print_table(getattr(torch, name), arguments.batch_sizes)


if __name__ == "__main__":
    main()
