"""Shards, checkpoints and features that versions 0.2.0 and 0.3.0 wrote are read, and give the same numbers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vl_plugins.cli import main
from vl_plugins.data import ShardDataset
from vl_plugins.integrations.loading import load_model, read_torch_file
from vl_plugins.integrations.open_clip.launcher import main as launch
from vl_plugins.integrations.pytorch_metric_learning import main as train_towers
from vl_plugins.retrieval import similarity_ranks
from vl_plugins.retrieval.features import load_features

VERSIONS = ("0_2", "0_3")
FOLDERS = {version: Path(__file__).parent / f"files_v{version}" for version in VERSIONS}
EXPECTED = {version: json.loads((folder / "expected.json").read_text()) for version, folder in FOLDERS.items()}
TRAIN, TEST = "toy-train-{000000..000002}.tar", "toy-test-{000000..000001}.tar"

# Keys of configuration files of 0.2 that version 0.3 has no longer.
REMOVED = ("same_group", "shuffle_buffer", "num_samples", "trainer")

# Some hundred roundings of float32 in a tower with values near 1.
SIMILARITY_TOLERANCE = 1e-5
LIKENESS = 0.2  # measured: 0.006 to 0.064


def cases(*endings):
    """Return all pairs of a version and a file of it, by the endings of the file's name."""
    pairs = []
    for version in VERSIONS:
        for file in EXPECTED[version]["evaluated"]:
            if file.endswith(endings):
                pairs.append(pytest.param(version, file, id=f"{version}-{file}"))
    return pairs


CHECKPOINTS = pytest.mark.parametrize(("version", "file"), cases(".pt"))
FEATURES = pytest.mark.parametrize(("version", "file"), cases(".npz", ".safetensors"))
EACH_VERSION = pytest.mark.parametrize("version", VERSIONS)


@pytest.fixture(autouse=True)
def files(version, tmp_path, monkeypatch):
    """Copy the files, whose paths are relative to their folder."""
    monkeypatch.chdir(shutil.copytree(FOLDERS[version], tmp_path / "files"))


def evaluate(capsys, *flags):
    capsys.readouterr()
    assert main(["evaluate", "--device", "cpu", "--workers", "0", "--json", *flags]) == 0
    printed = json.loads(capsys.readouterr().out)
    (result,) = printed.pop("results")
    return printed | result


def expected_metrics(version, file):
    """Return the metrics that a version printed, with the names and units of today."""
    expected = EXPECTED[version]["evaluated"][file]
    metrics = expected["metrics"]["plain"]
    if version != "0_2":
        return metrics
    # Version 0.2 printed percentages, and sizes beside the metrics.
    of_all = {name: value for name, value in expected.items() if name.startswith("num_") or name.endswith("_variance")}
    fractions = [name for name in metrics if name.startswith(("image_to", "text_to")) and "_rank" not in name]
    assert len(fractions) == 10
    return metrics | {name: metrics[name] / 100 for name in fractions} | of_all


@EACH_VERSION
def test_the_list_of_files_is_complete(version):
    listed = EXPECTED[version]["evaluated"]
    checkpoints = [file for file in listed if file.endswith(".pt")]
    features = [file for file in listed if not file.endswith(".pt")]
    assert (len(checkpoints), len(features)) == {"0_2": (6, 10), "0_3": (7, 12)}[version]
    assert sorted(features) == sorted(map(str, Path("features").iterdir()))
    assert sorted(checkpoints) == sorted(map(str, Path().rglob("*.pt")))


@CHECKPOINTS
def test_checkpoints_give_the_same_metrics(version, file, capsys):
    metrics, shards = expected_metrics(version, file), EXPECTED[version]["evaluated"][file]["shards"]
    computed = evaluate(capsys, "--checkpoint", file, "--shards", shards)["metrics"]["plain"]
    # Best ranks are safe: write.py compares the best right answer of each query with the wrong ones, and no others.
    by_rank = [name for name in metrics if "_rank" in name or "_R@" in name or name == "rsum"]
    similarities = [name for name in metrics if name.endswith(("_similarity", "_variance"))]
    assert (len(by_rank), len(similarities)) in ((11, 2), (11, 4))
    for names, tolerance in ((by_rank, 1e-9), (similarities, SIMILARITY_TOLERANCE)):
        for name in names:
            assert computed[name] == pytest.approx(metrics[name], rel=0, abs=tolerance), name
    assert (computed["num_samples"], computed["num_captions"]) == (12, 30)


