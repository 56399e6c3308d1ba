import json
import os
from argparse import Namespace

import pytest
import torch

from vl_plugins.data import EvaluationBatch
from vl_plugins.distances import MatchProbability
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.data import AllCaptions
from vl_plugins.integrations.open_clip.host import OpenCLIP3
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
    num_samples = 3
    num_batches = 2


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
    args.wandb, args.checkpoint_path = False, str(tmp_path)
    return model, {"val": AllCaptions(batches)}, args


def host_evaluate(model, data, epoch, args, tb_writer=None, tokenizer=None):
    return {"host": sorted(data)}


def run(model, data, epoch, args, errors=None):
    errors = [] if errors is None else errors
    return evaluate(model, data, epoch, args, host=OpenCLIP3(), host_evaluate=host_evaluate, errors=errors)


def results(args):
    path = f"{args.checkpoint_path}/results.jsonl"
    try:
        with open(path) as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        return []


def test_metrics_of_a_known_model(setting, caplog):
    model, data, args = setting
    model.train()
    with caplog.at_level("INFO"):
        metrics = run(model, data, 2, args)
    (row,) = results(args)
    # Image 0 finds its second caption first; image 1 ties with caption 0, which is not its own, and the tie counts.
    assert (row["image_to_text_R@1"], row["image_to_text_mean_rank"]) == pytest.approx((2 / 3, 4 / 3))
    # Caption 0 ranks image 0 behind image 1, and behind image 2 by a tie.
    assert (row["text_to_image_R@1"], row["text_to_image_mean_rank"]) == pytest.approx((5 / 6, 8 / 6))
    assert row["rsum"] == pytest.approx(100 * (2 / 3 + 1 + 1 + 5 / 6 + 1 + 1))
    assert (row["epoch"], row["num_samples"], row["num_captions"]) == (2, 3, 6)
    assert metrics == {**{name: value for name, value in row.items() if name != "epoch"}, "host": []}
    assert "3 images, 6 captions" in caplog.text
    assert "66.7" in caplog.text


def test_sets_are_compared_by_the_similarity_of_the_model(setting, caplog):
    """Sets of the known model's vector and of another one, with the parameters that the similarity has by then."""
    model, data, args = setting
    model.images = torch.stack([model.images, model.images.roll(1, dims=1)], dim=1)
    model.captions = torch.stack([model.captions, model.captions], dim=1)
    model.similarity = MatchProbability(scale=2.0, shift=0.5)
    model.similarity.scale.data.fill_(3.0)
    with caplog.at_level("INFO"):
        run(model, data, 2, args)
    (row,) = results(args)
    with torch.no_grad():
        scores = model.similarity.compute_mat(model.images, model.captions)
    own = torch.tensor([0, 0, 1, 1, 2, 2])
    others = torch.arange(3)[:, None] != own
    ranks = 1 + ((scores >= scores[own, torch.arange(6)]) & others).sum(dim=0)
    assert row["text_to_image_mean_rank"] == pytest.approx(ranks.double().mean().item())
    assert row["positive_similarity"] == pytest.approx(scores[own, torch.arange(6)].mean().item())
    assert row["image_circular_variance"] == pytest.approx(1 - 0.5**0.5)
    assert row["caption_circular_variance"] == pytest.approx(0, abs=1e-6)
    assert "circular variance of the sets: images 0.2929, captions " in caplog.text
    assert model.similarity.scale.grad is None


@pytest.mark.parametrize(("epoch", "evaluated"), [(3, False), (4, True), (5, True)])
def test_frequency_is_that_of_open_clip(setting, epoch, evaluated):
    model, data, args = setting
    run(model, data, epoch, args)
    assert bool(results(args)) is evaluated


def test_only_the_first_process_evaluates(setting):
    model, data, args = setting
    args.rank = 1
    assert run(model, data, 2, args) == {"host": []}
    assert not results(args)


def test_training_goes_on_when_its_validation_data_fail(setting, caplog):
    model, data, args = setting
    os.symlink("/dev/full", f"{args.checkpoint_path}/results.jsonl")
    message = f"cannot write {args.checkpoint_path}/results.jsonl: No space left on device"
    with pytest.raises(UserError, match=f"^{message}$"):
        run(model, data, 2, args)
    data["train"] = object()
    errors = []
    assert run(model, data, 2, args, errors=errors) == {"host": ["train"]}
    assert f"Eval Epoch: 2 {message}" in caplog.text
    assert [str(error) for error in errors] == [message]


def test_embeddings_that_are_not_finite(setting):
    model, data, args = setting
    data["train"] = object()
    model.images = model.images * torch.nan
    with pytest.raises(UserError, match=r"^validation after epoch 2: .*finite"):
        run(model, data, 2, args)


def test_other_data_stay_with_open_clip(setting):
    model, data, args = setting
    others = {"val": object(), "imagenet-val": object()}
    assert run(model, others, 2, args) == {"host": ["imagenet-val", "val"]}
    assert not results(args)
    assert run(model, others | data, 2, args)["host"] == ["imagenet-val"]
    assert len(results(args)) == 1
