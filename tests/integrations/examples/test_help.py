"""All examples answer ``--help``."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "integrations/examples"
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "scenes"))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_help(name, monkeypatch, capsys):
    if name == "sentence_transformers_trainer":
        pytest.importorskip("sentence_transformers")
    module = f"vl_plugins.integrations.examples.{name}"
    pytest.importorskip(module, exc_type=ImportError)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(module, run_name="__main__")
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}")


def test_there_are_examples():
    assert len(MODULES) == 6
