"""The launcher: whole trainings on real shards, and what is wrong with a command line."""

import pickle
import re
from dataclasses import replace
from pathlib import Path

import open_clip
import open_clip_train.main
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.archives import encode_archive, encode_picture
from tests.helpers.open_clip_training import (
    LAUNCH,
    TINY,
    assert_equal_nested,
    in_float64,
    read_checkpoint,
    read_results,
    run,
    small_shard_flags,
    write_table,
)
from tests.helpers.pictures import EPS, replace_ghostscript
from vl_plugins.data import write_shards
from vl_plugins.data.sources import read_karpathy
from vl_plugins.integrations.open_clip import launcher
from vl_plugins.integrations.open_clip.models import register_models

PICTURE = encode_picture(mode="RGB")


class Harmful:
    def __reduce__(self):
        return print, ("code has run",)


@pytest.fixture(scope="module")
def data(toy_shards):
    return small_shard_flags(toy_shards)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Folder and output of a training in a process of its own."""
    folder = tmp_path_factory.mktemp("trained")
    flags = [*TINY, *data, "--epochs", "2", "--accum-freq", "2", "--report-to", "tensorboard,wandb"]
    flags += ["--loss", "unified", "--loss-kwargs", "margin=0.1", "scale=30", "--reducer", "AvgNonZeroReducer"]
    flags += ["--captions-per-image", "random"]
    finished = run([*LAUNCH, *flags], folder, WANDB_MODE="offline", WANDB_SILENT="true")
    assert finished.returncode == 0
    return folder, finished.stderr + finished.stdout


def test_the_log_of_a_training(trained):
    folder, output = trained
    assert "Training with the loss of vl_plugins: unified;" in output
    losses = [float(value) for value in re.findall(r"Unified_loss: (\S+)", output)]
    assert len(losses) == 2 * 2, "16 images, two batches of 4 a step, two epochs"
    assert all(0 < loss < 2 for loss in losses)
    parameters = (folder / "logs/run/params.txt").read_text().splitlines()
    expected = {"loss: unified", "loss_kwargs: {'margin': 0.1, 'scale': 30}", "captions_per_image: random"}
    assert expected < {*parameters}


def test_metrics_reach_results_tensorboard_and_wandb(trained):
    folder, _ = trained
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
    for file in ("epoch_1.pt", "results.jsonl"):
        stock, ours = (tmp_path / folder / "logs/run/checkpoints" / file for folder in ("stock", "ours"))
        assert stock.read_bytes() == ours.read_bytes()


@pytest.mark.parametrize("reader", [[], ["--captions-per-image", "first"]], ids=["open_clip's", "ours"])
@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-10), ("float32", 5e-5)])  # ten steps of rounding
def test_the_loss_changes_alone(tmp_path, toy_scenes, monkeypatch, precision, tolerance, reader):
    """VLC with the model's scale is twice open_clip's own loss, so half the rate gives the same weights.

    With open_clip's reader of a table, and with ours of shards, whose images have one caption.
    """
    images = [image for image in read_karpathy(toy_scenes / "dataset_toy.json", "coco") if image.split == "train"]
    images = [replace(image, captions=image.captions[4:], caption_ids=image.caption_ids[4:]) for image in images[:40]]
    captions = [image.captions[0] for image in images]
    assert len(set(captions)) == 40, "all captions differ"
    data = tmp_path / "train.tsv"
    rows = [f"{toy_scenes}/{image.file}\t{caption}" for image, caption in zip(images, captions, strict=True)]
    data.write_text("\n".join(["filepath\ttitle", *rows]))
    if reader:
        data = write_shards(images, toy_scenes, tmp_path / "shards").shards[0]
    flags = [*TINY, "--train-data", str(data), "--opt", "timm/sgd", "--wd", "0", *reader]
    if precision == "float64":
        create = in_float64(open_clip.create_model_and_transforms)
        for module in (open_clip, open_clip_train.main):
            monkeypatch.setattr(module, "create_model_and_transforms", create)
    weights = {}
    for name, main, loss, rate in (
        ("stock", launcher.main if reader else host_main, [], "1e-1"),
        ("ours", launcher.main, ["--loss", "vlc", "--loss-kwargs", "scale=learned"], "5e-2"),
    ):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert main([*flags, *loss, "--lr", rate]) == 0
        weights[name] = read_checkpoint(Path())["state_dict"]
    start = open_clip.create_model("vl-tiny").state_dict()
    moved = 0.0
    for name, weight in weights["stock"].items():
        if weight.is_floating_point():
            assert (weights["ours"][name] - weight).abs().max() <= tolerance, name
            moved = max(moved, (weight - start[name]).abs().max().item())
    assert moved > 1e-2


@pytest.mark.parametrize("reader", [[], ["--captions-per-image", "random"]], ids=["open_clip's", "ours"])
def test_validation_before_the_first_step(tmp_path, toy_shards, toy_scenes, monkeypatch, reader):
    """It is that of the model as it starts, and changes nothing of the training."""
    write_table(tmp_path / "train.tsv", toy_scenes, number=20)
    write_table(tmp_path / "val.tsv", toy_scenes, number=8)
    flags = [*TINY, "--train-data", str(tmp_path / "train.tsv"), "--val-data", str(tmp_path / "val.tsv"), *reader]
    flags += ["--loss", "unified", "--workers", "0"]
    results = {}
    for name, more in (("without", []), ("first", ["--validate-first"]), ("start", ["--validate-first", "--lr", "0"])):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert launcher.main([*flags, *more]) == 0
        results[name] = read_results(Path()), read_checkpoint(Path())["state_dict"]
    assert [list(rows) for rows, _ in results.values()] == [[1], [0, 1], [0, 1]]
    assert_equal_nested(results["first"][1], results["without"][1])
    rows, _ = results["start"]
    assert {**rows[0], "epoch": 1} == pytest.approx(rows[1])
    assert results["first"][0][0] == pytest.approx(rows[0])


def test_bugs_keep_their_traceback(tmp_path, data, monkeypatch):
    """After the first step, an exception is none of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_, steps=[0]: steps.pop())
    with pytest.raises(IndexError, match="pop from empty list"):
        launcher.main([*TINY, *data])


