"""A data set with one image of every kind that can be wrong, through the command line."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import Compose, PILToTensor, Resize

from vl_plugins.cli import main
from vl_plugins.data.evaluation_reader import EvaluationReader

RED = (200, 20, 30)


def encode(image_format="JPEG", mode="RGB", size=(40, 30), **options):
    stream = io.BytesIO()
    image = Image.new("RGB", size, RED)
    if mode == "I;16":
        image = image.convert("L")  # Pillow 10 knows no direct way
    image.convert(mode).save(stream, image_format, **options)
    return stream.getvalue()


def frames(image_format):
    return encode(image_format, save_all=True, append_images=[Image.new("RGB", (40, 30), "blue")])


USABLE = {
    "plain.jpg": encode(),
    "cmyk.jpg": encode(mode="CMYK"),
    "gray.jpg": encode(mode="L"),
    "palette.png": encode("PNG", mode="P"),
    "transparent.png": encode("PNG", mode="RGBA"),
    "really_webp.jpg": encode("WEBP"),
}
UNUSABLE = {
    "missing.jpg": (None, "cannot read the file: No such file or directory"),
    "folder.jpg": (Path.mkdir, "cannot read the file: Is a directory"),
    "empty.jpg": (b"", "the file is empty"),
    "truncated.jpg": (encode(size=(300, 300))[:-300], "the image is damaged: image file is truncated"),
    "text.jpg": (b"A picture of a cat.", "the file is not an image"),
    "page.jpg": (b"<html>404 Not Found</html>", "the file is not an image"),
    "gray_of_16_bits.png": (encode("PNG", mode="I;16"), "more than 8 bits per channel"),
    "animated.png": (frames("PNG"), "the image is animated, with 2 frames"),
    "animated.webp": (frames("WEBP"), "the image is animated, with 2 frames"),
    "animated.gif": (frames("GIF"), "the format GIF is not supported"),
    "fifo.jpg": (os.mkfifo, "cannot read the file: it is not a regular file"),
    "device.jpg": (lambda file: file.symlink_to("/dev/zero"), "cannot read the file: it is not a regular file"),
    "endless.jpg": (lambda file: file.touch() or os.truncate(file, 1 << 40), "the file is larger than 1 GiB"),
    "bomb.png": (encode("PNG", mode="1", size=(10_000, 10_000)), "the image has more than 89,478,485 pixels"),
}


def entry(filename, number, captions):
    sentences = [{"raw": caption, "sentid": 10 * number + place} for place, caption in enumerate(captions)]
    return {"filename": filename, "filepath": ".", "cocoid": number, "split": "train", "sentences": sentences}


GOOD_ENTRIES = {
    "tab.jpg": ["a caption\twith a tab", "and\none with\r\nnew lines\n"],
    "signs.jpg": ['"quotes", \\ and \x7f', "カエル 🐸 é"],
}
BAD_ENTRIES = {
    "no_captions.jpg": ([], "it has no captions; every image needs at least one"),
    "blank.jpg": (["fine", " \t\n"], "is blank"),
    "half_a_character.jpg": (["\ud83d"], "is not valid Unicode"),
    "/etc/hostname": (["absolute"], "leads out of the image root"),
    "../secret.jpg": (["parent"], "leads out of the image root"),
    "a/../../secret.jpg": (["parent"], "leads out of the image root"),
    "..\\secret.jpg": (["parent"], "leads out of the image root"),
    "nul\0.jpg": (["null character"], "null"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    root = folder / "root"
    root.mkdir()
    (folder / "secret.jpg").write_bytes(encode())
    entries = []
    for name, data in {**USABLE, **{name: data for name, (data, _) in UNUSABLE.items()}}.items():
        if callable(data):
            data(root / name)
        elif data is not None:
            (root / name).write_bytes(data)
        entries.append(entry(name, len(entries), [f"a picture called {name}"]))
    for name, captions in {**GOOD_ENTRIES, **{name: captions for name, (captions, _) in BAD_ENTRIES.items()}}.items():
        if name in GOOD_ENTRIES:
            (root / name).write_bytes(encode())
        entries.append(entry(name, len(entries), captions))
    repeated = entry("copy.jpg", 0, ["the same id again"])
    repeated["sentences"][0]["sentid"] = 999
    (folder / "dataset.json").write_text(json.dumps({"dataset": "bad", "images": [*entries, repeated]}))
    return folder


def convert(folder, out, *flags):
    command = ["shards", "coco", "--annotations", folder / "dataset.json", "--images", folder / "root", "--out", out]
    return main([str(argument) for argument in (*command, *flags)])


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_wrong_is_listed_and_the_rest_is_usable(folder, tmp_path, capsys, workers):
    out = tmp_path / "out"
    assert convert(folder, out, "--on-error", "skip", "--samples-per-shard", 5, "--workers", workers) == 0
    assert f"the reasons are in {out}/rejected.jsonl" in capsys.readouterr().out
    reasons = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    wrong = {**{name: reason for name, (_, reason) in UNUSABLE.items()}, **{n: r for n, (_, r) in BAD_ENTRIES.items()}}
    assert len(reasons) == len(wrong) + 1
    for name, reason in wrong.items():
        matching = [item["reason"] for item in reasons if item["image"] == name or f"({name})" in item["image"]]
        assert len(matching) == 1, name
        assert reason in matching[0]
    (reason,) = [item["reason"] for item in reasons if "(copy.jpg)" in item["image"]]
    assert reason.startswith("image id 0 occurs more than once")
    manifest = json.loads((out / "manifest.json").read_text())["splits"]["bad-train"]
    assert (manifest["images"], manifest["rejected"]) == (len(USABLE) + len(GOOD_ENTRIES), len(reasons))
    assert main(["shards", "verify", str(out)]) == 0

    transform = Compose([PILToTensor(), Resize((1, 1))])
    shards = [str(out / shard) for shard in sorted(manifest["shards"])]
    batches = list(EvaluationReader(shards, transform, list, 3))
    captions = [caption for _, texts, *_ in batches for caption in texts]
    assert captions == [
        *(f"a picture called {name}" for name in USABLE),
        *(caption for captions in GOOD_ENTRIES.values() for caption in captions),
    ]
    colors = torch.cat([images.flatten(1) for images, *_ in batches]).numpy()
    expected = np.array([[73] * 3 if name == "gray.jpg" else RED for name in (*USABLE, *GOOD_ENTRIES)])
    # The palette of PIL's conversion has six steps for each color.
    tolerance = np.array([[26] if name == "palette.png" else [3] for name in (*USABLE, *GOOD_ENTRIES)])
    assert (np.abs(colors - expected) <= tolerance).all()


def test_by_default_the_first_one_stops_the_run_before_anything_is_written(folder, tmp_path, capsys):
    assert convert(folder, tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vl-plugins shards: error: ")
    assert not (tmp_path / "out").exists()
