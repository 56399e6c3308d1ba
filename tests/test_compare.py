"""The comparison of two versions finds what differs, and nothing else."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.compare.__main__ import main
from benchmarks.compare.differences import compare

ROOT = Path(__file__).parents[1]


@pytest.fixture
def changed_checkout(tmp_path):
    """The package with another formula of a loss."""
    checkout = tmp_path / "checkout"
    unwanted = shutil.ignore_patterns("__pycache__", "integrations", "configs")
    shutil.copytree(ROOT / "vl_plugins", checkout / "vl_plugins", ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    file = checkout / "vl_plugins" / "losses" / "triplet.py"
    formula = "return (self.margin + negative - positive).relu()"
    source = file.read_text()
    assert formula in source
    file.write_text(source.replace(formula, "return 2 * (self.margin + negative - positive).relu()"))
    return checkout


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_a_changed_formula_is_found(changed_checkout, capsys):
    """In the loss that has it; another one is the same."""
    case = "margin=0.0, two sets"
    assert main([str(changed_checkout), "--areas", "losses", "--cases", f"[ut][nr]i*/{case}"]) == 1
    printed = capsys.readouterr().out
    columns = {row.split()[0]: row.split()[1:4] for row in printed.splitlines() if row and row[0] not in "-d"}
    assert columns["unified"] == ["1", "0", "0"]
    assert columns["triplet_hn"][2] == columns["triplet_sh"][2] == "3"
    for quantity in ("value", "gradient of embeddings", "gradient of ref_emb"):
        assert f"- triplet_hn/{case}, {quantity}: " in printed


ONE = torch.tensor([1.0, float("nan")])


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            {"x": ONE, "text": "a", "error": "ValueError: a"},
            {"x": ONE + 0, "text": "a", "error": "ValueError: b"},
            None,
        ),
        ({"x": ONE}, {"x": ONE + 1e-6}, "g/case, x: 1 of 2 entries, by at most 9.5e-07"),
        ({"x": ONE}, {"x": torch.ones(2)}, "g/case, x: 1 of 2 entries, by at most inf"),
        ({"x": ONE}, {"x": ONE.double()}, "g/case, x: torch.float32 (2,), now torch.float64 (2,)"),
        ({"x": 1}, {"x": 2.5}, "g/case, x: 1 of 1 entries, by at most 1.5e+00"),
        ({"x": "a"}, {}, "g/case, x: 'a', now missing"),
        ({"error": "ValueError: a"}, {"error": "TypeError: a"}, "g/case, error: 'ValueError: a', now 'TypeError: a'"),
        (None, {"x": 1}, "g/case: only in the new version"),
    ],
)
def test_differences(old, new, line):
    results = [{} if quantities is None else {"g/case": quantities} for quantities in (old, new)]
    group = compare(*results, tolerance=0)["g"]
    assert group.differences == [line] * (line is not None)


def test_a_tolerance():
    """Relative to the largest entry, or to 1."""
    old, new = {"g/case": {"x": torch.tensor([1e3, 1.0])}}, {"g/case": {"x": torch.tensor([1e3, 1.5])}}
    assert compare(old, new, tolerance=1e-3)["g"].differences == []
    assert len(compare(old, new, tolerance=1e-4)["g"].differences) == 1
