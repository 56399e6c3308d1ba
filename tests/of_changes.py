"""Print the tests of the files that differ from the last commit: ``python -m tests.of_changes``.

``make check`` runs them before a commit. A test file belongs to a source file if it is named after it, such as
``tests/data/test_index.py`` of ``vl_plugins/data/index.py``. Where there is none, the test files that import the module
belong to it, those first that name it most often. The whole suite is for ``make test``.
"""

import subprocess
from collections.abc import Iterable
from pathlib import Path

__all__ = ["changed_files", "tests_of"]

ROOT = Path(__file__).parents[1]
# Test files that are taken for a module without one of its own; more would take minutes.
MOST_IMPORTERS = 3


def changed_files() -> list[Path]:
    """Return the Python files that git lists as changed or new, relative to the checkout."""
    status = ["git", "status", "--porcelain", "--untracked-files=all", "--no-renames", "-z"]
    printed = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = []
    for entry in printed.split("\0"):
        file = Path(entry[3:])
        if file.suffix == ".py" and (ROOT / file).is_file():
            files.append(file)
    return files


def tests_of(files: Iterable[Path]) -> list[Path]:
    """Return the test files of some Python files, and modules whose doctests run, all relative to the checkout."""
    tests = []
    for file in files:
        if file.parts[0] == "tests":
            tests += [file] if file.name.startswith("test_") else []
            continue
        if file.parts[0] == "vl_plugins" and ">>>" in (ROOT / file).read_text(encoding="utf-8"):
            tests.append(file)
        tests += _named_after(file) or _importers(file)
    return list(dict.fromkeys(tests))


def _named_after(file: Path) -> list[Path]:
    """Return the test files with the name of a source file, from the folder that mirrors its own if it has any."""
    test_files = sorted((ROOT / "tests").rglob(f"test_{file.stem}.py"))
    mirrored = [test_file for test_file in test_files if test_file.parent.name == file.parent.name]
    return [test_file.relative_to(ROOT) for test_file in mirrored or test_files]


def _importers(file: Path) -> list[Path]:
    """Return the test files that name the module of a source file most often."""
    module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
    if not module.startswith(("vl_plugins", "benchmarks")):
        module = f"vl_plugins.{module}"
    counts = {}
    for test_file in sorted((ROOT / "tests").rglob("test_*.py")):
        mentions = test_file.read_text(encoding="utf-8").count(f"{module} ")
        if mentions:
            counts[test_file.relative_to(ROOT)] = mentions
    importers = sorted(counts, key=lambda test_file: -counts[test_file])
    return importers[:MOST_IMPORTERS]


if __name__ == "__main__":
    print("\n".join(map(str, tests_of(changed_files()))))
