"""Mistakes that the start of a training shows: each planted one has its line, and healthy trainings have none."""

import json
import logging
import re

import open_clip
import pytest
import torch
from PIL import Image

from tests.helpers.open_clip_training import TINY
from vl_plugins.cli import main as vl_plugins_main
from vl_plugins.integrations.open_clip.launcher import main
from vl_plugins.integrations.open_clip.tokens import cut_captions

LONG = "a red square to the left of a small blue circle " * 4
FEW = "only 4 images are compared in a step"
MISTAKES = {
    "--captions-per-image random": [FEW],
    "--captions-per-image random --batch-size 16 --accum-freq 2 --warmup 3": [
        "--warmup 3 is longer than the training of 2 steps, which ends at a rate of 0.00067, below --lr 0.001: try"
    ],
    "--batch-size 32 --lock-image --lock-text --lock-text-freeze-layer-norm": ["no weight of the model is trained"],
    "--batch-size 32 --lr 0 --captions-per-image 2": ["nothing is trained, because --lr is 0"],
    "--batch-size 32 --image-mean 0 0 0 --image-std 1 1 1 --pretrained": [
        r"pictures of the first batch lie in \[0.*\], but the weights were trained with a mean of 0.481, 0.458, 0.408"
    ],
}
HEALTHY = [
    "--captions-per-image random --batch-size 32",
    "--captions-per-image 2 --batch-size 16 --accum-freq 2 --head linear --head-lr 1e-2",
    "--batch-size 32 --lock-image --workers 2",
    "--captions-per-image all --batch-size 32 --image-mean 0 0 0 --image-std 1 1 1",
    "--captions-per-image first --loss ProxyAnchorLoss --loss-kwargs num_classes=64 embedding_size=128",
]


@pytest.fixture(scope="module")
def data(toy_shards):
    """64 images."""
    train = toy_shards / "toy-train-{000000..000007}.tar"
    return [
        "--train-data",
        str(train),
        "--dataset-type",
        "webdataset",
        "--train-num-samples",
        "64",
        "--loss",
        "unified",
    ]


@pytest.fixture
def warnings_of(tmp_path, monkeypatch):
    """A function that returns the warnings in the log of a training."""
    monkeypatch.chdir(tmp_path)

    def train(*flags):
        logging.getLogger().handlers.clear()
        assert main([*TINY, *flags]) == 0
        return re.findall(r"\| WARNING \| (?:root \| )?(.*)", (tmp_path / "logs/run/out.log").read_text())

    return train


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_has_one_line(flags, data, warnings_of, monkeypatch):
    words = flags.split()
    if "--pretrained" in words:
        # A published tag of this model, whose file would be downloaded.
        monkeypatch.setattr(open_clip, "is_pretrained_cfg", lambda model, tag: tag == "published")
        monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda model, tag: {})
        torch.save(open_clip.create_model("vl-tiny").state_dict(), "published")
        words.append("published")
    lines = [line for line in warnings_of(*data, *words) if "No pretrained" not in line]
    assert len(lines) == len(MISTAKES[flags])
    for line, expected in zip(lines, MISTAKES[flags], strict=True):
        assert re.search(expected, line), line


@pytest.mark.parametrize("flags", HEALTHY)
def test_healthy_trainings_have_none(flags, data, warnings_of):
    lines = [line for line in warnings_of(*data, *flags.split()) if "No pretrained" not in line]
    assert lines == []


@pytest.mark.parametrize("reader", [["--captions-per-image", "first"], ["--workers", "2"]], ids=["ours", "open_clip's"])
def test_pictures_and_captions(reader, warnings_of, tmp_path):
    """Equal pictures, and captions that are cut, whichever process reads them."""
    rows = ["filepath\ttitle"]
    for number in range(32):
        Image.new("RGB", (64, 64), (9, 9, 200)).save(f"{number}.png")
        rows.append(f"{tmp_path}/{number}.png\t{LONG} {number}")
    (tmp_path / "train.tsv").write_text("\n".join(rows))
    (tmp_path / "val.tsv").write_text("\n".join(rows).replace(LONG, ""))
    flags = ["--train-data", "train.tsv", "--val-data", "val.tsv", "--loss", "unified", "--validate-first"]
    lines = warnings_of(*flags, "--batch-size", "16", "--accum-freq", "2", *reader)
    lines = [line for line in lines if "No pretrained" not in line]
    cut, equal = lines
    assert cut.startswith(
        "16 of the 16 captions of the first batch fill the context of 32 tokens, and what is beyond is cut"
    )
    assert equal.startswith("all pictures of the first batch are equal")


def test_a_caption_that_just_fits_is_not_cut():
    tokenizer = open_clip.get_tokenizer("ViT-B-32", context_length=12)
    assert cut_captions(tokenizer, ["dog " * 10, "dog " * 11, "", "a dog"], 12) == 1


def test_shards_info_counts_them_all(toy_shards, capsys):
    shards = str(toy_shards / "toy-val-*.tar")
    assert vl_plugins_main(["shards", "info", shards, "--model", "vl-tiny"]) == 0
    counts = json.loads(capsys.readouterr().out)["toy-val"]["longer_than_context"]
    assert counts == {"context_length": 32, "number": 0, "share": 0.0}
