"""Flags that people use, with losses, readers, precisions and processes: every two train and resume together."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.covering import covering_rows
from tests.helpers.open_clip_training import LAUNCH, TINY, read_checkpoint, run, small_shard_flags
from tests.helpers.processes import in_processes
from vl_plugins.integrations.open_clip.host import HAS_TASKS
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
# What open_clip 3.x itself refuses, by its own messages: flags, processes, and what it says.
REFUSED = [
    ("--lock-text", 1, "AssertionError: Unfreezing LayerNorm is not supported"),
    ("--model vl-tiny-resnet --use-bn-sync", 2, "SyncBatchNorm layers only work with GPU modules"),
    (
        "--resume latest --remote-sync remote --remote-sync-protocol fsspec",
        1,
        "Error. Sync protocol not supported when",
    ),
]


def is_possible(row):
    # Our reader numbers classes. 4.x accumulates by no_sync, which torch does not take with a static graph.
    has_classes = row.get("loss") == "ProxyAnchorLoss" and row.get("reader") == "open_clip's"
    return not (has_classes or (HAS_TASKS and row.get("accumulation") == "2" and row.get("graph") == "static"))


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


def test_the_guide_names_the_flags():
    page = (Path(__file__).parents[3] / "docs/guides/open_clip.md").read_text(encoding="utf-8")
    sentence = page[page.index("All losses, with either reader") : page.index("Our flags:")]
    for values in FACTORS.values():
        for flags in values.values():
            if flags and flags[0] not in ("--loss-kwargs", "--head", "--captions-per-image", "--dist-backend"):
                assert f"`{flags[0]}`" in sentence or f"`{flags[0]} fp32`" in sentence
    for flags, _, _ in REFUSED:
        assert all(f"`{flag}`" in sentence or f"`{flag} " in sentence for flag in re.findall(r"--[a-z-]+-sync", flags))


@pytest.mark.skipif(HAS_TASKS, reason="4.x refuses less")
@pytest.mark.parametrize(("flags", "processes", "message"), REFUSED)
def test_what_open_clip_refuses(tmp_path, toy_shards, flags, processes, message):
    command = [*TINY, *small_shard_flags(toy_shards)[:2], "--loss", "unified", "--train-num-samples", "8"]
    start = LAUNCH
    if processes == 2:
        start = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2".split(), *LAUNCH[1:]]
        command += ["--dist-backend", "gloo"]
    finished = run([*start, *command, *flags.split()], tmp_path)
    assert finished.returncode > 0
    assert message in finished.stdout + finished.stderr
