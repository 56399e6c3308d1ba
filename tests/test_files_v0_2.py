"""Shards, checkpoints and features that version 0.2.0 wrote are read, and give the same numbers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vl_plugins.cli import main
from vl_plugins.data import ShardDataset
from vl_plugins.integrations.loading import load_model
from vl_plugins.integrations.open_clip.launcher import main as launch
from vl_plugins.integrations.pytorch_metric_learning import main as train_towers
from vl_plugins.retrieval import similarity_ranks
from vl_plugins.retrieval.features import load_features

FILES = Path(__file__).parent / "files_v0_2"
EXPECTED = json.loads((FILES / "expected.json").read_text())
CHECKPOINTS = [name for name in EXPECTED["evaluated"] if name.endswith(".pt")]
FEATURES = [name for name in EXPECTED["evaluated"] if not name.endswith(".pt")]
TEST = "toy-test-{000000..000001}.tar"

# Keys of configuration files that version 0.3 has no longer.
REMOVED = ("same_group", "shuffle_buffer", "num_samples", "trainer")

# Some hundred roundings of float32 in a tower with values near 1.
SIMILARITY_TOLERANCE = 1e-5
# A step of Adam multiplies rounding errors of the gradient, about 1e-6, by at most lr / eps = 10.
WEIGHT_TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Copy the files, whose paths are relative to their folder."""
    monkeypatch.chdir(shutil.copytree(FILES, tmp_path / "files"))


def evaluate(capsys, *flags):
    capsys.readouterr()
    assert main(["evaluate", "--device", "cpu", "--workers", "0", "--json", *flags]) == 0
    printed = json.loads(capsys.readouterr().out)
    (result,) = printed.pop("results")
    return printed | result


def expected_metrics(file):
    """Return the metrics that 0.2 printed as 0.3 does: recalls and precisions as fractions, and sizes beside them."""
    expected = EXPECTED["evaluated"][file]
    of_all = {name: value for name, value in expected.items() if name.startswith("num_") or name.endswith("_variance")}
    metrics = expected["metrics"]["plain"]
    fractions = [name for name in metrics if name.startswith(("image_to", "text_to")) and "_rank" not in name]
    assert len(fractions) == 10
    return metrics | {name: metrics[name] / 100 for name in fractions} | of_all


def test_the_list_of_files_is_complete():
    assert len(CHECKPOINTS) == 6
    assert len(FEATURES) == 10
    assert sorted(FEATURES) == sorted(map(str, Path("features").iterdir()))
    assert sorted(CHECKPOINTS) == sorted(map(str, Path().rglob("*.pt")))


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_checkpoints_give_the_same_metrics(checkpoint, capsys):
    metrics, shards = expected_metrics(checkpoint), EXPECTED["evaluated"][checkpoint]["shards"]
    found = evaluate(capsys, "--checkpoint", checkpoint, "--shards", shards)["metrics"]["plain"]
    # Best ranks are safe: write.py compares the best right answer of each query with the wrong ones, and no others.
    by_rank = [name for name in metrics if "_rank" in name or "_R@" in name or name == "rsum"]
    similarities = [name for name in metrics if name.endswith(("_similarity", "_variance"))]
    assert (len(by_rank), len(similarities)) in ((11, 2), (11, 4))
    for names, tolerance in ((by_rank, 1e-9), (similarities, SIMILARITY_TOLERANCE)):
        for name in names:
            assert found[name] == pytest.approx(metrics[name], rel=0, abs=tolerance), name
    assert (found["num_samples"], found["num_captions"]) == (12, 30)