@FEATURES
def test_features_give_the_same_metrics_and_ranks(version, file, capsys):
    expected = EXPECTED[version]["evaluated"][file]
    result = evaluate(capsys, "--features", file)
    metrics = result["metrics"]["plain"]
    assert metrics.pop("image_to_text_hubness") < 10 > metrics.pop("text_to_image_hubness")  # new in 0.4
    # Only sums of 16 products are computed again.
    assert metrics == pytest.approx(expected_metrics(version, file), rel=0, abs=1e-6)
    for name in ("checkpoint", "checkpoint_sha256", "precision", "similarity", "similarity_kwargs", "versions"):
        assert result.get(name) == expected.get(name), name
    features = load_features(file)
    ranks = similarity_ranks(features.similarities(), features.image_of_caption)
    assert ranks.image_to_text.rank.tolist() == EXPECTED[version]["ranks"][file]["image_to_text"]
    assert ranks.text_to_image.rank.tolist() == EXPECTED[version]["ranks"][file]["text_to_image"]
    kind = "features" if Path(file).stem == "features" else "pictures"
    records = EXPECTED[version]["shards"][f"{kind}/{TEST}"]
    assert list(features.image_ids) == [record["image_id"] for record in records]
    assert list(features.caption_ids) == [caption_id for record in records for caption_id in record["caption_ids"]]


@EACH_VERSION
@pytest.mark.parametrize("kind", ["pictures", "features"])
def test_verify_shards(version, kind, capsys):
    assert main(["shards", "verify", f"shards/{kind}", "--workers", "1"]) == 0
    assert capsys.readouterr().out == "5 shards, 28 samples, 110 captions: no problems\n"


