import io
import itertools
import random
import statistics
import subprocess
import sys
import zlib
from collections import Counter
from types import SimpleNamespace

import pytest
from PIL import Image

from tests.helpers.archives import encode_archive, encode_picture
from vl_plugins.data.batching import normalize_caption
from vl_plugins.data.shard_files import input_of, read_texts
from vl_plugins.data.shards import write_shards
from vl_plugins.data.sources import CaptionedImage
from vl_plugins.data.statistics import Range, Repeats, find_repeats, read_place, shard_statistics
from vl_plugins.data.storage import Folder
from vl_plugins.errors import UserError

PICTURE = encode_picture((5, 4))


def test_repeats_of_texts():
    images = [["a", "b"], ["a"], ["b", "b", "c"], ["a", "c"], ["d", "d"]]
    assert find_repeats(images) == Repeats(number=8, share=0.8, different=3, example="a", example_images=3)
    for images in ([], [["a"]], [["a", "a"], ["b"]]):
        assert find_repeats(images) == Repeats(0, 0.0, 0, None, 0)


@pytest.fixture(scope="session")
def collection(tmp_path_factory):
    """Shards of 30 images with 1 to 4 short captions, some pictures twice or more, and what is in them."""
    rng = random.Random(0)
    root, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("collection")
    contents = [
        encode_picture((rng.randint(20, 900), rng.randint(20, 300)), rng.choice(["PNG", "JPEG"]), 0) for _ in range(20)
    ]
    chosen = rng.choices(contents, k=30)
    images = []
    for index, content in enumerate(chosen):
        (root / str(index)).write_bytes(content)
        captions = tuple(
            " ".join(rng.choices(("a", "A", "Dog ", "dog"), k=rng.randint(1, 3))) for _ in range(rng.randint(1, 4))
        )
        ids = tuple(10 * index + number for number in range(len(captions)))
        images.append(CaptionedImage(index, str(index), captions, ids, "train", "set", str(index), index % 3))
    write_shards(images, root, out, samples_per_shard=7, source={"format": "table"})
    return SimpleNamespace(folder=out, pictures=chosen, captions=[image.captions for image in images])


def test_numbers(collection):
    found = shard_statistics(collection.folder)["set-train"]
    captions = list(itertools.chain(*collection.captions))
    sizes = [Image.open(io.BytesIO(content)).size for content in collection.pictures]
    assert (found.shards, found.images, found.captions, found.unusable, found.rejected) == (5, 30, len(captions), 0, 0)
    assert found.bytes == sum(file.stat().st_size for file in collection.folder.glob("*.tar"))
    assert (found.source, found.groups) == ({"format": "table"}, 3)
    assert found.captions_per_image == Counter(map(len, collection.captions))
    assert list(found.captions_per_image) == sorted(found.captions_per_image)
    for numbers, values in (
        (found.words, [len(caption.split()) for caption in captions]),
        (found.widths, [width for width, _ in sizes]),
        (found.heights, [height for _, height in sizes]),
    ):
        assert numbers == Range(min(values), statistics.median(values), max(values))
    assert (found.features, found.feature_dims) == (None, {})


def test_repeats(collection):
    found = shard_statistics(collection.folder)["set-train"]
    texts = [[normalize_caption(caption) for caption in captions] for captions in collection.captions]
    assert found.repeated_captions == find_repeats(texts)
    names = [f"set-train-{collection.pictures.index(content):08d}" for content in collection.pictures]
    assert found.repeated_pictures == find_repeats([[name] for name in names])
    assert 0 < found.repeated_pictures.number < 30


def test_places(collection):
    places = shard_statistics(collection.folder)["set-train"].places
    assert len(places) == 30
    for index in (0, 6, 7, 29):
        sample = read_place(Folder(collection.folder), places[index])
        assert sample.key == f"set-train-{index:08d}"
        assert input_of(sample) == collection.pictures[index]
        assert read_texts(sample)[1] == list(collection.captions[index])


def huge_picture(side):
    """Return a PNG file whose header says more pixels than there are."""
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + PICTURE[24:29]
    return PICTURE[:12] + header + zlib.crc32(header).to_bytes(4, "big") + PICTURE[33:]


