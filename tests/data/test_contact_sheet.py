import io
import itertools
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
from PIL import Image

from vl_plugins.data import contact_sheet
from vl_plugins.data.contact_sheet import MOST_SAMPLES, draw_contact_sheet
from vl_plugins.data.statistics import ShardSample
from vl_plugins.utils.errors import MissingExtraError, UserError

Bbox = pytest.importorskip("matplotlib.transforms").Bbox

CAPTIONS = (
    "It costs $5 and not $6, or $\\frac{1}{2}$ at x_1^2 % # & ~ {",
    "$",
    "一只猫坐在垫子上看着窗外的雨，旁边有一本书和一个杯子",
    "قطة تجلس على السجادة",
    "นกสองตัว",
    "🐶 dog with 🎾",
    "a\nb\x00c\ud800 d",
    "W" * 300,
    "i " * 600,
    "two words",
    "x" * 1_000_000,
    " ",
)


def encode_image(size=(40, 30), image_format="PNG", mode="RGB", colour=None):
    stream = io.BytesIO()
    image = Image.new(mode, size, colour) if colour else Image.linear_gradient("L").resize(size).convert(mode)
    image.save(stream, image_format)
    return stream.getvalue()


PICTURES = (
    encode_image((4000, 3)),
    encode_image((10, 1000)),
    encode_image((640, 480), "JPEG"),
    encode_image((640, 480), "JPEG", "CMYK"),
    encode_image((1, 1)),
    encode_image((50, 70), mode="LA"),
    encode_image((50, 70), mode="P"),
    encode_image((300, 225), "WEBP"),
    b"text",
    b"",
    None,
    encode_image((640, 480), "JPEG")[:2000],
)


