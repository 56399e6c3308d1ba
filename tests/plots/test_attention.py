import io
import json
import tarfile

import open_clip
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from vl_plugins.data import read_collection
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.heads import add_heads
from vl_plugins.integrations.open_clip.models import register_models
from vl_plugins.plots import attention as attention_plot
from vl_plugins.plots.attention import AttendedImage, attended_images, plot_attention
from vl_plugins.plots.figures import COLORS


def attended():
    captions, matches = [f"a $1 dog {slot}" for slot in range(4)], [slot % 2 == 0 for slot in range(4)]
    return AttendedImage(torch.rand(60, 90, 3), torch.randn(4, 4, 6).softmax(dim=0), captions, matches)


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Function that returns the figure of some items, and the axes of each row, without that of the color bar."""

    def figure_of(items):
        figures, number = [], len(items[0].captions) + 1
        monkeypatch.setattr(attention_plot, "write_figure", lambda figure, out: figures.append(figure))
        plot_attention(items, tmp_path / "attention.png")
        panels = [axes for axes in figures[0].axes if axes.images]
        assert len(panels) == number * len(items)
        return figures[0], [panels[start : start + number] for start in range(0, len(panels), number)]

    return figure_of


def test_a_row_for_each_picture_and_a_panel_for_each_slot(draw):
    items = [attended() for _ in range(3)]
    figure, rows = draw(items)
    assert [axes.get_title() for axes in rows[0]] == ["image", "slot 1", "slot 2", "slot 3", "slot 4"]
    largest = max(item.attention.max().item() for item in items)
    for item, (picture, *panels) in zip(items, rows, strict=True):
        assert torch.equal(torch.as_tensor(picture.images[0].get_array()), item.image)
        assert {axes.images[1].get_clim() for axes in panels} == {(0, largest)}
        texts = [" ".join(axes.get_xlabel().split()) for axes in panels]
        assert texts == ["✓ a $1 dog 0", "✗ a $1 dog 1", "✓ a $1 dog 2", "✗ a $1 dog 3"]
        assert [axes.xaxis.label.get_color() for axes in panels] == [COLORS[0], COLORS[1]] * 2
        assert not any(axes.xaxis.label.get_parse_math() for axes in panels)  # a price is no formula
    legend = [(text.get_text(), text.get_color()) for text in figure.texts]
    assert legend == [("✓ caption of this image", COLORS[0]), ("✗ caption of another image", COLORS[1])]


def test_attention_lies_where_it_belongs(draw):
    # Three pixels for each place, so that the middle one is on it.
    attention = torch.tensor([[[0.1, 0.8, 0.3], [0.6, 0.2, 0.9]]])
    attention = torch.cat([attention, 1 - attention])
    _, (row,) = draw([AttendedImage(torch.rand(6, 9, 3), attention, ["a", "b"], [True, True])])
    for slot, axes in enumerate(row[1:]):
        gray, shown = axes.images
        assert gray.get_array().shape == shown.get_array().shape == (6, 9)
        assert gray.get_extent() == shown.get_extent()
        torch.testing.assert_close(torch.as_tensor(shown.get_array())[1::3, 1::3], attention[slot])
        assert 0.2 <= gray.get_array().min() < gray.get_array().max() <= 0.9, "dimmed"


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
    with tarfile.open(tmp_path / "both.tar", "w") as shard:
        for key, caption in (("a", "A dog."), ("b", "a  DOG.")):
            picture = io.BytesIO()
            Image.new("RGB", (64, 64), (40, 200, 7)).save(picture, "PNG")
            metadata = json.dumps({"captions": [caption]}).encode()
            for extension, content in (("png", picture.getvalue()), ("json", metadata)):
                header = tarfile.TarInfo(f"{key}.{extension}")
                header.size = len(content)
                shard.addfile(header, io.BytesIO(content))
    items = attended_images(*loaded, read_collection(tmp_path / "both.tar"))
    assert [item[2:] for item in items] == [(["A dog."] * 3, [True] * 3)] * 2


def test_a_model_without_slots_is_an_error(loaded, collection):
    _, *others = loaded
    with pytest.raises(UserError, match=r"^the model has no set head, so no slots to draw$"):
        attended_images(open_clip.create_model("vl-tiny"), *others, collection)
