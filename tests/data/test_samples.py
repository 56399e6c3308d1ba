"""Which image files readers of shards can use."""

import contextlib
import io
import random
import tarfile

import PIL
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.helpers.pictures import EPS, VAST, fail_to_decode, vast_png
from vl_plugins.data.samples import decode, inspect_image, parse_sample, scan
from vl_plugins.errors import UserError


def encode(image_format="PNG", size=(5, 4), mode="RGB", **options):
    stream = io.BytesIO()
    noise = random.Random(0).randbytes(size[0] * size[1])
    Image.frombytes("L", size, noise).convert(mode).save(stream, format=image_format, **options)
    return stream.getvalue()


FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (5, 4), "red")]}
NO_IMAGE = "the file is not an image in JPEG, PNG or WebP format"
PNG = encode("PNG", size=(60, 60))

UNUSABLE = {
    "empty": (b"", NO_IMAGE),
    "text": (b"a cat on a mat", NO_IMAGE),
    "GIF": (encode("GIF", mode="L"), NO_IMAGE),
    "EPS": (EPS, NO_IMAGE),
    "truncated JPEG": (encode("JPEG", size=(80, 80))[:-200], "the image is damaged: .*truncated"),
    "JPEG cut in the header": (encode("JPEG", size=(80, 80))[:100], f"the image is damaged|{NO_IMAGE}"),
    "truncated PNG": (PNG[:2000], "the image is damaged"),
    "damaged PNG that ends as a JPEG": (PNG[:60] + bytes(10) + PNG[70:] + b"\xff\xd9", "the image is damaged"),
    "16 bits of gray": (encode("PNG", mode="I;16"), r"more than 8 bits per channel \(I(;16)?\); convert them"),
}

USABLE = {
    "JPEG": (encode("JPEG"), ("jpg", 5, 4)),
    "CMYK JPEG": (encode("JPEG", mode="CMYK"), ("jpg", 5, 4)),
    "JPEG padded with zeros": (encode("JPEG") + bytes(20), ("jpg", 5, 4)),
    "MPO": (encode("MPO", **FRAMES), ("jpg", 5, 4)),
    "WebP": (encode("WEBP"), ("webp", 5, 4)),
}


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize(("data", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_images(data, message, decode):
    with pytest.raises(UserError, match=message):
        inspect_image(data, decode=decode)


@pytest.mark.parametrize(("data", "facts"), USABLE.values(), ids=USABLE)
def test_usable_images(data, facts):
    assert inspect_image(data) == inspect_image(data, decode=False) == facts


def test_without_decoding_a_whole_jpeg_is_read_up_to_its_pixels_only(monkeypatch):
    def fail(image):
        raise AssertionError("decoded")

    data = encode("JPEG", size=(80, 80))
    monkeypatch.setattr("PIL.JpegImagePlugin.JpegImageFile.load", fail)
    assert inspect_image(data, decode=False) == ("jpg", 80, 80)
    for call in (lambda: inspect_image(data), lambda: inspect_image(data[:-1], decode=False)):
        with pytest.raises(UserError, match="decoded"):
            call()


@pytest.mark.filterwarnings("error")
def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch):
    fail_to_decode(monkeypatch)
    data = encode("PNG", size=(50, 40))
    for use in (inspect_image, lambda data, **options: decode({"png": data}, **options)):
        with pytest.raises(UserError, match=rf"^the image has {VAST}, more than max_image_pixels 89,000,000$"):
            use(vast_png())
        with pytest.raises(UserError, match=r"^the image has 50 x 40 pixels, more than max_image_pixels 1,999$"):
            use(data, max_image_pixels=1999)
        for limit in (2000, 0):
            with pytest.raises((UserError, AssertionError), match=r"decoded$"):
                use(data, max_image_pixels=limit)


@pytest.mark.filterwarnings("error")
def test_the_limit_does_not_depend_on_that_of_pil(monkeypatch):
    """PIL warns beyond its limit, and refuses twice as many pixels."""
    for limit in (20, 1):
        monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", limit)
        for file_format, extension in (("PNG", "png"), ("JPEG", "jpg")):
            data = encode(file_format, size=(6, 5))
            assert inspect_image(data, max_image_pixels=0) == (extension, 6, 5)
            assert decode({extension: data}, max_image_pixels=30).size == (6, 5)


@pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="earlier versions of Pillow have no such limit")
def test_an_image_too_large_for_pil_is_not_called_damaged(monkeypatch):
    """WebP, even without a limit of ours."""
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 1)
    with pytest.raises(UserError, match=r"^the image is too large for PIL: "):
        inspect_image(encode("WEBP"), max_image_pixels=0)


FORMATS = {"pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT, "ustar": tarfile.USTAR_FORMAT}


@given(
    key=st.sampled_from(["a", "00/b.c", "sub/folder/d", "\u00fc", "k" * 97, "k" * 150, "f/" * 60 + "n", "__x__"]),
    extensions=st.lists(st.sampled_from(["jpg", "JPG", "txt", "json", "seg.png", "cls"]), min_size=1, max_size=4),
    sizes=st.lists(st.sampled_from([0, 1, 511, 512, 513, 2000]), min_size=4, max_size=4),
    kind=st.sampled_from(sorted(FORMATS)),
    damage=st.none() | st.tuples(st.integers(0, 2000), st.integers(1, 255)) | st.integers(-600, -1),
)
def test_a_sample_is_what_tarfile_finds(key, extensions, sizes, kind, damage):
    """Headers that are read by hand: long names, other formats, damage, and files that belong to no sample."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=FORMATS[kind]) as archive:
        for extension, size in zip(extensions, sizes, strict=False):
            member = tarfile.TarInfo(f"{key}.{extension}")
            member.size = size
            with contextlib.suppress(ValueError):  # too long for ustar
                archive.addfile(member, io.BytesIO(bytes([size % 251]) * size))
        end = archive.offset
    data = bytearray(stream.getvalue()[:end])
    if isinstance(damage, int):
        del data[damage:]
    elif damage is not None and data:
        place, change = damage
        data[place % len(data)] ^= change
    results = []
    for parse in (parse_sample, parse_by_tarfile):
        try:
            sample = parse(bytes(data))
            results.append((sample.key, sample.members))
        except Exception:
            results.append("error")
    assert results[0] == results[1]


def parse_by_tarfile(data):
    (sample,) = scan(io.BytesIO(data + bytes(512)))
    return sample
