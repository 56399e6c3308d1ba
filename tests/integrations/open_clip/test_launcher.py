"""The launcher as its user runs it: a process with a command line, on real shards."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import resources

import pytest
import torch
import webdataset

from vl_plugins.data.annotations import read_karpathy
from vl_plugins.data.toy import write_toy_scenes
from vl_plugins.integrations.open_clip import launcher
from vl_plugins.integrations.open_clip.run_folder import check_is_free
from vl_plugins.utils.errors import UserError

MODULE = "vl_plugins.integrations.open_clip"
SHORT = ["--model", "vl-tiny", "--device", "cpu", "--precision", "fp32", "--batch-size", "16", "--workers", "0"]
SHORT += ["--epochs", "1", "--warmup", "1", "--lr", "1e-3", "--log-every-n-steps", "1"]


def run(command, cwd, timeout=280, **variables):
    """Run a command to its end; its output is what a failing test shows."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    finished = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
    print(finished.stdout, finished.stderr)
    return finished


def logged_losses(finished, name):
    return [float(value) for value in re.findall(rf"{name}_loss: (\S+)", finished.stderr + finished.stdout)]


def launch(cwd, *flags, module=MODULE):
    return run([sys.executable, "-m", module, *flags], cwd)


@pytest.fixture(scope="module")
def train_data(toy_shards):
    return ["--train-data", shard_pattern(toy_shards, "train")]


@pytest.fixture(scope="module")
def val_data(toy_shards):
    return ["--val-data", shard_pattern(toy_shards, "val")]


def shard_pattern(folder, split):
    return "::".join(map(str, sorted(folder.glob(f"*-{split}-*.tar"))))


def checkpoint(cwd, name, epoch=1):
    return torch.load(cwd / "logs" / name / "checkpoints" / f"epoch_{epoch}.pt", weights_only=True)


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


# vl-tiny is not open_clip's; nothing else distinguishes this from `python -m open_clip_train.main`.
STOCK = """
import sys
import open_clip
open_clip.add_model_config(sys.argv[1])
from open_clip_train.main import main
main(sys.argv[2:])
"""


def test_without_loss_it_is_stock_open_clip_bit_for_bit(tmp_path):
    # A table, because open_clip's reader of shards shuffles without a seed.
    write_toy_scenes(tmp_path / "toy", train=48, val=16, test=1)
    for split in ("train", "val"):
        images = read_karpathy(tmp_path / "toy" / "dataset_toy.json", "coco")
        rows = [f"{tmp_path}/toy/{image.file}\t{image.captions[0]}" for image in images if image.split == split]
        (tmp_path / f"{split}.tsv").write_text("\n".join(["filepath\ttitle", *rows]))
    flags = [*SHORT, "--train-data", tmp_path / "train.tsv", "--val-data", tmp_path / "val.tsv"]
    flags += ["--name", "run", "--seed", "3", "--epochs", "2"]
    for who in ("stock", "ours"):
        (tmp_path / who).mkdir()
    models = resources.files("vl_plugins.configs") / "models"
    stock = run([sys.executable, "-c", STOCK, models, *flags], tmp_path / "stock")
    ours = launch(tmp_path / "ours", *flags)
    assert stock.returncode == ours.returncode == 0
    expected = checkpoint(tmp_path / "stock", "run", epoch=2)
    assert len(expected["state_dict"]) > 50
    assert_equal_nested(checkpoint(tmp_path / "ours", "run", epoch=2), expected)
    results = [(tmp_path / who / "logs/run/checkpoints/results.jsonl").read_text() for who in ("stock", "ours")]
    assert results[0] == results[1]
    assert len(results[0].splitlines()) == 2


def test_stock_open_clip_trains_and_validates_on_our_shards(tmp_path, train_data, val_data):
    """Its own reader, in a worker process, and none of our code but the model's configuration."""
    models = resources.files("vl_plugins.configs") / "models"
    flags = [*SHORT, "--dataset-type", "webdataset", *train_data, *val_data, "--name", "run", "--workers", "1"]
    finished = run([sys.executable, "-c", STOCK, models, *flags], tmp_path)
    assert finished.returncode == 0
    losses = [float(loss) for loss in re.findall(r"Contrastive_loss: (\S+)", finished.stderr + finished.stdout)]
    assert len(losses) == 64 / 16
    assert all(0 < loss < 10 for loss in losses)
    assert "Handling webdataset error" not in finished.stderr + finished.stdout
    (row,) = map(json.loads, (tmp_path / "logs/run/checkpoints/results.jsonl").read_text().splitlines())
    # Each image and its first caption; open_clip's count is 24 only if it reads every sample.
    assert (row["epoch"], row["num_samples"]) == (1, 24)
    assert 0 < row["clip_val_loss"] < 10
    assert 0 <= row["image_to_text_R@1"] <= 1


