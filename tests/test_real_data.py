"""The commands of the README on real pictures with captions in five languages, where such a folder exists."""

import json
import os
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.real_data, pytest.mark.slow]


def run(cwd, *command):
    finished = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr


@pytest.mark.parametrize(("epochs", "rsum_on_training_images"), [(1, 0), (40, 150)])
def test_shards_training_and_evaluation(stamps, tmp_path, epochs, rsum_on_training_images):
    source = ["--annotations", stamps / "dataset_stamps.json", "--images", stamps]
    output = run(tmp_path, "vl_plugins.cli", "shards", "coco", *source, "--out", "shards", "--samples-per-shard", "200")
    assert "stamps-train-{000000..000002}.tar" in output
    assert "785 images, 3,925 captions" in output
    sizes = json.loads((tmp_path / "shards" / "sizes.json").read_text())
    # restval joins train: 504 + 71.
    for split, images in (("train", 575), ("val", 60), ("test", 150)):
        assert sum(size for name, size in sizes.items() if f"-{split}-" in name) == images

    train_shards = "shards/stamps-train-{000000..000002}.tar"
    output = run(
        tmp_path,
        *("vl_plugins.integrations.open_clip", "--loss", "unified", "--loss-kwargs", "margin=0.2", "scale=50"),
        *("--captions-per-image", "random"),
        *("--model", "vl-tiny", "--device", "cpu", "--precision", "fp32", "--workers", "0", "--name", "run"),
        *("--train-data", train_shards, "--val-data", "shards/stamps-val-000000.tar", "--save-frequency", "0"),
        *("--batch-size", "64", "--epochs", epochs, "--warmup", "2", "--lr", "1e-3", "--log-every-n-steps", "1"),
    )
    values = [float(value) for value in re.findall(r"Unified_loss: (\S+)", output)]
    assert len(values) == epochs * 8
    assert values[-1] < values[0]
    results = (tmp_path / "logs" / "run" / "checkpoints" / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in results]
    assert [row["epoch"] for row in rows] == list(range(1, epochs + 1))
    assert {(row["num_samples"], row["num_captions"]) for row in rows} == {(60, 300)}

    output = run(
        tmp_path,
        *("vl_plugins.cli", "evaluate", "--model", "vl-tiny", "--device", "cpu", "--json"),
        *("--checkpoint", f"logs/run/checkpoints/epoch_{epochs}.pt", "--shards", train_shards),
    )
    evaluation = json.loads(output[output.index("{") : output.rindex("}") + 1])
    metrics = evaluation["results"][0]["metrics"]["plain"]
    assert (metrics["num_samples"], metrics["num_captions"]) == (575, 2875)
    assert metrics["rsum"] > rsum_on_training_images
