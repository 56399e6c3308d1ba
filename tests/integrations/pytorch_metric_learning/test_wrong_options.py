"""Wrong options and damaged checkpoints: an error that names the key, before anything is trained or written."""

import copy

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.helpers.pml_settings import SETTINGS, settings
from vl_plugins.errors import UserError
from vl_plugins.integrations.pytorch_metric_learning import Run, parse_config
from vl_plugins.integrations.pytorch_metric_learning.objective import Objective
from vl_plugins.integrations.pytorch_metric_learning.run import LATEST

FEATURES = {"image": {"trunk": {"name": "features", "width": 4}, "pooling": "avg"}, "data": {"inputs": "features"}}
PROXIES = {"name": "ProxyAnchorLoss", "num_classes": 15, "embedding_size": 16}
QUEUE = {"name": "CrossBatchMemory", "loss": "vlc", "embedding_size": 17}
BY_ITERATION = {"name": "OneCycleLR", "max_lr": 0.1, "total_steps": 3, "by": "iteration"}
WRONG = [
    # Optimizer and schedule
    ({"training": {"optimizer": {"name": "Adamm"}}}, "training.optimizer: unknown optimizer 'Adamm' .did you mean"),
    ({"training": {"optimizer": {"name": "Adam", "lrr": 1}}}, "training.optimizer: unknown option of Adam 'lrr'"),
    ({"training": {"optimizer": {"name": "SGD", "lr": "x"}}}, "training.optimizer: '<' not supported"),
    ({"training": {"optimizer": {"lr": 1}}}, "training.optimizer: expected a name or a mapping"),
    ({"training": {"optimizer": "LBFGS"}}, "training.optimizer: LBFGS doesn't support per-parameter options"),
    ({"training": {"optimizer": "SparseAdam"}}, "training.optimizer: SparseAdam does not support dense gradients"),
    ({"training": {"optimizer": {"name": "Adam", "differentiable": True}}}, "training.optimizer: a leaf Variable"),
    ({"training": {"optimizer": "Muon"}}, "training.optimizer: .*Muon"),  # takes matrices only, or is not there yet
    ({"stages": [{}, {"lr_scheduler": {"name": "StepLR", "step_size": "one"}}]}, "stages.1.lr_scheduler: unsupported"),
    ({"training": {"lr_scheduler": "StepLR"}}, "training.lr_scheduler: .*missing 1 required positional argument"),
    ({"training": {"lr_scheduler": "ReduceLROnPlateau"}}, "training.lr_scheduler: .*missing 1 required positional"),
    ({"training": {"lr_scheduler": {"name": "StepLR", "step": 1}}}, "training.lr_scheduler: unknown option of StepLR"),
    ({"training": {"lr_scheduler": BY_ITERATION}}, "training.lr_scheduler: Tried to step 4 times"),
    ({"training": {"lr_scheduler": {"name": "StepLR", "by": "day"}}}, "training.lr_scheduler: unknown value of"),
    # Parts of stages, and ranges
    ({"stages": [{}, {"freeze": ["cnn"]}]}, "stages.1: unknown part 'cnn'"),
    ({"training": {"lr_scale": {"cnn": 1}}}, "training: unknown part 'cnn'"),
    ({"training": {"epochs": -1}}, "training.epochs must be an integer >= 0, got -1"),
    ({"stages": [{"epochs": 1}, {"epochs": -1}]}, "stages.1.epochs must be an integer >= 0, got -1"),
    ({"log_every": 0}, "log_every must be an integer >= 1, got 0"),
    ({"seed": -1}, "seed must be an integer >= 0, got -1"),
    ({"seed": 2**32}, "seed must be below 2.32, got 4294967296"),
    ({"data": {"batch_size": 0}}, "data.batch_size must be an integer >= 1, got 0"),
    ({"data": {"batch_size": 1}}, "data.batch_size: a loss compares images, and there is only one; give at least 2"),
    ({"data": {"chunk_size": 0}}, "data.chunk_size must be an integer >= 1, got 0"),
    ({"data": {"accumulation_steps": 0}}, "data.accumulation_steps must be an integer >= 1, got 0"),
    ({"data": {"accumulation_steps": 5}}, "data: 16 images make no full batch of 20 .* at most 16"),
    # Validation
    ({"best_metric": "R@1"}, "best_metric: unknown metric 'R@1'.*known: .*, image_to_text_R@1, .*, rsum"),
    ({"validate_first": True, "data": {"val": None}}, "validate_first: there is nothing to evaluate; give data.val"),
    # Loss, miner, reducer and distance
    ({"loss": {"name": "unified", "marginn": 1}}, "loss 'unified': unknown option 'marginn'"),
    ({"loss": {"name": "unified", "margin": -1}}, "loss: margin must be"),
    ({"loss": PROXIES, "one_set": True}, "loss: num_classes must be at least 16"),
    ({"loss": PROXIES | {"num_classes": 16}}, "loss: it compares one set of embeddings: add one_set: true"),
    ({"loss": QUEUE, "one_set": True}, r"loss: embeddings must be \(B, 17\), got \(8, 16\)"),
    ({"loss": {"name": "ContrastiveLoss", "pos_margin": "x"}}, "loss: "),
    ({"miner": "MultiSimilarityMinr"}, "miner: unknown miner 'MultiSimilarityMinr' .did you mean"),
    ({"miner": {"name": "MultiSimilarityMiner", "epsilon": "x"}}, "loss and miner: "),
    ({"reducer": "MeanRedcer"}, "reducer: unknown reducer 'MeanRedcer'"),
    ({"reducer": "DoNothingReducer", "one_set": True}, "loss: its reducer returns no single number"),
    ({"distance": {"name": "LpDistance", "pp": 1}}, "distance 'LpDistance': unknown option 'pp'"),
    ({"distance": {"name": "LpDistance", "p": "x"}}, "loss: "),
    # Towers and data
    ({"image": SETTINGS["image"] | {"pooling": "mean"}}, "image: unknown pooling 'mean'"),
    ({"text": SETTINGS["text"] | {"trunk": {"name": "gruu"}}}, "text.trunk: unknown text.trunk 'gruu'"),
    ({"dim": 8}, "loss: embeddings and ref_emb must have the same width, got 8 and 16"),
    ({"head": {"name": "set", "slots": 2}}, "head: .*slots"),
    ({"data": {"train": "none-000000.tar"}}, "do not exist"),
    ({"data": {"captions_per_image": "most"}}, "data: captions per image must be"),
    (FEATURES, r"image 0, in .*: it has no features, expected npy"),
]


