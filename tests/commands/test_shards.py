import json
import subprocess
import sys

import pytest
import torch
from torchvision.transforms import CenterCrop, Compose, PILToTensor

from vl_plugins.cli import main
from vl_plugins.data.reader import evaluation_pipeline, read_shard_info, training_pipeline


def run_shards(annotations, images, out, *flags, source="coco"):
    arguments = ["shards", source, "--annotations", annotations, "--images", images, "--out", out, *flags]
    return main([str(argument) for argument in arguments])


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
    source = json.loads((out / "manifest.json").read_text())["splits"]["toy-val"]["source"]
    assert (source["format"], source["annotations"]) == ("karpathy-coco", "dataset_toy.json")


def test_options(toy_scenes, tmp_path):
    document = json.loads((toy_scenes / "dataset_toy.json").read_text())
    document["images"][1]["split"] = "restval"
    document["images"][2]["sentences"] = []
    annotations = tmp_path / "dataset.json"
    annotations.write_text(json.dumps(document))
    flags = ("--split", "train", "restval", "--dataset-name", "mine", "--leave-restval", "--on-error", "skip")
    assert run_shards(annotations, toy_scenes, tmp_path / "out", *flags) == 0
    sizes = json.loads((tmp_path / "out" / "sizes.json").read_text())
    assert sizes == {"mine-train-000000.tar": 62, "mine-restval-000000.tar": 1}
    (line,) = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "it has no captions; every image needs at least one"


def test_flickr30k(toy_scenes, tmp_path):
    document = json.loads((toy_scenes / "dataset_toy.json").read_text())
    document["images"] = document["images"][:5]
    for image in document["images"]:
        del image["filepath"], image["cocoid"]
    annotations = tmp_path / "dataset.json"
    annotations.write_text(json.dumps(document | {"dataset": "flickr30k"}))
    assert run_shards(annotations, toy_scenes / "train", tmp_path / "out", source="flickr30k") == 0
    assert json.loads((tmp_path / "out" / "sizes.json").read_text()) == {"flickr30k-train-000000.tar": 5}


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


def test_the_command_is_there_without_the_extra():
    # In another process, because this one has imported them already.
    code = (
        "import sys; sys.modules['webdataset'] = sys.modules['PIL'] = None; "
        "import vl_plugins.commands.shards, vl_plugins.commands.toy, vl_plugins.data.reader"
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
    )
    labels = torch.cat([labels for _, texts, labels in train if len(texts) == 125])
    assert sorted(labels.tolist()) == list(range(575))
