"""Every loss in every trainer of the host: a few steps of a tiny training, each call of the loss against the loops."""

import pytest
import torch
from pytorch_metric_learning import losses, trainers
from pytorch_metric_learning.miners import MultiSimilarityMiner, TripletMarginMiner

from tests.pml import components
from tests.pml.loops import LOSSES, check, expected, make_loss
from vl_plugins.miners import HardestNegativeMiner

BATCH, STEPS, FEATURES, CLASSES = 6, 2, 6, 3


class Data(torch.utils.data.Dataset):
    """Features, or two views of them, and labels."""

    def __init__(self, views=1):
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(BATCH * STEPS) % CLASSES
        centers = torch.randn(CLASSES, FEATURES, generator=generator)
        self.views = [
            centers[self.labels] + torch.randn(len(self.labels), FEATURES, generator=generator) for _ in range(views)
        ]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return *(view[index] for view in self.views), self.labels[index]


class Watched(torch.nn.Module):
    """A loss that keeps what it was called with, and the gradient with respect to its embeddings."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss
        self.calls = []

    def forward(self, embeddings, labels, indices_tuple=None):
        embeddings.retain_grad()
        self.calls.append((embeddings, labels, indices_tuple))
        return self.loss(embeddings, labels, indices_tuple)


def metric_loss_only(loss, miner, common):
    return trainers.MetricLossOnly(loss_funcs={"metric_loss": loss}, mining_funcs={"tuple_miner": miner}, **common)


def two_streams(loss, miner, common):
    common |= {"dataset": Data(views=2)}
    return trainers.TwoStreamMetricLoss(
        loss_funcs={"metric_loss": loss}, mining_funcs={"tuple_miner": miner} if miner else {}, **common
    )


def with_classifier(loss, miner, common):
    common["models"]["classifier"] = torch.nn.Linear(4, CLASSES)
    return trainers.TrainWithClassifier(
        loss_funcs={"metric_loss": loss, "classifier_loss": torch.nn.CrossEntropyLoss()},
        mining_funcs={"tuple_miner": miner},
        **common,
    )


def cascaded(loss, miner, common):
    return trainers.CascadedEmbeddings(
        embedding_sizes=[2, 2],
        loss_funcs={"metric_loss_0": loss, "metric_loss_1": loss},
        mining_funcs={"tuple_miner_0": miner},
        **common,
    )


def adversarial(loss, miner, common):
    common["models"]["generator"] = torch.nn.Linear(3 * 5, 5)
    return trainers.DeepAdversarialMetricLearning(
        loss_funcs={"metric_loss": loss, "synth_loss": loss, "g_adv_loss": losses.TripletMarginLoss()},
        mining_funcs={"tuple_miner": miner},
        loss_weights={
            "metric_loss": 1,
            "synth_loss": 0.5,
            "g_adv_loss": 0.5,
            "g_hard_loss": 0.5,
            "g_reg_loss": 0.5,
        },
        g_triplets_per_anchor=1,
        **common,
    )


TRAINERS = {
    "CascadedEmbeddings": cascaded,
    "DeepAdversarialMetricLearning": adversarial,
    "MetricLossOnly": metric_loss_only,
    "TrainWithClassifier": with_classifier,
    "TwoStreamMetricLoss": two_streams,
}
CALLS_PER_STEP = {"CascadedEmbeddings": 2, "DeepAdversarialMetricLearning": 2}


def train(trainer, loss, miner):
    torch.manual_seed(0)
    models = {"trunk": torch.nn.Linear(FEATURES, 5), "embedder": torch.nn.Linear(5, 4)}
    parameters = [parameter for model in models.values() for parameter in model.parameters()]
    common = {
        "models": models,
        "optimizers": {"trunk_optimizer": torch.optim.SGD(parameters, lr=0.01)},
        "batch_size": BATCH,
        "dataset": Data(),
        "dataloader_num_workers": 0,
        "data_device": torch.device("cpu"),
        "iterations_per_epoch": STEPS,
    }
    if trainer == "DeepAdversarialMetricLearning":
        # It steps only optimizers of these names.
        common["optimizers"]["generator_optimizer"] = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    before = [parameter.detach().clone() for parameter in parameters]
    TRAINERS[trainer](loss, miner, common).train(num_epochs=1)
    assert all(not torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True))


@pytest.mark.filterwarnings("ignore")
@LOSSES
def test_every_trainer(name):
    found = components.classes("trainers", trainers.BaseTrainer)
    for trainer in found:
        if trainer not in TRAINERS:
            pytest.fail(f"say in TRAINERS of tests/pml/test_trainers.py how a {trainer} is made")
        pairs, triplets = MultiSimilarityMiner(epsilon=0.8), HardestNegativeMiner(k=2)
        for miner in (pairs, triplets) if trainer == "TwoStreamMetricLoss" else (triplets,):
            loss = Watched(make_loss(name))
            train(trainer, loss, miner)
            assert len(loss.calls) == STEPS * CALLS_PER_STEP.get(trainer, 1), trainer
            values = []
            for embeddings, labels, indices_tuple in loss.calls:
                if trainer == "TwoStreamMetricLoss":
                    assert len(embeddings) == len(labels) == 2 * BATCH
                    check_shifted(indices_tuple, miner, embeddings, labels)
                call = {"embeddings": embeddings.detach(), "labels": labels, "indices_tuple": indices_tuple}
                actual = call | {"embeddings": call["embeddings"].clone().requires_grad_()}
                value, gradients = expected(name, call)
                what = f"{name}, {trainer}, {type(miner).__name__}"
                check(make_loss(name)(**actual), [actual["embeddings"]], value, gradients, what=what, least=-1)
                values.append(value)
            assert max(values) > 0.01, trainer


def check_shifted(indices_tuple, miner, embeddings, labels):
    """Anchors are in the first half, the others in the second, and as the miner chose them."""
    first, second = embeddings.detach().split(BATCH)
    expected_indices = miner(first, labels[:BATCH], second, labels[BATCH:].clone())
    anchors = {0, 2} if len(indices_tuple) == 4 else {0}
    assert len(indices_tuple[0]) > 0
    for position, (index, unshifted) in enumerate(zip(indices_tuple, expected_indices, strict=True)):
        assert torch.equal(index, unshifted + (0 if position in anchors else BATCH))


@pytest.mark.filterwarnings("ignore")
@LOSSES
def test_the_gradients_reach_the_model(name):
    """What the trainer's step does to the weights is what the loops say."""
    for trainer in ("MetricLossOnly", "TwoStreamMetricLoss"):
        loss = Watched(make_loss(name))
        train(trainer, loss, TripletMarginMiner(margin=0.5))
        for embeddings, labels, indices_tuple in loss.calls:
            _, (gradient,) = expected(
                name, {"embeddings": embeddings.detach(), "labels": labels, "indices_tuple": indices_tuple}
            )
            assert gradient.abs().max() > 1e-5
            torch.testing.assert_close(embeddings.grad.double(), gradient, atol=1e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore")
@LOSSES
def test_two_streams_without_a_miner_are_all_triplets_across(name):
    loss = Watched(make_loss(name))
    train("TwoStreamMetricLoss", loss, None)
    for embeddings, labels, indices_tuple in loss.calls:
        anchors, positives, negatives = indices_tuple
        same = labels[:BATCH, None] == labels[:BATCH]
        assert len(anchors) == (same[:, :, None] & ~same[:, None, :]).sum()
        assert (anchors < BATCH).all()
        assert (positives >= BATCH).all()
        assert (negatives >= BATCH).all()
        assert (positives - BATCH == anchors).any()
        call = {"embeddings": embeddings.detach(), "labels": labels, "indices_tuple": indices_tuple}
        torch.testing.assert_close(make_loss(name)(**call).item(), expected(name, call)[0], atol=1e-4, rtol=1e-4)
