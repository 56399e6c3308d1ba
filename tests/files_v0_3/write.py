"""Write the files beside this script with vl_plugins 0.3.0: ``python tests/files_v0_3/write.py``.

Later versions write other files, so this script needs 0.3.0. Everything runs in a temporary folder with relative paths,
so that the files do not depend on where they were written.
"""

import contextlib
import importlib
import io
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file

import vl_plugins
from vl_plugins.data import ShardDataset
from vl_plugins.integrations.pytorch_metric_learning.run import Run
from vl_plugins.retrieval import similarity_ranks
from vl_plugins.retrieval.features import load_features

HERE = Path(__file__).parent
WRITTEN = ("features", "logs", "model", "runs", "shards", "trained", "expected.json")
TRAIN, TEST = "toy-train-{000000..000002}.tar", "toy-test-{000000..000001}.tar"

# The tests may run on another processor, where embeddings differ by about 1e-6.
SMALLEST_GAP = 3e-5

# One batch is the whole training set, and nothing is random but the first weights, so the order of the images does not
# matter. A large eps keeps rounding errors small where the gradient is nearly zero.
LAUNCH = "-m vl_plugins.integrations.open_clip --model tiny --model-config model/tiny.json --device cpu"
LAUNCH += f" --precision fp32 --workers 0 --batch-size 16 --train-data shards/pictures/{TRAIN}"
LAUNCH += " --captions-per-image all --allow-duplicate-captions --aug-cfg scale=(1.0,1.0)"
LAUNCH += " --warmup 2 --lr 2e-3 --eps 1e-3"
RUNS = {
    "plain": "--epochs 8 --loss unified",
    "linear": "--epochs 8 --loss triplet_sh --head linear --head-kwargs dim=12",
    "set": "--epochs 8 --loss smooth_chamfer --loss-kwargs base=unified --head set --head-kwargs num_slots=2"
    " num_iters=2 hidden_dim=16",
    # The checkpoint that is kept is of epoch 5 of 8.
    "learned": "--epochs 8 --loss unified --loss-kwargs scale=learned margin=0.1",
}
TOWERS = "vl_plugins.integrations.pytorch_metric_learning"
MODULES = {
    "vl_plugins.integrations.open_clip": "vl_plugins.integrations.open_clip.launcher",
    TOWERS: f"{TOWERS}.command_line",
}
SEEDS = {"plain": 2, "linear": 11, "set": 1, "learned": 4, "pictures": 7, "features": 5}  # the first that is tried
EPOCHS = {"plain": 8, "linear": 8, "set": 8, "learned": 5}
LAST = 8

CONFIGS = {
    "pictures": f"""\
data: {{train: 'shards/pictures/{TRAIN}', val: 'shards/pictures/{TEST}', captions_per_image: all, batch_size: 16,
  workers: 0, allow_duplicate_captions: true}}
image:
  trunk: {{name: timm, model: vit_tiny_patch16_224, image_size: 32, patch_size: 8, embed_dim: 16, depth: 1,
    num_heads: 2, crop_area: [1.0, 1.0], horizontal_flip: 0.0, crop_pct: 1.0}}
text:
  trunk: {{name: gru, word_dim: 16, hidden_dim: 16}}
  projection: none
dim: 16
loss: {{name: unified, margin: 0.1, scale: 20}}
""",
    "features": f"""\
data: {{train: 'shards/features/{TRAIN}', val: 'shards/features/{TEST}', inputs: features, captions_per_image: all,
  batch_size: 16, workers: 0, allow_duplicate_captions: true}}
image:
  trunk: {{name: features, width: 8}}
  pooling: max
text:
  trunk: {{name: gru, word_dim: 16, hidden_dim: 16, local: words}}
  projection: none
dim: 16
head: {{name: set, num_slots: 2, num_iters: 2, hidden_dim: 16}}
loss: {{name: smooth_chamfer, base: triplet_hn, alpha: 8}}
""",
}
TRAINING = """\
training:
  epochs: 6
  optimizer: {name: Adam, lr: 1.0e-2, eps: 1.0e-3}
  lr_scheduler: {name: CosineAnnealingLR, T_max: 10}
stages:
  - {}
  - {epochs: 3}
"""


