"""What the areas of trainings share: data, initial weights, recorded batches, and the names of both versions.

``--record FILE`` writes the training batches that this version reads; each area adds its own to the file. ``--batches
FILE`` trains on them instead, so that versions that order an epoch differently can be compared.

Both versions read through torch's ``DataLoader``, so that is where batches are recorded and replaced. A later version
needs an entry in ``VERSIONS`` and, if its batches are not tuples of images, texts, labels and keys, a branch in
``to_record`` and ``from_record``.

Losses that differ by rounding in float32 leave weights that differ by about 1e-6. Metrics can then jump by a rank where
similarities nearly tie; with ``amp_bf16`` they do.
"""

import argparse
import contextlib
import json
import logging
import re
import runpy
import subprocess
import sys
import zlib
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import Cases
from torch.utils.data import DataLoader

__all__ = ["INSTALLED", "Batches", "add_results", "common_name", "launch", "main", "seed_weights"]


@dataclass
class Version:
    """Names of one version.

    Args:
        flags: what replaces flags of 0.2, by their text.
        weights: patterns in names of weights, and their replacements; results have the names of 0.2 without prefixes.
        metrics: converts the metrics of an epoch to those of 0.2, in percent.
        towers: module and function that build the model of the trainer for pytorch-metric-learning.
        pml_weights: finds the weights in that trainer's checkpoint.
        is_training: whether a loader of that trainer reads training batches.
    """

    flags: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    metrics: Callable[[dict[str, float]], dict[str, float]] = lambda metrics: metrics
    towers: str = "vl_plugins.integrations.pytorch_metric_learning.runs.build_towers"
    pml_weights: Callable[[dict], dict] = lambda saved: {
        f"{part}.{name}": value for part, state in saved["models"].items() for name, value in state.items()
    }
    is_training: Callable[[DataLoader], bool] = lambda loader: type(loader.dataset).__name__ != "EvaluationReader"


def metrics_of_0_2(metrics: dict[str, float]) -> dict[str, float]:
    """Return metrics of 0.3, where recalls are fractions under open_clip's names, and precisions are new."""
    if "rsum" not in metrics:  # of open_clip's own validation
        return metrics
    percent = {f"{name}_percent": 100 * value for name, value in metrics.items() if "_R@" in name}
    others = {name: value for name, value in metrics.items() if not re.search("_R@|_precision|rsum", name)}
    return percent | others | {"rsum_percent": metrics["rsum"]}


WEIGHTS = {r"^clip\.": "", r"^parts\.": ""}
VERSIONS = {
    "0.2": Version(weights=WEIGHTS),
    "0.3": Version(
        flags={"--same-group positive": "", "data.same_group=positive": ""},
        weights=WEIGHTS | {r"^(image|text)\.(trunk|embedder|head)\.": r"\1_\2."},
        metrics=metrics_of_0_2,
        towers="vl_plugins.integrations.pytorch_metric_learning.objective.build_towers",
        is_training=lambda loader: type(loader.sampler).__name__ == "CaptionSampler",
    ),
}
INSTALLED = VERSIONS["0.3" if find_spec("vl_plugins.data.dataset") else "0.2"]


def to_record(batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[str]]:
    """Return images, texts, labels and keys of a batch; each image has a label of its own if the reader gives none."""
    images, texts, *rest = batch
    labels = rest[0] if rest else torch.arange(len(images))
    keys = rest[1] if len(rest) > 1 else []
    return images, texts, labels, keys


def from_record(loader: DataLoader, images, texts, labels, keys) -> Any:
    """Return a batch as the loader would; that of the trainer for pytorch-metric-learning has no keys."""
    if not type(loader.dataset).__module__.startswith("vl_plugins."):  # a reader of open_clip
        return [images, texts]
    return (images, texts, labels, keys) if keys else (images, texts, labels)


