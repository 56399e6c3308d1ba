"""Long training in two processes: memory, open files and processes stay what they are."""

import json
import sys
from pathlib import Path

import pytest

from tests.integrations.open_clip.soak import MEASURED
from tests.integrations.open_clip.test_launcher import run
from vl_plugins.data.annotations import read_karpathy
from vl_plugins.data.shards import write_shards
from vl_plugins.data.toy import write_toy_scenes

TORCHRUN = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2 -m".split()]
BATCH_SIZE = 8
FLAGS = f"--model vl-tiny --device cpu --precision amp_bf16 --batch-size {BATCH_SIZE} --workers 1 --warmup 10 --lr 1e-4"
FLAGS += " --loss unified --captions-per-image 2 --local-loss --gather-with-grad --save-most-recent --save-frequency 0"


@pytest.fixture
def large_shards(tmp_path):
    """Forty steps of two processes, in shards."""
    write_toy_scenes(tmp_path / "toy", train=640, val=24, test=1)
    images = read_karpathy(tmp_path / "toy" / "dataset_toy.json", "coco")
    write_shards(images, tmp_path / "toy", tmp_path / "shards", samples_per_shard=80)
    return tmp_path / "shards"


def test_nothing_grows_in_sixty_steps(tmp_path, toy_shards):
    soak(tmp_path, toy_shards, steps=60, epochs=15, tolerance=0.1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_nothing_grows_in_two_thousand_steps(tmp_path, large_shards):
    soak(tmp_path, large_shards, steps=2000, epochs=50, tolerance=0.02)


def soak(tmp_path, shards, steps, epochs, tolerance):
    flags = [*FLAGS.split(), "--epochs", str(epochs), "--name", "run", "--log-every-n-steps", "100"]
    for split in ("train", "val"):
        flags += [f"--{split}-data", "::".join(map(str, sorted(shards.glob(f"toy-{split}-*.tar"))))]
    command = [*TORCHRUN, "tests.integrations.open_clip.soak", "--", *flags]
    root = Path(__file__).parents[3]
    assert run(command, tmp_path, timeout=2900, PYTHONPATH=str(root)).returncode == 0
    for rank in (0, 1):
        rows = [json.loads(line) for line in (tmp_path / MEASURED.format(rank=rank)).read_text().splitlines()]
        assert len(rows) == steps
        rows = rows[steps // epochs :]  # the worker that reads the validation split begins after the first epoch
        children = {tuple(row["children"]) for row in rows}
        assert len(children) == 1, "the same workers from the second epoch on"
        assert not any(Path(f"/proc/{pid}").exists() for pid in next(iter(children))), "none is left behind"
        first, last = rows[: len(rows) - steps // 2], rows[len(rows) - steps // 2 :]
        for what in ("files", "files of children"):
            assert max(row[what] for row in last) <= max(row[what] for row in first), what
        for what in ("memory", "memory of children"):
            means = [sum(row[what] for row in part) / len(part) for part in (first, last)]
            print(f"process {rank}, {what}: {means[0] / 2**20:.1f} MB, then {means[1] / 2**20:.1f} MB")
            assert means[1] <= (1 + tolerance) * means[0], what
