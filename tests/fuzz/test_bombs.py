"""Small files and words that stand for a lot are refused in a line that names the limit, before memory is asked for."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.fuzz.forked import LAUNCH, OURS, TRAIN_TOWERS

FILES = Path(__file__).parents[1] / "files_v0_2"
TRAIN = "--train-data shards/pictures/toy-train-000000.tar --loss smooth_chamfer --head set --model"
ENCODE = "out.npz --device cpu --workers 0"
PICTURES = "shards/pictures/toy-test-000000.tar"
ALIASES = "a: &a [1, 1, 1, 1]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghijk"))
COMMANDS = [
    (OURS, "evaluate --features zeros.npz", "zeros.npz: 67,", "compressed more than 100 times"),
    (LAUNCH, f"{TRAIN} wide --model-config wide.json", "model wide: 1,000,000 is more than 500,000"),
    (
        LAUNCH,
        f"{TRAIN} tiny --model-config model/tiny.json --head-kwargs num_slots=1000000000",
        "1,000,000,000 is more",
    ),
    (
        OURS,
        f"encode logs/set/checkpoints/slots.pt {PICTURES} {ENCODE}",
        "1,000,000,000 is more than 500,000",
    ),
    (OURS, f"encode logs/triplet/checkpoints/stride.pt {PICTURES} {ENCODE}", "stride.pt", "size mismatch"),
    (TRAIN_TOWERS, "--config wide.yaml --device cpu", "1,000,000,000 is more than 500,000"),
    (OURS, "shards info toy-{0..9999999999}.tar", "it names more than 500,000 shards"),
    (
        OURS,
        f"encode logs/triplet/checkpoints/epoch_5.pt {'{a,b}' * 40}.tar {ENCODE}",
        "it names more than 500,000 shards",
    ),
    *(
        (module, f"--config {name}.yaml", f"{name}.yaml: ", line)
        for module in (LAUNCH, TRAIN_TOWERS)
        for name, line in (("deep", "not valid YAML: maximum recursion depth"), ("aliases", "more than 10,000 values"))
    ),
    (LAUNCH, "--config braces.yaml", "it names more than 500,000 shards"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = shutil.copytree(FILES, tmp_path_factory.mktemp("bombs"), dirs_exist_ok=True)
    names = {"image_features": (2**20, 16), "caption_features": (1, 16), "image_of_caption": (1,)}
    np.savez_compressed(folder / "zeros.npz", **{name: np.zeros(shape, "f4") for name, shape in names.items()})
    model = json.loads((folder / "model/tiny.json").read_text())
    (folder / "wide.json").write_text(json.dumps(model | {"vision_cfg": model["vision_cfg"] | {"width": 10**6}}))
    content = torch.load(folder / "logs/set/checkpoints/epoch_10.pt", weights_only=True)
    content["args"] = {"model": "tiny", "model_config": "model/tiny.json", "head": "set", "similarity": "mil"}
    content["args"] |= {"head_kwargs": {"num_slots": 10**9}, "similarity_kwargs": {}}
    torch.save(content, folder / "logs/set/checkpoints/slots.pt")
    content = torch.load(folder / "logs/triplet/checkpoints/epoch_5.pt", weights_only=True)
    content["state_dict"]["visual.positional_embedding"] = torch.ones(1).expand(10**6, 10**6)
    torch.save(content, folder / "logs/triplet/checkpoints/stride.pt")
    wide = {"data": {"train": PICTURES}, "image": {"trunk": "timm"}, "text": {"trunk": "gru"}, "dim": 10**9}
    texts = {"wide": yaml.safe_dump(wide), "deep": "loss: " + "[" * 3000 + "]" * 3000, "aliases": ALIASES}
    for name, text in (texts | {"braces": "train-data: toy-{0..9999999999}.tar"}).items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("module", "command", "texts"), [(module, command, texts) for module, command, *texts in COMMANDS]
)
def test_refused_before_memory_is_asked_for(module, command, texts, folder, run):
    finished = run(folder, module, command)
    assert finished.status == 2, finished
    (line,) = (line for line in finished.error.splitlines() if ": error: " in line)
    assert all(text in line for text in texts), line
    assert finished.megabytes < 100
