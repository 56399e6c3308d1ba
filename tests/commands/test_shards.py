import hashlib
import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import PILToTensor

from vl_plugins.cli import main
from vl_plugins.data.evaluation_reader import EvaluationReader
from vl_plugins.data.shard_info import read_shard_info


def run_shards(annotations, images, out, *flags, source="coco"):
    files = annotations if isinstance(annotations, list) else [annotations]
    arguments = ["shards", source, "--annotations", *files, "--images", images, "--out", out, "--workers", 1, *flags]
    return main([str(argument) for argument in arguments])


def read_samples(folder):
    """Return the .json of every sample in the order of the shards, with the image as ``"image"``."""
    samples = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, extension = member.name.split(".")
                data = tar.extractfile(member).read()
                if extension == "json":
                    samples.setdefault(key, {}).update(json.loads(data))
                elif extension != "txt":
                    samples.setdefault(key, {})["image"] = Image.open(io.BytesIO(data))
    return list(samples.values())


def read_source(folder, name):
    return json.loads((folder / "manifest.json").read_text())["splits"][name]["source"]


def describe(*files):
    return [{"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()} for file in files]


@pytest.fixture
def toy_captions(toy_scenes, tmp_path):
    """Function that writes the first toy images of a split as an official caption file ``captions_<split>.json``.

    The annotation ids are 1000 more than Karpathy's, the order of the annotations is the reverse.
    """

    def write(split, count=3, folder=tmp_path):
        items = json.loads((toy_scenes / "dataset_toy.json").read_text())["images"]
        items = [item for item in items if item["split"] == split][:count]
        sentences = [(item["cocoid"], sentence) for item in items for sentence in item["sentences"]]
        document = {
            "images": [{"id": item["cocoid"], "file_name": item["filename"]} for item in items],
            "annotations": [
                {"id": 1000 + sentence["sentid"], "image_id": image_id, "caption": f" {sentence['raw'].upper()}"}
                for image_id, sentence in reversed(sentences)
            ],
        }
        file = folder / f"captions_{split}.json"
        file.write_text(json.dumps(document))
        return file

    return write


def test_toy_then_shards(tmp_path, capsys):
    toy, out = tmp_path / "toy", tmp_path / "out"
    assert main(["toy", "--out", str(toy), "--train", "9", "--val", "3", "--test", "3"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: vl-plugins ").replace("SHARDS", str(out))
    assert main([*command.split(), "--samples-per-shard", "4"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in table] == [
        ["shards", "images", "captions", "rejected"],
        ["toy-train-{000000..000002}.tar", "9", "45", "0"],
        ["toy-val-000000.tar", "3", "15", "0"],
        ["toy-test-000000.tar", "3", "15", "0"],
    ]
    assert read_shard_info(f"{out}/toy-train-{{000000..000002}}.tar").num_samples == 9
    assert read_source(out, "toy-val") == {
        "format": "karpathy-coco",
        "annotations": describe(toy / "dataset_toy.json"),
        "restval": "joined to train",
        "caption_ids": "karpathy-sentence",
    }


def test_options(toy_scenes, tmp_path, capsys):
    document = json.loads((toy_scenes / "dataset_toy.json").read_text())
    document["images"][1]["split"] = "restval"
    document["images"][2]["sentences"] = []
    annotations = tmp_path / "dataset.json"
    annotations.write_text(json.dumps(document))
    flags = ("--split", "train", "restval", "--dataset-name", "mine", "--leave-restval", "--on-error", "skip")
    assert run_shards(annotations, toy_scenes, tmp_path / "out", *flags) == 0
    left_out = f"left out: 1; the reasons are in {tmp_path}/out/rejected.jsonl"
    assert capsys.readouterr().out.splitlines()[-1] == left_out
    assert read_source(tmp_path / "out", "mine-train")["restval"] == "kept"
    sizes = json.loads((tmp_path / "out" / "sizes.json").read_text())
    assert sizes == {"mine-train-000000.tar": 62, "mine-restval-000000.tar": 1}
    (line,) = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "it has no captions; every image needs at least one"


def test_txt_all_is_what_clip_benchmark_reads(toy_scenes, tmp_path):
    """A line of the txt is a caption for it, and so is what follows any line break within a caption."""
    builder = pytest.importorskip("clip_benchmark.datasets.builder")
    document = json.loads((toy_scenes / "dataset_toy.json").read_text())
    images = [image for image in document["images"] if image["split"] == "test"][:5]
    expected = [[sentence["raw"] for sentence in image["sentences"]] for image in images]
    images[1]["sentences"][0]["raw"], expected[1][0] = "two\r\nlines\u2028or three\n", "two lines or three"
    annotations = tmp_path / "dataset.json"
    annotations.write_text(json.dumps(document | {"images": images}))

    def captions_read(name, *flags):
        folder = tmp_path / name / "test"
        assert run_shards(annotations, toy_scenes, folder, "--samples-per-shard", 3, *flags) == 0
        assert main(["shards", "verify", str(folder), "--workers", "1"]) == 0
        shards = sorted(folder.glob("*.tar"))
        for number, shard in enumerate(shards):
            shard.rename(folder / f"{number}.tar")
        (folder / "nshards.txt").write_text(f"{len(shards)}")
        (folder.parent / "dataset_type.txt").write_text("retrieval")
        dataset = builder.build_wds_dataset("toy", transform=PILToTensor(), data_dir=str(folder.parent))
        return [captions for _, captions in dataset]

    assert captions_read("all", "--txt", "all") == expected
    assert [len(captions) for captions in captions_read("first")] == [1, 3, 1, 1, 1]


def test_group_key(toy_scenes, tmp_path, capsys):
    document = json.loads((toy_scenes / "dataset_toy.json").read_text())
    document["images"] = [image for image in document["images"] if image["split"] == "val"][:3]
    groups = ["frog", None, "frog"]
    for image, group in zip(document["images"], groups, strict=True):
        image["object"] = group
    annotations = tmp_path / "dataset.json"
    annotations.write_text(json.dumps(document))
    assert run_shards(annotations, toy_scenes, tmp_path / "out", "--group-key", "object") == 0
    assert [sample.get("group") for sample in read_samples(tmp_path / "out")] == groups
    (entry,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"].values()
    assert (entry["source"]["group_key"], entry["groups"]) == ("object", 1)
    assert run_shards(annotations, toy_scenes, tmp_path / "wrong", "--group-key", "objekt") == 2
    assert "--group-key objekt: no image has a group there" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()


def test_coco_with_annotation_ids(toy_scenes, toy_captions, tmp_path):
    """The official file covers the one split that is written, and its captions differ in case and space."""
    official = toy_captions("val", count=100)
    flags = ("--split", "val", "--coco-annotations", official)
    assert run_shards(toy_scenes / "dataset_toy.json", toy_scenes, tmp_path / "out", *flags) == 0
    items = json.loads((toy_scenes / "dataset_toy.json").read_text())["images"]
    expected = [
        ([sentence["raw"] for sentence in item["sentences"]], [1000 + sentid for sentid in item["sentids"]])
        for item in items
        if item["split"] == "val"
    ]
    assert len(expected) == 24
    assert [(sample["captions"], sample["caption_ids"]) for sample in read_samples(tmp_path / "out")] == expected
    assert read_source(tmp_path / "out", "toy-val") == {
        "format": "karpathy-coco",
        "annotations": describe(toy_scenes / "dataset_toy.json"),
        "coco_annotations": describe(official),
        "restval": "joined to train",
        "caption_ids": "coco-annotation",
    }


def test_coco_captions(toy_scenes, toy_captions, tmp_path):
    files = [toy_captions("train"), toy_captions("val"), toy_captions("test")]
    flags = ("--split", "test", "train")
    assert run_shards(files, toy_scenes, tmp_path / "out", *flags, source="coco-captions") == 0
    sizes = json.loads((tmp_path / "out" / "sizes.json").read_text())
    assert sizes == {"coco-train-000000.tar": 3, "coco-test-000000.tar": 3}
    sample = read_samples(tmp_path / "out")[0]
    assert (sample["split"], sample["filename"]) == ("test", "toy_test_000089.png")
    assert sample["caption_ids"] == sorted(sample["caption_ids"], reverse=True)
    assert min(sample["caption_ids"]) > 1000
    assert read_source(tmp_path / "out", "coco-train") == {
        "format": "coco-captions",
        "annotations": describe(*files),
        "caption_ids": "coco-annotation",
    }


def test_table(toy_scenes, tmp_path):
    table = tmp_path / "two words.csv"
    table.write_text(
        "where;english;german;set;key;caption\n"
        "train/toy_train_000001.png;one;eins;train;a;no\n"
        "val/toy_val_000065.png;two;zwei;val;b;no\n"
    )
    flags = "--image-column where --caption-column german english --split-column set --id-column key --delimiter ;"
    assert run_shards(table, toy_scenes, tmp_path / "out", *flags.split(), source="table") == 0
    facts = [
        [sample[key] for key in ("dataset", "split", "image_id", "captions", "caption_ids")]
        for sample in read_samples(tmp_path / "out")
    ]
    assert facts == [
        ["two_words", "train", "a", ["eins", "one"], [0, 1]],
        ["two_words", "val", "b", ["zwei", "two"], [2, 3]],
    ]
    assert read_source(tmp_path / "out", "two_words-val") == {
        "format": "table",
        "annotations": describe(table),
        "caption_ids": "running-number",
    }


def test_table_without_splits_and_with_tabs(toy_scenes, tmp_path, capsys):
    table = tmp_path / "t.csv"
    table.write_text("filepath\ttitle\ntrain/toy_train_000001.png\tone, two\n")
    flags = ("--delimiter", r"\t", "--split-name", "mine", "--dataset-name", "set", "--on-error", "skip")
    # A URL of fsspec.
    assert run_shards(table, toy_scenes, f"file://{tmp_path}/out", *flags, source="table") == 0
    assert json.loads((tmp_path / "out" / "sizes.json").read_text()) == {"set-mine-000000.tar": 1}


def test_split_filter_and_rejected_rows_of_a_table(toy_scenes, tmp_path, capsys):
    table = tmp_path / "t.jsonl"
    rows = [("train", "one"), ("val", "two"), ("val", ""), ("test", "")]
    table.write_text(
        "".join(
            json.dumps({"image": f"val/toy_val_{65 + index:06d}.png", "caption": caption, "split": split}) + "\n"
            for index, (split, caption) in enumerate(rows)
        )
    )
    skip = ("--on-error", "skip")
    assert run_shards(table, toy_scenes, tmp_path / "out", *skip, "--split", "val", source="table") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["t-val-000000.tar", "1", "1", "1"]
    (line,) = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["image"] == f"{table}: line 3 (val/toy_val_000067.png)"

    # Of a split without any usable image there would be no shards, and not even a line that says so.
    for splits in ([], ["--split", "test"], ["--split", "train", "test"]):
        assert run_shards(table, toy_scenes, tmp_path / "out2", *skip, *splits, source="table") == 2
        (line,) = capsys.readouterr().err.splitlines()
        place = f"{table}: line 4 (val/toy_val_000068.png)"
        reason = f"none of the images of test can be used; {place}: caption '' is blank"
        assert line == f"vl-plugins shards: error: {reason}"
    assert run_shards(table, toy_scenes, tmp_path / "out2", *skip, "--split", "tst", source="table") == 2
    assert "unknown split 'tst' (did you mean 'test'?); known: test, train, val" in capsys.readouterr().err


def test_dry_run_prints_the_same_table_and_writes_nothing(toy_scenes, tmp_path, capsys):
    table = tmp_path / "t.csv"
    table.write_text("image,caption\nval/toy_val_000065.png,one\nval/toy_val_000066.png,\nnowhere.png,three\n")
    flags = ("--on-error", "skip")
    assert run_shards(table, toy_scenes, tmp_path / "out", *flags, "--dry-run", source="table") == 0
    *summary, last = capsys.readouterr().out.splitlines()
    assert last == "dry run: nothing was written"
    assert summary[1].split()[:4] == ["t-train-000000.tar", "1", "1", "2"]
    assert not (tmp_path / "out").exists()
    assert run_shards(table, toy_scenes, tmp_path / "out", *flags, source="table") == 0
    *printed, last = capsys.readouterr().out.splitlines()
    assert printed == summary
    assert last == f"left out: 2; the reasons are in {tmp_path}/out/rejected.jsonl"


def test_options_of_the_writer(toy_scenes, tmp_path, capsys):
    flags = ("--samples-per-shard", 30, "--txt", "all", "--resize", 20, "--on-error", "skip", "--seed", 3)
    expected = {"samples_per_shard": 30, "txt": "all", "resize": 20, "on_error": "skip", "seed": 3, "inputs": "images"}
    arguments = (toy_scenes / "dataset_toy.json", toy_scenes, tmp_path, "--split", "train", *flags)
    for quality in (95, 10):
        more = () if quality == 95 else ("--quality", quality, "--overwrite", "--workers", 2)
        assert run_shards(*arguments, *more) == 0
        entry = json.loads((tmp_path / "manifest.json").read_text())["splits"]["toy-train"]
        assert entry["options"] == expected | {"quality": quality}
        assert len(entry["shards"]) == 3
        (image, *_) = (sample["image_id"] for sample in read_samples(tmp_path))
        assert image != 1
    assert run_shards(*arguments, "--seed", 4) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_features_in_place_of_images(toy_captions, tmp_path):
    """By the id of the image, or else by the name of its file."""
    features = tmp_path / "features"
    features.mkdir()
    table = tmp_path / "own.csv"
    table.write_text("image,caption\nsub/toy_val_000065.jpg,one\nsub/toy_val_000066.jpg,two\n")
    for source, annotations, names in (
        ("coco-captions", toy_captions("val"), ["65", "66", "67"]),
        ("table", table, ["toy_val_000065", "toy_val_000066"]),
    ):
        for number, name in enumerate(names, 1):
            np.save(features / f"{name}.npy", np.full((2, 3), number, dtype="float32"))
        arguments = ["shards", source, "--annotations", annotations, "--features", features, "--out", tmp_path / source]
        assert main([str(argument) for argument in [*arguments, "--workers", 1]]) == 0
        (shard,) = (tmp_path / source).glob("*.tar")
        ((images, *_),) = EvaluationReader(str(shard), torch.from_numpy, to_zeros, 24, inputs="features")
        assert images[:, 0, 0].tolist() == list(range(1, len(names) + 1))


def to_zeros(captions):
    return torch.zeros(len(captions), 1)


def test_images_or_features(toy_scenes, tmp_path, capsys):
    arguments = [
        "shards",
        "coco",
        "--annotations",
        str(toy_scenes / "dataset_toy.json"),
        "--out",
        str(tmp_path / "out"),
    ]
    for flags, reason in (
        ((), "one of the arguments --images --features is required"),
        (("--images", "a", "--features", "b"), "argument --features: not allowed with argument --images"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*arguments, *flags])
        assert reason in capsys.readouterr().err
    assert main([*arguments, "--features", str(tmp_path)]) == 2
    assert "has no array file of the images; expected names such as 112.npy or toy_test" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--images", "nowhere"),
            "nowhere/train/toy_train_000001.png (image id 1): cannot read the file: No such file",
        ),
        (("--annotations", "nowhere.json"), "cannot read nowhere.json: No such file"),
        (("--split", "trian"), "unknown split 'trian' (did you mean 'train'?); known: test, train, val"),
        (("--samples-per-shard", "0"), "samples_per_shard must be at least 1, got 0"),
        (("--dataset-name", "a b"), "'a b' cannot name a data set"),
        (("--quality", "80"), "--quality needs --resize; without it the image files stay as they are"),
        (("--coco-annotations", "nowhere.json"), "cannot read nowhere.json: No such file"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(toy_scenes, tmp_path, capsys, flags, message):
    out = tmp_path / "out"
    assert run_shards(toy_scenes / "dataset_toy.json", toy_scenes, out, *flags) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("vl-plugins shards: error: ")
    assert message in line
    assert not out.exists() or list(out.iterdir()) == []
