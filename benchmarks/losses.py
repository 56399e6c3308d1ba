"""Time and memory of losses, forward and backward, on random unit vectors of B images and B texts.

    python -m benchmarks.losses --losses unified triplet_hn --backends dense tiled \\
        --peers clip siglip triplet-margin three-products --batch-sizes 512 1024 2048 4096
    python -m benchmarks.losses --elements 4 --batch-sizes 1024 --dimension 1024

Everything is compared with the first of --peers:

    clip, clip-compiled      ClipLoss of open_clip, also under torch.compile
    siglip, siglip-compiled  SigLipLoss of open_clip
    ntxent                   NTXentLoss of pytorch-metric-learning, images to texts only; memory grows with B cubed
    triplet-margin           TripletMarginLoss and BatchHardMiner of pytorch-metric-learning, images to texts only
    three-products           the matrix products that a contrastive loss needs at least, and nothing else

With --elements, images and texts are sets, and smooth-Chamfer similarity is compared with the usual ways to write it in
plain torch: exponentials, and pooling over the sets by LPPool2d, AvgPool2d or sums.

Before anything is timed, each has to give the value and gradients of its formula on all similarities, in float64. On
the CPU with one thread, time is processor time, otherwise wall time. MB is the most that was allocated at once,
gradients included.
"""

import argparse
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from open_clip.loss import ClipLoss, SigLipLoss
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import NTXentLoss, TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor
from torch.nn.functional import normalize, softplus

from benchmarks.measurement import check, clock, extra_bytes, print_table, time_rounds
from tests.sets.references import EXP_AND_POOL
from vl_plugins import create_loss
from vl_plugins.distances import SmoothChamferSimilarity

# The defaults of the losses, which the peers get too.
SCALE, MARGIN, ALPHA = 50.0, 0.2, 16.0
# Where SigLIP starts training.
SIGLIP_SCALE, SIGLIP_BIAS = 10.0, -10.0
CHECKED = 256  # rows
BACKENDS = {None: {}, "dense": {"tiled": False}, "tiled": {"tiled": True}}

Formula = Callable[[Tensor, Tensor], Tensor]
Measured = tuple[dict[str, list[float]], dict[str, int]]


class Contestant(NamedTuple):
    """A loss to measure.

    Attributes:
        loss: of images (B, D), texts (B, D) and labels (B,), all different.
        formula: of images and texts; None for what computes no loss.
    """

    loss: Callable[[Tensor, Tensor, Tensor], Any]
    formula: Formula | None


def formula(name: str, factor: float = 1.0, **options) -> Formula:
    """Return ``factor`` times a loss of this package, by the matrix of all similarities."""
    loss = create_loss(name, **options)

    def value(images: Tensor, texts: Tensor) -> Tensor:
        positives = torch.eye(len(images), dtype=torch.bool, device=images.device)
        return factor * loss.from_similarities(images @ texts.T, positives, ~positives)

    return value


def metric_loss(loss: torch.nn.Module, formula: Formula, miner: torch.nn.Module | None = None) -> Contestant:
    """Return a loss with the call of pytorch-metric-learning."""

    def run(images: Tensor, texts: Tensor, labels: Tensor) -> Tensor:
        # If labels and ref_labels are one object, the library leaves out the pairs (i, i), here all positives.
        ref_labels = labels.clone()
        mined = None if miner is None else miner(images, labels, texts, ref_labels)
        return loss(images, labels, mined, texts, ref_labels)

    return Contestant(run, formula)


def compiled(loss: torch.nn.Module) -> Callable[..., Tensor]:
    # For each shape anew: as fast as it gets.
    return torch.compile(loss, dynamic=False)


def clip(prepare: Callable = lambda loss: loss) -> Contestant:
    loss = prepare(ClipLoss())
    return Contestant(lambda images, texts, labels: loss(images, texts, SCALE), formula("vlc", 0.5, scale=SCALE))


def siglip(prepare: Callable = lambda loss: loss) -> Contestant:
    loss = prepare(SigLipLoss())
    return Contestant(lambda images, texts, labels: loss(images, texts, SIGLIP_SCALE, SIGLIP_BIAS), siglip_formula)


def siglip_formula(images: Tensor, texts: Tensor) -> Tensor:
    """Eq. 1 of Zhai et al. 2023, Sigmoid Loss for Language Image Pre-Training."""
    logits = SIGLIP_SCALE * images @ texts.T + SIGLIP_BIAS
    return (softplus(logits).sum() - logits.diagonal().sum()) / len(images)


def ntxent() -> Contestant:
    return metric_loss(NTXentLoss(temperature=1 / SCALE), formula("vlc", scale=SCALE, symmetric=False))


def triplet_margin() -> Contestant:
    # The default reducer leaves out triplets without a loss.
    loss = TripletMarginLoss(margin=MARGIN, distance=CosineSimilarity(), reducer=MeanReducer())
    miner = BatchHardMiner(distance=CosineSimilarity())
    return metric_loss(loss, formula("triplet_hn", margin=MARGIN, symmetric=False), miner)


