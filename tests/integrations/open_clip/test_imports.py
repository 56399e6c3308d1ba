"""What is imported before a mistake on the command line is answered: torch takes seconds."""

import sys

import pytest

from tests.helpers.open_clip_training import run

CODE = """
import sys
from vl_plugins.integrations.open_clip.launcher import main
status = main(sys.argv[1:])
print(status, [name for name in ("torch", "open_clip") if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("flags", "imported", "message"),
    [
        (["--bogus"], [], "unrecognized arguments: --bogus"),
        (["--loss", "unified", "--loss-kwargs", "temperature=1"], ["torch"], "unknown option temperature"),
        (["--loss", "unifed"], ["torch"], "did you mean 'unified'?"),
    ],
)
def test_mistakes_are_answered_early(tmp_path, flags, imported, message):
    finished = run([sys.executable, "-c", CODE, *flags], tmp_path)
    assert finished.stdout == f"2 {imported}\n"
    assert message in finished.stderr
