"""Training steps from a configuration with random weights and random inputs."""

import torch

from vl_plugins.encoders import Vocabulary
from vl_plugins.integrations.pytorch_metric_learning import build_objective, read_config
from vl_plugins.integrations.pytorch_metric_learning.command_line import build_parser, overrides
from vl_plugins.integrations.pytorch_metric_learning.config import Config
from vl_plugins.integrations.pytorch_metric_learning.stages import make_optimizer, make_scheduler


def config_of_command(argv):
    """Return the configuration that a command line asks for."""
    arguments = build_parser().parse_args(list(map(str, argv)))
    return read_config(arguments.config, overrides(arguments))


def step_of_each_stage(config: Config) -> None:
    """Build everything but pretrained weights, and take a step of each stage; no file is read."""
    words = Vocabulary(tuple(f"word{number}" for number in range(100))) if "gru" in str(config.text.trunk) else None
    objective = build_objective(config, words, pretrained=False)
    trunk = objective.towers.image.trunk
    shape = (36, trunk.local_width) if config.data.inputs == "features" else (3, *trunk.image_size)
    images, texts = torch.randn(2, *shape), torch.randint(1, 100, (2, 12))
    for stage in config.schedule:
        objective.set_mode(stage)
        optimizer = make_optimizer(stage, objective)
        scheduler, interval = make_scheduler(stage, optimizer, steps_per_epoch=1)
        length = (stage.lr_scheduler or {}).get("T_max", stage.epochs)
        assert (interval, length) == (1, stage.epochs)
        before = [parameter.clone() for group in optimizer.param_groups for parameter in group["params"]]
        objective(images, texts, torch.arange(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        after = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
        assert all(parameter.isfinite().all() for parameter in after)