@pytest.mark.parametrize("extension", ["pyd", "pickle", "PYD"])
def test_pickles_in_shards_run_no_code(extension, tmp_path, monkeypatch, capfd):
    """With stock open_clip's reader."""
    monkeypatch.chdir(tmp_path)
    harmful = pickle.dumps(Harmful())
    files = [(f"{n}.{name}", data) for n in range(8) for name, data in {"png": PICTURE, "txt": f"dog {n}"}.items()]
    files[2:2] = [(f"0.{extension}", harmful)]
    (tmp_path / "a.tar").write_bytes(encode_archive(files))
    assert launcher.main([*TINY, "--train-data", "a.tar", "--train-num-samples", "8"]) == 0
    assert "code has run" not in capfd.readouterr().out


def test_pictures_in_shards_start_no_program(tmp_path, monkeypatch):
    """With stock open_clip's reader, which skips them."""
    monkeypatch.chdir(tmp_path)
    has_run = replace_ghostscript(monkeypatch, tmp_path)
    pictures = [*[PICTURE] * 8, EPS]
    members = [(f"{n}.jpg", data) for n, data in enumerate(pictures)]
    members += [(f"{n}.txt", f"dog {n}") for n in range(9)]
    (tmp_path / "a.tar").write_bytes(encode_archive(sorted(members)))
    assert launcher.main([*TINY, "--train-data", "a.tar", "--train-num-samples", "8"]) == 0
    assert not has_run.exists()


def test_programs_as_shards(tmp_path, toy_shards, monkeypatch):
    """On the command line, for open_clip's own reader."""
    monkeypatch.chdir(tmp_path)
    flags = ["--train-data", f"pipe:cat {toy_shards}/toy-train-000000.tar", "--dataset-type", "webdataset"]
    assert launcher.main([*TINY, *flags, "--train-num-samples", "8"]) == 0