def error_of(finished):
    """The launcher's one line; once training has begun, torch writes others after it."""
    (line,) = (line for line in finished.stderr.splitlines() if line.startswith("vl_plugins: error: "))
    return line.removeprefix("vl_plugins: error: ")


def copy_of_shards(toy_shards, folder):
    folder.mkdir()
    for file in toy_shards.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("damage", ["cut", "sample"])
def test_shards_that_cannot_be_read_in_the_middle_of_training(tmp_path, toy_shards, damage, workers):
    """The launcher looks at the first sample of the first shard only."""
    shards = copy_of_shards(toy_shards, tmp_path / "shards")
    shard = shards / "toy-train-000004.tar"
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:700])
    else:
        shard.write_bytes(shard.read_bytes().replace(b'"captions": [', b'"captions": {', 1))
    flags = [*SHORT, "--train-data", shard_pattern(shards, "train"), "--loss", "unified", "--workers", workers]
    place = f"shard {shard}" if damage == "cut" else f"sample toy-train-00000032 of {shard}"

    finished = launch(tmp_path, *flags, "--name", "skip")
    assert finished.returncode == 0
    output = finished.stderr + finished.stdout
    assert re.search(rf"leaving out (the end of )?{re.escape(place)}, which cannot be read", output)
    assert len(re.findall(r"Unified_loss: ", output)) == 4, "as many steps as with all images"
    assert (tmp_path / "logs/skip/checkpoints/epoch_1.pt").exists()

    finished = launch(tmp_path, *flags, "--name", "raise", "--on-read-error", "raise")
    assert finished.returncode == 2
    assert re.match(rf"cannot read (the end of )?{re.escape(place)}: ", error_of(finished))
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "logs/raise/checkpoints/epoch_1.pt").exists()
    parameters = (tmp_path / "logs/raise/params.txt").read_text().splitlines()
    assert "on_read_error: raise" in parameters


