"""The launcher with heads."""

import re

import pytest
import torch

from tests.helpers.open_clip_training import TINY, read_checkpoint, read_results, small_shard_flags
from vl_plugins.integrations.loading import load_model
from vl_plugins.integrations.open_clip.launcher import main

SMALL = ["--head-kwargs", "num_slots=3", "num_iters=2", "hidden_dim=32"]
SETS = ["--loss", "smooth_chamfer", "--head", "set", *SMALL]


@pytest.fixture(scope="module")
def data(toy_shards):
    return small_shard_flags(toy_shards)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Folder and flags of a training with sets."""
    folder = tmp_path_factory.mktemp("sets")
    flags = [*TINY, *data, *SETS, "--captions-per-image", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(flags) == 0
    return folder, flags


def test_sets_are_trained_and_validated(trained):
    folder, _ = trained
    log = (folder / "logs/run/out.log").read_text()
    assert len(re.findall(r"Smooth_chamfer_loss: 0\.\d+", log)) == 4
    row = read_results(folder)[1]
    assert 0 < row["image_circular_variance"] < 1
    assert 0 < row["caption_circular_variance"] < 1


@pytest.mark.parametrize("flags", [[], ["--siglip"]], ids=["clip", "siglip"])
def test_a_linear_head_under_the_losses_of_open_clip(tmp_path, data, flags, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, *data[:2], "--head", "linear", "--head-kwargs", "dim=24", *flags]) == 0
    log = (tmp_path / "logs/run/out.log").read_text()
    losses = [float(loss) for loss in re.findall(r"Contrastive_loss: (\S+)", log)]
    assert len(losses) == 4
    assert all(0 < loss < 20 for loss in losses)
    model, _, tokenizer = load_model(tmp_path / "logs/run/checkpoints/epoch_1.pt")
    assert model.encode_text(tokenizer(["a red circle"]), normalize=True).shape == (1, 24)
    assert (model.logit_bias is not None) == bool(flags)


def test_training_starts_from_heads_of_a_file(trained, data, tmp_path, monkeypatch):
    """Also those that version 0.2 wrote, whose weights have other names."""
    folder, flags = trained
    monkeypatch.chdir(tmp_path)
    content = read_checkpoint(folder)
    names = {name: name if "head" in name else f"clip.{name}" for name in content["state_dict"]}
    former = {names[name]: weight for name, weight in content["state_dict"].items()}
    torch.save(content | {"state_dict": former | {"_extra_state": content.pop("args")}}, "former.pt")
    for number, file in enumerate((folder / "logs/run/checkpoints/epoch_1.pt", "former.pt")):
        assert main([*flags, "--name", str(number), "--pretrained", str(file), "--lr", "0", "--wd", "0"]) == 0
        state = read_checkpoint(tmp_path, name=str(number))["state_dict"]
        assert state.keys() == content["state_dict"].keys()
        assert all(torch.equal(state[name], weight) for name, weight in content["state_dict"].items())
    assert main([*flags, "--name", "resumed", "--resume", "former.pt", "--epochs", "2"]) == 0
    assert [*read_results(tmp_path, "resumed")] == [2]
