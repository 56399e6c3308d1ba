import gzip
import importlib
import io
import tarfile

import pytest

from tests.helpers.archives import encode_archive
from vl_plugins.data.shard_files import Place, locate, read_samples
from vl_plugins.data.storage import Folder


def write_tar(path, members):
    path.write_bytes(encode_archive(members))
    return str(path)


@pytest.fixture
def shard(tmp_path):
    """Four samples of two members."""
    members = [
        (f"{key}.{extension}", f"{key}{extension}".encode() * 200) for key in "abcd" for extension in ("jpg", "txt")
    ]
    return write_tar(tmp_path / "x.tar", members)


def keys(samples):
    return [sample.key for sample in samples]


class TestLocate:
    def test_local(self):
        assert locate("a/b.tar") == Place("a/b.tar", "a", "b.tar", True)
        assert locate("b.tar") == Place("b.tar", ".", "b.tar", True)
        assert locate("/b.tar") == Place("/b.tar", "/", "b.tar", True)
        assert locate("file:///a/b.tar") == Place("file:///a/b.tar", "/a", "b.tar", True)
        assert locate("file:a/b.tar") == Place("file:a/b.tar", "a", "b.tar", True)

    def test_what_webdataset_reads_from_a_program(self):
        for url in ("pipe:cat x.tar", "https://h/x.tar", "gs://b/x.tar"):
            assert locate(url) is None

    def test_everything_else_is_of_fsspec(self):
        assert locate("s3://bucket/a/b.tar") == Place("s3://bucket/a/b.tar", "s3://bucket/a", "b.tar", False)
        assert locate("memory://b.tar") == Place("memory://b.tar", "memory://", "b.tar", False)

    def test_a_user_s_opener_wins(self, monkeypatch):
        monkeypatch.setenv("GOPEN_REWRITE", "s3://=pipe:aws s3 cp s3://")
        assert locate("s3://bucket/b.tar") is None
        monkeypatch.setenv("GOPEN_REWRITE", "s3://=/mnt/")
        assert locate("s3://bucket/b.tar") is None


