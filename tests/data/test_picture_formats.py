"""Which pictures readers of shards can use, and what the writer makes of others."""

import io
import random
import struct
import zlib

import numpy as np
import PIL
import pytest
from PIL import ExifTags, Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize as resize_as_torchvision

from tests.helpers.pictures import EPS, VAST, fail_to_decode, replace_ghostscript, vast_png
from vl_plugins.data.picture_formats import Picture, inspect_image, prepare_picture
from vl_plugins.data.samples import decode
from vl_plugins.errors import UserError


def encode(image_format="PNG", size=(5, 4), mode="RGB", **options):
    stream = io.BytesIO()
    noise = random.Random(0).randbytes(size[0] * size[1])
    Image.frombytes("L", size, noise).convert(mode).save(stream, format=image_format, **options)
    return stream.getvalue()


def save(image, image_format, **options):
    stream = io.BytesIO()
    image.save(stream, format=image_format, **options)
    return stream.getvalue()


def open_any(data):
    """Return an opened picture, as another program would read it."""
    return Image.open(io.BytesIO(data), formats=["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])


FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (5, 4), "red")]}
MAJOR = int(PIL.__version__.split(".")[0])
WITH_OWN_LIMIT = pytest.mark.skipif(MAJOR < 13, reason="earlier versions of Pillow have no such limit")
NO_IMAGE = "the file is not an image in JPEG, PNG or WebP format"
HINT = r"--convert \(convert= of write_shards\) makes it JPEG or PNG"
PNG = encode("PNG", size=(60, 60))

UNUSABLE = {
    "empty": (b"", NO_IMAGE),
    "text": (b"a cat on a mat", NO_IMAGE),
    "GIF": (encode("GIF", mode="L"), f"{NO_IMAGE}, but probably GIF; {HINT}"),
    "EPS": (EPS, NO_IMAGE),
    "truncated JPEG": (encode("JPEG", size=(80, 80))[:-200], "the image is damaged: .*truncated"),
    "JPEG cut in the header": (encode("JPEG", size=(80, 80))[:100], f"the image is damaged|{NO_IMAGE}"),
    "truncated PNG": (PNG[:2000], "the image is damaged"),
    "damaged PNG that ends as a JPEG": (PNG[:60] + bytes(10) + PNG[70:] + b"\xff\xd9", "the image is damaged"),
    "16 bits of gray": (encode("PNG", mode="I;16"), rf"more than 8 bits per channel \(I(;16)?\); {HINT}"),
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


@WITH_OWN_LIMIT
def test_an_image_too_large_for_pil_is_not_called_damaged(monkeypatch):
    """WebP, even without a limit of ours."""
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 1)
    with pytest.raises(UserError, match=r"^the image is too large for PIL: "):
        inspect_image(encode("WEBP"), max_image_pixels=0)


def colors(size=(40, 30), mode="RGB"):
    """Return a picture of smooth colors."""
    bands = [Image.linear_gradient("L"), Image.radial_gradient("L"), Image.linear_gradient("L").rotate(90)]
    return Image.merge("RGB", bands).resize(size).convert(mode)


def see_through():
    """Return a picture whose transparent pixels have a color of their own."""
    picture = colors(mode="RGBA")
    picture.putalpha(Image.linear_gradient("L").resize(picture.size).point(lambda value: 255 * (value > 99)))
    return picture


TIFF_BITS, PHOTOMETRIC, EXTRA_SAMPLES = 258, 262, 338  # tags of TIFF

CONVERTIBLE = {
    "GIF": save(colors(), "GIF"),
    "gray GIF": save(colors(mode="L"), "GIF"),
    "animated GIF": save(colors(), "GIF", save_all=True, append_images=[Image.new("RGB", (40, 30), "red")]),
    "transparent GIF": save(see_through(), "GIF"),
    "BMP": save(colors(), "BMP"),
    "BMP of 1 bit": save(colors(mode="1"), "BMP"),
    "TIFF": save(colors(), "TIFF"),
    "TIFF of several pages": save(
        colors(), "TIFF", compression="tiff_lzw", save_all=True, append_images=[Image.new("RGB", (40, 30))]
    ),
    "CMYK TIFF": save(colors(mode="CMYK"), "TIFF"),
    "transparent TIFF": save(see_through(), "TIFF"),
    "TIFF of 1 bit": save(colors(mode="1"), "TIFF", compression="group4"),
    "TIFF with a palette": save(colors(mode="P"), "TIFF"),
}


