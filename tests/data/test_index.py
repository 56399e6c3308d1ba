"""Indexes beside shards, and collections read by them; shards of other programs without an index."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import fsspec
import pytest
import torch
import webdataset
from PIL import Image

from tests.helpers.archives import encode_archive, encode_picture, read_archive
from tests.helpers.numbered_shards import write_captioned, write_numbered
from vl_plugins.cli import main
from vl_plugins.data import expand_shards, read_collection
from vl_plugins.data.index import index_file, index_shard, read_head, scan_shard, write_index
from vl_plugins.data.reading import rules_of_splits
from vl_plugins.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:failed to import `ujson`")


def write_tar(file, members):
    file.write_bytes(encode_archive(members))
    return str(file)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Ten images with 1, 2 or 3 captions in three shards, four of them in two groups."""
    groups = ["a", 2, None, None, 2, "a", *[None] * 4]
    return write_numbered(tmp_path_factory.mktemp("shards"), [1 + index % 3 for index in range(10)], groups=groups)


class TestIndex:
    def test_places_are_whole_samples_of_the_archive(self, shards, tmp_path):
        found = {}
        for shard in shards:
            head, content = read_head(shard), Path(shard).read_bytes()
            assert head.size == len(content)
            for start, size in zip(head.starts, head.sizes, strict=True):
                (tmp_path / "x.tar").write_bytes(content[start : start + size])
                found |= read_archive(tmp_path / "x.tar")
        assert found == {name: data for shard in shards for name, data in read_archive(shard).items()}

    def test_only_the_archive_of_its_size(self, shards, tmp_path):
        shard = write_tar(tmp_path / "x.tar", [("a.txt", "a")])
        write_index(shard, *scan_shard(shard))
        content = Path(shard).read_bytes()
        for changed in (content + bytes(512), content[:-512]):
            Path(shard).write_bytes(changed)
            with pytest.raises(UserError, match=r"x\.tar has [\d,]+ bytes, but its index says 10,240; write "):
                read_collection(shard)

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda head, *records: [], r"\.tar\.jsonl is damaged: .*vl-plugins shards index"),
            (lambda head, *records: [head[:50]], "is damaged"),
            (lambda head, *records: [head.replace(b'"starts":[0', b'"starts":["0"'), *records], "is damaged"),
            (lambda head, first, second: [head, first, second[:20]], "is damaged"),
            (lambda head, first, second: [head, first], "the shards have changed since they were opened"),
        ],
    )
    def test_damage(self, tmp_path, damage, message):
        (shard,) = write_numbered(tmp_path, [1, 2], groups=["a", "b"])
        file = Path(index_file(shard))
        file.write_bytes(b"\n".join(damage(*file.read_bytes().splitlines())))
        with pytest.raises(UserError, match=message):
            read_collection(shard).captions  # noqa: B018


class TestCollection:
    def test_names_are_those_that_webdataset_reads(self, toy_shards):
        pattern = f"{toy_shards}/toy-test-{{000000..000002}}.tar"
        collection, samples = read_collection(pattern), list(webdataset.WebDataset(pattern, shardshuffle=False))
        texts = [json.loads(sample["json"]) for sample in samples]
        assert len(collection) == len(samples) == 24
        assert collection.keys == [sample["__key__"] for sample in samples]
        assert collection.image_ids == [text["image_id"] for text in texts]
        assert collection.captions == [caption for text in texts for caption in text["captions"]]
        assert collection.caption_ids == [number for text in texts for number in text["caption_ids"]]
        assert collection.image_of_caption.tolist() == [index for index in range(24) for _ in range(5)]
        assert collection.splits == ["toy-test"]
        assert collection.pictures(range(24)) == {index: sample["png"] for index, sample in enumerate(samples)}

    def test_images_of_a_group_have_the_label_of_its_first(self, shards, tmp_path):
        assert read_collection(shards).labels.tolist() == [0, 1, 2, 3, 1, 0, 6, 7, 8, 9]
        of_two = []
        for dataset in ("one", "other"):
            of_two += write_captioned(tmp_path, [["a"], ["b"], ["c"]], dataset=dataset, groups=["1", "1", 1])
        assert read_collection(of_two).labels.tolist() == [0, 0, 2, 3, 3, 5]

    def test_some_captions(self, shards):
        some = read_collection(shards).with_captions(torch.tensor([5, 1]))
        assert (some.captions, some.caption_ids) == (["2/2", "1/0"], ["2#2", "1#0"])
        assert some.image_of_caption.tolist() == [2, 1]

    def test_pictures_of_shards_that_have_changed(self, tmp_path):
        (shard,) = write_numbered(tmp_path, [1, 1, 1])
        collection = read_collection(shard)
        # Of the same size, with the first two images exchanged.
        content = Path(shard).read_bytes()
        second, third = (int(start) for start in collection.starts[1:])
        Path(shard).write_bytes(content[second:third] + content[:second] + content[third:])
        with pytest.raises(UserError, match="its captions are not those of the index"):
            collection.pictures([1])
        unopened = read_collection(shard)
        Path(shard).unlink()
        with pytest.raises(UserError, match=rf"cannot read {shard}: No such file"):
            unopened.pictures([2])


