import pickle

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from torch import nn

from tests.encoders.trunks import assert_keeps_the_promises_of_trunks
from vl_plugins.encoders import TimmTrunk
from vl_plugins.errors import UserError

SWIN = {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "window_size": 2, "drop_path_rate": 0.0}
# Name -> options, grid, and whether the features are tokens.
MODELS = {
    "test_resnet": ({}, (2, 2), False),
    "test_mambaout": ({}, (2, 2), False),
    "test_vit": ({}, (4, 4), True),
    "test_vit3": ({}, (4, 4), True),
    "swin_tiny_patch4_window7_224": (SWIN, (2, 2), False),
}
EACH_MODEL = pytest.mark.parametrize("name", MODELS)


def make(name="test_vit", **options):
    torch.manual_seed(0)
    return TimmTrunk(name, **{"image_size": 64, **MODELS[name][0], **options}).eval()


@EACH_MODEL
def test_features_are_those_of_the_host(name):
    _, grid, is_transformer = MODELS[name]
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
    assert_keeps_the_promises_of_trunks(trunk, trunk.example_inputs(3))


@pytest.mark.parametrize(("name", "grid"), [("test_resnet", (2, 3)), ("test_mambaout", (2, 3)), ("test_vit", (4, 6))])
def test_grid_of_pictures_that_are_not_square(name, grid):
    trunk = make(name, image_size=(64, 96))
    assert trunk.example_inputs(1).shape == (1, 3, 64, 96)
    assert trunk(trunk.example_inputs(1)).grid == grid


def test_dropped_patches_leave_no_grid():
    trunk = make(patch_drop_rate=0.5).train()
    features = trunk(trunk.example_inputs(2))
    assert (features.local.shape[1], features.grid) == (8, None)


def test_options_reach_the_model():
    trunk = TimmTrunk(model="test_vit", image_size=64, init_values=0.1)
    assert isinstance(trunk.model.blocks[0].ls1, timm.models.vision_transformer.LayerScale)


def files_of(folder, state):
    torch.save({"state_dict": state}, folder / "weights.pth")
    safetensors.torch.save_file(state, folder / "weights.safetensors")
    return folder / "weights.pth", folder / "weights.safetensors"


@pytest.mark.parametrize(("name", "num_classes"), [("test_resnet", 0), ("test_resnet", 7), ("test_vit", 1000)])
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
    if name == "test_vit":
        assert make(weights=file).model.pos_embed.shape == (1, 17, 64), "not adapted to the image size"


def test_weights_that_do_not_fit(tmp_path):
    state = timm.create_model("test_resnet", num_classes=7).state_dict()
    kernel = state.pop("layer2.0.conv1.weight")
    for extra, problem in (
        ({"layer2.0.conv7.weight": kernel}, r'Missing .*"layer2.0.conv1.weight".*Unexpected .*"layer2.0.conv7.weight"'),
        ({"layer2.0.conv1.weight": kernel[:1]}, "size mismatch for layer2.0.conv1.weight"),
    ):
        file, _ = files_of(tmp_path, state | extra)
        with pytest.raises(UserError, match=rf"^timm model 'test_resnet' with the weights {file} .*{problem}"):
            TimmTrunk("test_resnet", weights=file)


def test_weights_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"no such file: .*/weights\.pth$"):
        TimmTrunk("test_resnet", weights=tmp_path / "weights.pth")
    torch.save({"layer": nn.Linear(1, 1)}, tmp_path / "weights.pth")
    with pytest.raises(UserError, match=r"cannot be read from .*/weights\.pth: .*weights_only"):
        TimmTrunk("test_resnet", weights=tmp_path / "weights.pth")


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("resnet1522", {}, r"^unknown timm model 'resnet1522' \(did you mean 'resnet152'\?\)"),
        ("resnet18.tv_in1", {}, r"^timm model 'resnet18.tv_in1' cannot be created: Invalid pretrained tag \(tv_in1\)"),
        ("test_vit", {"dropout": 1}, r"^timm model 'test_vit' cannot be created: .*unexpected keyword .* 'dropout'$"),
        ("test_vit", {"img_size": 64, "image_size": 64}, "multiple values for keyword argument 'img_size'"),
        ("test_vit", {"crop_area": [0.9, 0.5]}, "crop_area must be two numbers in"),
        ("test_vit", {"horizontal_flip": 2}, r"horizontal_flip must be in \[0, 1\], got 2"),
        ("test_vit", {"checkpoint_path": "w.pth"}, "checkpoint_path is not supported: name a file of weights with"),
    ],
)
def test_wrong_options(name, options, problem):
    with pytest.raises(ValueError, match=problem):
        TimmTrunk(name, **options)


class ClassToken(nn.Module):
    """Tokens (B, 1 + N, 3), of which the first is no patch, as the pooling tells."""

    global_pool = "token"

    def forward_features(self, images):
        return images.flatten(2).mT

    def forward_head(self, features, pre_logits):
        return features[:, 0]


def test_class_tokens_and_models_without_local_features():
    trunk, images = make("test_resnet"), torch.rand(2, 3, 8, 8)
    trunk.model = ClassToken()
    features = trunk(images)
    assert torch.equal(features.local, images.flatten(2)[:, :, 1:].mT)
    assert (features.grid, features.has_positions) == (None, True)
    with pytest.raises(UserError, match=r"^timm model ClassToken gives features of the shape \(2, 1, 3\); local"):
        trunk(images[:, :, :1, :1])


def test_image_transforms():
    trunk = make("test_resnet", image_size=(32, 48))
    picture = Image.new("RGB", (100, 80), (255, 128, 0))
    train, evaluate = (pickle.loads(pickle.dumps(trunk.image_transform(is_train))) for is_train in (True, False))
    mean, std = (torch.tensor(trunk.model.pretrained_cfg[name])[:, None, None] for name in ("mean", "std"))
    expected = ((torch.tensor([1, 128 / 255, 0])[:, None, None] - mean) / std).expand(3, 32, 48)
    torch.testing.assert_close(train(picture), expected)
    torch.testing.assert_close(evaluate(picture), expected)
    assert train.transforms[0].scale == (0.5, 1.0)


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
