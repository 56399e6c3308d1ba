"""Validation during training: retrieval over all captions, in open_clip's reports."""

import json
import os
from argparse import Namespace

import open_clip_train.train
import pytest
import torch
from open_clip_train.data import DataInfo

from vl_plugins.data import EvaluationBatch, ShardDataset
from vl_plugins.integrations.open_clip.validation import evaluate


class Lookup(torch.nn.Module):
    """Encodes image i and caption c as given rows, so that every rank is known."""

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
    """Three images with two captions each, in two batches; caption 0 of image 0 looks like image 1."""
    directions = torch.eye(3)
    model = Lookup(directions, directions[[1, 0, 1, 1, 2, 2]])
    batches = Loader(
        [
            EvaluationBatch(torch.tensor([0.0, 1.0]), torch.arange(4), torch.tensor([0, 0, 1, 1]), 0),
            EvaluationBatch(torch.tensor([2.0]), torch.arange(4, 6), torch.tensor([0, 0]), 2),
        ]
    )
    args = Namespace(device="cpu", precision="fp32", rank=0, local_rank=0, val_frequency=2, epochs=5, save_logs=True)
    args.wandb, args.checkpoint_path, args.zeroshot_frequency = False, str(tmp_path), 0
    return model, {"val": DataInfo(batches)}, args


def run(model, data, epoch, args):
    """Evaluate by open_clip's own function; return the rows that it wrote."""
    evaluate(model, data, epoch, args, host_evaluate=open_clip_train.train.evaluate)
    file = f"{args.checkpoint_path}/results.jsonl"
    return [json.loads(line) for line in open(file)] if os.path.isfile(file) else []


def test_metrics_of_a_known_model(setting):
    model, data, args = setting
    model.train()
    (row,) = run(model, data, 2, args)
    # Image 0 finds its second caption first; image 1 ties with caption 0, which is not its own, and the tie counts.
    assert (row["image_to_text_R@1"], row["image_to_text_mean_rank"]) == pytest.approx((2 / 3, 4 / 3))
    # Caption 0 ranks image 0 behind image 1, and behind image 2 by a tie.
    assert (row["text_to_image_R@1"], row["text_to_image_mean_rank"]) == pytest.approx((5 / 6, 8 / 6))
    assert row["rsum"] == pytest.approx(100 * (2 / 3 + 1 + 1 + 5 / 6 + 1 + 1))
    assert (row["epoch"], row["num_samples"], row["num_captions"]) == (2, 3, 6)


@pytest.mark.parametrize(("epoch", "rank", "evaluated"), [(3, 0, False), (4, 0, True), (5, 0, True), (4, 1, False)])
def test_when_and_where_it_is_evaluated(setting, epoch, rank, evaluated):
    model, data, args = setting
    args.rank = rank
    assert bool(run(model, data, epoch, args)) is evaluated


def test_other_data_stay_with_open_clip(setting):
    model, _, args = setting

    def host_evaluate(model, data, epoch, args):
        return sorted(data)

    others = {"val": DataInfo([]), "imagenet-val": object()}
    assert evaluate(model, others, 2, args, host_evaluate=host_evaluate) == ["imagenet-val", "val"]
