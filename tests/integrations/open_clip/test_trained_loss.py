"""Losses with parameters of their own, or with the model's scale and bias, in whole trainings by the launcher."""

import math

import open_clip
import pytest
import torch
from pytorch_metric_learning import losses as host

from tests.helpers.open_clip_training import TINY, assert_equal_nested, read_checkpoint, small_shard_flags
from vl_plugins.data import read_collection
from vl_plugins.integrations.loading import load_model
from vl_plugins.integrations.open_clip.launcher import main
from vl_plugins.integrations.open_clip.models import register_models

PROXIES = "--loss ProxyAnchorLoss --loss-kwargs num_classes=16 embedding_size=128".split()
SIGLIP = ["--loss", "siglip"]
OWN_SIGLIP = [*SIGLIP, "--loss-kwargs", "learn_scale=True", "learn_bias=True"]
RANDOM = ["--captions-per-image", "random"]


@pytest.fixture(scope="module")
def data(toy_shards):
    return [*small_shard_flags(toy_shards), *RANDOM]


def log_of(folder):
    return (folder / "logs/run/out.log").read_text()


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ([*PROXIES, "--head-lr", "1e-2"], {"trained_loss.proxies": (16, 128)}),
        ([*OWN_SIGLIP, "--accum-freq", "2"], {"trained_loss.log_scale": (), "trained_loss.bias": ()}),
        (SIGLIP, {}),
    ],
    ids=["proxies", "own scale and bias", "the model's"],
)
def test_a_resumed_training_is_the_same(tmp_path, data, monkeypatch, flags, names):
    """The file has the loss in an entry of its own, so that plain open_clip reads the weights."""
    flags = [*TINY, *data, *flags, "--epochs", "2"]
    for folder, more in (("straight", []), ("resumed", ["--resume", "../straight/logs/run/checkpoints/epoch_1.pt"])):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        assert main([*flags, *more]) == 0
    straight, resumed = (read_checkpoint(tmp_path / folder, 2) for folder in ("straight", "resumed"))
    assert_equal_nested(resumed, straight)
    before = read_checkpoint(tmp_path / "straight", 1)
    parameters = straight.get("trained_loss", {})
    assert {name: tuple(weight.shape) for name, weight in parameters.items()} == names
    assert not any("trained_loss" in name for name in straight["state_dict"])
    for name, weight in parameters.items():
        assert not torch.equal(weight, before["trained_loss"][name]), "it is trained"
    options = {"init_logit_bias": -10} if "logit_bias" in straight["state_dict"] else {}
    register_models()
    file = tmp_path / "straight/logs/run/checkpoints/epoch_2.pt"
    model = open_clip.create_model("vl-tiny", pretrained=str(file), **options)
    ours, *_ = load_model(file)
    for read in (model, ours):
        assert_equal_nested(dict(read.state_dict()), dict(straight["state_dict"]))


def test_the_rate_of_the_loss(tmp_path, data, monkeypatch):
    """A step of SGD moves the proxies by the rate, and the model by its own."""
    monkeypatch.chdir(tmp_path)
    flags = [*TINY, *data, *PROXIES, "--opt", "timm/sgd", "--wd", "0", "--train-num-samples", "4", "--lr", "0.01"]
    saved = {}
    for name, rate in (("start", []), ("same", []), ("twice", ["--head-lr", "0.02"])):
        lr = ["--lr", "1e-30"] if name == "start" else []
        assert main([*flags, *lr, *rate, "--name", name]) == 0
        saved[name] = read_checkpoint(tmp_path, name=name)
    (start, same, twice) = (saved[name]["trained_loss"]["trained_loss.proxies"] for name in saved)
    assert (same - start).abs().max() > 1e-4
    torch.testing.assert_close(twice - start, 2 * (same - start), rtol=1e-3, atol=1e-7)
    assert_equal_nested(dict(saved["twice"]["state_dict"]), dict(saved["same"]["state_dict"]))
    assert [group["lr"] for group in saved["twice"]["optimizer"]["param_groups"]][-1] == 0.02


