"""PML's record keeper in trainings of its trainers: tables with the settings of losses, distances and miners."""

import pytest
import torch
from pytorch_metric_learning.trainers import MetricLossOnly
from pytorch_metric_learning.utils import logging_presets
from torch import nn

from vl_plugins import create_loss
from vl_plugins.distances import MatchProbability
from vl_plugins.integrations.pytorch_metric_learning import CrossModalTrainer
from vl_plugins.losses import CrossBatchMemory
from vl_plugins.miners import HardestNegativeMiner
from vl_plugins.regularizers import DiversityRegularizer

BATCH, STEPS, DIM = 4, 3, 8


def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH * STEPS, 3, 6, 6, generator=generator)


@pytest.fixture
def recorded(tmp_path):
    """A function that trains, and returns the rows of each table as ``{column: values}``."""

    def train(trainer, models, dataset, **options):
        keeper, *_ = logging_presets.get_record_keeper(str(tmp_path / "csv"), str(tmp_path / "tensorboard"))
        optimizers = {}
        for name, model in models.items():
            if list(model.parameters()):
                optimizers[f"{name}_optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer(
            models=models,
            optimizers=optimizers,
            batch_size=BATCH,
            dataset=dataset,
            dataloader_num_workers=0,
            data_device=torch.device("cpu"),
            end_of_iteration_hook=logging_presets.HookContainer(keeper, log_freq=1).end_of_iteration_hook,
            **options,
        ).train()
        keeper.save_records()
        names = [row["name"] for row in keeper.query("SELECT name FROM sqlite_master WHERE type='table'")]
        tables = {}
        for name in names:
            if name != "sqlite_sequence":
                tables[name] = keeper.query(f"SELECT * FROM {name}", return_dict=True)
        return tables

    return train


def settings_of(table):
    """Return the value of each column, which is the same in all rows."""
    assert {len(values) for values in table.values()} == {STEPS}
    return {column: values[0] for column, values in table.items() if len(set(values)) == 1}


def train_pairs(recorded, loss, miner=None):
    """Train two modalities, with one text of each image."""
    models = {
        "image_trunk": nn.Sequential(nn.Flatten(), nn.Linear(108, DIM)),
        "text_trunk": nn.EmbeddingBag(20, DIM),
    }
    texts = torch.arange(BATCH * STEPS)[:, None, None]
    dataset = list(zip(images(), texts, range(BATCH * STEPS), strict=True))
    miners = {} if miner is None else {"tuple_miner": miner}
    return recorded(CrossModalTrainer, models, dataset, loss_funcs={"metric_loss": loss}, mining_funcs=miners)


GOAL = {"margin": 0.2, "tau": 5, "offset": 0.5, "alpha": 2, "beta": 10, "lam": 0.5, "eps": 0.1}
LOSSES = {
    "unified": ({"margin": 0.3, "scale": 20}, {"margin": 0.3, "scale": 20}),
    "vlc": ({"scale": 20}, {"scale": 20}),
    "triplet_hn": ({"margin": 0.3}, {"margin": 0.3}),
    "triplet_sh": ({"margin": 0.3}, {"margin": 0.3}),
    "goal": ({"tau": 5}, GOAL),
    "smooth_chamfer": ({"mmd_weight": 0.2}, {"mmd_weight": 0.2, "diversity_weight": 0.01}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_settings_of_each_loss(name, recorded):
    options, settings = LOSSES[name]
    loss = create_loss(name, **options)
    tables = train_pairs(recorded, loss)
    table = tables[f"metric_loss_{type(loss).__name__}"]
    assert set(table) - {"id", "~iteration~"} == set(settings)
    assert settings_of(table) == settings
    assert len(tables["loss_histories"]["metric_loss"]) == STEPS


def test_settings_of_a_warm_up(recorded):
    tables = train_pairs(recorded, create_loss("triplet_hn", margin=0.3, warmup_steps=2))
    assert settings_of(tables["metric_loss_Warmup"]) == {"steps": 2}
    for part in ("first_TripletSHLoss", "then_TripletHNLoss"):
        assert settings_of(tables[f"metric_loss_Warmup__modules_{part}"]) == {"margin": 0.3}


def test_settings_of_the_parts_of_a_loss_and_of_a_miner(recorded):
    """A base, distances, regularizers, and a queue."""
    loss = create_loss("smooth_chamfer", base="unified", margin=0.1, alpha=8, set_size=2)
    tables = train_pairs(recorded, loss, HardestNegativeMiner(k=2))
    base = "metric_loss_SmoothChamferLoss__modules_base_UnifiedLoss"
    assert settings_of(tables[base])["margin"] == 0.1
    (distance,) = [name for name in tables if name.endswith("SmoothChamferSimilarity")]
    assert settings_of(tables[distance]).items() >= {"alpha": 8, "set_size": 2}.items()
    assert settings_of(tables["tuple_miner_HardestNegativeMiner"])["k"] == 2


def test_settings_that_are_learned_and_those_of_a_regularizer(recorded):
    distance = MatchProbability(scale=2.0)
    loss = create_loss("vlc", distance=distance, embedding_regularizer=DiversityRegularizer(scale=3.0))
    tables = train_pairs(recorded, loss)
    (name,) = [name for name in tables if name.endswith("MatchProbability")]
    assert tables[name]["scale"] == [2.0] * STEPS
    (name,) = [name for name in tables if name.endswith("DiversityRegularizer")]
    assert settings_of(tables[name])["scale"] == 3


def test_one_modality(recorded):
    """PML's own trainer, and a loss in its queue."""
    models = {"trunk": nn.Flatten(), "embedder": nn.Linear(108, DIM)}
    loss = CrossBatchMemory(create_loss("unified", scale=30), embedding_size=DIM, memory_size=8)
    dataset = list(zip(images(), [0, 0, 1, 1] * STEPS, strict=True))
    miners = {"tuple_miner": HardestNegativeMiner(k=3)}
    tables = recorded(MetricLossOnly, models, dataset, loss_funcs={"metric_loss": loss}, mining_funcs=miners)
    assert settings_of(tables["metric_loss_CrossBatchMemory"]).items() >= {"memory_size": 8}.items()
    (name,) = [name for name in tables if name.endswith("UnifiedLoss")]
    assert settings_of(tables[name]).items() >= {"margin": 0.2, "scale": 30}.items()
    assert settings_of(tables["tuple_miner_HardestNegativeMiner"])["k"] == 3


def test_statistics_of_each_step(recorded):
    """Those of a loss that compares; 0 in PML, or NaN, would say that nothing was computed."""
    tables = train_pairs(recorded, create_loss("unified", collect_stats=True))
    (table,) = [table for table in tables.values() if "mean_positive" in table]
    for name in ("mean_positive", "mean_negative", "active_pairs", "scale_in_use"):
        assert len(table[name]) == STEPS
        assert all(value != 0 for value in table[name])
    assert set(table["scale_in_use"]) == {50}
