"""A script of pytorch-metric-learning with one modality: images with the same label are positives.

:func:`train` is all that matters; the model is small, and the data are made up. It takes some seconds::

    python -m vl_plugins.integrations.examples.metric_loss_only
"""

import argparse

import torch
from pytorch_metric_learning.trainers import MetricLossOnly

from vl_plugins import create_loss
from vl_plugins.integrations.examples import scenes
from vl_plugins.miners import HardestNegativeMiner

__all__ = ["main", "precision_at_1", "train"]

TRAIN, TEST, EPOCHS = 512, 512, 4


def train(trunk, dataset, epochs):
    trainer = MetricLossOnly(
        models={"trunk": trunk},
        optimizers={"trunk_optimizer": torch.optim.Adam(trunk.parameters(), lr=1e-3)},
        batch_size=64,
        loss_funcs={"metric_loss": create_loss("unified", margin=0.2)},
        mining_funcs={"tuple_miner": HardestNegativeMiner(k=8)},  # or none: all pairs
        dataset=dataset,  # items are (image, label)
    )
    trainer.train(num_epochs=epochs)


@torch.inference_mode()
def precision_at_1(trunk, images, labels):
    """Return how often the nearest other image has the same label, in [0, 1]."""
    embeddings = torch.nn.functional.normalize(trunk(images))
    nearest = (embeddings @ embeddings.T).fill_diagonal_(-1).argmax(dim=1)
    return (labels[nearest] == labels).float().mean().item()


def main():
    """Train images to be near if they show the same thing top left; print and return precision@1."""
    torch.manual_seed(0)
    training, test = scenes.make_scenes(TRAIN, seed=1), scenes.make_scenes(TEST, seed=2)
    size = training.regions[0].numel()
    trunk = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(size, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)
    )
    precisions = {"before": precision_at_1(trunk, test.regions, test.things[:, 0])}
    train(trunk, torch.utils.data.TensorDataset(training.regions, training.things[:, 0]), EPOCHS)
    precisions["after"] = precision_at_1(trunk, test.regions, test.things[:, 0])
    print("precision@1 on test images:", precisions)
    return precisions


if __name__ == "__main__":
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    main()
