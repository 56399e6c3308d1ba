import io
import itertools
import json
import random
import statistics
import tarfile
import zlib
from collections import Counter
from fractions import Fraction
from math import comb
from types import SimpleNamespace

import pytest
from PIL import Image

from vl_plugins.data.annotations import CaptionedImage
from vl_plugins.data.captions import normalize_caption
from vl_plugins.data.shards import write_shards
from vl_plugins.data.statistics import Place, Range, read_place, shard_statistics, spread_places
from vl_plugins.data.storage import Folder
from vl_plugins.utils.errors import UserError

WORDS = ("a", "A", "dog", "Dog ", "cat", "cow")


def encode_image(size, color=0, image_format="PNG"):
    stream = io.BytesIO()
    Image.new("L", size, color).save(stream, image_format)
    return stream.getvalue()


def write_archive(file, samples):
    """Write samples as lists of name and content; strings are encoded, and objects become JSON."""
    with tarfile.open(file, "w") as tar:
        for name, content in samples:
            if not isinstance(content, bytes):
                content = (content if isinstance(content, str) else json.dumps(content)).encode()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture(scope="session")
def collection(tmp_path_factory):
    """Shards of 41 images with 1 to 4 short captions, some pictures twice or three times, and what is in them."""
    rng = random.Random(0)
    root, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("collection")
    contents = [encode_image((rng.randint(20, 900), rng.randint(20, 300)), shade) for shade in range(30)]
    # Of the same size and, but for the first, with the same end: only the whole tells these apart.
    long = [encode_image((9, 9), 1) + bytes([value]) + bytes(9000) for value in range(3)]
    chosen = [rng.choice(contents) for _ in range(36)] + [long[0], long[1], long[2], long[1], long[1]]
    images = []
    for index, content in enumerate(chosen):
        (root / f"{index}.png").write_bytes(content)
        captions = tuple(" ".join(rng.choices(WORDS, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 4)))
        ids = tuple(10 * index + number for number in range(len(captions)))
        images.append(CaptionedImage(index, f"{index}.png", captions, ids, "train", "set", f"{index}.png"))
    entries = write_shards(images, root, out, samples_per_shard=7, source={"format": "table"})
    return SimpleNamespace(folder=out, contents=chosen, images=images, entry=entries["set-train"])


def expected_pairs(collides, number, batch_size):
    """Go through all batches of two, as every pair of images is as likely as any other in a larger one."""
    pairs = list(itertools.combinations(range(number), 2))
    assert len(pairs) == comb(number, 2)
    return comb(min(batch_size, number), 2) * sum(collides(*pair) for pair in pairs) / len(pairs)


@pytest.mark.parametrize("batch_size", [1, 7, 500])
def test_repeated_captions(collection, batch_size):
    texts = [[normalize_caption(caption) for caption in image.captions] for image in collection.images]

    def collides(first, second):
        drawn = list(itertools.product(texts[first], texts[second]))
        return Fraction(sum(one == other for one, other in drawn), len(drawn))

    images_of = {text: {index for index, of in enumerate(texts) if text in of} for text in itertools.chain(*texts)}
    repeated = {text for text, images in images_of.items() if len(images) > 1}
    number = sum(text in repeated for text in itertools.chain(*texts))
    found = shard_statistics(collection.folder, batch_size=batch_size)["set-train"].repeated_captions
    assert found.expected_pairs == pytest.approx(float(expected_pairs(collides, 41, batch_size)), rel=1e-12)
    assert 0 < len(repeated) < len(images_of)
    assert (found.number, found.different, found.batch_size) == (number, len(repeated), min(batch_size, 41))
    assert found.share == pytest.approx(number / sum(map(len, texts)))
    most = max(map(len, images_of.values()))
    assert (len(images_of[found.example]), found.example_images) == (most, most)


