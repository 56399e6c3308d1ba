import io
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.archives import encode_archive, read_archive
from vl_plugins.data.evaluation_reader import EvaluationReader
from vl_plugins.data.feature_arrays import decode_features, with_array_files
from vl_plugins.data.shard_info import check_first_sample
from vl_plugins.data.shards import write_shards
from vl_plugins.data.sources import CaptionedImage
from vl_plugins.data.statistics import Range, read_place, shard_statistics
from vl_plugins.data.storage import Folder
from vl_plugins.data.training_batches import TrainingPipeline
from vl_plugins.data.verification import verify_shards
from vl_plugins.errors import UserError

WIDTH = 3


def encode(array, **options):
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def features_of(index):
    """Array of image ``index``: 1 to 4 rows, all of whose values tell which image it is."""
    rows = 1 + index % 4
    return (100 * index + np.arange(1, rows * WIDTH + 1)).reshape(rows, WIDTH).astype("float16")


def make_image(index, image_id=None, filename=None, split="train"):
    filename = f"picture-{index}.jpg" if filename is None else filename
    captions = (f"{index} one", f"{index} two, and more")
    image_id = index if image_id is None else image_id
    return CaptionedImage(image_id, f"sub/{filename}", captions, (2 * index, 2 * index + 1), split, "grid", filename)


def tokenize(captions):
    """As wide as the longest caption of a call."""
    rows = [[int(word) if word.isdigit() else len(word) for word in caption.split()] for caption in captions]
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


@pytest.fixture
def folder(tmp_path):
    """Array files of ten images, every second by image id and the others by file name."""
    folder = tmp_path / "features"
    folder.mkdir()
    for index in range(10):
        name = str(index) if index % 2 else f"picture-{index}"
        (folder / f"{name}.npy").write_bytes(encode(features_of(index)))
    return folder


@pytest.fixture
def images():
    """Of which the last two are the split ``val``."""
    return [make_image(index, split="train" if index < 8 else "val") for index in range(10)]


@pytest.fixture
def out(tmp_path, folder, images):
    """Shards of three of these images."""
    write_shards(images, folder, tmp_path / "out", inputs="features", samples_per_shard=3)
    return tmp_path / "out"


def shards_of(out, split="train"):
    return sorted(map(str, out.glob(f"grid-{split}-*.tar")))


def rewrite(shard, change):
    """Rewrite a shard with members that a function of name and content makes of its members; None leaves one out."""
    members = list(read_archive(shard).items())
    changed = [change(name, data) for name, data in members]
    assert changed != members
    Path(shard).write_bytes(encode_archive(filter(None, changed)))


def replace_array(key, data):
    return lambda name, old: (name, data if name == f"{key}.npy" else old)


class TestDecoding:
    @pytest.mark.parametrize(("dtype", "order"), [("<f2", "C"), (">f4", "C"), ("<f8", "F")])
    def test_floats(self, dtype, order):
        array = np.asarray([[1.5, -2, 0], [0, 0, 0]], dtype=dtype, order=order)
        features = decode_features(encode(array))
        assert features.dtype == np.float32
        assert features.flags.c_contiguous
        assert features.tolist() == [[1.5, -2, 0], [0, 0, 0]]

    def test_the_grid_of_the_message(self):
        grid = np.arange(24.0).reshape(4, 2, 3)
        with pytest.raises(
            UserError, match=r"it is \(4, 2, 3\); store a grid .* as grid\.reshape\(len\(grid\), -1\)\.T"
        ):
            decode_features(encode(grid))
        features = decode_features(encode(grid.reshape(len(grid), -1).T))
        assert features.shape == (6, 4)
        for row in range(2):
            for column in range(3):
                assert features[3 * row + column].tolist() == grid[:, row, column].tolist()

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (b"", "the file is empty"),
            (pickle.dumps(np.ones((2, 3))), "not an array file"),
            (encode(np.ones((2, 3)))[:-1], "cannot be read"),
            (b"\x93NUMPY\x01\x00\x76\x00{", "cannot be read"),
            (encode(np.ones((2, 3))).replace(b"(2, 3)", b"(9999999, 99999999999)"), "cannot be read"),
            (encode(np.array([[{}]]), allow_pickle=True), "cannot be read: Object arrays"),
            (encode(np.ones((1, 2, 3))), r"must be \(N, W\), .* it is \(1, 2, 3\)"),
            (encode(np.ones((2, 3), dtype=int)), "float16, float32 or float64, it is of int64"),
            (encode(np.ones((2, 3), dtype="longdouble")), "it is of float128|it is of longdouble"),
            (encode(np.ones((0, 3))), r"\(0, 3\) has no features"),
            (encode(np.zeros((2, 3))), r"\(2, 3\) has no features; a row of zeros"),
            (encode(np.array([[1, np.nan]])), "not finite"),
            (encode(np.array([[1, 1e39]])), "too large for 32 bits"),
        ],
    )
    @pytest.mark.filterwarnings("error")
    def test_what_is_an_error(self, data, reason):
        with pytest.raises(UserError, match=reason):
            decode_features(data)


