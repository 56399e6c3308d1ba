"""What is kept of a training run: command, processor time, metrics, and what each test image contributes."""

import io
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vl_plugins.data.files import write_file
from vl_plugins.retrieval import ImageValues
from vl_plugins.retrieval.comparison import BlockedQueries

__all__ = ["Outcome", "made_by", "metric_means", "selected_metrics"]

# The metrics that claims are about; the others are kept as numbers of the whole split.
COMPARED = ("rsum", "image_to_text_R@1", "text_to_image_R@1")

PACKAGE = ("vl_plugins", "integrations", "configs")

BLOCKED_TYPES = {"image": np.int32, "blocked_by": np.int32, "gain": np.float32}


class Outcome(NamedTuple):
    """What is kept of a run.

    Attributes:
        command: the training command.
        made_by: the commit of this repository, and the version of torch.
        training_seconds: processor time of training, without the imports of Python.
        all_seconds: the same with the evaluation.
        val, test: metrics of the splits by name, recalls in percent.
        image_values: what each image of the test split contributes to RSUM and both R@1.
    """

    command: str
    made_by: str
    training_seconds: float
    all_seconds: float
    val: dict[str, float]
    test: dict[str, float]
    image_values: ImageValues

    def save(self, file: Path) -> None:
        """Write a compressed ``.npz`` file, completely or not at all."""
        arrays: dict[str, Any] = {"command": self.command, "made_by": self.made_by}
        arrays["seconds"] = np.array([self.training_seconds, self.all_seconds])
        for split, metrics in (("val", self.val), ("test", self.test)):
            arrays[f"{split}_metrics"] = np.array(list(metrics))
            arrays[f"{split}_means"] = np.array(list(metrics.values()))
        arrays |= _arrays_of(self.image_values)
        stream = io.BytesIO()
        np.savez_compressed(stream, **arrays)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, stream.getbuffer())

    @classmethod
    def load(cls, file: Path) -> "Outcome":
        """Read what :meth:`save` wrote."""
        with np.load(file, allow_pickle=False) as arrays:
            splits = []
            for split in ("val", "test"):
                names, means = arrays[f"{split}_metrics"].tolist(), arrays[f"{split}_means"].tolist()
                splits.append(dict(zip(names, means, strict=True)))
            training_seconds, all_seconds = arrays["seconds"].tolist()
            return cls(
                command=str(arrays["command"]),
                made_by=str(arrays["made_by"]),
                training_seconds=training_seconds,
                all_seconds=all_seconds,
                val=splits[0],
                test=splits[1],
                image_values=_image_values_of(arrays),
            )


def made_by() -> str:
    """Return the last commit that changed the package, whether it has been changed since, and torch's version."""
    commit = _git("log", "-1", "--format=%h", "--abbrev=10", "--", *PACKAGE) or "unknown"
    changes = " with changes" if _git("status", "--porcelain", "--", *PACKAGE) else ""
    return f"commit {commit}{changes}, torch {torch.__version__}"


def _git(*arguments: str) -> str:
    root = Path(__file__).parent.parent
    result = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def metric_means(values: ImageValues) -> dict[str, float]:
    """Return the metrics of a split by name; recalls are in percent."""
    return dict(zip(values.metrics, values.values.mean(dim=1).tolist(), strict=True))


def selected_metrics(values: ImageValues, metrics: tuple[str, ...] = COMPARED) -> ImageValues:
    """Return the values of some metrics only."""
    rows = [values.metrics.index(metric) for metric in metrics]
    blocked = tuple(values.blocked[row] for row in rows)
    return ImageValues(metrics, values.values[rows], values.steps[rows], blocked)


def _arrays_of(values: ImageValues) -> dict[str, np.ndarray]:
    """Return image values as small arrays. Their entries are multiples of a step, so float32 is precise enough."""
    arrays = {
        "metrics": np.array(values.metrics),
        "values": values.values.float().numpy(),
        "steps": values.steps.numpy(),
    }
    for number, blocked in enumerate(values.blocked):
        assert blocked is not None, "precisions are not kept by image"
        for name, dtype in BLOCKED_TYPES.items():
            arrays[f"blocked_{name}_{number}"] = getattr(blocked, name).numpy().astype(dtype)
    return arrays


def _image_values_of(arrays: Mapping[str, np.ndarray]) -> ImageValues:
    """Return the image values of :func:`_arrays_of`."""
    metrics = tuple(arrays["metrics"].tolist())
    blocked = []
    for number in range(len(metrics)):
        image, blocked_by, gain = (torch.from_numpy(arrays[f"blocked_{name}_{number}"]) for name in BLOCKED_TYPES)
        blocked.append(BlockedQueries(image.long(), blocked_by.long(), gain.double()))
    values, steps = torch.from_numpy(arrays["values"]).double(), torch.from_numpy(arrays["steps"])
    return ImageValues(metrics, values, steps, tuple(blocked))
