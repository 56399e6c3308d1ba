import io
import itertools
import json
import tarfile

import pytest
import torch

from vl_plugins.data import read_collection
from vl_plugins.errors import UserError
from vl_plugins.plots import attention as attention_plot
from vl_plugins.plots.attention import AttendedImage, attended_images, plot_attention
from vl_plugins.plots.figures import COLORS

LONG = "a dog and a cat, worth $5 or $x_1$, that " + "play with Donaudampfschifffahrtsgesellschaftskapitäne and " * 9


def attended(slots=3, size=(60, 90), caption="a dog", seed=0):
    generator = torch.Generator().manual_seed(seed)
    attention = torch.randn(slots, 4, 6, generator=generator).softmax(dim=0)
    image = torch.rand(*size, 3, generator=generator)
    captions = [f"{caption} {slot}" for slot in range(slots)]
    return AttendedImage(image, attention, captions, [slot % 2 == 0 for slot in range(slots)])


@pytest.fixture
def figure(tmp_path, monkeypatch):
    """The figure that ``plot_attention`` draws of some items."""
    pytest.importorskip("matplotlib")

    def draw(items):
        figures = []
        monkeypatch.setattr(attention_plot, "write_figure", lambda figure, out: figures.append(figure))
        plot_attention(items, tmp_path / "attention.png")
        (figure,) = figures
        return figure

    return draw


def rows_of(figure, slots):
    """The axes of each row, without that of the color bar."""
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) % (slots + 1) == 0
    return [panels[start : start + slots + 1] for start in range(0, len(panels), slots + 1)]


def test_a_row_for_each_picture_and_a_panel_for_each_slot(figure):
    items = [attended(slots=4, seed=seed) for seed in range(3)]
    drawn = figure(items)
    rows = rows_of(drawn, slots=4)
    assert [axes.get_title() for axes in rows[0]] == ["image", "slot 1", "slot 2", "slot 3", "slot 4"]
    largest = max(item.attention.max().item() for item in items)
    for item, (picture, *panels) in zip(items, rows, strict=True):
        assert torch.equal(torch.as_tensor(picture.images[0].get_array()), item.image)
        assert {axes.images[1].get_clim() for axes in panels} == {(0, largest)}
        texts = [" ".join(axes.get_xlabel().split()) for axes in panels]
        assert texts == ["✓ a dog 0", "✗ a dog 1", "✓ a dog 2", "✗ a dog 3"]
        assert [axes.xaxis.label.get_color() for axes in panels] == [COLORS[0], COLORS[1]] * 2
    assert [(text.get_text(), text.get_color()) for text in drawn.texts] == [
        ("✓ caption of this image", COLORS[0]),
        ("✗ caption of another image", COLORS[1]),
    ]


def test_attention_lies_where_it_belongs(figure):
    # Three pixels for each place, so that the middle one is on it.
    attention = torch.tensor([[[0.1, 0.8, 0.3], [0.6, 0.2, 0.9]]])
    attention = torch.cat([attention, 1 - attention])
    (row,) = rows_of(figure([AttendedImage(torch.rand(6, 9, 3), attention, ["a", "b"], [True, True])]), slots=2)
    for slot, axes in enumerate(row[1:]):
        gray, shown = axes.images
        assert gray.get_array().shape == shown.get_array().shape == (6, 9)
        assert gray.get_extent() == shown.get_extent()
        torch.testing.assert_close(torch.as_tensor(shown.get_array())[1::3, 1::3], attention[slot])
        assert 0.2 <= gray.get_array().min() < gray.get_array().max() <= 0.9, "dimmed"