@pytest.fixture(autouse=True)
def new_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_errors_come_before_anything_is_trained_or_written(toy_shards, tmp_path, changes, message):
    plain = settings(toy_shards, **changes)
    with pytest.raises(UserError, match=message):
        Run(parse_config(plain), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_trials_change_nothing(toy_shards, tmp_path):
    """Neither batch statistics nor the queue of a loss, and no gradient is left."""
    loss = {"name": "CrossBatchMemory", "loss": "vlc", "embedding_size": 16}
    image = SETTINGS["image"] | {"projection": "residual_mlp"}
    config = parse_config(settings(toy_shards, loss=loss, one_set=True, image=image))
    run = Run(config, tmp_path)
    objective = run.objective
    assert objective.loss.queue_idx == 0
    assert all(parameter.grad is None for parameter in objective.parameters())
    again = Run(config, tmp_path).objective
    torch.testing.assert_close(again.state_dict(), objective.state_dict(), rtol=0, atol=0)
    statistics = objective.towers.image.embedder.projection.mlp[1]
    assert statistics.num_batches_tracked == 0
    (stage,) = run.stages
    assert not stage.optimizer.state


@pytest.fixture(scope="module")
def state(toy_shards, tmp_path_factory):
    """A configuration, and the content of ``latest.pt`` after its first epoch."""
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tmp_path_factory.mktemp("state")
    plain = settings(toy_shards, training={"epochs": 1})
    Run(parse_config(plain), folder).train()
    return plain, torch.load(folder / LATEST, weights_only=True)


def at(content, *path):
    for key in path:
        content = content[key]
    return content


OPTIMIZER = "--resume: the state of the optimizer does not fit this stage: "
DAMAGES = [
    (("optimizer", "state", 0, "exp_avg"), lambda value: value[:0], OPTIMIZER),
    (("optimizer", "state", 3, "exp_avg_sq"), lambda value: value[None], OPTIMIZER),
    (("optimizer", "state", 0, "step"), lambda value: -torch.ones_like(value), OPTIMIZER),
    (("optimizer", "state", 0), lambda value: "x", OPTIMIZER),
    (("optimizer", "param_groups"), lambda value: value[1:], "this stage trains other parts than before"),
    (("optimizer", "param_groups"), lambda value: 3, OPTIMIZER),
    (("models", "text_trunk"), lambda value: {}, "does not fit the configuration: .*Missing key"),
    (("models",), lambda value: None, "does not fit the configuration"),
    (("loss_funcs",), lambda value: {}, "does not fit the configuration"),
    (("vocabulary",), lambda value: value[1:], "does not fit the configuration: .*size mismatch"),
    (("history",), lambda value: 3, "is damaged"),
    (("history",), lambda value: [], "is damaged: its history is not one of epochs 1, 2"),
    (("history", 0, "epoch"), lambda value: 7, "is damaged: its history is not one of epochs 1, 2"),
    (("history", 0, "rsum"), lambda value: "x", "is damaged: its history is not one of epochs 1, 2"),
    (("epoch",), lambda value: 2, "is damaged: its history is not one of epochs 1, 2"),
    (("config",), lambda value: 3, "is damaged"),
]


@pytest.mark.parametrize(("path", "damage", "message"), DAMAGES)
def test_a_damaged_checkpoint(state, tmp_path, path, damage, message):
    plain, content = state
    content = copy.deepcopy(content)
    parent = at(content, *path[:-1])
    parent[path[-1]] = damage(parent[path[-1]])
    torch.save(content, tmp_path / LATEST)
    longer = plain | {"training": plain["training"] | {"epochs": 2}}
    with pytest.raises(UserError, match=message):
        Run(parse_config(longer), tmp_path, resume=True)


def test_a_key_that_is_missing(state, tmp_path):
    plain, content = state
    torch.save({key: value for key, value in content.items() if key not in ("optimizer", "scaler")}, tmp_path / LATEST)
    with pytest.raises(UserError, match=r"latest\.pt is damaged: it has no optimizer, scaler$"):
        Run(parse_config(plain), tmp_path, resume=True)


def test_an_error_of_the_training_keeps_its_traceback(toy_shards, tmp_path, monkeypatch):
    """It is no mistake of the user, so it is no ``UserError``."""

    def fail(self, *batch):
        raise KeyError("caption")

    monkeypatch.setattr(Objective, "forward", fail)
    with pytest.raises(KeyError):
        Run(parse_config(settings(toy_shards)), tmp_path).train()