class TestFiles:
    @pytest.fixture
    def find(self, tmp_path):
        def find(images, *names):
            for name in names:
                (tmp_path / name).touch()
            return [image.file for image in with_array_files(images, tmp_path)]

        return find

    def test_by_id_or_by_name(self, find):
        images = [make_image(1), make_image(2), make_image(4, filename="x/y/a.b.png"), make_image(7, filename="7.jpg")]
        files = find(images, "1.npy", "picture-2.npy", "a.b.npy", "7.npy", "unrelated.npy")
        assert files == ["1.npy", "picture-2.npy", "a.b.npy", "7.npy"]

    @pytest.mark.parametrize("image_id", ["../secret", "sub/secret", "a\0b"])
    def test_an_id_leads_nowhere_else(self, tmp_path, image_id):
        folder = tmp_path / "features"
        (folder / "sub").mkdir(parents=True)
        for path in (tmp_path / "secret.npy", folder / "sub" / "secret.npy", folder / "picture-1.npy"):
            path.touch()
        (found,) = with_array_files([make_image(1, image_id=image_id)], folder)
        assert found.file == "picture-1.npy"

    def test_both_names(self, find):
        with pytest.raises(UserError, match=r"both 3\.npy and 7\.npy for 7\.jpg; name all files one way"):
            find([make_image(3, filename="7.jpg")], "3.npy", "7.npy")

    def test_one_file_for_two_images(self, find):
        images = [make_image(11, filename="owls/1.jpg"), make_image(12, filename="gulls/1.jpg")]
        assert find([*images, make_image(13)], "13.npy") == ["1.npy", "1.npy", "13.npy"], "a missing one is not shared"
        with pytest.raises(UserError, match=r"one 1\.npy for owls/1\.jpg \(image id 11\) and gulls/1\.jpg \(image id"):
            find(images, "1.npy")

    def test_none_at_all(self, find, tmp_path):
        with pytest.raises(
            UserError, match=r"no array file of the images; expected names such as 1.npy or picture-1.npy"
        ):
            find([make_image(1)], "2.npy")
        with pytest.raises(UserError, match=r"cannot list the folder of features .*nowhere: No such file"):
            with_array_files([make_image(1)], tmp_path / "nowhere")