class TestConverting:
    @pytest.mark.parametrize("data", CONVERTIBLE.values(), ids=CONVERTIBLE)
    def test_other_formats_become_what_readers_would_see(self, data):
        expected = open_any(data).convert("RGB")
        picture = prepare_picture(data, convert="png")
        assert (picture.extension, picture.width, picture.height) == ("png", 40, 30)
        assert decode({"png": picture.data}).tobytes() == expected.tobytes()
        assert inspect_image(picture.data) == ("png", 40, 30)

        picture = prepare_picture(data, convert="jpeg")
        assert inspect_image(picture.data) == (picture.extension, 40, 30) == ("jpg", picture.width, picture.height)
        as_jpeg = save(expected.convert("L") if open_any(data).mode in ("1", "L") else expected, "JPEG", quality=95)
        assert picture.data == as_jpeg

    def test_transparency_stays_in_png(self):
        for image_format in ("GIF", "TIFF"):
            data = save(see_through(), image_format)
            written = open_any(prepare_picture(data, convert="png").data)
            assert written.convert("RGBA").getchannel("A").tobytes() == see_through().getchannel("A").tobytes()

    @pytest.mark.skipif(MAJOR < 13, reason="earlier versions of Pillow cannot read such a file")
    def test_gray_that_is_multiplied_by_its_transparency(self):
        gray = colors(mode="LA")
        gray.putalpha(99)
        tag = struct.Struct("<HHIH")
        as_factor = tag.pack(EXTRA_SAMPLES, 3, 1, 1)
        data = save(gray, "TIFF").replace(tag.pack(EXTRA_SAMPLES, 3, 1, 2), as_factor)
        assert open_any(data).mode == "La"
        written = open_any(prepare_picture(data, convert="png").data)
        assert written.convert("LA").getchannel("A").getextrema() == (99, 99)

    @pytest.mark.parametrize("convert", [None, "jpeg", "png"])
    @pytest.mark.parametrize(("data", "facts"), USABLE.values(), ids=USABLE)
    def test_what_readers_take_keeps_its_bytes(self, data, facts, convert):
        for resize in (None, 4, 100):
            assert prepare_picture(data, convert=convert, resize=resize) == Picture(facts[0], data, *facts[1:])

    def test_16_bits_of_color_are_what_readers_take(self):
        """They keep the upper 8 bits."""
        rows = b"".join(b"\0" + bytes(range(30)) for _ in range(4))
        parts = [b"\x89PNG\r\n\x1a\n"]
        header = struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0)
        for name, content in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
            checksum = zlib.crc32(name + content)
            parts.append(struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum))
        data = b"".join(parts)
        assert prepare_picture(data, convert="jpeg") == Picture("png", data, 5, 4)

    @pytest.mark.parametrize(
        ("bits", "image_format", "options"),
        [
            (16, "PNG", {}),
            (16, "TIFF", {}),
            (16, "TIFF", {"compression": "tiff_lzw"}),
            (16, "big-endian TIFF", {}),
            (16, "big-endian TIFF", {"compression": "tiff_lzw"}),
            (16, "white-is-zero TIFF", {}),
            (12, "12-bit TIFF", {}),
        ],
    )
    def test_gray_of_more_bits_is_scaled(self, bits, image_format, options):
        """Not cut off, which would make nearly all of it white."""
        shades = np.arange(256, dtype=np.uint8).reshape(8, 32)
        levels = (shades.astype("<u2") << (bits - 8)) + 7
        if image_format == "white-is-zero TIFF":
            options = {"tiffinfo": {PHOTOMETRIC: 0}}
            levels = 65535 - levels
        if image_format == "12-bit TIFF":
            data = twelve_bit_tiff(levels)
        elif image_format == "big-endian TIFF":
            data = save(Image.frombytes("I;16B", (32, 8), levels.astype(">u2").tobytes()), "TIFF", **options)
        else:
            data = save(Image.frombytes("I;16", (32, 8), levels.tobytes()), image_format.split()[-1], **options)
        written = open_any(prepare_picture(data, convert="png").data)
        assert written.mode == "L"
        np.testing.assert_array_equal(np.asarray(written), shades)
        written = open_any(prepare_picture(data, convert="jpeg").data)
        assert np.abs(np.asarray(written).astype(int) - shades).max() < 6
        assert prepare_picture(data, convert="png", resize=4).width == 16

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"a cat on a mat", "the file is not an image in JPEG, PNG, WebP, GIF, BMP or TIFF format"),
            (b"", "the file is not an image in JPEG, PNG, WebP, GIF, BMP or TIFF format"),
            (b"BM is a bitmap", "the image is damaged"),
            (save(colors(), "GIF")[:400], "the image is damaged"),
            (save(colors(), "TIFF")[:400], "the image is damaged"),
            (save(colors(), "BMP")[:400], "the image is damaged"),
            (
                save(colors(mode="F"), "TIFF"),
                r"^its pixels are in the mode F of PIL, which is not converted; write RGB of 8 bits$",
            ),
            (save(colors(mode="I"), "TIFF"), r"^its pixels are in the mode I of PIL"),
            (save(Image.new("LAB", (5, 4)), "TIFF"), r"^its pixels are in the mode LAB of PIL"),
            (save(Image.new("RGB", (70_000, 1)), "BMP"), "^the image cannot be written as JPEG: "),
        ],
    )
    def test_what_cannot_be_converted(self, data, message):
        with pytest.raises(UserError, match=message):
            prepare_picture(data, convert="jpeg")

    def test_no_program_is_started(self, monkeypatch, tmp_path):
        mark = replace_ghostscript(monkeypatch, tmp_path)
        with pytest.raises(UserError, match="is not an image in"):
            prepare_picture(EPS, convert="png", resize=3)
        assert not mark.exists()

    @pytest.mark.parametrize("resize", [None, 3])
    @pytest.mark.parametrize(("data", "message"), UNUSABLE.values(), ids=UNUSABLE)
    def test_without_it_nothing_else_can_be_used(self, data, message, resize):
        with pytest.raises(UserError, match=message):
            prepare_picture(data, resize=resize)

    @pytest.mark.parametrize("name", ["GIF", "BMP", "TIFF"])
    def test_the_error_names_the_option(self, name):
        with pytest.raises(UserError, match=f"PNG or WebP format, but probably {name}; {HINT}"):
            prepare_picture(CONVERTIBLE[name])

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("name", ["GIF", "BMP", "TIFF"])
    def test_too_many_pixels_are_refused_before_they_are_decoded(self, monkeypatch, name):
        def fail(*arguments):
            raise AssertionError("decoded")

        monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
        for options in ({"convert": "png"}, {"convert": "png", "resize": 5}):
            with pytest.raises(UserError, match=r"^the image has 40 x 30 pixels, more than max_image_pixels 1,199$"):
                prepare_picture(CONVERTIBLE[name], max_image_pixels=1199, **options)
            with pytest.raises(UserError, match="decoded"):
                prepare_picture(CONVERTIBLE[name], max_image_pixels=1200, **options)

    @WITH_OWN_LIMIT
    def test_a_tiff_too_large_for_pil_is_not_called_damaged(self, monkeypatch):
        monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 1)
        with pytest.raises(UserError, match=r"^the image is too large for PIL: "):
            prepare_picture(CONVERTIBLE["TIFF"], convert="png", max_image_pixels=0)


