"""Time and memory of smooth-Chamfer similarity against exponentials and pooling in plain torch.

    python tests/benchmarks/bench_set_similarity.py [--images 200] [--captions 1000] [--elements 4] [--dimension 1024]

Forward and backward of ``pairwise_smooth_chamfer``, dense and tiled, and of each formulation in
``tests/reference/sets.py``, on leaves of unit vectors in float32, with one thread. Only ours normalizes them. In each
round all of them run, forwards in one round and backwards in the next.

Seconds are of processor time, which other programs on the machine disturb less than wall time: their median, and
ours divided by the other's in the same round, median, least and most. Memory is the most that was allocated during
forward and backward beyond what was there before, the similarities and the two gradients; it is the same in every
round.
"""

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import normalize

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.memory import extra_bytes
from tests.reference.sets import EXP_AND_POOL
from vl_plugins.kernels import pairwise_smooth_chamfer
from vl_plugins.utils.tables import align_columns

OURS = {name: partial(pairwise_smooth_chamfer, backend=name) for name in ("dense", "tiled")}


def leaf(*shape: int) -> torch.Tensor:
    return normalize(torch.randn(shape), dim=-1).requires_grad_()


def run(similarity, x: torch.Tensor, y: torch.Tensor, upstream: torch.Tensor) -> float:
    """Return the seconds of processor time."""
    x.grad = y.grad = None
    started = time.process_time()
    similarity(x, y).backward(upstream)
    return time.process_time() - started


def memory(similarity, x: torch.Tensor, y: torch.Tensor, upstream: torch.Tensor) -> int:
    x.grad = y.grad = None
    return extra_bytes(partial(run, similarity, x, y, upstream), kept=upstream.nbytes + x.nbytes + y.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--captions", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=4, help="of each set")
    parser.add_argument("--dimension", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = (leaf(sets, arguments.elements, arguments.dimension) for sets in (arguments.images, arguments.captions))
    upstream = torch.randn(arguments.images, arguments.captions)
    similarities = OURS | EXP_AND_POOL
    values = [similarity(x, y).detach() for similarity in similarities.values()]
    for name, value in zip(similarities, values, strict=True):
        torch.testing.assert_close(value, values[0], msg=f"{name} is another similarity")

    seconds = {name: [] for name in similarities}
    # The first round warms up.
    for number in range(arguments.rounds + 1):
        for name in list(similarities)[:: 1 if number % 2 else -1]:
            taken = run(similarities[name], x, y, upstream)
            if number:
                seconds[name].append(taken)
    megabytes = {name: memory(similarity, x, y, upstream) / 1e6 for name, similarity in similarities.items()}

    rows = [("", "against", "seconds", "its", "ratio", "least", "most", "MB", "its", "ratio")]
    for ours in OURS:
        for other in EXP_AND_POOL:
            ratios = [taken / by_other for taken, by_other in zip(seconds[ours], seconds[other], strict=True)]
            rows.append(
                (
                    ours,
                    other,
                    *(f"{statistics.median(seconds[name]):.3f}" for name in (ours, other)),
                    *(f"{ratio:.2f}" for ratio in (statistics.median(ratios), min(ratios), max(ratios))),
                    *(f"{megabytes[name]:.1f}" for name in (ours, other)),
                    f"{megabytes[ours] / megabytes[other]:.3f}",
                )
            )
    print("\n".join("  ".join(row) for row in align_columns(rows)))


if __name__ == "__main__":
    main()
