"""Checkpoints of the launcher are loaded as the models that they were."""

import copy
import json

import numpy as np
import open_clip
import pytest
import torch
from open_clip import factory
from PIL import Image
from safetensors.torch import save_file

from tests.helpers.open_clip_training import checkpoint_with_heads
from vl_plugins.distances import MatchProbability
from vl_plugins.errors import UserError
from vl_plugins.integrations.loading import load_model
from vl_plugins.integrations.open_clip.models import add_model_config, register_models

SMALL = {"num_slots": 2, "num_iters": 2, "hidden_dim": 16}
PICTURE = Image.effect_noise((70, 50), 90).convert("RGB")
BUILT = {"force_quick_gelu": True, "force_image_size": 32, "image_mean": (0.1, 0.2, 0.3), "image_std": (0.4,) * 3}


def make(seed=0, name="vl-tiny", **options):
    """Return a model in evaluation mode, and open_clip's own transform of images."""
    register_models()
    torch.manual_seed(seed)
    model, _, preprocess = open_clip.create_model_and_transforms(name, output_dict=True, **options)
    return model.eval(), preprocess


def save(path, model, prefix="", /, **params):
    """As open_clip's trainer does, with the run's ``params.txt``; with several processes names begin with "module."."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if params:
        lines = (f"{name}: {params[name]}\n" for name in sorted(params))
        (path.parent.parent / "params.txt").write_text("".join(lines))
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save({"epoch": 1, "name": "run", "state_dict": state, "optimizer": {}}, path)
    return path


def has_weights_of(model, expected):
    state = model.state_dict()
    return all(torch.equal(state[name], tensor.to(state[name].dtype)) for name, tensor in expected.state_dict().items())


def assert_same_model(loaded, model, preprocess):
    model_loaded, preprocess_loaded, tokenizer = loaded
    images, texts = preprocess(PICTURE)[None], tokenizer(["a red ball!", "two green squares"])
    assert not model_loaded.training
    assert torch.equal(preprocess_loaded(PICTURE)[None], images)
    for normalize in (False, True):
        assert torch.equal(model_loaded.encode_image(images, normalize), model.encode_image(images, normalize))
        assert torch.equal(model_loaded.encode_text(texts, normalize), model.encode_text(texts, normalize))
    return texts


@pytest.mark.parametrize(
    ("prefix", "head", "head_kwargs", "options"),
    [
        ("module.", "set", SMALL, {"force_quick_gelu": True}),
        ("", "linear", {"dim": 24}, {**BUILT, "force_custom_text": True, "force_context_length": 20}),
        ("", "set", SMALL, {"image_interpolation": "bilinear", "image_resize_mode": "squash", "force_image_size": 48}),
    ],
)
def test_a_model_with_heads_needs_nothing_but_its_file(tmp_path, caplog, prefix, head, head_kwargs, options):
    clip, preprocess = make(**options, **({"init_logit_bias": -10} if head == "linear" else {}))
    similarity = MatchProbability(2.5, 3.5) if head == "set" else None
    content = checkpoint_with_heads(clip, "vl-tiny", head, head_kwargs, similarity)
    content["args"] |= {**options, "siglip": head == "linear"}
    content["state_dict"] = {f"{prefix}{name}": weight for name, weight in content["state_dict"].items()}
    torch.save(content, tmp_path / "epoch_1.pt")
    caplog.clear()
    loaded = load_model(tmp_path / "epoch_1.pt")
    assert not caplog.records, "open_clip's warning that weights are random is wrong here"
    texts = assert_same_model(loaded, clip.eval(), preprocess)
    assert texts.shape[1] == options.get("force_context_length", 32)
    assert (loaded[0].logit_bias is None) == (head == "set")
    if similarity is not None:
        assert [parameter.item() for parameter in loaded[0].similarity.parameters()] == [2.5, 3.5]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_files_of_weights(tmp_path, precision):
    model, _ = make()
    save(tmp_path / "epoch_1.pt", model, "module.")
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    for file in ("epoch_1.pt", "bare.pt", "old.pt", "weights.safetensors"):
        loaded = load_model(tmp_path / file, "vl-tiny", precision=precision)[0]
        assert has_weights_of(loaded, model)
        assert (loaded.visual.conv1.weight.dtype == torch.bfloat16) == (precision == "bf16")


def test_files_that_do_not_fit(tmp_path):
    plain = save(tmp_path / "plain.pt", make()[0])
    content = checkpoint_with_heads(make()[0], "vl-tiny", "set", SMALL)
    torch.save(content, tmp_path / "sets.pt")
    del content["state_dict"]["text_head.prediction.norm_output.weight"]
    torch.save(content, tmp_path / "cut.pt")
    save(tmp_path / "smaller.pt", make(force_image_size=32)[0])
    save_file({"weight": torch.ones(2)}, tmp_path / "other.safetensors")
    np.savez(tmp_path / "other.npz", weight=np.ones(2))
    for arguments, message in (
        ((tmp_path / "sets.pt", "ViT-B-32"), r"sets\.pt is of model vl-tiny, not ViT-B-32$"),
        ((plain,), r"plain\.pt does not say which model it is of: give --model NAME$"),
        ((plain, "ViT-S-32-alt"), r"plain\.pt does not fit model ViT-S-32-alt: "),
        ((tmp_path / "cut.pt",), r"cut\.pt does not fit .*norm_output"),
        ((tmp_path / "other.safetensors", "vl-tiny"), r"other\.safetensors does not fit"),
        ((tmp_path / "other.npz", "vl-tiny"), r"other\.npz does not fit"),
        # open_clip interpolates position embeddings of another image size, which makes another model.
        ((tmp_path / "smaller.pt", "vl-tiny"), r"size mismatch for visual\.positional_embedding"),
    ):
        with pytest.raises(UserError, match=message):
            load_model(*arguments)


class Harmful:
    def __reduce__(self):
        return print, ("this must not run",)


def local_model(folder, model, **text_cfg):
    """A model folder such as the hub has, with weights of its own."""
    folder.mkdir()
    config = open_clip.get_model_config("vl-tiny")
    config["text_cfg"] |= text_cfg
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    return f"local-dir:{folder}"


def test_a_model_folder_with_weights_of_its_own(tmp_path):
    """open_clip ignores ``pretrained`` for such models."""
    (own, _), (trained, _) = make(0), make(1)
    name = local_model(tmp_path / "hub", own)
    path = save(tmp_path / "epoch_1.pt", trained)
    assert has_weights_of(load_model(path, name)[0], trained)
    assert has_weights_of(load_model(name)[0], own)
    (tmp_path / "hub" / "open_clip_pytorch_model.bin").unlink()
    assert has_weights_of(load_model(path, name)[0], trained)
    with pytest.raises(UserError, match=r"^checkpoint local-dir:.*: Required pretrained weights"):
        load_model(name)


def test_a_checkpoint_does_not_choose_files_or_models(tmp_path, capsys):
    torch.save(Harmful(), tmp_path / "harmful.pt")
    clip, _ = make()
    name = local_model(tmp_path / "hub", clip)
    harmful = {"pretrained": True, "pretrained_image_path": str(tmp_path / "harmful.pt"), "weights_only": False}
    in_params = save(tmp_path / "run" / "checkpoints" / "epoch_1.pt", copy.deepcopy(clip), model=name)
    content = checkpoint_with_heads(clip, name, "linear", {"dim": 24})
    in_file = tmp_path / "epoch_1.pt"
    torch.save(content | {"args": {**harmful, **content["args"], "pretrained": None}}, in_file)
    for path in (in_file, in_params):
        with pytest.raises(UserError, match=rf"epoch_1\.pt is of model {name}: give --model {name} if you trust it$"):
            load_model(path)
        assert has_weights_of(load_model(path, name)[0], clip if path is in_file else make()[0])
    asking = local_model(tmp_path / "asking", make()[0], tokenizer_kwargs={"trust_remote_code": True})
    with pytest.raises(UserError, match=r"trust_remote_code is not supported: "):
        load_model(asking)
    assert "must not run" not in capsys.readouterr().out


def test_params_of_a_run_say_how_its_model_was_built(tmp_path):
    """A second line of the notes says nothing."""
    model, preprocess = make(**BUILT, init_logit_bias=-10)
    params = {**BUILT, "model": "vl-tiny", "siglip": True, "image_interpolation": None, "pretrained": ""}
    notes = "one\nmodel: RN50\nforce_quick_gelu: False\nsiglip: False"
    path = save(tmp_path / "run" / "checkpoints" / "epoch_1.pt", model, wandb_notes=notes, **params)
    for name in (None, "vl-tiny"):
        loaded = load_model(path, name)
        assert_same_model(loaded, model, preprocess)
        assert loaded[0].logit_bias is not None


def test_the_transform_is_that_of_the_weights_the_run_began_with(tmp_path, monkeypatch):
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "vl-tiny", {"tag": {"mean": (0.5,) * 3, "std": (0.25,) * 3}})
    path = save(tmp_path / "run" / "checkpoints" / "1.pt", make()[0], model="vl-tiny", pretrained="tag")
    normalize = load_model(path)[1].transforms[-1]
    assert (normalize.mean, normalize.std) == ((0.5,) * 3, (0.25,) * 3)


def test_a_model_configuration_of_the_run(tmp_path, request):
    name = f"model-of-{request.node.name}"
    file = tmp_path / "configs" / f"{name}.json"
    file.parent.mkdir()
    file.write_text(json.dumps(open_clip.get_model_config("vl-tiny") | {"embed_dim": 40}))
    with pytest.raises(UserError, match=f"unknown model '{name}'"):
        load_model(save(tmp_path / "other.pt", make()[0]), name)
    add_model_config(file)
    model, _ = make(0, name)
    factory._MODEL_CONFIGS.pop(name)  # as in another process
    path = save(tmp_path / "run" / "checkpoints" / "epoch_1.pt", model, model=name, model_config=file.parent)
    assert has_weights_of(load_model(path)[0], model)
    factory._MODEL_CONFIGS.pop(name)
    file.rename(tmp_path / f"{name}.json")
    assert has_weights_of(load_model(path, model_config=tmp_path / f"{name}.json")[0], model)


def test_numbers_of_a_sharded_model(tmp_path):
    """They are saved as (1,)."""
    clip, _ = make(init_logit_bias=-10)
    content = checkpoint_with_heads(clip, "vl-tiny", "set", SMALL, MatchProbability(2.5, 3.5))
    content["args"]["siglip"] = True
    numbers = {name: weight for name, weight in content["state_dict"].items() if weight.ndim == 0}
    assert len(numbers) == 4
    content["state_dict"] |= {name: weight.reshape(1) for name, weight in numbers.items()}
    torch.save(content, tmp_path / "epoch_1.pt")
    state = load_model(tmp_path / "epoch_1.pt")[0].state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in numbers.items())
