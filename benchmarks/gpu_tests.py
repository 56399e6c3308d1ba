"""The tests marked ``gpu``, in a process of their own."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STANDARD_ERROR = 2  # the file, also where sys.stderr is none
# pytest's report of a test ends with the error. An extra's error names the package too.
MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'|MissingExtraError: ([\w.]+) is not installed")


@dataclass
class TestReport:
    """Outcome of a test run.

    Attributes:
        passed: number of tests that passed.
        failed: names of tests and modules that failed.
        skipped: a line for each module or test that did not run, with its reason.
    """

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def files_with_gpu_tests(folder: Path) -> list[Path]:
    """Return the test files in a folder that use the marker ``gpu``, sorted."""
    files = []
    for file in sorted(folder.rglob("test_*.py")):
        if "mark.gpu" in file.read_text(encoding="utf-8"):
            files.append(file)
    return files


def run_gpu_tests(folder: Path, seconds: float) -> TestReport:
    """Run the tests marked ``gpu`` in a folder. Modules whose imports are missing are skipped, by name.

    pytest's own output goes to standard error.
    """
    if find_spec("pytest") is None:
        return TestReport(skipped=["all tests: pytest is not installed"])
    with tempfile.TemporaryDirectory() as results_folder:
        results = Path(results_folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--continue-on-collection-errors"]
        command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder.parent), "-p", "no:cacheprovider"]
        command += ["--junitxml", str(results)]
        command += [str(file) for file in files_with_gpu_tests(folder)]
        if not ends_within(seconds, command):
            return TestReport(failed=[f"all tests: not finished within {seconds:.0f} s"])
        if not results.exists():
            return TestReport(failed=["all tests: pytest ended without results"])
        return read_results(results)


def ends_within(seconds: float, command: Sequence[str]) -> bool:
    """Run a command with its output on standard error. After ``seconds``, end it with all processes it started."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=STANDARD_ERROR, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:  # also after Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return True


def read_results(file: Path) -> TestReport:
    """Read a report that pytest wrote with ``--junitxml``."""
    report = TestReport()
    reasons: dict[str, list[str]] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}".removeprefix("::")
        module = name.partition("::")[0]
        skip = case.find("skipped")
        problem = case.find("failure")
        if problem is None:
            problem = case.find("error")
        if problem is not None:
            missing = MISSING.search(problem.text or "")
            if missing:
                package = missing[1] or missing[2]
                reasons.setdefault(f"{module}: {package} is not installed", []).append(name)
            else:
                report.failed.append(name)
        elif skip is not None:
            reasons.setdefault(f"{module}: {skip.get('message')}", []).append(name)
        else:
            report.passed += 1
    for reason, names in reasons.items():
        report.skipped.append(f"{reason} ({len(names)})")
    return report
