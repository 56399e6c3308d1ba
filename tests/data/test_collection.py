import io

import pytest
import torch
from PIL import Image
from webdataset import TarWriter

from tests.helpers.archives import encode_archive
from vl_plugins.data.collection import Collection, first_captions, read_collection
from vl_plugins.data.sources import read_karpathy
from vl_plugins.errors import UserError


def write_tar(path, members):
    path.write_bytes(encode_archive(members))
    return str(path)


def sample(key, picture=b"picture", **texts):
    return [(f"{key}.jpg", picture), (f"{key}.json", texts)]


@pytest.fixture
def toy_test(toy_shards):
    """The three shards of the test split, of 8 images with 5 captions each."""
    return str(toy_shards / "toy-test-{000000..000002}.tar")


class TestToyShards:
    def test_everything_is_as_in_the_annotations(self, toy_test, toy_scenes):
        images = [image for image in read_karpathy(toy_scenes / "dataset_toy.json", "coco") if image.split == "test"]
        collection = read_collection(toy_test)
        assert isinstance(collection, Collection)
        assert [shard[-10:] for shard in collection.shards] == ["000000.tar", "000001.tar", "000002.tar"]
        assert collection.sizes == (8, 8, 8)
        assert collection.splits == ("toy-test",)
        by_id = {image.image_id: image for image in images}
        assert sorted(collection.image_ids) == sorted(by_id)
        assert len(set(collection.keys)) == 24
        in_order = [by_id[image_id] for image_id in collection.image_ids]
        assert collection.captions == tuple(caption for image in in_order for caption in image.captions)
        assert collection.caption_ids == tuple(caption for image in in_order for caption in image.caption_ids)
        assert collection.image_of_caption.dtype == torch.int64
        assert collection.image_of_caption.tolist() == [index for index in range(24) for _ in range(5)]

    def test_the_first_captions(self, toy_test):
        collection = read_collection(toy_test)
        first = read_collection(toy_test, max_captions=2)
        assert first.image_of_caption.tolist() == [index for index in range(24) for _ in range(2)]
        kept = [number for number in range(120) if number % 5 < 2]
        assert first.captions == tuple(collection.captions[number] for number in kept)
        assert first.caption_ids == tuple(collection.caption_ids[number] for number in kept)
        assert (first.keys, first.image_ids, first.sizes) == (collection.keys, collection.image_ids, collection.sizes)
        assert read_collection(toy_test, max_captions=9).captions == collection.captions

    def test_with_captions(self, toy_test):
        collection = read_collection(toy_test)
        kept = torch.tensor([119, 3, 60])
        some = collection.with_captions(kept)
        assert some.captions == tuple(collection.captions[number] for number in (119, 3, 60))
        assert some.caption_ids == tuple(collection.caption_ids[number] for number in (119, 3, 60))
        assert some.image_of_caption.tolist() == [23, 0, 12]
        assert some.keys == collection.keys

    def test_pictures_are_the_files(self, toy_test, toy_scenes):
        files = {
            image.image_id: (toy_scenes / image.file).read_bytes()
            for image in read_karpathy(toy_scenes / "dataset_toy.json", "coco")
        }
        collection = read_collection(toy_test)
        for wanted in ([0], [23, 3, 5, 3], range(24), []):
            pictures = collection.pictures(wanted)
            assert sorted(pictures) == sorted(set(wanted))
            for index, picture in pictures.items():
                assert picture == files[collection.image_ids[index]]
                assert Image.open(io.BytesIO(picture)).size == (64, 64)


class TestPictures:
    @pytest.fixture
    def shards(self, tmp_path):
        return [
            write_tar(
                tmp_path / f"{number}.tar",
                [
                    member
                    for index in range(3)
                    for member in sample(f"{number}{index}", f"{number}{index}".encode() * 100, captions=["a", "b"])
                ],
            )
            for number in range(3)
        ]

    def test_other_shards_are_not_opened(self, shards, tmp_path):
        collection = read_collection(shards)
        (tmp_path / "0.tar").unlink()
        (tmp_path / "2.tar").write_bytes(b"no archive")
        assert collection.pictures([4, 3]) == {3: b"10" * 100, 4: b"11" * 100}
        for image, name in ((0, "0.tar"), (8, "2.tar")):
            with pytest.raises(UserError, match=rf"cannot read shard .*{name}: "):
                collection.pictures([4, image])

    def test_another_order_since(self, shards, tmp_path):
        collection = read_collection(shards)
        members = [member for key in ("10", "12", "11") for member in sample(key, captions=["a"])]
        write_tar(tmp_path / "1.tar", members)
        assert collection.pictures([3]) == {3: b"picture"}
        with pytest.raises(UserError, match=r"cannot read sample 11 of .*1\.tar: 12 was in its place before"):
            collection.pictures([3, 5])

    @pytest.mark.parametrize("left", [0, 2])
    def test_fewer_samples_since(self, shards, tmp_path, left):
        collection = read_collection(shards)
        members = [member for index in range(left) for member in sample(f"1{index}", captions=["a"])]
        write_tar(tmp_path / "1.tar", members)
        with pytest.raises(UserError, match=r"cannot read .*1\.tar: it ends before sample 2, expected 3 samples"):
            collection.pictures([5])

    def test_no_picture(self, shards, tmp_path):
        write_tar(tmp_path / "1.tar", [("10.json", b'{"captions": ["a"]}'), *sample("11", captions=["b"])])
        collection = read_collection(shards)
        assert collection.pictures([4]) == {4: b"picture"}
        with pytest.raises(UserError, match=r"sample 10 of .*1\.tar: it has no images; expected jpg or "):
            collection.pictures([3, 4])


