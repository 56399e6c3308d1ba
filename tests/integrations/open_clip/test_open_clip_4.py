"""The launcher on open_clip 4.x, from the sources of its main branch: it trains what it trains on the installed 3.x.

``VL_PLUGINS_OPEN_CLIP_4`` names the folder with ``open_clip`` and ``open_clip_train``: ``src`` of a git checkout, such
as of commit 89fb801f1e6087880e951fc8354b8a2077b79c6d, version 4.2.0.dev0. Without it, the tests are skipped.
"""

import logging
import os
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import open_clip
import pytest
import torch
from PIL import Image

from tests.helpers.open_clip_training import (
    LAUNCH,
    TINY,
    assert_equal_nested,
    best_and_end,
    in_float64,
    read_best,
    read_checkpoint,
    read_results,
    run,
    small_shard_flags,
)
from vl_plugins.integrations.open_clip.launcher import main

ROOT = Path(__file__).parents[3]
SETS = ["--loss", "smooth_chamfer", "--head", "set", "--head-kwargs", "num_slots=3", "num_iters=2", "hidden_dim=32"]
SETS += ["--captions-per-image", "random"]
SGD = ["--opt", "timm/sgd"]
# Without weight decay, from which the versions exempt different parameters.
FLAGS = [*TINY, "--wd", "0"]
UNIFIED = ["--loss", "unified", "--loss-kwargs", "scale=learned", "--captions-per-image", "random"]
TRAININGS = {
    "unified": UNIFIED,
    "accum": ["--loss", "unified", "--accum-freq", "2", "--captions-per-image", "2"],
    # Without the normalization of Adam, a gradient of the scale that is counted twice moves it twice as far.
    "scale-accum": [*UNIFIED, "--accum-freq", "2", "--opt", "timm/sgd"],
    "set-accum": [*SETS, "--accum-freq", "2", "--distance", "match_probability"],
    "no-loss": ["--head", "linear", "--head-kwargs", "dim=24", "--captions-per-image", "first"],
    "compiled": [*UNIFIED, "--torchcompile"],
    "first": ["--captions-per-image", "first", *SGD, "--lr", "1e-1"],
    "first-vlc": ["--captions-per-image", "first", "--loss", "vlc", *SGD, "--lr", "5e-2"],
    "learned": ["--loss", "siglip", "--captions-per-image", "random", "--loss-kwargs", "learn_bias=True", *SGD],
    "rates": [
        *UNIFIED,
        "--head",
        "linear",
        "--head-lr",
        "4e-3",
        "--image-lr",
        "2e-3",
        "--text-layer-decay",
        "0.5",
        *SGD,
    ],
    "resumed": ["--loss", "triplet_hn", "--loss-kwargs", "warmup_steps=6", "--captions-per-image", "random"],
}
# Its best epoch lies between the first and the last one.
BEST = [*FLAGS, "--loss", "unified", "--captions-per-image", "random", "--validate-first", "--lr", "3e-3"]
BEST += ["--train-num-samples", "8", "--epochs", "6", "--save-best", "image_to_text_mean_rank", "--patience", "2"]
BEST += ["--image-lr", "2e-3", "--text-layer-decay", "0.9"]


make_model = open_clip.create_model_and_transforms


def train_all(version, data):
    """Train everything in this process, on the version of open_clip that it finds."""
    for name, flags in TRAININGS.items():
        if name == "compiled":
            flags = [*flags, "--torchcompile-backend", "eager"] if version == "4" else flags[:-1]
        logging.getLogger().handlers.clear()  # each training adds its own
        create = in_float64(make_model) if "first" in name else make_model
        with mock.patch.object(open_clip, "create_model_and_transforms", create):
            assert main([*FLAGS, *data, *flags, "--name", name]) == 0
    # The warm-up of six steps ends in the second epoch of four.
    flags = [*FLAGS, *data, *TRAININGS["resumed"], "--name", "resumed", "--epochs", "2", "--resume", "latest"]
    assert main(flags) == 0
    resumed = ["--name", "best-resumed", "--resume", "logs/best/checkpoints/epoch_2.pt"]
    for flags in (["--name", "best"], resumed):
        logging.getLogger().handlers.clear()
        assert main([*BEST, *data, *flags]) == 0