class Batches:
    """Recorded batches of the trainings of one area: by training, epoch and step."""

    def __init__(self, recorded: dict[str, list] | None = None):
        self.replay = recorded is not None
        self.recorded = recorded or {}

    @contextlib.contextmanager
    def used_in(self, training: str, is_training: Callable[[DataLoader], bool]) -> Iterator[None]:
        """Record or replace what loaders yield for which ``is_training`` is true; each iteration is an epoch."""
        read, epochs = DataLoader.__iter__, self.recorded.setdefault(training, [])
        numbers = count()

        def record(loader):
            epochs.append([])
            for batch in read(loader):
                epochs[-1].append(to_record(batch))
                yield batch

        def replay(loader):
            return (from_record(loader, *batch) for batch in epochs[next(numbers)])

        def iterate(loader):
            if not is_training(loader):
                return read(loader)
            return replay(loader) if self.replay else record(loader)

        with mock.patch.object(DataLoader, "__iter__", iterate):
            yield
        if not epochs or (self.replay and next(numbers) != len(epochs)):
            raise RuntimeError(f"{training}: training did not read its batches through the expected loader")


def seed_weights(model: torch.nn.Module, but: Container[str] = ()) -> None:
    """Draw weights from seeds by their names, so that they do not depend on the order in which a version makes them."""
    for name, parameter in model.named_parameters():
        name = common_name(name)
        if name in but or parameter.ndim == 0:
            continue
        with torch.no_grad():
            if name.rpartition(".")[2].startswith("bias"):
                parameter.zero_()
            elif parameter.ndim > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)


def common_name(name: str) -> str:
    """Return a name of a weight that both versions share."""
    for pattern, replacement in INSTALLED.weights.items():
        name = re.sub(pattern, replacement, name)
    return name


def write_data() -> None:
    """Write toy scenes, and shards of them whose groups are four images each."""
    command = Path(sys.executable).with_name("vl-plugins")
    sizes = "--image-size 32 --train 64 --val 24 --test 8".split()
    subprocess.run([command, "toy", "--out", "toy", *sizes], check=True)
    annotations = Path("toy/dataset_toy.json")
    content = json.loads(annotations.read_text())
    for number, image in enumerate(content["images"]):
        image["scene"] = f"scene {number // 4}"
    annotations.write_text(json.dumps(content))
    shards = [command, "shards", "coco", "--annotations", annotations, "--images", "toy", "--workers", "1"]
    for folder, options in (("shards", []), ("groups", ["--group-key", "scene", "--seed", "0"])):
        subprocess.run([*shards, "--out", folder, "--samples-per-shard", "16", *options], check=True)


def launch(module: str, flags: str) -> None:
    """Run ``python -m MODULE FLAGS`` in this process."""
    for old, new in INSTALLED.flags.items():
        flags = flags.replace(old, new)
    with mock.patch.object(sys, "argv", [module, *flags.split()]):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as stop:
            if stop.code:
                sys.exit(f"{module} {flags}: exit status {stop.code}")
        finally:
            logging.getLogger().handlers.clear()  # open_clip adds some for each training


def add_results(found: Cases, training: str, weights: dict[str, Any], results: Path) -> None:
    """Add the weights and the metrics of a training."""
    tensors = {common_name(name): value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    found.add(f"{training}/weights", **tensors)
    for row in map(json.loads, results.read_text().splitlines()):
        found.add(f"{training}/metrics of epoch {row['epoch']}", **INSTALLED.metrics(row))


def main(area: str, trainings: Callable[[Cases, Batches], None]) -> None:
    """Write the results of an area's trainings to the file that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--batches", type=Path, metavar="FILE", help="train on these recorded batches")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add the training batches to this file")
    arguments = parser.parse_args()
    file, recorded = arguments.batches or arguments.record, {}
    if arguments.batches or (file and file.exists()):
        recorded = torch.load(file, weights_only=True)
    found, batches = Cases(), Batches(recorded[area] if arguments.batches else None)
    write_data()
    trainings(found, batches)
    np.savez(arguments.out, **found)
    if arguments.record:
        torch.save({**recorded, area: batches.recorded}, arguments.record)
