import copy
import pickle
import sys

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from torch import nn

from tests.encoders.trunks import assert_keeps_the_promises_of_trunks
from vl_plugins.data.randomness import seed_everything
from vl_plugins.encoders import TimmTrunk
from vl_plugins.registry import construct
from vl_plugins.utils.errors import MissingExtraError, UserError

SWIN = {
    "image_size": 64,
    "embed_dim": 16,
    "depths": (1, 1, 1, 1),
    "num_heads": (1, 1, 2, 2),
    "window_size": 2,
    "drop_path_rate": 0.0,
}
RELATIVE = {"embed_dim": 64, "depth": 2, "num_heads": 2}
# Name -> options, grid, whether the features are of a transformer, and whether pooled is the mean of the places.
MODELS = {
    "test_resnet": ({}, (2, 2), False, True),
    "test_convnext": ({}, (2, 2), False, False),
    "test_efficientnet": ({}, (2, 2), False, True),
    "test_mambaout": ({}, (2, 2), False, False),
    "test_nfnet": ({}, (2, 2), False, True),
    "test_vit": ({}, (4, 4), True, False),
    "test_vit3": ({}, (4, 4), True, False),
    "vit_relpos_small_patch16_224": (RELATIVE, (4, 4), True, False),
    "swin_tiny_patch4_window7_224": (SWIN, (2, 2), False, True),
}
EACH_MODEL = pytest.mark.parametrize("name", MODELS)


def make(name="test_vit", **options):
    torch.manual_seed(0)
    return TimmTrunk(name, **{"image_size": 64, **MODELS[name][0], **options}).eval()


@EACH_MODEL
def test_promises(name):
    assert_keeps_the_promises_of_trunks(make(name))


