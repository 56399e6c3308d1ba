"""Real files of each kind, damaged at random: the commands end with the numbers of what is left, or with one line."""

import copy
import json
import os
import random
import re
import shutil
from functools import cache, partial

import numpy as np
import pytest
import torch

from tests.fuzz.damage import MARKER, change_folder, damage
from tests.fuzz.forked import LAUNCH, OURS, TRAIN_TOWERS
from tests.fuzz.readers import captions_of_shards, captions_of_source, embeddings, recall_bounds
from vl_plugins.integrations.loading import load_model

TEST = "shards/pictures/toy-test-{000000..000001}.tar"
PICTURES = [f"shards/pictures/toy-test-00000{number}.tar" for number in range(2)]
FEATURES = [name.replace("pictures", "features") for name in PICTURES]
CHECKPOINTS = ["triplet/checkpoints/epoch_5.pt", "linear/checkpoints/epoch_20.pt", "set/checkpoints/epoch_10.pt"]
CHECKPOINTS = [*(f"logs/{name}" for name in CHECKPOINTS), *(f"runs/{n}/latest.pt" for n in ("pictures", "features"))]
NEW = ["logs/new/checkpoints/epoch_1.pt", "runs/new/latest.pt"]


class Case:
    """Links to the whole files in a folder, of which some are replaced by damaged copies before a command runs."""

    def __init__(self, whole, folder, draw, run):
        self.whole, self.folder, self.draw = whole, folder, draw
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder, copy_function=os.link)
        self.run = partial(run, folder)

    def damage(self, name):
        """Damage a file, or anything in a folder."""
        file = self.folder / name
        for each in [file] if file.is_file() else [each for each in file.rglob("*") if each.is_file()]:
            data = each.read_bytes()
            each.unlink()
            each.write_bytes(data)
        (damage if file.is_file() else change_folder)(file, self.draw)
        return file

    def encode(self, checkpoint, shards):
        """Encode with a checkpoint; compare what it writes with what plain readers find, if they know its settings."""
        command = f"encode {checkpoint} {'::'.join(shards)} out.npz --workers 0 --device cpu"
        finished = self.run(OURS, command)
        if finished.status == 0:
            file, original = self.folder / checkpoint, self.whole / checkpoint
            weights, settings = weights_of(torch.load(file, weights_only=True))
            if settings == weights_of(torch.load(original, weights_only=True))[1]:
                shards = [self.folder / shard for shard in shards]
                found = embeddings(copy.deepcopy(model_of(original)), weights, shards)
                written = np.load(self.folder / "out.npz")
                for name, expected in zip(("image_features", "caption_features"), found, strict=True):
                    np.testing.assert_allclose(written[name], expected, rtol=0, atol=1e-5, err_msg=name)
        return finished


@cache
def model_of(file):
    return load_model(file)


def weights_of(content):
    """Return the weights by name and the settings of a checkpoint of either trainer."""
    if "models" in content:
        names = {name: name.replace("_", ".", 1) for name in content["models"]}
        parts = {f"{names[n]}.{key}": v for n, part in content["models"].items() for key, v in part.items()}
        return parts, {key: content[key] for key in ("version", "config", "vocabulary")}
    weights = {name.removeprefix("clip."): v for name, v in content["state_dict"].items()}
    return weights, [content.get("args"), weights.get("_extra_state")]


def features(case):
    file = case.damage(f"features/{case.draw.choice(sorted(os.listdir(case.folder / 'features')))}")
    finished = case.run(OURS, f"evaluate --json --features {file}")
    if finished.status == 0:
        metrics = json.loads(finished.output)["results"][0]["metrics"]["plain"]
        for name, (least, greatest) in recall_bounds(file).items():
            assert least - 1e-6 <= metrics[name] <= greatest + 1e-6, name
    return finished


def checkpoint(case):
    name = case.draw.choice([*CHECKPOINTS, *NEW])
    case.damage(name)
    return case.encode(name, FEATURES if "features" in name else PICTURES)


def run_folder(case):
    """The folder of a run, or ``params.txt`` or a model's settings in it."""
    name = case.draw.choice(["logs/triplet", "logs/set", "runs/pictures", "logs/new", "model"])
    case.damage(name)
    run = "logs/triplet" if name == "model" else name
    finished = case.run(OURS, f"evaluate --json --checkpoint {run} --shards {TEST} --workers 0 --device cpu")
    if finished.status == 0:
        assert 0 <= json.loads(finished.output)["results"][0]["metrics"]["plain"]["image_to_text_R@1"] <= 1
    return finished


