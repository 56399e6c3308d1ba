"""Validation during training: retrieval over all captions, in open_clip's reports."""

import json
from argparse import Namespace

import open_clip_train.train
import pytest
import torch
from open_clip_train.data import DataInfo

from vl_plugins.data import EvaluationBatch, ShardDataset
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
