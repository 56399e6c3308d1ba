"""Training steps from a configuration with random weights and random inputs."""

import torch

from vl_plugins.encoders.vocabulary import Vocabulary
from vl_plugins.integrations.pytorch_metric_learning import build_trainer
from vl_plugins.integrations.pytorch_metric_learning.command_line import build_parser, overrides
from vl_plugins.integrations.pytorch_metric_learning.config import Config, read_config
from vl_plugins.integrations.pytorch_metric_learning.models import build_towers
from vl_plugins.integrations.pytorch_metric_learning.parts import loss_from_config


def config_of_command(argv):
    """Return the configuration that a command line asks for."""
    arguments = build_parser().parse_args(list(map(str, argv)))
    return read_config(arguments.config, overrides(arguments))


def step_of_each_stage(config: Config) -> None:
    """Build everything but pretrained weights, and take a step of each stage; no file is read."""
    towers = build_towers(config, Vocabulary(tuple(f"word{number}" for number in range(100))), pretrained=False)
    images, texts = towers.parts["image_trunk"].example_inputs(2), torch.randint(1, 100, (2, 12))
    loss = loss_from_config(config)
    for stage in range(len(config.stages)):
        build_trainer(
            config,
            stage=stage,
            towers=towers,
            dataset=list(zip(images, texts, torch.arange(2), strict=True)),
            loss=loss,
            batch_size=2,
            dataloader_num_workers=0,
        ).train()
