"""Help, and errors in a command line, come before torch is imported, which takes seconds."""

import json
import subprocess
import sys

WITHOUT_TORCH = """
import contextlib, importlib, io, json, os, sys
sys.modules["torch"] = None  # importing it raises an error
found = []
for rank, module, arguments in json.loads(sys.argv[1]):
    os.environ["RANK"] = rank
    with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.redirect_stdout(io.StringIO()):
        try:
            status = importlib.import_module(module).main(arguments)
        except SystemExit as help:
            status = help.code
    found.append([status, stderr.getvalue()])
print(json.dumps(found))
"""
LAUNCHER = "vl_plugins.integrations.open_clip.launcher"
OURS = "vl_plugins.cli"
ERRORS = [
    (LAUNCHER, "--model vl-tiny --epochs many", "argument --epochs: invalid int value: 'many'"),
    (LAUNCHER, "--config no.yaml", "No such file or directory: 'no.yaml'"),
    (OURS, "evaluate --checkpoint openai --shards no.tar", "1 of 1 shards do not exist: no.tar"),
    (OURS, f"plot attention --checkpoint {__file__} --shards no.tar", "1 of 1 shards do not exist: no.tar"),
]


def test_before_torch_is_imported():
    """Each ends with status 2 and one line, from whichever process."""
    commands = [("0", module, command_line.split()) for module, command_line, _ in ERRORS]
    commands += [("1", LAUNCHER, ["--config", "no.yaml"]), ("1", OURS, "evaluate --features a --shards no.tar".split())]
    commands += [("0", OURS, ["--version"]), ("0", OURS, ["evaluate", "--help"])]
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    *found, launcher_of_others, ours_of_others, version, help_text = json.loads(finished.stdout)
    for status, error in (launcher_of_others, ours_of_others):
        assert (status, error.count("\n")) == (2, 1)
    assert version == help_text == [0, ""]
    assert len(found) == len(ERRORS)
    for (_, command_line, message), (status, error) in zip(ERRORS, found, strict=True):
        assert (status, error.count("\n")) == (2, 1), command_line
        assert message in error
