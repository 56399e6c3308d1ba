"""What GitHub's workflows call is there."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_targets_and_tests_exist(file):
    makefile = (ROOT / "Makefile").read_text()
    commands = []
    for job in yaml.safe_load(file.read_text())["jobs"].values():
        assert job["timeout-minutes"] > 0
        for step in job["steps"]:
            assert ("run" in step) is not ("uses" in step)
            commands.append(step.get("run", ""))
    for target in re.findall(r"^make (\S+)", "\n".join(commands), flags=re.MULTILINE):
        assert f"\n{target}:" in makefile or target == ".venv/installed"
    for path in re.findall(r" (tests/\S+)", "\n".join(commands)):
        assert (ROOT / path).exists()
