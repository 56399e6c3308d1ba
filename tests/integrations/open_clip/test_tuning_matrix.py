"""Rates, the best epoch and early stopping together: every two values resume to the same bits."""

import itertools
import logging
import os
import shutil

import pytest

from tests.helpers.covering import covering_rows
from tests.helpers.open_clip_training import (
    TINY,
    assert_equal_nested,
    read_best,
    read_checkpoint,
    read_results,
    small_shard_flags,
)
from tests.helpers.processes import in_processes
from vl_plugins.integrations.open_clip.launcher import main

FACTORS = {
    "loss": {
        "unified": ["--loss", "unified"],
        "learned": ["--loss", "siglip", "--loss-kwargs", "learn_scale=True"],
        "open_clip's": [],
    },
    "head": {"none": [], "linear": ["--head", "linear"]},
    "image rate": {"one": [], "own": ["--image-lr", "1e-3"]},
    "text rate": {"one": [], "own": ["--text-lr", "5e-3"]},
    "head rate": {"one": [], "own": ["--head-lr", "1e-2"]},
    "image decay": {"none": [], "0.7": ["--image-layer-decay", "0.7"]},
    "text decay": {"none": [], "0.5": ["--text-layer-decay", "0.5"]},
    "best": {"none": [], "rsum": ["--save-best"], "rank": ["--save-best", "image_to_text_mean_rank"]},
    "patience": {"none": [], "2": ["--patience", "2"]},
    "start": {"trained": [], "validated": ["--validate-first"]},
    "validations": {"each": [], "second": ["--val-frequency", "2"]},
    "schedule": {"cosine": [], "constant": ["--lr-scheduler", "const"], "none": ["--skip-scheduler"]},
    "optimizer": {"adamw": [], "sgd": ["--opt", "timm/sgd"]},
    "checkpoints": {"all": [], "latest": ["--save-most-recent"]},
    "processes": {"1": [], "2": ["--dist-backend", "gloo"]},
}
EPOCHS = 4


def is_possible(row):
    """Return whether there are heads, or parameters of a loss, for the rate of heads."""
    return not (
        row.get("head rate") == "own" and row.get("head") == "none" and row.get("loss") in ("unified", "open_clip's")
    )


ROWS = covering_rows({name: list(values) for name, values in FACTORS.items()}, is_possible)
FAST = (1, 2)


def train(rank, folder, flags):
    os.chdir(folder)
    logging.getLogger().handlers.clear()  # each training adds its own
    assert main(flags) == 0


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if i in FAST else pytest.mark.slow, id=str(i)) for i, row in enumerate(ROWS)]
)
def test_a_resumed_training_is_the_same(row, tmp_path, toy_shards):
    flags = [*TINY, *small_shard_flags(toy_shards), "--captions-per-image", "random", "--train-num-samples", "8"]
    flags += ["--lr", "2e-3", "--epochs", str(EPOCHS), "--batch-size", "2"]
    flags += itertools.chain(*(FACTORS[factor][value] for factor, value in row.items()))
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    straight.mkdir()
    processes = int(row["processes"])
    in_processes(train, processes, straight, flags, joined=False)
    checkpoints = "logs/run/checkpoints"
    epochs = sorted((straight / checkpoints).glob("epoch_[0-9].pt"))
    end = len(epochs)
    shutil.copytree(straight, resumed)
    for file in (resumed / checkpoints).glob("*.pt"):
        if file.name not in ("epoch_1.pt", "best.pt"):
            file.unlink()
    if row["checkpoints"] == "latest":
        shutil.copy(resumed / checkpoints / "epoch_1.pt", resumed / checkpoints / "epoch_latest.pt")
    in_processes(train, processes, resumed, [*flags, "--resume", "latest"], joined=False)
    assert "resuming checkpoint" in (resumed / "logs/run/out.log").read_text()
    if row["checkpoints"] == "all":
        assert len(list((resumed / checkpoints).glob("epoch_[0-9].pt"))) == end
    assert_equal_nested(read_checkpoint(resumed, end), read_checkpoint(straight, end))
    assert read_results(resumed) == read_results(straight)
    has_best = row["best"] != "none" or row["patience"] != "none"
    assert (straight / checkpoints / "best.pt").exists() == has_best
    if has_best:
        assert_equal_nested(read_best(resumed), read_best(straight))
