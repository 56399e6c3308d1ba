"""``make check`` finds the tests of every source file."""

from pathlib import Path

import pytest

from tests.of_changes import ROOT, TESTS, related_tests

SOURCES = []
for part in ("vl_plugins", "integrations", "benchmarks"):
    for file in sorted((ROOT / part).rglob("*.py")):
        is_linked = part == "vl_plugins" and file.is_relative_to(ROOT / "vl_plugins" / "integrations")
        if file.stem not in ("__init__", "__main__") and not is_linked:
            SOURCES.append(file.relative_to(ROOT))


def test_every_source_file_has_some_but_few():
    assert len(SOURCES) > 100
    for source in SOURCES:
        test_files = [file for file in related_tests([source]) if file.parts[0] == "tests"]
        assert 1 <= len(test_files) <= 3, source
    for pattern, test_files in TESTS.items():
        assert any(source.match(pattern) for source in SOURCES), pattern
        assert all((ROOT / file).is_file() for file in test_files), pattern


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("tests/data/test_index.py", ["tests/data/test_index.py"]),
        ("tests/helpers/processes.py", []),
        ("vl_plugins/data/captions.py", ["tests/data/test_captions.py", "vl_plugins/data/captions.py"]),
        ("integrations/open_clip/loss.py", ["tests/integrations/open_clip/test_loss.py"]),
        ("vl_plugins/errors.py", ["tests/test_errors.py", "vl_plugins/errors.py"]),
        ("vl_plugins/losses/cross_modal.py", ["tests/losses/test_cross_modal.py"]),
    ],
)
def test_of_one_file(changed, expected):
    assert [file.as_posix() for file in related_tests([Path(changed)])] == expected
