"""Real files of each kind, damaged at random: the commands end with the numbers of what is left, or with one line."""

import copy
import json
import os
import random
import re
import shutil
from functools import cache

import numpy as np
import pytest
import torch

from tests.fuzz import readers
from tests.fuzz.conftest import ENCODE, KARPATHY, PICTURES
from tests.fuzz.damage import MARKER, damage
from tests.fuzz.forked import LAUNCH, OURS, TRAIN_TOWERS
from vl_plugins.integrations.loading import load_model


def recalls(whole, folder, file, output):
    metrics = json.loads(output)["results"][0]["metrics"]["plain"]
    for name, (least, greatest) in readers.recall_bounds(folder / file).items():
        assert least - 1e-6 <= metrics[name] <= greatest + 1e-6, name


@cache
def original(whole, file):
    return load_model(whole / file, model_config="model/tiny.json"), weights(
        torch.load(whole / file, weights_only=True)
    )[1]


def weights(content):
    """Return the weights by name and the settings of a checkpoint of either trainer."""
    if "models" in content:
        parts = {name.replace("_", ".", 1): part for name, part in content["models"].items()}
        named = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}
        return named, {key: content[key] for key in ("version", "config", "vocabulary")}
    named = {name.removeprefix("clip."): value for name, value in content["state_dict"].items()}
    return named, [content.get("args"), named.get("_extra_state")]


def embedded(whole, folder, file, output):
    """Compare features with those of the model that was saved, with the weights and the pictures as they are now."""
    written = np.load(folder / "out.npz")
    description = json.loads(str(written["vl_plugins"]))["description"]
    found, settings = weights(torch.load(folder / description["checkpoint"], weights_only=True))
    loaded, known = original(whole, description["checkpoint"])
    if settings == known:
        shards = [folder / name for name in description["shards"].split("::")]
        expected = readers.embeddings(copy.deepcopy(loaded), found, shards)
        for name, array in zip(("image_features", "caption_features"), expected, strict=True):
            np.testing.assert_allclose(written[name], array, rtol=0, atol=1e-5)


def converted(whole, folder, file, output):
    shards = sorted((folder / "again").glob("*.tar"))
    assert readers.captions_of_shards(shards) == readers.captions_of_source(folder / file)


def verified(whole, folder, file, output):
    *problems, counts = output.splitlines()
    is_same = (folder / file).read_bytes() == (whole / file).read_bytes()
    if problems or file.suffix == ".tar":  # of which the index has a checksum
        assert bool(problems) != is_same
    if not problems:
        texts = readers.captions_of_shards(sorted((folder / "shards/new").glob("*.tar")))
        assert f" {len(texts)} samples, {sum(map(len, texts))} captions: no problems" in counts


def counted(whole, folder, file, output):
    found = json.loads(output).values()
    heads = [json.loads(index.read_bytes().splitlines()[0]) for index in (folder / "shards/new").glob("*/*.jsonl")]
    assert sum(split["images"] for split in found) == sum(len(head["counts"]) for head in heads)
    assert sum(split["captions"] for split in found) == sum(sum(head["counts"]) for head in heads)


ARRAYS = PICTURES.replace("pictures", "features")
NEW = "shards/new/toy-train-000000.tar::shards/new/toy-train-000001.tar"
RUN = f"evaluate --json --model-config model/tiny.json --shards {PICTURES} --workers 0 --device cpu --checkpoint"
LAUNCHED, TRAINED = "--config open_clip.yaml --name", "--config pml.yaml --device cpu --out"
COCO = KARPATHY.replace("coco", "coco-captions").replace("karpathy", "captions")
# What is damaged, the command, and the check of what it prints or writes.
KINDS = {
    "features": ("features/*", OURS, "evaluate --json --features {file}", recalls),
    "open_clip": ("logs/*/checkpoints/*.pt", OURS, f"encode {{file}} {PICTURES} {ENCODE}", embedded),
    "towers": ("runs/[np]*/*.pt", OURS, f"encode {{file}} {PICTURES} {ENCODE}", embedded),
    "arrays": ("shards/features/toy-test-*.tar", OURS, f"encode runs/features/latest.pt {ARRAYS} {ENCODE}", embedded),
    "run folder": ("logs/* runs/[np]*", OURS, f"{RUN} {{file}}", None),
    "params": ("logs/triplet/params.txt", OURS, f"{RUN} logs/triplet", None),
    "model": ("model/**/*.json", OURS, f"{RUN} logs/triplet", None),
    "results": ("runs/pictures/results.jsonl", OURS, "plot training runs/pictures", None),
    "flags": ("open_clip.yaml", LAUNCH, f"{LAUNCHED} again", None),
    "configuration": ("pml.yaml", TRAIN_TOWERS, f"{TRAINED} again", None),
    "resumed flags": ("logs/new/*/*.pt", LAUNCH, f"{LAUNCHED} new --resume latest --epochs 2", None),
    "resumed": ("runs/new/latest.pt", TRAIN_TOWERS, f"{TRAINED} runs/new --resume --set training.epochs=2", None),
    "karpathy": ("karpathy.json", OURS, f"{KARPATHY} --out again", converted),
    "coco": ("captions.json", OURS, f"{COCO} --out again", converted),
    "table": ("table.*", OURS, "shards table --annotations {file} --images scenes --out again", converted),
    "verify": ("shards/new/**/*.*", OURS, "shards verify shards/new", verified),
    "info": ("shards/new/**/*.*", OURS, "shards info shards/new", counted),
    "encode": ("shards/new/**/*.*", OURS, f"encode logs/triplet {NEW} {ENCODE}", embedded),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 115), marks=pytest.mark.slow)], ids=["few", "many"])
def test_numbers_of_what_is_left_or_one_line(kind, seeds, whole, run, tmp_path, monkeypatch):
    monkeypatch.chdir(whole)
    pattern, module, command, check = KINDS[kind]
    folder = tmp_path / "files"
    seeds = range(*map(int, os.environ["FUZZ"].split(","))) if "FUZZ" in os.environ else seeds
    failures = []
    for seed in [None, *seeds]:
        draw = random.Random(f"{kind} {seed}")
        file = draw.choice(sorted(each.relative_to(whole) for part in pattern.split() for each in whole.glob(part)))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder, copy_function=os.link)
        for each in [folder / file, *(folder / file).rglob("*")]:
            if each.is_file():  # no longer a link
                each.write_bytes(each.unlink() or (whole / each.relative_to(folder)).read_bytes())
        if seed is not None:
            damage(folder / file, draw)
        if file.suffix == ".yaml" and re.search(
            r"(epochs|accum.freq|captions.per.image)\W+\d\d", (folder / file).read_text("latin")
        ):
            continue  # nothing is wrong with a long training or with many captions
        finished = run(folder, module, command.format(file=file))
        try:
            assert_one_line_at_most(folder, finished, kind)
            assert seed is not None or finished.status == 0
            if check is not None and finished.status != 2:
                check(whole, folder, file, finished.output)
        except Exception as error:
            print(f"=== {kind} {seed}: {error!r:.600}", finished.output[-2000:], finished.error[-3000:], sep="\n")
            failures.append(seed)
    assert not failures


def assert_one_line_at_most(folder, finished, kind):
    if (folder / MARKER).exists() or "Traceback" in finished.error:
        raise RuntimeError("a traceback, or a planted program has run")
    lines = [line for line in finished.error.splitlines() if ": error: " in line]
    assert (finished.status, len(lines)) in ((0, 0), (2, 1), (1, 0) if kind == "verify" else (0, 0)), finished.status
