"""Writes the files beside it with vl_plugins 0.2.0: ``python tests/files_v0_2/write.py``.

``tests/test_files_v0_2.py`` reads them with the current version. They are not written again: later versions write other
files. Everything runs in a temporary folder with relative paths, so the files do not depend on where they were written.

- ``model/``: a model configuration for open_clip and its tokenizer
- ``shards/pictures``, ``shards/features``: 16 training and 12 test images of ``vl-plugins toy``, and region features
- ``logs/``: checkpoints of the launcher for open_clip; ``runs/``: of the trainer for pytorch-metric-learning
- ``features/``: files of ``vl-plugins evaluate --save-features``
- ``trained/``: weights of the launcher's run that a test resumes, at the end of the training
- ``expected.json``: what ``vl-plugins evaluate --json`` prints, ranks, and the content of the shards
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import vl_plugins
from vl_plugins.data.evaluation_reader import EvaluationReader
from vl_plugins.retrieval import retrieval_ranks
from vl_plugins.retrieval.features import load_features

HERE = Path(__file__).parent
WRITTEN = ("features", "logs", "model", "runs", "shards", "trained", "expected.json")
TRAIN, TEST = "toy-train-{000000..000002}.tar", "toy-test-{000000..000001}.tar"

# The tests may run on another processor, where embeddings differ by about 1e-6.
SMALLEST_GAP = 1.5e-4

WORDS = "a above and background below black blue circle cyan gray green large left of on purple red right shape small"
WORDS += " square star triangle white yellow"
MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {
        "context_length": 24,
        "vocab_size": len(WORDS.split()) + 3,
        "hf_tokenizer_name": "model/tokenizer",
        "width": 16,
        "heads": 2,
        "layers": 1,
    },
}

# One batch is the whole training set, and nothing is random but the first weights, so the order of the images does not
# matter. A large eps keeps rounding errors small where the gradient is nearly zero.
LAUNCH = "-m vl_plugins.integrations.open_clip --model tiny --model-config model/tiny.json --device cpu"
LAUNCH += f" --precision fp32 --workers 0 --batch-size 16 --train-data shards/pictures/{TRAIN}"
LAUNCH += " --captions-per-image all --allow-duplicate-captions --aug-cfg scale=(1.0,1.0)"
LAUNCH += " --warmup 0 --lr 1e-2 --eps 1e-3"
RUNS = {
    # Steps 1 to 6 are the loss's warm-up, and the checkpoint is from step 5.
    "triplet": "--epochs 7 --loss triplet_hn --loss-kwargs warmup_steps=6 --seed 2",
    "linear": "--epochs 20 --loss triplet_sh --head linear --head-kwargs dim=12 --seed 11",
    "set": "--epochs 10 --loss smooth_chamfer --loss-kwargs base=triplet_sh --head set --head-kwargs num_slots=2"
    " num_iters=2 hidden_dim=16 --seed 1",
}
CHECKPOINTS = {"triplet": 5, "linear": 20, "set": 10}

TRAINING = """\
training:
  epochs: 20
  optimizer: {name: Adam, lr: 1.0e-2, eps: 1.0e-3}
  lr_scheduler: {name: CosineAnnealingLR, T_max: 22}
stages:
  - {}
  - {epochs: 2}
"""
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
loss: {{name: triplet_sh, margin: 0.2}}
seed: 7
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
seed: 5
""",
}


