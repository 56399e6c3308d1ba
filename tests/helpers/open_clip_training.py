"""Short trainings of a small model by the launcher for open_clip, and what they leave."""

import json
import operator
import os
import subprocess
import sys
from argparse import Namespace

import torch

from vl_plugins.data.sources import read_karpathy
from vl_plugins.distances import SmoothChamferSimilarity
from vl_plugins.integrations.open_clip.flags import parse_args
from vl_plugins.integrations.open_clip.heads import add_heads
from vl_plugins.retrieval.features import describe_similarity

LAUNCH = [sys.executable, "-m", "vl_plugins.integrations.open_clip"]
TINY = (
    "--model vl-tiny --device cpu --precision fp32 --batch-size 4 --workers 0 --warmup 1 --lr 1e-3 --name run".split()
)
TINY += ["--epochs", "1", "--log-every-n-steps", "1"]


def small_shard_flags(toy_shards):
    """Return flags for 16 images to train on, four batches of ``TINY``, and 8 to validate."""
    train, val = toy_shards / "toy-train-{000000..000001}.tar", toy_shards / "toy-val-000000.tar"
    return ["--train-data", str(train), "--val-data", str(val)]


def write_table(file, scenes, split="train", number=None):
    """Write a table as open_clip reads it, of the first scenes of a split with their last captions; return these."""
    images = [image for image in read_karpathy(scenes / "dataset_toy.json", "coco") if image.split == split][:number]
    rows = [f"{scenes}/{image.file}\t{image.captions[4]}" for image in images]
    file.write_text("\n".join(["filepath\ttitle", *rows]))
    return [image.captions[4] for image in images]


def in_float64(create):
    """Return ``create_model_and_transforms`` of open_clip for float64, in which rounding hides no difference."""

    def create_in_float64(*arguments, **options):
        model, *transforms = create(*arguments, **options)
        return model.double(), *(
            lambda image, transform=transform: transform(image).double() for transform in transforms
        )

    return create_in_float64


def run(command, cwd, **variables):
    """Run a command to its end; its output is what a failing test shows."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    finished = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    print(finished.stdout, finished.stderr)
    return finished


def loss_options(loss, loss_kwargs=(), **options):
    """Return the launcher's options with those of a loss."""
    return Namespace(**vars(parse_args([])) | {"loss": loss, "loss_kwargs": dict(loss_kwargs), **options})


def read_checkpoint(folder, epoch=1, name="run"):
    return torch.load(folder / "logs" / name / "checkpoints" / f"epoch_{epoch}.pt", weights_only=True)


def read_best(folder, name="run"):
    return torch.load(folder / "logs" / name / "checkpoints/best.pt", weights_only=True)


def read_results(folder, name="run"):
    """Return the metrics by epoch; one that was interrupted after its validation is in the file twice."""
    lines = (folder / "logs" / name / "checkpoints" / "results.jsonl").read_text().splitlines()
    return {row["epoch"]: row for row in map(json.loads, lines)}


def error_line(output):
    """Return the launcher's one line; once training has begun, others write to standard error too."""
    (line,) = (line for line in output.splitlines() if line.startswith("vl_plugins: error: "))
    return line.removeprefix("vl_plugins: error: ")


def checkpoint_with_heads(clip, name, head, head_kwargs, similarity=None):
    """Add heads to a model; return what the launcher saves of it."""
    if head == "set":
        similarity = similarity or SmoothChamferSimilarity()
    model = add_heads(clip, head, head_kwargs, similarity)
    args = {"model": name, "head": head, "head_kwargs": head_kwargs}
    args |= {} if similarity is None else describe_similarity(similarity, parameters=False)
    return {"epoch": 1, "state_dict": model.state_dict(), "args": args}


def assert_equal_nested(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            assert_equal_nested(actual[key], value)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_equal_nested(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    else:
        assert actual == expected


def best_and_end(values, metric, patience):
    """Return the best epoch and the last one, by a loop over the values of an uninterrupted training."""
    is_better = operator.gt if metric == "rsum" else operator.lt
    best, end = 0, len(values) - 1
    for epoch, value in enumerate(values):
        if is_better(value, values[best]):
            best = epoch
        if epoch - best >= patience:
            end = epoch
            break
    return best, end