def test_samples_that_cannot_be_used(tmp_path, recwarn):
    unusable = [
        ("1.txt", "no picture"),
        ("2.png", PICTURE),
        ("3.png", PICTURE),
        ("3.json", {"captions": ["a", 5]}),
        ("4.png", PICTURE),
        ("4.json", {"captions": "a"}),
        ("5.png", PICTURE),
        ("5.txt", b"\xff"),
        ("6.png", b"no picture"),
        ("6.txt", "a"),
        ("7.png", huge_picture(10_000)),  # PIL warns
        ("7.txt", "a"),
        ("8.npy", b"no array"),
        ("8.txt", "a"),
        ("9.png", PICTURE),
        ("9.json", "{"),
        ("9.txt", "a"),
    ]
    (tmp_path / "a.tar").write_bytes(encode_archive([("0.png", PICTURE), ("0.json", "[]"), ("0.txt", "a"), *unusable]))
    found = shard_statistics(tmp_path)["a"]
    assert (found.images, found.captions, found.unusable) == (1, 1, 9)
    samples = [read_place(Folder(tmp_path), place) for place in found.places]
    assert [sample.key for sample in samples] == list("0123456789")
    assert not recwarn.list


def test_shards_without_usable_samples(tmp_path):
    (tmp_path / "a.tar").write_bytes(encode_archive([("0.txt", "a")]))
    (tmp_path / "b.tar").write_bytes(encode_archive([]))
    found = shard_statistics(tmp_path)
    assert [(split.images, split.unusable, split.words, split.widths) for split in found.values()] == [
        (0, 1, None, None),
        (0, 0, None, None),
    ]


def test_shards_of_other_programs(tmp_path):
    """As img2dataset writes them, with other files between and beside."""
    first = [
        ("000000000.jpg", encode_picture((50, 30), "JPEG")),
        ("000000000.json", {"caption": "A dog", "key": "000000000", "width": 1}),
        ("000000000.txt", "A dog"),
        ("000000001.jpeg", encode_picture((60, 40), "JPEG")),
        ("000000001.txt", "a  dog"),
        ("readme", "x"),
    ]
    second = [("a/1.WEBP", encode_picture((5, 7), "WEBP")), ("a/1.txt", "cat"), ("b/1.png", b"no"), ("b/1.txt", "a")]
    shards = {"00000": first, "00001": second, "val_7": first, "test": first[3:], ".hidden-0": first}
    for name, members in shards.items():
        (tmp_path / f"{name}.tar").write_bytes(encode_archive(members))
    (tmp_path / "manifest.json").write_text("[]")
    found = shard_statistics(tmp_path)
    numbers = {name: (split.shards, split.images) for name, split in found.items()}
    assert numbers == {"shards": (2, 3), "test": (1, 1), "val": (1, 2)}
    every = found["shards"]
    assert (every.captions, every.unusable, every.rejected, every.source) == (3, 1, None, None)
    assert (every.widths, every.heights) == (Range(5, 50, 60), Range(7, 30, 40))
    assert (every.repeated_captions.number, every.repeated_captions.example) == (2, "a dog")
    assert every.repeated_pictures.number == 0
    assert list(shard_statistics(tmp_path, splits=["val", "test"])) == ["test", "val"]
    with pytest.raises(UserError, match="unknown split 'train'; known: shards, test, val"):
        shard_statistics(tmp_path, splits=["train"])


@pytest.mark.parametrize("name", ["absent", "."])
def test_no_shards(tmp_path, name):
    with pytest.raises(UserError, match=r"holds no shards; expected \.tar files"):
        shard_statistics(tmp_path / name)


@pytest.mark.parametrize("data", [b"text" * 1000, encode_archive([("0.png", bytes(500))])[:900]], ids=["text", "cut"])
def test_damaged_archive(tmp_path, data):
    (tmp_path / "a-0.tar").write_bytes(data)
    with pytest.raises(UserError, match=r"^cannot read .*a-0\.tar: "):
        shard_statistics(tmp_path)


def test_missing_shard(toy_shards, tmp_path):
    (tmp_path / "manifest.json").write_bytes((toy_shards / "manifest.json").read_bytes())
    with pytest.raises(UserError, match=r"toy-test-000000\.tar does not exist, but manifest\.json lists it"):
        shard_statistics(tmp_path)


def test_import_needs_nothing_that_is_optional():
    code = """
import sys
import vl_plugins.data.contact_sheet, vl_plugins.data.statistics, vl_plugins.data.verification
import vl_plugins.commands.shards_info, vl_plugins.commands.shards_verify
print(sorted({"torch", "PIL", "webdataset", "matplotlib", "fsspec", "numpy", "tqdm"} & set(sys.modules)))"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
