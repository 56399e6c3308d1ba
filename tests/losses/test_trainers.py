"""Every loss in PML's trainers: a few steps of a tiny training, each call of the loss against the loops.

The other trainers call the loss as MetricLossOnly does.
"""

import pytest
import torch
from pytorch_metric_learning import trainers
from pytorch_metric_learning.miners import MultiSimilarityMiner

from tests.helpers.loops import LOSSES, expected, make_loss
from tests.helpers.seeds import seed_torch, seeded
from vl_plugins.miners import HardestNegativeMiner

BATCH, STEPS, FEATURES, CLASSES = 6, 2, 6, 3
TRAINERS = {"MetricLossOnly": 1, "TwoStreamMetricLoss": 2}  # the number of views


def data(views):
    """Features of one view or two, and labels."""
    generator = seeded(0)
    labels = torch.arange(BATCH * STEPS) % CLASSES
    centers = torch.randn(CLASSES, FEATURES, generator=generator)[labels]
    return [centers + torch.randn(centers.shape, generator=generator) for _ in range(views)] + [labels]


class Watched(torch.nn.Module):
    """A loss that keeps what it was called with, and the gradient with respect to its embeddings."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss
        self.calls = []

    def forward(self, embeddings, labels, indices_tuple=None):
        embeddings.retain_grad()
        value = self.loss(embeddings, labels, indices_tuple)
        self.calls.append((value, {"embeddings": embeddings, "labels": labels, "indices_tuple": indices_tuple}))
        return value


def train(trainer, loss, miner):
    seed_torch(0)
    models = {"trunk": torch.nn.Linear(FEATURES, 5), "embedder": torch.nn.Linear(5, 4)}
    parameters = [parameter for model in models.values() for parameter in model.parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    getattr(trainers, trainer)(
        models=models,
        optimizers={"trunk_optimizer": torch.optim.SGD(parameters, lr=0.01)},
        batch_size=BATCH,
        loss_funcs={"metric_loss": loss},
        mining_funcs={"tuple_miner": miner} if miner else {},
        dataset=torch.utils.data.TensorDataset(*data(TRAINERS[trainer])),
        dataloader_num_workers=0,
        data_device=torch.device("cpu"),
        iterations_per_epoch=STEPS,
    ).train(num_epochs=1)
    assert all(not torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer", TRAINERS)
@LOSSES
def test_trainers(name, trainer):
    # Without a miner a TwoStreamMetricLoss takes all triplets across the streams.
    for miner in (None, MultiSimilarityMiner(epsilon=0.8), HardestNegativeMiner(k=2)):
        loss = Watched(make_loss(name))
        train(trainer, loss, miner)
        assert len(loss.calls) == STEPS
        for value, call in loss.calls:
            if trainer == "TwoStreamMetricLoss":
                anchors, candidates = call["indices_tuple"][0], call["indices_tuple"][-1]
                assert len(call["embeddings"]) == 2 * BATCH
                assert (anchors < BATCH).all()
                assert (candidates >= BATCH).all()
            expected_value, (gradient,) = expected(name, call)
            assert gradient.abs().max() > 1e-5
            torch.testing.assert_close(value.item(), expected_value, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(call["embeddings"].grad.double(), gradient, atol=1e-4, rtol=1e-3)
