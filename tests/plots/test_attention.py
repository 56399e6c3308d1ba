import io

import open_clip
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from tests.helpers.archives import encode_archive, encode_picture
from vl_plugins.data import read_collection
from vl_plugins.integrations.open_clip.heads import add_heads
from vl_plugins.integrations.open_clip.models import register_models
from vl_plugins.plots import attention as attention_plot
from vl_plugins.plots.attention import AttendedImage, attended_images, plot_attention
from vl_plugins.plots.figures import COLORS


def test_a_row_for_each_picture_and_a_panel_for_each_slot(tmp_path, monkeypatch):
    figures, items = [], []
    monkeypatch.setattr(attention_plot, "write_figure", lambda figure, out: figures.append(figure))
    for _ in range(3):  # nine pixels for each place, whose middle one has its attention
        attention = torch.randn(2, 2, 3).softmax(dim=0)
        items.append(AttendedImage(torch.rand(6, 9, 3), attention, ["a $1 dog", "a cat"], [True, False]))
    plot_attention(items, tmp_path / "attention.png")
    (figure,) = figures
    panels, largest = [axes for axes in figure.axes if axes.images], max(item.attention.max().item() for item in items)
    assert [axes.get_title() for axes in panels[:3]] == ["image", "slot 1", "slot 2"]
    for item, (picture, *slots) in zip(items, (panels[:3], panels[3:6], panels[6:9]), strict=True):
        assert torch.equal(torch.as_tensor(picture.images[0].get_array()), item.image)
        for axes, attention in zip(slots, item.attention, strict=True):
            gray, shown = axes.images
            assert gray.get_array().shape == shown.get_array().shape == (6, 9)
            assert gray.get_extent() == shown.get_extent()
            assert shown.get_clim() == (0, largest)
            torch.testing.assert_close(torch.as_tensor(shown.get_array())[1::3, 1::3], attention)
            assert 0.2 <= gray.get_array().min() < gray.get_array().max() <= 0.9, "dimmed"
        texts = [(axes.get_xlabel(), axes.xaxis.label.get_color()) for axes in slots]
        assert texts == [("✓ a $1 dog", COLORS[0]), ("✗ a cat", COLORS[1])]
        assert not any(axes.xaxis.label.get_parse_math() for axes in slots)  # a price is no formula
    legend = [(text.get_text(), text.get_color()) for text in figure.texts]
    assert legend == [("✓ caption of this image", COLORS[0]), ("✗ caption of another image", COLORS[1])]


@pytest.fixture(scope="module")
def loaded():
    """A small model with a set head, its transform of images and its tokenizer."""
    register_models()
    torch.manual_seed(0)
    clip = open_clip.create_model("vl-tiny", output_dict=True)
    model = add_heads(clip, "set", {"num_slots": 3, "num_iters": 2, "hidden_dim": 32})
    preprocess = image_transform_v2(PreprocessCfg(size=64), is_train=False)
    return model.eval(), preprocess, open_clip.get_tokenizer("vl-tiny")


@pytest.fixture
def collection(toy_shards):
    return read_collection(sorted(map(str, toy_shards.glob("toy-test-*.tar"))))


@torch.no_grad()
def test_pictures_attention_and_captions_are_the_models(loaded, collection, monkeypatch):
    model, preprocess, tokenizer = loaded
    monkeypatch.setattr(attention_plot, "CAPTIONS_PER_BATCH", 7)
    items = attended_images(*loaded, collection, images=9)
    files = collection.pictures(range(9))
    images = torch.stack([preprocess(Image.open(io.BytesIO(files[index]))) for index in range(9)])
    output, normalization = model.predict_image_sets(images), preprocess.transforms[-1]
    mean, std = (torch.tensor(values) for values in (normalization.mean, normalization.std))
    for index, item in enumerate(items):
        torch.testing.assert_close(item.image, images[index].permute(1, 2, 0) * std + mean, atol=1e-5, rtol=0)
        torch.testing.assert_close(item.attention.flatten(1).T, output.attention[index, -1])
    sets = [model.encode_text(tokenizer([caption]), normalize=True)[0] for caption in collection.captions]
    for index, item in enumerate(items):
        for slot, element in enumerate(model.encode_image(images[index][None], normalize=True)[0]):
            nearest = torch.stack([(other @ element).max() for other in sets]).argmax()
            found = item.captions[slot], item.matches[slot]
            assert found == (collection.captions[nearest], collection.image_of_caption[nearest] == index)


def test_a_caption_of_two_images_matches_both(loaded, tmp_path):
    """The nearest caption is the first image's."""
    members = []
    for key, caption in (("a", "A dog."), ("b", "a  DOG.")):
        members += [(f"{key}.png", encode_picture((64, 64), mode="RGB")), (f"{key}.json", {"captions": [caption]})]
    (tmp_path / "both.tar").write_bytes(encode_archive(members))
    items = attended_images(*loaded, read_collection(tmp_path / "both.tar"))
    assert [item[2:] for item in items] == [(["A dog."] * 3, [True] * 3)] * 2