@pytest.fixture(scope="module")
def sources():
    """The folder of the packages."""
    folder = os.environ.get("VL_PLUGINS_OPEN_CLIP_4")
    if folder is None:
        pytest.skip("VL_PLUGINS_OPEN_CLIP_4 does not name the folder src of a checkout of open_clip's main branch")
    return Path(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, sources, toy_shards):
    """By version, the folder of everything that was trained."""
    found = {}
    for version, paths in (("3", [ROOT]), ("4", [ROOT, sources])):
        folder = tmp_path_factory.mktemp(f"trained-{version}")
        code = f"from {__name__} import train_all; train_all({version!r}, {small_shard_flags(toy_shards)!r})"
        finished = run([sys.executable, "-c", code], folder, PYTHONPATH=os.pathsep.join(map(str, paths)))
        assert finished.returncode == 0
        found[version] = folder
    return found


def assert_same_weights(actual, expected):
    """Compare by the median: Adam makes whole steps of rounding errors where a gradient is 0, as that of key biases."""
    assert actual.keys() == expected.keys()
    assert len(expected) > 50
    for name, tensor in expected.items():
        assert (actual[name] - tensor).abs().median() <= 1e-6, name


@pytest.mark.parametrize("name", TRAININGS)
def test_training_is_that_of_3(name, trained):
    epochs = 2 if name == "resumed" else 1
    folder = trained["4"]
    states = [read_checkpoint(trained[version], epochs, name)["state_dict"] for version in ("4", "3")]
    assert_same_weights(*states)
    rows = read_results(folder, name)
    assert [*rows] == list(range(1, epochs + 1))
    for epoch, expected in read_results(trained["3"], name).items():
        assert rows[epoch] == pytest.approx(expected, abs=1e-4)
    log = (folder / "logs" / name / "out.log").read_text()
    assert "rates" not in name or re.findall(r"LR: (\S+)", log)[0] == "0.001000"
    assert log.count("Train Epoch: 0") == (2 if "accum" in name else 4)
    assert ("Training with the loss of vl_plugins" in log) is (name not in ("no-loss", "first"))


def test_batches_of_texts_of_one_length(tmp_path, sources, toy_shards):
    """Batches of texts of one length train, and the log has the share of equal captions."""
    flags = [*FLAGS, "--train-data", str(toy_shards / "toy-train-000000.tar"), "--dataset-type", "webdataset"]
    flags += ["--train-num-samples", "16", "--workers", "1", "--loss", "unified", "--accum-freq", "2"]
    flags += ["--length-bucketing", "--text-pad-multiple", "8", "--bucket-pool", "16"]
    path = os.pathsep.join(map(str, [ROOT, sources]))
    assert run([*LAUNCH, *flags], tmp_path, PYTHONPATH=path).returncode == 0
    log = (tmp_path / "logs/run/out.log").read_text()
    shares = [float(share) for share in re.findall(r"Train Epoch.*Known_positives_left_out: (\S+)", log)]
    assert len(shares) == 2
    assert all(0 <= share < 0.5 for share in shares)


def test_a_fork(tmp_path, sources):
    """``RetrievalClipLoss`` in a task, as the guide says, trains what the launcher trains."""
    fork = tmp_path / "fork"
    shutil.copytree(sources / "open_clip_train", fork / "open_clip_train")
    main_file = fork / "open_clip_train/main.py"
    source = main_file.read_text()
    call = "create_task(args, model=model, dist_model=dist_model, naflex_data_config=naflex_data_config)"
    assert source.count(f"task = {call}\n") == 1
    source = source.replace(f"task = {call}", 'task = CLIPTask(model, loss=RetrievalClipLoss("unified"))')
    imports = "from open_clip.task import CLIPTask\n"
    imports += "from vl_plugins.integrations.open_clip.clip_loss import RetrievalClipLoss\n"
    place = "from open_clip_train.data import get_data\n"
    assert source.count(place) == 1
    main_file.write_text(source.replace(place, place + imports))
    images = [f"{tmp_path}/{number}.png" for number in range(8)]
    for number, image in enumerate(images):
        Image.new("RGB", (64, 64), (30 * number, 9, 99)).save(image)
    rows = [f"{image}\tpicture number {number}" for number, image in enumerate(images)]
    (tmp_path / "train.tsv").write_text("\n".join(["filepath\ttitle", *rows]))
    start = "from vl_plugins.integrations.open_clip.models import register_models; register_models(); "
    code = start + "import sys; from open_clip_train.main import main; main(sys.argv[1:])"
    flags = [*TINY, "--train-data", "train.tsv", "--name"]
    for name, command, paths in (
        ("fork", [sys.executable, "-c", code, *flags, "fork"], [fork, ROOT, sources]),
        ("ours", [*LAUNCH, *flags, "ours", "--loss", "unified"], [ROOT, sources]),
    ):
        assert run(command, tmp_path, PYTHONPATH=os.pathsep.join(map(str, paths))).returncode == 0, name
    forked, ours = (read_checkpoint(tmp_path, name=name)["state_dict"] for name in ("fork", "ours"))
    torch.testing.assert_close(dict(forked), dict(ours), rtol=0, atol=1e-6)


