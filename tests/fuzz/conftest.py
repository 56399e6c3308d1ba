"""Files of each kind, and a parent from which commands are forked."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.fuzz.damage import MARKER
from tests.fuzz.forked import LAUNCH, OURS, TRAIN_TOWERS, forked
from tests.helpers.pml_settings import settings

FILES = Path(__file__).parents[1] / "files_v0_2"
PICTURES = "shards/pictures/toy-test-000000.tar::shards/pictures/toy-test-000001.tar"
TRAIN = "shards/pictures/toy-train-{000000..000002}.tar"
KARPATHY = "shards coco --annotations karpathy.json --images scenes"
ENCODE = "out.npz --model-config model/tiny.json --device cpu --workers 0"
TOWERS = settings(data={"train": TRAIN, "val": PICTURES, "batch_size": 8}, loss={"name": "triplet_sh", "margin": 0.2})
TOWERS |= {"training": {"epochs": 1, "optimizer": {"name": "Adam"}, "lr_scheduler": {"name": "StepLR", "step_size": 1}}}
OPEN_CLIP = {"model": "tiny", "model-config": "model/tiny.json", "device": "cpu", "workers": 0, "batch-size": 8}
OPEN_CLIP |= {"train-data": TRAIN, "epochs": 1, "warmup": 0, "lr": 0.001, "seed": 5, "captions-per-image": 2}
OPEN_CLIP |= {"precision": "fp32"}  # torch 2.2 has no LayerNorm in half precision on CPUs
OPEN_CLIP |= {"loss": "smooth_chamfer", "loss-kwargs": {"base": "triplet_sh", "alpha": 8}, "head": "set"}
OPEN_CLIP |= {"head-kwargs": {"num_slots": 2, "num_iters": 2, "hidden_dim": 16}, "aug-cfg": {"scale": "(0.9, 1.0)"}}


@pytest.fixture(scope="session")
def run():
    """A function that runs commands in forked processes."""
    with forked() as run:
        yield run


@pytest.fixture(scope="session")
def whole(tmp_path_factory, toy_scenes, run):
    """Files of version 0.2, and of this one: a run of each trainer, indexes, features, sources and configurations."""
    folder = shutil.copytree(FILES, tmp_path_factory.mktemp("whole"), dirs_exist_ok=True)
    (folder / "planted.py").write_text(f"open({MARKER!r}, 'w').close()\n")
    (folder / "pml.yaml").write_text(yaml.safe_dump(TOWERS))
    (folder / "open_clip.yaml").write_text(yaml.safe_dump(OPEN_CLIP))
    shutil.copytree(toy_scenes, folder / "scenes")
    karpathy = json.loads((folder / "scenes/dataset_toy.json").read_text())
    karpathy["images"] = karpathy["images"][:8]
    names = [f"{image.get('filepath', '')}/{image['filename']}".lstrip("/") for image in karpathy["images"]]
    captions = [[sentence["raw"] for sentence in image["sentences"]] for image in karpathy["images"]]
    texts = [(number, text) for number, part in enumerate(captions) for text in part]
    annotations = [{"id": id, "image_id": number, "caption": text} for id, (number, text) in enumerate(texts)]
    coco = {
        "images": [{"id": number, "file_name": name} for number, name in enumerate(names)],
        "annotations": annotations,
    }
    lines = [json.dumps({"image": name, "captions": part}) for name, part in zip(names, captions, strict=True)]
    rows = [f'{names[number]},"{text}",{number}' for number, text in texts]
    (folder / "karpathy.json").write_text(json.dumps(karpathy))
    (folder / "captions.json").write_text(json.dumps(coco))
    (folder / "table.csv").write_text("\n".join(["image,caption,id", *rows]) + "\n")
    (folder / "table.jsonl").write_text("\n".join(lines) + "\n")
    for module, command in (
        (OURS, f"{KARPATHY} --samples-per-shard 4 --out shards/new"),
        (LAUNCH, "--config open_clip.yaml --name new"),
        (TRAIN_TOWERS, "--config pml.yaml --out runs/new --device cpu"),
    ):
        finished = run(folder, module, command)
        assert finished.status == 0, finished
    return folder
