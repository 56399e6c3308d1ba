import argparse
from pathlib import Path

import fsspec
import pytest

from tests.helpers.numbered_shards import (
    in_memory,
    load,
    png_of_noise,
    read_captions,
    read_images,
    replace_member,
    tokenizer,
    transform,
    write_numbered,
)
from vl_plugins.data.evaluation_reader import EvaluationReader
from vl_plugins.data.shard_files import expand_shards
from vl_plugins.data.shard_info import ShardInfo, check_first_sample, read_shard_info
from vl_plugins.data.storage import Folder
from vl_plugins.errors import UserError

# More workers than cores are on purpose here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """24 images with 5 captions each in 6 shards."""
    return write_numbered(tmp_path_factory.mktemp("even"), [5] * 24)


@pytest.fixture(scope="module")
def uneven_shards(tmp_path_factory):
    """22 images with 5, 6 or 7 captions in 4 shards."""
    return write_numbered(tmp_path_factory.mktemp("uneven"), [5, 6, 7, 5, 5, 6, 5, 7, 5, 5, 5] * 2, samples_per_shard=6)


class TestExpandShards:
    def test_braces_and_several_patterns(self, toy_shards):
        pattern = f"{toy_shards}/toy-train-{{000000..000002}}.tar::{toy_shards}/toy-val-000001.tar"
        names = ["toy-train-000000", "toy-train-000001", "toy-train-000002", "toy-val-000001"]
        assert expand_shards(pattern) == [f"{toy_shards}/{name}.tar" for name in names]

    def test_missing_shards_are_named_and_counted(self, toy_shards):
        with pytest.raises(UserError) as raised:
            expand_shards(f"{toy_shards}/toy-val-{{000000..000009}}.tar")
        assert str(raised.value) == (
            f"7 of 10 shards do not exist: {toy_shards}/toy-val-000003.tar; "
            f"{toy_shards} holds toy-test-000000.tar ... toy-val-000002.tar (14 files)"
        )

    def test_empty_folder(self, tmp_path):
        with pytest.raises(UserError, match=r"1 of 1 shards do not exist: .*none.tar; .* holds no .tar files"):
            expand_shards(f"{tmp_path}/none.tar")

    @pytest.mark.parametrize("pattern", ["", "::", []])
    def test_no_shards(self, pattern):
        with pytest.raises(UserError, match="names no shards"):
            expand_shards(pattern)

    def test_malformed(self):
        with pytest.raises(UserError, match=r"cannot expand the shard pattern 'a-\{0\.\.3\.tar'"):
            expand_shards("a-{0..3.tar")

    @pytest.mark.parametrize("scheme", ["https", "gs", "ais"])
    def test_urls_that_programs_read_are_not_checked(self, scheme):
        assert expand_shards(f"{scheme}://host/{{0..1}}.tar") == [f"{scheme}://host/0.tar", f"{scheme}://host/1.tar"]

    def test_urls_stay_words_of_a_command_line(self):
        """webdataset opens https:// by a shell, with the URL between quotes."""
        with pytest.raises(
            UserError, match=r"^the URL https://host/'; touch made'\.tar contains a quote: write it as %27"
        ):
            expand_shards("https://host/'; touch made'.tar")

    def test_a_shard_counts_once(self, toy_shards, monkeypatch):
        monkeypatch.chdir(toy_shards)
        with pytest.raises(UserError, match=r"toy-val-000000\.tar is listed more than once"):
            expand_shards("toy-val-000000.tar::./toy-val-000000.tar")


class TestShardInfo:
    def test_counts(self, uneven_shards):
        assert read_shard_info(uneven_shards) == ShardInfo(22, 7)
        assert read_shard_info(uneven_shards[-1]) == ShardInfo(4, 7)

    def test_several_splits_and_folders(self, toy_shards, uneven_shards):
        pattern = "::".join([f"{toy_shards}/toy-val-{{000000..000002}}.tar", *uneven_shards])
        assert read_shard_info(pattern) == ShardInfo(24 + 22, 7)

    def test_foreign_shards(self, tmp_path, shards):
        (tmp_path / "x.tar").touch()
        assert read_shard_info(f"{tmp_path}/x.tar") is None
        assert read_shard_info(["https://host/x.tar", *shards]) is None

    def test_a_shard_that_the_manifest_does_not_list(self, tmp_path):
        shard = write_numbered(tmp_path, [1])[0]
        other = shard.replace("000000", "000007")
        (tmp_path / other).touch()
        with pytest.raises(UserError, match=r"manifest.json does not list numbered-train-000007.tar"):
            read_shard_info(other)


