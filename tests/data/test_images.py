import io
import random

import numpy as np
import pytest
from PIL import Image

from vl_plugins.data.images import inspect_image, resize_image
from vl_plugins.errors import UserError


def encode(image_format="PNG", size=(5, 4), mode="RGB", **options):
    stream = io.BytesIO()
    noise = random.Random(0).randbytes(size[0] * size[1])
    Image.frombytes("L", size, noise).convert(mode).save(stream, format=image_format, **options)
    return stream.getvalue()


def decode(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (5, 4), "red")]}


def damage(data, start, replacement=bytes(10)):
    return data[:start] + replacement + data[start + len(replacement) :]


UNUSABLE = {
    "empty": (b"", "the file is not an image"),
    "text": (b"a cat on a mat", "the file is not an image"),
    "truncated JPEG": (encode("JPEG", size=(80, 80))[:-200], "the image is damaged: .*truncated"),
    "JPEG cut in the header": (encode("JPEG", size=(80, 80))[:100], "the image is damaged|not an image"),
    "truncated PNG": (encode("PNG", size=(80, 80))[:2000], "the image is damaged"),
    "damaged PNG that ends as a JPEG": (damage(encode("PNG", size=(60, 60)), 60) + b"\xff\xd9", "the image is damaged"),
    "GIF": (encode("GIF", mode="L"), "the format GIF is not supported; supported are JPEG, PNG and WebP"),
    "16 bits of gray": (encode("PNG", mode="I;16"), r"more than 8 bits per channel \(I(;16)?\); convert them"),
}

USABLE = {
    "JPEG": (encode("JPEG"), ("jpg", 5, 4)),
    "CMYK JPEG": (encode("JPEG", mode="CMYK"), ("jpg", 5, 4)),
    "JPEG padded with zeros": (encode("JPEG") + bytes(20), ("jpg", 5, 4)),
    "MPO": (encode("MPO", **FRAMES), ("jpg", 5, 4)),
    "WebP": (encode("WEBP"), ("webp", 5, 4)),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_unusable_images(kind):
    data, message = UNUSABLE[kind]
    for check in (inspect_image, lambda data: inspect_image(data, decode=False), lambda data: resize_image(data, 2)):
        with pytest.raises(UserError, match=message) as raised:
            check(data)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", USABLE)
def test_usable_images(kind):
    data, info = USABLE[kind]
    assert inspect_image(data) == inspect_image(data, decode=False) == info


def test_without_decoding_a_whole_jpeg_is_read_up_to_its_pixels_only(monkeypatch):
    def fail(image):
        raise AssertionError("decoded")

    data = encode("JPEG", size=(80, 80))
    monkeypatch.setattr("PIL.JpegImagePlugin.JpegImageFile.load", fail)
    assert inspect_image(data, decode=False) == ("jpg", 80, 80)
    for call in (lambda: inspect_image(data), lambda: inspect_image(data[:-1], decode=False)):
        with pytest.raises(UserError, match="decoded"):
            call()


def test_small_enough_images_stay_byte_for_byte():
    data = encode("JPEG", size=(60, 40))
    for shorter_side in (40, 41, 1000):
        assert resize_image(data, shorter_side) == data


@pytest.mark.parametrize(
    ("size", "shorter_side", "expected"),
    [((60, 40), 20, (30, 20)), ((40, 60), 20, (20, 30)), ((61, 40), 20, (30, 20)), ((300, 2), 1, (150, 1))],
)
def test_size_after_a_resize(size, shorter_side, expected):
    for image_format, extension in (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")):
        data = resize_image(encode(image_format, size=size), shorter_side)
        assert inspect_image(data) == (extension, *expected)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
def test_a_resize_is_antialiased_bicubic(image_format):
    data = encode(image_format, size=(64, 48))
    resized = resize_image(data, 24, quality=100)
    expected = Image.open(io.BytesIO(data)).convert("RGB").resize((32, 24), Image.Resampling.BICUBIC)
    largest = 0 if image_format == "PNG" else 6
    assert np.abs(decode(resized).astype(int) - np.asarray(expected)).max() <= largest


@pytest.mark.parametrize(
    ("image_format", "mode", "options", "expected"),
    [
        ("PNG", "1", {}, "L"),
        ("PNG", "LA", {}, "RGBA"),
        ("PNG", "P", {}, "RGB"),
        ("PNG", "P", {"transparency": 0}, "RGBA"),
        ("PNG", "RGBA", {}, "RGBA"),
        ("WEBP", "RGBA", {}, "RGBA"),
        ("JPEG", "L", {}, "L"),
        ("JPEG", "CMYK", {}, "RGB"),
    ],
)
def test_colors_after_a_resize(image_format, mode, options, expected):
    # The right half is opaque; the left half can be transparent.
    color = (255, 255, 255) if mode == "1" else (200, 40, 90)
    if mode == "P":
        picture = Image.new("P", (40, 20), 1)
        picture.putpalette([0, 0, 0, *color])
        picture.paste(0, (0, 0, 20, 20))
    else:
        picture = Image.new("RGBA", (40, 20), (*color, 255))
        picture.paste((*color, 0), (0, 0, 20, 20))
        picture = (picture if expected == "RGBA" else picture.convert("RGB")).convert(mode)
    stream = io.BytesIO()
    picture.save(stream, image_format, **options)
    data = resize_image(stream.getvalue(), 10, quality=100)
    with Image.open(io.BytesIO(data)) as image:
        assert image.mode == expected
        assert image.has_transparency_data == (expected == "RGBA")
        assert image.convert("RGBA").getpixel((3, 5))[3] == (0 if expected == "RGBA" else 255)
    difference = decode(data)[5, 15].astype(int) - decode(stream.getvalue())[10, 30]
    assert np.abs(difference).max() <= 4


def test_quality_and_metadata():
    data = encode("JPEG", size=(200, 200), comment=b"a comment", icc_profile=b"a profile", dpi=(300, 300))
    sizes = [len(resize_image(data, 100, quality=quality)) for quality in (30, 80, 95)]
    assert sizes == sorted(set(sizes))
    resized = resize_image(data, 100)
    assert len(resized) == sizes[-1]
    assert b"a comment" in data
    assert b"a comment" not in resized
    assert b"a profile" not in resized
    assert resize_image(data, 100) == resized
