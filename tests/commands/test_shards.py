import io
import json
import uuid

import numpy as np
import pytest
from PIL import Image

from tests.helpers.archives import read_archive
from vl_plugins.cli import main
from vl_plugins.data import read_collection
from vl_plugins.data.files import write_file


def run_shards(annotations, images, out, *flags, source="coco"):
    files = annotations if isinstance(annotations, list) else [annotations]
    arguments = ["shards", source, "--annotations", *files, "--images", images, "--out", out, "--workers", 1, *flags]
    return main([str(argument) for argument in arguments])


def read_samples(folder):
    """Return the .json of every sample in the order of the shards."""
    members = [member for shard in sorted(folder.glob("*.tar")) for member in read_archive(shard).items()]
    return [json.loads(data) for name, data in members if name.endswith(".json")]


def read_sizes(folder):
    return json.loads((folder / "sizes.json").read_text())


def test_toy_then_shards(tmp_path, capsys):
    toy, out = tmp_path / "toy", tmp_path / "out"
    assert main(["toy", "--out", str(toy), "--train", "9", "--val", "3", "--test", "3"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: vl-plugins ").replace("SHARDS", str(out))
    assert main([*command.split(), "--samples-per-shard", "4"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}/toy-test-000000.tar",
        f"{out}/toy-train-{{000000..000002}}.tar",
        f"{out}/toy-val-000000.tar",
        "5 shards, 15 images, 75 captions",
    ]
    assert len(read_collection(f"{out}/toy-train-{{000000..000002}}.tar")) == 9


def test_images_that_are_left_out(toy_scenes, tmp_path, capsys):
    document = json.loads((toy_scenes / "dataset_toy.json").read_text())
    document["images"][1]["split"] = "restval"
    for image in document["images"][2:24]:
        image["sentences"] = []
    (annotations := tmp_path / "dataset.json").write_text(json.dumps(document))
    flags = ("--split", "train", "--dataset-name", "mine", "--on-error", "skip")
    assert run_shards(annotations, toy_scenes, tmp_path / "out", *flags) == 0
    counts, left_out, *reasons = capsys.readouterr().out.splitlines()[1:]
    assert (counts, left_out[:13]) == ("1 shards, 42 images, 210 captions", "left out: 22;")
    assert len(reasons) == 20
    assert "(toy_train_000003.png): it has no captions" in reasons[0]
    assert read_sizes(tmp_path / "out") == {"mine-train-000000.tar": 42}


def test_official_captions(toy_scenes, tmp_path):
    """They need not cover splits that are not written."""
    annotations, files = toy_scenes / "dataset_toy.json", {}
    items = json.loads(annotations.read_text())["images"]
    for split in ("train", "val", "test"):
        part = [item for item in items if item["split"] == split][: 24 if split == "val" else 3]
        document = {
            "images": [{"id": item["cocoid"], "file_name": item["filename"]} for item in part],
            "annotations": [
                {"id": 1000 + sentence["sentid"], "image_id": item["cocoid"], "caption": f" {sentence['raw'].upper()}"}
                for item in part
                for sentence in item["sentences"]
            ],
        }
        files[split] = tmp_path / f"captions_{split}.json"
        files[split].write_text(json.dumps(document))
    out = tmp_path / "karpathy"
    assert run_shards(annotations, toy_scenes, out, "--split", "val", "--coco-annotations", files["val"]) == 0
    expected = [
        [1000 + sentence["sentid"] for sentence in item["sentences"]] for item in items if item["split"] == "val"
    ]
    assert [sample["caption_ids"] for sample in read_samples(out)] == expected

    out, files = tmp_path / "official", list(files.values())
    assert run_shards(files, toy_scenes, out, "--split", "test", "train", source="coco-captions") == 0
    assert read_sizes(out) == {"coco-train-000000.tar": 3, "coco-test-000000.tar": 3}
    assert read_samples(out)[0]["filename"] == "toy_test_000089.png"


def test_table(toy_scenes, tmp_path):
    table = tmp_path / "two words.csv"
    table.write_text(
        "where;english;german;set;key;caption;film\n"
        "train/toy_train_000001.png;one;eins;train;a;no;7\n"
        "val/toy_val_000065.png;two;zwei;val;b;no;8\n"
    )
    flags = (
        "--image-column where --caption-column german english --split-column set --id-column key --group-column film"
    )
    assert run_shards(table, toy_scenes, tmp_path / "out", *flags.split(), source="table") == 0
    names = ("dataset", "split", "image_id", "group", "captions", "caption_ids")
    assert [[sample[name] for name in names] for sample in read_samples(tmp_path / "out")] == [
        ["two_words", "train", "a", "7", ["eins", "one"], [0, 1]],
        ["two_words", "val", "b", "8", ["zwei", "two"], [2, 3]],
    ]


def test_tables_without_splits(toy_scenes, tmp_path):
    table = tmp_path / "t.csv"
    files = sorted(file.relative_to(toy_scenes) for file in toy_scenes.glob("t*/*.png"))
    table.write_text("filepath\ttitle\n" + "".join(f"{file}\t{file}, as a caption\n" for file in files))
    flags = ("--split-name", "mine", "--dataset-name", "set")
    flags += ("--val-fraction", 0.3, "--test-fraction", 0.3)
    assert run_shards(table, toy_scenes, f"file://{tmp_path}/out", *flags, source="table") == 0  # a URL of fsspec
    sizes = read_sizes(tmp_path / "out")
    assert sorted(sizes) == [f"set-{split}-000000.tar" for split in ("mine", "test", "val")]
    assert sum(sizes.values()) == len(files)


def test_splits_and_rejected_rows_of_a_table(toy_scenes, tmp_path, capsys):
    """Rows of other splits are no reason to stop."""
    table = tmp_path / "t.jsonl"
    rows = [("train", "one"), ("train", ""), ("val", "two"), ("test", "")]
    table.write_text(
        "".join(
            json.dumps({"image": f"val/toy_val_{65 + index:06d}.png", "caption": caption, "split": split}) + "\n"
            for index, (split, caption) in enumerate(rows)
        )
    )
    assert run_shards(table, toy_scenes, tmp_path / "out", "--split", "val", source="table") == 0
    assert read_sizes(tmp_path / "out") == {"t-val-000000.tar": 1}
    place = f"{table}: line 4 (val/toy_val_000068.png)"
    reason = "it has no captions, or a blank one; every image needs at least one"
    for flags, start in ((("--on-error", "skip"), "there are no images to write, such as "), ((), "")):
        capsys.readouterr()
        assert run_shards(table, toy_scenes, tmp_path / "2", "--split", "test", *flags, source="table") == 2
        assert capsys.readouterr().err == f"vl-plugins shards: error: {start}{place}: {reason}\n"


def test_hugging_face(toy_scenes, tmp_path):
    datasets = pytest.importorskip("datasets")
    pictures = sorted((toy_scenes / "val").glob("*.png"))[:3]
    images = [{"bytes": picture.read_bytes(), "path": picture.name} for picture in pictures]
    table = datasets.Dataset.from_dict({"image": images, "caption": [["one", "two"], ["three"], ["four"]]})
    (tmp_path / "birds").mkdir()
    table.cast_column("image", datasets.Image()).to_parquet(tmp_path / "birds" / "data-0.parquet")
    arguments = ["shards", "hugging-face", f"{tmp_path}/birds", "--out", f"{tmp_path}/out"]
    assert main([*arguments, "--data-files", "test=data-*"]) == 0
    assert [sample["captions"] for sample in read_samples(tmp_path / "out")] == [["one", "two"], ["three"], ["four"]]


def test_options_of_the_writer(toy_scenes, tmp_path, capsys):
    flags = ("--split", "train", "--samples-per-shard", 30, "--on-error", "skip", "--workers", 2, "--seed")
    arguments = (toy_scenes / "dataset_toy.json", toy_scenes, tmp_path, *flags)
    assert run_shards(*arguments, 3) == 0
    assert len(list(tmp_path.glob("*.tar"))) == 3
    ids = [sample["image_id"] for sample in read_samples(tmp_path)]
    assert sorted(ids) == list(range(1, 65)) != ids
    assert run_shards(*arguments, 4) == 2
    assert "overwrite it, or choose another folder" in capsys.readouterr().err
    assert run_shards(*arguments, 4, "--overwrite") == 0


def test_pictures_of_other_formats_and_sizes(toy_scenes, tmp_path, capsys):
    (pictures := tmp_path / "pictures").mkdir()
    with Image.open(toy_scenes / "val" / "toy_val_000065.png", formats=["PNG"]) as picture:
        size = picture.size
        picture.save(pictures / "a.gif")
        picture.resize((2 * size[0], 3 * size[1])).save(pictures / "b.png")
    (table := tmp_path / "own.csv").write_text("image,caption\na.gif,one\nb.png,two\n")
    assert run_shards(table, pictures, tmp_path / "1", source="table") == 2
    assert "but probably GIF; --convert (convert= of write_shards) makes it JPEG or PNG" in capsys.readouterr().err
    assert run_shards(table, pictures, tmp_path / "1", "--convert", "jpeg", "--resize", 20, source="table") == 0
    (shard,) = (tmp_path / "1").glob("*.tar")
    assert [name for name in read_archive(shard) if name.endswith(("png", "jpg", "gif"))] == [
        f"own-train-0000000{number}.jpg" for number in range(2)
    ]
    assert [(sample["width"], sample["height"]) for sample in read_samples(tmp_path / "1")] == [(20, 20), (20, 30)]
    for flags in (("--convert", "png"), ("--resize", 9)):
        arguments = ["shards", "table", "--annotations", table, "--features", pictures, "--out", tmp_path / "2", *flags]
        assert main([str(argument) for argument in arguments]) == 2
        assert f"error: {flags[0]} changes pictures, but --features" in capsys.readouterr().err


def test_pictures_and_features_behind_urls(toy_scenes, tmp_path):
    url = f"memory://{tmp_path.name}-{uuid.uuid4()}/folder"
    (table := tmp_path / "own.csv").write_text("image,caption,id\nsub/a.png,one,7\n")
    data = (toy_scenes / "val" / "toy_val_000065.png").read_bytes()
    write_file(f"{url}/sub/a.png", data)
    assert run_shards(table, url, tmp_path / "1", source="table") == 0
    (shard,) = (tmp_path / "1").glob("*.tar")
    assert read_archive(shard)["own-train-00000000.png"] == data

    stream = io.BytesIO()
    np.save(stream, np.ones((2, 3)))
    write_file(f"{url}/7.npy", stream.getvalue())
    arguments = ["shards", "table", "--annotations", str(table), "--out", str(tmp_path / "2"), "--features", url]
    assert main(arguments) == 0
    (shard,) = (tmp_path / "2").glob("*.tar")
    assert read_archive(shard)["own-train-00000000.npy"] == stream.getvalue()


def test_features_in_place_of_images(tmp_path):
    (features := tmp_path / "features").mkdir()
    (table := tmp_path / "own.csv").write_text("image,caption\nsub/a.jpg,one\nsub/b.jpg,two\n")
    for number, name in enumerate(("a", "b")):  # names of the image files
        np.save(features / f"{name}.npy", np.full((2, 3), number + 1, dtype="float32"))
    arguments = ["shards", "table", "--annotations", str(table), "--out", str(tmp_path / "out"), "--features"]
    assert main([*arguments, str(features), "--images", str(tmp_path)]) == 2
    assert main([*arguments, str(features)]) == 0
    (shard,) = (tmp_path / "out").glob("*.tar")
    arrays = [np.load(io.BytesIO(data)) for name, data in read_archive(shard).items() if name.endswith("npy")]
    assert [array[0, 0] for array in arrays] == [1, 2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--images", "nowhere"), "train/toy_train_000001.png (image id 1): cannot read nowhere/"),
        (("--annotations", "nowhere.json"), "cannot read nowhere.json: No such file"),
        (("--split", "trian"), "unknown split 'trian' (did you mean 'train'?); known: test, train, val"),
        (("--workers", "0"), "workers must be at least 1, got 0"),
        (("--dataset-name", "a b"), "'a b' cannot name a split or data set"),
        (("--resize", "0"), "resize must be at least 1, got 0"),
        (("--convert", "gif"), "invalid choice: 'gif'"),
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
    assert list(out.rglob("*.tar*")) == []