def main():
    if vl_plugins.__version__ != "0.2.0":
        raise SystemExit(f"these are files of 0.2.0, and vl_plugins {vl_plugins.__version__} is installed")
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
    write_model()
    write_shards()
    for name, flags in RUNS.items():
        run(f"{LAUNCH} --name {name} {flags}")
        keep_checkpoint(name)
    for name, config in CONFIGS.items():
        train_towers(name, config + TRAINING)
    evaluated = {}
    for name, epoch in CHECKPOINTS.items():
        evaluate_checkpoint(evaluated, name, f"logs/{name}/checkpoints/epoch_{epoch}.pt", "pictures")
    for name in CONFIGS:
        evaluate_checkpoint(evaluated, name, f"runs/{name}/latest.pt", name)
    evaluated["runs/pictures/best.pt"] = evaluate(f"--checkpoint runs/pictures/best.pt --shards shards/pictures/{TEST}")
    ranks = {}
    for file in sorted(Path("features").iterdir()):
        evaluated[str(file)] = evaluate(f"--features {file}")
        ranks[str(file)] = read_ranks(file)
    shards = {f"{kind}/{split}": read_shards(kind, split) for kind in CONFIGS for split in (TRAIN, TEST)}
    expected = {"evaluated": evaluated, "ranks": ranks, "shards": shards}
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def run(command, **options):
    """Run Python in one thread, so that sums are in the same order everywhere."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command.split()], check=True, env=environment, **options)


def write_model():
    """Write the model configuration, and a tokenizer of words that ends each text with the largest id."""
    tokens = ["[PAD]", "[UNK]", *WORDS.split(), "[EOS]"]
    special = [
        {"id": tokens.index(token), "content": token, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for token in ("[PAD]", "[UNK]", "[EOS]")
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "[EOS]", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"[EOS]": {"id": "[EOS]", "ids": [tokens.index("[EOS]")], "tokens": ["[EOS]"]}},
        },
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {token: index for index, token in enumerate(tokens)}}
        | {"unk_token": "[UNK]"},
    }
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    Path("model/tokenizer").mkdir(parents=True)
    for file, content in (
        ("tiny.json", MODEL),
        ("tokenizer/tokenizer.json", tokenizer),
        ("tokenizer/tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names}),
    ):
        Path("model", file).write_text(json.dumps(content, indent=1) + "\n")


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
    run(f"{shards} --features regions --txt all --out shards/features")


def keep_checkpoint(name):
    """Keep params.txt and one checkpoint; only the one to be resumed keeps the optimizer."""
    folder = Path("logs", name)
    # The launcher makes --model-config absolute.
    params = (folder / "params.txt").read_text().replace(f"{Path.cwd()}/", "")
    checkpoints = {epoch: read(folder / f"checkpoints/epoch_{epoch}.pt") for epoch in (CHECKPOINTS[name], last(name))}
    shutil.rmtree(folder)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "params.txt").write_text(params)
    kept = checkpoints[CHECKPOINTS[name]]
    if CHECKPOINTS[name] < last(name):
        Path("trained").mkdir(exist_ok=True)
        save_file(checkpoints[last(name)]["state_dict"], f"trained/{name}.safetensors")
    else:
        del kept["optimizer"]
    torch.save(kept, folder / f"checkpoints/epoch_{CHECKPOINTS[name]}.pt")


def last(name):
    flags = RUNS[name].split()
    return int(flags[flags.index("--epochs") + 1])


def train_towers(name, config):
    """Train until the training is interrupted after the first epoch of the second stage."""
    Path("trained", f"{name}.yaml").write_text(config)
    interrupted = INTERRUPTED.format(out=f"runs/{name}", config=f"trained/{name}.yaml")
    subprocess.run([sys.executable, "-c", interrupted], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    Path("trained", f"{name}.yaml").unlink()
    shutil.rmtree(f"runs/{name}/tensorboard")
    if name != "pictures":
        Path("runs", name, "best.pt").unlink()


INTERRUPTED = """\
import json, os
from pathlib import Path
from unittest import mock
from vl_plugins.integrations.pytorch_metric_learning import main, runs

def stop(run, *arguments, wrapped=runs.Run._write_checkpoints):
    wrapped(run, *arguments)
    if run.epoch == 21:
        raise KeyboardInterrupt

with mock.patch.object(runs.Run, "_write_checkpoints", stop):
    assert main(["--config", "{config}", "--device", "cpu", "--out", "{out}"]) == 130
"""


def read(file):
    return torch.load(file, weights_only=True)


def evaluate(flags):
    """Return what is printed for one model."""
    command = f"-m vl_plugins.cli evaluate --device cpu --workers 0 --json {flags}"
    printed = json.loads(run(command, stdout=subprocess.PIPE).stdout)
    (result,) = printed.pop("results")
    return printed | result


def evaluate_checkpoint(evaluated, name, checkpoint, shards):
    """Evaluate a checkpoint and save its features in both formats."""
    for suffix in ("npz", "safetensors"):
        Path("features").mkdir(exist_ok=True)
        flags = f"--checkpoint {checkpoint} --shards shards/{shards}/{TEST} --save-features features/{name}.{suffix}"
        evaluated[checkpoint] = evaluate(flags)


def read_ranks(file):
    """Return the rank of each query; raise an error where a rounding error could change one."""
    features = load_features(file)
    similarity = features.similarity()
    ranks = retrieval_ranks(features.images, features.captions, features.image_of_caption, similarity=similarity)
    if similarity is None:
        similarities = features.images @ features.captions.T
    else:
        similarities = similarity(features.images, features.captions)
    positive = features.image_of_caption == torch.arange(len(features.images))[:, None]
    gaps = [
        (row[~right] - row[right].max()).abs().min().item()
        for rows, answers in ((similarities, positive), (similarities.T, positive.T))
        for row, right in zip(rows, answers, strict=True)
    ]
    print(f"{file}: smallest gap {min(gaps):.2g}")
    if min(gaps) < SMALLEST_GAP:
        raise SystemExit(f"{file}: similarities differ by {min(gaps):.2g} only; change the seed")
    return {
        "image_to_text": ranks.image_to_text.rank.tolist(),
        "text_to_image": ranks.text_to_image.rank.tolist(),
    }


def read_shards(kind, shards):
    """Return names, captions and sums of pixels or features."""
    reader = EvaluationReader(
        f"shards/{kind}/{shards}",
        lambda item: torch.from_numpy(np.array(item, dtype=np.float64)),
        lambda texts: torch.zeros(len(texts), 1, dtype=torch.long),
        batch_size=1,
        inputs="images" if kind == "pictures" else kind,
    )
    return [{**batch.records[0]._asdict(), "sum": batch.images.sum().item()} for batch in reader]


if __name__ == "__main__":
    main()