class TestOtherShards:
    """Shards of other programs, without an index."""

    def test_webdatasets_writer(self, tmp_path):
        with webdataset.ShardWriter(f"{tmp_path}/x-%06d.tar", maxcount=2) as writer:
            for index in range(4):
                picture = Image.new("RGB", (4, 4), (index, 0, 0))
                writer.write({"__key__": f"a/{index}", "png": picture, "txt": f"caption {index}"})
        collection = read_collection(f"{tmp_path}/x-{{000000..000001}}.tar")
        assert collection.keys == collection.image_ids == ["a/0", "a/1", "a/2", "a/3"]
        assert collection.captions == [f"caption {index}" for index in range(4)]
        assert collection.caption_ids == ["a/0#0", "a/1#0", "a/2#0", "a/3#0"]
        assert (collection.splits, collection.only_txt) == ([], 4)
        assert Image.open(io.BytesIO(collection.pictures([3])[3])).getpixel((0, 0)) == (3, 0, 0)

    def test_img2dataset(self, tmp_path):
        texts = b'{"caption": "a dog", "url": "http://x/a.b.jpg", "similarity": NaN, "key": "000000012"}'
        members = [("000000012.jpg", encode_picture()), ("000000012.txt", "a dog"), ("000000012.json", texts)]
        collection = read_collection(write_tar(tmp_path / "00000.tar", members))
        assert (collection.keys, collection.captions, collection.only_txt) == (["000000012"], ["a dog"], 1)

    def test_ids_that_shards_have_or_lack(self, tmp_path):
        members = [
            ("a.json", {"image_id": 7, "captions": ["1", "2"], "caption_ids": ["x", 3], "dataset": "d", "split": "v"}),
            ("c.json", {"image_id": "c7", "captions": ["4", "5"], "caption_ids": [1]}),
            ("d.json", [1]),
            ("d.txt", "grün"),
        ]
        collection = read_collection(write_tar(tmp_path / "x.tar", members))
        assert collection.image_ids == [7, "c7", "d"]
        assert collection.caption_ids == ["x", 3, "c7#0", "c7#1", "d#0"]
        assert (collection.splits, collection.captions[-1]) == (["d-v"], "grün")

    def test_ids_of_two_data_sets_that_count_from_0(self, tmp_path):
        shards = []
        for name in ("cats", "dogs"):
            (tmp_path / name).mkdir()
            members = [("0.png", encode_picture()), ("0.txt", name)]
            shards.append(write_tar(tmp_path / name / "00000.tar", members))
        assert read_collection(shards[:1]).image_ids == ["0"]
        both = read_collection(shards)
        assert both.image_ids == ["cats/00000.tar/0", "dogs/00000.tar/0"]
        assert both.caption_ids == ["cats/00000.tar/0#0", "dogs/00000.tar/0#0"]

    def test_names_as_webdataset_splits_them(self, tmp_path):
        members = [
            ("folder", None),
            ("folder/a.JPG", b"image"),
            ("folder/a.TXT", b"text"),
            ("folder/a.seg.png", b"other"),
            ("__meta__/a.json", b"{}"),
            ("no-extension", b"?"),
            (f"{'long/' * 60}b.txt", b"b"),
        ]
        collection = read_collection(write_tar(tmp_path / "x.tar", members))
        assert collection.keys == ["folder/a", f"{'long/' * 60}b"]
        assert collection.pictures([0]) == {0: b"image"}

    @pytest.mark.parametrize(
        ("members", "message"),
        [
            ([("b.json", b'{"captions": ["x"')], "b: its json or txt is not valid"),
            ([("b.json", b"[" * 100_000)], "b: its json or txt is not valid"),
            ([("b.json", b'{"captions": []}')], "b: it has no captions"),
            ([("b.json", b'{"captions": ["x", 1]}')], "b: it has no captions"),
            ([("b.txt", "\u200b \n"), ("b.caption", b"x")], "b: it has no captions; .*; it has caption, txt"),
            ([("b.json", b'{"captions": ["x"], "image_id": true}')], "b: its json or txt is not valid"),
            ([("b.json", rb'{"captions": ["\ud83d"]}')], "b: its json or txt is not valid"),
            ([("b.jpg", b"")], "b: it has no captions"),
            ([("b.txt", b"\xff\xfe")], "b: its json or txt is not valid"),
            ([("b.txt", b"x"), ("b.txt", b"y")], r".*b\.txt is in it twice"),
        ],
    )
    def test_bad_samples_are_named(self, tmp_path, members, message):
        shard = write_tar(tmp_path / "x.tar", [("a.txt", "a"), *members])
        with pytest.raises(UserError, match=rf"cannot read {shard}[:,] {message}"):
            read_collection(shard)

    @pytest.mark.parametrize("captions", [None, [], "a dog", '["a dog"]', [1], {"en": "a dog"}])
    def test_captions_that_are_no_list_of_texts_leave_the_txt(self, tmp_path, captions):
        metadata = {"captions": captions, "image_id": 7}
        collection = read_collection(write_tar(tmp_path / "x.tar", [("a.json", metadata), ("a.txt", "the caption")]))
        assert (collection.captions, collection.image_ids) == (["the caption"], ["a"])

    def test_bad_samples_may_be_left_out(self, tmp_path):
        members = []
        for number in range(5):
            members.append((f"{number}.png", encode_picture()))
            if number != 3:
                members.append((f"{number}.txt", f"caption {number}"))
        shard = write_tar(tmp_path / "x.tar", members)
        collection = read_collection(shard, on_error="skip")
        assert collection.keys == ["0", "1", "2", "4"]
        (image,) = collection.rejected
        assert (image.image, image.reason.partition(";")[0]) == (f"{shard}: 3", "it has no captions")
        assert sorted(collection.pictures(range(4))) == [0, 1, 2, 3]

    def test_no_images(self, tmp_path):
        with pytest.raises(UserError, match=r"the shards hold no images: .*x\.tar"):
            read_collection(write_tar(tmp_path / "x.tar", []))


