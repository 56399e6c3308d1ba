"""A loss of another distribution is known to both hosts by its name, and on command lines by its class."""

import sys

import pytest
import torch
import yaml

from tests.helpers.pml_settings import settings
from vl_plugins.cli import main as vl_plugins
from vl_plugins.errors import UserError
from vl_plugins.integrations.loading import load_model
from vl_plugins.integrations.open_clip.launcher import main as open_clip
from vl_plugins.integrations.pytorch_metric_learning import Run, parse_config
from vl_plugins.integrations.pytorch_metric_learning import main as pml

LOSS = """
from pytorch_metric_learning.losses import ContrastiveLoss

class EuclideanPull(ContrastiveLoss):
    pass
"""


FLAGS = "--model vl-tiny --device cpu --precision fp32 --dataset-type synthetic --train-num-samples 2"
FLAGS += " --batch-size 2 --workers 0 --epochs 1"


def install(site, module, source, **losses):
    """Leave a distribution as pip does."""
    metadata = site / f"{module}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    names = "".join(f"{name} = {module}:{loss}\n" for name, loss in losses.items())
    (metadata / "entry_points.txt").write_text(f"[vl_plugins.losses]\n{names}")
    (site / f"{module}.py").write_text(source)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    source = "from tests.helpers.losses import own_losses\nglobals().update(own_losses())\n"
    install(tmp_path / "site", "own_losses", source, squared_hinge="SquaredHinge", sigmoid="SigmoidLoss")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)


def test_no_file_names_a_module(toy_shards, tmp_path, monkeypatch, capsys):
    """Command lines import the module of a loss; what a file names is not imported, wherever it stands in the file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\n{LOSS}")
    name, marker = "planted:EuclideanPull", tmp_path / "marker"
    nested = {"name": "smooth_chamfer", "base": name}
    files = {
        open_clip: [{"loss": name}, {"train_data_upsampling_factors": ["1", f"--loss={name}"]}],
        pml: [settings(toy_shards, loss=loss) for loss in (name, {"name": name}, nested)],
    }
    flags = {open_clip: FLAGS, pml: "--device cpu --out run"}
    for host, contents in files.items():
        for content in contents:
            (tmp_path / "file.yaml").write_text(yaml.safe_dump(content))
            assert host(f"--config file.yaml {flags[host]}".split()) == 2
            line = capsys.readouterr().err.splitlines()[-1]
            assert line.startswith("vl_plugins: error: ")
            assert name in line
    Run(parse_config(settings(toy_shards, training={"epochs": 1})), tmp_path / "trained").train()
    saved = torch.load(tmp_path / "trained" / "latest.pt", weights_only=True)
    saved["config"]["loss"] = name
    torch.save(saved, "changed.pt")
    with pytest.raises(UserError, match=f"loss '{name}': files name registered losses only"):
        load_model("changed.pt")
    assert not marker.exists()
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(settings(toy_shards, training={"epochs": 1})))
    assert pml(f"--config file.yaml --device cpu --out run --loss {name}".split()) == 0
    assert marker.exists()
    assert open_clip(f"{FLAGS} --loss {name} --loss-kwargs neg_margin=0.5".split()) == 0


def test_plot_gradients_finds_a_module_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "here.py").write_text("from vl_plugins.losses import VLCLoss as Own\n")
    assert vl_plugins("plot gradients here:Own scale=10 --out own.svg".split()) == 0
    assert "here:Own(scale=10)" in (tmp_path / "own.svg").read_text()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "option"),
    [("squared_hinge", "tiled=True"), pytest.param("sigmoid", "bias=-5", marks=pytest.mark.slow)],
)
def test_a_loss_of_ones_own_trains_in_both_hosts(name, option, toy_shards, tmp_path, caplog):
    """Those of the guide: with several captions, a miner, a reducer, and the scale of the model."""
    caplog.set_level("INFO")
    data = f"--train-data {toy_shards}/toy-train-{{000000..000001}}.tar --captions-per-image 2"
    flags = FLAGS.replace("--dataset-type synthetic --train-num-samples 2", data)
    mined = "--miner MultiSimilarityMiner --reducer AvgNonZeroReducer"
    for options in (f"--loss-kwargs {option} scale=learned", f"--loss-kwargs scale=10 {mined}"):
        assert open_clip(f"{flags} --loss {name} {options} --logs {tmp_path / options[-5:]}".split()) == 0
    assert f"Training with the loss of vl_plugins: {name};" in caplog.text
    key, value = option.split("=")
    loss = {"name": name, key: yaml.safe_load(value.lower())}
    Run(parse_config(settings(toy_shards, loss=loss, training={"epochs": 1})), tmp_path / "run").train()
    (row,) = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    assert "rsum" in row
