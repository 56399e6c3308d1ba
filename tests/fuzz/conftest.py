"""Files of each kind, and a parent from which commands are forked."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.fuzz.damage import PLANTED
from tests.fuzz.forked import LAUNCH, OURS, TRAIN_TOWERS, forked

FILES = Path(__file__).parents[1] / "files_v0_2"
TEST, TRAIN = "shards/pictures/toy-test-{000000..000001}.tar", "shards/pictures/toy-train-{000000..000002}.tar"
KARPATHY = "shards coco --annotations karpathy.json --images scenes"
TINY = "--model tiny --model-config model/tiny.json --device cpu --precision fp32 --workers 0 --batch-size 8 "
TINY += f"--train-data {TRAIN} --epochs 1 --warmup 0 --loss smooth_chamfer --head set --name"
PML = {
    "data": {"train": TRAIN, "val": TEST, "batch_size": 8, "workers": 0},
    "image": {"trunk": {"name": "timm", "model": "vit_tiny_patch16_224", "image_size": 32, "patch_size": 8}},
    "text": {"trunk": {"name": "gru", "word_dim": 16, "hidden_dim": 16}, "projection": "none"},
    "dim": 16,
    "loss": {"name": "triplet_sh", "margin": 0.2},
    "training": {"epochs": 1, "optimizer": {"name": "Adam", "lr": 0.01}, "lr_scheduler": {"name": "StepLR"}},
    "seed": 7,
}
PML["image"]["trunk"] |= {"embed_dim": 16, "depth": 1, "num_heads": 2}
PML["training"]["lr_scheduler"]["step_size"] = 1
OPEN_CLIP = dict(zip(*[iter(TINY.replace("--", "").split()[:-1])] * 2, strict=True)) | {
    "loss-kwargs": {"base": "triplet_sh", "alpha": 8},
    "head-kwargs": {"num_slots": 2, "num_iters": 2, "hidden_dim": 16},
    "aug-cfg": {"scale": "(0.9, 1.0)"},
    "captions-per-image": 2,
    "lr": 0.001,
    "seed": 5,
}


@pytest.fixture(scope="session")
def run():
    """A function that runs commands in forked processes."""
    with forked() as run:
        yield run


@pytest.fixture(scope="session")
def whole(tmp_path_factory, toy_scenes, run):
    """Files of version 0.2, and of this one: a run of each trainer, indexes, features, sources and configurations."""
    folder = shutil.copytree(FILES, tmp_path_factory.mktemp("whole"), dirs_exist_ok=True)
    (folder / "planted.py").write_text(PLANTED)
    (folder / "pml.yaml").write_text(yaml.safe_dump(PML))
    (folder / "open_clip.yaml").write_text(yaml.safe_dump(OPEN_CLIP))
    shutil.copytree(toy_scenes, folder / "scenes")
    karpathy = json.loads((folder / "scenes/dataset_toy.json").read_text())
    karpathy["images"] = karpathy["images"][:8]
    (folder / "karpathy.json").write_text(json.dumps(karpathy))
    names = [f"{image.get('filepath', '')}/{image['filename']}".lstrip("/") for image in karpathy["images"]]
    captions = [[sentence["raw"] for sentence in image["sentences"]] for image in karpathy["images"]]
    images = [{"id": number, "file_name": name} for number, name in enumerate(names)]
    texts = [(number, text) for number, part in enumerate(captions) for text in part]
    annotations = [{"id": id, "image_id": number, "caption": text} for id, (number, text) in enumerate(texts)]
    (folder / "captions_val.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    rows = [f'{names[number]},"{text}",{number}' for number, text in texts]
    (folder / "table.csv").write_text("\n".join(["image,caption,id", *rows]) + "\n")
    lines = [json.dumps({"image": name, "captions": part}) for name, part in zip(names, captions, strict=True)]
    (folder / "table.jsonl").write_text("\n".join(lines) + "\n")
    for module, words in (
        (
            OURS,
            "shards coco --annotations karpathy.json --images scenes --samples-per-shard 4 --out shards/new",
        ),
        (LAUNCH, "--config open_clip.yaml --name new"),
        (TRAIN_TOWERS, "--config pml.yaml --out runs/new --device cpu"),
    ):
        finished = run(folder, module, words)
        assert finished.status == 0, finished
    return folder
