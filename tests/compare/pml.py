"""Short trainings by the trainer for pytorch-metric-learning: their weights at the end and the metrics of each epoch.

``PYTHON tests/compare/pml.py OUT.npz [--batches FILE | --record FILE]``, see ``trainings.py``.
"""

import functools
import importlib
import shutil
from pathlib import Path
from unittest import mock

import torch

# With a large eps, Adam does not amplify rounding errors in gradients close to zero.
FLAGS = """--config toy.yaml --device cpu --out run --train-data shards/toy-train-{000000..000003}.tar
    --val-data shards/toy-val-{000000..000001}.tar --set training.epochs=2 data.batch_size=8 dim=32
    training.lr_scheduler.T_max=12
    training.optimizer={'name':'Adam','lr':2e-3,'eps':1e-2} image.trunk.image_size=32 text.trunk.word_dim=16
    text.trunk.hidden_dim=32 text.vocabulary.min_count=1"""
GROUPS = "--train-data groups/toy-train-{000000..000003}.tar"
# Values without spaces, which separate flags.
TRAININGS = {
    "toy": "",
    "frozen": "training.clip_grad_norm=2.0 "
    "stages=[{'epochs':1,'freeze':['image_trunk','text_trunk']},{'epochs':1,'lr_scale':{'image_trunk':0.1}}]",
    "sets": "head={'name':'set','num_slots':3,'num_iters':2,'hidden_dim':32} loss={'name':'smooth_chamfer'}",
    "miner": "miner=MultiSimilarityMiner reducer=AvgNonZeroReducer loss=triplet_sh data.captions_per_image=2",
    "groups": f"data.same_group=positive data.captions_per_image=2 {GROUPS}",
}


def trainings(found, batches) -> None:
    """Run all trainings."""
    module, _, name = INSTALLED.towers.rpartition(".")
    build = getattr(importlib.import_module(module), name)

    @functools.wraps(build)
    def build_with_seeds(*args, **kwargs):
        towers = build(*args, **kwargs)
        seed_weights(towers)
        return towers

    for training, flags in TRAININGS.items():
        with (
            batches.used_in(training, INSTALLED.is_training),
            mock.patch(INSTALLED.towers, build_with_seeds),
        ):
            launch("vl_plugins.integrations.pytorch_metric_learning", f"{FLAGS} {flags}")
        weights = INSTALLED.pml_weights(torch.load("run/latest.pt", weights_only=True))
        add_results(found, training, weights, Path("run/results.jsonl"))
        shutil.rmtree("run")


if __name__ == "__main__":
    from trainings import INSTALLED, add_results, launch, main, seed_weights

    main("pml", trainings)