def odd_samples(number):
    return [
        ShardSample(
            "some/folder/" + "k" * index if index % 3 else f"set-train-{index:08d}",
            PICTURES[index % len(PICTURES)],
            [CAPTIONS[(index + index // 12) % len(CAPTIONS)]] * (index % 4),
        )
        for index in range(number)
    ]


def draw(samples, title="title"):
    """Return the figure, its texts and their boxes in pixels from the lower left."""
    with contact_sheet._without_font_warnings():
        figure = contact_sheet._draw(samples, title)
        figure.canvas.draw()
        boxes = {text: text.get_window_extent() for text in figure.texts if text.get_text().strip()}
    return figure, boxes


def is_within(box, frame):
    across = frame.x0 - 0.5 <= box.x0 and box.x1 <= frame.x1 + 0.5
    return across and frame.y0 - 0.5 <= box.y0 and box.y1 <= frame.y1 + 0.5


def overlap(first, second):
    """Return by how many pixels two boxes overlap, across and down."""
    across = min(first.x1, second.x1) - max(first.x0, second.x0)
    return across, min(first.y1, second.y1) - max(first.y0, second.y0)


@pytest.mark.parametrize(
    "number", [1, 2, 3, 4, 5, 7, 12, 13, *(pytest.param(n, marks=pytest.mark.slow) for n in (31, 60))]
)
def test_nothing_overlaps_or_is_cut(number):
    figure, boxes = draw(odd_samples(number), title="a title " * 30)
    frames = [patch.get_window_extent() for patch in figure.artists]
    shapes = [(image.ox, image.oy, *image.get_array().shape[1::-1]) for image in figure.images]
    pictures = [Bbox.from_bounds(*shape) for shape in shapes]
    assert len(frames) == number
    assert len(boxes) >= 2 * number
    notes = []
    for text, box in boxes.items():
        assert is_within(box, figure.bbox), text
        in_frames = [frame for frame in frames if min(overlap(box, frame)) > 0.5]
        if in_frames:
            notes.append(box)
            assert is_within(box, in_frames[0]), text
    for (text, box), (other, other_box) in itertools.combinations(boxes.items(), 2):
        across, down = overlap(box, other_box)
        # Of lines one above the other, letters that reach down and up may touch.
        assert across <= 0.5 or down <= 2, (text, other)
    for picture in pictures:
        assert sum(is_within(picture, frame) for frame in frames) == 1
        assert not any(min(overlap(picture, note)) > 0 for note in notes)
    # Of the pictures, 8 in 12 can be decoded, and the notes of the others take one line or two.
    decoded = sum(index % 12 < 8 for index in range(number))
    assert len(pictures) == decoded
    assert len(notes) >= number - decoded


@pytest.mark.parametrize(
    ("number", "columns"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (12, 4), (13, 4), (20, 5), (60, 6)]
)
def test_columns(number, columns):
    samples = [ShardSample("key", None, ["a"])] * number
    figure, _ = draw(samples)
    lefts = {round(patch.get_window_extent().x0) for patch in figure.artists}
    assert len(lefts) == columns


def test_order_of_samples():
    _, boxes = draw([ShardSample(f"k{index}", None, ["a"]) for index in range(7)])
    places = {text.get_text(): (-round(box.y0), box.x0) for text, box in boxes.items()}
    keys = sorted((key for key in places if re.fullmatch(r"k\d", key)), key=places.get)
    assert keys == [f"k{index}" for index in range(7)]


def shown(samples, title=""):
    _, boxes = draw(samples, title)
    return [text.get_text() for text in boxes]


def test_texts():
    samples = [
        ShardSample("set-train-00000007", encode_image(), ["A dog,\n for $5 and $6.", "other"]),
        ShardSample("k", None, ["one"]),
        ShardSample("l", b"text", []),
    ]
    assert shown(samples, "12 samples") == [
        "12 samples",
        "set-train-00000007",
        "2 captions",
        "A dog, for $5 and $6.",
        "no picture",
        "k",
        "1 caption",
        "one",
        "cannot be decoded: it is not an image",
        "l",
        "0 captions",
    ]


def test_dollars_are_no_formulas():
    caption = r"$\nosuchcommand$ and $x_1$"
    assert shown([ShardSample("$k$", None, [caption])], "$t$") == ["$t$", "no picture", "$k$", "1 caption", caption]


def test_rows_are_apart():
    figure, boxes = draw([ShardSample("k", None, ["line " * 30])] * 4)
    rows = sorted({frame.get_window_extent().y1 for frame in figure.artists})
    assert len(rows) == 2
    # Above the second row there is a gap, more than a line.
    assert min(box.y0 for box in boxes.values() if box.y0 > rows[0]) - rows[0] > 20


def test_damaged_picture_says_why():
    texts = shown([ShardSample("k", encode_image((640, 480), "JPEG")[:2000], ["a"])])
    assert " ".join(texts[:-3]).startswith("cannot be decoded: image file is truncated")


def test_captions_are_wrapped_between_words_and_long_ones_end_in_dots():
    caption = "the quick brown fox jumps over the lazy dog and runs away through the wood"
    lines = shown([ShardSample("k", None, [caption])])[3:]
    assert len(lines) == 2
    assert " ".join(lines) == caption
    lines = shown([ShardSample("k", None, [" ".join(map(str, range(1000)))])])[3:]
    assert len(lines) == 10
    assert lines[-1].endswith("…")
    shortened = " ".join(lines)[:-1]
    assert " ".join(map(str, range(1000))).startswith(shortened)
    assert shown([ShardSample("k", None, ["x" * 100])])[3:] != ["x" * 100]
    assert "".join(shown([ShardSample("k", None, ["x" * 100])])[3:]) == "x" * 100


def test_caption_of_just_the_most_lines_is_whole():
    words = [f"{'x' * 34}{index}" for index in range(10)]
    assert shown([ShardSample("k", None, [" ".join(words)])])[3:] == words
    lines = shown([ShardSample("k", None, [" ".join([*words, "y" * 20])])])[3:]
    assert lines[:9] == words[:9]
    assert lines[9].endswith("…")


def test_end_of_a_long_key_is_kept():
    _, _, key, *_ = shown([ShardSample("folder/" * 30 + "0042", None, ["a"])], "t")
    assert key.startswith("…")
    assert key.endswith("/0042")


def test_characters_that_no_font_can_draw():
    assert shown([ShardSample("k", None, ["a\x00b\ud800 \x1b[1m"])])[3:] == ["a\ufffdb\ufffd \ufffd[1m"]


def pixel(figure, x, y):
    """Return the colour at a place, counted from the upper left."""
    return tuple(np.asarray(figure.canvas.buffer_rgba())[y, x, :3].tolist())


def test_pictures_keep_colours_and_shape():
    wide, high = encode_image((80, 20), colour=(255, 0, 0)), encode_image((20, 80), "PNG", "RGBA", (0, 0, 255, 255))
    samples = [ShardSample("k", picture, ["a"]) for picture in (wide, high, encode_image((10, 10), colour=(0, 255, 0)))]
    figure, _ = draw(samples, "")
    left, top = contact_sheet.MARGIN, contact_sheet.MARGIN
    grey = tuple(int(contact_sheet.FRAME_COLOUR[index : index + 2], 16) for index in (1, 3, 5))
    assert [image.get_array().shape[:2] for image in figure.images] == [(75, 300), (225, 56), (40, 40)]
    assert pixel(figure, left + 150, top + 112) == (255, 0, 0)
    assert pixel(figure, left, top + 112) == pixel(figure, left + 299, top + 112) == (255, 0, 0)
    assert pixel(figure, left + 150, top + 70) == grey
    step = 300 + contact_sheet.COLUMN_GAP
    assert pixel(figure, left + step + 150, top + 1) == pixel(figure, left + step + 150, top + 223) == (0, 0, 255)
    assert pixel(figure, left + step + 20, top + 112) == grey
    assert pixel(figure, left + 2 * step + 150, top + 112) == (0, 255, 0)
    assert pixel(figure, 2, 2) == (255, 255, 255)


def test_top_of_a_picture_is_on_top():
    image = Image.new("RGB", (30, 20), (255, 255, 255))
    image.paste((255, 0, 0), (0, 0, 30, 10))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    figure, _ = draw([ShardSample("k", stream.getvalue(), ["a"])], "")
    x = contact_sheet.MARGIN + 150
    middle = contact_sheet.MARGIN + 112
    assert (pixel(figure, x, middle - 20), pixel(figure, x, middle + 20)) == ((255, 0, 0), (255, 255, 255))


def test_transparent_picture_is_drawn_on_the_frame():
    figure, _ = draw([ShardSample("k", encode_image((30, 20), "PNG", "RGBA", (0, 0, 0, 1)), ["a"])], "")
    assert min(pixel(figure, contact_sheet.MARGIN + 150, contact_sheet.MARGIN + 112)) > 200


def test_file(tmp_path):
    samples = odd_samples(MOST_SAMPLES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_contact_sheet(samples, tmp_path / "new" / "sheet.png", title="t")
    first = (tmp_path / "new" / "sheet.png").read_bytes()
    with Image.open(io.BytesIO(first)) as image:
        assert image.format == "PNG"
        assert image.width == 2004
    draw_contact_sheet(samples, str(tmp_path / "new" / "sheet.png"), title="t")
    assert (tmp_path / "new" / "sheet.png").read_bytes() == first
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["sheet.png"]


def test_log_is_quiet(tmp_path, caplog):
    draw_contact_sheet(odd_samples(12), tmp_path / "sheet.png")
    assert not caplog.records


@pytest.mark.parametrize("number", [0, 61])
def test_number_of_samples(tmp_path, number):
    with pytest.raises(UserError, match=f"a contact sheet shows 1 to 60 samples, got {number}"):
        draw_contact_sheet(odd_samples(number), tmp_path / "sheet.png")


@pytest.mark.parametrize("name", ["sheet.jpg", "sheet", ".png"])
def test_other_formats(tmp_path, name):
    with pytest.raises(UserError, match=f"a contact sheet is a .png file, got .*{name}"):
        draw_contact_sheet(odd_samples(1), tmp_path / name)


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*sheet\.png: "):
        draw_contact_sheet(odd_samples(1), tmp_path / "file" / "sheet.png")


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "sheet.png").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*sheet\.png: "):
        draw_contact_sheet(odd_samples(1), tmp_path / "sheet.png")
    assert [file.name for file in tmp_path.iterdir()] == ["sheet.png"]


def test_settings_of_matplotlib_do_not_matter(tmp_path):
    import matplotlib

    draw_contact_sheet(odd_samples(2), tmp_path / "one.png")
    settings = {"text.usetex": True, "font.size": 30, "savefig.dpi": 30, "savefig.bbox": "tight", "text.color": "red"}
    settings |= {"text.antialiased": False, "path.sketch": (10, 10, 10)}
    with matplotlib.rc_context(settings):
        draw_contact_sheet(odd_samples(2), tmp_path / "two.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_matplotlib_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'vl_plugins\[eval\]'"):
        draw_contact_sheet(odd_samples(1), tmp_path / "sheet.png")


def test_import_needs_nothing_that_is_optional():
    code = """
import sys
import vl_plugins.data.contact_sheet, vl_plugins.data.statistics, vl_plugins.data.verification
print(sorted({"torch", "PIL", "webdataset", "matplotlib", "fsspec", "numpy", "tqdm"} & set(sys.modules)))"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