class TestWriter:
    def test_members(self, out, folder):
        content = read_archive(shards_of(out)[0])
        assert list(content) == [
            f"grid-train-0000000{index}.{extension}" for index in range(3) for extension in ("json", "npy", "txt")
        ]
        assert content["grid-train-00000001.npy"] == (folder / "1.npy").read_bytes()
        assert content["grid-train-00000002.npy"] == (folder / "picture-2.npy").read_bytes()
        assert json.loads(content["grid-train-00000002.json"]) == {
            "image_id": 2,
            "captions": ["2 one", "2 two, and more"],
            "caption_ids": [4, 5],
            "split": "train",
            "dataset": "grid",
            "filename": "picture-2.jpg",
            "num_features": 3,
            "feature_dim": WIDTH,
        }
        manifest = json.loads((out / "manifest.json").read_text())["splits"]
        assert [entry["options"] for entry in manifest.values()] == 2 * [
            {"inputs": "features", "on_error": "raise", "samples_per_shard": 3, "seed": None, "txt": "first"}
        ]

    def test_skipped_arrays_are_listed(self, tmp_path, folder, images):
        (folder / "picture-0.npy").write_bytes(b"")
        (folder / "3.npy").write_bytes(encode(np.zeros((2, WIDTH))))
        (folder / "5.npy").unlink()
        options = {"inputs": "features", "samples_per_shard": 3, "on_error": "skip"}
        entries = write_shards(images, folder, tmp_path / "out", **options)
        assert (entries["grid-train"]["images"], entries["grid-train"]["rejected"]) == (5, 3)
        lines = map(json.loads, (tmp_path / "out" / "rejected.jsonl").read_text().splitlines())
        assert {line["image"]: line["reason"] for line in lines} == {
            "picture-0.npy": "the file is empty",
            "3.npy": "the array (2, 3) has no features; a row of zeros is one that is not there",
            "picture-5.npy": "cannot read the file: No such file or directory",
        }
        for path in folder.iterdir():
            path.write_bytes(b"no")
        with pytest.raises(UserError, match=r"none of the 8 images of grid-train can be used; .*not an array file"):
            write_shards(images, folder, tmp_path / "none", **options)

    def test_arguments_that_do_not_go_together(self, tmp_path, folder, images):
        with pytest.raises(UserError, match="resize is for pictures"):
            write_shards(images, folder, tmp_path / "out", inputs="features", resize=20)