def header(size, **attributes):
    member = tarfile.TarInfo("c.txt")
    member.size = size
    for name, value in attributes.items():
        setattr(member, name, value)
    return member.tobuf(tarfile.GNU_FORMAT)


FIVE_LINES = "\n".join(f"caption {number}" for number in range(5))


class TestCaptionsInLines:
    """In the txt of other programs, such as CLIP_benchmark."""

    @pytest.fixture
    def shards(self, tmp_path):
        """Two shards whose texts have five lines, with a blank one."""
        shards = []
        for number in range(2):
            members = [(f"s{number}.jpg", b""), (f"s{number}.txt", f"\ufeff{FIVE_LINES}\r\n \n")]
            shards.append(write_tar(tmp_path / f"{number}.tar", members))
        return shards

    @pytest.mark.parametrize(("rule", "captions"), [("auto", 5), ("yes", 5), ("no", 1)])
    @pytest.mark.parametrize("index", [None, "auto", "no", "yes"])
    def test_each_line_is_a_caption_if_all_texts_have_several(self, shards, rule, captions, index):
        """An index that was written by another rule does not count."""
        if index is not None:
            for shard in shards:
                index_shard(shard, rule=rules_of_splits(shards, index)[shard])
        collection = read_collection(shards, caption_lines=rule)
        assert collection.captions_per_image.tolist() == [captions] * 2
        assert collection.only_txt == (2 if captions == 1 else 0)
        if captions == 5:
            assert collection.captions == [f"caption {number}" for number in range(5)] * 2
            assert collection.caption_ids[:2] == ["s0#0", "s0#1"]
        for image, data in enumerate(collection.read([0, 1])):
            record, _ = collection.parse(image, data)
            assert len(record.captions) == captions

    def test_a_text_of_one_line_leaves_all_as_they_are(self, shards, tmp_path):
        """As alt-text with line breaks."""
        shards.append(write_tar(tmp_path / "2.tar", [("a.jpg", b""), ("a.txt", "one line")]))
        assert read_collection(shards).captions_per_image.tolist() == [1, 1, 1]
        assert read_collection(shards, caption_lines="yes").captions_per_image.tolist() == [5, 5, 1]

    def test_blank_texts_have_no_say(self, shards, tmp_path):
        shards.append(write_tar(tmp_path / "2.tar", [("a.jpg", b""), ("a.txt", " \n")]))
        assert read_collection(shards, on_error="skip").captions_per_image.tolist() == [5, 5]

    def test_each_split_has_its_own_rule(self, shards, tmp_path):
        other = write_tar(tmp_path / "alt-0.tar", [("a.jpg", b""), ("a.txt", "one line")])
        rules = rules_of_splits([*shards, other])
        assert [rules[shard].lines for shard in (*shards, other)] == [True, True, False]

    def test_an_index_that_is_kept_is_enough(self, shards, monkeypatch):
        """Though nobody knows before the scan whether lines are captions."""
        assert read_collection(shards, keep_index=True).captions_per_image.tolist() == [5, 5]
        monkeypatch.setattr("vl_plugins.data.index.scan_shard", None)
        for rule in ("auto", "yes", "no"):
            collection = read_collection(shards, caption_lines=rule, keep_index=True)
            assert collection.captions_per_image.tolist() == ([1, 1] if rule == "no" else [5, 5])
            assert len(collection.records) == 2

    def test_lists_of_captions_have_no_say(self, shards, tmp_path):
        listed = [("a.jpg", b""), ("a.json", {"captions": ["one", "two"]}), ("a.txt", "one")]
        collection = read_collection([*shards, write_tar(tmp_path / "2.tar", listed)])
        assert collection.captions_per_image.tolist() == [5, 5, 2]

    def test_an_index_of_0_3_is_read_anew(self, shards):
        """It does not say whether texts have lines."""
        for shard in shards:
            head, records = scan_shard(shard)
            head.texts_of_lines = None
            write_index(shard, head, records)
        assert read_collection(shards).captions_per_image.tolist() == [5, 5]

    def test_the_commands(self, shards, capsys):
        assert main(["shards", "info", *shards]) == 0
        (statistics,) = json.loads(capsys.readouterr().out).values()
        assert (statistics["images"], statistics["captions"]) == (2, 10)
        assert main(["shards", "info", *shards, "--caption-lines", "no"]) == 0
        (statistics,) = json.loads(capsys.readouterr().out).values()
        assert statistics["captions"] == 2
        assert main(["shards", "index", *shards]) == 0
        assert "indexes: 2 new" in capsys.readouterr().out
        assert main(["shards", "index", *shards]) == 0
        assert "indexes: 0 new, 0 rewritten, 2 unchanged" in capsys.readouterr().out
        assert read_head(shards[0]).rule.lines


