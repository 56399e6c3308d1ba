import inspect
import io
import itertools
import json
import math
import tarfile

import pytest
import torch

from vl_plugins.data.reader import evaluation_pipeline
from vl_plugins.plots import attention as attention_plot
from vl_plugins.plots.attention import AttendedImage, attended_images, plot_attention
from vl_plugins.plots.figures import COLOURS
from vl_plugins.utils.errors import UserError

LONG = "a dog and a cat, worth $5 or $x_1$, that " + "play with Donaudampfschifffahrtsgesellschaftskapitäne and " * 9


def attended(slots=3, size=(60, 90), caption="a dog", seed=0):
    generator = torch.Generator().manual_seed(seed)
    attention = torch.randn(slots, 4, 6, generator=generator).softmax(dim=0)
    image = torch.rand(*size, 3, generator=generator)
    captions = [f"{caption} {slot}" for slot in range(slots)]
    return AttendedImage(image, attention, captions, [slot % 2 == 0 for slot in range(slots)])


@pytest.fixture
def figure(tmp_path, monkeypatch):
    """The figure that ``plot_attention`` draws with the arguments given."""
    pytest.importorskip("matplotlib")

    def draw(items, **options):
        figures = []
        monkeypatch.setattr(attention_plot, "write_figure", lambda figure, out: figures.append(figure))
        plot_attention(items, tmp_path / "attention.png", **options)
        (figure,) = figures
        return figure

    return draw


def rows_of(figure, slots):
    """The axes of each row, without that of the colour bar."""
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) % (slots + 1) == 0
    return [panels[start : start + slots + 1] for start in range(0, len(panels), slots + 1)]


def colour_bars(figure):
    return [axes for axes in figure.axes if not axes.images]


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    pil_image = pytest.importorskip("PIL.Image")
    plot_attention([attended()], tmp_path / "new" / "attention.png")
    with pil_image.open(tmp_path / "new" / "attention.png") as picture:
        assert len(picture.convert("RGB").getcolors(10**6)) > 1000
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["attention.png"]


def test_a_row_for_each_picture_and_a_panel_for_each_slot(figure):
    items = [attended(slots=4, seed=seed) for seed in range(3)]
    rows = rows_of(figure(items), slots=4)
    assert [axes.get_title() for axes in rows[0]] == ["image", "slot 1", "slot 2", "slot 3", "slot 4"]
    assert {axes.get_title() for row in rows[1:] for axes in row} == {""}
    for item, (picture, *panels) in zip(items, rows, strict=True):
        assert torch.equal(torch.as_tensor(picture.images[0].get_array()), item.image)
        tops = {round(axes.get_position().y1, 6) for axes in (picture, *panels)}
        assert len(tops) == 1
        lefts = [axes.get_position().x0 for axes in (picture, *panels)]
        assert lefts == sorted(lefts)
    assert rows[0][0].get_position().y0 > rows[1][0].get_position().y1 > rows[2][0].get_position().y1


def test_attention_lies_where_it_belongs(figure):
    # Three pixels for each place, so that the middle one is on it.
    attention = torch.tensor([[[0.1, 0.8, 0.3], [0.6, 0.2, 0.9]]])
    attention = torch.cat([attention, 1 - attention])
    (row,) = rows_of(figure([AttendedImage(torch.rand(6, 9, 3), attention, ["a", "b"], [True, True])]), slots=2)
    for slot, axes in enumerate(row[1:]):
        grey, shown = axes.images
        assert grey.get_array().shape == shown.get_array().shape == (6, 9)
        assert grey.get_extent() == shown.get_extent()
        torch.testing.assert_close(torch.as_tensor(shown.get_array())[1::3, 1::3], attention[slot])
        assert shown.get_array().min() >= 0
        assert shown.get_array().max() <= attention[slot].max()
        steps = torch.as_tensor(shown.get_array()).diff(dim=1).abs()
        assert steps.max() < 0.5 * attention[slot].diff(dim=1).abs().max(), "smooth"