class TestReader:
    @staticmethod
    def check(images, index_of_row):
        """Compare a padded batch with the arrays it was made of."""
        longest = max(1 + index % 4 for index in index_of_row)
        assert images.dtype == torch.float32
        assert images.shape == (len(index_of_row), longest, WIDTH)
        for row, index in zip(images, index_of_row, strict=True):
            expected = torch.from_numpy(features_of(index)).float()
            assert torch.equal(row[: len(expected)], expected)
            assert not row[len(expected) :].any()

    def test_training(self, out):
        reader = TrainingPipeline(
            shards_of(out), torch.from_numpy, tokenize, 2, inputs="features", captions_per_image="all", with_labels=True
        )
        seen = []
        for images, texts, labels in DataLoader(reader, batch_size=None, num_workers=2):
            assert texts.shape == (4, 4)
            assert texts[::2, 0].tolist() == texts[1::2, 0].tolist() == labels.tolist()
            self.check(images, labels.tolist())
            seen += labels.tolist()
        assert sorted(seen) == list(range(8))

    def test_evaluation(self, out):
        reader = EvaluationReader(shards_of(out), torch.from_numpy, tokenize, 3, inputs="features")
        batches = sorted(DataLoader(reader, batch_size=None, num_workers=2), key=lambda batch: batch.shard)
        assert sum(len(batch.images) for batch in batches) == 8
        first = 0
        for batch in batches:
            assert batch.texts[:, 0].tolist() == (first + batch.image_of_caption).tolist()
            self.check(batch.images, list(range(first, first + len(batch.images))))
            first += len(batch.images)

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (encode(np.array([[1.0, np.nan, 2.0]])), "not finite"),
            (encode(np.array([[{}]]), allow_pickle=True), "Object arrays cannot be loaded"),
        ],
    )
    def test_unreadable_arrays(self, out, caplog, data, reason):
        shards = shards_of(out)
        rewrite(shards[0], replace_array("grid-train-00000001", data))
        options = {"inputs": "features", "with_labels": True}
        batches = list(TrainingPipeline(shards, torch.from_numpy, tokenize, 2, **options))
        assert len(batches) == 4, "as many steps as other processes"
        assert {label for *_, labels in batches for label in labels.tolist()} == {0, 2, 3, 4, 5, 6, 7}
        assert "sample grid-train-00000001 of" in caplog.text
        assert reason in caplog.text
        with pytest.raises(UserError, match="cannot read sample grid-train-00000001 of"):
            list(TrainingPipeline(shards, torch.from_numpy, tokenize, 2, on_error="raise", **options))
        with pytest.raises(UserError, match="cannot read sample grid-train-00000001 of"):
            list(EvaluationReader(shards, torch.from_numpy, tokenize, 2, inputs="features"))

    def test_arrays_of_other_widths(self, out):
        shards = shards_of(out)
        rewrite(shards[0], replace_array("grid-train-00000001", encode(np.ones((2, 5)))))
        reason = r"the same W in all shards: those of grid-train-00000001 are \(2, 5\), those of grid-train-00000000"
        with pytest.raises(UserError, match=reason):
            list(EvaluationReader(shards, torch.from_numpy, tokenize, 8, inputs="features"))
        with pytest.raises(UserError, match=r"features \(N, W\) must have the same W"):
            list(TrainingPipeline(shards, torch.from_numpy, tokenize, 8, inputs="features"))

    def test_the_first_sample(self, out, toy_shards):
        check_first_sample(shards_of(out)[0], inputs="features")
        picture = str(toy_shards / "toy-val-000000.tar")
        check_first_sample(picture)
        with pytest.raises(UserError, match="it has no features; expected npy, but it has png in its place"):
            check_first_sample(picture, inputs="features")
        with pytest.raises(UserError, match=r"it has no images; expected jpg or .*, but it has npy in its place"):
            check_first_sample(shards_of(out)[0])
        rewrite(shards_of(out)[0], lambda name, data: None if name.endswith("npy") else (name, data))
        for inputs, what in (("features", "has no features; expected npy$"), ("images", "webp or jpeg$")):
            with pytest.raises(UserError, match=what):
                check_first_sample(shards_of(out)[0], inputs=inputs)

    def test_a_missing_module_is_no_unreadable_sample(self, out, monkeypatch):
        monkeypatch.setitem(sys.modules, "numpy", None)
        with pytest.raises(UserError, match="numpy is not installed"):
            list(TrainingPipeline(shards_of(out), torch.from_numpy, tokenize, 2, inputs="features"))

    def test_unknown_inputs(self, out):
        shard = shards_of(out)[0]
        for call in (
            lambda: check_first_sample(shard, inputs="feature"),
            lambda: TrainingPipeline(shard, torch.from_numpy, tokenize, 2, inputs="feature"),
            lambda: EvaluationReader(shard, torch.from_numpy, tokenize, 2, inputs="feature"),
        ):
            with pytest.raises(UserError, match=r"unknown inputs 'feature' \(did you mean 'features'\?\)"):
                call()


class TestOtherReaders:
    def test_verification(self, out):
        assert verify_shards(out).problems == ()
        assert verify_shards(out).samples == 10

    @pytest.mark.parametrize(
        ("change", "problems"),
        [
            (
                replace_array("grid-train-00000001", encode(np.zeros((2, 3)))),
                ["grid-train-00000001: the array (2, 3) has no features; a row of zeros is one that is not there"],
            ),
            (
                lambda name, data: (name.replace("1.npy", "1.png"), data),
                ["grid-train-00000001: it has no features; expected npy, but it has png in its place"],
            ),
        ],
    )
    def test_verification_of_damage(self, out, change, problems):
        rewrite(shards_of(out)[0], change)
        found = verify_shards(out).problems
        prefix = "grid-train-000000.tar: "
        assert [problem.removeprefix(prefix) for problem in found if f"{prefix}grid" in problem] == problems

    def test_statistics(self, out):
        train = shard_statistics(out)["grid-train"]
        assert (train.images, train.captions, train.unusable) == (8, 16, 0)
        assert (train.features, train.feature_dims) == (Range(1, 2.5, 4), {WIDTH: 8})
        assert (train.widths, train.heights) == (None, None)
        assert train.repeated_pictures.number == 0
        sample = read_place(Folder(out), train.places[0])
        assert (sample.key, set(sample.data)) == ("grid-train-00000000", {"json", "txt"})
