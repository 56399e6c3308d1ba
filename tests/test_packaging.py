"""What a plain installation brings, and that nothing is missing from it."""

import importlib.metadata
import importlib.util
import json
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

SUFFIXES = {".py", ".jinja", ".json", ".yaml", ".typed"}

# Whatever an extra brings. A module is found to be missing where None stands for it.
EXTRAS = ("open_clip", "open_clip_train", "webdataset", "PIL", "timm", "matplotlib", "yaml", "eccv_caption", "pandas")
EXTRAS += ("msgspec", "omegaconf", "datasets", "pyarrow", "safetensors", "clip_benchmark", "transformers")
EXTRAS += ("accelerate", "tensorboard", "lightning", "ray", "dask", "distributed", "torchmetrics")
EXTRAS += ("sentence_transformers",)


def modules():
    files = [file for part in ("vl_plugins", "integrations", "configs") for file in (ROOT / part).rglob("*.py")]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files}
    return {name if name.startswith("vl_plugins") else f"vl_plugins.{name}" for name in names}


def test_wheels_of_the_checkout_and_of_the_sdist_have_the_same_files(wheel, sdist_wheel):
    files, same = (
        {
            path.relative_to(site).as_posix()
            for path in site.rglob("*")
            if path.is_file() and ".dist-info" not in str(path)
        }
        for site in (wheel, sdist_wheel)
    )
    files, same = ({name for name in names if not name.endswith(".pyc")} for names in (files, same))
    assert files == same
    expected = {file.relative_to(ROOT) for file in (ROOT / "vl_plugins").rglob("*") if file.suffix in SUFFIXES}
    for folder in ("integrations", "configs"):
        found = (ROOT / folder).rglob("*")
        expected |= {"vl_plugins" / file.relative_to(ROOT) for file in found if file.suffix in SUFFIXES}
    assert len(expected) > 100
    assert {file.as_posix() for file in expected} == {name for name in files if name.endswith(tuple(SUFFIXES))}


IMPORTS = f"""
import contextlib, importlib, io, json, os, sys
names, commands = map(json.loads, sys.argv[1:])
sys.modules |= dict.fromkeys({EXTRAS!r})
from vl_plugins import create_loss, list_losses
from vl_plugins.cli import main
for name in list_losses():
    create_loss(name)
import vl_plugins.encoders, vl_plugins.losses, vl_plugins.retrieval
with contextlib.redirect_stdout(io.StringIO()) as stdout:
    assert main(["losses"]) == 0
errors = []
for module, arguments in commands:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        assert importlib.import_module(module).main(arguments) == 2
    errors.append(stderr.getvalue())
written = os.listdir()
for name in [name for name in sys.modules if name in {EXTRAS!r} or name.startswith("vl_plugins")]:
    del sys.modules[name]
for name in names:
    importlib.import_module(name)
print(json.dumps([stdout.getvalue(), errors, written, sys.modules["vl_plugins"].__file__]))
"""
CLI = "vl_plugins.cli"
MISSING = [
    ("data", CLI, ["toy", "--out", "no-such-folder"]),
    ("data", CLI, ["evaluate", "--model", "m", "--checkpoint", "c", "--shards", "s"]),
    ("open-clip", CLI, ["demo"]),
    ("hub", CLI, ["shards", "hugging-face", "someone/birds", "--out", "no-such-folder"]),
    ("open-clip", "vl_plugins.integrations.open_clip.launcher", ["--loss", "unified"]),
    ("pml", "vl_plugins.integrations.pytorch_metric_learning", ["--config", "toy.yaml"]),
]


@pytest.fixture(scope="module")
def imported(wheel, tmp_path_factory):
    """What a process prints that has the wheel, first without any extra and then with all of them."""
    names = sorted(name for name in modules() if not name.endswith("__main__"))
    if importlib.util.find_spec("sentence_transformers") is None:  # only `make test` installs it
        names = [name for name in names if "sentence_transformers" not in name]
    arguments = [json.dumps(names), json.dumps([command for _, *command in MISSING])]
    finished = subprocess.run(
        [sys.executable, "-c", IMPORTS, *arguments],
        cwd=tmp_path_factory.mktemp("cwd"),
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_what_needs_no_extra_works_without_any(imported):
    losses, _, _, _ = imported
    assert "unified" in losses


def test_a_missing_extra_is_named(imported):
    _, errors, written, _ = imported
    for (extra, _, arguments), error in zip(MISSING, errors, strict=True):
        assert f"pip install 'vl_plugins[{extra}]'" in error, arguments
    assert written == []


def test_every_module_of_the_wheel_can_be_imported(imported, wheel):
    assert Path(imported[-1]).is_relative_to(wheel)


def test_declared_dependencies():
    always = [line for line in importlib.metadata.requires("vl_plugins") if "extra ==" not in line]
    assert sorted(line.partition(">")[0] for line in always) == ["pytorch-metric-learning", "torch"]
    extras = importlib.metadata.metadata("vl_plugins").get_all("Provides-Extra")
    expected = "open-clip pml data eval timm transformers lightning hub ray dask all dev docs"
    expected += " sentence-transformers torchmetrics s3 eccv judge peers"
    assert set(extras) == set(expected.split())
    scripts = importlib.metadata.entry_points(group="console_scripts", name="vl-plugins")
    assert {script.value for script in scripts} == {"vl_plugins.cli:main"}


def test_the_lowest_versions_that_are_declared_are_tested():
    """Those of everything but ``dev`` and ``docs``, ``peers``, whose rules change with their versions, and
    sentence-transformers, which needs transformers 5.
    """
    declared = {}
    for requirement in map(Requirement, importlib.metadata.requires("vl_plugins")):
        if not re.search(r"extra == .(dev|docs|peers|sentence-transformers)\b", str(requirement.marker)):
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


def test_shards_are_written_and_checked_without_torch():
    """It takes half a gigabyte, in each worker process too."""
    code = "import sys; from vl_plugins.data import expand_shards, read_table, verify_shards, write_shards; "
    code += "import vl_plugins.data.inspection; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
