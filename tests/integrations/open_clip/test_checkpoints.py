import copy
import json
import pickle
import re

import numpy as np
import open_clip
import pytest
import torch
from open_clip import factory
from PIL import Image
from safetensors.torch import save_file

from vl_plugins.distances import MatchProbability, SmoothChamferSimilarity
from vl_plugins.errors import UserError
from vl_plugins.integrations.checkpoints import load_model
from vl_plugins.integrations.open_clip.heads import CLIPWithHeads
from vl_plugins.integrations.open_clip.models import add_model_config, register_models
from vl_plugins.integrations.pytorch_metric_learning.checkpoints import FORMAT

SMALL = {"num_slots": 2, "num_iters": 2, "hidden_dim": 16}
PICTURE = Image.effect_noise((70, 50), 90).convert("RGB")


def make(head="set", head_kwargs=SMALL, similarity=None, **created_with):
    """Return a model as the launcher makes it, with open_clip's own transform."""
    register_models()
    torch.manual_seed(3)
    clip, _, preprocess = open_clip.create_model_and_transforms("vl-tiny", output_dict=True, **created_with)
    if head == "set" and similarity is None:
        similarity = SmoothChamferSimilarity(alpha=9.0)
    return CLIPWithHeads(clip, "vl-tiny", created_with, head, head_kwargs, similarity).eval(), preprocess


def make_plain(seed, name="vl-tiny", **options):
    register_models()
    torch.manual_seed(seed)
    return open_clip.create_model(name, pretrained_text=False, **options).eval()


