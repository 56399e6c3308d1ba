"""The module of towers and loss: two processes against one, optimizers, and schedules."""

import pytest
import torch
from torch import nn

from tests.helpers.pml_settings import settings
from tests.helpers.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.encoders import Vocabulary
from vl_plugins.integrations.pytorch_metric_learning import build_objective, make_accelerator, parse_config
from vl_plugins.integrations.pytorch_metric_learning.config import StageConfig
from vl_plugins.integrations.pytorch_metric_learning.objective import Objective
from vl_plugins.integrations.pytorch_metric_learning.stages import make_optimizer, make_scheduler

IMAGES, REGIONS, WIDTH, DIM, CAPTIONS = 8, 3, 6, 8, 2
LABELS = torch.tensor([0, 1, 2, 3, 4, 1, 6, 7])  # image 5 is of the group of image 1
SETS = {"name": "set", "num_slots": 2, "num_iters": 2, "hidden_dim": 8}
CLASSES = {"num_classes": 10, "embedding_size": DIM}


def case(**changes):
    """Return small towers on region features, without batch norm."""
    plain = {
        "image": {"trunk": {"name": "features", "width": WIDTH}, "pooling": "gpo"},
        "text": {"trunk": {"name": "gru", "word_dim": 4, "hidden_dim": DIM}, "projection": "none"},
        "data": {"inputs": "features"},
        "dim": DIM,
    }
    training = {"optimizer": {"name": "SGD", "lr": 0.1}} | changes.pop("training", {})
    return settings(**plain | changes, training=training)


CASES = {
    **{name: case(loss=name) for name in ("unified", "vlc", "triplet_hn", "goal", "NTXentLoss")},
    "smooth_chamfer": case(head=SETS, loss={"name": "smooth_chamfer", "base": "unified", "mmd_weight": 0.3}),
    "ArcFaceLoss": case(loss={"name": "ArcFaceLoss", **CLASSES}, one_set=True),
    "ProxyAnchorLoss": case(loss={"name": "ProxyAnchorLoss", **CLASSES}, one_set=True),
    "CrossBatchMemory": case(
        loss={"name": "CrossBatchMemory", "loss": "ContrastiveLoss", "embedding_size": DIM, "memory_size": 32},
        one_set=True,
    ),
    "miner": case(miner="MultiSimilarityMiner"),
    "miner of one set": case(miner="BatchHardMiner", loss="vlc", one_set=True),
    "reducer": case(reducer="AvgNonZeroReducer", loss="triplet_sh"),
    "sets": case(head=SETS, distance="match_probability"),
    "frozen": case(training={"freeze": ["image_embedder", "text_trunk"], "lr_scale": {"loss": 2}}, head=SETS),
    "clipped": case(training={"clip_grad_norm": 0.01}),
    "chunks": case(data={"inputs": "features", "chunk_size": 3}),
    "batches of a step": case(data={"inputs": "features", "batch_size": 3, "accumulation_steps": 2}),
    "learned scale": case(loss={"name": "unified", "learn_scale": True}),
    "chunks of sets": case(data={"inputs": "features", "chunk_size": 1}, head=SETS),
}


