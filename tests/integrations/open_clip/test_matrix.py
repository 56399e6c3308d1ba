"""Flags that people use, with losses, readers, precisions and processes: every two of them train and resume together.

What a host refuses stands in ``REFUSED``, with the message that users get.
"""

import os
import re

import pytest
import torch

from tests.helpers.covering import covering_rows
from tests.helpers.open_clip_training import TINY, read_checkpoint, small_shard_flags
from tests.helpers.processes import in_processes
from vl_plugins.integrations.open_clip.launcher import main

FACTORS = {
    "loss": {
        "unified": [],
        "triplet_hn": ["--loss-kwargs", "warmup_steps=3"],
        "goal": [],
        "smooth_chamfer": "--head set --head-kwargs num_slots=2 num_iters=1 hidden_dim=16".split(),
        "siglip": [],
        "NTXentLoss": [],
        "ProxyAnchorLoss": "--loss-kwargs num_classes=16 embedding_size=128 --head-lr 1e-2".split(),
    },
    "reader": {
        "random": ["--captions-per-image", "random"],
        "5": ["--captions-per-image", "5"],
        "open_clip's": [],
    },
    "accumulation": {"1": [], "2": ["--accum-freq", "2"]},
    "precision": {name: ["--precision", name] for name in ("fp32", "amp_bf16", "pure_bf16")},
    "processes": {"1": [], "2": ["--dist-backend", "gloo"]},
    "lock": {
        "nothing": [],
        "image": ["--lock-image", "--lock-image-freeze-bn-stats"],
        "text": ["--lock-text", "--lock-text-freeze-layer-norm"],
    },
    "checkpointing": {"no": [], "yes": ["--grad-checkpointing"]},
    "compile": {"no": [], "yes": ["--torchcompile"]},
    "batch norm": {"no": [], "yes": ["--use-bn-sync"]},
    "graph": {"no": [], "static": ["--ddp-static-graph"]},
    "clipping": {"no": [], "yes": ["--grad-clip-norm", "0.5"]},
    "checkpoints": {"all": [], "last": ["--delete-previous-checkpoint"]},
    "sync": {"no": [], "yes": ["--remote-sync", "remote", "--remote-sync-protocol", "fsspec"]},
}
REFUSED: dict[str, str] = {}


def is_possible(row):
    return not (row.get("loss") == "ProxyAnchorLoss" and row.get("reader") == "open_clip's")


ROWS = covering_rows({name: list(values) for name, values in FACTORS.items()}, is_possible)
FAST = 10


def flags_of(row, toy_shards):
    flags = [*TINY, *small_shard_flags(toy_shards)[:2], "--batch-size", "4"]
    samples = 2 * 4 * int(row["accumulation"]) * int(row["processes"])
    flags += ["--train-num-samples", str(samples), "--loss", row["loss"]]
    for factor, value in row.items():
        flags += FACTORS[factor][value]
    return flags


def train(rank, folder, flags):
    os.chdir(folder)
    compiled = torch.compile
    torch.compile = lambda model, **options: compiled(model, backend="eager")
    torch.set_num_threads(1)
    assert main(flags) == 0


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if i < FAST else pytest.mark.slow, id=str(i)) for i, row in enumerate(ROWS)]
)
def test_a_training_and_its_resumption(row, tmp_path, toy_shards):
    flags, processes = flags_of(row, toy_shards), int(row["processes"])
    in_processes(train, processes, tmp_path, [*flags, "--epochs", "2"], joined=False)
    saved = sorted(os.listdir(tmp_path / "logs/run/checkpoints"))
    assert saved == (["epoch_2.pt"] if row["checkpoints"] == "last" else ["epoch_1.pt", "epoch_2.pt"])
    more = ["--epochs", "3", "--name", "resumed", "--resume", "logs/run/checkpoints/epoch_2.pt"]
    in_processes(train, processes, tmp_path, [*flags, *more], joined=False)
    checkpoint = read_checkpoint(tmp_path, 3, "resumed")
    assert {int(state["step"]) for state in checkpoint["optimizer"]["state"].values()} == {6}
    logs = [(tmp_path / "logs" / name / "out.log").read_text() for name in ("run", "resumed")]
    losses = [re.findall(rf"Train Epoch.*{row['loss'].capitalize()}_loss: (\S+)", log) for log in logs]
    assert list(map(len, losses)) == [4, 2]
    assert all(abs(float(loss)) < 1e3 for of_run in losses for loss in of_run)
    assert row["sync"] == "no" or (tmp_path / "remote/run/checkpoints/epoch_2.pt").exists()
