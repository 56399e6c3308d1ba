"""A loss of another distribution is known to both hosts by name, and one of pytorch-metric-learning by its class."""

import pytest
import torch
from pytorch_metric_learning.distances import LpDistance

from vl_plugins.integrations.open_clip.launcher import main
from vl_plugins.registry import create

LOSS = """
from pytorch_metric_learning.losses import ContrastiveLoss

class EuclideanPull(ContrastiveLoss):
    "Pulls positives together, as a loss of one direction."

    def __init__(self, strength=1.0, **kwargs):
        super().__init__(pos_margin=0, neg_margin=strength, **kwargs)

    def forward(self, *args, **kwargs):
        print("called with strength", self.neg_margin)
        return super().forward(*args, **kwargs)
"""


FLAGS = "--model vl-tiny --device cpu --precision fp32 --dataset-type synthetic --train-num-samples 2"
FLAGS += " --batch-size 2 --workers 0 --epochs 1"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The distribution as pip leaves it."""
    metadata = tmp_path / "site" / "euclidean_pull-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: euclidean-pull\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vl_plugins.losses]\neuclidean_pull = euclidean_pull:EuclideanPull\n")
    (tmp_path / "site" / "euclidean_pull.py").write_text(LOSS)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("installed")
def test_both_hosts_find_it(capfd):
    loss = create("loss", {"name": "euclidean_pull", "strength": 0.25, "distance": "LpDistance"})
    assert type(loss.distance) is LpDistance
    loss(torch.eye(2), torch.arange(2), ref_emb=torch.eye(2), ref_labels=torch.arange(2))
    assert "called with strength 0.25" in capfd.readouterr().out
    assert main(f"{FLAGS} --loss euclidean_pull --loss-kwargs strength=0.5".split()) == 0
    assert capfd.readouterr().out.count("called with strength 0.5") == 2, "for images and for texts"


def test_a_loss_of_pytorch_metric_learning(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    assert main(f"{FLAGS} --loss NTXentLoss --loss-kwargs temperature=0.2 --miner BatchHardMiner".split()) == 0
    assert "NTXentLoss(temperature=0.2), BatchHardMiner()" in caplog.text
