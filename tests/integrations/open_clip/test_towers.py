import open_clip.transformer
import pytest
import timm.layers
import torch

from tests.helpers.open_clip_towers import IMAGE_TOWERS, LENGTHS, TEXT_TOWERS, images_for, make_model, texts_for
from vl_plugins.integrations.open_clip.towers import image_features, text_features

# The module whose output is local features, what of it, and their grid.
LAST_BLOCKS = {
    "vit": ("transformer.resblocks.1", lambda output: output[:, 1:], (4, 4)),
    "vit with attentional pooling": ("transformer.resblocks.1", lambda output: output[:, 1:], (4, 4)),
    "vit, mean of patches": ("transformer.resblocks.1", lambda output: output[:, 1:], (4, 4)),
    "resnet": ("layer4", lambda output: output.flatten(2).mT, (2, 2)),
    "timm vit": ("trunk.blocks.5", lambda output: output[:, 1:], (10, 10)),
    "timm convnext": ("trunk.stages.3", lambda output: output.flatten(2).mT, (5, 5)),
    "timm resnet": ("trunk.layer4", lambda output: output.flatten(2).mT, (5, 5)),
}


def output_of(module, run):
    """What a module returns while something runs."""
    caught = []
    handle = module.register_forward_hook(lambda module, inputs, output: caught.append(output))
    run()
    handle.remove()
    (output,) = caught
    return output


@pytest.mark.parametrize("tower", IMAGE_TOWERS)
def test_image_features_are_those_of_the_last_block_and_of_encode_image(tmp_path, tower):
    model = make_model(tmp_path, image=tower)
    images = images_for(model)
    name, places, grid = LAST_BLOCKS[tower]
    features = image_features(model, images)
    block = output_of(model.visual.get_submodule(name), lambda: model.encode_image(images))
    torch.testing.assert_close(features.local, places(block))
    torch.testing.assert_close(features.pooled, model.encode_image(images))
    assert features.grid == grid
    assert features.local.shape[1] == grid[0] * grid[1]
    assert features.padding_mask is None
    assert features.has_positions == ("vit" in tower)


@pytest.mark.parametrize("tower", TEXT_TOWERS)
def test_text_features_are_those_of_the_last_block_and_of_encode_text(tmp_path, tower):
    model = make_model(tmp_path, text=tower)
    texts = texts_for(tower)
    features = text_features(model, texts)
    if tower.startswith("bert"):
        block = output_of(model.text.transformer, lambda: model.encode_text(texts)).last_hidden_state
    else:
        transformer = getattr(model, "text", model).transformer
        block = output_of(transformer.resblocks[-1], lambda: model.encode_text(texts))
    torch.testing.assert_close(features.local, block)
    torch.testing.assert_close(features.pooled, model.encode_text(texts))
    assert (~features.padding_mask).sum(dim=1).tolist() == LENGTHS
    assert not features.padding_mask[:, 0].any()
    assert (features.padding_mask.diff(dim=1) >= 0).all(), "nothing before the end is padding"
    assert features.grid is None
    assert features.has_positions


@pytest.mark.parametrize("tower", ["vit", "timm vit"])
def test_dropped_patches_leave_no_grid(tmp_path, tower):
    model = make_model(tmp_path, image=tower)
    if tower == "vit":
        model.visual.patch_dropout = open_clip.transformer.PatchDropout(0.5)
    else:
        model.visual.trunk.patch_drop = timm.layers.PatchDropout(0.5)
    images = images_for(model.eval())
    assert image_features(model, images).grid is not None
    features = image_features(model.train(), images)
    height, width = LAST_BLOCKS[tower][2]
    assert features.local.shape[1] == height * width // 2
    assert features.grid is None