def save(path, model, prefix="", /, **params):
    """As open_clip's trainer does, with the run's ``params.txt``; with several processes names begin with "module."."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if params:
        lines = (f"{name}: {value}\n" for name, value in params.items())
        (path.parent.parent / "params.txt").write_text("".join(lines))
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save({"epoch": 1, "name": "run", "state_dict": state, "optimizer": {}}, path)
    return path


def has_weights_of(model, expected):
    state = model.state_dict()
    return all(torch.equal(state[name], tensor.to(state[name].dtype)) for name, tensor in expected.state_dict().items())


@pytest.mark.parametrize(
    ("prefix", "head", "head_kwargs", "created_with"),
    [
        ("module.", "set", SMALL, {"force_quick_gelu": True}),
        (
            "",
            "linear",
            {"dim": 24},
            {
                "force_custom_text": True,
                "force_image_size": 32,
                "force_context_length": 20,
                "init_logit_bias": -10,
                "image_mean": (0.1, 0.2, 0.3),
                "image_std": (0.4,) * 3,
            },
        ),
        (
            "module.",
            "set",
            SMALL,
            {"image_interpolation": "bilinear", "image_resize_mode": "squash", "force_image_size": (32, 48)},
        ),
    ],
)
def test_a_model_with_heads_needs_nothing_but_its_file(tmp_path, caplog, prefix, head, head_kwargs, created_with):
    """The file has model, head, options, transform and tokenizer."""
    model, preprocess = make(head, head_kwargs, **created_with)
    path = save(tmp_path / "epoch_1.pt", model, prefix)
    torch.load(path, weights_only=True)
    caplog.clear()
    loaded, loaded_preprocess, tokenizer = load_model(path)
    assert not caplog.records, "open_clip's warning that weights are random is wrong here"
    assert not loaded.training
    images = preprocess(PICTURE)[None]
    assert torch.equal(loaded_preprocess(PICTURE)[None], images)
    texts = tokenizer(["a red ball!", "two green squares"])
    assert texts.shape[1] == created_with.get("force_context_length", 32)
    for normalize in (False, True):
        assert torch.equal(loaded.encode_image(images, normalize), model.encode_image(images, normalize))
        assert torch.equal(loaded.encode_text(texts, normalize), model.encode_text(texts, normalize))
    assert loaded(images, texts).keys() == model(images, texts).keys()
    assert loaded.get_extra_state() == model.get_extra_state()


def test_parameters_of_a_similarity(tmp_path):
    model, _ = make(similarity=MatchProbability())
    with torch.no_grad():
        for number, parameter in enumerate(model.similarity.parameters()):
            parameter.fill_(2.5 + number)
    loaded = load_model(save(tmp_path / "epoch_1.pt", model))[0]
    assert [parameter.item() for parameter in loaded.similarity.parameters()] == [2.5, 3.5]
    fixed = MatchProbability(scale=3.0, shift=-1.0, learnable=False)
    loaded = load_model(save(tmp_path / "fixed.pt", make(similarity=fixed)[0]))[0].similarity
    assert not list(loaded.parameters())
    sets = torch.nn.functional.normalize(torch.randn(3, 2, 5), dim=-1)
    torch.testing.assert_close(loaded(sets), fixed(sets))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_files_of_weights(tmp_path, precision):
    model = make_plain(0)
    save(tmp_path / "epoch_1.pt", model, "module.")
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    for file in ("epoch_1.pt", "bare.pt", "old.pt", "weights.safetensors"):
        loaded = load_model(tmp_path / file, "vl-tiny", precision=precision)[0]
        assert has_weights_of(loaded, model)
        assert (loaded.visual.conv1.weight.dtype == torch.bfloat16) == (precision == "bf16")


def test_files_that_do_not_fit(tmp_path):
    model, _ = make()
    path = save(tmp_path / "epoch_1.pt", model)
    plain = save(tmp_path / "plain.pt", model.clip)
    cut = copy.deepcopy(model)
    cut.text_head.prediction.norm_output = torch.nn.Identity()
    cut = save(tmp_path / "cut.pt", cut)
    half = tmp_path / "half.pt"
    half.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    smaller = save(tmp_path / "smaller.pt", make_plain(0, force_image_size=32))
    np.savez(tmp_path / "other.npz", weight=np.ones(2))
    for arguments, message in (
        ((path, "ViT-B-32"), r"epoch_1\.pt is of model vl-tiny, not ViT-B-32$"),
        ((plain,), r"plain\.pt does not specify its model: name the model$"),
        ((tmp_path / "no.pt",), r"no\.pt: no such file$"),
        ((tmp_path / "no.pt", "vl-tiny"), r"no\.pt: no such file, nor a pretrained tag of vl-tiny$"),
        ((plain, "ViT-S-32-alt"), r"plain\.pt does not fit model ViT-S-32-alt: "),
        ((half, "vl-tiny"), r"half\.pt: it is cut off or damaged \("),
        ((cut,), r"cut\.pt does not fit model vl-tiny: Error\(s\) in loading"),
        ((tmp_path / "other.npz", "vl-tiny"), r"other\.npz does not fit model vl-tiny: "),
        # open_clip interpolates position embeddings of another image size, which makes another model.
        ((smaller, "vl-tiny"), r"visual.positional_embedding is \(17, 96\) in the file and \(65, 96\) in the"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            load_model(*arguments)
        assert "\n" not in str(raised.value)


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


def test_a_checkpoint_of_a_model_with_weights_of_its_own(tmp_path):
    """open_clip ignores ``pretrained`` for such models."""
    own, trained = make_plain(0), make_plain(1)
    name = local_model(tmp_path / "hub", own)
    path = save(tmp_path / "epoch_1.pt", trained)
    assert has_weights_of(load_model(path, name)[0], trained)
    assert has_weights_of(load_model(name)[0], own)
    (tmp_path / "hub" / "open_clip_pytorch_model.bin").unlink()
    assert has_weights_of(load_model(path, name)[0], trained)
    with pytest.raises(UserError, match=r"^checkpoint local-dir:.* cannot be loaded: Required pretrained weights"):
        load_model(name)


def test_a_checkpoint_does_not_choose_files_or_models_of_the_hub(tmp_path, capsys):
    torch.save(Harmful(), tmp_path / "harmful.pt")
    model, _ = make("linear", {"dim": 24})
    harmful = {"pretrained": True, "pretrained_image_path": str(tmp_path / "harmful.pt"), "weights_only": False}
    model.description |= {**harmful, "model": (name := local_model(tmp_path / "hub", model.clip))}
    in_file = save(tmp_path / "epoch_1.pt", model)
    in_params = save(tmp_path / "run" / "checkpoints" / "epoch_1.pt", model.clip, model=name)
    for path, expected in ((in_file, model), (in_params, model.clip)):
        with pytest.raises(UserError, match=rf"epoch_1\.pt is of model {name}: name that model if you trust it$"):
            load_model(path)
        loaded = load_model(path, name)[0]
        assert has_weights_of(getattr(loaded, "clip", loaded), getattr(expected, "clip", expected))
    asking = local_model(tmp_path / "asking", model.clip, tokenizer_kwargs={"trust_remote_code": True})
    with pytest.raises(UserError, match=rf"^{asking}: trust_remote_code is not supported: "):
        load_model(asking)
    assert "must not run" not in capsys.readouterr().out


def test_params_of_a_run_specify_how_its_model_was_built(tmp_path):
    built = {"force_quick_gelu": True, "force_image_size": 32, "image_mean": (0.1, 0.2, 0.3), "init_logit_bias": -10}
    torch.manual_seed(0)
    model, _, preprocess = open_clip.create_model_and_transforms("vl-tiny", **built)
    params = {**built, "model": "vl-tiny", "siglip": True, "image_std": None, "pretrained": ""}
    path = save(tmp_path / "run" / "checkpoints" / "epoch_1.pt", model, force_custom_text=False, **params)
    for name in (None, "vl-tiny"):
        loaded, loaded_preprocess, tokenizer = load_model(path, name)
        images, texts = preprocess(PICTURE)[None], tokenizer(["a red ball!"])
        assert torch.equal(loaded_preprocess(PICTURE)[None], images)
        assert torch.equal(loaded.encode_image(images), model.eval().encode_image(images))
        assert torch.equal(loaded.encode_text(texts), model.encode_text(texts))
    with pytest.raises(UserError, match=r"epoch_1\.pt is of model vl-tiny, not RN50$"):
        load_model(path, "RN50")


def test_the_transform_is_that_of_the_weights_the_run_began_with(tmp_path, monkeypatch):
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "vl-tiny", {"tag": {"mean": (0.5,) * 3, "std": (0.25,) * 3}})
    path = save(tmp_path / "checkpoints" / "1.pt", make_plain(0), model="vl-tiny", pretrained="tag", image_mean=None)
    normalize = load_model(path)[1].transforms[-1]
    assert (normalize.mean, normalize.std) == ((0.5,) * 3, (0.25,) * 3)


def test_a_model_configuration_of_the_user(tmp_path, request):
    config = open_clip.get_model_config("vl-tiny") | {"embed_dim": 40}
    name = f"model-of-{request.node.name}"
    file = tmp_path / "configs" / f"{name}.json"
    file.parent.mkdir()
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"unknown model '{name}'"):
        load_model(save(tmp_path / "other.pt", make_plain(0)), name)
    add_model_config(file)
    model = make_plain(0, name)
    factory._MODEL_CONFIGS.pop(name)  # as in another process
    path = save(tmp_path / "run" / "checkpoints" / "epoch_1.pt", model, model=name, model_config=file.parent)
    assert has_weights_of(load_model(path)[0], model)
    factory._MODEL_CONFIGS.pop(name)
    file.rename(tmp_path / f"{name}.json")
    with pytest.raises(UserError, match=r"^--model-config .*configs: the folder has no \.json files$"):
        load_model(path)
    assert has_weights_of(load_model(path, model_config=tmp_path / f"{name}.json")[0], model)


CODE = '{"embed_dim": 8, "vision_cfg": {}, "text_cfg": {"tokenizer_kwargs": {"trust_remote_code": true}}}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.json", "[]", r"model\.json: expected a model configuration with embed_dim, text_cfg, vision_cfg$"),
        ("model.yaml", "", r"model\.yaml: expected a \.json file or a folder of them$"),
        ("model.json", CODE, r"model\.json: trust_remote_code is not supported: "),
    ],
)
def test_wrong_model_configurations(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        add_model_config(tmp_path / name)


def test_a_damaged_description_of_a_head(tmp_path):
    model, _ = make()
    whole = model.get_extra_state()
    for damage in ({"model": 3}, {"force_image_size": "large"}, {"similarity_kwargs": 3}, {"head": "set2"}, 3):
        damaged = {**whole, **damage} if isinstance(damage, dict) else damage
        torch.save({"state_dict": {**model.state_dict(), "_extra_state": damaged}}, tmp_path / "epoch_1.pt")
        with pytest.raises(UserError) as raised:
            load_model(tmp_path / "epoch_1.pt")
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (torch.ones(2), "holds a Tensor, expected weights by name"),
        ({"state_dict": 3}, "holds a int, expected weights by name"),
        ({}, "holds no weights"),
        (pickle.dumps(Harmful(), protocol=2), "it holds more than tensors and text, and such files can run code"),
        ({"format": FORMAT}, "is not of version 1: None"),
        ({"format": FORMAT, "version": 1, "config": 3}, "its description is damaged "),
    ],
)
def test_files_that_are_no_checkpoints(tmp_path, capsys, content, problem):
    path = tmp_path / "epoch_1.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(UserError) as raised:
        load_model(path, "vl-tiny")
    assert re.fullmatch(rf"checkpoint {path}:? {re.escape(problem)}.*", str(raised.value))
    assert "weights_only" not in str(raised.value)
    assert "must not run" not in capsys.readouterr().out


def test_safetensors_that_hold_no_weights(tmp_path):
    save_file({}, tmp_path / "empty.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"12")
    for file, message in (("empty", r"empty\.safetensors holds no weights$"), ("cut", r"cut\.safetensors: ")):
        with pytest.raises(UserError, match=message):
            load_model(tmp_path / f"{file}.safetensors", "vl-tiny")
