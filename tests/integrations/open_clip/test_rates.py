"""Learning rates by tower and depth: against open_clip 4.x, timm, names of parameters, and steps of SGD."""

import json
import os
import re
import sys
from argparse import Namespace
from pathlib import Path

import open_clip
import pytest
import timm.optim
import torch
from open_clip_train import scheduler

from tests.helpers.open_clip_towers import make_model
from tests.helpers.open_clip_training import TINY, read_checkpoint, run, small_shard_flags
from vl_plugins.integrations.open_clip.host import HAS_TASKS
from vl_plugins.integrations.open_clip.launcher import main
from vl_plugins.integrations.open_clip.models import register_models
from vl_plugins.integrations.open_clip.rates import layer_groups, parameter_rates

ROOT = Path(__file__).parents[3]
IMAGE_DECAY, TEXT_DECAY = 0.65, 0.8
SMALL = [
    ("vit", "clip"),
    ("vit with attentional pooling", "eos"),
    ("vit, mean of patches", "siglip"),
    ("resnet", "mobileclip, no causal mask"),
    ("timm vit", "bert, mean"),
    ("timm convnext", "bert, first token"),
    ("timm resnet", "clip"),
]
NAMED = ["vl-tiny", "vl-tiny-resnet", "ViT-B-32", "ViT-L-14", "RN50", "ViT-B-16-SigLIP"]


def models(folder):
    """Yield thirteen models by name; the large ones have no weights."""
    register_models()
    for image, text in SMALL:
        yield f"{image}; {text}", make_model(folder, image=image, text=text)
    for name in NAMED:
        with torch.device("meta"):
            yield name, open_clip.create_model(name, device="meta")


def our_scales(model):
    args = Namespace(lr=1.0, head_lr=None, image_lr=None, text_lr=None)
    args.image_layer_decay, args.text_layer_decay = IMAGE_DECAY, TEXT_DECAY
    rates = parameter_rates(model, args)
    return {name: rates[p].scale if p in rates else 1.0 for name, p in model.named_parameters() if p.requires_grad}


def host_scales(model):
    from open_clip_train.optim import layer_decay_param_groups

    groups = layer_decay_param_groups(model, 0.1, text_layer_decay=TEXT_DECAY, image_layer_decay=IMAGE_DECAY)
    scales = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    return {name: scales[id(p)] for name, p in model.named_parameters() if p.requires_grad}


def write_scales(file):
    """Write the scales of all models, by the version of open_clip that this process finds."""
    scales_of = host_scales if HAS_TASKS else our_scales
    file = Path(file)
    file.write_text(json.dumps({name: scales_of(model) for name, model in models(file.parent)}))


def test_scales_are_those_of_4(tmp_path):
    sources = os.environ.get("VL_PLUGINS_OPEN_CLIP_4")
    if sources is None:
        pytest.skip("VL_PLUGINS_OPEN_CLIP_4 does not name the folder src of a checkout of open_clip's main branch")
    scales = []
    for version, paths in (("3", [ROOT]), ("4", [ROOT, sources])):
        file = tmp_path / f"{version}.json"
        code = f"from {__name__} import write_scales; write_scales({str(file)!r})"
        finished = run([sys.executable, "-c", code], tmp_path, PYTHONPATH=os.pathsep.join(map(str, paths)))
        assert finished.returncode == 0
        scales.append(json.loads(file.read_text()))
    ours, host = scales
    assert len(host) == len(SMALL) + len(NAMED)
    for name, expected in host.items():
        assert ours[name] == expected, name
        assert len(set(expected.values())) >= 6, name


def scale_of_name(name, blocks):
    """Return the scale of a parameter of CLIP with as many blocks in each tower, read off its name."""
    if name in ("logit_scale", "visual.proj", "text_projection"):
        return 1.0
    decay = IMAGE_DECAY if name.startswith("visual.") else TEXT_DECAY
    block = re.search(r"resblocks\.(\d+)\.", name)
    if block:
        return decay ** (blocks - int(block[1]))
    is_last_norm = "ln_post" in name or "ln_final" in name
    return decay if is_last_norm else decay ** (blocks + 1)


@pytest.mark.skipif(HAS_TASKS, reason="4.x has the decays itself")
def test_scales_of_clip_and_of_timm(tmp_path):
    """Where there is no 4.x to ask: the number of a block, and timm's own decay."""
    model = make_model(tmp_path)
    for name, scale in our_scales(model).items():
        assert scale == scale_of_name(name, 2), name
    trunk = make_model(tmp_path, image="timm vit").visual.trunk
    groups = timm.optim.param_groups_layer_decay(trunk, layer_decay=0.5, no_opt_scale=None)
    expected = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    tower = make_model(tmp_path, image="timm vit").visual
    expected_depths = {}
    for (name, parameter), other in zip(trunk.named_parameters(), tower.trunk.parameters(), strict=True):
        expected_depths[id(other)] = name, expected[id(parameter)]
    *layers, _ = layer_groups(tower)
    for depth, layer in enumerate(reversed(layers)):
        for parameter in layer:
            name, scale = expected_depths.pop(id(parameter))
            assert scale == 0.5**depth, name
    assert not expected_depths


@pytest.fixture(scope="module")
def data(toy_shards):
    return [*small_shard_flags(toy_shards)[:2], "--captions-per-image", "random", "--loss", "unified"]


def test_steps_of_sgd(tmp_path, data, monkeypatch):
    """Each parameter moves by its scale times its move at one rate, and the log has the rate of the rest."""
    monkeypatch.chdir(tmp_path)
    flags = [*TINY, *data, "--opt", "timm/sgd", "--wd", "0", "--train-num-samples", "4", "--head", "linear"]
    rates = "--image-lr 0.02 --text-lr 0.03 --head-lr 0.005".split()
    rates += ["--image-layer-decay", str(IMAGE_DECAY), "--text-layer-decay", str(TEXT_DECAY)]
    weights = {}
    for name, more in (("start", ["--lr", "1e-30"]), ("one", ["--lr", "0.01"]), ("rates", ["--lr", "0.01", *rates])):
        assert main([*flags, *more, "--name", name]) == 0
        weights[name] = read_checkpoint(tmp_path, name=name)["state_dict"]
    names = [name for name, _ in open_clip.create_model("vl-tiny").named_parameters()]
    blocks = {"visual.": 4, "": 3}
    moved = 0
    for name in [*names, "image_head.weight", "text_head.bias"]:
        if "_head." in name:
            scale = 0.5
        elif name == "logit_scale":
            scale = 1.0
        else:
            is_image = name.startswith("visual.")
            scale = (2.0 if is_image else 3.0) * scale_of_name(name, blocks["visual." if is_image else ""])
        plain = weights["one"][name] - weights["start"][name]
        scaled = weights["rates"][name] - weights["start"][name]
        torch.testing.assert_close(scaled, scale * plain, rtol=1e-3, atol=3e-7, msg=name)
        moved += plain.abs().max() > 1e-5
    assert moved > 50
    log = (tmp_path / "logs/rates/out.log").read_text()
    assert re.findall(r"LR: (\S+)", log) == ["0.010000"]


def test_the_schedule_is_that_of_4():
    """3.x gives every group one rate."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr_scale": 0.5}], lr=1.0)
    with pytest.MonkeyPatch.context() as patches:
        from vl_plugins.integrations.open_clip.host import optimizer_replacements

        for replacement in optimizer_replacements(lambda optimizer: None):
            patches.setattr(*replacement)
        scheduler.cosine_lr(optimizer, 1.0, 4, 10)(1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
