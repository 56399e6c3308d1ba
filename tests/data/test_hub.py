"""Data sets with the columns of the hub's mirrors, made by ``datasets`` itself, against shards of Karpathy's files."""

import csv
import json
import os
from functools import partial

import pytest

from tests.helpers.archives import encode_archive
from vl_plugins.cli import main
from vl_plugins.data import Columns, read_collection, read_karpathy
from vl_plugins.data.hub import HubFiles, read_hugging_face
from vl_plugins.data.writer import write_shards
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
        item["caption"] = [sentence["raw"] for sentence in item["sentences"]]
    return items


def write_parquet(folder, **splits):
    """Write each split's rows as a Parquet file, images as bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        dataset = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
        dataset.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return str(folder)


def columns(item, *names):
    return {name: item[name] for name in ("image", *names)}


def run_shards(source, out, *flags):
    arguments = ["shards", "hugging-face", source, "--out", out, "--dataset-name", "toy", "--samples-per-shard", 8]
    return main([str(argument) for argument in (*arguments, "--workers", 1, *flags)])


def test_flickr30k_gives_the_bytes_of_karpathys_files(items, toy_shards, tmp_path, capsys):
    """Columns and only split of nlphuji/flickr30k."""
    rows = [{**columns(item, "caption", "split", "filename"), "img_id": str(item["cocoid"])} for item in items]
    mirror = write_parquet(tmp_path / "mirror", test=rows)
    assert run_shards(mirror, tmp_path / "wrong", "--caption-column", "captoin") == 2
    message = "unknown column 'captoin' (did you mean 'caption'?); known: caption, filename,"
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert run_shards(mirror, tmp_path) == 0
    expected = {path.name: path.read_bytes() for path in toy_shards.glob("*.tar")}
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.tar")} == expected


def test_coco_with_a_row_per_caption_is_read_once(items, toy_scenes, tmp_path, monkeypatch):
    """Columns and splits of jxie/coco_captions; the rows of an image are not adjacent."""
    splits = {"train": [], "validation": [], "test": []}
    for number in range(5):
        for item in items:
            row = {**columns(item, "filename", "cocoid"), "caption": item["caption"][number]}
            splits[item["split"].replace("val", "validation")].append(row)
    folder = write_parquet(tmp_path / "coco", **splits)
    assert {image.split for image in read_hugging_face(folder, data_files={"mine": "validation-*"})[0]} == {"mine"}
    images, files = read_hugging_face(folder)
    images, expected = list(images), list(read_karpathy(toy_scenes / "dataset_toy.json", "coco"))
    assert len(images) == 112
    for name in ("image_id", "filename", "captions", "split"):
        assert [getattr(image, name) for image in images] == [getattr(image, name) for image in expected]
    read, reads = HubFiles.read, []
    monkeypatch.setattr(HubFiles, "read", lambda self, file: reads.append(file) or read(self, file))
    write_shards(images, files, tmp_path / "out", workers=1)
    assert sorted(reads) == sorted(image.file for image in images)


def test_columns_and_configurations_that_are_named(items, tmp_path):
    """Captions are objects, as in HuggingFaceM4/COCO, and texts."""
    rows = [
        columns(item, "cocoid")
        | {"thumbnail": item["image"], "text": "no", "words": item["sentences"][0], "more": [item["caption"][1]]}
        | {"part": "restval", "scene": number % 2}
        for number, item in enumerate(items[:4])
    ]
    write_parquet(tmp_path / "mirror" / "some", train=rows)
    write_parquet(tmp_path / "mirror" / "other", train=rows[:1])
    configs = "[{config_name: other, data_files: other/*}, {config_name: some, data_files: some/*}]"
    (tmp_path / "mirror" / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    read = partial(read_hugging_face, str(tmp_path / "mirror"), config="some")
    named = Columns("image", ["words", "more"], "part", "cocoid", "scene")
    images, _ = read(named)
    assert [(image.image_id, list(image.captions), image.split, image.group) for image in images] == [
        (item["cocoid"], item["caption"][:2], "train", number % 2) for number, item in enumerate(items[:4])
    ]
    for wrong, message in (
        (Columns("cocoid", ["words"]), "cannot load .*mirror: "),
        (Columns("image", id="text"), "name --image-column and --caption-column; columns: "),
    ):
        with pytest.raises(UserError, match=message):
            read(wrong)


def test_a_folder_of_images(items, tmp_path):
    names = ["1.png", "2.png", "3.png"]
    for name, item in zip(names, items, strict=False):
        (tmp_path / name).write_bytes(item["image"]["bytes"])
    with open(tmp_path / "metadata.csv", "w", newline="") as stream:
        csv.writer(stream).writerows([["file_name", "caption_0", "caption_1"], *([name, "a", "b"] for name in names)])
    images, files = read_hugging_face(str(tmp_path))
    found = [(image.image_id, image.filename, image.captions, files.read(image.file)) for image in images]
    pictures = [item["image"]["bytes"] for item in items[:3]]
    assert found == [(number, name, ("a", "b"), pictures[number]) for number, name in enumerate(names)]
    # Another picture has another state.
    state = files.state("train/1/2.png")
    assert read_hugging_face(str(tmp_path))[1].state("train/1/2.png") == state
    (tmp_path / "2.png").write_bytes(items[3]["image"]["bytes"])
    os.utime(tmp_path / "2.png", (1, 1))
    files = read_hugging_face(str(tmp_path))[1]
    assert files.read("train/1/2.png") == items[3]["image"]["bytes"]
    assert files.state("train/1/2.png") != state


def test_rows_without_an_image_or_a_caption_or_with_a_file_of_ones_own(items, tmp_path):
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    (tmp_path / "own.png").write_bytes(items[0]["image"]["bytes"])
    own = {"path": str(tmp_path / "own.png"), "bytes": None}
    rows = {"image": [None, own, items[0]["image"]], "caption": ["a", "b", " "]}
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "set/train.parquet")
    images, files = read_hugging_face(str(tmp_path / "set"))
    no_image, of_another_folder, rejected = images
    with pytest.raises(UserError, match="the row has no image"):
        files.read(no_image.file)
    with pytest.raises(UserError, match=f"the row names the file {tmp_path}/own.png, which is not of the data set"):
        files.read(of_another_folder.file)
    _, files = read_hugging_face(str(tmp_path / "set"), image_root=tmp_path)
    assert files.read(of_another_folder.file) == items[0]["image"]["bytes"]
    assert rejected.image.startswith(f"{tmp_path}/set: train row 2 (")


@pytest.mark.parametrize("kind", ["parquet", "saved", "saved splits"])
def test_what_people_have_on_their_disk(items, tmp_path, kind, monkeypatch):
    """A Parquet file, and what `save_to_disk` writes; no hub is asked."""
    rows = [columns(item, "caption", "cocoid") for item in items[:3]]
    dataset = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    if kind == "parquet":
        source = write_parquet(tmp_path, birds=rows) + "/birds-00000-of-00001.parquet"
    elif kind == "saved":
        source = str(tmp_path / "birds")
        dataset.save_to_disk(source)
    else:
        source = str(tmp_path / "birds")
        datasets.DatasetDict(train=dataset).save_to_disk(source)
    monkeypatch.setattr("socket.socket.connect", lambda *arguments: pytest.fail("the hub is asked"))
    images, files = read_hugging_face(source)
    found = [(image.image_id, list(image.captions), image.split, files.read(image.file)) for image in images]
    assert found == [(item["cocoid"], item["caption"], "train", item["image"]["bytes"]) for item in items[:3]]


def test_a_file_of_another_kind_names_the_command(tmp_path):
    (tmp_path / "birds.csv").write_text("image,caption")
    with pytest.raises(UserError, match=r"birds\.csv is no Parquet file; `vl-plugins shards table` reads"):
        read_hugging_face(str(tmp_path / "birds.csv"))


def write_pictures(folder, rows, items):
    """Write a folder of pictures with a table; each row is a file's name, an id and a caption."""
    for (name, _, _), item in zip(rows, items, strict=False):
        (folder / name).write_bytes(item["image"]["bytes"])
    with open(folder / "metadata.csv", "w", newline="") as stream:
        csv.writer(stream).writerows([["file_name", "id", "caption"], *rows])


