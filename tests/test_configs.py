"""Every file under configs/ is read by what it is for."""

import json
from pathlib import Path

import open_clip
import PIL.Image
import pytest
import torch

from vl_plugins.integrations.open_clip.loss import build_loss
from vl_plugins.integrations.open_clip.models import check_model, register_models
from vl_plugins.integrations.open_clip.options import parse_arguments

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("open_clip/*.yaml")), ids=lambda path: path.stem)
def test_open_clip_configurations(path, monkeypatch):
    options, host_options, _ = parse_arguments(["--config", str(path)])
    check_model(host_options.model)
    if options.loss is not None:
        build_loss(options)
    if host_options.pretrained:
        assert host_options.pretrained in open_clip.list_pretrained_tags_by_model(host_options.model)
    monkeypatch.chdir("/")
    assert parse_arguments(["--config", path.name])[:2] == (options, host_options), "found by its name from anywhere"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("models/*.json")), ids=lambda path: path.stem)
def test_models(path):
    register_models()
    assert open_clip.get_model_config(path.stem) == json.loads(path.read_text())
    model, _, transform = open_clip.create_model_and_transforms(path.stem, output_dict=True)
    tokens = open_clip.get_tokenizer(path.stem)(["a red circle left of a blue star"])
    size = model.visual.image_size
    with torch.no_grad():
        output = model(torch.zeros(1, 3, *size), tokens)
    assert (
        output["image_features"].shape
        == output["text_features"].shape
        == (1, json.loads(path.read_text())["embed_dim"])
    )
    assert transform(PIL.Image.new("RGB", (90, 70))).shape[1:] == size


def test_every_file_is_covered():
    files = {path for path in CONFIGS.rglob("*") if path.suffix in (".yaml", ".json")}
    assert files == {*CONFIGS.glob("open_clip/*.yaml"), *CONFIGS.glob("models/*.json")}
    assert len(files) >= 3