@pytest.mark.parametrize("version", ["3", "4"])
def test_the_loss_changes_alone(version, trained):
    """VLC with the model's scale is twice open_clip's own loss, so half the rate gives the same weights."""
    stock, ours = (read_checkpoint(trained[version], 1, name)["state_dict"] for name in ("first", "first-vlc"))
    for name, weight in stock.items():
        assert (ours[name] - weight).abs().max() <= 1e-10, name


def test_parameters_of_a_loss(trained):
    """They have an entry of their own, as with 3.x."""
    for version in ("3", "4"):
        checkpoint = read_checkpoint(trained[version], 1, "learned")
        assert list(checkpoint["trained_loss"]) == ["trained_loss.bias"]
        assert checkpoint["trained_loss"]["trained_loss.bias"] != -10
        assert not any("trained_loss" in name for name in checkpoint["state_dict"])


def test_the_best_epoch(trained):
    """It is that of the rows, where the training ends, and that of a resumed training."""
    folder = trained["4"]
    rows = read_results(folder, "best")
    values = [row["image_to_text_mean_rank"] for row in rows.values()]
    best, end = best_and_end(values, "image_to_text_mean_rank", 2)
    assert [*rows] == [*range(end + 1)]
    assert end > 2
    files = {}
    for name in ("best", "best-resumed"):
        last = read_checkpoint(folder, end, name)
        files[name] = [{**last, "name": None}, {**read_best(folder, name), "name": None}]
    assert_equal_nested(files["best-resumed"], files["best"])
    last, saved = files["best"]
    assert (saved["epoch"], last["best"]["epoch"]) == (best, best)
    assert last.keys() - saved.keys() == {"optimizer", "global_step", "samples_seen"}
    if best > 0:
        assert_equal_nested(dict(saved["state_dict"]), dict(read_checkpoint(folder, best, "best")["state_dict"]))


@pytest.mark.slow
@pytest.mark.parametrize("sets", [False, True], ids=["vectors", "sets"])
def test_two_processes(tmp_path, sources, toy_shards, sets):
    """Data parallelism is that of 3.x, and a sharded model learns and is evaluated as a copied one is."""
    flags = [*FLAGS, *small_shard_flags(toy_shards), "--dist-backend", "gloo", "--lr", "1e-4", "--batch-size", "2"]
    flags += [*SETS, "--distance", "match_probability"] if sets else UNIFIED
    flags += ["--local-loss"]
    command = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2".split(), *LAUNCH[1:]]
    sharded = ["--fsdp", "--fsdp-no-reshard-after-forward"]
    for name, paths, more in (("3", [ROOT], []), ("4", [ROOT, sources], []), ("sharded", [ROOT, sources], sharded)):
        path = os.pathsep.join(map(str, paths))
        assert run([*command, *flags, "--name", name, *more], tmp_path, PYTHONPATH=path).returncode == 0
    expected = {key.removeprefix("module."): t for key, t in read_checkpoint(tmp_path, 1, "3")["state_dict"].items()}
    for name in ("4", "sharded"):
        assert_same_weights(read_checkpoint(tmp_path, 1, name)["state_dict"], expected)
        assert read_results(tmp_path, name)[1] == pytest.approx(read_results(tmp_path, "3")[1], abs=1e-4)
