"""The launcher on open_clip 4.x, from the sources of its main branch: it trains what it trains on the installed 3.x.

They are downloaded, or taken from the folder ``VL_PLUGINS_OPEN_CLIP_4``, which holds ``open_clip`` and
``open_clip_train``; where there are none, these tests are skipped.
"""

import io
import json
import os
import sys
import tarfile
import urllib.request
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.integrations.open_clip.test_data import FOLLOWED, UNRELATED, data_flags
from tests.integrations.open_clip.test_launcher import MODULE, SHORT, checkpoint, error_of, run, shard_pattern
from vl_plugins.integrations.open_clip.data import TRAINING_READER
from vl_plugins.integrations.open_clip.host import OpenCLIP4
from vl_plugins.utils.errors import UserError

ARCHIVE = "https://github.com/mlfoundations/open_clip/archive/refs/heads/main.tar.gz"
SETS = ["--loss", "smooth_chamfer", "--head", "set", "--head-kwargs", "num_slots=3", "num_iters=2", "hidden_dim=32"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The folder of the packages."""
    folder = os.environ.get("VL_PLUGINS_OPEN_CLIP_4")
    if folder is not None:
        return Path(folder)
    try:
        with urllib.request.urlopen(ARCHIVE, timeout=10) as response:
            content = response.read()
    except OSError as error:
        pytest.skip(f"the sources of open_clip 4.x cannot be downloaded: {error}")
    folder = tmp_path_factory.mktemp("open_clip_4")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(folder, filter="data")
    (sources,) = folder.glob("*/src")
    return sources


@pytest.fixture(scope="module")
def data(toy_shards):
    return ["--train-data", shard_pattern(toy_shards, "train"), "--val-data", shard_pattern(toy_shards, "val")]


@pytest.fixture
def train(tmp_path, sources, data):
    """Function that runs the launcher on a version, whose number is the name of the run."""

    def train(version, *flags, processes=1):
        path = os.pathsep.join(map(str, [Path(__file__).parents[3], *([sources] if version == "4" else [])]))
        command = [sys.executable, "-m"]
        if processes > 1:
            command += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m"]
        # Without weight decay, from which the versions exempt different parameters.
        return run([*command, MODULE, *SHORT, *data, "--wd", "0", "--name", version, *flags], tmp_path, PYTHONPATH=path)

    return train


def results(folder, name):
    lines = (folder / "logs" / name / "checkpoints/results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def assert_same_weights(actual, expected):
    """Compare by the median: Adam makes whole steps of rounding errors where a gradient is 0, as that of key biases."""
    assert actual.keys() == expected.keys()
    assert len(expected) > 50
    for name, tensor in expected.items():
        if name == "_extra_state":
            assert actual[name] == tensor
        else:
            assert (actual[name] - tensor).abs().median() <= 1e-6, name


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--loss", "unified", "--loss-kwargs", "scale=learned"], id="unified"),
        pytest.param(["--loss", "unified", "--accum-freq", "2", "--captions-per-image", "2"], id="accum"),
        pytest.param([*SETS, "--accum-freq", "2", "--distance", "match_probability"], id="set-accum"),
        pytest.param(["--head", "linear", "--head-kwargs", "dim=24", "--captions-per-image", "first"], id="no-loss"),
    ],
)
def test_training_is_that_of_3(flags, tmp_path, train):
    for version in ("3", "4"):
        assert train(version, *flags).returncode == 0
    assert_same_weights(*(checkpoint(tmp_path, version)["state_dict"] for version in ("4", "3")))
    (row,) = results(tmp_path, "4")
    assert (row["num_samples"], row["num_captions"]) == (24, 120)
    assert [row] == [pytest.approx(expected, abs=1e-4) for expected in results(tmp_path, "3")]
    log = (tmp_path / "logs/4/out.log").read_text()
    assert log.count("Train Epoch") == (2 if "--accum-freq" in flags else 4)
    assert ("Training with the loss of vl_plugins" in log) is ("--loss" in flags)
    assert "captions_per_image: " in (tmp_path / "logs/4/params.txt").read_text()


def test_a_resumed_training_is_that_of_3(tmp_path, train):
    """The warm-up of six steps ends in the second epoch of four; another checkpoint is truncated."""
    flags = ["--loss", "triplet_hn", "--loss-kwargs", "warmup_steps=6"]
    for version in ("3", "4"):
        assert train(version, *flags, "--epochs", "1").returncode == 0
        file = tmp_path / "logs" / version / "checkpoints/epoch_2.pt"
        file.write_bytes((file.parent / "epoch_1.pt").read_bytes()[:-100])
        finished = train(version, *flags, "--epochs", "2", "--resume", "latest")
        assert finished.returncode == 0
        assert "epoch_2.pt: it is cut off or damaged" in finished.stderr
    assert_same_weights(*(checkpoint(tmp_path, version, epoch=2)["state_dict"] for version in ("4", "3")))
    assert [row["epoch"] for row in results(tmp_path, "4")] == [1, 2]


def test_a_compiled_task(tmp_path, train):
    assert train("3", "--loss", "unified").returncode == 0
    assert train("4", "--loss", "unified", "--torchcompile", "--torchcompile-backend", "eager").returncode == 0
    assert_same_weights(*(checkpoint(tmp_path, version)["state_dict"] for version in ("4", "3")))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loss", "unified", "--siglip"], "--loss unified and --siglip both name a loss"),
        (["--head", "linear", "--fsdp"], "--head linear does not support --fsdp: give one of them"),
        (["--loss", "unified", "--use-naflex"], "--loss unified is for images and captions, and --use-naflex is not"),
        (
            ["--captions-per-image", "2", "--loss", "unified", "--json-text-key", "cap"],
            "--json-text-key is for open_cl",
        ),
    ],
)
def test_what_does_not_go_together(flags, message, tmp_path, train):
    finished = train("4", *flags)
    assert finished.returncode == 2
    assert message in error_of(finished)
    assert not list(tmp_path.iterdir())


def test_our_reader_has_a_rule_for_every_data_flag(sources):
    command = "from open_clip_train.params import parse_args; parse_args(['--help'])"
    finished = run([sys.executable, "-c", command], sources, PYTHONPATH=str(sources))
    flags = data_flags(sources / "open_clip_train", finished.stdout)
    assert {"train_data", "length_bucketing", "max_image_pixels"} <= flags
    assert flags - FOLLOWED - TRAINING_READER.keys() - UNRELATED == set()


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({}, None),
        ({"use_naflex": True}, "--use-naflex"),
        ({"dataset_type": "webdataset-audio"}, "--dataset-type webdataset-audio"),
        ({"model": "coca_ViT-B-32"}, "--model coca_ViT-B-32"),
        ({"model": "hf-hub:timm/ViT-B-16-SigLIP"}, None),
    ],
)
def test_what_trains_on_other_data(options, other):
    given = Namespace(**{"use_naflex": False, "dataset_type": "auto", "model": "ViT-B-32", **options})
    assert OpenCLIP4().other_data(given) == other


def test_a_sharded_logit_scale_is_an_error(sources, monkeypatch):
    sharded = pytest.importorskip("torch.distributed.tensor")
    loss = torch.nn.Module()
    loss.forward = lambda image_features, logit_scale: image_features
    loss.register_forward_pre_hook(OpenCLIP4.check_scale_is_whole, with_kwargs=True)
    assert loss(image_features=1, logit_scale=torch.ones(1)) == 1
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        scale = sharded.distribute_tensor(torch.ones(1), torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(UserError, match=r"logit scale reaches the loss sharded, .*--fsdp-no-reshard-after-forward"):
            loss(image_features=1, logit_scale=scale)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path, train):
    """Data parallelism is that of 3.x, and a sharded model learns and is evaluated as a copied one is."""
    flags = ["--dist-backend", "gloo", "--loss", "unified", "--loss-kwargs", "scale=learned"]
    flags += ["--local-loss", "--gather-with-grad", "--lr", "1e-4"]
    for version in ("3", "4"):
        assert train(version, *flags, processes=2).returncode == 0
    sharded = ["--fsdp", "--fsdp-no-reshard-after-forward", "--name", "sharded"]
    assert train("4", *flags, *sharded, processes=2).returncode == 0
    expected = {name.removeprefix("module."): t for name, t in checkpoint(tmp_path, "3")["state_dict"].items()}
    copied, sharded = (checkpoint(tmp_path, name)["state_dict"] for name in ("4", "sharded"))
    assert_same_weights(copied, expected)
    assert_same_weights(sharded, copied)
    (expected,) = results(tmp_path, "3")
    for name in ("4", "sharded"):
        assert results(tmp_path, name) == [pytest.approx(expected, abs=1e-4)]