@EACH_MODEL
def test_features_are_those_of_the_host(name):
    _, grid, is_transformer, pools_by_mean = MODELS[name]
    trunk = make(name)
    images = trunk.example_inputs(2)
    features = trunk(images)
    assert (features.grid, features.has_positions, features.padding_mask) == (grid, is_transformer, None)
    torch.testing.assert_close(features.pooled, trunk.model(images))

    output = trunk.model.forward_features(images)
    height, width = grid
    assert features.local.shape[1] == height * width
    for place in range(height * width):
        if is_transformer:
            at_place = output[:, trunk.model.num_prefix_tokens + place]
        elif name in ("test_mambaout", "swin_tiny_patch4_window7_224"):
            at_place = output[:, place // width, place % width]
        else:
            at_place = output[:, :, place // width, place % width]
        assert torch.equal(features.local[:, place], at_place)
    if pools_by_mean:
        torch.testing.assert_close(features.local.mean(dim=1), features.pooled)


@pytest.mark.parametrize(("name", "grid"), [("test_resnet", (2, 3)), ("test_mambaout", (2, 3)), ("test_vit", (4, 6))])
def test_grid_of_pictures_that_are_not_square(name, grid):
    trunk = make(name, image_size=(64, 96))
    assert trunk.example_inputs(1).shape == (1, 3, 64, 96)
    assert trunk(trunk.example_inputs(1)).grid == grid


def test_image_size_is_that_of_the_weights_by_default():
    assert TimmTrunk("test_resnet").image_size == (160, 160)
    assert TimmTrunk("test_vit", image_size=None).image_size == (160, 160)


def test_dropped_patches_leave_no_grid():
    trunk = make(patch_drop_rate=0.5)
    images = trunk.example_inputs(2)
    assert trunk(images).grid == (4, 4)
    features = trunk.train()(images)
    assert features.local.shape[1] == 8
    assert features.grid is None


def test_attention_pooling_gets_a_gradient_where_it_is_used():
    trunk = make("test_vit3")
    trunk(trunk.example_inputs(2)).local.square().sum().backward()
    missing = {name.partition(".")[0] for name, parameter in trunk.model.named_parameters() if parameter.grad is None}
    assert missing == {"attn_pool"}


def test_options_reach_the_model():
    assert isinstance(make("test_resnet", drop_path_rate=0.5).model.layer4[-1].drop_path, timm.layers.DropPath)
    trunk = construct("trunk", "timm", TimmTrunk, {"model": "test_vit", "image_size": 64, "init_values": 0.1})
    assert isinstance(trunk.model.blocks[0].ls1, timm.models.vision_transformer.LayerScale)


def files_of(folder, state):
    torch.save({"state_dict": state}, folder / "weights.pth")
    safetensors.torch.save_file(state, folder / "weights.safetensors")
    return folder / "weights.pth", folder / "weights.safetensors"


@pytest.mark.parametrize("num_classes", [0, 7, 1000])
@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_weights_of_a_file(tmp_path, name, num_classes):
    torch.manual_seed(1)
    source = timm.create_model(name, num_classes=num_classes)
    for file in files_of(tmp_path, source.state_dict()):
        trunk = TimmTrunk(name, weights=file)
        state = source.state_dict()
        assert trunk.model.num_classes == 0
        assert trunk.model.state_dict().keys() == state.keys() - {"fc.weight", "fc.bias", "head.weight", "head.bias"}
        assert all(torch.equal(value, state[key]) for key, value in trunk.model.state_dict().items())
        assert trunk.pooled_width == source.num_features
        assert "state_dict" not in trunk.model.pretrained_cfg


def test_position_embeddings_are_adapted_to_the_image_size(tmp_path):
    file, _ = files_of(tmp_path, timm.create_model("test_vit").state_dict())
    assert make(weights=file).model.pos_embed.shape == (1, 17, 64)


@pytest.mark.parametrize("num_classes", [0, 7, 1000])
def test_weights_that_do_not_fit(tmp_path, num_classes):
    state = timm.create_model("test_resnet", num_classes=num_classes).state_dict()
    kernel = state.pop("layer2.0.conv1.weight")
    for extra, problem in (
        ({"layer2.0.conv7.weight": kernel}, r'Missing .*"layer2.0.conv1.weight".*Unexpected .*"layer2.0.conv7.weight"'),
        ({"layer2.0.conv1.weight": kernel[:1]}, "size mismatch for layer2.0.conv1.weight"),
    ):
        for file in files_of(tmp_path, state | extra):
            with pytest.raises(UserError, match=rf"^timm model 'test_resnet' with the weights {file} .*{problem}"):
                TimmTrunk("test_resnet", weights=file)


def test_weights_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"no such file: .*/weights\.pth$"):
        TimmTrunk("test_resnet", weights=tmp_path / "weights.pth")
    torch.save({"layer": nn.Linear(1, 1)}, tmp_path / "weights.pth")
    with pytest.raises(UserError, match=r"cannot be read from .*/weights\.pth: .*weights_only"):
        TimmTrunk("test_resnet", weights=tmp_path / "weights.pth")
    (tmp_path / "weights.safetensors").write_bytes(b"1")
    with pytest.raises(UserError, match=r"cannot be read from .*/weights\.safetensors: "):
        TimmTrunk("test_resnet", weights=tmp_path / "weights.safetensors")


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("resnet1522", {}, r"^unknown timm model 'resnet1522' \(did you mean 'resnet152'\?\)"),
        ("resnet18.tv_in1", {}, r"^unknown weights of timm model 'resnet18' 'tv_in1' \(did you mean 'tv_in1k'\?\)"),
        (
            "test_vit",
            {"dropout": 1},
            r"^timm model 'test_vit' cannot be made: .*unexpected keyword argument 'dropout'$",
        ),
        ("test_vit", {"num_classes": 10}, r"^timm model 'test_vit' cannot be made: .*num_classes"),
    ],
)
def test_wrong_options(name, options, problem):
    with pytest.raises(UserError, match=problem):
        TimmTrunk(name, **options)