def test_the_picture_below_is_dimmed_and_grey(figure):
    image = torch.tensor([[[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]], [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    (row,) = rows_of(figure([AttendedImage(image, torch.ones(1, 2, 2), ["a"], [True])]), slots=1)
    (black, white), (red, green) = row[1].images[0].get_array().tolist()
    assert 0 <= black < red < green < white < 1
    assert row[1].images[0].get_clim() == (0, 1)
    assert 0 < row[1].images[1].get_alpha() < 1


def test_the_same_attention_has_the_same_colour_everywhere(figure):
    drawn = figure([attended(seed=seed) for seed in range(2)])
    limits = {axes.images[1].get_clim() for row in rows_of(drawn, slots=3) for axes in row[1:]}
    assert limits == {(0, 1)}
    (bar,) = colour_bars(drawn)
    assert bar.get_ylabel() == "attention"
    drawn.canvas.draw()
    assert [label.get_text() for label in bar.get_yticklabels()] == ["0", "0.5", "1"]


def test_attention_over_places_has_a_scale_of_its_own(figure):
    items = [attended(seed=seed) for seed in range(2)]
    items = [item._replace(attention=item.attention / item.attention.sum(dim=(1, 2), keepdim=True)) for item in items]
    largest = max(item.attention.max().item() for item in items)
    assert largest < 0.3
    for options, expected in (({}, largest), ({"largest": 0.5}, 0.5)):
        rows = rows_of(figure(items, **options), slots=3)
        assert {axes.images[1].get_clim() for row in rows for axes in row[1:]} == {(0, expected)}


def test_captions_tell_whose_they_are_in_colour_and_without(figure):
    drawn = figure([attended()])
    ((_, *panels),) = rows_of(drawn, slots=3)
    texts = [axes.texts[0] for axes in panels]
    assert [text.get_text() for text in texts] == ["✓ a dog 0", "✗ a dog 1", "✓ a dog 2"]
    assert [text.get_color() for text in texts] == [COLOURS[0], COLOURS[1], COLOURS[0]]
    assert [(text.get_text(), text.get_color()) for text in drawn.texts] == [
        ("✓ caption of this image", COLOURS[0]),
        ("✗ caption of another image", COLOURS[1]),
    ]


def test_captions_are_shown_letter_by_letter(figure):
    """With their dollar signs, and cut off only when they are too long."""
    (row,) = rows_of(figure([attended(slots=1, caption="worth $5 or $x_1$, not more")]), slots=1)
    (text,) = row[1].texts
    assert " ".join(text.get_text().split()) == "✓ worth $5 or $x_1$, not more 0"
    assert not text.get_parse_math()
    (row,) = rows_of(figure([attended(slots=1, caption=LONG)]), slots=1)
    lines = row[1].texts[0].get_text().splitlines()
    assert len(lines) == 8
    assert lines[-1].endswith("…")
    assert ("✓ " + LONG).replace(" ", "").startswith("".join(lines)[:-1].replace(" ", ""))


@pytest.mark.parametrize(("images", "slots"), [(1, 1), (3, 4), (2, 8)])
def test_everything_fits_and_nothing_overlaps(figure, images, slots):
    sizes = [(60, 90), (150, 50), (50, 50)]
    captions = [LONG, "WWWWWWWW " * 40, "ein Hund"]
    items = [attended(slots, sizes[row], captions[row]) for row in range(images)]
    drawn = figure(items)
    drawn.savefig(io.BytesIO())
    texts = [
        *drawn.texts,
        *(text for row in rows_of(drawn, slots) for axes in row for text in (*axes.texts, axes.title)),
    ]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    boxes += [axes.get_window_extent() for row in rows_of(drawn, slots) for axes in row]
    boxes += [axes.get_tightbbox() for axes in colour_bars(drawn)]
    assert len(boxes) == 2 + slots * images + (slots + 1) + (slots + 1) * images + 1
    width, height = drawn.bbox.size
    for box in boxes:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= width
        assert box.y1 <= height
    for first, second in itertools.combinations(boxes, 2):
        assert not first.overlaps(second)
    for _, *panels in rows_of(drawn, slots):
        for column, axes in enumerate(panels):
            top = rows_of(drawn, slots)[0][column + 1].get_window_extent()
            (text,) = axes.texts
            assert text.get_window_extent().x0 == pytest.approx(top.x0, abs=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": torch.rand(3, 60, 90)}, r"image must have the shape \(H, W, 3\), got \(3, 60, 90\)"),
        ({"image": torch.full((2, 2, 3), 1.5)}, r"image must be in \[0, 1\], got 1.5 to 1.5"),
        ({"image": torch.full((2, 2, 3), math.nan)}, r"image must be in \[0, 1\], got nan to nan"),
        ({"attention": torch.ones(2, 4, 6)}, r"attention must have the shape \(3, h, w\), got \(2, 4, 6\)"),
        ({"attention": torch.ones(3, 24)}, r"attention must have the shape \(3, h, w\), got \(3, 24\)"),
        ({"attention": -torch.ones(3, 4, 6)}, "attention must be finite and >= 0, got the minimum -1"),
        ({"attention": torch.full((3, 4, 6), math.nan)}, "attention must be finite and >= 0, got the minimum nan"),
        ({"captions": ["a", "b"]}, "captions must be of 3 slots, got 2"),
        ({"matches": [True]}, "matches must be of 3 slots, got 1"),
    ],
)
def test_wrong_items_are_named(tmp_path, change, message):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=f"^{message}$"):
        plot_attention([attended(), attended()._replace(**change)], tmp_path / "attention.png")
    assert not any(tmp_path.iterdir())


def test_wrong_numbers_and_files_are_named(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="the picture shows 1 to 60 images, got 0"):
        plot_attention([], tmp_path / "attention.png")
    with pytest.raises(UserError, match="the picture shows 1 to 60 images, got 61"):
        plot_attention([attended()] * 61, tmp_path / "attention.png")
    with pytest.raises(UserError, match=r"must end in .png, .pdf or .svg, got .*attention.jpg"):
        plot_attention([attended()], tmp_path / "attention.jpg")
    with pytest.raises(ValueError, match="largest must be a finite number > 0, got 0"):
        plot_attention([attended()], tmp_path / "attention.png", largest=0)


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
    """Write samples ``key -> captions``, each with a picture of one colour of its own."""
    pil_image = pytest.importorskip("PIL.Image")
    with tarfile.open(file, "w") as shard:
        for index, (key, captions) in enumerate(samples.items()):
            picture = io.BytesIO()
            pil_image.new("RGB", (64, 64), (40 * index, 255 - 40 * index, 7)).save(picture, "PNG")
            metadata = json.dumps({"captions": captions, "filename": f"folder/{key.upper()}.png"}).encode()
            for extension, content in (("png", picture.getvalue()), ("json", metadata)):
                header = tarfile.TarInfo(f"{key}.{extension}")
                header.size = len(content)
                shard.addfile(header, io.BytesIO(content))
    return str(file)


def shards_of(folder, split="test"):
    return sorted(map(str, folder.glob(f"toy-{split}-*.tar")))


@torch.no_grad()
def nearest_by_loops(loaded, shards, position, max_captions=None):
    """The text of the nearest caption of each element of one image, and whether it is the image's."""
    model, preprocess, tokenizer = loaded
    captions = []
    for images, texts, image_of_caption, positions in evaluation_pipeline(
        shards, preprocess, list, 5, max_captions=max_captions
    ):
        if position in positions:
            (elements,) = model.encode_image(images[positions == position], normalize=True)
        for text, image in zip(texts, positions[image_of_caption].tolist(), strict=True):
            captions.append((text, image, model.encode_text(tokenizer([text]), normalize=True)[0]))
    found = []
    for element in elements:
        text, image, _ = max(captions, key=lambda caption: max(torch.dot(element, other) for other in caption[2]))
        found.append((text, image == position))
    return found


def test_pictures_attention_and_captions_are_the_models(loaded, toy_shards):
    model, preprocess, _ = loaded
    shards = shards_of(toy_shards)
    items = attended_images(*loaded, shards, images=9, batch_size=7)
    assert len(items) == 9
    images = torch.cat([images for images, *_ in evaluation_pipeline(shards, preprocess, list, 5)])
    with torch.no_grad():
        output = model.predict_image_sets(images[:9])
    normalisation = preprocess.transforms[-1]
    mean, std = (torch.tensor(values) for values in (normalisation.mean, normalisation.std))
    for position, item in enumerate(items):
        torch.testing.assert_close(item.image, images[position].permute(1, 2, 0) * std + mean, atol=1e-5, rtol=0)
        torch.testing.assert_close(item.attention.sum(dim=0), torch.ones(8, 8))
        for slot, row, column in ((0, 0, 0), (1, 2, 5), (2, 7, 3)):
            expected = output.attention[position, -1, 8 * row + column, slot]
            torch.testing.assert_close(item.attention[slot, row, column], expected)
    for position in (0, 8):
        expected = nearest_by_loops(loaded, shards, position)
        assert list(zip(items[position].captions, items[position].matches, strict=True)) == expected


def test_iteration_and_number_of_captions(loaded, toy_shards):
    model, preprocess, _ = loaded
    shards = shards_of(toy_shards)
    (first,) = attended_images(*loaded, shards, images=1, iteration=1, max_captions=1)
    (last,) = attended_images(*loaded, shards, images=1, iteration=2)
    image = next(iter(evaluation_pipeline(shards, preprocess, list, 1)))[0]
    with torch.no_grad():
        maps = model.predict_image_sets(image).attention[0]  # (T, N, K)
    for item, expected in ((first, maps[0]), (last, maps[1])):
        torch.testing.assert_close(item.attention.flatten(1).T, expected)
    assert list(zip(first.captions, first.matches, strict=True)) == nearest_by_loops(loaded, shards, 0, 1)
    assert first.captions != last.captions


def test_images_by_name_are_in_the_order_asked_for(loaded, tmp_path):
    captions = {key: [f"{key} {number}" for number in range(2)] for key in "abcd"}
    first = write_shard(tmp_path / "one.tar", {key: captions[key] for key in "ab"})
    second = write_shard(tmp_path / "two.tar", {key: captions[key] for key in "cd"})
    shards = [first, second]
    everything = attended_images(*loaded, shards, images=60)
    assert len(everything) == 4
    by_name = attended_images(*loaded, shards, keys=["folder/D.png", "b", "A.png", "b"])
    assert len(by_name) == 3
    for item, position in zip(by_name, (3, 1, 0), strict=True):
        assert torch.equal(item.image, everything[position].image)
        torch.testing.assert_close(item.attention, everything[position].attention)
        assert item[2:] == everything[position][2:]


def test_own_captions_match(loaded, tmp_path):
    alone = write_shard(tmp_path / "alone.tar", {"a": ["a dog", "a cat"]})
    (item,) = attended_images(*loaded, alone)
    assert item.matches == [True] * 3
    # The nearest caption is the same text for both, and the first image's.
    both = write_shard(tmp_path / "both.tar", {"a": ["A dog."], "b": ["a  DOG."]})
    items = attended_images(*loaded, both, batch_size=1)
    assert [item.captions for item in items] == [["A dog."] * 3] * 2
    assert [item.matches for item in items] == [[True] * 3] * 2
    other = write_shard(tmp_path / "other.tar", {"a": ["a dog"], "b": [""]})
    items = attended_images(*loaded, other)
    matches = {
        (caption == own, match)
        for item, own in zip(items, ("a dog", ""), strict=True)
        for caption, match in zip(item.captions, item.matches, strict=True)
    }
    assert matches == {(True, True), (False, False)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": 0}, "the picture shows 1 to 60 images, got 0"),
        ({"images": 61}, "the picture shows 1 to 60 images, got 61"),
        ({"keys": ["a"] * 61}, "the picture shows 1 to 60 images, got 61"),
        ({"keys": ["a", "B.jpg"]}, r"unknown image 'B.jpg' \(did you mean 'B.png'\?\)"),
        ({"iteration": 0}, "the iteration must be 1 to 2, as many as the model has, got 0"),
        ({"iteration": 3}, "the iteration must be 1 to 2, as many as the model has, got 3"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_captions": 0}, "max_captions must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_named(loaded, tmp_path, options, message):
    shard = write_shard(tmp_path / "shard.tar", {"a": ["a dog"], "b": ["a cat"]})
    with pytest.raises(UserError, match=message):
        attended_images(*loaded, shard, **options)


def test_shards_that_cannot_be_read_are_named(loaded, tmp_path):
    (tmp_path / "text.tar").write_text("no archive")
    with pytest.raises(UserError, match=r"cannot read shard .*text\.tar: "):
        attended_images(*loaded, str(tmp_path / "text.tar"))
    with pytest.raises(UserError, match="the shards hold no images"):
        attended_images(*loaded, write_shard(tmp_path / "empty.tar", {}))
    shard = write_shard(tmp_path / "shard.tar", {"a": ["a dog"]})
    content = (tmp_path / "shard.tar").read_bytes()
    (tmp_path / "shard.tar").write_bytes(content.replace(b"IHDR", b"ihdr"))
    with pytest.raises(UserError, match=r"cannot read sample a of .*shard\.tar: "):
        attended_images(*loaded, shard)


def test_models_without_slots_are_refused(loaded, tmp_path):
    shard = write_shard(tmp_path / "shard.tar", {"a": ["a dog"]})
    model, preprocess, tokenizer = loaded
    with pytest.raises(UserError, match=r"^the model has no set head, so no slots to draw$"):
        attended_images(model.clip, preprocess, tokenizer, shard)


def test_arguments_are_those_of_the_command():
    options = inspect.signature(attended_images).parameters
    assert {name: options[name].default for name in ("images", "batch_size", "device")} == {
        "images": 3,
        "batch_size": 64,
        "device": "cpu",
    }
