"""Time and memory of smooth-Chamfer similarity, forward and backward, on random sets of K unit vectors.

    python -m benchmarks.sets [--images 1024] [--captions 1024] [--elements 4] [--dimension 1024]

The peers are the usual ways to write it in plain torch: exponentials, and pooling over the sets by ``LPPool2d`` (with
which it is compared), by ``AvgPool2d`` or by sums. They take unit vectors; ours normalizes. Before anything is timed,
each has to give the value and gradients of the formula in float64. With one thread, time is processor time, otherwise
wall time. MB is the most that was allocated at once, similarities and gradients included.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.measurement import check, clock, extra_bytes, print_table, time_rounds
from tests.sets.references import EXP_AND_POOL
from vl_plugins.distances import smooth_chamfer_similarity

CHECKED = 16  # sets
ALPHA = 16.0
SIMILARITIES = {
    f"smooth-Chamfer ({name})": partial(smooth_chamfer_similarity, alpha=ALPHA, tiled=name == "tiled")
    for name in ("dense", "tiled")
}
SIMILARITIES |= EXP_AND_POOL


def formula(images: Tensor, texts: Tensor) -> Tensor:
    """Return the smooth-Chamfer similarities (A, C) of sets of unit vectors, (A, K, D) and (C, K, D)."""
    cosines = ALPHA * torch.einsum("akd,cld->ackl", images, texts)
    return (cosines.logsumexp(dim=3).mean(dim=2) + cosines.logsumexp(dim=2).mean(dim=2)) / (2 * ALPHA)


def step(similarity: Callable[[Tensor, Tensor], Tensor], images: Tensor, texts: Tensor, upstream: Tensor) -> None:
    """Run forward and backward, and drop the gradients."""
    similarity(images, texts).backward(upstream)
    images.grad = texts.grad = None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--captions", type=int, default=1024)
    parser.add_argument("--elements", type=int, default=4, help="of each set")
    parser.add_argument("--dimension", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)

    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    images, texts = (
        normalize(torch.randn(sets, arguments.elements, arguments.dimension, generator=generator), dim=-1)
        for sets in (arguments.images, arguments.captions)
    )
    upstream = torch.randn(len(images), len(texts), generator=generator)
    for name, similarity in SIMILARITIES.items():
        some = images[:CHECKED], texts[:CHECKED], upstream[:CHECKED, :CHECKED]
        check(name, similarity, formula, *some)
    leaves = images.requires_grad_(), texts.requires_grad_()
    steps = {name: partial(step, similarity, *leaves, upstream) for name, similarity in SIMILARITIES.items()}
    seconds = time_rounds(steps, arguments.rounds, clock())
    memory = {name: extra_bytes(run) for name, run in steps.items()}
    title = f"{len(images):,} x {len(texts):,} sets of {arguments.elements}, D {arguments.dimension:,}"
    print_table(title, seconds, "LP pooling", memory=memory)


if __name__ == "__main__":
    main()
