"""Ten short trainings by the launcher for open_clip: their weights at the end and the metrics of each epoch.

``PYTHON tests/compare/open_clip.py OUT.npz [--batches FILE | --record FILE]``, see ``trainings.py``.
"""

import functools
import inspect
import json
import random
import shutil
from pathlib import Path
from unittest import mock

import torch

MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
# With a large eps, AdamW does not amplify rounding errors in gradients close to zero.
FLAGS = """--model compare-tiny --model-config compare-tiny.json --pretrained initial.pt --device cpu --workers 0
    --batch-size 8 --epochs 2 --save-frequency 2 --lr 1e-2 --eps 1e-2 --warmup 2 --log-every-n-steps 4"""
SHARDS = "--train-data shards/toy-train-{000000..000003}.tar --val-data shards/toy-val-{000000..000001}.tar"
GROUPS = SHARDS.replace("shards/", "groups/")
TABLE = "--train-data train.csv --val-data val.csv --csv-separator ,"
TRAININGS = {
    "stock": SHARDS,
    "several captions": f"{SHARDS} --loss unified --captions-per-image 3",
    "learned scale": f"{SHARDS} --loss unified --loss-kwargs margin=0.1 scale=learned --accum-freq 2",
    "miner and reducer": f"{SHARDS} --loss triplet_sh --miner MultiSimilarityMiner --reducer AvgNonZeroReducer",
    "warm-up": f"{SHARDS} --loss triplet_hn --loss-kwargs warmup_steps=6",
    "sets": f"{SHARDS} --loss smooth_chamfer --head set --head-kwargs num_slots=3 num_iters=2 hidden_dim=32",
    "linear head": f"{SHARDS} --loss vlc --head linear --head-kwargs dim=24",
    "groups": f"{GROUPS} --loss unified --same-group positive --captions-per-image 2",
    "bf16": f"{SHARDS} --loss unified --precision amp_bf16",
    "table": f"{TABLE} --loss unified",
}


def write_tables() -> None:
    """Write the first caption of each scene as open_clip's own CSV data."""
    images = json.loads(Path("toy/dataset_toy.json").read_text())["images"]
    for split in ("train", "val"):
        rows = [image for image in images if image["split"] == split]
        lines = [f"toy/{row['filepath']}/{row['filename']},{row['sentences'][0]['raw']}" for row in rows]
        Path(f"{split}.csv").write_text("\n".join(["filepath,title", *lines]) + "\n")


def trainings(found, batches) -> None:
    """Run all trainings from the same initial checkpoint."""
    import open_clip
    import webdataset
    from open_clip_train import main as trainer

    write_tables()
    Path("compare-tiny.json").write_text(json.dumps(MODEL))
    open_clip.add_model_config("compare-tiny.json")
    torch.manual_seed(0)
    initial = open_clip.create_model("compare-tiny").state_dict()
    torch.save(initial, "initial.pt")

    train_one_epoch, is_training = trainer.train_one_epoch, False
    signature = inspect.signature(train_one_epoch)

    @functools.wraps(train_one_epoch)
    def train_epoch(*args, **kwargs):
        nonlocal is_training
        given = signature.bind(*args, **kwargs).arguments
        if given["epoch"] == 0:
            seed_weights(given["model"], but=initial)
        is_training = True
        train_one_epoch(*args, **kwargs)
        is_training = False

    for name, flags in TRAININGS.items():
        # open_clip shuffles shards without a seed.
        shuffle = functools.partial(webdataset.shuffle, rng=random.Random(0))
        with (
            batches.used_in(name, lambda loader: is_training),
            mock.patch.object(trainer, "train_one_epoch", train_epoch),
            mock.patch.object(webdataset, "shuffle", shuffle),
        ):
            launch("vl_plugins.integrations.open_clip", f"--precision fp32 {FLAGS} {flags} --name run")
        folder = Path("logs/run/checkpoints")
        weights = torch.load(folder / "epoch_2.pt", weights_only=True)["state_dict"]
        add_results(found, name, weights, folder / "results.jsonl")
        shutil.rmtree("logs")


if __name__ == "__main__":
    from trainings import add_results, launch, main, seed_weights

    main("open_clip", trainings)
