import hashlib
import io
import json
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import CenterCrop, Compose, PILToTensor

from vl_plugins.cli import build_parser, main
from vl_plugins.commands.shards import EXAMPLES
from vl_plugins.data.reader import evaluation_pipeline, training_pipeline
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
    options = [json.loads((tmp_path / name / "test/manifest.json").read_text()) for name in ("all", "first")]
    assert [manifest["splits"]["toy-test"]["options"].get("txt") for manifest in options] == ["all", None]


@pytest.mark.parametrize("source", ["coco", "flickr30k", "coco-captions", "table"])
def test_group_key(toy_scenes, toy_captions, tmp_path, capsys, source):
    """Every source takes groups from a field or column; those of an image are in its json."""
    document = json.loads((toy_scenes / "dataset_toy.json").read_text())
    images = [image for image in document["images"] if image["split"] == "val"][:3]
    groups = ["frog", None, "frog"]
    root = toy_scenes if source == "coco" else toy_scenes / "val"
    if source == "table":
        annotations = tmp_path / "captions.csv"
        rows = [f"{image['filename']},a,{group or ''}" for image, group in zip(images, groups, strict=True)]
        annotations.write_text("\n".join(["image,caption,object", *rows]))
    else:
        if source == "coco-captions":
            annotations = toy_captions("val")
            document = json.loads(annotations.read_text())
        else:
            annotations = tmp_path / "dataset.json"
            document["images"] = images
        for image, group in zip(document["images"], groups, strict=True):
            image["object"] = group
        annotations.write_text(json.dumps(document))
    flags = ("--group-key", "object", "--dataset-name", "toy")
    assert run_shards(annotations, root, tmp_path / "out", *flags, source=source) == 0
    assert [sample.get("group") for sample in read_samples(tmp_path / "out")] == groups
    (entry,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"].values()
    assert (entry["source"]["group_key"], entry["groups"]) == ("object", 1)
    assert main(["shards", "verify", str(tmp_path / "out"), "--workers", "1"]) == 0
    capsys.readouterr()
    assert main(["shards", "info", str(tmp_path / "out")]) == 0
    assert "  groups              1\n" in capsys.readouterr().out

    if source != "table":  # where an unknown column is an error already
        assert run_shards(annotations, root, tmp_path / "wrong", "--group-key", "objekt", source=source) == 2
        assert "--group-key objekt: no image has a group there" in capsys.readouterr().err
        assert not (tmp_path / "wrong").exists()


def test_flickr30k(toy_scenes, tmp_path):
    document = json.loads((toy_scenes / "dataset_toy.json").read_text())
    document["images"] = document["images"][:5]
    for image in document["images"]:
        del image["filepath"], image["cocoid"]
    annotations = tmp_path / "dataset.json"
    annotations.write_text(json.dumps(document | {"dataset": "flickr30k"}))
    assert run_shards(annotations, toy_scenes / "train", tmp_path / "out", source="flickr30k") == 0
    assert json.loads((tmp_path / "out" / "sizes.json").read_text()) == {"flickr30k-train-000000.tar": 5}
    assert read_source(tmp_path / "out", "flickr30k-train") == {
        "format": "karpathy-flickr30k",
        "annotations": describe(annotations),
        "restval": "joined to train",
        "caption_ids": "karpathy-sentence",
    }


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


def test_coco_with_official_files_of_some_images(toy_scenes, toy_captions, tmp_path, capsys):
    flags = ("--split", "val", "--coco-annotations", toy_captions("val", count=3))
    assert run_shards(toy_scenes / "dataset_toy.json", toy_scenes, tmp_path / "out", *flags) == 2
    assert "captions_val.json: image id 68 (val/toy_val_000068.png): it has no annotations" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run_shards(toy_scenes / "dataset_toy.json", toy_scenes, tmp_path / "out", *flags, "--on-error", "skip") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["toy-val-000000.tar", "3", "15", "21"]
    assert len((tmp_path / "out" / "rejected.jsonl").read_text().splitlines()) == 21


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


def test_names_of_coco_captions(toy_scenes, toy_captions, tmp_path):
    flags = ("--split-name", "test-dev", "--dataset-name", "mine")
    assert run_shards(toy_captions("val"), toy_scenes, tmp_path / "out", *flags, source="coco-captions") == 0
    assert json.loads((tmp_path / "out" / "sizes.json").read_text()) == {"mine-test-dev-000000.tar": 3}


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


def test_table_without_splits_and_with_tabs(toy_scenes, tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("filepath\ttitle\ntrain/toy_train_000001.png\tone, two\n")
    flags = ("--delimiter", r"\t", "--split-name", "mine", "--dataset-name", "set")
    assert run_shards(table, toy_scenes, tmp_path / "out", *flags, source="table") == 0
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
    assert json.loads(line)["image"] == "line 3 (val/toy_val_000067.png)"

    # Of a split without any usable image there would be no shards, and not even a line that says so.
    for splits in ([], ["--split", "test"], ["--split", "train", "test"]):
        assert run_shards(table, toy_scenes, tmp_path / "out2", *skip, *splits, source="table") == 2
        (line,) = capsys.readouterr().err.splitlines()
        reason = "none of the images of test can be used; line 4 (val/toy_val_000068.png): caption '' is blank"
        assert line == f"vl-plugins shards: error: {reason}"
    assert run_shards(table, toy_scenes, tmp_path / "out2", *skip, "--split", "tst", source="table") == 2
    assert "unknown split 'tst' (did you mean 'test'?); known: test, train, val" in capsys.readouterr().err


@pytest.mark.parametrize("size", [("--samples-per-shard", "5"), ("--shard-size-mb", "0.02")])
def test_dry_run_prints_the_same_table_and_writes_nothing(toy_scenes, tmp_path, capsys, size):
    flags = ("--split", "val", *size)
    assert run_shards(toy_scenes / "dataset_toy.json", toy_scenes, tmp_path / "out", *flags, "--dry-run") == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert last == "dry run: nothing was written"
    assert not (tmp_path / "out").exists()
    assert run_shards(toy_scenes / "dataset_toy.json", toy_scenes, tmp_path / "out", *flags) == 0
    assert capsys.readouterr().out.splitlines() == table
    shards = [file.stat().st_size for file in (tmp_path / "out").glob("*.tar")]
    assert len(shards) > 2
    assert size[0] == "--samples-per-shard" or max(shards) <= 20_000


def test_dry_run_counts_the_rejected_and_names_no_file(toy_scenes, tmp_path, capsys):
    table = tmp_path / "t.csv"
    table.write_text("image,caption\nval/toy_val_000065.png,one\nval/toy_val_000066.png,\nnowhere.png,three\n")
    assert run_shards(table, toy_scenes, tmp_path / "out", "--on-error", "skip", "--dry-run", source="table") == 0
    output = capsys.readouterr().out.splitlines()
    assert output[1].split()[:4] == ["t-train-000000.tar", "1", "1", "2"]
    assert output[2:] == ["dry run: nothing was written"]


def test_resize_and_quality(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    Image.effect_noise((60, 40), 50).save(folder / "a.jpg", quality=95)
    (tmp_path / "t.csv").write_text("image,caption\na.jpg,one\n")
    sizes = {}
    for quality in ((), ("--quality", "95"), ("--quality", "10")):
        out = tmp_path / f"out{quality}"
        assert run_shards(tmp_path / "t.csv", folder, out, "--resize", "20", *quality, source="table") == 0
        (sample,) = read_samples(out)
        assert sample["image"].size == (sample["width"], sample["height"]) == (30, 20)
        sizes[quality] = sample["image"].quantization
    assert sizes[()] == sizes["--quality", "95"] != sizes["--quality", "10"]


def test_seed_workers_and_overwrite(toy_scenes, tmp_path, capsys):
    def image_ids(out, *flags):
        assert run_shards(toy_scenes / "dataset_toy.json", toy_scenes, tmp_path / out, "--split", "train", *flags) == 0
        return [sample["image_id"] for sample in read_samples(tmp_path / out)]

    ordered, shuffled = image_ids("a"), image_ids("b", "--seed", "3")
    assert shuffled != ordered == sorted(shuffled)
    assert shuffled == image_ids("b", "--seed", "3", "--workers", "2", "--samples-per-shard", "1000")
    flags = ("--split", "train", "--seed", "4")
    assert run_shards(toy_scenes / "dataset_toy.json", toy_scenes, tmp_path / "b", *flags) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert sorted(image_ids("b", "--seed", "4", "--overwrite")) == ordered


def test_a_url_as_folder_of_the_shards(toy_scenes, tmp_path, capsys):
    table = tmp_path / "t.csv"
    table.write_text("image,caption\nval/toy_val_000065.png,one\nval/toy_val_000066.png,\n")
    out = f"file://{tmp_path}/out"
    assert run_shards(table, toy_scenes, out, "--on-error", "skip", source="table") == 0
    assert (tmp_path / "out" / "t-train-000000.tar").is_file()
    assert capsys.readouterr().out.splitlines()[-1] == f"left out: 1; the reasons are in {out}/rejected.jsonl"


@pytest.mark.parametrize("source", ["coco", "flickr30k", "coco-captions", "table"])
def test_help_of_each_source(source, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["shards", source, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("--annotations FILE", "[--samples-per-shard N | --shard-size-mb MB]", "--dry-run", "example:"):
        assert words in text
    # The example is a command line that can be parsed.
    command = EXAMPLES[source].replace("\\\n", " ").splitlines()[1]
    arguments = build_parser().parse_args(shlex.split(command)[1:])
    assert (arguments.out, arguments.on_error, arguments.samples_per_shard) == ("shards", "raise", 1000)
    assert arguments.workers >= 1


def test_the_example_table_is_read_as_its_help_says(tmp_path):
    lines = [line.strip() for line in EXAMPLES["table"].splitlines()]
    start = lines.index("filepath,title,split")
    table = tmp_path / "birds.csv"
    table.write_text("\n".join(lines[start : lines.index("", start)]))
    for path in ("owls/1.jpg", "gulls/7.jpg"):
        (tmp_path / path).parent.mkdir()
        Image.new("RGB", (4, 3)).save(tmp_path / path)
    assert run_shards(table, tmp_path, tmp_path / "out", source="table") == 0
    assert [(sample["filename"], len(sample["captions"])) for sample in read_samples(tmp_path / "out")] == [
        ("owls/1.jpg", 2),
        ("gulls/7.jpg", 1),
    ]
    assert Path(lines[-1].rpartition("/")[2].strip("'")).name in {path.name for path in (tmp_path / "out").iterdir()}


def test_actions(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["shards", "--help"])
    lines = capsys.readouterr().out.partition("actions:")[2].splitlines()
    names = [line.split()[0] for line in lines if line.startswith("    ") and not line.startswith("     ")]
    assert names == ["coco", "flickr30k", "coco-captions", "table", "hugging-face", "verify", "info"]
    for action in ("verify", "info"):
        assert build_parser().parse_args(["shards", action, "folder"]).folder == "folder"


@pytest.mark.parametrize("source", ["coco", "flickr30k", "coco-captions", "table"])
def test_features_in_place_of_images(toy_scenes, toy_captions, tmp_path, source):
    features = tmp_path / "features"
    features.mkdir()
    if source == "coco-captions":
        annotations = toy_captions("val")
    elif source == "table":
        annotations = tmp_path / "own.csv"
        annotations.write_text("image,caption\nsub/toy_val_000065.jpg,one\nsub/toy_val_000066.jpg,two\n")
    else:
        annotations = tmp_path / "dataset.json"
        document = json.loads((toy_scenes / "dataset_toy.json").read_text())
        annotations.write_text(json.dumps({"images": [item for item in document["images"] if item["split"] == "val"]}))
    for index in range(65, 89):
        # COCO's by image id, the others' by file name.
        name = index if source.startswith("coco") else f"toy_val_{index:06d}"
        np.save(features / f"{name}.npy", np.full((2, 3), index, dtype="float32"))
    arguments = ["shards", source, "--annotations", annotations, "--features", features, "--out", tmp_path / "out"]
    assert main([str(argument) for argument in [*arguments, "--workers", 1]]) == 0
    (shard,) = (tmp_path / "out").glob("*.tar")
    number = {"coco-captions": 3, "table": 2}.get(source, 24)
    ((images, *_),) = evaluation_pipeline(str(shard), torch.from_numpy, to_zeros, 24, inputs="features")
    assert images.shape == (number, 2, 3)
    assert images[:, 0, 0].tolist() == list(range(65, 65 + number))
    (entry,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"].values()
    assert entry["options"]["inputs"] == "features"


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
    assert main([*arguments, "--features", str(tmp_path), "--resize", "20"]) == 2
    assert "--resize is for images; array files of --features are written as they are" in capsys.readouterr().err
    assert main([*arguments, "--features", str(tmp_path)]) == 2
    assert "has no array file of the images; expected names such as 112.npy or toy_test" in capsys.readouterr().err


def test_number_and_size_of_shards_exclude_each_other(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_shards("a", "b", "c", "--samples-per-shard", "5", "--shard-size-mb", "5")
    assert "--shard-size-mb: not allowed with argument --samples-per-shard" in capsys.readouterr().err


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
        (("--quality", "101", "--resize", "20"), "quality must be 1 to 100, got 101"),
        (("--resize", "0"), "resize must be at least 1, got 0"),
        (("--shard-size-mb", "0"), "shard_size_mb must be more than 0"),
        (("--workers", "0"), "workers must be at least 1, got 0"),
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


@pytest.mark.slow
def test_the_command_is_there_without_the_extra():
    # In another process, because this one has imported them already.
    code = (
        "import sys; sys.modules['webdataset'] = sys.modules['PIL'] = None; "
        "import vl_plugins.commands.shards, vl_plugins.commands.toy, vl_plugins.data.reader; "
        "import vl_plugins.data.caption_table, vl_plugins.data.coco_captions"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.real_data
def test_real_pictures(stamps, tmp_path, capsys):
    assert run_shards(stamps / "dataset_stamps.json", stamps, tmp_path, "--samples-per-shard", "100") == 0
    assert [line.split()[:4] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["stamps-train-{000000..000005}.tar", "575", "2,875", "0"],
        ["stamps-val-000000.tar", "60", "300", "0"],
        ["stamps-test-{000000..000001}.tar", "150", "750", "0"],
    ]
    items = json.loads((stamps / "dataset_stamps.json").read_text())["images"]
    expected = [sentence["raw"] for item in items if item["split"] == "test" for sentence in item["sentences"]]
    transform = Compose([CenterCrop(32), PILToTensor()])
    test = list(evaluation_pipeline(f"{tmp_path}/stamps-test-{{000000..000001}}.tar", transform, list, 64))
    assert [text for _, texts, *_ in test for text in texts] == expected
    assert torch.cat([positions for *_, positions in test]).tolist() == list(range(150))
    train = training_pipeline(
        f"{tmp_path}/stamps-train-{{000000..000005}}.tar",
        transform,
        list,
        25,
        captions_per_image="all",
        with_labels=True,
        # All pictures are asked for, and some share a caption.
        allow_duplicate_captions=True,
    )
    labels = torch.cat([labels for _, texts, labels in train if len(texts) == 125])
    assert sorted(labels.tolist()) == list(range(575))