@pytest.mark.parametrize("batch_size", [1, 8, 500])
def test_repeated_pictures(collection, batch_size):
    contents = collection.contents
    counts = Counter(contents)
    repeated = {content for content, number in counts.items() if number > 1}
    found = shard_statistics(collection.folder, batch_size=batch_size)["set-train"].repeated_pictures
    expected = expected_pairs(lambda first, second: contents[first] == contents[second], 41, batch_size)
    assert found.expected_pairs == pytest.approx(expected, rel=1e-12)
    assert 1 < len(repeated) < len(counts)
    assert (found.number, found.different) == (sum(counts[content] for content in repeated), len(repeated))
    assert found.share == pytest.approx(found.number / 41)
    assert found.example_images == max(counts.values())
    most = next(content for content in contents if counts[content] == found.example_images)
    assert counts[contents[int(found.example[-8:])]] == counts[most]
    assert contents.index(contents[int(found.example[-8:])]) == int(found.example[-8:])


def test_expectation_is_that_of_random_batches(collection):
    rng = random.Random(1)
    texts = [[normalize_caption(caption) for caption in image.captions] for image in collection.images]
    trials, total = 4000, 0
    for _ in range(trials):
        drawn = [rng.choice(texts[index]) for index in rng.sample(range(41), 10)]
        total += sum(comb(number, 2) for number in Counter(drawn).values())
    found = shard_statistics(collection.folder, batch_size=10)["set-train"].repeated_captions
    assert total / trials == pytest.approx(found.expected_pairs, rel=0.05)


def test_numbers(collection):
    found = shard_statistics(collection.folder)["set-train"]
    captions = [caption for image in collection.images for caption in image.captions]
    sizes = [Image.open(io.BytesIO(content)).size for content in collection.contents]
    assert (found.shards, found.images, found.captions, found.unusable, found.rejected) == (6, 41, len(captions), 0, 0)
    assert found.bytes == sum(file.stat().st_size for file in collection.folder.glob("*.tar"))
    assert found.source == {"format": "table"}
    assert found.captions_per_image == Counter(len(image.captions) for image in collection.images)
    assert list(found.captions_per_image) == sorted(found.captions_per_image)
    for numbers, values in (
        (found.words, [len(caption.split()) for caption in captions]),
        (found.widths, [width for width, _ in sizes]),
        (found.heights, [height for _, height in sizes]),
    ):
        assert numbers == Range(min(values), statistics.median(values), max(values))
    shorter = [min(size) for size in sizes]
    edges = (0, 64, 128, 224, 336, 512, 768, 1024, 10**9)
    bins = {first: sum(first <= side < end for side in shorter) for first, end in itertools.pairwise(edges)}
    assert found.shorter_sides == bins


@pytest.mark.parametrize("widths", [[5], [5, 7], [7, 5, 6]])
def test_median(tmp_path, widths):
    write_archive(
        tmp_path / "a.tar",
        [
            (f"{index}.{extension}", content)
            for index, width in enumerate(widths)
            for extension, content in (("png", encode_image((width, 3))), ("txt", "a"))
        ],
    )
    found = shard_statistics(tmp_path)["a"].widths
    assert found == Range(min(widths), statistics.median(widths), max(widths))


@pytest.mark.parametrize(("side", "first"), [(63, 0), (64, 64), (3000, 1024)])
def test_bins_of_the_shorter_side(tmp_path, side, first):
    samples = [
        ("0.png", encode_image((3001, side))),
        ("0.txt", "a"),
        ("1.png", encode_image((side, 3001))),
        ("1.txt", "b"),
    ]
    write_archive(tmp_path / "a.tar", samples)
    found = shard_statistics(tmp_path)["a"].shorter_sides
    assert {start: images for start, images in found.items() if images} == {first: 2}


def test_places(collection):
    places = shard_statistics(collection.folder)["set-train"].places
    assert len(places) == 41
    folder = Folder(collection.folder)
    for index in (0, 6, 7, 40):
        sample = read_place(folder, places[index])
        assert sample.key == f"set-train-{index:08d}"
        assert sample.picture == collection.contents[index]
        assert sample.captions == list(collection.images[index].captions)


@pytest.mark.parametrize(
    ("total", "number", "expected"),
    [
        (12, 3, [2, 6, 10]),
        (5, 5, [0, 1, 2, 3, 4]),
        (3, 12, [0, 1, 2]),
        (10, 1, [5]),
        (0, 4, []),
        (7, 3, [1, 3, 5]),
    ],
)
def test_spread(total, number, expected):
    places = [Place("a.tar", offset) for offset in range(total)]
    assert [place.offset for place in spread_places(places, number)] == expected