class TestArchives:
    """Damaged archives, and small ones that stand for much more."""

    @pytest.mark.parametrize("length", range(0, 4 * 1024 + 512, 512))
    def test_a_cut_anywhere_is_found(self, tmp_path, length):
        """Each of two images has two files, with a block for the header and one for the content."""
        members = [(f"{key}.{extension}", "text") for key in "ab" for extension in ("txt", "png")]
        (shard := tmp_path / "x.tar").write_bytes(encode_archive(members)[:length])
        with pytest.raises(UserError, match=rf"cannot read {shard}, it is damaged"):
            read_collection(shard)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"rubbish" * 200, "it is cut off, or something follows its end"),
            (header(-2048) + bytes(4096), "says -2048 bytes"),
            (header(1 << 50) + bytes(4096), f"says {1 << 50} bytes"),
            (header(1 << 60, type=tarfile.XHDTYPE) + bytes(4096), ""),
            (header(0, type=tarfile.GNUTYPE_LONGNAME) * 2000 + bytes(4096), ""),
            (None, ""),
        ],
        ids="rubbish negative large extended-header recursion compressed".split(),
    )
    def test_what_follows_an_image(self, tmp_path, data, message):
        content = encode_archive([("a.txt", "a")])
        content = gzip.compress(content) if data is None else content[:1024] + data
        (shard := tmp_path / "x.tar").write_bytes(content)
        with pytest.raises(UserError, match=rf"cannot read {shard}, it is damaged or compressed: .*{message}"):
            read_collection(shard)

    @pytest.mark.parametrize("blocks", range(17, 21))
    def test_two_archives_in_one_file(self, tmp_path, blocks):
        """Which is not read to its end, however many zeros end the first one."""
        first = encode_archive([("a.txt", "a" * (512 * (blocks - 2)))])
        (shard := tmp_path / "x.tar").write_bytes(first + encode_archive([("b.txt", "b")]))
        with pytest.raises(UserError, match=r"something follows its end"):
            read_collection(shard)

    def test_pictures_are_not_read(self, monkeypatch):
        members = [("a.jpg", bytes(1_000_000)), ("a.txt", "a"), ("b.jpg", bytes(1_000_000)), ("b.txt", "b")]
        files, read = fsspec.filesystem("memory"), []
        monkeypatch.setattr(type(files), "store", {})
        files.pipe_file("/x.tar", encode_archive(members))
        stream = type(files.open("/x.tar"))
        original = stream.read
        monkeypatch.setattr(stream, "read", lambda self, size=-1: read.append(size) or original(self, size))
        assert read_collection("memory://x.tar").keys == ["a", "b"]
        assert 0 < min(read) <= sum(read) < 100_000


