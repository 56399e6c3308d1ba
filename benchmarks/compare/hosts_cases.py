"""Weights and metrics of short trainings with open_clip and with the trainer for pytorch-metric-learning.

With ``--batches FILE``, both versions train on the same batches: a version writes those that it reads into the file, or
trains on those that the file has. So trainings can be compared although the versions order an epoch differently.
"""

import argparse
import contextlib
import json
import logging
import runpy
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from recording import Recorder, save_cases
from torch.utils.data import DataLoader

from vl_plugins.cli import main as vl_plugins

TOY_SHARDS = (
    "toy --out toy --image-size 32 --train 64 --val 24 --test 8",
    "shards coco --annotations toy/dataset_toy.json --images toy --out shards --samples-per-shard 16 --workers 1",
)
SHARDS = "--train-data shards/toy-train-{000000..000003}.tar --val-data shards/toy-val-000000.tar"
OPEN_CLIP = f"""{SHARDS} --model vl-tiny --device cpu --workers 0 --batch-size 8 --epochs 2 --save-frequency 2
    --lr 1e-3 --warmup 2 --log-every-n-steps 4 --name run --seed 0"""
RANDOM = "--captions-per-image random "  # which 0.3 reads by default
SETS = f"{RANDOM}--loss smooth_chamfer --head set --head-kwargs num_slots=3 num_iters=2 hidden_dim=32"
OPEN_CLIP_TRAININGS = {
    "unified": f"{RANDOM}--loss unified",
    "several captions": "--loss unified --captions-per-image 3",
    "all captions": "--loss vlc --captions-per-image all",
    "learned scale": f"{RANDOM}--loss unified --loss-kwargs margin=0.1 scale=learned",
    "accumulation": f"{RANDOM}--loss unified --accum-freq 2",
    "miner and reducer": f"{RANDOM}--loss triplet_sh --miner MultiSimilarityMiner --reducer AvgNonZeroReducer",
    "warm-up": f"{RANDOM}--loss triplet_hn --loss-kwargs warmup_steps=6",
    "goal": f"{RANDOM}--loss goal",
    "sets": SETS,
    "sets, accumulation": f"{SETS} --accum-freq 2 --distance match_probability",
    "linear head": f"{RANDOM}--loss vlc --head linear --head-kwargs dim=24",
    "bfloat16": f"{RANDOM}--loss unified --precision amp_bf16",
    "no loss": "--head linear --head-kwargs dim=24 --captions-per-image first",
}
PML = f"""{SHARDS} --config toy.yaml --device cpu --out run --set training.epochs=2 data.batch_size=8 dim=32
    image.trunk.image_size=32 text.trunk.word_dim=16 text.trunk.hidden_dim=32 text.vocabulary.min_count=1"""
# Values without spaces, which separate words.
PML_TRAININGS = {
    "toy": "",
    "several captions": "data.captions_per_image=2",
    "miner and reducer": "miner=MultiSimilarityMiner reducer=AvgNonZeroReducer loss={'name':'triplet_sh'}",
    "sets": "head={'name':'set','num_slots':3,'num_iters':2,'hidden_dim':32} loss={'name':'smooth_chamfer'}",
    "clipped gradients": "training.clip_grad_norm=2.0",
    "host's loss": "loss={'name':'NTXentLoss','temperature':0.07}",
}


def with_ids(batch: list[Any]) -> list[Any]:
    """Return a batch of 0.3 as this version has it: no two of its captions are equal."""
    images, texts, labels = batch
    return [images, texts, labels, torch.arange(len(texts)), labels.new_zeros(len(labels), 0)]


class Batches:
    """Training batches by name of the training and epoch.

    Attributes:
        file: where they are, or will be; None to record nothing.
        epochs: of each training.
        replays: whether trainings read these batches instead of their own.
    """

    def __init__(self, file: Path | None):
        self.file = file
        self.replays = file is not None and file.exists()
        self.epochs: dict[str, list[list[Any]]] = torch.load(file, weights_only=True) if self.replays else {}

    @contextlib.contextmanager
    def used_in(self, training: str) -> Iterator[None]:
        """Record or replace what the training loader yields in the block."""
        if self.file is None:
            yield
            return
        read = DataLoader.__iter__
        epochs = iter(self.epochs[training]) if self.replays else None
        recorded: list[list[Any]] = []

        def iterate(loader: DataLoader) -> Iterator[Any]:
            sampler = getattr(loader.batch_sampler, "sampler", None)
            if type(sampler).__name__ != "CaptionSampler":  # of the validation
                return read(loader)
            if epochs is not None:
                return map(with_ids, next(epochs))
            recorded.append(list(read(loader)))
            return iter(recorded[-1])

        with mock.patch.object(DataLoader, "__iter__", iterate):
            yield
        if epochs is None:
            self.epochs[training] = recorded
        if not self.epochs[training] or (epochs is not None and next(epochs, None) is not None):
            raise RuntimeError("the training did not read its batches through a CaptionSampler")

    def save(self) -> None:
        if self.file is not None and not self.replays:
            torch.save(self.epochs, self.file)


def run_module(module: str, flags: str) -> None:
    """Run ``python -m MODULE FLAGS`` in this process."""
    with mock.patch.object(sys, "argv", [module, *flags.split()]):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"exit status {stop.code} of {module} {flags}") from stop


def results_of_training(weights: dict[str, Any], metrics: Path) -> dict[str, Any]:
    """Return the weights at the end, and the metrics of each epoch."""
    results = {}
    for name, value in weights.items():
        if isinstance(value, torch.Tensor):
            results[f"weight {name}"] = value
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            results[f"epoch {row['epoch']}, {name}"] = value
    return results


def train_with_open_clip(batches: Batches, name: str) -> dict[str, Any]:
    shutil.rmtree("logs", ignore_errors=True)
    logging.getLogger().handlers.clear()  # open_clip adds some in each training
    with batches.used_in(f"open_clip {name}"):
        run_module("vl_plugins.integrations.open_clip", f"--precision fp32 {OPEN_CLIP} {OPEN_CLIP_TRAININGS[name]}")
    checkpoints = Path("logs/run/checkpoints")
    weights = torch.load(checkpoints / "epoch_2.pt", weights_only=True)["state_dict"]
    return results_of_training(weights, checkpoints / "results.jsonl")


def train_with_pml(batches: Batches, name: str) -> dict[str, Any]:
    shutil.rmtree("run", ignore_errors=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    with batches.used_in(f"PML {name}"):
        run_module("vl_plugins.integrations.pytorch_metric_learning", f"{PML} {PML_TRAININGS[name]}")
    checkpoint = torch.load("run/latest.pt", weights_only=True)
    weights = {**checkpoint["models"], **checkpoint["loss_funcs"]}
    return results_of_training(weights, Path("run/results.jsonl"))


def run_cases(recorder: Recorder, arguments: argparse.Namespace) -> None:
    for command in TOY_SHARDS:
        if vl_plugins(command.split()):
            raise RuntimeError(f"vl-plugins {command} failed")
    batches = Batches(arguments.batches)
    for name in OPEN_CLIP_TRAININGS:
        recorder.run(f"open_clip/{name}", partial(train_with_open_clip, batches, name))
    for name in PML_TRAININGS:
        recorder.run(f"PML/{name}", partial(train_with_pml, batches, name))
    batches.save()


if __name__ == "__main__":
    save_cases(run_cases)