@pytest.mark.parametrize("file", FEATURES)
def test_features_give_the_same_metrics_and_ranks(file, capsys):
    expected = EXPECTED["evaluated"][file]
    found = evaluate(capsys, "--features", file)
    # Only sums of 16 products are computed again.
    assert found["metrics"]["plain"] == pytest.approx(expected_metrics(file), rel=0, abs=1e-6)
    for name in ("checkpoint", "checkpoint_sha256", "precision", "similarity", "similarity_kwargs", "versions"):
        assert found.get(name) == expected.get(name), name
    features = load_features(file)
    ranks = similarity_ranks(features.similarities(), features.image_of_caption)
    assert ranks.image_to_text.rank.tolist() == EXPECTED["ranks"][file]["image_to_text"]
    assert ranks.text_to_image.rank.tolist() == EXPECTED["ranks"][file]["text_to_image"]
    records = EXPECTED["shards"][expected_shards(file)]
    assert list(features.image_ids) == [record["image_id"] for record in records]
    assert list(features.caption_ids) == [caption_id for record in records for caption_id in record["caption_ids"]]


def expected_shards(file):
    kind = "features" if Path(file).stem == "features" else "pictures"
    return f"{kind}/{TEST}"


@pytest.mark.parametrize("shards", EXPECTED["shards"])
def test_shards_have_the_same_content(shards):
    dataset = ShardDataset(
        f"shards/{shards}",
        lambda item: torch.from_numpy(np.array(item, dtype=np.float64)),
        list,
        inputs=shards.partition("/")[0].replace("pictures", "images"),
    )
    records = [
        {
            "key": record.key,
            "image_id": record.image_id,
            "captions": list(record.captions),
            "caption_ids": list(record.caption_ids),
            "split": f"{record.dataset}-{record.split}",
            "sum": dataset[index].image.sum().item(),
        }
        for index, record in enumerate(dataset.collection.records)
    ]
    expected = EXPECTED["shards"][shards]
    assert len(expected) in (12, 16)
    # Sums of pixels are integers; sums of at most 32 features are in float64.
    assert records == [{**record, "sum": pytest.approx(record["sum"], rel=0, abs=1e-12)} for record in expected]


def launch_flags(epochs):
    """Return the flags with which write.py trained ``logs/triplet``."""
    flags = "--model tiny --model-config model/tiny.json --device cpu --precision fp32 --workers 0 --batch-size 16"
    flags += " --train-data shards/pictures/toy-train-{000000..000002}.tar --captions-per-image all"
    flags += " --allow-duplicate-captions --aug-cfg scale=(1.0,1.0) --warmup 0 --lr 1e-2 --eps 1e-3 --seed 2"
    flags += f" --loss triplet_hn --loss-kwargs warmup_steps=6 --name triplet --epochs {epochs}"
    return flags.split()


def test_the_launcher_resumes():
    """The checkpoint is from step 5 of 7, and the warm-up of the loss ends with step 6."""
    assert launch([*launch_flags(7), "--resume", "latest"]) == 0
    model, _, _ = load_model("logs/triplet/checkpoints/epoch_7.pt")
    torch.testing.assert_close(
        model.state_dict(), load_file("trained/triplet.safetensors"), rtol=0, atol=WEIGHT_TOLERANCE
    )


def test_the_launcher_takes_the_weights_as_pretrained():
    checkpoint = "logs/triplet/checkpoints/epoch_5.pt"
    flags = "--model tiny --model-config model/tiny.json --device cpu --precision fp32 --workers 0 --name pretrained"
    flags += f" --pretrained {checkpoint} --val-data shards/pictures/{TEST} --captions-per-image first"
    assert launch(flags.split()) == 0
    (row,) = map(json.loads, Path("logs/pretrained/checkpoints/results.jsonl").read_text().splitlines())
    metrics = EXPECTED["evaluated"][checkpoint]["metrics"]["plain"]
    assert row["rsum"] == pytest.approx(metrics["rsum"])
    assert 100 * row["image_to_text_R@5"] == pytest.approx(metrics["image_to_text_R@5"])


def test_runs_of_the_trainer_of_two_towers_are_not_resumed(capsys):
    lines = Path("runs/pictures/config.yaml").read_text().splitlines(keepends=True)
    Path("config.yaml").write_text("".join(line for line in lines if line.split(":")[0].strip() not in REMOVED))
    assert train_towers(["--config", "config.yaml", "--device", "cpu", "--out", "runs/pictures", "--resume"]) == 2
    assert "one of 0.2 can be evaluated, but not resumed: use a new --out" in capsys.readouterr().err
