import json
import subprocess
import sys

import pytest
from pytorch_metric_learning.losses import BaseMetricLossFunction

from vl_plugins.cli import main
from vl_plugins.commands import losses
from vl_plugins.errors import UserError
from vl_plugins.registry import list_losses, options_of


def test_every_loss_names_its_equation_and_paper():
    assert all(description["equation"] and description["paper"] for description in losses.describe_losses())
    assert options_of(BaseMetricLossFunction) == losses.SHARED_OPTIONS


def test_a_paragraph_for_each_loss(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["losses"]) == 0
    paragraphs = capsys.readouterr().out.strip().split("\n\n")
    assert [paragraph.partition("\n")[0] for paragraph in paragraphs[:-2]] == list(list_losses())
    assert paragraphs[list_losses().index("unified")] == (
        "unified\n"
        "  Contrastive loss with the margin of the triplet loss, over all negatives of an anchor (Eq. 5).\n"
        "  options   margin=0.2, scale=50.0, weights=None, relative=None, symmetric=True, tiled=None\n"
        "  equation  Eq. 5, 24-27\n"
        "  paper     Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval"
    )
    assert "reducer=None, distance=None" in " ".join(paragraphs[-2].split())
    assert "such as NTXentLoss" in paragraphs[-1]


def test_json(capsys):
    assert main(["losses", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(losses.describe_losses(), default=repr))


def test_lines_fit_the_terminal():
    lines = losses.format_descriptions(losses.describe_losses(), width=60).splitlines()
    assert len(lines) > 20
    assert max(map(len, lines)) <= 60


class ForeignLoss:
    """A loss of another package.

    More about it.
    """

    def __init__(self, weights, margin=0.1):
        pass


def test_a_loss_without_equation_and_paper():
    description = losses.describe_class("foreign", ForeignLoss)
    text = losses.format_descriptions([description], 80)
    assert text.startswith("foreign\n  A loss of another package.\n  options   weights, margin=0.1\n\n")


def test_a_broken_loss_does_not_hide_the_others(monkeypatch):
    find = losses.find

    def broken(kind, name):
        if name == "vlc":
            raise UserError("loss 'vlc' is provided by two distributions")
        return find(kind, name)

    monkeypatch.setattr(losses, "find", broken)
    text = losses.format_descriptions(losses.describe_losses(), 80)
    assert "\n\nunified\n" in text
    assert "\n\nvlc\n  error     loss 'vlc' is provided by two distributions\n\n" in text


@pytest.mark.parametrize("arguments", ["losses --help", "--help", "--version"])
def test_no_slow_import(arguments):
    code = """
import atexit, sys
from vl_plugins.cli import main
slow = ("torch", "pytorch_metric_learning", "sklearn", "numpy")
atexit.register(lambda: print("imported:", [name for name in slow if name in sys.modules]))
sys.exit(main(sys.argv[1:]))
"""
    finished = subprocess.run([sys.executable, "-c", code, *arguments.split()], capture_output=True, text=True)
    assert (finished.returncode, finished.stdout.splitlines()[-1]) == (0, "imported: []"), finished.stderr