def test_memory_says_the_same(collection):
    folder = Folder("memory://test_statistics/shards")
    folder.make()
    for file in collection.folder.iterdir():
        with folder.write(file.name) as stream:
            stream.write(file.read_bytes())
    assert shard_statistics("memory://test_statistics/shards") == shard_statistics(collection.folder)


class CountedStream(io.BytesIO):
    """Notes how many bytes are read."""

    def __init__(self, data, numbers):
        super().__init__(data)
        self.numbers = numbers

    def read(self, size=-1):
        data = super().read(size)
        self.numbers.append(len(data))
        return data


@pytest.mark.parametrize("ends", [b"ab", b"aa"])
def test_whole_pictures_are_read_only_where_their_ends_are_the_same(tmp_path, monkeypatch, ends):
    samples = []
    for index, end in enumerate(ends):
        picture = encode_image((30, 20), 0, "JPEG") + bytes([index]) + bytes(1_000_000) + bytes([end])
        samples += [(f"{index}.jpg", picture), (f"{index}.txt", "a")]
    write_archive(tmp_path / "a.tar", samples)
    numbers = []
    monkeypatch.setattr(Folder, "open", lambda self, name: CountedStream(self.read(name), numbers))
    assert shard_statistics(tmp_path)["a"].repeated_pictures.number == 0
    assert sum(numbers) < 40_000 if ends == b"ab" else 2_000_000 < sum(numbers) < 2_040_000


def write_own(folder, samples, shard="set-train-000000.tar", **entry):
    """Write one shard and a manifest of it; return the folder."""
    folder.mkdir(exist_ok=True)
    write_archive(folder / shard, samples)
    keys = {name.partition(".")[0] for name, _ in samples}
    facts = {"samples": len(keys), "captions": 0, "bytes": 0, "sha256": ""}
    counts = {"images": len(keys), "captions": 0, "rejected": 0}
    captions = {"min": 1, "max": 1, "histogram": {}}
    shards = {"captions_per_image": captions, "shards": {shard: facts}}
    splits = {"set-train": {"source": {}, "options": {}, **counts, **shards, **entry}}
    (folder / "manifest.json").write_text(json.dumps({"splits": splits}))
    return folder


def record(image_id, captions=("a",), **more):
    return {"image_id": image_id, "captions": list(captions), "width": 5, "height": 4, **more}


def test_one_image_under_one_id_is_no_repeat(tmp_path):
    """Of four copies under two ids, four pairs of six collide."""
    picture = encode_image((5, 4))
    samples = []
    for index, image_id in enumerate((7, 7, "7", "7", 8)):
        samples += [(f"{index}.png", picture if index < 4 else b"other"), (f"{index}.json", record(image_id))]
    found = shard_statistics(write_own(tmp_path / "two", samples), batch_size=2)["set-train"].repeated_pictures
    assert (found.number, found.different, found.example_images) == (4, 1, 4)
    assert found.expected_pairs == pytest.approx(4 / 10)
    found = shard_statistics(write_own(tmp_path / "one", samples[:4]), batch_size=2)["set-train"].repeated_pictures
    assert (found.number, found.different, found.expected_pairs, found.example) == (0, 0, 0, None)


def test_picture_that_is_the_end_of_another_is_no_repeat(tmp_path):
    end = bytes(range(256)) * 16
    samples = [("0.png", end), ("0.json", record(0)), ("1.png", b"x" + end), ("1.json", record(1))]
    found = shard_statistics(write_own(tmp_path / "x", samples))["set-train"].repeated_pictures
    assert found.number == 0


def test_caption_twice_with_one_image_is_no_repeat(tmp_path):
    captions = (("a dog", "A dog"), ("cat", "cow"), ("Cat", "CAT"))
    samples = []
    for index, texts in enumerate(captions):
        samples += [(f"{index}.png", b"%d" % index), (f"{index}.json", record(index, texts))]
    found = shard_statistics(write_own(tmp_path / "x", samples), batch_size=3)["set-train"].repeated_captions
    assert (found.number, found.different, found.example, found.example_images) == (3, 1, "cat", 2)
    # One of two captions of the second image, and any of the third.
    assert found.expected_pairs == pytest.approx(1 / 2)