@pytest.mark.parametrize(("images", "slots"), [(1, 1), (3, 4)])
def test_everything_fits_and_nothing_overlaps(figure, images, slots):
    """Captions are cut off only when they are too long, and dollar signs are no formulas."""
    sizes, captions = [(60, 90), (150, 50), (50, 50)], [LONG, "a $1 bill", "ein Hund"]
    drawn = figure([attended(slots, sizes[row], captions[row]) for row in range(images)])
    drawn.savefig(io.BytesIO())
    rows = rows_of(drawn, slots)
    assert rows[0][1].get_xlabel().startswith("✓ a dog and a cat, worth\n$5 or $x_1$, that play\n")
    assert rows[0][1].get_xlabel().endswith("…")
    assert not rows[0][1].xaxis.label.get_parse_math()
    texts = [*drawn.texts, *(text for row in rows for axes in row for text in (axes.xaxis.label, axes.title))]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    boxes += [axes.get_window_extent() for row in rows for axes in row]
    boxes += [axes.get_tightbbox() for axes in drawn.axes if not axes.images or axes.get_ylabel()]
    assert len(boxes) == 2 + slots * images + (slots + 1) + (slots + 1) * images + 1
    for box in boxes:
        assert min(box.x0, box.y0) >= -1
        assert box.x1 <= drawn.bbox.width + 1
        assert box.y1 <= drawn.bbox.height + 1
    for first, second in itertools.combinations(boxes, 2):
        assert not first.overlaps(second)


@pytest.fixture(scope="module")
def loaded():
    """A small model with a set head, its transform of images and its tokenizer."""
    open_clip = pytest.importorskip("open_clip")
    from open_clip.transform import PreprocessCfg, image_transform_v2

    from vl_plugins.integrations.open_clip.heads import CLIPWithHeads
    from vl_plugins.integrations.open_clip.models import register_models

    register_models()
    torch.manual_seed(0)
    clip = open_clip.create_model("vl-tiny", output_dict=True)
    model = CLIPWithHeads(clip, "vl-tiny", {}, "set", {"num_slots": 3, "num_iters": 2, "hidden_dim": 32})
    preprocess = image_transform_v2(PreprocessCfg(size=64), is_train=False)
    return model.eval(), preprocess, open_clip.get_tokenizer("vl-tiny")


def write_shard(file, samples):
    """Write samples ``key -> captions``, each with a picture of another color."""
    pil_image = pytest.importorskip("PIL.Image")
    with tarfile.open(file, "w") as shard:
        for index, (key, captions) in enumerate(samples.items()):
            picture = io.BytesIO()
            pil_image.new("RGB", (64, 64), (40 * index, 255 - 40 * index, 7)).save(picture, "PNG")
            metadata = json.dumps({"captions": captions, "image_id": f"id of {key}"}).encode()
            for extension, content in (("png", picture.getvalue()), ("json", metadata)):
                header = tarfile.TarInfo(f"{key}.{extension}")
                header.size = len(content)
                shard.addfile(header, io.BytesIO(content))
    return str(file)


def shards_of(folder, split="test"):
    return sorted(map(str, folder.glob(f"toy-{split}-*.tar")))


@torch.no_grad()
def encoded_images(loaded, shards, number):
    """The model's inputs of the first images, (I, 3, H, W)."""
    pil_image = pytest.importorskip("PIL.Image")
    files = read_collection(shards).pictures(range(number))
    return torch.stack([loaded[1](pil_image.open(io.BytesIO(files[index]))) for index in range(number)])


@torch.no_grad()
def nearest_by_loops(loaded, shards, image):
    """The text of the nearest caption of each element of one image, and whether it is the image's."""
    model, _, tokenizer = loaded
    collection = read_collection(shards)
    sets = [model.encode_text(tokenizer([caption]), normalize=True)[0] for caption in collection.captions]
    found = []
    for element in model.encode_image(encoded_images(loaded, shards, image + 1)[-1:], normalize=True)[0]:
        cosines = [max(torch.dot(element, other) for other in each) for each in sets]
        caption = max(range(len(sets)), key=cosines.__getitem__)
        found.append((collection.captions[caption], collection.image_of_caption[caption] == image))
    return found


