"""The other tests of this folder with the lowest version that pyproject.toml allows, in an environment of its own."""

import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytest.importorskip("sentence_transformers", minversion="6.0")


@pytest.mark.slow
def test_the_lowest_version(tmp_path):
    declared = [found for found in map(Requirement, requires("vl_plugins")) if found.name == "sentence-transformers"]
    (bound,) = declared[0].specifier
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*install, f"sentence-transformers=={bound.version}"], check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = [sys.executable, "-c", "import sentence_transformers; print(sentence_transformers.__version__)"]
    assert subprocess.run(found, env=environment, capture_output=True, text=True).stdout.startswith(bound.version)
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", Path(__file__).parent]
    subprocess.run(tests, env=environment, check=True)
