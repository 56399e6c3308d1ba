import io
import json
import pickle
import shutil
import sys
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from vl_plugins.data.annotations import CaptionedImage
from vl_plugins.data.collection import read_collection
from vl_plugins.data.feature_arrays import FeatureInfo, decode_features, inspect_features, with_array_files
from vl_plugins.data.reader import evaluation_pipeline, training_pipeline
from vl_plugins.data.shard_info import check_first_sample
from vl_plugins.data.shards import write_shards
from vl_plugins.data.statistics import Range, read_place, shard_statistics
from vl_plugins.data.storage import Folder
from vl_plugins.data.verification import verify_shards
from vl_plugins.utils.errors import UserError

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


def read_folder(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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
    write_shards(images, None, tmp_path / "out", features=folder, samples_per_shard=3)
    return tmp_path / "out"


def shards_of(out, split="train"):
    return sorted(map(str, out.glob(f"grid-{split}-*.tar")))


def rewrite(shard, change):
    """Rewrite a shard with members that a function of name and content makes of its members; None leaves one out."""
    with tarfile.open(shard) as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar]
    changed = [change(name, data) for name, data in members]
    assert changed != members
    with tarfile.open(shard, "w") as tar:
        for name, data in filter(None, changed):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


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
        assert torch.from_numpy(features).shape == inspect_features(encode(array)) == FeatureInfo(2, 3)

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
            (b"\xff\xd8 a picture", "not an array file"),
            (pickle.dumps(np.ones((2, 3))), "not an array file"),
            (encode(np.ones((2, 3)))[:-1], "cannot be read"),
            (b"\x93NUMPY\x01\x00\x76\x00{", "cannot be read"),
            (encode(np.ones((2, 3))).replace(b"(2, 3)", b"(9999999, 99999999999)"), "cannot be read"),
            (encode(np.array([[{}]]), allow_pickle=True), "cannot be read: Object arrays"),
            (encode(np.ones(3)), r"must be \(N, W\), .* it is \(3,\)"),
            (encode(np.ones((1, 2, 3))), r"must be \(N, W\), .* it is \(1, 2, 3\)"),
            (encode(np.ones((2, 3), dtype=int)), "float16, float32 or float64, it is of int64"),
            (encode(np.ones((2, 3), dtype=complex)), "it is of complex128"),
            (encode(np.ones((2, 3), dtype="longdouble")), "it is of float128|it is of longdouble"),
            (encode(np.ones((0, 3))), r"\(0, 3\) has no features"),
            (encode(np.ones((3, 0))), r"\(3, 0\) has no features"),
            (encode(np.zeros((2, 3))), r"\(2, 3\) has no features; a row of zeros"),
            (encode(np.array([[1, np.nan]])), "not finite"),
            (encode(np.array([[1, -np.inf]])), "not finite"),
            (encode(np.array([[1, 1e39]])), "too large for 32 bits"),
        ],
    )
    @pytest.mark.filterwarnings("error")
    def test_what_is_refused(self, data, reason):
        for function in (decode_features, inspect_features):
            with pytest.raises(UserError, match=reason):
                function(data)


class TestFiles:
    @pytest.fixture
    def find(self, tmp_path):
        def find(images, *names):
            for name in names:
                (tmp_path / name).touch()
            return [image.file for image in with_array_files(images, tmp_path)]

        return find

    def test_by_id_or_by_name(self, find):
        images = [make_image(1), make_image(2), make_image(3, image_id="b"), make_image(4, filename="x/y/a.b.png")]
        files = find(images, "1.npy", "picture-2.npy", "b.npy", "a.b.npy", "unrelated.npy")
        assert files == ["1.npy", "picture-2.npy", "b.npy", "a.b.npy"]

    def test_the_rest_of_a_record_stays(self, tmp_path):
        (tmp_path / "1.npy").touch()
        image = make_image(1)
        assert with_array_files([image], tmp_path) == [replace(image, file="1.npy")]

    def test_an_id_that_is_the_name(self, find):
        assert find([make_image(7, filename="7.jpg")], "7.npy") == ["7.npy"]

    @pytest.mark.parametrize("image_id", ["../secret", "/etc/secret", "sub/secret", "..", "C:secret", "a\0b"])
    def test_an_id_leads_nowhere_else(self, tmp_path, image_id):
        folder = tmp_path / "features"
        (folder / "sub").mkdir(parents=True)
        for path in (tmp_path / "secret.npy", folder / "sub" / "secret.npy", folder / "picture-1.npy"):
            path.touch()
        (found,) = with_array_files([make_image(1, image_id=image_id)], folder)
        assert found.file == "picture-1.npy"

    def test_both_names(self, find):
        with pytest.raises(UserError, match=r"both 3\.npy, by image id, and 7\.npy, by file name, for image 7\.jpg"):
            find([make_image(3, filename="7.jpg")], "3.npy", "7.npy")

    def test_one_file_for_two_images(self, find):
        images = [make_image(11, filename="owls/1.jpg"), make_image(12, filename="gulls/1.jpg")]
        with pytest.raises(UserError, match=r"one 1\.npy for two images, owls/1\.jpg \(image id 11\) and gulls/1\.jpg"):
            find(images, "1.npy")

    def test_missing_files_are_not_shared(self, find):
        images = [make_image(11, filename="owls/1.jpg"), make_image(12, filename="gulls/1.jpg"), make_image(13)]
        assert find(images, "13.npy") == ["1.npy", "1.npy", "13.npy"]

    def test_none_at_all(self, find, tmp_path):
        with pytest.raises(
            UserError, match=r"no array file of the images; expected names such as 1.npy or picture-1.npy"
        ):
            find([make_image(1)], "2.npy")
        with pytest.raises(UserError, match=r"cannot list the folder of features .*nowhere: No such file"):
            with_array_files([make_image(1)], tmp_path / "nowhere")