def batch():
    """Return images, of which two have fewer regions, texts and labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, REGIONS, WIDTH, generator=generator, dtype=torch.float64)
    images[2, 1:] = images[6, 2:] = 0
    return images, torch.randint(1, 9, (IMAGES * CAPTIONS, 4), generator=generator), LABELS


def step(plain, rank=0, world_size=1):
    """Take two steps; return gradients of the last one, parameters and buffers by name."""
    config = parse_config(plain)
    objective = build_objective(config, Vocabulary(tuple("abcdefgh"))).double()
    for parameter in objective.parameters():
        parameter.data += rank  # until the first process gives its own to all
    (stage,) = config.schedule
    objective.set_mode(stage)
    optimizer = make_optimizer(stage, objective)
    accelerator = make_accelerator(device="cpu") if world_size > 1 else None
    model = accelerator.prepare(objective) if accelerator else objective
    own = [part.chunk(world_size)[rank] for part in batch()]
    for _ in range(2):
        optimizer.zero_grad()
        model(*own).backward()
        if stage.clip_grad_norm:
            nn.utils.clip_grad_norm_(objective.towers.parameters(), stage.clip_grad_norm)
        optimizer.step()
    found = {f"grad {name}": p.grad for name, p in objective.named_parameters() if p.grad is not None}
    return found | {name: value.detach() for name, value in (*objective.named_parameters(), *objective.named_buffers())}


def steps(rank):
    return {name: step(plain, rank, world_size=2) for name, plain in CASES.items()}


@pytest.fixture(scope="module")
def two_processes():
    return in_processes(steps, 2, joined=False)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(two_processes, name):
    """Chunks are compared with whole batches."""
    plain = CASES[name] | {"data": CASES[name]["data"] | {"chunk_size": None, "accumulation_steps": 1}}
    expected = step(plain)
    assert sum(key.startswith("grad") for key in expected) > 3
    for found in two_processes:
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("one_set", [False, True])
def test_texts_belong_to_the_image_that_they_stand_beside(one_set):
    objective = build_objective(parse_config(case(one_set=one_set)), Vocabulary(tuple("abcdefgh"))).double()
    images, texts, labels = batch()
    x, y = objective.towers.encode_image(images), objective.towers.encode_text(texts)
    text_labels, loss = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 1, 1, 6, 6, 7, 7]), create_loss("unified")
    expected = loss(x, labels, ref_emb=y, ref_labels=text_labels)
    if one_set:
        expected = loss(torch.cat([x, y]), torch.cat([labels, text_labels]))
    torch.testing.assert_close(objective(images, texts, labels), expected, rtol=0, atol=1e-12)


def make(**changes):
    config = parse_config(case(**changes))
    objective = build_objective(config, Vocabulary(tuple("abcdefgh")))
    objective.set_mode(config.training)
    return config.training, objective


def test_parts_are_groups_of_one_optimizer():
    stage, objective = make(
        training={"optimizer": {"name": "SGD", "lr": 0.5}, "lr_scale": {"text_trunk": 0.1, "loss": 4}},
        loss={"name": "ArcFaceLoss", **CLASSES},
        one_set=True,
    )
    groups = {group["part"]: group for group in make_optimizer(stage, objective).param_groups}
    assert {part: group["lr"] for part, group in groups.items()} == {
        "image_embedder": 0.5,
        "text_trunk": 0.05,
        "loss": 2,
    }
    assert groups["loss"]["params"] == [objective.loss.W]
    _, again = make(loss={"name": "ArcFaceLoss", **CLASSES}, one_set=True)
    assert torch.equal(again.loss.W, objective.loss.W), "the seed covers the loss"


def test_stages_freeze_parts_and_batch_statistics_but_keep_fixed_parameters_fixed():
    config = parse_config(settings(image={"trunk": {"name": "timm", "model": "test_resnet", "image_size": 32}}))
    towers = build_objective(config, Vocabulary(("a",))).towers
    fixed = towers.image.trunk.model.conv1[0].weight.requires_grad_(False)
    objective = Objective(towers, nn.Identity(), one_set=True)
    modes = []
    for stage in (StageConfig(freeze=["image_trunk"]), StageConfig(freeze_batchnorm=True), StageConfig()):
        objective.set_mode(stage)
        trunk = towers.image.trunk
        modes.append((trunk.training, trunk.model.bn1.training, trunk.model.bn1.weight.requires_grad))
    assert modes == [(False, False, False), (True, False, True), (True, True, True)]
    assert not fixed.requires_grad


STEP_LR = {"name": "StepLR", "step_size": 2, "gamma": 0.5}


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        (None, [1, 1, 1, 1]),
        (STEP_LR, [1, 0.5, 0.5, 0.25]),
        ({**STEP_LR, "by": "iteration"}, [1 / 4, 1 / 16, 1 / 64, 1 / 256]),
    ],
)
def test_rates_after_epochs_of_four_steps(scheduler, rates):
    stage, objective = make(training={"optimizer": {"name": "SGD", "lr": 1.0}, "lr_scheduler": scheduler})
    for epochs, rate in enumerate(rates, 1):
        optimizer = make_optimizer(stage, objective)
        make_scheduler(stage, optimizer, 4, epochs)
        assert optimizer.param_groups[0]["lr"] == rate
