"""Validation during training: retrieval over all captions, in open_clip's reports."""

import json
import os
from argparse import Namespace

import open_clip_train.train
import pytest
import torch
from open_clip_train.data import DataInfo

from tests.helpers.open_clip_training import TINY, read_results
from tests.helpers.processes import in_processes
from vl_plugins.data import EvaluationBatch, ShardDataset
from vl_plugins.data.sources import read_karpathy
from vl_plugins.integrations.open_clip.launcher import main
from vl_plugins.integrations.open_clip.validation import evaluate


class Lookup(torch.nn.Module):
    """Encodes image i and caption c as given rows."""

    def __init__(self, images, captions):
        super().__init__()
        self.images, self.captions = images, captions
        self.logit_scale = torch.nn.Parameter(torch.ones([]))

    def encode_image(self, images, normalize=False):
        assert normalize
        assert not self.training
        return self.images[images.long()]

    def encode_text(self, texts, normalize=False):
        assert normalize
        return self.captions[texts]


class Loader(list):
    num_samples, num_batches, dataset = 3, 2, ShardDataset.__new__(ShardDataset)


@pytest.fixture
def setting(tmp_path):
    """Three images with two captions each, in two batches."""
    model = Lookup(torch.eye(3), torch.eye(3).repeat_interleave(2, dim=0))
    owners = torch.tensor([0, 0, 1, 1])
    batches = Loader([EvaluationBatch(torch.tensor([0.0, 1.0]), torch.arange(4), owners, 0)])
    batches.append(EvaluationBatch(torch.tensor([2.0]), torch.arange(4, 6), owners[:2], 2))
    args = Namespace(device="cpu", precision="fp32", rank=0, local_rank=0, val_frequency=2, epochs=5, save_logs=True)
    args.wandb, args.checkpoint_path, args.zeroshot_frequency = False, str(tmp_path), 0
    args.captions_per_image, args.loss = "random", None
    return model, {"val": DataInfo(batches)}, args


@pytest.mark.parametrize(("epoch", "rank", "evaluated"), [(3, 0, False), (4, 0, True), (5, 0, True), (4, 1, False)])
def test_when_and_where_it_is_evaluated(setting, tmp_path, epoch, rank, evaluated):
    """By open_clip's own function, in its file."""
    model, data, args = setting
    args.rank = rank
    evaluate(model.train(), data, epoch, args, host_evaluate=open_clip_train.train.evaluate)
    rows = [json.loads(line) for file in tmp_path.glob("results.jsonl") for line in file.open()]
    assert [(row["epoch"], row["num_captions"], row["rsum"]) for row in rows] == [(epoch, 6, 600)] * evaluated


def test_other_data_stay_with_open_clip(setting):
    model, _, args = setting

    def host_evaluate(model, data, epoch, args):
        return sorted(data)

    others = {"val": DataInfo([]), "imagenet-val": object()}
    assert evaluate(model, others, 2, args, host_evaluate=host_evaluate) == ["imagenet-val", "val"]


def run_main(rank, folder, flags):
    os.chdir(folder)
    assert main(flags) == 0


def test_all_processes_validate_and_open_clip_finds_the_same(tmp_path, toy_scenes):
    """Pairs of images with one caption each: our metrics are open_clip's, and its loss, in one and in two processes."""
    images = [image for image in read_karpathy(toy_scenes / "dataset_toy.json", "coco") if image.split == "val"]
    rows = {image.captions[4]: f"{toy_scenes}/{image.file}\t{image.captions[4]}" for image in images[:30]}
    assert len(rows) > 20
    (tmp_path / "val.tsv").write_text("\n".join(["filepath\ttitle", *rows.values()]))
    flags = [*TINY, "--val-data", "val.tsv", "--batch-size", "4"]
    ours = ["--captions-per-image", "first"]
    for name, processes, more in (("host", 1, []), ("one", 1, ours), ("two", 2, [*ours, "--dist-backend", "gloo"])):
        in_processes(run_main, processes, tmp_path, [*flags, *more, "--name", name], joined=False)
    host, one, two = (read_results(tmp_path, name)[0] for name in ("host", "one", "two"))
    assert one == two
    shared = [name for name in host if "_R@" in name or name == "clip_val_loss"]
    assert len(shared) == 7
    assert {name: one[name] for name in shared} == pytest.approx({name: host[name] for name in shared}, abs=1e-6)


def test_programs_have_an_rsum(tmp_path, toy_shards, monkeypatch):
    """open_clip ranks their pairs."""
    monkeypatch.chdir(tmp_path)
    val = ["--val-data", f"pipe:cat {toy_shards}/toy-val-000000.tar", "--val-num-samples", "8", "--workers", "1"]
    val += ["--dataset-type", "webdataset", "--train-data", f"{toy_shards}/toy-train-000000.tar"]
    assert main([*TINY, *val, "--captions-per-image", "first"]) == 0
    row = read_results(tmp_path)[1]
    recalls = [row[f"{way}_R@{k}"] for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
    assert row["rsum"] == pytest.approx(100 * sum(recalls))
    assert "clip_val_loss" in row