def three_products() -> Contestant:
    def run(images: Tensor, texts: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            similarities = images @ texts.T
            return similarities @ texts, similarities.T @ images

    return Contestant(run, None)


PEERS = {
    "clip": clip,
    "clip-compiled": partial(clip, compiled),
    "siglip": siglip,
    "siglip-compiled": partial(siglip, compiled),
    "ntxent": ntxent,
    "triplet-margin": triplet_margin,
    "three-products": three_products,
}


def of_sets(similarity: Callable[[Tensor, Tensor], Tensor]) -> Contestant:
    """Return the sum of the similarities (B, B) of sets (B, K, D), each with a weight of its own."""

    def weighted(similarity: Callable, images: Tensor, texts: Tensor, labels: Any = None) -> Tensor:
        values = similarity(images, texts)
        return torch.dot(values.flatten(), weights(len(values)).to(values).flatten())

    return Contestant(partial(weighted, similarity), partial(weighted, smooth_chamfer_formula))


@lru_cache
def weights(size: int) -> Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(1))


def smooth_chamfer_formula(images: Tensor, texts: Tensor) -> Tensor:
    """Eq. 6 of Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings."""
    cosines = ALPHA * torch.einsum("akd,cld->ackl", images, texts)
    return (cosines.logsumexp(dim=3).mean(dim=2) + cosines.logsumexp(dim=2).mean(dim=2)) / (2 * ALPHA)


SMOOTH_CHAMFER = {
    f"smooth-Chamfer ({backend})": SmoothChamferSimilarity(ALPHA, **BACKENDS[backend]) for backend in ("dense", "tiled")
}


def step(contestant: Contestant, images: Tensor, texts: Tensor, labels: Tensor) -> None:
    """Run forward and backward, with new labels as each training step has them, and drop the gradients."""
    value = contestant.loss(images, texts, labels.clone())
    if contestant.formula is not None:
        value.backward()
    images.grad = texts.grad = None


def measure(contestants: Mapping[str, Contestant], images: Tensor, texts: Tensor, rounds: int) -> Measured:
    """Check the contestants; return seconds by name and round, and bytes by name."""
    device, checked = images.device, CHECKED if images.ndim == 2 else CHECKED // 16
    labels = torch.arange(len(images), device=device)
    for name, contestant in contestants.items():
        if contestant.formula is not None:
            loss = partial(contestant.loss, labels=labels[:checked])
            check(name, loss, contestant.formula, images[:checked], texts[:checked])
    steps = {name: partial(step, contestant, images, texts, labels) for name, contestant in contestants.items()}
    seconds = time_rounds(steps, rounds, clock(device))
    return seconds, {name: extra_bytes(run, device=device) for name, run in steps.items()}


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
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,g}"))
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="+", default=("unified", "triplet_hn"), help="also package.module:Class")
    parser.add_argument("--backends", nargs="+", choices=("dense", "tiled"), default=(None,), help="default: by size")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=("clip", "siglip", "triplet-margin"))
    parser.add_argument("--elements", type=int, help="of each set, instead of single vectors")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(512, 1024, 2048))
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", metavar="FILE", help="a picture of time and memory over the batch size")
    arguments = parser.parse_args(argv)

    torch.set_num_threads(arguments.threads)
    if arguments.elements:
        peers: Sequence[str] = [*EXP_AND_POOL]
        contestants = {name: of_sets(similarity) for name, similarity in (SMOOTH_CHAMFER | EXP_AND_POOL).items()}
    else:
        peers = arguments.peers
        contestants = {
            name if backend is None else f"{name} ({backend})": metric_loss(
                create_loss(name, **BACKENDS[backend]), formula(name)
            )
            for name in arguments.losses
            for backend in arguments.backends
        }
        contestants |= {name: PEERS[name]() for name in peers}
    print(f"torch {torch.__version__}, {arguments.device}, threads: {arguments.threads}")
    measured = {}
    for size in sorted(arguments.batch_sizes):
        generator = torch.Generator().manual_seed(0)
        shape = [size, *([arguments.elements] if arguments.elements else []), arguments.dimension]
        images, texts = (
            normalize(torch.randn(shape, generator=generator), dim=-1)
            .to(arguments.device, getattr(torch, arguments.dtype))
            .requires_grad_()
            for _ in range(2)
        )
        measured[size] = measure(contestants, images, texts, arguments.rounds)
        sets = f"sets of {arguments.elements}, " if arguments.elements else ""
        title = f"B {size:,}, {sets}D {arguments.dimension:,}, {arguments.dtype}"
        print_table(title, measured[size][0], peers[0], memory=measured[size][1])
    if arguments.plot is not None:
        draw(measured, peers).savefig(arguments.plot)


if __name__ == "__main__":
    main()
