import copy

import pytest
import torch

from tests.helpers.open_clip_towers import EMBED_DIM, IMAGE_TOWERS, TEXT_TOWERS, images_for, make_model, texts_for
from vl_plugins.distances import MatchProbability, SmoothChamferSimilarity
from vl_plugins.integrations.open_clip.heads import add_heads
from vl_plugins.integrations.open_clip.towers import image_features, text_features
from vl_plugins.modules import sinusoidal_positions_2d

SMALL = {"num_slots": 3, "num_iters": 2, "hidden_dim": 12}
TOWERS = [*((image, "clip") for image in IMAGE_TOWERS), *(("vit", text) for text in TEXT_TOWERS if text != "clip")]


def with_heads(clip, head="set", similarity=None, **options):
    torch.manual_seed(2)
    if head == "set":
        options = {**SMALL, **options}
        similarity = similarity or SmoothChamferSimilarity()
    return add_heads(copy.deepcopy(clip), head, options, similarity).eval()


@pytest.mark.parametrize(("image", "text"), TOWERS)
def test_sets_of_any_towers(tmp_path, image, text):
    """Against the prediction module called by hand on the towers' features."""
    clip = make_model(tmp_path, image, text)
    model = with_heads(clip)
    images, texts = images_for(clip), texts_for(text)
    features = image_features(clip, images)
    positions = None if "vit" in image else sinusoidal_positions_2d(*features.grid, features.local.shape[-1])
    expected_images = model.image_head.prediction(features.local, features.pooled, positions=positions)
    torch.testing.assert_close(model.encode_image(images), expected_images.embeddings)

    features = text_features(clip, texts)
    expected_texts = model.text_head.prediction(features.local, features.pooled, padding_mask=features.padding_mask)
    torch.testing.assert_close(model.encode_text(texts), expected_texts.embeddings)

    output = model(images, texts)
    assert list(output) == ["image_features", "image_slots", "text_features", "text_slots", "logit_scale"]
    for kind, expected, count in (("image", expected_images, 3), ("text", expected_texts, 2)):
        assert output[f"{kind}_features"].shape == (count, 3, EMBED_DIM)
        normalized = expected.embeddings / expected.embeddings.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(output[f"{kind}_features"], normalized)
        torch.testing.assert_close(output[f"{kind}_slots"], expected.slots)
    torch.testing.assert_close(model.encode_image(images, normalize=True), output["image_features"])
    torch.testing.assert_close(model.encode_text(texts, normalize=True), output["text_features"])
    torch.testing.assert_close(output["logit_scale"], clip.logit_scale.exp())


@pytest.mark.parametrize("dim", [24, 7])
def test_a_linear_head_keeps_cosines_at_first(tmp_path, dim):
    clip = make_model(tmp_path)
    model = with_heads(clip, "linear", dim=dim)
    images, texts = images_for(clip), texts_for()
    embeddings = model.encode_image(images, normalize=True), model.encode_text(texts, normalize=True)
    assert [tensor.shape for tensor in embeddings] == [(3, dim), (2, dim)]
    torch.testing.assert_close(embeddings[0].norm(dim=1), torch.ones(3))
    weight = model.image_head.weight
    torch.testing.assert_close(model.encode_image(images), clip.encode_image(images) @ weight.mT)
    assert torch.equal(weight, model.text_head.weight)
    assert weight is not model.text_head.weight
    cosines = clip.encode_image(images, normalize=True) @ clip.encode_text(texts, normalize=True).mT
    assert torch.allclose(embeddings[0] @ embeddings[1].mT, cosines, atol=1e-5) == (dim >= EMBED_DIM)
    output = model(images, texts)
    assert list(output) == ["image_features", "text_features", "logit_scale"]
    torch.testing.assert_close(output["image_features"], embeddings[0])


@pytest.mark.parametrize(("image", "text"), TOWERS)
def test_every_parameter_has_a_gradient(tmp_path, image, text):
    """One without fails the second step of DistributedDataParallel."""
    clip = make_model(tmp_path, image, text, init_logit_bias=-10)
    without = {name for name, parameter in clip.named_parameters() if not parameter.requires_grad}
    backward(clip, clip(images_for(clip), texts_for(text)))
    without |= {name for name, parameter in clip.named_parameters() if parameter.grad is None}
    model = with_heads(make_model(tmp_path, image, text, init_logit_bias=-10), similarity=MatchProbability())
    output = model.train()(images_for(clip), texts_for(text))
    assert list(output)[-2:] == ["logit_scale", "logit_bias"]
    backward(model, output)
    missing = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert missing == without
    assert len(list(model.parameters())) > 50


def backward(model, output):
    sum((tensor * torch.arange(tensor.numel()).view_as(tensor)).sum() for tensor in output.values()).backward()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("head", ["set", "linear"])
def test_half_precision_towers_under_full_precision_heads(tmp_path, autocast, head):
    clip = make_model(tmp_path)
    images, texts = images_for(clip), texts_for()
    expected = with_heads(clip, head).encode_image(images, normalize=True)
    model = with_heads(clip if autocast else clip.bfloat16(), head)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(images if autocast else images.bfloat16(), texts)
    assert output["image_features"].dtype == torch.float32
    torch.testing.assert_close(output["image_features"], expected, rtol=0, atol=0.1)
    assert all(parameter.dtype == torch.float32 for parameter in model.image_head.parameters())
    backward(model, output)


@pytest.mark.parametrize("text", ["clip", "siglip"])
def test_adding_heads_leaves_the_model_as_it_was(tmp_path, text):
    """Names of weights, too: flags such as ``--wd-exclude`` of open_clip match them."""
    clip = make_model(tmp_path, "resnet", text).train()
    before = copy.deepcopy(clip.state_dict())
    model = add_heads(clip, "set", SMALL)
    assert model.training
    assert isinstance(model, type(make_model(tmp_path, "resnet", text)))
    state = model.state_dict()
    assert {name.split(".")[0] for name in state.keys() - before.keys()} == {"image_head", "text_head"}
    for name, tensor in before.items():
        assert torch.equal(state[name], tensor), name
    copied = copy.deepcopy(model.eval())
    torch.testing.assert_close(copied.encode_text(texts_for(text)), model.encode_text(texts_for(text)))
