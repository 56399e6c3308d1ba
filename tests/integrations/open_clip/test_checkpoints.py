import copy
import pickle

import open_clip
import pytest
import torch
from PIL import Image

from vl_plugins.distances import MatchProbability, SmoothChamferSimilarity
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip import load_model
from vl_plugins.integrations.open_clip.checkpoints import add_heads
from vl_plugins.integrations.open_clip.models import register_models

SMALL = {"num_slots": 2, "num_iters": 2, "hidden_dim": 16}


def make(head="set", head_kwargs=SMALL, similarity=None, **created_with):
    """Return a model as the launcher makes it, with open_clip's own transform."""
    register_models()
    torch.manual_seed(3)
    clip, _, preprocess = open_clip.create_model_and_transforms("vl-tiny", output_dict=True, **created_with)
    if head == "set" and similarity is None:
        similarity = SmoothChamferSimilarity(alpha=9.0)
    return add_heads(clip, "vl-tiny", created_with, head, head_kwargs, similarity).eval(), preprocess


def save(path, model, prefix=""):
    """As open_clip's trainer does; of a run of several processes every name begins with "module."."""
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save({"epoch": 1, "name": "run", "state_dict": state, "optimizer": {}}, path)
    return path


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize(
    ("head", "head_kwargs", "created_with"),
    [
        ("set", SMALL, {}),
        ("set", {**SMALL, "slots": "random", "update": "gru"}, {"force_quick_gelu": True, "force_context_length": 20}),
        ("linear", {"dim": 24}, {"force_custom_text": True, "force_image_size": 32}),
        ("linear", {"dim": 24}, {"init_logit_bias": -10, "image_mean": (0.1, 0.2, 0.3), "image_std": (0.4, 0.5, 0.6)}),
        (
            "set",
            SMALL,
            {"image_interpolation": "bilinear", "image_resize_mode": "squash", "force_image_size": (32, 48)},
        ),
    ],
)
def test_what_is_loaded_gives_what_was_saved(tmp_path, caplog, head, head_kwargs, created_with, prefix):
    """The file is all there is: model, head, options, transform and tokenizer."""
    model, preprocess = make(head, head_kwargs, **created_with)
    path = save(tmp_path / "epoch_1.pt", model, prefix)
    torch.load(path, weights_only=True)
    caplog.clear()
    loaded, loaded_preprocess, tokenizer = load_model(path)
    assert not caplog.records, "open_clip's warning that weights are random would frighten"
    assert not loaded.training
    picture = Image.effect_noise((70, 50), 90).convert("RGB")
    images = preprocess(picture)[None]
    assert torch.equal(loaded_preprocess(picture)[None], images)
    texts = tokenizer(["a red ball!", "two green squares"])
    assert texts.shape[1] == created_with.get("force_context_length", 32)
    for normalize in (False, True):
        assert torch.equal(loaded.encode_image(images, normalize), model.encode_image(images, normalize))
        assert torch.equal(loaded.encode_text(texts, normalize), model.encode_text(texts, normalize))
    assert loaded(images, texts).keys() == model(images, texts).keys()
    if head == "set":
        assert loaded.similarity.alpha == 9.0
    again = load_model(save(tmp_path / "again.pt", loaded))[0]
    assert torch.equal(again.encode_text(texts), model.encode_text(texts))


def test_the_parameters_of_a_similarity_are_saved(tmp_path):
    similarity = MatchProbability()
    model, _ = make(similarity=similarity)
    with torch.no_grad():
        for number, parameter in enumerate(similarity.parameters()):
            parameter.fill_(2.5 + number)
    loaded = load_model(save(tmp_path / "epoch_1.pt", model))[0]
    found = [parameter.item() for parameter in loaded.similarity.parameters()]
    assert found == [2.5, 3.5]
    fixed = MatchProbability(scale=3.0, shift=-1.0, learnable=False)
    model, _ = make(similarity=fixed)
    loaded = load_model(save(tmp_path / "fixed.pt", model))[0].similarity
    assert not list(loaded.parameters())
    sets = torch.nn.functional.normalize(torch.randn(3, 2, 5), dim=-1)
    torch.testing.assert_close(loaded(sets), fixed(sets))


def test_a_model_without_heads(tmp_path):
    register_models()
    model = open_clip.create_model("vl-tiny").eval()
    path = save(tmp_path / "epoch_1.pt", model, "module.")
    loaded, _, tokenizer = load_model(path, "vl-tiny")
    texts = tokenizer(["a red ball"])
    assert torch.equal(loaded.encode_text(texts), model.encode_text(texts))
    bare = tmp_path / "weights.pt"
    torch.save(model.state_dict(), bare)
    assert torch.equal(load_model(bare, "vl-tiny")[0].encode_text(texts), model.encode_text(texts))


def test_wrong_input(tmp_path):
    model, _ = make()
    path = save(tmp_path / "epoch_1.pt", model)
    plain = save(tmp_path / "plain.pt", model.clip)
    cut = copy.deepcopy(model)
    cut.text_head.prediction.norm_output = torch.nn.Identity()
    damaged = save(tmp_path / "damaged.pt", cut)
    half = tmp_path / "half.pt"
    half.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for arguments, message in (
        ((path, "ViT-B-32"), r"epoch_1\.pt is of model vl-tiny, not ViT-B-32$"),
        ((plain,), r"plain\.pt does not say which model it is of: name the model$"),
        ((tmp_path / "no.pt",), r"no\.pt: no such file$"),
        ((tmp_path / "no.pt", "vl-tiny"), r"no\.pt: no such file, nor a pretrained tag of vl-tiny$"),
        ((plain, "ViT-S-32-alt"), r"plain\.pt does not fit model ViT-S-32-alt: "),
        ((half,), r"half\.pt: it is cut off or damaged \("),
        ((half, "vl-tiny"), r"half\.pt: it is cut off or damaged \("),
        ((damaged,), r"damaged\.pt does not fit model vl-tiny: Error\(s\) in loading"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            load_model(*arguments)
        assert "\n" not in str(raised.value)


class Harmful:
    def __reduce__(self):
        return print, ("this must not run",)


def test_a_harmful_file_runs_nothing(tmp_path, capsys):
    path = tmp_path / "epoch_1.pt"
    torch.save({"state_dict": {"_extra_state": Harmful()}}, path)
    with pytest.raises(UserError, match=r"epoch_1\.pt"):
        load_model(path, "vl-tiny")
    path.write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(UserError, match=r"epoch_1\.pt"):
        load_model(path, "vl-tiny")
    assert "must not run" not in capsys.readouterr().out
