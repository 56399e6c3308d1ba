"""The losses against what they are meant to reach, on a CPU in float32.

    python tests/benchmarks/bench_losses.py [--rounds 7] [--batch-sizes 1024 4096]

Each line is one of ours against another at one size: their time in the same round, median, least and most, and the most
memory that forward and backward allocate at once, gradients included; beside each the goal, and whether it is met. How
it is measured, and what the names are, says ``vl-plugins bench --help``, which compares anything else. Reading it is
left to people: times depend on the machine, so no test asserts them.

``ntxent`` and ``triplet-margin`` go from images to texts only; ours both ways. Of single vectors D is 512. Similarities
are of 1024 x 1024 sets of 4 vectors with D 1024.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from vl_plugins.benchmarks.contestants import Setting
from vl_plugins.benchmarks.measurement import Result, ratio, run_benchmark
from vl_plugins.utils.tables import align_columns


class Goal(NamedTuple):
    """Ours divided by the other; None where there is no goal."""

    ours: str
    other: str
    batch_size: int
    time: float | None = None
    memory: float | None = None
    threads: int = 1


GOALS = (
    Goal("unified", "clip", 1024, time=0.55, memory=0.35),
    Goal("unified", "clip", 4096, time=0.55, memory=0.35),
    Goal("unified", "three-products", 4096, time=1.35),
    Goal("unified (tiled)", "clip", 4096, time=0.70, memory=0.10),
    Goal("unified (tiled)", "clip", 8192, memory=0.05),
    Goal("triplet_hn", "triplet-margin", 4096, time=0.25, memory=0.12),
    Goal("unified", "ntxent", 512, time=0.01, memory=0.01),
    Goal("smooth_chamfer_similarity", "lp-pooling", 1024, time=0.90, memory=0.25),
    Goal("smooth_chamfer_similarity", "lp-pooling", 1024, time=0.60, memory=0.25, threads=2),
)


def setting_of(goal: Goal) -> Setting:
    of_sets = goal.ours == "smooth_chamfer_similarity"
    dimension, elements = (1024, 4) if of_sets else (512, None)
    return Setting(goal.batch_size, dimension, "float32", torch.device("cpu"), elements)


def measure(goals: list[Goal], rounds: int) -> Result:
    """Measure what goals of one setting, number of threads and loss need, in the same rounds."""
    torch.set_num_threads(goals[0].threads)
    names = [goal.ours.partition(" (") for goal in goals]
    losses = list(dict.fromkeys(loss for loss, _, _ in names))
    backends = list(dict.fromkeys(backend.rstrip(")") or "default" for _, _, backend in names))
    peers = list(dict.fromkeys(goal.other for goal in goals))
    return run_benchmark(losses, peers, backends, [setting_of(goals[0])], rounds=rounds, progress=say)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def rows_of(goals: list[Goal], result: Result) -> list[list[str]]:
    rows = []
    for goal in goals:
        name = f"{goal.ours} / {goal.other}"
        start = [name, f"{goal.batch_size}", f"{goal.threads}"]
        found = [
            ratio(ours, other)
            for ours, other in result.pairs(setting_of(goal))
            if (ours.name, other.name) == (goal.ours, goal.other)
        ]
        if not found:
            rows.append([*start, *["-"] * 6, "not measured"])
            continue
        (compared,) = found
        limits = [(compared.median, goal.time), (compared.memory, goal.memory)]
        is_met = all(limit is None or value <= limit for value, limit in limits)
        of_time, of_memory = ("-" if limit is None else f"{limit:g}" for _, limit in limits)
        times = [f"{value:.4f}" for value in compared[:3]]
        rows.append([*start, *times, of_time, f"{compared.memory:.4f}", of_memory, "yes" if is_met else "NO"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="goals at these only (default: all)")
    arguments = parser.parse_args()

    goals = [goal for goal in GOALS if arguments.batch_sizes is None or goal.batch_size in arguments.batch_sizes]
    if not goals:
        parser.error(f"there are goals at {sorted({goal.batch_size for goal in GOALS})}")
    together: dict[tuple[Setting, int, str], list[Goal]] = {}
    for goal in goals:
        together.setdefault((setting_of(goal), goal.threads, goal.ours.partition(" (")[0]), []).append(goal)
    machines, skipped = [], []
    rows = [["", "B", "threads", "time", "least", "most", "goal", "memory", "goal", "met"]]
    for group in together.values():
        result = measure(group, arguments.rounds)
        rows += rows_of(group, result)
        machines.append(result.machine)
        skipped += [f"skipped {each.name} at B {setting.batch_size}: {each.reason}" for setting, each in result.skipped]
    print("\n".join([*dict.fromkeys(machines), *("  ".join(row) for row in align_columns(rows)), *skipped]))


if __name__ == "__main__":
    main()
