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

Text = pytest.importorskip("matplotlib.text").Text

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


def encode_image(size=(40, 30), image_format="PNG", mode="RGB", color=None):
    stream = io.BytesIO()
    image = Image.new(mode, size, color) if color else Image.linear_gradient("L").resize(size).convert(mode)
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
        texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
        boxes = {text: text.get_window_extent() for text in texts}
    return figure, boxes


def is_within(box, frame):
    across = frame.x0 - 0.5 <= box.x0 and box.x1 <= frame.x1 + 0.5
    return across and frame.y0 - 0.5 <= box.y0 and box.y1 <= frame.y1 + 0.5


def overlap(first, second):
    """Return by how many pixels two boxes overlap, across and down."""
    across = min(first.x1, second.x1) - max(first.x0, second.x0)
    return across, min(first.y1, second.y1) - max(first.y0, second.y0)


@pytest.mark.parametrize("number", [1, 5, 13])
def test_nothing_overlaps_or_is_cut(number):
    figure, boxes = draw(odd_samples(number), title="a title " * 30)
    assert len(boxes) > number
    for text, box in boxes.items():
        assert is_within(box, figure.bbox), text
    for (text, box), (other, other_box) in itertools.combinations(boxes.items(), 2):
        across, down = overlap(box, other_box)
        # Of lines one above the other, letters that reach down and up may touch.
        assert across <= 0.5 or down <= 2, (text, other)


@pytest.mark.parametrize(
    ("number", "columns"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (12, 4), (13, 4), (20, 5), (60, 6)]
)
def test_columns(number, columns):
    samples = [ShardSample("key", None, ["a"])] * number
    figure, _ = draw(samples)
    assert figure.axes[0].get_gridspec().ncols == columns


def test_order_of_samples():
    _, boxes = draw([ShardSample(f"k{index}", None, ["a"]) for index in range(7)])
    places = {text.get_text(): (-round(box.y0), box.x0) for text, box in boxes.items()}
    keys = sorted((key for key in places if re.match(r"k\d", key)), key=places.get)
    assert [key[:2] for key in keys] == [f"k{index}" for index in range(7)]


def shown(sample, title=""):
    """Return the texts of a sheet of one sample."""
    _, boxes = draw([sample], title)
    return {text.get_text() for text in boxes}


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (
            ShardSample("set-train-00000007", encode_image(), ["A dog,\n for $5 and $6.", "other"]),
            {"set-train-00000007   2 captions", "A dog, for $5 and $6."},
        ),
        (ShardSample("$k$", None, [r"$\nosuchcommand$"]), {"$k$   1 caption", "no picture", r"$\nosuchcommand$"}),
        (ShardSample("l", b"text", []), {"l   0 captions", "cannot be decoded: it is not an image"}),
        (ShardSample("k", None, ["a\x00b\ud800 \x1b[1m"]), {"k   1 caption", "no picture", "a\ufffdb\ufffd \ufffd[1m"}),
        (ShardSample("x/" * 30 + "042", None, []), {"…" + ("x/" * 30 + "042")[-36:] + "   0 captions", "no picture"}),
    ],
)
def test_texts(sample, expected):
    assert shown(sample) == expected


def test_title():
    assert shown(ShardSample("k", None, []), "the title") == {"the title", "k   0 captions", "no picture"}


def test_captions_are_wrapped_between_words_and_long_ones_end_in_dots():
    caption = "the quick brown fox jumps over the lazy dog and runs away through the wood"
    (text,) = shown(ShardSample("k", None, [caption])) - {"k   1 caption", "no picture"}
    assert (text.count("\n"), text.replace("\n", " ")) == (1, caption)
    (text,) = shown(ShardSample("k", None, [" ".join(map(str, range(1000)))])) - {"k   1 caption", "no picture"}
    assert text.count("\n") == 9
    assert text.endswith(" …")


def test_top_of_a_picture_is_on_top_in_its_colors():
    image = Image.new("RGB", (30, 20), (255, 255, 255))
    image.paste((255, 0, 0), (0, 0, 30, 10))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    figure, _ = draw([ShardSample("k", stream.getvalue(), ["a"])])
    box = figure.axes[0].get_window_extent()
    pixels = np.asarray(figure.canvas.buffer_rgba())[::-1, :, :3]
    middle, step = round((box.y0 + box.y1) / 2), 20
    places = ((middle + step, (box.x0 + box.x1) / 2), (middle - step, (box.x0 + box.x1) / 2), (box.y1 - 3, box.x0 + 3))
    above, below, frame = (pixels[round(y), round(x)].tolist() for y, x in places)
    assert above == pytest.approx([255, 0, 0], abs=8)
    assert below == pytest.approx([255, 255, 255], abs=8)
    assert frame == [int(contact_sheet.FRAME_COLOR[index : index + 2], 16) for index in (1, 3, 5)]


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
