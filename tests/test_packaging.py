"""What a plain installation brings, and that nothing is missing from it."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PACKAGES = {"vl_plugins": ROOT / "vl_plugins", "vl_plugins.integrations": ROOT / "integrations"}
PACKAGES |= {"vl_plugins.configs": ROOT / "configs"}

# Whatever an extra brings. A module is found to be missing where None stands for it.
EXTRAS = ("open_clip", "open_clip_train", "webdataset", "PIL", "timm", "matplotlib", "yaml", "eccv_caption", "pandas")
EXTRAS += (
    "msgspec",
    "omegaconf",
    "datasets",
    "pyarrow",
    "safetensors",
    "clip_benchmark",
    "triton",
    "transformers",
    "accelerate",
    "tensorboard",
)


def python(code, *arguments, path=None):
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    finished = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(install):
    """A built wheel, unpacked as pip does."""
    return install(".")


def modules():
    found = set()
    for package, folder in PACKAGES.items():
        for file in folder.rglob("*.py"):
            if "__pycache__" not in file.parts:
                parts = file.relative_to(folder).with_suffix("").parts
                found.add(".".join([package, *parts]).removesuffix(".__init__"))
    return found


def test_the_wheel_holds_every_module_and_configuration(wheel):
    expected = modules()
    assert len(expected) > 30
    assert not (wheel / "benchmarks").exists()
    for name in expected:
        path = wheel.joinpath(*name.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), name
    for pattern in ("*.jinja", "*.json"):
        for file in (ROOT / "vl_plugins").rglob(pattern):
            assert (wheel / file.relative_to(ROOT)).is_file(), file
    for file in (ROOT / "configs").rglob("*"):
        if file.suffix in (".json", ".yaml"):
            assert (wheel / "vl_plugins" / "configs" / file.relative_to(ROOT / "configs")).is_file(), file


def test_every_module_of_the_wheel_can_be_imported(wheel):
    names = sorted(name for name in modules() if not name.endswith("__main__"))
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; import vl_plugins; "
    output = python(code + "print(vl_plugins.__file__)", *names, path=wheel)
    assert Path(output.strip()).is_relative_to(wheel)


def test_what_needs_no_extra_works_without_any():
    code = f"""
import sys
sys.modules |= dict.fromkeys({EXTRAS!r})
from vl_plugins import create_loss, list_losses
from vl_plugins.cli import main
for name in list_losses():
    create_loss(name)
import vl_plugins.encoders, vl_plugins.functional, vl_plugins.losses, vl_plugins.retrieval
assert main(["losses"]) == 0
"""
    assert "unified" in python(code)


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["toy", "--out", "no-such-folder"], "data"),
        (["evaluate", "--model", "m", "--checkpoint", "c", "--shards", "s"], "open-clip"),
        (["demo"], "open-clip"),
        (["shards", "hugging-face", "someone/birds", "--out", "no-such-folder"], "hub"),
    ],
)
def test_a_missing_extra_is_named(command, extra, tmp_path):
    code = f"""
import os, sys
os.chdir(sys.argv[1])
sys.modules |= dict.fromkeys({EXTRAS!r})
from vl_plugins.cli import main
assert main(sys.argv[2:]) == 2
"""
    finished = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), *command], capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    assert f"pip install 'vl_plugins[{extra}]'" in finished.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("host", "argv", "extra"),
    [
        ("open_clip.launcher", ["--loss", "unified"], "open-clip"),
        ("pytorch_metric_learning", ["--config", "toy.yaml"], "pml"),
    ],
)
def test_a_host_names_its_extra(host, argv, extra):
    code = f"""
import sys
sys.modules |= dict.fromkeys({EXTRAS!r})
from vl_plugins.integrations.{host} import main
assert main({argv!r}) == 2
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert f"pip install 'vl_plugins[{extra}]'" in finished.stderr


def test_declared_dependencies():
    always = [line for line in importlib.metadata.requires("vl_plugins") if "extra ==" not in line]
    assert sorted(line.partition(">")[0] for line in always) == ["pytorch-metric-learning", "torch"]
    extras = importlib.metadata.metadata("vl_plugins").get_all("Provides-Extra")
    assert set(extras) == {"open-clip", "pml", "data", "eval", "timm", "transformers", "hub", "all", "dev"}
    scripts = importlib.metadata.entry_points(group="console_scripts", name="vl-plugins")
    assert {script.value for script in scripts} == {"vl_plugins.cli:main"}


def test_the_lowest_versions_that_are_declared_are_tested():
    """Those of everything but ``dev``, which nobody needs to run it."""
    declared = {}
    for requirement in map(Requirement, importlib.metadata.requires("vl_plugins")):
        if not re.search(r"extra == .dev\b", str(requirement.marker)):
            for bound in requirement.specifier:
                if bound.operator == ">=":
                    declared.setdefault(canonicalize_name(requirement.name), set()).add(Version(bound.version))
    lines = [line.partition("#")[0].strip() for line in (ROOT / "tests" / "lowest.txt").read_text().splitlines()]
    pinned = {}
    for requirement in map(Requirement, filter(None, lines)):
        (bound,) = requirement.specifier
        if bound.operator == "==":
            pinned[canonicalize_name(requirement.name)] = {Version(bound.version)}
    del pinned["torchvision"]  # has to be that of torch, and is no dependency by itself
    assert len(declared) > 5
    assert pinned == declared