def test_pictures_attention_and_captions_are_the_models(loaded, toy_shards, monkeypatch):
    model, preprocess, _ = loaded
    shards = shards_of(toy_shards)
    monkeypatch.setattr(attention_plot, "CAPTIONS_PER_BATCH", 7)
    items = attended_images(*loaded, shards, images=9)
    first_iteration = attended_images(*loaded, shards, images=1, iteration=1)[0]
    images = encoded_images(loaded, shards, 9)
    with torch.no_grad():
        output = model.predict_image_sets(images)
    normalization = preprocess.transforms[-1]
    mean, std = (torch.tensor(values) for values in (normalization.mean, normalization.std))
    for position, item in enumerate(items):
        torch.testing.assert_close(item.image, images[position].permute(1, 2, 0) * std + mean, atol=1e-5, rtol=0)
        torch.testing.assert_close(item.attention.sum(dim=0), torch.ones(8, 8))
        torch.testing.assert_close(item.attention.flatten(1).T, output.attention[position, -1])
    torch.testing.assert_close(first_iteration.attention.flatten(1).T, output.attention[0, 0])
    for position in (0, 8):
        expected = nearest_by_loops(loaded, shards, position)
        assert list(zip(items[position].captions, items[position].matches, strict=True)) == expected


def test_images_by_key_or_id_are_in_the_order_asked_for(loaded, tmp_path):
    captions = {key: [f"{key} {number}" for number in range(2)] for key in "abcd"}
    first = write_shard(tmp_path / "one.tar", {key: captions[key] for key in "ab"})
    second = write_shard(tmp_path / "two.tar", {key: captions[key] for key in "cd"})
    shards = [first, second]
    everything = attended_images(*loaded, shards, images=60)
    assert len(everything) == 4
    chosen = attended_images(*loaded, shards, keys=["id of d", "b", "a", "b"])
    assert len(chosen) == 3
    for item, position in zip(chosen, (3, 1, 0), strict=True):
        assert torch.equal(item.image, everything[position].image)
        torch.testing.assert_close(item.attention, everything[position].attention)
        assert item[2:] == everything[position][2:]


def test_own_captions_match(loaded, tmp_path):
    alone = write_shard(tmp_path / "alone.tar", {"a": ["a dog", "a cat"]})
    (item,) = attended_images(*loaded, alone)
    assert item.matches == [True] * 3
    # The nearest caption is the same text for both, and the first image's.
    both = write_shard(tmp_path / "both.tar", {"a": ["A dog."], "b": ["a  DOG."]})
    items = attended_images(*loaded, both)
    assert [item.captions for item in items] == [["A dog."] * 3] * 2
    assert [item.matches for item in items] == [[True] * 3] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": 0}, "the picture shows 1 to 60 images, got 0"),
        ({"keys": ["a", "bb"]}, "unknown image 'bb'.*known: a, b"),
        ({"iteration": 3}, "the iteration must be 1 to 2, as many as the model has, got 3"),
    ],
)
def test_wrong_options_are_named(loaded, tmp_path, options, message):
    shard = write_shard(tmp_path / "shard.tar", {"a": ["a dog"], "b": ["a cat"]})
    with pytest.raises(UserError, match=message):
        attended_images(*loaded, shard, **options)


def test_shards_and_models_that_cannot_be_used(loaded, tmp_path):
    with pytest.raises(UserError, match="the shards hold no images"):
        attended_images(*loaded, write_shard(tmp_path / "empty.tar", {}))
    shard = write_shard(tmp_path / "shard.tar", {"a": ["a dog"]})
    model, *others = loaded
    with pytest.raises(UserError, match=r"^the model has no set head, so no slots to draw$"):
        attended_images(model.clip, *others, shard)
    content = (tmp_path / "shard.tar").read_bytes()
    (tmp_path / "shard.tar").write_bytes(content.replace(b"IHDR", b"ihdr"))
    with pytest.raises(UserError, match=r"cannot read the picture of sample a: "):
        attended_images(*loaded, shard)
