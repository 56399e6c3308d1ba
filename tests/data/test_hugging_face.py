"""Data sets with the columns of the hub's mirrors, made by ``datasets`` itself, against shards of Karpathy's files."""

import csv
import json
import os
import re
import subprocess
import sys

import pytest
import webdataset
from torchvision.transforms import PILToTensor

from vl_plugins.cli import main
from vl_plugins.data.annotations import read_karpathy
from vl_plugins.data.collection import read_collection
from vl_plugins.data.hugging_face import read_hugging_face
from vl_plugins.errors import UserError

datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def items(toy_scenes):
    """Karpathy's entries of the toy scenes, in the order of train, val and test, each with its picture."""
    items = json.loads((toy_scenes / "dataset_toy.json").read_text())["images"]
    for item in items:
        picture = toy_scenes / item["filepath"] / item["filename"]
        item["image"] = {"bytes": picture.read_bytes(), "path": item["filename"]}
    return items


def write_parquet(folder, **splits):
    """Write each split's rows as a Parquet file, images as bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        dataset = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
        dataset.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def write_flickr30k(folder, items):
    """Columns and only split of nlphuji/flickr30k."""
    rows = [
        {
            "image": item["image"],
            "caption": [sentence["raw"] for sentence in item["sentences"]],
            "sentids": list(map(str, item["sentids"])),
            "split": item["split"],
            "img_id": str(item["cocoid"]),
            "filename": item["filename"],
        }
        for item in items
    ]
    return write_parquet(folder, test=rows)


def write_coco(folder, items):
    """Columns and splits of jxie/coco_captions: one row per caption, those of an image not adjacent."""
    splits = {"train": [], "validation": [], "test": []}
    for number in range(5):
        for item in items:
            row = {key: item[key] for key in ("image", "filename", "cocoid")}
            row["caption"] = item["sentences"][number]["raw"]
            splits[item["split"].replace("val", "validation")].append(row)
    return write_parquet(folder, **splits)


@pytest.fixture(scope="module")
def flickr30k(items, tmp_path_factory):
    return write_flickr30k(tmp_path_factory.mktemp("flickr30k") / "mirror", items)


def run_shards(source, out, *flags):
    arguments = ["shards", "hugging-face", source, "--out", out, "--dataset-name", "toy", "--samples-per-shard", 8]
    return main([str(argument) for argument in (*arguments, "--workers", 1, *flags)])


def tars(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.tar")}


@pytest.mark.parametrize(("workers", "splits"), [(1, ["train", "val", "test"]), (2, ["test"])])
def test_flickr30k_gives_the_bytes_of_karpathys_files(flickr30k, toy_shards, tmp_path, workers, splits):
    assert run_shards(flickr30k, tmp_path, "--workers", workers, "--split", *splits) == 0
    expected = {name: data for name, data in tars(toy_shards).items() if name.split("-")[1] in splits}
    assert len(expected) == (14 if workers == 1 else 3)
    assert tars(tmp_path) == expected
    assert main(["shards", "verify", str(tmp_path), "--workers", "1"]) == 0
    source = json.loads((tmp_path / "manifest.json").read_text())["splits"]["toy-test"]["source"]
    assert (source["format"], source["name"]) == ("hugging-face", "mirror")


def test_coco_with_a_row_per_caption(items, toy_scenes, tmp_path):
    assert run_shards(write_coco(tmp_path / "coco", items), tmp_path / "out") == 0
    assert main(["shards", "verify", str(tmp_path / "out"), "--workers", "1"]) == 0
    only = read_hugging_face(str(tmp_path / "coco"), data_files={"mine": "validation-*"})[0]
    assert [image.split for image in only] == ["mine"] * 24
    images, files = read_hugging_face(str(tmp_path / "coco"))
    expected = read_karpathy(toy_scenes / "dataset_toy.json", "coco")
    assert len(expected) == 112
    ours, theirs = (
        [(image.image_id, image.filename, image.captions, image.split) for image in source]
        for source in (images, expected)
    )
    assert ours == theirs
    assert [files.read(image.file) for image in images] == [item["image"]["bytes"] for item in items]


def test_captions_as_karpathys_sentences(items, tmp_path):
    """As in HuggingFaceM4/COCO, an object in each row with the split of the row; also a list of objects."""
    items = [item | {"split": "restval"} if item["imgid"] % 2 else item for item in items[:6]]
    rows = [
        {key: item[key] for key in ("image", "cocoid", "imgid", "split")} | {"sentences": sentence}
        for item in items
        for sentence in item["sentences"]
    ]
    one_each, _ = read_hugging_face(str(write_parquet(tmp_path / "rows", train=rows)))
    lists = [{key: item[key] for key in ("image", "cocoid", "split", "sentences")} for item in items]
    listed, _ = read_hugging_face(str(write_parquet(tmp_path / "lists", train=lists)), join_restval=False)
    for images in (one_each, listed):
        assert [image.image_id for image in images] == [item["cocoid"] for item in items]
        assert [image.captions for image in images] == [
            tuple(sentence["raw"] for sentence in item["sentences"]) for item in items
        ]
    assert {image.split for image in one_each} == {"train"}
    assert [image.split for image in listed] == ["train", "restval"] * 3


def test_columns_that_are_named_and_cocos_ids(items, tmp_path):
    items = items[:4]
    rows = [
        {
            "thumbnail": item["image"],
            "image": item["image"],
            "text": "no caption",
            "words": item["sentences"][0]["raw"],
            "more": [item["sentences"][1]["raw"]],
            "key": item["cocoid"],
            "id": "the same",
            "part": "restval",
            "scene": str(number % 2),
        }
        for number, item in enumerate(items)
    ]
    write_parquet(tmp_path / "mirror" / "some", train=rows)
    write_parquet(tmp_path / "mirror" / "other", train=rows[:1])
    (tmp_path / "mirror" / "README.md").write_text(
        "---\nconfigs:\n- {config_name: other, data_files: other/*}\n- {config_name: some, data_files: some/*}\n---\n"
    )
    sentences = [(item["cocoid"], sentence) for item in items for sentence in item["sentences"][:2]]
    official = [
        {"image_id": image, "id": 1000 + sentence["sentid"], "caption": sentence["raw"]}
        for image, sentence in sentences
    ]
    (tmp_path / "captions.json").write_text(json.dumps({"images": [], "annotations": official}))
    flags = "--config some --image-column image --caption-column words more --id-column key --split-column part"
    flags += f" --group-key scene --leave-restval --coco-annotations {tmp_path / 'captions.json'}"
    assert run_shards(tmp_path / "mirror", tmp_path / "out", *flags.split()) == 0
    collection = read_collection(str(tmp_path / "out" / "toy-restval-000000.tar"))
    assert list(collection.image_ids) == [item["cocoid"] for item in items]
    assert list(collection.captions) == [sentence["raw"] for _, sentence in sentences]
    assert list(collection.caption_ids) == [annotation["id"] for annotation in official]
    entry = json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"]["toy-restval"]
    assert (entry["groups"], entry["source"]["caption_ids"]) == (2, "coco-annotation")


def test_a_folder_of_images(items, tmp_path):
    names = ["1.png", "2.png", "3.png"]
    for name, item in zip(names, items, strict=False):
        (tmp_path / name).write_bytes(item["image"]["bytes"])
    with open(tmp_path / "metadata.csv", "w", newline="") as stream:
        csv.writer(stream).writerows([["file_name", "caption_0", "caption_1"], *([name, "a", "b"] for name in names)])
    images, files = read_hugging_face(str(tmp_path))
    assert [(image.image_id, image.filename, image.captions) for image in images] == [
        (number, name, ("a", "b")) for number, name in enumerate(names)
    ]
    assert [files.read(image.file) for image in images] == [item["image"]["bytes"] for item in items[:3]]


def test_a_row_does_not_name_a_file_of_ones_own(items, tmp_path):
    (tmp_path / "own.png").write_bytes(items[0]["image"]["bytes"])
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    rows = {"image": [{"path": str(tmp_path / "own.png"), "bytes": None}], "caption": ["a"]}
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "set" / "train.parquet")
    (image,), files = read_hugging_face(str(tmp_path / "set"))
    with pytest.raises(UserError, match=f"the row names the file {tmp_path}/own.png, which is not of the data set"):
        files.read(image.file)


def test_tars_of_clip_benchmark(items, tmp_path):
    """Its own reader says which captions there are."""
    builder = pytest.importorskip("clip_benchmark.datasets.builder")
    (tmp_path / "test").mkdir()
    for number in range(3):
        with webdataset.TarWriter(str(tmp_path / f"test/{number}.tar")) as writer:
            item = items[number]
            text = "\n".join(sentence["raw"] for sentence in item["sentences"][: 1 + number % 3])
            writer.write({"__key__": f"s{number:07d}", "png": item["image"]["bytes"], "txt": text})
    (tmp_path / "test/nshards.txt").write_text("3")
    (tmp_path / "dataset_type.txt").write_text("retrieval")
    dataset = builder.build_wds_dataset("toy", transform=PILToTensor(), data_dir=str(tmp_path))
    images, files = read_hugging_face(str(tmp_path), caption_lines=True)
    assert {image.split for image in images} == {"test"}
    assert [image.image_id for image in images] == [f"s{number:07d}" for number in range(3)]
    assert [list(image.captions) for image in images] == [captions for _, captions in dataset]
    assert files.read(images[2].file) == items[2]["image"]["bytes"]


def test_a_stopped_run_goes_on_and_bad_rows_are_named(items, tmp_path, capsys):
    items = [item for item in items if item["split"] == "test"]
    broken = [*items[:20], items[20] | {"image": {"bytes": b"no image", "path": "20.png"}}, *items[21:]]
    folder = write_flickr30k(tmp_path / "first" / "mirror", broken)
    assert run_shards(folder, tmp_path / "out") == 2
    place = f"mirror: test/20/{items[20]['filename']} (image id {items[20]['cocoid']})"
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"{place}: the file is not an image")
    kept = {path: path.stat().st_ino for path in (tmp_path / "out").glob("*.tar")}
    assert len(kept) == 2
    # Another copy of the data set: what counts is the content of the images.
    assert run_shards(write_flickr30k(tmp_path / "second" / "mirror", items), tmp_path / "out") == 0
    assert len(tars(tmp_path / "out")) == 3
    assert {path: path.stat().st_ino for path in kept} == kept

    rows = [{"image": item["image"], "caption": ["a"], "id": item["cocoid"]} for item in broken]
    rows[3]["caption"], rows[5]["id"], rows[7]["image"] = [], rows[4]["id"], None
    folder = write_parquet(tmp_path / "third", train=rows)
    assert run_shards(folder, tmp_path / "skipped", "--on-error", "skip") == 0
    rejected = [json.loads(line) for line in (tmp_path / "skipped" / "rejected.jsonl").read_text().splitlines()]
    rows_and_reasons = [(re.search(r"train/(\d+)/", item["image"])[1], item["reason"]) for item in rejected]
    assert rows_and_reasons == [
        ("3", "it has no captions; every image needs at least one"),
        ("5", f"image id {rows[4]['id']} occurs more than once; ids must be unique"),
        ("7", "the row has no image"),
        ("20", "the file is not an image"),
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--caption-column captoin",
            "unknown column 'captoin' (did you mean 'caption'?); known: caption, filename,",
        ),
        ("--image-column sentids", "column 'sentids' has no images; columns: image, caption, sentids, split, "),
        ("--id-column caption", "which column has the captions? name it with --caption-column; columns: 'image', "),
        ("--split traim", "unknown split 'traim' (did you mean 'train'?); known: test, train, val"),
    ],
)
def test_wrong_columns_are_one_line(flickr30k, tmp_path, capsys, flags, message):
    assert run_shards(flickr30k, tmp_path / "out", *flags.split()) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_the_hub_without_a_network(tmp_path):
    command = [sys.executable, "-m", "vl_plugins.cli", "shards", "hugging-face", "someone/birds", "--out", "out"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert finished.returncode == 2
    (line,) = finished.stderr.splitlines()
    assert line.startswith("vl-plugins shards: error: cannot load someone/birds: ")
    assert not (tmp_path / "out").exists()
