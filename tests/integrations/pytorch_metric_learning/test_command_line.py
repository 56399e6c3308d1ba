"""The command line: what it changes in a file, and how it ends."""

import json
import logging

import pytest
import yaml

from tests.helpers.pml_settings import settings
from tests.helpers.training_steps import config_of_command
from vl_plugins.integrations.pytorch_metric_learning import main


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings(loss={"name": "triplet_hn", "margin": 0.3}, reducer="SumReducer")))
    return path


def read(config, *argv):
    return config_of_command(["--config", config, *argv])


def test_another_loss_has_options_of_its_own(config):
    assert read(config).loss == {"name": "triplet_hn", "margin": 0.3}
    assert read(config, "--loss", "goal", "--loss-kwargs", "triplet_weight=nca", "offset=1").loss == {
        "name": "goal",
        "triplet_weight": "nca",
        "offset": 1,
    }
    assert read(config, "--loss-kwargs", "warmup_steps=5").loss["margin"] == 0.3
    changed = read(config, "--set", "reducer.collect_stats=true", "miner=BatchHardMiner")
    assert changed.reducer == {"name": "SumReducer", "collect_stats": True}
    assert changed.miner == "BatchHardMiner"


def test_data_and_any_other_value(config):
    changed = read(
        *(config, "--train-data", "a-{0..1}.tar", "--val-data", "b.tar"),
        *("--set", "training.optimizer.lr=1e-5", "training.freeze=['text_trunk']", "--set", "dim=8"),
    )
    assert (changed.data.train, changed.data.val, changed.dim) == ("a-{0..1}.tar", "b.tar", 8)
    assert changed.training.optimizer == {"name": "Adam", "lr": 1e-5}
    assert changed.training.freeze == ["text_trunk"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--loss", "unifed"], "unknown loss 'unifed' (did you mean 'unified'?)"),
        (["--los", "unified"], "unrecognized arguments: --los unified"),
        (["--set", "miner.epsilon=1"], "miner must be a name or a mapping such as {name: NAME, option: value}"),
        (["--set", "dim"], "--set: expected key.path=value, got 'dim'"),
        (
            ["--set", "data.batchsize=1"],
            "data.batchsize: Key 'batchsize' not in 'DataConfig'. Did you mean: 'batch_size'?",
        ),
        ([], "data.train is missing: the shards to train on; --train-data names them too"),
    ],
)
def test_errors_are_one_line(config, tmp_path, capsys, argv, message):
    assert main(["--config", str(config), "--device", "cpu", "--out", str(tmp_path / "run"), *argv]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("vl_plugins: error: ")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_training_and_going_on(toy_shards, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vl_plugins"), "handlers", [])
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings(toy_shards, training={"epochs": 1})))
    monkeypatch.chdir(tmp_path)
    assert main(["--config", "tiny.yaml", "--device", "cpu"]) == 0
    rows = (tmp_path / "runs" / "tiny" / "results.jsonl").read_text()
    assert json.loads(rows)["epoch"] == 1
    assert main(["--config", "tiny.yaml", "--device", "cpu", "--resume"]) == 0
    assert (tmp_path / "runs" / "tiny" / "results.jsonl").read_text() == rows
    error = capsys.readouterr().err
    assert "epoch 1: 8 images, 40 captions" in error
    assert "going on after epoch 1 of 1" in error
    assert "RSUM" in error
    assert "faiss" not in error.lower()