def test_unified_trains_validates_and_says_so(tmp_path, train_data, val_data):
    flags = [*SHORT, *train_data, *val_data, "--name", "run", "--epochs", "2", "--report-to", "tensorboard,wandb"]
    flags += ["--loss", "unified", "--loss-kwargs", "margin=0.1", "scale=30", "--reducer", "AvgNonZeroReducer"]
    finished = run([sys.executable, "-m", MODULE, *flags], tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    assert finished.returncode == 0
    output = finished.stderr + finished.stdout
    assert "Training with the loss of vl_plugins: unified(margin=0.1, scale=30" in output
    assert len(re.findall(r"log-sum-exp over negatives: backend dense on cpu", output)) == 1
    steps = re.findall(r"Unified_loss: (\S+)", output)
    assert len(steps) == 2 * 4, "64 images, 16 in a batch, two epochs"
    parameters = (tmp_path / "logs/run/params.txt").read_text().splitlines()
    assert "loss: unified" in parameters
    assert "loss_kwargs: {'margin': 0.1, 'scale': 30}" in parameters
    assert "captions_per_image: random" in parameters

    rows = [json.loads(line) for line in (tmp_path / "logs/run/checkpoints/results.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["num_samples"], row["num_captions"]) == (24, 120)
        recalls = [row[f"{way}_R@{k}_percent"] for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
        assert 1 < max(recalls) <= 100
        assert row["rsum_percent"] == pytest.approx(sum(recalls))

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "logs/run/tensorboard")).Reload()
    assert [event.value for event in events.Scalars("val/rsum_percent")] == pytest.approx(
        [row["rsum_percent"] for row in rows]
    )
    assert len(events.Scalars("train/unified_loss")) == 8
    (wandb_log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"val/rsum_percent" in wandb_log.read_bytes()
    assert b"train/unified_loss" in wandb_log.read_bytes()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--accum-freq", "2"], id="accum-freq"),
        pytest.param(
            ["--accum-freq", "2", "--captions-per-image", "3"], id="accum-freq-several-captions", marks=pytest.mark.slow
        ),
        pytest.param(["--precision", "amp_bf16"], id="amp_bf16", marks=pytest.mark.slow),
        pytest.param(["--grad-checkpointing"], id="grad-checkpointing", marks=pytest.mark.slow),
        pytest.param(
            ["--captions-per-image", "all", "--miner", "BatchHardMiner"],
            id="all-captions-miner",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--loss-kwargs", "scale=learned", "backend=tiled", "--workers", "3"],
            id="learned-scale-more-workers-than-shards",
            marks=pytest.mark.slow,
        ),
        pytest.param(["--torchcompile"], id="torchcompile", marks=pytest.mark.slow),
    ],
)
def test_trainer_flags(tmp_path, train_data, val_data, flags):
    finished = launch(tmp_path, *SHORT, *train_data, *val_data, "--name", "run", "--loss", "unified", *flags)
    assert finished.returncode == 0
    values = logged_losses(finished, "Unified")
    assert values
    assert all(0 < value < 2 for value in values)
    assert "rsum_percent" in (tmp_path / "logs/run/checkpoints/results.jsonl").read_text()
    # The step must have been taken: nothing in the model is as a fresh model of the same seed has it.
    state = checkpoint(tmp_path, "run")["state_dict"]
    assert all(tensor.isfinite().all() for tensor in state.values())
    frozen = {"visual.proj", "text_projection"} & {name for name, tensor in state.items() if not tensor.any()}
    assert not frozen


WRONG = {
    "nothing": (["--train-data", ""], "there is nothing to do: give --train-data or --val-data, or --help"),
    "folder": (
        ["--train-data", "."],
        "--train-data .: it is a folder; give shards, such as 'FOLDER/NAME-{000000..000007}",
    ),
    "kind": (["--val-data", "val.txt"], "--val-data val.txt: unknown suffix; give shards, such as "),
    "logs": (["--logs", "/dev/null"], "cannot make the folder /dev/null/run: Not a directory"),
    "loss": (["--loss", "unifed"], "unknown loss 'unifed' (did you mean 'unified'?)"),
    "miner": (["--loss", "unified", "--miner", "BatchHardMine"], "(did you mean 'BatchHardMiner'?)"),
    "miner-without-loss": (["--miner", "BatchHardMiner"], "--miner needs --loss"),
    "captions-without-loss": (["--captions-per-image", "5"], "--captions-per-image 5 needs --loss"),
    "model": (["--model", "ViT-B-33"], "unknown model 'ViT-B-33' (did you mean 'ViT-B-32'?)"),
    "siglip": (["--loss", "unified", "--siglip"], "--loss unified and --siglip both name a loss"),
    "horovod": (
        ["--loss", "unified", "--horovod"],
        "--loss unified does not support --horovod: start the processes with",
    ),
    "coca": (["--loss", "unified", "--model", "coca_ViT-B-32"], "coca_ViT-B-32"),
    "shard": (["--train-data", "no-such-{000..003}.tar"], "4 of 4 shards do not exist: no-such-000.tar"),
    "resampled": (["--captions-per-image", "random", "--dataset-resampled"], "give it without --dataset-resampled"),
    "table": (["--captions-per-image", "random", "--train-data", "captions.csv"], "needs WebDataset shards (.tar)"),
    "same-group-without-loss": (
        ["--same-group", "positive", "--captions-per-image", "random"],
        "--same-group positive needs --loss: to open_clip's own loss, all other images are negatives",
    ),
    "distance-without-loss": (["--distance", "mil"], "--distance needs --loss"),
    "head-without-loss": (["--head", "set"], "--head set needs a loss: give --loss smooth_chamfer"),
    "head-value": (["--head", "linear", "--head-kwargs", "dim=0"], "--head linear: dim must be an integer >= 1, got 0"),
    "head-torchscript": (["--head", "linear", "--torchscript"], "--head linear does not support --torchscript"),
    "head-distillation": (
        ["--head", "linear", "--distill-model", "RN50"],
        "--head linear does not support --distill-model",
    ),
    "head-imagenet": (
        ["--loss", "smooth_chamfer", "--head", "set", "--imagenet-val", "imagenet"],
        "--head set does not support --imagenet-val",
    ),
    "head-validation": (
        ["--loss", "smooth_chamfer", "--head", "set", "--val-data", "captions.csv"],
        "--val-data captions.csv: open_clip's validation compares single vectors",
    ),
    "head-coca": (["--head", "linear", "--model", "coca_ViT-B-32"], "--head linear is not for model coca_ViT-B-32"),
}


@pytest.mark.parametrize(("flags", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_ends_with_one_line_and_nothing_written(tmp_path, train_data, flags, message, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launcher.main([*SHORT, *train_data, "--name", "run", *flags]) == 2
    error = capfd.readouterr().err
    assert error.startswith("vl_plugins: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not list(tmp_path.iterdir())


def test_an_empty_caption_set(tmp_path, toy_scenes, capfd, monkeypatch):
    shard = tmp_path / "foreign-000000.tar"
    with webdataset.TarWriter(str(shard)) as tar:
        picture = next(toy_scenes.glob("train/*.png")).read_bytes()
        tar.write({"__key__": "000", "png": picture, "json": {"captions": []}})
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    flags = [*SHORT, "--train-data", str(shard), "--train-num-samples", "16", "--captions-per-image", "random"]
    assert launcher.main([*flags, "--loss", "unified"]) == 2
    error = capfd.readouterr().err
    assert f"cannot read sample 000 of {shard}" in error
    assert "'captions' must be a list of strings, got []" in error
    assert error.count("\n") == 1
    assert not list((tmp_path / "cwd").iterdir())


@pytest.mark.slow
def test_a_loss_of_another_package(tmp_path, train_data):
    """A distribution that the launcher's process finds on its path, with an entry point and one direction only."""
    site = tmp_path / "site"
    (site / "their_losses-1.0.dist-info").mkdir(parents=True)
    (site / "their_losses-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: their_losses\nVersion: 1.0\n"
    )
    (site / "their_losses-1.0.dist-info" / "entry_points.txt").write_text(
        "[vl_plugins.losses]\ntheirs = their_losses:TheirLoss\n"
    )
    (site / "their_losses.py").write_text(
        "from pytorch_metric_learning.losses import NTXentLoss\nclass TheirLoss(NTXentLoss):\n    'Theirs.'\n"
    )
    flags = [*SHORT, *train_data, "--name", "run", "--loss", "theirs", "--loss-kwargs", "temperature=0.1"]
    finished = run([sys.executable, "-m", MODULE, *flags], tmp_path, PYTHONPATH=str(site))
    assert finished.returncode == 0
    assert "Training with the loss of vl_plugins: theirs(temperature=0.1)" in finished.stderr + finished.stdout
    assert len(re.findall(r"Theirs_loss: ", finished.stderr + finished.stdout)) == 4


@pytest.mark.parametrize(("rank", "joined", "said"), [("0", False, True), ("1", False, False), ("1", True, True)])
def test_which_processes_say_what_is_wrong(monkeypatch, capfd, rank, joined, said):
    def fail(*arguments):
        raise UserError("cannot read shard 7")

    monkeypatch.setattr(launcher, "_main", fail)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: joined)
    monkeypatch.setenv("RANK", rank)
    assert launcher.main([]) == 2
    assert capfd.readouterr().err == ("vl_plugins: error: cannot read shard 7\n" if said else "")


def test_ctrl_c(monkeypatch, capfd):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "_main", interrupt)
    for rank, said in (("0", "vl_plugins: interrupted\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert launcher.main([]) == 130
        assert capfd.readouterr().err == said


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_training(tmp_path, train_data):
    flags = [*SHORT, *train_data, "--name", "run", "--loss", "unified", "--workers", "2", "--epochs", "1000"]
    command = [sys.executable, "-m", MODULE, *flags]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=tmp_path, stderr=output, stdout=output, start_new_session=True)
    log = tmp_path / "logs/run/out.log"
    try:
        deadline = time.monotonic() + 200
        while not (log.exists() and "Train Epoch: 1 " in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    output = (tmp_path / "output").read_text()
    assert output.count("vl_plugins: interrupted\n") == 1
    assert "Traceback" not in output


def test_weights_that_cannot_be_downloaded(tmp_path, train_data, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    flags = [*SHORT, *train_data, "--name", "run", "--model", "RN50", "--pretrained", "openai"]
    flags += ["--cache-dir", str(tmp_path / "cache")]
    assert launcher.main(flags) == 2
    error = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("vl_plugins: error: "))
    assert error.startswith("vl_plugins: error: --model RN50: Failed to download weights for tag 'openai': ")
    check_is_free(tmp_path / "logs/run")


@pytest.mark.slow
def test_an_earlier_run_is_not_overwritten(tmp_path, train_data):
    flags = [*SHORT, *train_data, "--name", "run", "--loss", "unified"]
    assert launch(tmp_path, *flags).returncode == 0
    before = (tmp_path / "logs/run/out.log").read_bytes()
    finished = launch(tmp_path, *flags)
    assert finished.returncode == 2
    assert "holds an earlier run; give another name, or --resume latest to go on" in finished.stderr
    assert (tmp_path / "logs/run/out.log").read_bytes() == before