class TestRemoteShards:
    """Behind a URL that fsspec opens; what is in memory stands for what is in a bucket."""

    @pytest.fixture
    def urls(self, shards, monkeypatch):
        return in_memory(shards, monkeypatch)

    @pytest.mark.parametrize("workers", [0, 3])
    def test_evaluation(self, urls, workers):
        reader = EvaluationReader(urls, transform, tokenizer, 5)
        assert sorted(read_images(load(reader, workers))) == list(range(24))
        assert len(reader) == 6

    def test_info_and_first_sample(self, urls):
        assert read_shard_info("memory://bucket/numbered/numbered-train-{000000..000005}.tar") == ShardInfo(24, 5)
        check_first_sample(urls[0])
        fsspec.filesystem("memory").pipe_file("/bucket/numbered/numbered-train-000000.tar", bytes(1024))
        with pytest.raises(UserError, match=r"shard memory://bucket/.*-000000\.tar holds no samples"):
            check_first_sample(urls[0])

    def test_missing_shards_are_found_by_one_listing(self, urls, monkeypatch):
        listings = []
        names = Folder.names
        monkeypatch.setattr(Folder, "names", lambda folder: listings.append(folder.location) or names(folder))
        assert expand_shards(urls) == urls
        assert listings == ["memory://bucket/numbered"]
        with pytest.raises(UserError) as raised:
            expand_shards("memory://bucket/numbered/numbered-train-{000004..000009}.tar")
        assert str(raised.value) == (
            "4 of 6 shards do not exist: memory://bucket/numbered/numbered-train-000006.tar; "
            "memory://bucket/numbered holds numbered-train-000000.tar ... numbered-train-000005.tar (6 files)"
        )
        with pytest.raises(UserError, match=r"memory://bucket/nothing holds no \.tar files"):
            expand_shards("memory://bucket/nothing/x.tar")

    def test_file_urls_are_local(self, shards):
        urls = [f"file://{shard}" for shard in shards]
        assert read_shard_info(urls) == ShardInfo(24, 5)
        assert read_images(EvaluationReader(urls, transform, tokenizer, 4)) == list(range(24))
        with pytest.raises(UserError, match=r"1 of 1 shards do not exist: file://.*none\.tar; .* holds numbered-train"):
            expand_shards(f"file://{Path(shards[0]).parent}/none.tar")


class TestDamage:
    @pytest.fixture
    def shards(self, tmp_path):
        return write_numbered(tmp_path, [5] * 12)

    @pytest.mark.parametrize(
        ("member", "content", "reason"),
        [
            ("png", None, "it has no images; expected jpg or png or webp or jpeg"),
            ("json", b"{", "its json is not valid JSON"),
        ],
    )
    def test_a_damaged_sample(self, shards, member, content, reason):
        replace_member(shards[1], f"numbered-train-00000005.{member}", content)
        with pytest.raises(
            UserError, match=rf"cannot read sample numbered-train-00000005 of .*-000001.tar: .*{reason}"
        ):
            load(EvaluationReader(shards, transform, tokenizer, 2), workers=1)

    @pytest.mark.parametrize("length", [0, 700, 5000, 3 * 3072])
    def test_a_cut_off_shard(self, shards, length):
        with open(shards[1], "r+b") as stream:
            stream.truncate(length)
        with pytest.raises(UserError, match=r"cannot read .*-000001.tar"):
            list(EvaluationReader(shards, transform, tokenizer, 2))

    @pytest.mark.parametrize("size", [3, 6])
    def test_a_shard_with_more_or_fewer_samples_than_its_index_says(self, shards, size):
        sizes = Path(shards[1]).parent / "sizes.json"
        sizes.write_text(sizes.read_text().replace('-000001.tar": 4', f'-000001.tar": {size}'))
        with pytest.raises(UserError, match=rf"-000001.tar has 4 samples, sizes.json says {size}"):
            list(EvaluationReader(shards, transform, tokenizer, 2))

    def test_the_first_sample(self, shards):
        check_first_sample(shards[0])
        replace_member(shards[0], "numbered-train-00000000.png", png_of_noise()[:2000])
        with pytest.raises(
            UserError, match=r"^cannot read sample numbered-train-00000000 of .*: OSError\('image file is"
        ):
            check_first_sample(shards[0])
        replace_member(shards[0], "numbered-train-00000000.json", b'{"captions": []}')
        with pytest.raises(
            UserError, match=r"^cannot read sample numbered-train-00000000 of .*'captions' must be a list"
        ):
            check_first_sample(shards[0])
        Path(shards[0]).write_bytes(bytes(1024))
        with pytest.raises(UserError, match=r"^shard .*-000000\.tar holds no samples$"):
            check_first_sample(shards[0])
        check_first_sample(f"pipe:cat {shards[0]}")


class TestStockOpenClip:
    """open_clip's own reader takes the shards as they are."""

    @staticmethod
    def arguments(**options):
        defaults = {
            "train_num_samples": None,
            "val_num_samples": None,
            "train_data_upsampling_factors": None,
            "seed": 0,
            "workers": 0,
            "world_size": 1,
        }
        return argparse.Namespace(**(defaults | options))

    def test_training(self, shards):
        from open_clip_train.data import get_wds_dataset

        folder = shards[0].rpartition("/")[0]
        args = self.arguments(train_data=f"{folder}/numbered-train-{{000000..000005}}.tar", batch_size=8)
        loader = get_wds_dataset(args, transform, is_train=True, tokenizer=tokenizer).dataloader
        assert (loader.num_samples, loader.num_batches) == (24, 3)
        batches = list(loader)
        assert sorted(read_images(batches)) == list(range(24))
        assert read_captions(batches) == {(image, 0) for image in range(24)}

    def test_validation(self, shards):
        from open_clip_train.data import get_wds_dataset

        folder = shards[0].rpartition("/")[0]
        args = self.arguments(val_data=f"{folder}/numbered-train-{{000000..000005}}.tar", batch_size=10)
        loader = get_wds_dataset(args, transform, is_train=False, tokenizer=tokenizer).dataloader
        assert read_images(loader) == list(range(24))