def test_weights_that_the_hub_does_not_give(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^timm model 'test_vit' cannot be made: .*connection"):
        TimmTrunk("test_vit", pretrained=True)


class Lists(nn.Module):
    def forward_features(self, images):
        return [images]

    def forward_head(self, features, pre_logits):
        return features[0].mean(dim=(2, 3))


class Pooled(Lists):
    def forward_features(self, images):
        return images.mean(dim=(2, 3))

    def forward_head(self, features, pre_logits):
        return features


class ClassToken(Lists):
    """Tokens (B, 1 + N, 3), of which the first is no patch, as the pooling tells."""

    global_pool = "token"
    patches = 0

    def forward_features(self, images):
        return images.flatten(2)[:, :, : 1 + self.patches].mT

    def forward_head(self, features, pre_logits):
        return features[:, 0]


@pytest.mark.parametrize(
    ("model", "found"),
    [(Lists, "in a list"), (Pooled, r"of the shape \(2, 3\)"), (ClassToken, r"of the shape \(2, 1, 3\)")],
)
def test_models_without_local_features(model, found):
    trunk = make("test_resnet")
    trunk.model = model()
    with pytest.raises(UserError, match=f"^timm model {model.__name__} gives features {found}; local features are"):
        trunk(torch.rand(2, 3, 8, 8))


def test_a_class_token_of_models_that_do_not_say_how_many():
    trunk, images = make("test_resnet"), torch.rand(2, 3, 8, 8)
    trunk.model = ClassToken()
    trunk.model.patches = 4
    features = trunk(images)
    assert torch.equal(features.local, images.flatten(2)[:, :, 1:5].mT)
    assert (features.grid, features.has_positions) == (None, True)


def test_image_transforms():
    trunk = make("test_resnet", image_size=(32, 48))
    picture = Image.new("RGB", (100, 80), (255, 128, 0))
    train, evaluate = (pickle.loads(pickle.dumps(trunk.image_transform(is_train))) for is_train in (True, False))
    mean, std = (torch.tensor(trunk.model.pretrained_cfg[name])[:, None, None] for name in ("mean", "std"))
    expected = ((torch.tensor([1, 128 / 255, 0])[:, None, None] - mean) / std).expand(3, 32, 48)
    torch.testing.assert_close(train(picture), expected)
    torch.testing.assert_close(evaluate(picture), expected)
    assert torch.equal(evaluate(picture), evaluate(picture))

    # A picture whose red is the column and green the row, so that a crop shows where it is of.
    columns, rows = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="xy")
    pixels = torch.stack([columns, rows, torch.zeros_like(rows)], dim=2).to(torch.uint8)
    seed_everything(0)  # timm draws from `random`, too
    areas, mirrored = [], 0
    for _ in range(40):
        red, green, blue = train(Image.fromarray(pixels.numpy())) * std + mean
        assert blue.abs().max() < 1e-6
        ranges = [float(channel.max() - channel.min()) * 255 / 200 for channel in (red, green)]
        areas.append(ranges[0] * ranges[1])
        mirrored += bool(red[0, 0] > red[0, -1])
    assert 0.4 < min(areas) < 0.6
    assert max(areas) > 0.85
    assert 10 < mirrored < 30


def test_image_transforms_can_be_gentle():
    """Without mirroring, and with nearly all of the picture: then left stays left, and nothing is cut off."""
    trunk = make("test_resnet", image_size=32, crop_area=[1, 1], horizontal_flip=0, crop_pct=1.0)
    pixels = torch.zeros(64, 64, 3, dtype=torch.uint8)
    pixels[:, :2] = 255
    picture = Image.fromarray(pixels.numpy())
    transforms = [trunk.image_transform(is_train) for is_train in (True, False)]
    for _ in range(5):
        for transform in transforms:
            bright = transform(picture)[0].mean(dim=0) > 0
            assert bright.nonzero().flatten().tolist() == [0]
    cropped = make("test_resnet", image_size=32, crop_pct=0.5).image_transform(False)(picture)
    assert torch.equal(cropped, cropped[:, :1, :1].expand_as(cropped))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_area": [0.9, 0.5]}, "crop_area must be two numbers in"),
        ({"crop_area": [0, 1]}, "crop_area must be two numbers in"),
        ({"horizontal_flip": 2}, r"horizontal_flip must be in \[0, 1\], got 2"),
        ({"crop_pct": -1}, "crop_pct must be in"),
        (
            {"checkpoint_path": "w.pth"},
            "checkpoint_path is not supported: name a file of weights with the option weights",
        ),
        ({"pretrained_cfg": {"file": "w.pth"}}, "pretrained_cfg is not supported: "),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        make("test_resnet", **options)


def test_copies_and_pickles():
    trunk = make("test_resnet")
    images = trunk.example_inputs(1)
    for other in (copy.deepcopy(trunk), pickle.loads(pickle.dumps(trunk))):
        assert torch.equal(other(images).pooled, trunk(images).pooled)


def test_without_timm_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'vl_plugins\[timm\]'$"):
        TimmTrunk("test_vit")