def test_sizes_are_those_of_the_json(tmp_path):
    samples = [("0.png", b"not decoded"), ("0.json", record(0)), ("1.png", b""), ("1.json", record(1, width="5"))]
    found = shard_statistics(write_own(tmp_path / "x", samples))["set-train"]
    assert (found.images, found.widths, found.heights) == (2, Range(5, 5, 5), Range(4, 4, 4))


def test_samples_that_cannot_be_used(tmp_path):
    samples = [
        ("0.png", b"0"),
        ("0.json", record(0)),
        ("1.json", record(1)),
        ("2.png", b"2"),
        ("2.json", b"{"),
        ("3.png", b"3"),
        ("3.json", record(3, captions=[" ", 5])),
        ("4.png", b"4"),
        ("4.json", record(4) | {"captions": "a"}),
        ("5.png", b"5"),
        ("5.txt", b"\xff"),
    ]
    found = shard_statistics(write_own(tmp_path / "x", samples))["set-train"]
    assert (found.images, found.captions, found.unusable, len(found.places)) == (1, 1, 5, 6)
    folder = Folder(tmp_path / "x")
    assert [read_place(folder, place).key for place in found.places] == list("012345")
    assert read_place(folder, found.places[1]) == ("1", None, ["a"])
    assert read_place(folder, found.places[2]) == ("2", b"2", [])


def test_split_without_usable_samples(tmp_path):
    found = shard_statistics(write_own(tmp_path / "x", [("0.txt", "a")]))["set-train"]
    assert (found.images, found.words, found.widths, found.unusable) == (0, None, None, 1)
    assert (found.repeated_pictures.expected_pairs, found.repeated_captions.share) == (0, 0)


def test_shards_of_other_programs(tmp_path):
    """As img2dataset writes them, with other files between and beside."""
    first = [
        ("000000000.jpg", encode_image((50, 30), 0, "JPEG")),
        ("000000000.json", {"caption": "A dog", "key": "000000000", "width": 1}),
        ("000000000.txt", "A dog"),
        ("000000001.jpeg", encode_image((60, 40), 0, "JPEG")),
        ("000000001.txt", "a  dog"),
        ("readme", "x"),
    ]
    second = [("a/1.WEBP", encode_image((5, 7), 3, "WEBP")), ("a/1.txt", "cat"), ("b/1.png", b"no"), ("b/1.txt", "a")]
    write_archive(tmp_path / "00000.tar", first)
    write_archive(tmp_path / "00001.tar", second)
    write_archive(tmp_path / "val_7.tar", first[:3])
    write_archive(tmp_path / "test.tar", first[3:])
    write_archive(tmp_path / ".hidden-0.tar", first)
    (tmp_path / "00000_stats.json").write_text("{}")
    (tmp_path / "manifest.json").write_text("[]")
    found = shard_statistics(tmp_path, batch_size=2)
    assert {name: (split.shards, split.images) for name, split in found.items()} == {
        "shards": (2, 3),
        "test": (1, 1),
        "val": (1, 1),
    }
    every = found["shards"]
    assert (every.captions, every.unusable, every.rejected, every.source) == (3, 1, None, None)
    assert (every.widths, every.heights) == (Range(5, 50, 60), Range(7, 30, 40))
    assert (every.repeated_captions.number, every.repeated_captions.example) == (2, "a dog")
    assert every.repeated_captions.expected_pairs == pytest.approx(1 / 3)
    assert every.repeated_pictures.number == 0
    sample = read_place(Folder(tmp_path), every.places[2])
    assert (sample.key, sample.captions) == ("a/1", ["cat"])
    assert sample.picture == second[0][1]


def test_equal_pictures_of_other_programs_are_different_images(tmp_path):
    picture = encode_image((5, 4))
    write_archive(tmp_path / "a-0.tar", [("0.png", picture), ("0.txt", "a"), ("1.png", picture), ("1.txt", "b")])
    found = shard_statistics(tmp_path)["a"].repeated_pictures
    assert (found.number, found.example, found.batch_size, found.expected_pairs) == (2, "0", 2, 1)