class TestOtherShards:
    def test_of_webdataset_s_writer_without_json(self, tmp_path):
        pattern = str(tmp_path / "x-{0..1}.tar")
        for number in range(2):
            with TarWriter(str(tmp_path / f"x-{number}.tar")) as writer:
                for index in range(2):
                    picture = Image.new("RGB", (4, 4), (index, number, 0))
                    writer.write({"__key__": f"{number}/{index}", "jpg": picture, "txt": f"caption {number} {index}"})
        collection = read_collection(pattern)
        assert collection.keys == collection.image_ids == ("0/0", "0/1", "1/0", "1/1")
        assert collection.captions == ("caption 0 0", "caption 0 1", "caption 1 0", "caption 1 1")
        assert collection.caption_ids == ("0/0#0", "0/1#0", "1/0#0", "1/1#0")
        assert collection.image_of_caption.tolist() == [0, 1, 2, 3]
        assert collection.splits == ()
        pictures = collection.pictures([1, 2])
        assert sorted(pictures) == [1, 2]
        assert all(Image.open(io.BytesIO(picture)).format == "JPEG" for picture in pictures.values())

    def test_ids_of_mixed_kinds(self, tmp_path):
        members = [
            *sample("a", image_id=7, captions=["1", "2"], caption_ids=["x", 3], dataset="coco", split="val"),
            *sample("b", image_id="b.jpg", captions=["3"], caption_ids=[4], dataset="coco", split="test"),
            *sample("c", image_id=None, captions=["4", "5"]),
            # What is no id, or not one for each caption, is not taken.
            *sample("d", image_id=True, captions=["6"], caption_ids=[None], dataset="coco", split="test"),
            *sample("e", image_id=1.5, captions=["7", "8"], caption_ids=[1], dataset="coco", split=3),
            *sample("f", image_id=["x"], captions=["9"], caption_ids="z"),
        ]
        collection = read_collection([write_tar(tmp_path / "x.tar", members)])
        assert collection.image_ids == (7, "b.jpg", "c", "d", "e", "f")
        assert collection.caption_ids == ("x", 3, 4, "c#0", "c#1", "d#0", "e#0", "e#1", "f#0")
        assert collection.image_of_caption.tolist() == [0, 0, 1, 2, 2, 3, 4, 4, 5]
        assert collection.splits == ("coco-val", "coco-test")

    def test_json_without_captions_falls_back_on_txt(self, tmp_path):
        members = [("a.jpg", b""), ("a.json", b'{"image_id": 3}'), ("a.txt", "grün".encode())]
        members += [("b.jpg", b""), ("b.json", b"[1]"), ("b.txt", b"list")]
        collection = read_collection([write_tar(tmp_path / "x.tar", members)])
        assert collection.captions == ("grün", "list")
        assert collection.image_ids == (3, "b")

    @pytest.mark.parametrize(
        ("members", "message"),
        [
            ([("b.json", b'{"captions": ["x"')], "sample b of .*: its json is not valid JSON: Expecting"),
            ([("b.json", b'{"captions": []}')], r"sample b of .*: 'captions' must be a list of strings, got \[\]"),
            ([("b.json", b'{"captions": ["x", 1]}')], r"sample b of .*: 'captions' must be a list of strings"),
            ([("b.jpg", b"")], "sample b of .*: it has no captions"),
            ([("b.json", b"{}"), ("b.json", b"{}")], r"the end of shard .*b\.json is in it twice"),
            ([("b.txt", b"\xff\xfe")], "sample b of .*: .*codec can't decode"),
        ],
    )
    def test_bad_samples_are_named(self, tmp_path, members, message):
        shard = write_tar(tmp_path / "x.tar", [*sample("a", captions=["x"]), *members])
        good = write_tar(tmp_path / "good.tar", sample("g", captions=["x"]))
        with pytest.raises(UserError, match="cannot read " + message):
            read_collection([good, shard])

    def test_a_shard_that_is_cut_off(self, tmp_path, toy_shards):
        content = (toy_shards / "toy-test-000000.tar").read_bytes()
        cut = tmp_path / "x.tar"
        cut.write_bytes(content[: len(content) // 2])
        with pytest.raises(UserError, match=r"cannot read the end of shard .*x\.tar: "):
            read_collection([str(cut)])


class TestFirstCaptions:
    def test_of_images_in_any_order(self):
        image_of_caption = torch.tensor([2, 0, 2, 0, 2, 1, 0, 0])
        assert first_captions(image_of_caption, 1).tolist() == [0, 1, 5]
        assert first_captions(image_of_caption, 2).tolist() == [0, 1, 2, 3, 5]
        assert first_captions(image_of_caption, 9).tolist() == list(range(8))

    @pytest.mark.parametrize("number", [0, -1])
    def test_out_of_range(self, number, toy_test):
        with pytest.raises(ValueError, match=f"number must be at least 1, got {number}"):
            first_captions(torch.tensor([0]), number)
        with pytest.raises(UserError, match=f"max_captions must be at least 1, got {number}"):
            read_collection(toy_test, max_captions=number)