@EACH_VERSION
@pytest.mark.parametrize("split", [TRAIN, TEST])
@pytest.mark.parametrize("kind", ["pictures", "features"])
def test_shards_have_the_same_content(version, kind, split):
    dataset = ShardDataset(
        f"shards/{kind}/{split}",
        lambda item: torch.from_numpy(np.array(item, dtype=np.float64)),
        list,
        inputs=kind.replace("pictures", "images"),
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
    expected = EXPECTED[version]["shards"][f"{kind}/{split}"]
    assert len(expected) in (12, 16)
    # Sums of pixels are integers; sums of at most 32 features are in float64.
    assert records == [{**record, "sum": pytest.approx(record["sum"], rel=0, abs=1e-12)} for record in expected]


# The flags of open_clip with which write.py trained; those of the loss and the reader follow.
LAUNCH = "--model tiny --model-config model/tiny.json --device cpu --precision fp32 --workers 0 --batch-size 16"
LAUNCH += f" --train-data shards/pictures/{TRAIN} --aug-cfg scale=(1.0,1.0) --eps 1e-3"
LAUNCH_0_2 = f"{LAUNCH} --lr 1e-2 --warmup 0 --seed 2 --epochs 7 --name triplet"
LAUNCH_0_2 += " --loss triplet_hn --loss-kwargs warmup_steps=6 --captions-per-image all --allow-duplicate-captions"
LAUNCH_0_3 = f"{LAUNCH} --lr 2e-3 --warmup 2 --seed 4 --epochs 8 --name learned"


def assert_trained_alike(before, after, expected):
    """Compare weights with those of a training that was not resumed.

    It read images and captions in another order, so they cannot be equal: but the way from the checkpoint must be the
    same, up to what another order changes.
    """
    way, difference = [], []
    for name, weight in expected.items():
        if weight.is_floating_point():
            way.append((weight - before[name]).flatten().double())
            difference.append((weight - after[name]).flatten().double())
    assert torch.cat(difference).norm() < LIKENESS * torch.cat(way).norm()


def assert_trained(run, start, epochs):
    before, after = (load_model(f"logs/{run}/checkpoints/epoch_{epoch}.pt")[0] for epoch in (start, epochs))
    assert_trained_alike(before.state_dict(), after.state_dict(), load_file(f"trained/{run}.safetensors"))


@pytest.mark.parametrize("version", ["0_2"])
def test_the_launcher_resumes_0_2(version):
    """The checkpoint is from step 5 of 7, and the warm-up of the loss ends with step 6."""
    assert launch([*LAUNCH_0_2.split(), "--resume", "latest"]) == 0
    assert_trained("triplet", 5, 7)


def notes(capfd):
    """Return the launcher's lines about the run that it resumes."""
    printed = capfd.readouterr()
    lines = (printed.out + printed.err).splitlines()
    return [line.partition("--resume ")[2].partition(": ")[2] for line in lines if "| WARNING | --resume " in line]


@pytest.mark.parametrize("version", ["0_3"])
def test_the_launcher_resumes_0_3_with_the_loss_and_the_reader_of_the_run(version, capfd):
    """The checkpoint is of epoch 5 of 8, with a learned scale and a margin of 0.1, which params.txt has."""
    assert launch([*LAUNCH_0_3.split(), "--resume", "latest"]) == 0
    assert_trained("learned", 5, 8)
    assert notes(capfd) == [
        "--loss unified of the run, with its options, is used",
        "it is of vl_plugins 0.3; images may come in another order now",
    ]
    settings = read_torch_file("logs/learned/checkpoints/epoch_8.pt")["args"]
    expected = {"loss": "unified", "captions_per_image": "all", "head": None}
    assert {name: settings[name] for name in expected} == expected
    assert (settings["loss_kwargs"]["scale"], settings["loss_kwargs"]["margin"]) == ("learned", 0.1)


@pytest.mark.parametrize("version", ["0_3"])
def test_without_params_txt_the_flags_count(version, capfd):
    Path("logs/learned/params.txt").unlink()
    flags = "--loss unified --loss-kwargs scale=learned margin=0.1 --captions-per-image all --allow-duplicate-captions"
    assert launch([*LAUNCH_0_3.split(), *flags.split(), "--resume", "latest"]) == 0
    assert_trained("learned", 5, 8)
    assert notes(capfd) == ["its loss is not recorded, so the training goes on as the flags say"]


@EACH_VERSION
def test_the_launcher_takes_the_weights_as_pretrained(version):
    run, epoch = {"0_2": ("triplet", 5), "0_3": ("learned", 5)}[version]
    checkpoint = f"logs/{run}/checkpoints/epoch_{epoch}.pt"
    flags = "--model tiny --model-config model/tiny.json --device cpu --precision fp32 --workers 0 --name pretrained"
    flags += f" --pretrained {checkpoint} --val-data shards/pictures/{TEST} --captions-per-image first"
    assert launch(flags.split()) == 0
    (row,) = map(json.loads, Path("logs/pretrained/checkpoints/results.jsonl").read_text().splitlines())
    metrics = expected_metrics(version, checkpoint)
    assert row["rsum"] == pytest.approx(metrics["rsum"])
    assert row["image_to_text_R@5"] == pytest.approx(metrics["image_to_text_R@5"])


@pytest.mark.parametrize("version", ["0_3"])
def test_a_run_folder_is_loaded_in_python(version):
    """As `evaluate` takes it: the newest checkpoint."""
    of_folder, _, _ = load_model("logs/learned")
    of_file, _, _ = load_model("logs/learned/checkpoints/epoch_5.pt")
    torch.testing.assert_close(of_folder.state_dict(), of_file.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("version", ["0_2"])
def test_runs_of_two_towers_of_0_2_are_not_resumed(version, capsys):
    lines = Path("runs/pictures/config.yaml").read_text().splitlines(keepends=True)
    Path("config.yaml").write_text("".join(line for line in lines if line.split(":")[0].strip() not in REMOVED))
    assert train_towers(["--config", "config.yaml", "--device", "cpu", "--out", "runs/pictures", "--resume"]) == 2
    assert "one of 0.2 can be evaluated, but not resumed: use a new --out" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["0_3"])
@pytest.mark.parametrize("run", ["pictures", "features"])
def test_runs_of_two_towers_of_0_3_are_resumed(version, run):
    """They were interrupted after epoch 7, the first of three in the second stage."""
    folder = f"runs/{run}"
    before = weights_of_run(folder)
    assert train_towers(["--config", f"{folder}/config.yaml", "--device", "cpu", "--out", folder, "--resume"]) == 0
    assert_trained_alike(before, weights_of_run(folder), load_file(f"trained/{run}.safetensors"))


def weights_of_run(folder):
    weights = {}
    for part, state in read_torch_file(f"{folder}/latest.pt")["models"].items():
        for name, weight in state.items():
            weights[f"{part}.{name}"] = weight
    return weights
