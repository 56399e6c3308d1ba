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
from tests.reference.sets import EXP_AND_POOL
from vl_plugins.functional import smooth_chamfer_similarity
from vl_plugins.kernels import pairwise_smooth_chamfer

CHECKED = 16  # sets
SIMILARITIES = {
    f"smooth-Chamfer ({backend})": partial(pairwise_smooth_chamfer, backend=backend) for backend in ("dense", "tiled")
}
SIMILARITIES |= EXP_AND_POOL


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
        check(name, similarity, partial(smooth_chamfer_similarity, alpha=16.0), *some)
    leaves = images.requires_grad_(), texts.requires_grad_()
    steps = {name: partial(step, similarity, *leaves, upstream) for name, similarity in SIMILARITIES.items()}
    seconds = time_rounds(steps, arguments.rounds, clock())
    memory = {name: extra_bytes(run) for name, run in steps.items()}
    title = f"{len(images):,} x {len(texts):,} sets of {arguments.elements}, D {arguments.dimension:,}"
    print_table(title, seconds, "LP pooling", memory=memory)


if __name__ == "__main__":
    main()