def main():
    if vl_plugins.__version__ != "0.3.0":
        raise SystemExit(f"these are files of 0.3.0, and vl_plugins {vl_plugins.__version__} is installed")
    torch.set_num_threads(1)  # so that sums are in the same order everywhere
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write()
        os.chdir(before)
        for name in WRITTEN:
            target = HERE / name
            if target.is_dir():
                shutil.rmtree(target)
            shutil.move(Path(folder, name), target)


def write():
    shutil.copytree(HERE.parent / "files_v0_2" / "model", "model")
    write_shards()
    evaluated = {}
    for name, flags in RUNS.items():
        for seed in itertools.count(SEEDS[name]):
            run(f"{LAUNCH} --name {name} {flags} --seed {seed}")
            logging.getLogger().handlers.clear()  # each training adds its own
            shorten_run(name)
            if evaluate_checkpoint(evaluated, name, f"logs/{name}/checkpoints/epoch_{EPOCHS[name]}.pt", "pictures"):
                break
            shutil.rmtree(f"logs/{name}")
        print(f"{name}: seed {seed}", file=sys.stderr)
    for name, config in CONFIGS.items():
        for seed in itertools.count(SEEDS[name]):
            train_towers(name, f"{config}seed: {seed}\n{TRAINING}")
            if evaluate_checkpoint(evaluated, name, f"runs/{name}/latest.pt", name):
                break
            shutil.rmtree(f"runs/{name}")
            shutil.rmtree(f"whole/{name}")
        print(f"{name}: seed {seed}", file=sys.stderr)
    evaluated["runs/pictures/best.pt"] = evaluate(f"--checkpoint runs/pictures/best.pt --shards shards/pictures/{TEST}")
    ranks = {}
    for file in sorted(Path("features").iterdir()):
        evaluated[str(file)] = evaluate(f"--features {file}")
        ranks[str(file)], _ = read_ranks(file)
    shards = {}
    for kind in CONFIGS:
        for split in (TRAIN, TEST):
            shards[f"{kind}/{split}"] = read_shards(kind, split)
    expected = {"evaluated": evaluated, "ranks": ranks, "shards": shards}
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def run(command):
    """Run ``-m module arguments`` in this process, and return what it prints."""
    _, module, *arguments = command.split()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert importlib.import_module(MODULES.get(module, module)).main(arguments) == 0, command
    return output.getvalue()


def write_shards():
    run("-m vl_plugins.cli toy --out toy --train 16 --val 1 --test 12 --image-size 32 --seed 3")
    annotations = json.loads(Path("toy/dataset_toy.json").read_text())
    # The last captions are the exact ones, which differ: equal ones would tie, or nearly so on another processor.
    for image in annotations["images"]:
        if image["split"] == "test":
            image["sentences"] = image["sentences"][2 + image["imgid"] % 2 :]
            image["sentids"] = [sentence["sentid"] for sentence in image["sentences"]]
    Path("toy/dataset_toy.json").write_text(json.dumps(annotations))
    generator = np.random.default_rng(0)
    Path("regions").mkdir()
    for image in annotations["images"]:
        regions = generator.normal(size=(2 + image["imgid"] % 3, 8)).astype(np.float32)
        np.save(f"regions/{image['cocoid']}.npy", regions)
    shards = "-m vl_plugins.cli shards coco --annotations toy/dataset_toy.json --split train test --samples-per-shard 6"
    run(f"{shards} --images toy --out shards/pictures")
    run(f"{shards} --features regions --out shards/features")


def shorten_run(name):
    """Keep params.txt and one checkpoint; only the one that a test resumes keeps the optimizer."""
    folder = Path("logs", name)
    # The launcher makes --model-config absolute.
    params = (folder / "params.txt").read_text().replace(f"{Path.cwd()}/", "")
    checkpoint = read(folder / f"checkpoints/epoch_{EPOCHS[name]}.pt")
    checkpoint["args"]["model_config"] = "model/tiny.json"
    last = read(folder / f"checkpoints/epoch_{LAST}.pt")
    shutil.rmtree(folder)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "params.txt").write_text(params)
    if EPOCHS[name] < LAST:
        save_weights(name, last["state_dict"])
    else:
        del checkpoint["optimizer"]
    torch.save(checkpoint, folder / f"checkpoints/epoch_{EPOCHS[name]}.pt")