class TestExpandShards:
    @pytest.fixture
    def folder(self, tmp_path):
        for name in "x-0 x-1 x-2 y".split():
            (tmp_path / f"{name}.tar").touch()
        return tmp_path

    def test_patterns(self, folder):
        names = [f"{folder}/{name}.tar" for name in "x-0 x-1 x-2 y".split()]
        assert expand_shards(f"{folder}/x-{{0..2}}.tar::{folder}/y.tar") == names
        assert expand_shards(folder / "x-{2,1}.tar") == [names[2], names[1]]
        assert expand_shards([folder / "y.tar", names[0]]) == [names[3], names[0]]
        assert expand_shards(f"file://{names[0]}") == [f"file://{names[0]}"]

    @pytest.mark.parametrize("kind", ["path", "url"])
    def test_folders_and_names_with_stars(self, folder, kind):
        place = str(folder) if kind == "path" else f"file://{folder}"
        names = [f"{place}/x-{number}.tar" for number in range(3)]
        assert expand_shards(f"{place}/x-*.tar") == names
        assert expand_shards(f"{place}/x-?.tar::{place}/y.tar") == [*names, f"{place}/y.tar"]
        for several in (place, f"{place}/*.tar"):
            with pytest.raises(UserError) as raised:
                expand_shards(several)
            assert f"are shards of several splits: choose '{place}/x-*.tar', '{place}/y.tar'" in str(raised.value)
        (folder / "y.tar").unlink()
        assert expand_shards(place) == expand_shards(f"{place}/") == names
        with pytest.raises(UserError, match=r"z\*\.tar: there are no such shards"):
            expand_shards(f"{place}/z*.tar")

    def test_errors(self, folder, monkeypatch):
        monkeypatch.chdir(folder)
        for pattern, message in (
            ("x-{3..4}.tar::y.tar", r"2 of 3 shards do not exist: x-3\.tar"),
            (["./y.tar", f"{folder}/y.tar"], "or one more than once"),
            ("::", "names no shard"),
            ([], "names no shard"),
            ("x", "1 of 1 shards do not exist: x"),
        ):
            with pytest.raises(UserError, match=message):
                expand_shards(pattern)
