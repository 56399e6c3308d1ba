"""What all pages of the documentation have in common, and the commands of the pages that test_readme.py leaves out."""

import ast
import importlib.metadata
import importlib.util
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from vl_plugins.cli import build_parser
from vl_plugins.cli import main as vl_plugins
from vl_plugins.integrations.open_clip.flags import parse_args

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "configs" / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]

EXTRAS = set(importlib.metadata.metadata("vl_plugins").get_all("Provides-Extra"))


def page_id(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)


def commands(page):
    """Return the commands of the ``bash`` blocks, split."""
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [line for line in lines if line]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 180


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_code_can_be_parsed(page):
    for block in blocks(page, "python"):
        ast.parse(textwrap.dedent(block))
    for command in commands(page):
        if command[0] == "vl-plugins":
            build_parser().parse_args(command[1:])
        elif command[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(command[2]), command
        elif command[:2] == ["pip", "install"]:
            extras = re.search(r"\[(.+)\]", command[-1])
            assert extras is None or set(extras[1].split(",")) <= EXTRAS, command


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    """mkdocs checks the links between pages; this checks what it does not see."""
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


def test_commands_of_the_first_page_fit_together(tmp_path, monkeypatch):
    """Data is made with fewer scenes; names that later commands give exist then, or will."""
    monkeypatch.chdir(tmp_path)
    *_, toy, shards, train, evaluate, plot = commands(ROOT / "docs" / "index.md")
    assert vl_plugins([*toy[1:-1], "16", "--val", "4", "--test", "4"]) == 0
    assert vl_plugins([*shards[1:-1], "4"]) == 0
    options = parse_args(train[3:])
    assert options.loss == "unified"
    assert toy[-1] == "2048", "4 shards of"
    assert shards[-1] == "512"
    assert options.train_data == "toy-shards/toy-train-{000000..000003}.tar"
    arguments = build_parser().parse_args(evaluate[1:])
    assert all(Path(file).is_file() for file in (options.val_data, arguments.shards))
    run = f"{options.logs.removeprefix('./').rstrip('/')}/{options.name}"
    assert arguments.checkpoint == [f"{run}/checkpoints/epoch_{options.epochs}.pt"]
    assert build_parser().parse_args(plot[1:]).runs == [run]
