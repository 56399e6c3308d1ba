"""Checkpoints of the trainer for pytorch-metric-learning where open_clip cannot be imported."""

import contextlib
import io
import json
import sys

import pytest
import torch
import yaml

from tests.helpers.pml_settings import settings
from tests.helpers.processes import in_processes
from vl_plugins.cli import main as vl_plugins
from vl_plugins.integrations.pytorch_metric_learning import main as train


def without_open_clip(rank, folder, shards):
    """Train, evaluate and plot; return what evaluation printed, and the error for another checkpoint."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("open_clip", "open_clip_train")]:
        del sys.modules[name]
    sys.modules |= dict.fromkeys(("open_clip", "open_clip_train"))  # importing them raises an error
    options = ["--device", "cpu", "--shards", shards]
    assert train(["--config", f"{folder}/config.yaml", "--out", f"{folder}/run", "--device", "cpu"]) == 0
    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.redirect_stderr(io.StringIO()) as stderr:
        checkpoint = ["--checkpoint", f"{folder}/run/best.pt"]
        assert vl_plugins(["evaluate", *checkpoint, *options, "--workers", "0", "--json"]) == 0
        printed = stdout.getvalue()
        assert (
            vl_plugins(["plot", "attention", *checkpoint, *options, "--images", "1", "--out", f"{folder}/a.png"]) == 0
        )
        torch.save({"weight": torch.ones(1)}, f"{folder}/epoch_1.pt")
        stderr.truncate(0)
        stderr.seek(0)
        assert vl_plugins(["evaluate", "--checkpoint", f"{folder}/epoch_1.pt", *options]) == 2
    return printed, stderr.getvalue()


def test_everything_works_without_open_clip(toy_shards, tmp_path):
    pytest.importorskip("matplotlib")
    head = {"name": "set", "num_slots": 2, "num_iters": 2, "hidden_dim": 16}
    config = settings(toy_shards, head=head, training={"epochs": 1})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = str(tmp_path), f"{toy_shards}/toy-val-000000.tar"
    ((printed, error),) = in_processes(without_open_clip, 1, *arguments, joined=False)
    (result,) = json.loads(printed)["results"]
    metrics = result["metrics"]["plain"]
    row = json.loads((tmp_path / "run" / "results.jsonl").read_text())
    assert metrics["rsum"] == pytest.approx(row["rsum"])
    assert metrics["image_circular_variance"] == pytest.approx(row["image_circular_variance"], rel=1e-5)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    message = "open_clip is not installed; install it with: pip install 'vl_plugins[open-clip]'\n"
    assert error == f"vl-plugins evaluate: error: {message}"
