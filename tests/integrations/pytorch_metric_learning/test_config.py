"""Configurations: files, overrides, and errors."""

from dataclasses import asdict

import pytest
import torch
import yaml

from tests.helpers.pml_settings import settings
from vl_plugins.errors import UserError
from vl_plugins.integrations.pytorch_metric_learning.checkpoints import FORMAT, read_checkpoint
from vl_plugins.integrations.pytorch_metric_learning.config import StageConfig, parse_config, read_config


def test_stages_change_what_they_name():
    config = parse_config(
        settings(
            training={"epochs": 30, "freeze": ["image_trunk"], "lr_scheduler": {"name": "StepLR", "step_size": 15}},
            stages=[
                {},
                {"epochs": 15, "freeze": [], "lr_scheduler": None, "optimizer": {"name": "Adam", "lr": 2e-5}},
            ],
        )
    )
    first, second = config.stages
    assert first == config.training
    assert (first.epochs, first.freeze, first.optimizer["lr"]) == (30, ["image_trunk"], 0.01)
    assert second == StageConfig(epochs=15, optimizer={"name": "Adam", "lr": 2e-5})
    assert config.epochs == 45
    assert parse_config(settings()).stages == [parse_config(settings()).training]


def test_a_configuration_survives_being_written():
    config = parse_config(settings(head="set", miner={"name": "BatchHardMiner", "distance": "smooth_chamfer"}))
    written = yaml.safe_dump(asdict(config))
    assert parse_config(yaml.safe_load(written)) == config


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "a ${seed"])
def test_interpolations_are_not_resolved(tmp_path, value):
    plain = settings(loss={"name": "unified", "options": [value]})
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(plain))
    torch.save({"format": FORMAT, "version": 1, "config": plain, "vocabulary": None}, tmp_path / "a.pt")
    for read in (
        lambda: parse_config(plain, {"loss.scale": 1}),
        lambda: parse_config(settings(), {"loss": value, "loss.scale": 1}),
        lambda: read_config(tmp_path / "a.yaml"),
        lambda: read_checkpoint(tmp_path / "a.pt"),
    ):
        with pytest.raises(UserError, match=r"is an interpolation, which is not supported|no viable alternative at"):
            read()


def test_values_by_their_path():
    changes = {
        "data.batch_size": 7,
        "loss.scale": 60,
        "loss.distance.name": "LpDistance",
        "stages.1.optimizer.lr": 5.0,
        "image.trunk.drop_rate": 0.1,
        "reducer": "SumReducer",
        "seed": 4,
    }
    plain = settings(stages=[{}, {"optimizer": {"name": "SGD"}}])
    config = parse_config(plain, changes)
    assert config.data.batch_size == 7
    assert config.loss == {"name": "unified", "scale": 60, "distance": {"name": "LpDistance"}}
    assert config.stages[1].optimizer == {"name": "SGD", "lr": 5.0}
    assert config.stages[0].optimizer == {"name": "Adam", "lr": 1e-2}
    assert config.image.trunk["drop_rate"] == 0.1
    assert config.reducer == "SumReducer"
    assert config.seed == 4
    for path, message in {
        "stages.2.epochs": "stages.2.epochs: .*list index out of range",
        "stages.first.epochs": "Index 'first' .str. is not an int",
        "seed.value": "seed: Value .* could not be converted to Integer",
        "data.batchsize": "data.batchsize: Key 'batchsize' not in 'DataConfig'. Did you mean: 'batch_size'",
    }.items():
        with pytest.raises(UserError, match=message):
            parse_config(settings(stages=[{}, {}]), {path: 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 3}, "epochs: Key 'epochs' not in 'Config'"),
        ({"data": {"batch_size": 0}}, "batch_size must be at least 1, got 0"),
        (
            {"data": {"batch_size": True}},
            "data.batch_size: Value 'True' of type 'bool' could not be converted to Integer",
        ),
        (
            {"data": {"same_group": "apart"}},
            "data.same_group: delete this key of version 0.2; now images of a group are positives of each other",
        ),
        ({"data": {"captions_per_image": "some"}}, "captions per image must be"),
        ({"image": {"pooling": "avg"}}, "image.trunk: .* missing mandatory value"),
        ({"text": "gru"}, "text: .*str is not a subclass of TowerConfig"),
        ({"head": "linear"}, "unknown head 'linear'; known: set"),
        ({"training": {"freeze": ["cnn"]}}, "unknown part of the model to freeze 'cnn'"),
        ({"training": {"lr_scale": {"head": 0.1}}}, "unknown part of the model in lr_scale 'head'"),
        ({"training": {"clip_grad_norm": -1}}, "clip_grad_norm must be at least 0, got -1"),
        ({"stages": []}, "stages a list of mappings"),
        ({"stages": [{"epoch": 1}]}, "stages.0: epoch: Key 'epoch' not in 'StageConfig'. Did you mean: 'epochs'"),
        ({"trainer": "CascadedEmbeddings"}, "unknown trainer 'CascadedEmbeddings'; known: CrossModalTrainer"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(UserError, match=message):
        parse_config(settings(**changes))


def test_a_missing_tower_is_named():
    plain = settings()
    del plain["text"]
    with pytest.raises(UserError, match=r"text: .* missing mandatory value: text"):
        parse_config(plain)


def test_files(tmp_path, monkeypatch):
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(settings()))
    assert read_config(path) == parse_config(settings())
    assert read_config(path, {"dim": 8}).dim == 8
    path.write_text(yaml.safe_dump(settings()).replace("lr: 0.01", "lr: 1e-4"))
    assert read_config(path).training.optimizer["lr"] == 1e-4, "which YAML 1.1 takes for text"
    path.write_text("- a")
    with pytest.raises(UserError, match=f"{path}: the configuration must be a mapping"):
        read_config(path)
    monkeypatch.chdir("/")
    assert read_config("toy.yaml").loss["name"] == "unified"
    with pytest.raises(UserError, match=r"--config: no such file: no\.yaml"):
        read_config("no.yaml")
