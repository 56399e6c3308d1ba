"""Configurations and the command line: files, overrides, references, and errors."""

from dataclasses import asdict

import pytest
import yaml
from accelerate.state import AcceleratorState

from tests.helpers.pml_settings import settings
from tests.helpers.training_steps import config_of_command
from vl_plugins.errors import UserError
from vl_plugins.integrations.pytorch_metric_learning import main, parse_config, read_config
from vl_plugins.integrations.pytorch_metric_learning.config import StageConfig


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        yaml.safe_dump(settings(loss={"name": "triplet_hn", "margin": 0.3}, reducer="SumReducer", stages=[{}]))
    )
    return path


def test_stages_change_what_they_name():
    first = {"epochs": 30, "freeze": ["image_trunk"], "lr_scheduler": {"name": "StepLR", "step_size": 15}}
    second = {"epochs": 15, "freeze": [], "lr_scheduler": None, "optimizer": {"name": "Adam", "lr": 2e-5}}
    config = parse_config(settings(training=first, stages=[{}, second]))
    assert config.schedule == [config.training, StageConfig(**second)]
    assert config.training == StageConfig(**first, optimizer={"name": "Adam", "lr": 0.01})
    assert parse_config(settings(training=first)).schedule == [config.training]


def test_values_refer_to_others():
    """The second stage takes its own number of epochs."""
    scheduler = {"name": "CosineAnnealingLR", "T_max": "${..epochs}", "eta_min": "${dim}"}
    stages = [{}, {"epochs": 5}, {"lr_scheduler": {"T_max": "${training.epochs}"}}]
    config = parse_config(settings(training={"epochs": 3, "lr_scheduler": scheduler}, stages=stages), {"dim": 4})
    assert [stage.lr_scheduler["T_max"] for stage in config.schedule] == [3, 5, 3]
    assert config.training.lr_scheduler["eta_min"] == 4


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "a/${oc.env:HOME}/b", "${${seed}:HOME}", "${.${oc.env:HOME}}"])
def test_nothing_else_is_resolved(value):
    with pytest.raises(UserError, match="only references to other values"):
        parse_config(settings(loss={"name": "unified", "options": [{"a": value}]}))


def test_a_file_cannot_name_a_class_by_its_module(tmp_path):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(settings(miner="os:system", loss={"name": "${miner}"})))
    with pytest.raises(UserError, match="files name registered losses only"):
        read_config(tmp_path / "a.yaml", {"loss.scale": 1})
    assert read_config(tmp_path / "a.yaml", {"loss": "own:Loss"}).loss == "own:Loss"


def test_values_of_the_command_line(config):
    def read(*argv):
        return config_of_command(["--config", config, *argv])

    options = ["--loss-kwargs", "triplet_weight=nca", "offset=1"]
    assert read("--loss", "goal", *options).loss == {"name": "goal", "triplet_weight": "nca", "offset": 1}
    assert read("--loss-kwargs", "warmup_steps=5").loss == {"name": "triplet_hn", "margin": 0.3, "warmup_steps": 5}
    changed = read(
        *("--train-data", "a-{0..1}.tar::b.tar", "--val-data", "b.tar"),
        *("--set", "training.optimizer.lr=1e-5", "training.freeze=['text_trunk']", "one_set=true"),
        *("--set", "miner=BatchHardMiner", "head={name: set, num_slots: 2}", "dim=8", "distance=null"),
        *("--set", "loss.distance.p=1", "loss.distance.name=LpDistance", "stages.0.epochs=4"),
    )
    assert changed.loss == {"name": "triplet_hn", "margin": 0.3, "distance": {"name": "LpDistance", "p": 1}}
    assert changed.schedule[0].epochs == 4
    assert (changed.data.train, changed.data.val, changed.dim) == ("a-{0..1}.tar::b.tar", "b.tar", 8)
    assert changed.training.optimizer == {"name": "Adam", "lr": 1e-5}
    assert changed.training.freeze == ["text_trunk"]
    assert changed.one_set is True
    assert (changed.miner, changed.head, changed.distance) == ("BatchHardMiner", {"name": "set", "num_slots": 2}, None)


def test_files(config, monkeypatch):
    config.write_text(yaml.safe_dump(settings()).replace("lr: 0.01", "lr: 1e-4"))
    assert read_config(config).training.optimizer["lr"] == 1e-4, "which YAML 1.1 takes for text"
    assert parse_config(asdict(read_config(config))) == read_config(config)
    config.write_text("dim: 1\ndim: 2")
    with pytest.raises(UserError, match="a key is given twice"):
        read_config(config)
    monkeypatch.chdir("/")
    assert read_config("toy.yaml").loss["name"] == "unified"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--set", "dim"], "--set: expected key.path=value, got 'dim'"),
        (["--set", "dim={"], "--set dim={: "),
        (["--set", "data.epochs=3"], "data.epochs: Key 'epochs' not in 'DataConfig'"),
        (["--set", "data.max_image_pixels=-1"], "max_image_pixels must be at least 0, which sets no limit; got -1"),
        (["--precision", "fp16"], "--precision fp16: not on the device cpu"),
        ([], "1 of 1 shards do not exist: none.tar"),
    ],
)
def test_errors_are_one_line(config, tmp_path, capsys, argv, message):
    AcceleratorState._reset_state(reset_partial_state=True)
    assert main(["--config", str(config), "--device", "cpu", "--out", str(tmp_path / "run"), *argv]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("vl_plugins: error: ")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()