@pytest.mark.parametrize(("side", "images"), [(10_000, 1), (20_000, 0)])
def test_huge_picture_is_not_decoded_and_warns_nobody(tmp_path, recwarn, side, images):
    """PIL warns of the first and refuses the second."""
    data = encode_image((5, 4))
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + data[24:29]
    picture = data[:12] + header + zlib.crc32(header).to_bytes(4, "big") + data[33:]
    write_archive(tmp_path / "a-0.tar", [("0.png", picture), ("0.txt", "a")])
    found = shard_statistics(tmp_path)["a"]
    assert (found.images, found.unusable) == (images, 1 - images)
    assert not recwarn.list


def test_selected_splits(tmp_path):
    for name in ("a", "b", "c"):
        write_archive(tmp_path / f"{name}-0.tar", [("0.png", encode_image((5, 4))), ("0.txt", "a")])
    assert list(shard_statistics(tmp_path, splits=["c", "a"])) == ["a", "c"]
    with pytest.raises(UserError, match="unknown split 'd'; known: a, b, c"):
        shard_statistics(tmp_path, splits=["a", "d"])


@pytest.mark.parametrize("name", ["absent", "."])
def test_no_shards(tmp_path, name):
    with pytest.raises(UserError, match=r"holds no shards; expected \.tar files"):
        shard_statistics(tmp_path / name)


def test_wrong_batch_size(tmp_path):
    with pytest.raises(UserError, match="the batch size must be at least 1, got 0"):
        shard_statistics(tmp_path, batch_size=0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "empty file"),
        (lambda data: b"text" * 1000, "invalid header; a compressed shard must be unpacked"),
        (lambda data: data[:2700], "unexpected end of data"),
        (lambda data: data[:1536] + data[1536 + 100 :], "it is cut off or damaged at byte 2,048"),
        (lambda data: data[:2048], "it is cut off or damaged at byte 2,048"),
    ],
)
def test_damaged_archive(tmp_path, damage, message):
    file = tmp_path / "a-0.tar"
    write_archive(file, [("0.png", bytes(500)), ("0.txt", "a" * 500), ("1.png", bytes(500))])
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError) as error:
        shard_statistics(tmp_path)
    assert str(error.value).startswith(f"cannot read {file}: {message}")


@pytest.mark.parametrize("size", [-512, -5000, 1 << 40, 1 << 70])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_header_that_lies(tmp_path, size, kind):
    info = tarfile.TarInfo("0.png")
    info.size, info.type = size, kind
    # The first one of a stream is read when it is opened, others later.
    for number in (0, 1):
        sample = [("a.png", encode_image((5, 4))), ("a.txt", "a")] * number
        write_archive(tmp_path / "a-0.tar", sample)
        data = (tmp_path / "a-0.tar").read_bytes()[: 2048 * number]
        (tmp_path / "a-0.tar").write_bytes(data + info.tobuf(tarfile.GNU_FORMAT) + bytes(5000))
        with pytest.raises(UserError, match=r"cannot read .*a-0\.tar: "):
            shard_statistics(tmp_path)


def test_extended_headers_that_describe_one_another(tmp_path):
    info = tarfile.TarInfo("x")
    info.type = tarfile.XHDTYPE
    (tmp_path / "a-0.tar").write_bytes(info.tobuf(tarfile.USTAR_FORMAT) * 2000 + bytes(1024))
    with pytest.raises(UserError, match=r"cannot read .*a-0\.tar: it is damaged: maximum recursion"):
        shard_statistics(tmp_path)


def test_shard_with_fewer_samples_than_the_manifest_says(collection, tmp_path):
    folder = write_own(tmp_path / "x", [("0.png", b"0"), ("0.json", record(0))])
    write_archive(folder / "set-train-000000.tar", [])
    with pytest.raises(UserError, match=r"000000\.tar has 0 samples, manifest.json says 1; `vl-plugins shards verify"):
        shard_statistics(folder)


def test_missing_shard(tmp_path):
    folder = write_own(tmp_path / "x", [("0.png", b"0"), ("0.json", record(0))])
    (folder / "set-train-000000.tar").unlink()
    with pytest.raises(UserError, match=r"set-train-000000\.tar does not exist, but manifest\.json lists it"):
        shard_statistics(folder)
