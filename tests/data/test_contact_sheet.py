import io
import json
import warnings

import pytest
from PIL import Image

from tests.helpers.archives import encode_picture
from vl_plugins.data import contact_sheet
from vl_plugins.data.contact_sheet import draw_contact_sheet
from vl_plugins.data.shard_files import ScannedSample

matplotlib = pytest.importorskip("matplotlib")

PHOTO = encode_picture((640, 480), "JPEG", mode="CMYK")
CAPTIONS = (
    "It costs $5, or $\\frac{1}{2}$ at x_1^2 % # & ~ {",
    r"$\nosuchcommand$",
    "一只猫🐶",
    "b\x00c\ud800",
    "W" * 300,
    "x" * 1_000_000,
    " ",
)
PICTURES = (
    encode_picture((4000, 3)),
    encode_picture((1, 1)),
    encode_picture(mode="LA"),
    PHOTO,
    PHOTO[:2000],
    b"",
    None,
)


def sample(key, picture, *captions):
    pictures = {} if picture is None else {"jpg": picture}
    return ScannedSample(key, data=pictures | {"json": json.dumps({"captions": captions}).encode()})


def odd_samples(number):
    return [
        sample("k/" * index, PICTURES[index % 7], *([CAPTIONS[(index + index // 7) % 7]] * (index % 4)))
        for index in range(number)
    ]


def shown(*samples, title=""):
    """Return the texts of a sheet."""
    figure = contact_sheet._draw(samples, title)
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def test_texts():
    texts = shown(
        sample("set-train-00000007", PHOTO, "A dog,\n for $5 and $6.", "other"),
        sample("$k\x1b[31m$", None, r"$\nosuchcommand$"),
        sample("x/" * 30 + "042", b"text"),
        title="12 of 40",
    )
    assert texts == [
        "A dog, for $5 and $6.",
        "set-train-00000007",
        "it has no images; expected jpg or png or\nwebp or jpeg",
        r"$\nosuchcommand$",
        "$k\\x1b[31m$",
        "the file is not an image",
        "('captions' must be a list of strings,\ngot [])",
        ("x/" * 30 + "042")[-40:],
        "12 of 40",
    ]


def test_long_captions_are_wrapped_and_end_in_dots():
    caption = " ".join(map(str, range(1000)))
    (text,) = (text for text in shown(sample("k", None, caption)) if text.startswith("0 1"))
    lines = text.split("\n")
    assert (len(lines), max(map(len, lines)) <= 40, lines[-1][-2:]) == (8, True, " …")


def test_top_of_a_picture_is_on_top_in_its_colors(tmp_path):
    image = Image.new("RGB", (30, 20), (255, 255, 255))
    image.paste((255, 0, 0), (0, 0, 30, 10))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    draw_contact_sheet([sample("k", stream.getvalue(), "a")], tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        column = [sheet.convert("RGB").getpixel((sheet.width // 2, row)) for row in range(sheet.height)]
    red = [row for row, pixel in enumerate(column) if pixel == (255, 0, 0)]
    assert len(red) > 80
    assert max(red) < sheet.height / 2
    assert column[max(red) + 20] == (255, 255, 255)


def test_file(tmp_path):
    """Every sheet is the same file, whatever the caller's settings, and nothing is logged or left behind."""
    file, samples = tmp_path / "new" / "sheet.png", odd_samples(60)
    settings = {"text.usetex": True, "font.size": 30, "savefig.dpi": 30, "savefig.bbox": "tight", "text.color": "red"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_contact_sheet(samples, file, title="t " * 500)
        first = file.read_bytes()
        with matplotlib.rc_context(settings):
            draw_contact_sheet(samples, str(file), title="t " * 500)
    assert file.read_bytes() == first
    with Image.open(file) as image:
        assert (image.format, image.width) == ("PNG", 8 * 340)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["sheet.png"]
