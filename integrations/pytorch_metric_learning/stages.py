"""Stages of a training: optimizers and schedules, tried before the training so that it does not stop later."""

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from vl_plugins.errors import MALFORMED_CONTENT, UserError, one_of, unknown_name, user_errors
from vl_plugins.integrations.pytorch_metric_learning.config import Config, StageConfig, config_errors, split
from vl_plugins.integrations.pytorch_metric_learning.objective import Objective
from vl_plugins.registry import options_of

__all__ = ["Stage", "make_optimizer", "make_scheduler", "remaining_stages", "validate"]

MOST_TRIAL_STEPS = 100_000


@dataclass
class Stage:
    """A stage that is not complete.

    Attributes:
        number: from 1.
        config: its settings.
        last: the epoch in which it ends.
        optimizer, scheduler: of what it trains.
        interval: steps of the training between those of the scheduler.
    """

    number: int
    config: StageConfig
    last: int
    optimizer: Optimizer
    scheduler: lr_scheduler.LRScheduler
    interval: int


def remaining_stages(
    config: Config,
    objective: Objective,
    steps_per_epoch: int,
    epochs: int = 0,
    optimizer_state: Mapping[str, Any] | None = None,
) -> list[Stage]:
    """Return the stages that are left after some epochs, each with its optimizer.

    Args:
        config: of the training.
        objective: what is trained.
        steps_per_epoch: batches of an epoch.
        epochs: complete epochs.
        optimizer_state: that of the stage of the last complete epoch.

    Raises:
        UserError: a wrong option of a stage, whose key begins the message; or the state does not fit the stage.
    """
    stages, last = [], 0
    for number, (key, stage) in enumerate(zip(config.stage_keys, config.schedule, strict=True), 1):
        first = last
        last = first + stage.epochs
        if epochs >= last:
            continue
        validate(key, stage, objective, steps_per_epoch)
        optimizer = make_optimizer(stage, objective)
        trained = max(0, epochs - first)
        if trained > 0 and optimizer_state is not None:  # a new stage has a new optimizer
            load_optimizer_state(stage, optimizer, optimizer_state)
        scheduler, interval = make_scheduler(stage, optimizer, steps_per_epoch, trained)
        stages.append(Stage(number, stage, last, optimizer, scheduler, interval))
    return stages


def validate(key: str, stage: StageConfig, objective: Objective, steps_per_epoch: int) -> None:
    """Set the mode of a stage, and try its options on parameters of one number each: a step, and the whole schedule.

    Raises:
        UserError: a wrong option; the message begins with its key.
    """
    with config_errors(key):
        objective.set_mode(stage)
    groups = _groups(objective)
    for group in groups:
        group["params"] = [_with_gradient(parameter.new_zeros([1] * parameter.ndim)) for parameter in group["params"]]
    with config_errors(f"{key}.optimizer"):
        optimizer = _optimizer(stage, groups)
        optimizer.step()
    with config_errors(f"{key}.lr_scheduler"):
        scheduler, interval = make_scheduler(stage, optimizer, steps_per_epoch)
        _repeat(scheduler, min(stage.epochs * steps_per_epoch // interval, MOST_TRIAL_STEPS))


def make_optimizer(stage: StageConfig, objective: Objective) -> Optimizer:
    """Return the optimizer of what :meth:`Objective.set_mode` left trainable; each part is a group."""
    return _optimizer(stage, _groups(objective))


def _groups(objective: Objective) -> list[dict[str, Any]]:
    """Return the trainable parameters of each part, as groups for an optimizer."""
    groups = []
    for name, module in objective.parts().items():
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not trained:
            continue
        group: dict[str, Any] = {"params": trained, "part": name}
        if any(getattr(submodule, "learns_scale", False) for submodule in module.modules()):
            group["weight_decay"] = 0.0  # which would pull the scale of a loss to 1
        groups.append(group)
    return groups


def _with_gradient(values: Tensor) -> nn.Parameter:
    """Return a parameter with a gradient of 0."""
    parameter = nn.Parameter(values)
    parameter.grad = torch.zeros_like(values)
    return parameter


def make_scheduler(
    stage: StageConfig, optimizer: Optimizer, steps_per_epoch: int, epochs: int = 0
) -> tuple[lr_scheduler.LRScheduler, int]:
    """Return the learning rate scheduler of a stage, and the number of training steps between its own.

    The steps of the first ``epochs`` are repeated, not saved, so a schedule that was changed continues as if it had
    been so from the beginning.
    """
    name, options = split(stage.lr_scheduler or {"name": "ConstantLR", "factor": 1})
    by = one_of("value of lr_scheduler.by", options.pop("by", "epoch"), ("epoch", "iteration"))
    scheduler = _create("scheduler", lr_scheduler, lr_scheduler.LRScheduler, name, optimizer, options)
    interval = 1
    if by == "epoch":
        interval = steps_per_epoch
    _repeat(scheduler, epochs * steps_per_epoch // interval)
    return scheduler, interval


def load_optimizer_state(stage: StageConfig, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Continue with the saved state of an optimizer, and with the rates and options of the configuration.

    Raises:
        UserError: the stage trains other parts than the optimizer did, or the state does not fit its parameters.
    """
    groups = optimizer.state_dict()["param_groups"]
    part_names = [group["part"] for group in groups]
    with user_errors("--resume: the state of the optimizer does not fit this stage", *MALFORMED_CONTENT):
        if [group["part"] for group in saved["param_groups"]] != part_names:
            raise UserError("--resume: this stage trains other parts than before; use a new --out")
        optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
        try_step(stage, optimizer)  # because load_state_dict compares no shapes


def try_step(stage: StageConfig, optimizer: Optimizer) -> None:
    """Take a step with a copy of each parameter and its state, where options and states meet for the first time.

    Raises:
        Exception: any that the optimizer raises.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            twin = _with_gradient(torch.zeros_like(parameter))
            trial = _optimizer(stage, [{"params": [twin], "part": group["part"]}])
            state = optimizer.state.get(parameter)
            if state is not None:
                trial.state[twin] = copy.deepcopy(state)
            trial.step()


def _optimizer(stage: StageConfig, groups: list[dict[str, Any]]) -> Optimizer:
    name, options = split(stage.optimizer)
    optimizer: Optimizer = _create("optimizer", torch.optim, Optimizer, name, groups, options)
    for group in optimizer.param_groups:
        group["lr"] *= stage.lr_scale.get(group["part"], 1)
    return optimizer


def _create(kind: str, package: ModuleType, base: type, name: str, first: Any, options: dict[str, Any]) -> Any:
    """Return a new object of a class of torch by its name, with its first argument and options."""
    classes: dict[str, Callable[..., Any]] = {}
    for key, value in vars(package).items():
        if inspect.isclass(value) and issubclass(value, base) and value is not base and not key.startswith("_"):
            classes[key] = value
    factory = classes[one_of(kind, name, classes)]
    names = list(options_of(factory))[1:]  # the first argument is no option
    for option in options:
        if option not in names:
            raise unknown_name(f"option of {name}", option, names)
    return factory(first, **options)


def _repeat(scheduler: lr_scheduler.LRScheduler, steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has not made these steps
        for _ in range(steps):
            scheduler.step()
