"""Checkpoints of the trainer for pytorch-metric-learning where open_clip cannot be imported."""

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml

from tests.integrations.pytorch_metric_learning.settings import settings

WITHOUT_OPEN_CLIP = """
import importlib, sys
sys.modules["open_clip"] = sys.modules["open_clip_train"] = None  # importing them raises an error
sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
"""


def run(module, *arguments):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_OPEN_CLIP, module, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def trained(toy_shards, tmp_path_factory):
    """The folder of a run with a set head, whose validation is the same evaluation."""
    folder = tmp_path_factory.mktemp("trained")
    head = {"name": "set", "num_slots": 2, "num_iters": 2, "hidden_dim": 16}
    config = settings(toy_shards, head=head, training={"epochs": 1}, accuracy=False)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = ["--config", folder / "config.yaml", "--out", folder / "run", "--device", "cpu"]
    finished = run("vl_plugins.integrations.pytorch_metric_learning", *arguments)
    assert finished.returncode == 0, finished.stderr
    return folder / "run"


def test_evaluate(trained, toy_shards):
    shards = f"{toy_shards}/toy-val-{{000000..000002}}.tar"
    arguments = ["--checkpoint", trained / "best.pt", "--shards", shards, "--device", "cpu", "--workers", "0", "--json"]
    finished = run("vl_plugins.cli", "evaluate", *arguments)
    assert finished.returncode == 0, finished.stderr
    (result,) = json.loads(finished.stdout)["results"]
    row = json.loads((trained / "results.jsonl").read_text())
    assert result["metrics"]["plain"]["rsum"] == pytest.approx(row["rsum_percent"])
    assert result["image_circular_variance"] == pytest.approx(row["image_circular_variance"], rel=1e-5)


def test_plot_attention(trained, toy_shards, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ["--checkpoint", trained / "best.pt", "--shards", f"{toy_shards}/toy-val-000000.tar", "--images", "1"]
    finished = run("vl_plugins.cli", "plot", "attention", *arguments, "--out", tmp_path / "a.png")
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_other_checkpoints_name_the_extra(toy_shards, tmp_path):
    torch.save({"weight": torch.ones(1)}, tmp_path / "epoch_1.pt")
    arguments = ["--checkpoint", tmp_path / "epoch_1.pt", "--shards", f"{toy_shards}/toy-val-000000.tar"]
    finished = run("vl_plugins.cli", "evaluate", *arguments)
    message = "open_clip is not installed; install it with: pip install 'vl_plugins[open-clip]'\n"
    assert (finished.returncode, finished.stderr) == (2, f"vl-plugins evaluate: error: {message}")