def test_pictures_of_one_id_are_not_merged(items, tmp_path):
    """An id may be that of a product, of which there are several pictures."""
    rows = [["0.png", "P1", "front"], ["1.png", "P1", "sole"], ["2.png", "P2", "side"]]
    write_pictures(tmp_path, rows, items)
    first, second, other = read_hugging_face(str(tmp_path))[0]
    assert [(image.image_id, image.captions) for image in (first, other)] == [("P1", ("front",)), ("P2", ("side",))]
    assert second.reason == "image id P1 occurs more than once; ids must be unique"


@pytest.mark.parametrize("ids", [(7, 7, 8), None], ids=["ids", "no ids"])
def test_rows_are_one_image_by_their_bytes(items, tmp_path, ids):
    """Pictures of as many bytes are no proof."""
    picture = items[0]["image"]["bytes"]
    other = bytes(reversed(picture))
    rows = []
    for number, content in enumerate([picture, picture, other]):
        row = {"image": {"bytes": content, "path": None}, "caption": str(number)}
        if ids is not None:
            row["image_id"] = ids[number]
        rows.append(row)
    images, _ = read_hugging_face(write_parquet(tmp_path / "set", train=rows))
    assert [image.captions for image in images] == [("0", "1"), ("2",)]


@pytest.mark.parametrize("counts", [(5, 5), (5, 1)])
def test_tars_whose_texts_are_captions_in_lines(items, tmp_path, counts):
    """As CLIP_benchmark writes them, and texts that are a single caption with line breaks."""
    members = []
    for number, count in enumerate(counts):
        text = "\n".join(f"caption {line} of {number}" for line in range(count))
        members += [(f"{number}.png", items[number]["image"]["bytes"]), (f"{number}.txt", text)]
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars/x.tar").write_bytes(encode_archive(members))
    found = [image.captions for image in read_hugging_face(str(tmp_path / "tars"))[0]]
    assert list(map(len, found)) == ([5, 5] if counts == (5, 5) else [1, 1])
    assert found[0][0].splitlines()[0] == "caption 0 of 0"


def test_a_folder_of_pictures_with_texts(items, tmp_path):
    (tmp_path / "pairs").mkdir()
    for number in range(3):
        (tmp_path / f"pairs/{number}.png").write_bytes(items[number]["image"]["bytes"])
        (tmp_path / f"pairs/{number}.txt").write_text(f"bird {number}")
    assert run_shards(str(tmp_path / "pairs"), tmp_path / "out") == 0
    assert read_collection(tmp_path / "out").captions == ["bird 0", "bird 1", "bird 2"]
