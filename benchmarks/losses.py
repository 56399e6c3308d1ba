"""Time and memory of losses, forward and backward, on random unit vectors of B images and B texts.

    python -m benchmarks.losses --losses unified triplet_hn --backends dense tiled \\
        --peers clip siglip triplet-margin three-products --batch-sizes 512 1024 2048 4096

Everything is compared with the first of --peers:

    clip, clip-compiled      ClipLoss of open_clip, also under torch.compile
    siglip                   SigLipLoss of open_clip
    ntxent                   NTXentLoss of pytorch-metric-learning, images to texts only; memory grows with B cubed
    triplet-margin           TripletMarginLoss and BatchHardMiner of pytorch-metric-learning, images to texts only
    three-products           the matrix products that a contrastive loss needs at least, and nothing else

On the CPU with one thread, time is processor time, otherwise wall time. MB is the peak of allocated memory, gradients
included.
"""

import argparse
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from open_clip.loss import ClipLoss, SigLipLoss
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import NTXentLoss, TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.measurement import clock, extra_bytes, print_table, time_rounds
from vl_plugins import create_loss

# The defaults of the losses, which the peers get too.
SCALE, MARGIN = 50.0, 0.2
# Where SigLIP starts training.
SIGLIP_SCALE, SIGLIP_BIAS = 10.0, -10.0
BACKENDS = {None: {}, "dense": {"tiled": False}, "tiled": {"tiled": True}}

Loss = Callable[[Tensor, Tensor, Tensor], Any]  # of images (B, D), texts (B, D) and labels (B,), all different
Measured = tuple[dict[str, list[float]], dict[str, int]]


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


@torch.no_grad()
def three_products(images: Tensor, texts: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    similarities = images @ texts.T
    return similarities @ texts, similarities.T @ images


PEERS: dict[str, Callable[[], Loss]] = {
    "clip": lambda: open_clip_loss(ClipLoss(), SCALE),
    # For each shape anew: as fast as it gets.
    "clip-compiled": lambda: open_clip_loss(torch.compile(ClipLoss(), dynamic=False), SCALE),
    "siglip": lambda: open_clip_loss(SigLipLoss(), SIGLIP_SCALE, SIGLIP_BIAS),
    "ntxent": lambda: metric_loss(NTXentLoss(temperature=1 / SCALE)),
    "triplet-margin": lambda: metric_loss(
        # The default reducer leaves out triplets without a loss.
        TripletMarginLoss(margin=MARGIN, distance=CosineSimilarity(), reducer=MeanReducer()),
        BatchHardMiner(distance=CosineSimilarity()),
    ),
    "three-products": lambda: three_products,
}


def step(loss: Loss, images: Tensor, texts: Tensor, labels: Tensor) -> None:
    """Run forward and backward, with new labels as each training step has them, and drop the gradients."""
    value = loss(images, texts, labels.clone())
    if isinstance(value, Tensor):
        value.backward()
    images.grad = texts.grad = None


def measure(losses: Mapping[str, Loss], images: Tensor, texts: Tensor, rounds: int) -> Measured:
    """Return seconds by name and round, and bytes by name."""
    labels = torch.arange(len(images), device=images.device)
    steps = {name: partial(step, loss, images, texts, labels) for name, loss in losses.items()}
    seconds = time_rounds(steps, rounds, clock(images.device))
    return seconds, {name: extra_bytes(run, device=images.device) for name, run in steps.items()}


def draw(measured: Mapping[int, Measured], peers: Collection[str]) -> Figure:
    """Draw time and memory over the batch size; the losses of this package as solid lines, peers as dashed ones."""
    figure = Figure(figsize=(12, 4.5), dpi=120, layout="constrained")
    for axes, name, column in zip(figure.subplots(1, 2), ("time (ms)", "memory (MB)"), (0, 1), strict=True):
        for label in measured[min(measured)][0]:
            points: list[Any] = [both[column][label] for both in measured.values()]
            values = [1e3 * statistics.median(point) if column == 0 else point / 1e6 for point in points]
            axes.loglog(list(measured), values, "o--" if label in peers else "s-", label=label)
        axes.set(xlabel="batch size B", ylabel=name)
        axes.set_xticks(list(measured), [f"{size:,}" for size in measured])
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


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
    parser.add_argument("--plot", metavar="FILE", help="a picture of time and memory over the batch size")
    arguments = parser.parse_args(argv)

    torch.set_num_threads(arguments.threads)
    losses = {}
    for name in arguments.losses:
        for backend in arguments.backends:
            loss = metric_loss(create_loss(name, **BACKENDS[backend]))
            losses[f"{name} ({backend})" if backend else name] = loss
    losses |= {name: PEERS[name]() for name in arguments.peers}
    print(f"torch {torch.__version__}, {arguments.device}, threads: {arguments.threads}")
    measured = {}
    for size in sorted(arguments.batch_sizes):
        generator = torch.Generator().manual_seed(0)
        images, texts = (
            normalize(torch.randn(size, arguments.dimension, generator=generator), dim=-1)
            .to(arguments.device, getattr(torch, arguments.dtype))
            .requires_grad_()
            for _ in range(2)
        )
        measured[size] = measure(losses, images, texts, arguments.rounds)
        title = f"B {size:,}, D {arguments.dimension:,}, {arguments.dtype}"
        print_table(title, measured[size][0], arguments.peers[0], measured[size][1])
    if arguments.plot is not None:
        draw(measured, arguments.peers).savefig(arguments.plot)


if __name__ == "__main__":
    main()