def results(case):
    case.damage("runs/pictures/results.jsonl")
    return case.run(OURS, "plot training runs/pictures")


def configuration(case):
    name = case.draw.choice(["pml", "open_clip"])
    if re.search(r"(epochs|accum.freq)\W+\d\d", case.damage(f"{name}.yaml").read_text(errors="replace")):
        return None  # nothing is wrong with a long training
    if name == "open_clip":
        return case.run(LAUNCH, "--config open_clip.yaml --name again")
    return case.run(TRAIN_TOWERS, "--config pml.yaml --out runs/again --device cpu")


def resumed(case):
    if case.draw.random() < 0.5:
        case.damage(NEW[0])
        return case.run(LAUNCH, "--config open_clip.yaml --name new --resume latest --epochs 2")
    case.damage(NEW[1])
    return case.run(TRAIN_TOWERS, "--config pml.yaml --out runs/new --device cpu --resume --set training.epochs=2")


def source(case):
    kind = case.draw.choice(["coco --annotations karpathy.json", "coco-captions --annotations captions_val.json"])
    kind = case.draw.choice([kind, f"table --annotations table.{case.draw.choice(['csv', 'jsonl'])}"])
    file = case.damage(kind.split()[-1])
    finished = case.run(OURS, f"shards {kind} --images scenes --out again")
    if finished.status == 0:
        found = captions_of_shards(sorted((case.folder / "again").glob("*.tar")))
        assert found == captions_of_source(file)
    return finished


def shards(case):
    names = sorted(str(file.relative_to(case.whole)) for file in (case.whole / "shards/new").rglob("*.*"))
    name = case.draw.choice(names)
    file = case.damage(name)
    is_changed = file.read_bytes() != (case.whole / name).read_bytes()
    archives = [name for name in names if name.endswith(".tar")]
    command = case.draw.choice(["verify", "info", "encode"])
    if command == "encode":
        return case.encode(CHECKPOINTS[0], archives)
    finished = case.run(OURS, f"shards {command} shards/new --json")
    if command == "verify" and file.suffix == ".tar":
        assert finished.status == is_changed
    if command == "verify" and finished.status == 1:
        assert json.loads(finished.output)["problems"]
        return finished._replace(status=0)
    if finished.status == 0 and command == "verify":
        found, texts = json.loads(finished.output), captions_of_shards([case.folder / name for name in archives])
        assert (found["samples"], found["captions"]) == (len(texts), sum(map(len, texts)))
    elif finished.status == 0:
        found = json.loads(finished.output)["splits"].values()
        texts = captions_of_shards([case.folder / name for name in archives], usable=True)
        assert sum(split["images"] for split in found) == len(texts)
        assert sum(split["captions"] for split in found) == sum(map(len, texts))
    return finished


KINDS = [features, checkpoint, run_folder, results, configuration, resumed, source, shards]
ONE_LINE = re.compile(r"vl[-_]plugins[^\n]*: error: [^\n]+\n$")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 255), marks=pytest.mark.slow)], ids=["few", "many"])
def test_numbers_of_what_is_left_or_one_line(kind, seeds, whole, run, tmp_path, monkeypatch):
    monkeypatch.chdir(whole)
    failures, seeds = [], (os.environ.get("FUZZ", "") and range(*map(int, os.environ["FUZZ"].split(",")))) or seeds
    for seed in seeds:
        case = Case(whole, tmp_path / "files", random.Random(f"{kind.__name__} {seed}"), run)
        try:
            finished = kind(case)
            if finished is not None:
                check(case, finished)
        except Exception as error:
            texts = [(case.folder / name).read_text(errors="replace")[-3000:] for name in ("output", "error")]
            failures.append((seed, repr(error)[:600]))
            print(f"=== {kind.__name__} {seed}: {error!r:.600}", *texts, sep="\n")
    assert not failures


def check(case, finished):
    if (case.folder / MARKER).exists():
        raise RuntimeError("a planted program has run")
    assert "Traceback" not in finished.error
    lines = [line for line in finished.error.splitlines() if ": error: " in line]
    assert (finished.status, len(lines)) in ((0, 0), (2, 1)), finished.status