def test_the_rate_of_a_resumed_run(tmp_path, data, monkeypatch, capfd):
    """It is that of the run, unless the flags name another one; a run without cannot get one."""
    monkeypatch.chdir(tmp_path)
    flags = [*TINY, *data, *PROXIES, "--train-num-samples", "4"]
    assert main([*flags, "--head-lr", "1e-2"]) == 0
    assert main([*flags, "--name", "plain"]) == 0
    resumed = [*TINY, *data[:4], "--epochs", "2", "--train-num-samples", "4", "--resume"]
    rates = {}
    for name, rate in (("same", []), ("other", ["--head-lr", "1e-4"])):
        assert main([*resumed, "logs/run/checkpoints/epoch_1.pt", *rate, "--name", name]) == 0
        groups = read_checkpoint(tmp_path, 2, name)["optimizer"]["param_groups"]
        rates[name] = groups[-1]["lr"] / groups[0]["lr"]
    assert rates == pytest.approx({"same": 10, "other": 0.1})
    assert "--head-lr 0.0001 in place of 0.01" in "".join(capfd.readouterr())
    assert main([*resumed, "logs/plain/checkpoints/epoch_1.pt", "--head-lr", "1e-2", "--name", "new"]) == 2
    assert (
        "this run has no --head-lr, which splits the groups of the optimizer, so it needs a new run"
        in capfd.readouterr().err
    )


def test_proxies_are_those_of_the_images(tmp_path, data, monkeypatch):
    """The first step against pytorch-metric-learning's loss on images and texts as one set, by the image's number."""
    calls = []
    compute = host.ProxyAnchorLoss.compute_loss

    def noted(self, embeddings, labels, *given):
        calls.append(labels.tolist())
        return compute(self, embeddings, labels, *given)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host.ProxyAnchorLoss, "compute_loss", noted)
    assert main([*TINY, *data, *PROXIES]) == 0
    in_training = [labels for labels in calls if len(labels) == 8][-4:]
    for labels in in_training:
        assert labels[:4] == labels[4:], "a caption of each image"
    images = len(read_collection(data[1]))
    assert sorted(label for labels in in_training for label in labels[:4]) == list(range(images))
    assert "Images and texts are compared as one set" in log_of(tmp_path)


@pytest.mark.parametrize("bias", [None, -13.0], ids=["as OpenAI's", "as SigLIP's"])
def test_siglip_from_other_weights(tmp_path, data, monkeypatch, bias):
    """Weights without a bias start at SigLIP's scale and bias; others keep theirs, also when they are resumed."""
    monkeypatch.chdir(tmp_path)
    register_models()
    options = {} if bias is None else {"init_logit_bias": bias}
    torch.manual_seed(5)
    pretrained = open_clip.create_model("vl-tiny", init_logit_scale=math.log(100), **options)
    torch.save(pretrained.state_dict(), tmp_path / "pretrained.pt")
    flags = [*TINY, *data, *SIGLIP, "--pretrained", "pretrained.pt"]
    flags += ["--lr", "1e-30", "--epochs", "2", "--train-num-samples", "4"]
    assert main(flags) == 0
    assert main([*flags, "--name", "resumed", "--resume", "logs/run/checkpoints/epoch_1.pt"]) == 0
    expected = (-10.0, math.log(10)) if bias is None else (bias, math.log(100))
    for name in ("run", "resumed"):
        weights = read_checkpoint(tmp_path, 2, name)["state_dict"]
        found = weights["logit_bias"].item(), weights["logit_scale"].item()
        assert found == pytest.approx(expected)
        torch.testing.assert_close(weights["text_projection"], pretrained.state_dict()["text_projection"])
    line = "The logit bias of the model starts at -10, and its scale at 10"
    assert (line in log_of(tmp_path)) is (bias is None)
    model, *_ = load_model(tmp_path / "logs/run/checkpoints/epoch_2.pt")
    assert model.logit_bias.item() == expected[0]
