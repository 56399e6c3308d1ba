"""The launcher: whole trainings on real shards, and what is wrong with a command line."""

import contextlib
import os
import re
import shutil
import signal
import time

import open_clip_train.main
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.open_clip_training import (
    LAUNCH,
    TINY,
    assert_equal_nested,
    error_line,
    read_checkpoint,
    read_results,
    run,
    small_shard_flags,
)
from tests.helpers.processes import start_as_terminal
from vl_plugins.data.sources import read_karpathy
from vl_plugins.integrations.open_clip import launcher
from vl_plugins.integrations.open_clip.models import register_models
from vl_plugins.integrations.open_clip.run_folder import check_is_free


@pytest.fixture(scope="module")
def data(toy_shards):
    return small_shard_flags(toy_shards)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Folder, flags and output of a training in a process of its own."""
    folder = tmp_path_factory.mktemp("trained")
    flags = [*TINY, *data, "--epochs", "2", "--accum-freq", "2", "--report-to", "tensorboard,wandb"]
    flags += ["--loss", "unified", "--loss-kwargs", "margin=0.1", "scale=30", "--reducer", "AvgNonZeroReducer"]
    finished = run([*LAUNCH, *flags], folder, WANDB_MODE="offline", WANDB_SILENT="true")
    assert finished.returncode == 0
    return folder, flags, finished.stderr + finished.stdout


def test_the_log_of_a_training(trained):
    folder, _, output = trained
    assert "Training with the loss of vl_plugins: unified(margin=0.1, scale=30" in output
    losses = [float(value) for value in re.findall(r"Unified_loss: (\S+)", output)]
    assert len(losses) == 2 * 2, "16 images, two batches of 4 a step, two epochs"
    assert all(0 < loss < 2 for loss in losses)
    parameters = (folder / "logs/run/params.txt").read_text().splitlines()
    expected = {"loss: unified", "loss_kwargs: {'margin': 0.1, 'scale': 30}", "captions_per_image: random"}
    assert expected < {*parameters}


def test_metrics_reach_results_tensorboard_and_wandb(trained):
    folder, _, _ = trained
    rows = read_results(folder)
    assert [*rows] == [1, 2]
    for row in rows.values():
        assert (row["num_samples"], row["num_captions"]) == (8, 40)
        recalls = [row[f"{way}_R@{k}"] for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
        assert 0.01 < max(recalls) <= 1
        assert row["rsum"] == pytest.approx(100 * sum(recalls))
    events = EventAccumulator(str(folder / "logs/run/tensorboard")).Reload()
    written = [event.value for event in events.Scalars("val/rsum")]
    assert written == pytest.approx([row["rsum"] for row in rows.values()])
    assert len(events.Scalars("train/unified_loss")) == 4
    (wandb_log,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert b"val/rsum" in wandb_log.read_bytes()
    assert b"train/unified_loss" in wandb_log.read_bytes()


def test_an_earlier_run_is_not_overwritten(trained, monkeypatch, capfd):
    folder, flags, _ = trained
    monkeypatch.chdir(folder)
    before = (folder / "logs/run/out.log").read_bytes()
    assert launcher.main(flags) == 2
    assert "holds an earlier run; give another name, or --resume latest to go on" in capfd.readouterr().err
    assert (folder / "logs/run/out.log").read_bytes() == before


def host_main(flags):
    """What ``python -m open_clip_train.main`` does, with vl-tiny, which open_clip does not have."""
    register_models()
    return open_clip_train.main.main(flags) or 0


def test_without_loss_it_is_stock_open_clip_bit_for_bit(tmp_path, toy_scenes, monkeypatch):
    # A table, because open_clip's reader of shards shuffles without a seed.
    images = list(read_karpathy(toy_scenes / "dataset_toy.json", "coco"))
    for split, number in (("train", 12), ("val", 8)):
        rows = [f"{toy_scenes}/{image.file}\t{image.captions[0]}" for image in images if image.split == split]
        (tmp_path / f"{split}.tsv").write_text("\n".join(["filepath\ttitle", *rows[:number]]))
    flags = [*TINY, "--train-data", str(tmp_path / "train.tsv"), "--val-data", str(tmp_path / "val.tsv"), "--seed", "3"]
    for folder, main in (("stock", host_main), ("ours", launcher.main)):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        assert main(flags) == 0
    expected = read_checkpoint(tmp_path / "stock")
    assert len(expected["state_dict"]) > 50
    assert_equal_nested(read_checkpoint(tmp_path / "ours"), expected)
    results = [(tmp_path / folder / "logs/run/checkpoints/results.jsonl").read_text() for folder in ("stock", "ours")]
    assert results[0] == results[1]
    assert len(results[0].splitlines()) == 1


def test_stock_open_clip_trains_and_validates_on_our_shards(tmp_path, data, monkeypatch, capfd):
    """Its own reader, in a worker process, and none of our code but the model's configuration."""
    monkeypatch.chdir(tmp_path)
    assert host_main([*TINY, "--dataset-type", "webdataset", *data, "--workers", "1"]) == 0
    output = capfd.readouterr().err
    losses = [float(loss) for loss in re.findall(r"Contrastive_loss: (\S+)", output)]
    assert len(losses) == 16 / 4
    assert all(0 < loss < 10 for loss in losses)
    assert "Handling webdataset error" not in output
    # Each image and its first caption; open_clip's count is 8 only if it reads every sample.
    assert read_results(tmp_path)[1]["num_samples"] == 8
    assert 0 < read_results(tmp_path)[1]["clip_val_loss"] < 10


