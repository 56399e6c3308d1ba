"""``vl-plugins encode``: parts of a folder, pictures or captions alone, and what it says of its input."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch

from tests.helpers.processes import in_processes
from vl_plugins.cli import main
from vl_plugins.data import read_collection
from vl_plugins.integrations import encoder
from vl_plugins.integrations.open_clip.models import register_models
from vl_plugins.retrieval.features import load_features


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    register_models()
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("checkpoint") / "weights.pt"
    torch.save(open_clip.create_model("vl-tiny").state_dict(), file)
    return str(file)


@pytest.fixture(scope="module")
def shards(toy_shards):
    return f"{toy_shards}/toy-val-{{000000..000002}}.tar"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(encoder, "PART_ROWS", 8)


@pytest.fixture
def encode(checkpoint, tmp_path, capsys):
    """Function that encodes and returns the path, and what was printed to standard error."""

    def run(data, out, *options, status=0):
        flags = ["--model", "vl-tiny", "--workers", "0", "--batch-size", "4", *options]
        assert main(["encode", checkpoint, str(data), str(tmp_path / out), *flags]) == status
        return tmp_path / out, capsys.readouterr().err

    return run


def arrays_of(folder):
    """Return the joined parts of each side of a folder, read by NumPy alone, mapped into memory."""
    arrays = {}
    for side in ("images", "captions"):
        files = sorted((folder / side).iterdir()) if (folder / side).is_dir() else []
        if files:
            arrays[side] = np.concatenate([np.load(file, mmap_mode="r") for file in files])
    return arrays


def assert_same_features(folder, file):
    ours, expected = load_features(folder), load_features(file)
    for name in ("images", "captions", "image_of_caption"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name
    assert (ours.image_ids, ours.caption_ids) == (expected.image_ids, expected.caption_ids)
    assert ours.description == expected.description


def test_parts_are_one_piece(encode, shards):
    file, _ = encode(shards, "one.npz")
    folder, error = encode(shards, "parts")
    assert error == f"read {shards} as shards: 24 images with 5 captions\n"
    assert_same_features(folder, file)
    names = ["part_000000.npy", "part_000001.npy", "part_000002.npy"]
    assert sorted(os.listdir(folder / "images")) == sorted(os.listdir(folder / "captions")) == names
    assert sorted(os.listdir(folder)) == ["captions", "ids.json", "image_of_caption.npy", "images"]
    assert sorted(os.listdir(folder.parent)) == ["one.npz", "parts"]
    assert torch.equal(torch.from_numpy(arrays_of(folder)["captions"]), load_features(file).captions)
    assert main(["evaluate", "--features", str(folder), "--shards", shards]) == 0


# Ends itself, as a machine does, while it writes the captions of the third part.
KILLED = """
import os, signal, sys
from vl_plugins.cli import main
from vl_plugins.integrations import encoder
from vl_plugins.retrieval import feature_folders
write = feature_folders._write_array
def write_array(file, array):
    if file.name == "part_000002.npy" and file.parent.name == "captions":
        (file.parent / ".part_000002.npy.01234567.partial").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    write(file, array)