class TestWriter:
    def test_members(self, out, folder):
        with tarfile.open(shards_of(out)[0]) as tar:
            content = {member.name: tar.extractfile(member).read() for member in tar}
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
            {"inputs": "features", "on_error": "raise", "samples_per_shard": 3}
        ]

    @pytest.mark.parametrize("options", [{"samples_per_shard": 3}, {"shard_size_mb": 0.03, "seed": 1}])
    def test_the_same_bytes_with_two_workers_and_after_an_interruption(self, tmp_path, folder, images, options):
        results = [
            write_shards(images, None, tmp_path / str(workers), features=folder, workers=workers, **options)
            for workers in (1, 2)
        ]
        whole = read_folder(tmp_path / "1")
        assert results[0] == results[1]
        assert whole == read_folder(tmp_path / "2")
        assert len(shards_of(tmp_path / "1")) > 1
        if "shard_size_mb" in options:
            sizes = [len(data) for name, data in whole.items() if name.endswith(".tar")]
            assert 20_000 < max(sizes) <= 30_000

        # Image 7 is in the last shard of train, or it is shuffled.
        content = (folder / "7.npy").read_bytes()
        (folder / "7.npy").unlink()
        with pytest.raises(UserError, match=r"picture-7\.npy \(image id 7\): cannot read the file: No such file"):
            write_shards(images, None, tmp_path / "again", features=folder, **options)
        assert "manifest.json" not in read_folder(tmp_path / "again")
        (folder / "7.npy").write_bytes(content)
        write_shards(images, None, tmp_path / "again", features=folder, **options)
        assert read_folder(tmp_path / "again") == whole

    def test_a_changed_array_file_is_noticed(self, tmp_path, folder, images):
        (folder / "7.npy").unlink()
        with pytest.raises(UserError, match="image id 7"):
            write_shards(images, None, tmp_path / "out", features=folder, samples_per_shard=3)
        (folder / "7.npy").write_bytes(encode(features_of(7)))
        (folder / "1.npy").write_bytes(encode(features_of(1) + 1))
        with pytest.raises(UserError, match=r"grid-train-000000\.tar exists and does not belong to this run"):
            write_shards(images, None, tmp_path / "out", features=folder, samples_per_shard=3)

    def test_skipped_arrays_are_listed(self, tmp_path, folder, images):
        (folder / "picture-0.npy").write_bytes(b"")
        (folder / "3.npy").write_bytes(encode(np.ones((2, WIDTH + 1))))
        (folder / "5.npy").unlink()
        options = {"features": folder, "samples_per_shard": 3, "on_error": "skip"}
        entries = write_shards(images, None, tmp_path / "out", **options)
        assert (entries["grid-train"]["images"], entries["grid-train"]["rejected"]) == (5, 3)
        lines = map(json.loads, (tmp_path / "out" / "rejected.jsonl").read_text().splitlines())
        assert {line["image"]: line["reason"] for line in lines} == {
            "picture-0.npy": "the file is empty",
            "3.npy": "its features have 4 values each, those of the first image 3",
            "picture-5.npy": "cannot read the file: No such file or directory",
        }
        (folder / "picture-0.npy").write_bytes(encode(features_of(0)))
        with pytest.raises(
            UserError, match=r"3\.npy \(image id 3\): its features have 4 values each, those of the first"
        ):
            write_shards(images, None, tmp_path / "strict", features=folder, samples_per_shard=3)

    def test_nothing_usable(self, tmp_path, folder, images):
        for path in folder.iterdir():
            path.write_bytes(b"no")
        with pytest.raises(UserError, match=r"none of the 8 images of grid-train can be used; .*not an array file"):
            write_shards(images, None, tmp_path / "out", features=folder, on_error="skip")

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"resize": 20}, "resize is for pictures"),
            ({"image_root": "x"}, "either image_root or features"),
            ({"features": None}, "either image_root or features"),
        ],
    )
    def test_arguments_that_do_not_go_together(self, tmp_path, folder, images, options, reason):
        arguments = {"image_root": None, "out": tmp_path / "out", "features": folder, **options}
        with pytest.raises(UserError, match=reason):
            write_shards(images, **arguments)


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
        reader = training_pipeline(
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
        reader = evaluation_pipeline(shards_of(out), torch.from_numpy, tokenize, 3, inputs="features")
        batches = list(DataLoader(reader, batch_size=None, num_workers=2))
        assert [images.shape[:2] for images, *_ in batches] == [(3, 3), (3, 4), (2, 4)]
        for images, texts, image_of_caption, positions in batches:
            assert texts[:, 0].tolist() == positions[image_of_caption].tolist()
            self.check(images, positions.tolist())

    def test_captions_of_a_batch_are_tokenized_in_one_call(self, out):
        """So that only those need the same length."""
        calls = []

        def tokenizer(captions):
            calls.append(len(captions))
            return tokenize(captions)

        shards, options = shards_of(out), {"inputs": "features"}
        first = training_pipeline(shards, torch.from_numpy, tokenizer, 4, captions_per_image="first", **options)
        assert [texts.shape for _, texts in first] == [(4, 2), (4, 2)]
        both = evaluation_pipeline(shards, torch.from_numpy, tokenizer, 5, **options)
        assert [texts.shape for _, texts, *_ in both] == [(10, 4), (6, 4)]
        assert calls == [4, 4, 10, 6]

    def test_the_transform_may_take_regions_away(self, out):
        reader = evaluation_pipeline(
            shards_of(out), lambda array: torch.from_numpy(array[:2]), tokenize, 8, inputs="features"
        )
        ((images, *_),) = reader
        assert images.shape == (8, 2, WIDTH)

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (encode(np.array([[1.0, np.nan, 2.0]])), "not finite"),
            (encode(np.array([[{}]]), allow_pickle=True), "Object arrays cannot be loaded"),
            (encode(np.ones(WIDTH)), "must be (N, W)"),
            (b"\xff\xd8", "not an array file"),
        ],
    )
    def test_unreadable_arrays(self, out, caplog, data, reason):
        shards = shards_of(out)
        rewrite(shards[0], replace_array("grid-train-00000001", data))
        options = {"inputs": "features", "with_labels": True}
        batches = list(training_pipeline(shards, torch.from_numpy, tokenize, 2, **options))
        assert len(batches) == 4, "as many steps as other processes"
        assert {label for *_, labels in batches for label in labels.tolist()} == {0, 2, 3, 4, 5, 6, 7}
        assert "sample grid-train-00000001 of" in caplog.text
        assert reason in caplog.text
        with pytest.raises(UserError, match="cannot read sample grid-train-00000001 of"):
            list(training_pipeline(shards, torch.from_numpy, tokenize, 2, on_error="raise", **options))
        with pytest.raises(UserError, match="cannot read sample grid-train-00000001 of"):
            list(evaluation_pipeline(shards, torch.from_numpy, tokenize, 2, inputs="features"))

    def test_arrays_of_other_widths(self, out):
        shards = shards_of(out)
        rewrite(shards[0], replace_array("grid-train-00000001", encode(np.ones((2, 5)))))
        reason = (
            r"the same W in all shards: those of sample grid-train-00000001 of .*000000\.tar are \(2, 5\), those of gr"
        )
        with pytest.raises(UserError, match=reason):
            list(evaluation_pipeline(shards, torch.from_numpy, tokenize, 8, inputs="features"))
        with pytest.raises(UserError, match=r"features \(N, W\) must have the same W"):
            list(training_pipeline(shards, torch.from_numpy, tokenize, 8, inputs="features"))

    def test_the_first_sample(self, out, toy_shards):
        features = check_first_sample(shards_of(out)[0], inputs="features")
        assert features.tolist() == features_of(0).tolist()
        picture = str(toy_shards / "toy-val-000000.tar")
        assert check_first_sample(picture).size == (64, 64)
        with pytest.raises(
            UserError, match=r"has no features; expected npy, but it has a picture \(png\); .*--features"
        ):
            check_first_sample(picture, inputs="features")
        with pytest.raises(UserError, match=r"has no image; expected one of jpg, .*, but it has features \(npy\)"):
            check_first_sample(shards_of(out)[0])
        rewrite(shards_of(out)[0], lambda name, data: None if name.endswith("npy") else (name, data))
        for inputs, what in (("features", "has no features; expected npy'"), ("images", "webp, jpeg'")):
            with pytest.raises(UserError, match=what):
                check_first_sample(shards_of(out)[0], inputs=inputs)

    def test_a_missing_module_is_no_unreadable_sample(self, out, monkeypatch):
        monkeypatch.setitem(sys.modules, "numpy", None)
        with pytest.raises(UserError, match="numpy is not installed"):
            list(training_pipeline(shards_of(out), torch.from_numpy, tokenize, 2, inputs="features"))

    def test_unknown_inputs(self, out):
        shard = shards_of(out)[0]
        for call in (
            lambda: check_first_sample(shard, inputs="feature"),
            lambda: training_pipeline(shard, torch.from_numpy, tokenize, 2, inputs="feature"),
            lambda: evaluation_pipeline(shard, torch.from_numpy, tokenize, 2, inputs="feature"),
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
                replace_array("grid-train-00000001", encode(np.ones((5, 2)))),
                ["grid-train-00000001: its json says 2 x 3, its features 5 x 2"],
            ),
            (
                replace_array("grid-train-00000001", encode(np.zeros((2, 3)))),
                ["grid-train-00000001: the array (2, 3) has no features; a row of zeros is one that is not there"],
            ),
            (
                lambda name, data: (name.replace("1.npy", "1.png"), data),
                [
                    "grid-train-00000001: has an unknown file grid-train-00000001.png",
                    "grid-train-00000001: has no features",
                ],
            ),
            (
                lambda name, data: (name, data.replace(b"num_features", b"width")),
                [f"grid-train-0000000{index}: its json: it has unknown keys: width" for index in range(3)],
            ),
        ],
    )
    def test_verification_of_damage(self, out, change, problems):
        rewrite(shards_of(out)[0], change)
        found = verify_shards(out).problems
        prefix = "grid-train-000000.tar: "
        assert [problem.removeprefix(prefix) for problem in found if f"{prefix}grid" in problem] == problems

    def test_pictures_where_the_manifest_says_features(self, toy_shards, tmp_path):
        folder = shutil.copytree(toy_shards, tmp_path / "toy")
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["splits"]["toy-val"]["options"]["inputs"] = "features"
        (folder / "manifest.json").write_text(json.dumps(manifest))
        problems = verify_shards(folder, splits=["val"]).problems
        assert sum("has no features" in problem for problem in problems) == 24
        assert sum("json: it has unknown keys: height, width" in problem for problem in problems) == 24

    @pytest.mark.parametrize("own", [True, False])
    def test_statistics(self, out, own):
        if not own:
            (out / "manifest.json").unlink()
        train = shard_statistics(out)["grid-train"]
        assert (train.images, train.captions, train.unusable) == (8, 16, 0)
        assert (train.features, train.feature_dims) == (Range(1, 2.5, 4), {WIDTH: 8})
        assert (train.widths, train.heights) == (None, None)
        assert train.repeated_pictures.number == 0
        sample = read_place(Folder(out), train.places[0])
        assert (sample.picture, sample.captions) == (None, ["0 one", "0 two, and more"])

    def test_statistics_of_repeated_arrays(self, tmp_path, folder, images):
        shutil.copy(folder / "1.npy", folder / "picture-4.npy")
        write_shards(images, None, tmp_path / "out", features=folder)
        repeats = shard_statistics(tmp_path / "out")["grid-train"].repeated_pictures
        assert (repeats.number, repeats.example) == (2, "grid-train-00000001")

    def test_pictures_of_a_collection(self, out):
        collection = read_collection(shards_of(out))
        assert collection.image_ids == tuple(range(8))
        with pytest.raises(
            UserError, match=r"cannot read the pictures of shard .*: .*has no image; .* it has features"
        ):
            collection.pictures([0])


def test_shards_of_pictures_are_what_they_were(tmp_path):
    """No field of their samples and manifest tells of features."""
    Image.new("RGB", (4, 5)).save(tmp_path / "picture-0.png")
    image = replace(make_image(0), file="picture-0.png")
    entries = write_shards([image], tmp_path, tmp_path / "out")
    assert entries["grid-train"]["options"] == {"samples_per_shard": 1000, "on_error": "raise"}
    with tarfile.open(tmp_path / "out" / "grid-train-000000.tar") as tar:
        record = json.load(tar.extractfile("grid-train-00000000.json"))
    assert (len(record), record["width"], record["height"]) == (8, 4, 5)
