"""Time and memory of losses, forward and backward, on random unit vectors of B images and B texts.

    python -m benchmarks.losses --losses unified triplet_hn --backends dense tiled \\
        --peers clip siglip triplet-margin three-products --batch-sizes 512 1024 2048 4096

Everything is compared with the first of --peers:

    clip, clip-compiled      ClipLoss of open_clip, also under torch.compile
    siglip                   SigLipLoss of open_clip
    triplet-margin           TripletMarginLoss and BatchHardMiner of pytorch-metric-learning, images to texts only
    three-products           the matrix products that a contrastive loss needs at least, and nothing else

On the CPU with one thread, time is processor time, otherwise wall time. MB is the peak of allocated memory, gradients
included.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from open_clip.loss import ClipLoss, SigLipLoss
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.measurement import clock, extra_bytes, print_table, time_rounds
from vl_plugins import create_loss

# The defaults of the losses, which the peers get too.
SCALE, MARGIN = 50.0, 0.2
SIGLIP_SCALE, SIGLIP_BIAS = 10.0, -10.0  # where SigLIP starts training
BACKENDS = {None: {}, "dense": {"tiled": False}, "tiled": {"tiled": True}}

Loss = Callable[[Tensor, Tensor, Tensor], Any]  # of images (B, D), texts (B, D) and labels (B,), all different


def open_clip_loss(loss: Callable, *arguments: float) -> Loss:
    """Return a loss with the call of open_clip."""
    return lambda images, texts, labels: loss(images, texts, *arguments)


def metric_loss(loss: torch.nn.Module, miner: torch.nn.Module | None = None) -> Loss:
    """Return a loss with the call of pytorch-metric-learning."""

    def run(images: Tensor, texts: Tensor, labels: Tensor) -> Tensor:
        # If labels and ref_labels are one object, the library leaves out the pairs (i, i), here all positives.
        ref_labels = labels.clone()
        mined = None if miner is None else miner(images, labels, texts, ref_labels)
        return loss(images, labels, mined, texts, ref_labels)

    return run


def place_loss(loss: torch.nn.Module) -> Loss:
    """Return a loss that is called without labels: text i belongs to image i."""

    def run(images: Tensor, texts: Tensor, labels: Tensor) -> Tensor:
        return loss(images, ref_emb=texts)

    return run


@torch.no_grad()
def three_products(images: Tensor, texts: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    similarities = images @ texts.T
    return similarities @ texts, similarities.T @ images


PEERS: dict[str, Callable[[], Loss]] = {
    "clip": lambda: open_clip_loss(ClipLoss(), SCALE),
    # For each shape anew: as fast as it gets.
    "clip-compiled": lambda: open_clip_loss(torch.compile(ClipLoss(), dynamic=False), SCALE),
    "siglip": lambda: open_clip_loss(SigLipLoss(), SIGLIP_SCALE, SIGLIP_BIAS),
    "triplet-margin": lambda: metric_loss(
        # The default reducer leaves out triplets without a loss.
        TripletMarginLoss(margin=MARGIN, distance=CosineSimilarity(), reducer=MeanReducer()),
        BatchHardMiner(distance=CosineSimilarity()),
    ),
    "three-products": lambda: three_products,
}


def random_sides(shape: Sequence[int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return random images and texts of a shape as leaves, unit vectors along the last dimension."""
    generator = torch.Generator().manual_seed(0)
    sides = []
    for _ in range(2):
        vectors = normalize(torch.randn(shape, generator=generator), dim=-1)
        sides.append(vectors.to(device, dtype).requires_grad_())
    return sides[0], sides[1]


def step(loss: Loss, images: Tensor, texts: Tensor, labels: Tensor, autocast: bool = False) -> None:
    """Run forward and backward, with new labels as each training step has them, and drop the gradients.

    With ``autocast``, the forward pass runs in bfloat16 autocast, as open_clip's ``--precision amp_bf16`` does.
    """
    with torch.autocast(images.device.type, torch.bfloat16, enabled=autocast):
        value = loss(images, texts, labels.clone())
    if isinstance(value, Tensor):
        value.backward()
    images.grad = texts.grad = None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="+", default=("unified", "triplet_hn"), help="also package.module:Class")
    parser.add_argument("--backends", nargs="+", choices=("dense", "tiled"), default=(None,), help="default: by size")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=("clip", "siglip", "triplet-margin"))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(512, 1024, 2048))
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)

    torch.set_num_threads(arguments.threads)
    losses = {}
    for name in arguments.losses:
        for backend in arguments.backends:
            loss = metric_loss(create_loss(name, **BACKENDS[backend]))
            losses[f"{name} ({backend})" if backend else name] = loss
    losses |= {name: PEERS[name]() for name in arguments.peers}
    print(f"torch {torch.__version__}, {arguments.device}, threads: {arguments.threads}")
    for size in sorted(arguments.batch_sizes):
        dtype = getattr(torch, arguments.dtype)
        images, texts = random_sides((size, arguments.dimension), dtype, arguments.device)
        labels = torch.arange(size, device=arguments.device)
        steps = {name: partial(step, loss, images, texts, labels) for name, loss in losses.items()}
        seconds = time_rounds(steps, arguments.rounds, clock(arguments.device))
        memory = {name: extra_bytes(run, arguments.device) for name, run in steps.items()}
        title = f"B {size:,}, D {arguments.dimension:,}, {arguments.dtype}"
        print_table(title, seconds, arguments.peers[0], memory)


if __name__ == "__main__":
    main()
