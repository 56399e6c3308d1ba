"""Optimizers and schedulers by name."""

import pytest
import torch
from torch import nn

from vl_plugins.errors import UserError
from vl_plugins.integrations.pytorch_metric_learning.config import StageConfig
from vl_plugins.integrations.pytorch_metric_learning.parts import build_optimizers, build_schedulers


def parts():
    fixed = nn.Linear(2, 2).requires_grad_(False)
    return {
        "image_trunk": nn.Linear(3, 2),
        "image_embedder": nn.Sequential(fixed, nn.Linear(2, 2, bias=False)),
        "text_trunk": nn.Identity(),
        "text_embedder": fixed,
    }


def test_each_part_with_parameters_has_an_optimizer():
    stage = StageConfig(optimizer={"name": "SGD", "lr": 0.5, "momentum": 0.9}, lr_scale={"image_embedder": 0.1})
    modules = parts()
    optimizers = build_optimizers(stage, modules)
    assert list(optimizers) == ["image_trunk_optimizer", "image_embedder_optimizer"]
    assert all(isinstance(optimizer, torch.optim.SGD) for optimizer in optimizers.values())
    groups = [optimizer.param_groups[0] for optimizer in optimizers.values()]
    assert [(group["lr"], group["momentum"], len(group["params"])) for group in groups] == [
        (0.5, 0.9, 2),
        (0.05, 0.9, 1),
    ]
    assert groups[1]["params"][0] is modules["image_embedder"][1].weight
    frozen = build_optimizers(StageConfig(freeze=["image_trunk"]), parts())
    assert list(frozen) == ["image_embedder_optimizer"]
    assert frozen["image_embedder_optimizer"].param_groups[0]["lr"] == 1e-3, "the default of Adam"


def test_schedulers_step_by_what_they_say():
    stage = StageConfig(optimizer={"name": "SGD", "lr": 1.0})
    for specification, key in (
        ({"name": "StepLR", "step_size": 3}, "image_trunk_scheduler_by_epoch"),
        ({"name": "StepLR", "step_size": 3, "by": "iteration"}, "image_trunk_scheduler_by_iteration"),
        ("ReduceLROnPlateau", "image_trunk_scheduler_by_plateau"),
    ):
        optimizers = build_optimizers(stage, parts())
        schedulers = build_schedulers(StageConfig(lr_scheduler=specification), optimizers)
        assert list(schedulers) == [key, key.replace("trunk", "embedder")]
        assert schedulers[key].optimizer is optimizers["image_trunk_optimizer"]
    assert schedulers[key].mode == "max", "RSUM grows"
    other = StageConfig(lr_scheduler={"name": "ReduceLROnPlateau", "mode": "min"})
    assert build_schedulers(other, optimizers)[key].mode == "min"
    assert build_schedulers(stage, optimizers) == {}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (StageConfig(optimizer="Optimizer2"), "unknown optimizer 'Optimizer2'"),
        (
            StageConfig(optimizer={"name": "SGD", "learning_rate": 1}),
            "optimizer 'SGD': .*unexpected keyword argument 'learning_rate'",
        ),
        (StageConfig(freeze=["image_trunk", "image_embedder"]), "there is nothing to train"),
        (StageConfig(lr_scale={"text_trunk": 2}), "lr_scale has text_trunk, which has no parameters to train"),
    ],
)
def test_what_is_wrong_is_said(stage, message):
    with pytest.raises(UserError, match=message):
        build_optimizers(stage, parts())