# How a picture is turned before an orientation says how to turn it back.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
SIZES = [(90, 60), (61, 97), (50, 50), (200, 41)]
MODES = {"1": ["PNG"], "L": ["PNG", "JPEG"], "LA": ["PNG"], "P": ["PNG"], "RGB": ["PNG", "JPEG", "WEBP"]}
MODES |= {"RGBA": ["PNG", "WEBP"], "CMYK": ["JPEG"]}


class TestResizing:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("mode", MODES)
    def test_it_is_torchvisions(self, mode, size):
        """As a model's transform would do: the shorter side, bicubic with antialiasing."""
        for image_format in MODES[mode]:
            data = save(colors(size, mode), image_format)
            expected = resize_as_torchvision(decode({"jpg": data}), 40, InterpolationMode.BICUBIC)
            picture = prepare_picture(data, resize=40)
            assert (picture.width, picture.height) == expected.size == decode({"jpg": picture.data}).size
            if image_format == "PNG":
                assert picture.extension == "png"
                assert decode({"png": picture.data}).tobytes() == expected.tobytes()
            else:
                assert picture.extension == "jpg"
                assert picture.data == save(expected if mode != "L" else expected.convert("L"), "JPEG", quality=95)

    def test_colors_under_transparency_stay(self):
        """Readers drop transparency, and would see something else."""
        data = save(see_through(), "PNG")
        expected = resize_as_torchvision(decode({"png": data}), 20, InterpolationMode.BICUBIC)
        for convert in (None, "png"):
            picture = prepare_picture(data, resize=20, convert=convert)
            assert decode({"png": picture.data}).tobytes() == expected.tobytes()
            alpha = np.asarray(open_any(picture.data).getchannel("A"))
            assert (alpha[0].max(), alpha[-1].min()) == (0, 255)
        picture = prepare_picture(data, resize=20, convert="jpeg")
        assert picture.data == save(expected, "JPEG", quality=95)

    def test_it_never_enlarges(self):
        """And a side as long as asked for is not encoded again."""
        for size in ((40, 400), (39, 50), (1, 1)):
            data = save(colors(size), "JPEG")
            assert prepare_picture(data, resize=40) == Picture("jpg", data, *size)
            picture = prepare_picture(save(colors(size), "GIF"), convert="png", resize=40)
            assert (picture.extension, picture.width, picture.height) == ("png", *size)

    @pytest.mark.parametrize("orientation", STORED)
    @pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF", "packed TIFF"])
    def test_it_turns_as_viewers_do(self, image_format, orientation):
        shown = colors((80, 60))
        stored = shown if STORED[orientation] is None else shown.transpose(STORED[orientation])
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        options = {"compression": "tiff_lzw"} if image_format == "packed TIFF" else {}
        data = save(stored, image_format.split()[-1], exif=exif, **options)
        for resize, size in ((30, (40, 30)), (None, (80, 60))):
            if resize is None and "TIFF" not in image_format:
                continue
            picture = prepare_picture(data, convert="png", resize=resize)
            assert (picture.width, picture.height) == size == inspect_image(picture.data)[1:]
            difference = np.asarray(decode({"png": picture.data})).astype(int) - np.asarray(shown.resize(size))
            assert np.abs(difference).mean() < 3
            assert dict(open_any(picture.data).getexif()) == {}

    @pytest.mark.parametrize(
        ("image_format", "convert", "extension"),
        [
            ("JPEG", None, "jpg"),
            ("JPEG", "png", "png"),
            ("PNG", None, "png"),
            ("PNG", "jpeg", "jpg"),
            ("WEBP", None, "jpg"),
            ("WEBP", "png", "png"),
            ("GIF", "png", "png"),
            ("TIFF", "jpeg", "jpg"),
        ],
    )
    def test_formats(self, image_format, convert, extension):
        picture = prepare_picture(save(colors((90, 60)), image_format), convert=convert, resize=30)
        assert (picture.extension, picture.width, picture.height) == (extension, 45, 30)
        assert inspect_image(picture.data) == (extension, 45, 30)

    def test_the_first_frame(self):
        options = {"save_all": True, "append_images": [Image.new("RGB", (40, 30), "red")]}
        for image_format in ("PNG", "WEBP", "GIF"):
            data = save(colors(), image_format, lossless=True, **options)
            picture = prepare_picture(data, resize=15, convert="png")
            expected = resize_as_torchvision(open_any(data).convert("RGB"), 15, InterpolationMode.BICUBIC)
            written = open_any(picture.data)
            assert getattr(written, "n_frames", 1) == 1
            assert written.convert("RGB").tobytes() == expected.tobytes()

    def test_no_metadata_remain(self):
        """A profile of CMYK would be wrong in a picture of RGB."""
        for image_format, options in (("JPEG", {"comment": b"by me"}), ("PNG", {}), ("GIF", {"comment": b"by me"})):
            data = save(colors(), image_format, icc_profile=b"profile", dpi=(72, 72), **options)
            for convert in ("jpeg", "png"):
                written = open_any(prepare_picture(data, resize=15, convert=convert).data)
                assert written.info.keys() <= {"jfif", "jfif_version", "jfif_unit", "jfif_density"}

    def test_damaged_pictures(self):
        for data in (save(colors((80, 80)), "JPEG")[:-200], PNG[:2000]):
            with pytest.raises(UserError, match="the image is damaged"):
                prepare_picture(data, resize=20)

    def test_too_many_pixels(self, monkeypatch):
        fail_to_decode(monkeypatch)
        with pytest.raises(UserError, match=rf"^the image has {VAST}, more than max_image_pixels 89,000,000$"):
            prepare_picture(vast_png(), resize=20)


def twelve_bit_tiff(levels):
    """Return a gray TIFF of 12 bits, two pixels in three bytes, which PIL reads but does not write."""
    packed = bytearray()
    for first, second in levels.reshape(-1, 2).tolist():
        packed += (first << 12 | second).to_bytes(3, "big")
    height, width = levels.shape
    entries = [(256, width), (257, height), (TIFF_BITS, 12), (259, 1), (PHOTOMETRIC, 1), (273, 8 + 2 + 9 * 12 + 4)]
    entries += [(277, 1), (278, height), (279, len(packed))]
    directory = struct.pack("<H", len(entries))
    for tag, value in entries:
        directory += struct.pack("<HHII", tag, 4 if tag in (273, 279) else 3, 1, value)
    return b"II*\0" + struct.pack("<I", 8) + directory + struct.pack("<I", 0) + bytes(packed)
