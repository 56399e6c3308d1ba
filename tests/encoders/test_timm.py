import pickle

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from torch import nn

from tests.encoders.trunks import assert_keeps_the_promises_of_trunks
from vl_plugins.encoders import TimmTrunk

SWIN = {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "window_size": 2, "drop_path_rate": 0.0}
# Name -> options, grid, and whether the features are tokens.
MODELS = {
    "test_resnet": ({}, (2, 2), False),
    "test_mambaout": ({}, (2, 2), False),
    "test_vit": ({}, (4, 4), True),
    "test_vit3": ({}, (4, 4), True),
    "swin_tiny_patch4_window7_224": (SWIN, (2, 2), False),
}


def make(name="test_vit", **options):
    torch.manual_seed(0)
    return TimmTrunk(name, **{"image_size": 64, **MODELS[name][0], **options}).eval()


@pytest.mark.parametrize("name", MODELS)
def test_features_are_those_of_the_host(name):
    _, (height, width), is_transformer = MODELS[name]
    trunk, images = make(name), torch.randn(3, 3, 64, 64)
    features, output = trunk(images), trunk.model.forward_features(images)
    assert (features.grid, features.has_positions, features.padding_mask) == ((height, width), is_transformer, None)
    torch.testing.assert_close(features.pooled, trunk.model(images))
    assert features.local.shape[1] == height * width
    if is_transformer:
        expected = output[:, trunk.model.num_prefix_tokens :]
    else:
        expected = (output.permute(0, 2, 3, 1) if name == "test_resnet" else output).flatten(1, 2)
    assert torch.equal(features.local, expected)
    assert_keeps_the_promises_of_trunks(trunk, images)


def test_grids():
    assert make("test_vit", image_size=(64, 96))(torch.zeros(1, 3, 64, 96)).grid == (4, 6)
    features = make("test_vit", patch_drop_rate=0.5).train()(torch.zeros(2, 3, 64, 64))
    assert (features.grid, features.local.shape[1]) == (None, 8)


@pytest.mark.parametrize(("name", "num_classes"), [("test_resnet", 0), ("test_resnet", 7), ("test_vit", 1000)])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_weights_of_a_file(tmp_path, name, num_classes, suffix):
    torch.manual_seed(1)
    source, file = timm.create_model(name, num_classes=num_classes), tmp_path / f"weights.{suffix}"
    state = source.state_dict()
    torch.save({"state_dict": state}, file) if suffix == "pth" else safetensors.torch.save_file(state, file)
    trunk = TimmTrunk(name, weights=file)
    found = trunk.model.state_dict()
    assert found.keys() == state.keys() - {"fc.weight", "fc.bias", "head.weight", "head.bias"}
    assert all(torch.equal(value, state[key]) for key, value in found.items())
    assert (trunk.model.num_classes, trunk.pooled_width) == (0, source.num_features)


def test_weights_that_do_not_fit_or_hold_code(tmp_path):
    state, file = timm.create_model("test_resnet", num_classes=7).state_dict(), tmp_path / "weights.pth"
    kernel = state.pop("layer2.0.conv1.weight")
    torch.save(state | {"layer2.0.conv7.weight": kernel}, file)
    with pytest.raises(ValueError, match=r"weights\.pth does not have the weights layer2\.0\.conv1\.weight$"):
        TimmTrunk("test_resnet", weights=file)
    torch.save({"layer": nn.Linear(1, 1)}, file)
    with pytest.raises((RuntimeError, pickle.UnpicklingError), match="weights_only"):
        TimmTrunk("test_resnet", weights=file)
    with pytest.raises(ValueError, match="checkpoint_path is not supported"):
        TimmTrunk("test_vit", checkpoint_path=file)
    with pytest.raises(ValueError, match="local-dir is not supported"):
        TimmTrunk(f"local-dir:{tmp_path}", pretrained=True)


def test_class_tokens_that_a_model_does_not_count():
    trunk = TimmTrunk("coat_lite_tiny").eval()
    images = torch.randn(1, 3, 224, 224)
    assert torch.equal(trunk(images).local, trunk.model.forward_features(images)[:, 1:])


def test_image_transforms():
    """Normalized; gentle ones neither mirror nor crop, so left stays left."""
    trunk = make("test_resnet", image_size=(32, 48))
    mean, std = (torch.tensor(trunk.model.pretrained_cfg[name])[:, None, None] for name in ("mean", "std"))
    expected = ((torch.tensor([1, 128 / 255, 0])[:, None, None] - mean) / std).expand(3, 32, 48)
    for is_train in (True, False):
        transform = pickle.loads(pickle.dumps(trunk.image_transform(is_train)))
        torch.testing.assert_close(transform(Image.new("RGB", (100, 80), (255, 128, 0))), expected)
    assert trunk.image_transform(True).transforms[0].scale == (0.5, 1.0)
    picture = Image.new("RGB", (64, 64))
    picture.paste((255, 255, 255), (0, 0, 2, 64))
    gentle = make("test_resnet", image_size=32, crop_area=[1, 1], horizontal_flip=0, crop_pct=1.0)
    for is_train in [True] * 5 + [False]:
        bright = gentle.image_transform(is_train)(picture)[0].mean(dim=0) > 0
        assert bright.nonzero().flatten().tolist() == [0]
    cropped = make("test_resnet", image_size=32, crop_pct=0.5).image_transform(False)(picture)
    assert torch.equal(cropped, cropped[:, :1, :1].expand_as(cropped))