def save_weights(name, weights):
    Path("trained").mkdir(exist_ok=True)
    save_file({key: weight.clone() for key, weight in weights.items()}, f"trained/{name}.safetensors")


def train_towers(name, config):
    """Train to the end, and once more until an interruption after the first epoch of the second stage."""
    Path(f"{name}.yaml").write_text(config)
    run(f"-m {TOWERS} --config {name}.yaml --device cpu --out whole/{name}")
    parts = read(f"whole/{name}/latest.pt")["models"]
    weights = {}
    for part, state in parts.items():
        for key, weight in state.items():
            weights[f"{part}.{key}"] = weight
    save_weights(name, weights)
    with mock.patch.object(Run, "_write", stop_after_epoch_7):
        arguments = ["--config", f"{name}.yaml", "--device", "cpu", "--out", f"runs/{name}"]
        assert importlib.import_module(MODULES[TOWERS]).main(arguments) == 130
    shutil.rmtree(f"runs/{name}/logs")
    if name != "pictures":
        Path("runs", name, "best.pt").unlink()


def stop_after_epoch_7(self, *arguments, write_checkpoints=Run._write):
    write_checkpoints(self, *arguments)
    if len(self.history) == 7:
        raise KeyboardInterrupt


def read(file):
    return torch.load(file, weights_only=True)


def evaluate(flags):
    """Return what is printed for one model."""
    command = f"-m vl_plugins.cli evaluate --device cpu --workers 0 --json {flags}"
    printed = json.loads(run(command))
    (result,) = printed.pop("results")
    return printed | result


def evaluate_checkpoint(evaluated, name, checkpoint, shards):
    """Evaluate a checkpoint and save its features in both formats; return whether rounding errors change no rank."""
    Path("features").mkdir(exist_ok=True)
    evaluated[checkpoint] = evaluate(f"--checkpoint {checkpoint} --shards shards/{shards}/{TEST}")
    for suffix in ("npz", "safetensors"):
        out = f"features/{name}.{suffix}"
        run(f"-m vl_plugins.cli encode {checkpoint} shards/{shards}/{TEST} {out} --device cpu --workers 0")
    return read_ranks(f"features/{name}.npz")[1] >= SMALLEST_GAP


def read_ranks(file):
    """Return the rank of each query, and the smallest gap between the best right answer and a wrong one."""
    features = load_features(file)
    similarities = features.similarities()
    ranks = similarity_ranks(similarities, features.image_of_caption)
    matrix = similarities.of_images(torch.arange(len(features.images)))
    is_positive = features.image_of_caption == torch.arange(len(features.images))[:, None]
    gaps = []
    for rows, positives in ((matrix, is_positive), (matrix.T, is_positive.T)):
        for row, positive in zip(rows, positives, strict=True):
            gaps.append((row[~positive] - row[positive].max()).abs().min().item())
    by_direction = {
        "image_to_text": ranks.image_to_text.rank.tolist(),
        "text_to_image": ranks.text_to_image.rank.tolist(),
    }
    return by_direction, min(gaps)


def read_shards(kind, shards):
    """Return names, captions and sums of pixels or features."""
    inputs = "images" if kind == "pictures" else kind
    dataset = ShardDataset(
        f"shards/{kind}/{shards}", lambda item: torch.from_numpy(np.array(item, dtype=np.float64)), list, inputs=inputs
    )
    content = []
    for index, record in enumerate(dataset.collection.records):
        content.append(
            {
                "key": record.key,
                "image_id": record.image_id,
                "captions": list(record.captions),
                "caption_ids": list(record.caption_ids),
                "split": f"{record.dataset}-{record.split}",
                "sum": dataset[index].image.sum().item(),
            }
        )
    return content


if __name__ == "__main__":
    main()