class TestReadSamples:
    def test_members(self, tmp_path):
        shard = write_tar(
            tmp_path / "x.tar",
            [
                ("folder", None),
                ("folder/a.JPG", b"image"),
                ("folder/a.txt", b"text"),
                ("folder/a.npy", b"not needed"),
                ("__meta__/a.json", b"{}"),
                ("__meta.json__", b"{}"),
                ("no-extension", b"?"),
                ("folder/b.seg.png", b"not needed"),
                ("folder/b.json", b"{}"),
            ],
        )
        samples = [(sample.key, list(sample.members), sample.data) for sample in read_samples(shard)]
        assert samples == [
            ("folder/a", ["jpg", "txt", "npy"], {"jpg": b"image", "txt": b"text"}),
            ("folder/b", ["seg.png", "json"], {"json": b"{}"}),
        ]

    @pytest.mark.parametrize(("start", "stop"), [(0, None), (0, 1), (1, 3), (2, None), (4, None), (0, 9)])
    def test_a_range(self, shard, start, stop):
        expected = [(key, {"jpg": f"{key}jpg".encode() * 200, "txt": f"{key}txt".encode() * 200}) for key in "abcd"]
        for url in (shard, f"pipe:cat {shard}", f"file://{shard}"):
            assert [(sample.key, sample.data) for sample in read_samples(url, start, stop)] == expected[start:stop]

    def test_what_is_before_the_range_is_not_read(self, tmp_path, monkeypatch):
        members = [(f"{key}.{extension}", bytes(1_000_000)) for key in "abcd" for extension in ("jpg", "npy")]
        shard = write_tar(tmp_path / "x.tar", members)
        read = []

        class Counting(io.FileIO):
            def read(self, size=-1):
                data = super().read(size)
                read.append(len(data))
                return data

        streams = []
        monkeypatch.setattr(
            importlib.import_module("webdataset.gopen"),
            "gopen",
            lambda url: streams.append(Counting(url)) or streams[0],
        )
        assert keys(read_samples(shard, 2, 3)) == ["c"]
        assert 1_000_000 < sum(read) < 1_100_000
        assert streams[0].closed

    def test_a_program_that_is_not_read_to_its_end(self, tmp_path):
        shard = write_tar(tmp_path / "x.tar", [(f"{key}.jpg", bytes(1_000_000)) for key in "abcd"])
        assert keys(read_samples(f"pipe:cat {shard} || exit 3", 1, 2)) == ["b"]

    @pytest.mark.parametrize("remote", [False, True])
    def test_a_compressed_shard_is_an_error(self, shard, remote):
        """A few kilobytes may stand for any number of samples."""
        with open(shard, "rb") as stream:
            data = gzip.compress(stream.read())
        if remote:
            shard = "memory://compressed/x.tar"
            Folder("memory://compressed").make()
            with Folder("memory://compressed").write("x.tar") as stream:
                stream.write(data)
        else:
            with open(shard, "wb") as stream:
                stream.write(data)
        with pytest.raises(tarfile.ReadError, match="header; a compressed shard must be unpacked"):
            keys(read_samples(shard))
        if not remote:
            assert keys(read_samples(f"pipe:gzip -dc < {shard}", 1, 2)) == ["b"]

    def test_a_name_twice(self, tmp_path):
        members = [("a.txt", b"1"), ("b.txt", b"2"), ("b.txt", b"3")]
        samples = read_samples(write_tar(tmp_path / "x.tar", members))
        assert next(samples).data["txt"] == b"1"
        with pytest.raises(tarfile.ReadError, match=r"b\.txt is in it twice"):
            next(samples)

    @pytest.mark.parametrize("length", range(0, 8 * 1536, 768))
    def test_a_cut_is_found_wherever_it_is(self, shard, length):
        """A member takes 512 bytes for its header and 1024 for its content, a sample has two."""
        with open(shard, "r+b") as stream:
            stream.truncate(length)
        read = []
        with pytest.raises(tarfile.TarError):
            read.extend(sample.key for sample in read_samples(shard))
        # A sample is known to be complete by the header of the next one.
        assert read == list("abcd"[: max(length - 512, 0) // (2 * 1536)])

    @pytest.mark.parametrize("rest", [0, 300])
    def test_a_cut_in_the_end_mark(self, shard, rest):
        with open(shard, "r+b") as stream:
            stream.truncate(8 * 1536 + rest)
        read = []
        with pytest.raises(tarfile.ReadError, match=r"it is cut off .*: an archive ends with zeros"):
            read.extend(sample.key for sample in read_samples(shard))
        assert read == ["a", "b", "c"]
        with open(shard, "ab") as stream:
            stream.write(bytes(512 - rest))
        assert keys(read_samples(shard)) == ["a", "b", "c", "d"]

    def test_rubbish_after_a_member(self, shard):
        with open(shard, "r+b") as stream:
            stream.seek(4 * 1536)
            stream.write(b"rubbish" * 100)
        read = []
        with pytest.raises(tarfile.ReadError, match="it is cut off"):
            read.extend(sample.key for sample in read_samples(shard))
        assert read == ["a"]


def test_a_header_of_negative_size_ends_the_shard(tmp_path):
    shard = tmp_path / "x.tar"
    write_tar(shard, [("a.jpg", b"a" * 2000), ("b.jpg", b"b")])
    damaged = tarfile.TarInfo("c.jpg")
    damaged.size = -2048
    content = shard.read_bytes()
    end = 512 + 2048 + 512 + 512
    shard.write_bytes(content[:end] + damaged.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    samples = read_samples(str(shard))
    assert next(samples).key == "a"
    with pytest.raises(tarfile.TarError):
        list(samples)


def sparse_member(size):
    """A file that is zeros and ends with 512 other bytes, which are all that the archive stores of it."""
    member = tarfile.TarInfo("a.jpg")
    member.type, member.size = tarfile.GNUTYPE_SPARSE, 512
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    for place, number in ((386, size - 512), (398, 512), (483, size)):
        header[place : place + 12] = b"%011o\0" % number
    header[148:156] = b"%06o\0 " % (256 + sum(header[:148]) + sum(header[156:]))
    return bytes(header) + b"x" * 512


def large_member(size):
    member = tarfile.TarInfo("a.jpg")
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (sparse_member(1 << 29), "a.jpg is a sparse file"),
        (large_member(1 << 50), r"a.jpg says 1125899906842624 bytes"),
    ],
)
def test_a_few_kilobytes_that_stand_for_much_more(tmp_path, content, message):
    shard = tmp_path / "x.tar"
    shard.write_bytes(content + bytes(10240))
    with pytest.raises(tarfile.TarError, match=message):
        list(read_samples(str(shard)))
    with pytest.raises(tarfile.TarError, match=message):
        list(read_samples(f"pipe:cat {shard} /dev/zero"))
