"""All pages: Python runs as it stands on toy data, commands can be parsed, links lead somewhere."""

import importlib.metadata
import importlib.util
import inspect
import re
import shlex
import shutil
from pathlib import Path

import open_clip
import pytest
import torch
from accelerate.commands.launch import launch_command_parser

from benchmarks import claims, study
from tests.helpers.training_steps import config_of_command, step_of_each_stage
from vl_plugins.cli import build_parser, main
from vl_plugins.integrations.examples.lightning_module import RetrievalModule
from vl_plugins.integrations.open_clip.flags import REFUSALS, flag, parse_args
from vl_plugins.integrations.pytorch_metric_learning.command_line import build_parser as build_towers_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
EXTRAS = set(importlib.metadata.metadata("vl_plugins").get_all("Provides-Extra"))
PARSERS = {
    "vl_plugins.integrations.open_clip": parse_args,
    "vl_plugins.integrations.pytorch_metric_learning": lambda words: build_towers_parser().parse_args(words),
    "vl_plugins.cli": lambda words: build_parser().parse_args(words),
    "benchmarks.claims": lambda words: claims.build_parser().parse_args(words),
    "benchmarks.study": lambda words: study.build_parser().parse_args(words),
}

EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page, language):
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)


def commands(page):
    """Return the commands of the ``bash`` blocks, split into words."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture
def folder(tmp_path, toy_scenes, toy_shards, monkeypatch):
    """The current folder, with what the pages use: toy data and a checkpoint with a set head."""
    files = Path(__file__).parent / "files_v0_2"
    (tmp_path / "toy").symlink_to(toy_scenes)
    (tmp_path / "toy-shards").symlink_to(toy_shards)
    shutil.copytree(files / "logs" / "set", tmp_path / "logs" / "sets")
    shutil.copytree(files / "logs" / "triplet", tmp_path / "logs" / "run")
    shutil.copytree(files / "model", tmp_path / "model")
    open_clip.add_model_config(tmp_path / "model" / "tiny.json")
    monkeypatch.chdir(tmp_path)


# tests/integrations/sentence_transformers/test_guide.py runs the guide, with a small model in place of OpenAI's.
# tests/integrations/test_judge_guide.py runs the scripts of judge.md in the same way.
RUN = [
    page
    for page in PAGES
    if blocks(page, "python") and page.name not in ("sentence_transformers.md", "judge.md", "CONTRIBUTING.md")
]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_python(page, folder):
    variables = {"__name__": page.stem}
    code = blocks(page, "python")
    if page.stem == "after_training":
        assert main(["encode", "logs/run", "toy/train", "pictures.npz"]) == 0
        if importlib.util.find_spec("faiss"):
            code += blocks(page, "py")
    for block in code:
        exec(compile(block, page.name, "exec"), variables)
        leaves = [value for value in variables.values() if isinstance(value, torch.Tensor) and value.requires_grad]
        assert all(leaf.grad.isfinite().all() and leaf.grad.any() for leaf in leaves if leaf.is_leaf)


def test_the_lightning_module_is_that_of_the_example():
    assert inspect.getsource(RetrievalModule) in (ROOT / "docs/guides/own_loop.md").read_text(encoding="utf-8")


@EACH_PAGE
def test_commands_can_be_parsed(page):
    for command in commands(page):
        if command[0] == "vl-plugins":
            build_parser().parse_args(command[1:])
        elif command[0] in ("python", "torchrun"):
            module, *words = [word for word in command[command.index("-m") + 1 :] if word != "--"]
            if module in PARSERS:
                PARSERS[module](words)
            else:
                source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
                assert all(f'"{word}"' in source for word in words if word.startswith("--")), command
        elif command[0] == "accelerate":
            launched = launch_command_parser().parse_args(command[2:])
            assert launched.module
            assert importlib.util.find_spec(launched.training_script), command
        elif command[0] == "pip" and (extras := re.search(r"\[(.+)\]", command[-1])):
            assert set(extras[1].split(",")) <= EXTRAS, command
        elif command[0] == "make":
            assert f"\n{command[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")


@EACH_PAGE
def test_links_lead_somewhere(page):
    """Also on the pages that Sphinx does not read."""
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


def test_flags_exist(capsys):
    """Those between backticks, of ours and of open_clip."""
    for name in (
        "encode",
        "evaluate",
        "export",
        "merge",
        "shards coco",
        "shards table",
        "shards hugging-face",
        "shards info",
        "plot attention",
    ):
        with pytest.raises(SystemExit):
            build_parser().parse_args([*name.split(), "--help"])
    for parse in PARSERS.values():
        with pytest.raises(SystemExit):
            parse(["--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    others = {"--train-num-samples", "--loss-dist-impl"}  # open_clip's, which a page says not to use
    pages = [page for page in PAGES if page.stem not in ("from_0_2_to_0_3", "from_0_3_to_0_4", "CONTRIBUTING")]
    named = {flag for page in pages for flag in re.findall(r"`(--[a-z-]+)", page.read_text(encoding="utf-8"))}
    assert len(named) > 20
    assert named - others <= known


def test_the_guide_and_the_help_list_the_flags_that_raise_errors(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    epilog = capsys.readouterr().out.partition("flags of open_clip that raise an error beside ours:")[2]
    guide = (ROOT / "docs/guides/open_clip.md").read_text(encoding="utf-8")
    for beside, options, reason in REFUSALS:
        flags = ", ".join(f"`{flag(option)}`" for option in options)
        assert f"| `{beside}` | {flags} | {reason.replace('--loss siglip', '`--loss siglip`')} |" in guide
        assert all(flag(option) in epilog.split() for option in options)


def test_the_configuration_of_the_pml_guide(tmp_path):
    """Its stages train, with smaller encoders."""
    (content,) = blocks(ROOT / "docs/guides/pytorch_metric_learning.md", "yaml")
    path = tmp_path / "own.yaml"
    path.write_text(content)
    small = ["image.trunk.model=test_vit", "text.trunk.hidden_dim=32", "dim=32", "text.trunk.word_dim=16"]
    config = config_of_command(["--config", path, "--set", *small])
    assert [(stage.epochs, stage.freeze) for stage in config.schedule] == [(30, ["image_trunk"]), (15, [])]
    step_of_each_stage(config)
