"""Files and words that are refused in one line: a little that stands for a lot, and numbers of something else."""

import json
import os
from itertools import pairwise

import numpy as np
import pytest
import torch
import yaml

from tests.fuzz.conftest import ENCODE, PICTURES, TOWERS
from tests.fuzz.forked import LAUNCH, OURS, TRAIN_TOWERS

ALIASES = "a: &a [1, 1, 1, 1]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghijk"))
MANY = "it names more than 500,000 shards"
SETS = "--config open_clip.yaml --name refused"
COMMANDS = [
    (OURS, "evaluate --features zeros.npz", "zeros.npz: 67,", "compressed more than 100 times"),
    (OURS, "evaluate --features NaN.npz", "NaN.npz: ", "without NaN and infinity"),
    (OURS, "evaluate --features Infinity.npz", "Infinity.npz: ", "without NaN and infinity"),
    (LAUNCH, f"{SETS} --model wide --model-config wide.json", "model wide: 1,000,000 is more than 500,000"),
    (LAUNCH, f"{SETS} --head-kwargs num_slots=1000000000", "1,000,000,000 is more than 500,000"),
    (OURS, f"encode logs/new/checkpoints/slots.pt {PICTURES} {ENCODE}", "1,000,000,000 is more than 500,000"),
    (OURS, f"encode logs/new/checkpoints/stride.pt {PICTURES} {ENCODE}", "stride.pt", "size mismatch"),
    (TRAIN_TOWERS, "--config wide.yaml --device cpu", "1,000,000,000 is more than 500,000"),
    (OURS, "shards info toy-{0..9999999999}.tar", MANY),
    (OURS, f"encode logs/new {'{a,b}' * 40}.tar {ENCODE}", MANY),
    (LAUNCH, "--config braces.yaml", MANY),
    (LAUNCH, "--config deep.yaml", "deep.yaml: not valid YAML: maximum recursion depth"),
    (TRAIN_TOWERS, "--config deep.yaml", "deep.yaml: not valid YAML: maximum recursion depth"),
    (LAUNCH, "--config aliases.yaml", "aliases.yaml: a configuration of more than 10,000 values"),
    (TRAIN_TOWERS, "--config aliases.yaml", "aliases.yaml: a configuration of more than 10,000 values"),
    (OURS, f"encode logs/new {PICTURES}::soft.tar {ENCODE}", "or one more than once"),
    (OURS, f"encode logs/new {PICTURES}::hard.tar {ENCODE}", "or one more than once"),
    (OURS, f"encode logs/new/checkpoints/flipped.pt {PICTURES} {ENCODE}", "flipped.pt: it is damaged"),
]
WITH_WORKERS = [
    (OURS, f"encode logs/new {PICTURES} {ENCODE.replace('workers 0', 'workers 1')}"),
    (LAUNCH, f"{SETS}_later --workers 1"),
    (TRAIN_TOWERS, "--config pml.yaml --device cpu --set data.workers=1"),
]


@pytest.fixture(scope="module")
def folder(whole):
    names = {"image_features": (2**20, 16), "caption_features": (1, 16), "image_of_caption": (1,)}
    np.savez_compressed(whole / "zeros.npz", **{name: np.zeros(shape, "f4") for name, shape in names.items()})
    arrays = dict(np.load(whole / "features/set.npz"))
    for number in ("NaN", "Infinity"):
        text = str(arrays["vl_plugins"]).replace('"alpha": 16.0', f'"alpha": {number}')
        np.savez(whole / f"{number}.npz", **arrays | {"vl_plugins": text})
    model = json.loads((whole / "model/tiny.json").read_text())
    (whole / "wide.json").write_text(json.dumps(model | {"vision_cfg": model["vision_cfg"] | {"width": 10**6}}))
    checkpoints = whole / "logs/new/checkpoints"
    content = torch.load(checkpoints / "epoch_1.pt", weights_only=True)
    many = {**content, "args": {**content["args"], "head_kwargs": {"num_slots": 10**9}}}
    torch.save(many, checkpoints / "slots.pt")
    weights = {**content["state_dict"], "visual.positional_embedding": torch.ones(1).expand(10**6, 10**6)}
    torch.save({**content, "state_dict": weights}, checkpoints / "stride.pt")
    weight = content["state_dict"]["visual.proj"].numpy().tobytes()
    data = (checkpoints / "epoch_1.pt").read_bytes()
    assert weight in data
    (checkpoints / "flipped.pt").write_bytes(data.replace(weight, weight[:-1] + bytes([weight[-1] ^ 1])))
    os.symlink(whole / PICTURES.split("::")[0], whole / "soft.tar")
    os.link(whole / PICTURES.split("::")[1], whole / "hard.tar")
    texts = {"wide": yaml.safe_dump(TOWERS | {"dim": 10**9}), "deep": "loss: " + "[" * 3000 + "]" * 3000}
    for name, text in (texts | {"aliases": ALIASES, "braces": "train-data: toy-{0..9999999999}.tar"}).items():
        (whole / f"{name}.yaml").write_text(text)
    return whole


@pytest.mark.parametrize(
    ("module", "command", "texts"), [(module, command, texts) for module, command, *texts in COMMANDS]
)
def test_one_line_and_little_memory(module, command, texts, folder, run):
    finished = run(folder, module, command)
    line = the_error(finished)
    assert all(text in line for text in texts), line
    assert finished.megabytes < 100


@pytest.mark.parametrize(("module", "command"), WITH_WORKERS)
def test_dead_workers_in_one_line(module, command, folder, run):
    assert "DataLoader worker" in the_error(run(folder, module, command, KILL_WORKERS="1"))


def the_error(finished):
    """Return the only line of an error with status 2."""
    assert finished.status == 2, finished
    (line,) = (line for line in finished.error.splitlines() if ": error: " in line)
    return line