feature_folders._write_array = write_array
encoder.PART_ROWS = 4
main(sys.argv[1:])
"""


def test_a_killed_run_continues(encode, checkpoint, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(encoder, "PART_ROWS", 4)
    flags = ["--model", "vl-tiny", "--workers", "0", "--batch-size", "4"]
    command = [sys.executable, "-c", KILLED, "encode", checkpoint, shards, str(tmp_path / "parts"), *flags]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "parts").exists()
    unfinished = tmp_path / ".parts.unfinished"
    assert len([name for name in os.listdir(unfinished / "images") if name.startswith("part_")]) == 3
    part = unfinished / "captions" / "part_000001.npy"
    part.write_bytes(part.read_bytes()[:-1])
    batches = []
    encode_batch = encoder.encode_batch

    def counted(model, batch, *arguments):
        batches.append(batch.start)
        return encode_batch(model, batch, *arguments)

    monkeypatch.setattr(encoder, "encode_batch", counted)
    folder, error = encode(shards, "parts")
    assert error.endswith("continues: 1 of 6 parts are there\n")
    assert batches == [4, 8, 12, 16, 20]
    monkeypatch.setattr(encoder, "encode_batch", encode_batch)
    assert_same_features(folder, encode(shards, "one.npz")[0])
    assert not unfinished.exists()


def test_parts_of_other_settings_are_not_joined(encode, shards, tmp_path, monkeypatch):
    with monkeypatch.context() as patches:
        patches.setattr(encoder.UnfinishedFolder, "missing", lambda folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            encode(shards, "parts")
    _, error = encode(shards, "parts", "--batch-size", "8", status=2)
    state = "has parts of another run (batch_size 4, now 8): remove it, or choose another name"
    assert f"{tmp_path}/.parts.unfinished {state}" in error
    encode(shards, "parts")


def run_in_process(rank, arguments):
    encoder.PART_ROWS = 8
    return main(arguments)


def test_processes_share_out_the_parts(encode, checkpoint, shards, tmp_path):
    file, _ = encode(shards, "one.npz")
    flags = ["--model", "vl-tiny", "--workers", "0", "--batch-size", "4"]
    arguments = ["encode", checkpoint, shards, str(tmp_path / "parts"), *flags]
    assert in_processes(run_in_process, 2, arguments, joined=False) == [0, 0]
    assert_same_features(tmp_path / "parts", file)


@pytest.fixture
def pictures(shards, tmp_path):
    """A folder with the pictures of the shards, in their order, one of them in a folder of its own."""
    collection = read_collection(shards)
    folder = tmp_path / "pictures"
    for index, data in collection.pictures(range(len(collection))).items():
        file = folder / ("z" if index == len(collection) - 1 else "a") / f"{index:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    (folder / "a" / ".hidden.png").write_bytes(b"")
    return folder


def test_a_folder_of_pictures(encode, shards, pictures):
    expected = load_features(encode(shards, "expected.npz")[0])
    file, error = encode(pictures, "pictures.npz")
    assert error == f"read {pictures} as a folder of pictures: 24 pictures, no captions\n"
    with np.load(file) as content:
        assert sorted(content) == ["image_features", "vl_plugins"]
        assert torch.equal(torch.from_numpy(content["image_features"]), expected.images)
        values = json.loads(str(content["vl_plugins"]))
    assert values["image_ids"] == [f"a/{index:02d}.png" for index in range(23)] + ["z/23.png"]
    folder, _ = encode(pictures, "parts")
    assert torch.equal(torch.from_numpy(arrays_of(folder)["images"]), expected.images)
    assert sorted(os.listdir(folder)) == ["ids.json", "images"]
    assert json.loads((folder / "ids.json").read_text())["image_ids"] == values["image_ids"]


def test_a_file_of_captions(encode, shards, tmp_path):
    captions = read_collection(shards).captions
    (tmp_path / "captions.txt").write_text("\ufeff\n" + "\n".join(captions) + "\n \n", encoding="utf-8")
    # In batches of the same texts as those of four images.
    expected = load_features(encode(shards, "expected.npz")[0])
    file, error = encode(tmp_path / "captions.txt", "captions.safetensors", "--batch-size", "20")
    assert error == f"read {tmp_path}/captions.txt as captions: 120 captions, one a line; 2 blank lines left out\n"
    from safetensors import safe_open

    with safe_open(file, framework="pt") as content:
        assert list(content.keys()) == ["caption_features"]
        assert torch.equal(content.get_tensor("caption_features"), expected.captions)
        assert json.loads(content.metadata()["vl_plugins"])["caption_ids"] == list(range(2, 122))
    folder, _ = encode(tmp_path / "captions.txt", "parts", "--batch-size", "20")
    assert torch.equal(torch.from_numpy(arrays_of(folder)["captions"]), expected.captions)


def test_it_says_what_it_has_read(encode, pictures, tmp_path, monkeypatch):
    """Tables beside pictures are named, a ``.txt`` may be a table, and pictures with a ``.txt`` each have captions."""
    monkeypatch.chdir(tmp_path)
    (pictures / "captions.csv").write_text("image,caption\na/00.png,a dog\n")
    _, error = encode("pictures", "one.npz")
    warning = "pictures is read as pictures without captions; if captions.csv has captions of them, give that file in "
    assert warning in error
    assert error.endswith("read pictures as a folder of pictures: 24 pictures, no captions\n")
    table = tmp_path / "captions.txt"  # Kaggle's name of Flickr8K's table
    table.write_text('image,caption\npictures/a/00.png,a dog\npictures/a/00.png,"a dog, and a cat"\n')
    file, error = encode("captions.txt", "two.npz")
    assert error == "read captions.txt as a table: 1 images with 2 captions\n"
    assert load_features(file).images.shape[0] == 1
    shutil.rmtree(pictures / "a")
    (pictures / "z" / "23.txt").write_text("a dog")
    _, error = encode("pictures", "three.npz")
    assert error == "read pictures as pictures with a .txt each: 1 images with 1 caption\n"


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_unreadable_picture_is_named(encode, pictures, tmp_path, workers):
    for content, reason in (
        (b"no picture", "the file is not an image in JPEG, PNG or WebP format"),
        ((pictures / "a" / "04.png").read_bytes()[:200], "image file is truncated"),
    ):
        (pictures / "a" / "05.png").write_bytes(content)
        _, error = encode(pictures, "out.npz", "--workers", workers, status=2)
        (line,) = (line for line in error.splitlines() if "error" in line)
        assert line.startswith(f"vl-plugins encode: error: cannot read {pictures}/a/05.png: ")
        assert reason in line
    (tmp_path / "table.csv").write_text(f"image,caption\n{pictures}/a/05.png,a dog\n")
    _, error = encode(tmp_path / "table.csv", "out.npz", status=2)
    assert f"table.csv ({str(pictures)[1:]}/a/05.png): " in error
    _, error = encode(pictures, "out.npz", "--max-image-pixels", "10", status=2)
    assert f"cannot read {pictures}/a/00.png: the image has " in error


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\n \n", "has no captions, one a line"), (b"a dog\n\xff\xfe cat\n", "line 2 is not UTF-8")],
)
def test_files_without_captions(encode, tmp_path, content, message):
    (tmp_path / "captions.txt").write_bytes(content)
    assert message in encode(tmp_path / "captions.txt", "out.npz", status=2)[1]
    assert not (tmp_path / "out.npz").exists()


def test_a_model_of_features_cannot_encode_pictures(pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(shutil.copytree(Path(__file__).parents[1] / "files_v0_3", tmp_path / "files"))
    assert main(["encode", "runs/features", str(pictures), "out.npz"]) == 2
    assert f"takes features, and {pictures} has pictures" in capsys.readouterr().err