def test_a_picture_that_a_worker_cannot_read_in_the_middle_of_training(tmp_path, toy_shards, monkeypatch, capfd):
    """The launcher looks at the first image only."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(toy_shards, tmp_path, dirs_exist_ok=True)
    shard = tmp_path / "toy-train-000001.tar"
    shard.write_bytes(shard.read_bytes().replace(b"IHDR", b"ihdr"))
    flags = ["--train-data", "toy-train-{000000..000001}.tar", "--workers", "1", "--on-read-error", "raise"]
    assert launcher.main([*TINY, *flags, "--loss", "unified"]) == 2
    output = capfd.readouterr().err
    assert re.match(r"cannot read image \d+, in toy-train-000001\.tar: ", error_line(output))
    assert "Traceback" not in output
    assert not (tmp_path / "logs/run/checkpoints/epoch_1.pt").exists()
    assert "on_read_error: raise" in (tmp_path / "logs/run/params.txt").read_text().splitlines()


SETS = ["--loss", "smooth_chamfer", "--head", "set"]
WRONG = {
    "nothing": (["--train-data", ""], "there is nothing to do: give --train-data or --val-data, or --help"),
    "suffix": (["--val-data", "val.txt"], "--val-data val.txt: unknown suffix; give shards, such as "),
    "logs": (["--logs", "/dev/null"], "cannot lock /dev/null/run/.lock: Not a directory"),
    "miner": (["--loss", "unified", "--miner", "BatchHardMine"], "(did you mean 'BatchHardMiner'?)"),
    "option-without-loss": (["--distance", "mil"], "--distance needs --loss"),
    "kwargs-without-name": (["--loss", "unified", "--miner-kwargs", "a=1"], "--miner-kwargs needs --miner"),
    "captions-without-loss": (["--captions-per-image", "5"], "--captions-per-image 5 needs --loss"),
    "siglip": (["--loss", "unified", "--siglip"], "--loss unified and --siglip both name a loss"),
    "horovod": (["--loss", "unified", "--horovod"], "--loss unified does not support --horovod: start the processes"),
    "coca": (["--loss", "unified", "--model", "coca_ViT-B-32"], "coca_ViT-B-32"),
    "value": (["--loss", "unified", "--loss-kwargs", "margin=a"], "margin of loss 'unified' must be a number, got 'a'"),
    "captions-of-no-number": (["--loss", "unified", "--captions-per-image", "none"], "positive number, got 'none'"),
    "resampled": (["--captions-per-image", "random", "--dataset-resampled"], "give it without --dataset-resampled"),
    "table": (["--captions-per-image", "random", "--train-data", "captions.csv"], "needs WebDataset shards (.tar)"),
    "head-without-loss": (["--head", "set"], "--head set needs a loss: give --loss smooth_chamfer"),
    "head-value": (["--head", "linear", "--head-kwargs", "dim=0"], "--head linear: dim must be an integer >= 1, got 0"),
    "head-torchscript": (["--head", "linear", "--torchscript"], "--head linear does not support --torchscript"),
    "head-imagenet": ([*SETS, "--imagenet-val", "imagenet"], "--head set does not support --imagenet-val"),
    "head-validation": ([*SETS, "--val-data", "captions.csv"], "captions.csv: open_clip's validation compares single"),
    "head-coca": (["--head", "linear", "--model", "coca_ViT-B-32"], "--model coca_ViT-B-32 generates captions too"),
}


@pytest.mark.parametrize(("flags", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_ends_with_one_line_and_nothing_written(tmp_path, data, flags, message, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launcher.main([*TINY, *data[:2], *flags]) == 2
    error = capfd.readouterr().err
    assert error.startswith("vl_plugins: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not list(tmp_path.iterdir())


def test_weights_that_cannot_be_downloaded(tmp_path, data, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    flags = [*TINY, *data, "--model", "RN50", "--pretrained", "openai", "--cache-dir", str(tmp_path / "cache")]
    assert launcher.main(flags) == 2
    error = error_line(capfd.readouterr().err)
    assert error.startswith("--model RN50: Failed to download weights for tag 'openai': ")
    check_is_free(tmp_path / "logs/run")


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_training(tmp_path, data):
    flags = [*TINY, *data, "--loss", "unified", "--workers", "2", "--epochs", "1000"]
    with (tmp_path / "output").open("w") as output:
        process = start_as_terminal([*LAUNCH, *flags], cwd=tmp_path, stderr=output, stdout=output)
    log = tmp_path / "logs/run/out.log"
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        while not (log.exists() and "Train Epoch: 1 " in log.read_text()):
            assert process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait() == 130
    output = (tmp_path / "output").read_text()
    assert output.count("vl_plugins: interrupted\n") == 1
    assert "Traceback" not in output
