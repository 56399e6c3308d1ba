"""Errors of the user, and checks of names and numbers."""

import json
import tarfile

import msgspec
import numpy as np
import pytest
import torch
import yaml

from vl_plugins.errors import (
    MissingExtraError,
    UserError,
    exit_status,
    message,
    number,
    one_of,
    require,
    user_errors,
)


def failing(error):
    def run():
        raise error

    return run


MISSING = "[Errno 2] No such file: 'a.tar'"


@pytest.mark.parametrize(
    ("run", "status", "line"),
    [
        (lambda: None, 0, ""),
        (lambda: 1, 1, ""),
        (failing(UserError("no such file")), 2, "vl-plugins demo: error: no such file\n"),
        (failing(FileNotFoundError(2, "No such file", "a.tar")), 2, f"vl-plugins demo: error: {MISSING}\n"),
        (failing(KeyboardInterrupt()), 130, "vl-plugins demo: interrupted\n"),
    ],
)
def test_exit_status(run, status, line, capsys):
    assert exit_status("vl-plugins demo", run) == status
    assert capsys.readouterr().err == line


def test_other_errors_are_bugs(monkeypatch):
    with pytest.raises(ValueError, match="a bug"):
        exit_status("vl-plugins demo", failing(ValueError("a bug")))
    monkeypatch.setenv("VL_PLUGINS_TRACEBACK", "1")
    with pytest.raises(UserError, match="no such file"):
        exit_status("vl-plugins demo", failing(UserError("no such file")))


def test_every_process_prints_its_own_line(monkeypatch, capsys):
    """Files on local disks may be missing in one process alone. Ctrl-C goes to all, and the first one prints it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert exit_status("vl-plugins demo", failing(UserError("no such file"))) == 2
    assert capsys.readouterr().err == "[rank 1] vl-plugins demo: error: no such file\n"
    assert exit_status("vl-plugins demo", failing(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_every_line_of_a_traceback_names_its_process(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert exit_status("vl-plugins demo", failing(KeyError("caption"))) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[rank 1] Traceback (most recent call last):"
    assert lines[-1] == "[rank 1] KeyError: 'caption'"
    assert all(line.startswith("[rank 1] ") for line in lines)


WRONG_SIZE = """Error(s) in loading state_dict for CLIP:
\tsize mismatch for visual.proj: torch.Size([8]), torch.Size([16]).
\tsize mismatch for text.proj: torch.Size([8])."""
SHOW = "; set VL_PLUGINS_TRACEBACK=1 for the traceback"


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (ValueError("columns must match\n[1, 2]"), (), f"--flag: columns must match [1, 2]{SHOW}"),
        (json.JSONDecodeError("no value", "", 0), (), f"--flag: no value: line 1 column 1 (char 0){SHOW}"),
        (tarfile.ReadError("cut off"), (), f"--flag: cut off{SHOW}"),
        (yaml.YAMLError("a tab"), (), f"--flag: a tab{SHOW}"),
        (msgspec.ValidationError("no object"), (), f"--flag: no object{SHOW}"),
        (AssertionError(), (AssertionError,), f"--flag: AssertionError{SHOW}"),
        (KeyError("epoch"), (LookupError,), f"--flag: KeyError: 'epoch'{SHOW}"),
        (RuntimeError(WRONG_SIZE), (RuntimeError,), f"--flag: {' '.join(WRONG_SIZE.split())}{SHOW}"),
        (RuntimeError("x" * 10**6), (RuntimeError,), f"--flag: {'x' * 600} [...]{SHOW}"),
        (UserError("as it is"), (), "as it is"),
        (OSError("as it is"), (), "as it is"),
    ],
)
def test_errors_of_parsers_are_one_line_with_the_whole_reason(error, expected, text):
    kind = OSError if isinstance(error, OSError) else UserError
    with pytest.raises(kind) as caught, user_errors("--flag", *expected):
        raise error
    assert str(caught.value) == text


def test_the_cause_is_a_part_of_the_reason():
    with pytest.raises(UserError, match=r"^a.csv: generating failed: expected 2 columns; "), user_errors("a.csv"):
        raise ValueError("generating failed") from ValueError("expected 2 columns")


@pytest.mark.parametrize(
    "error",
    [
        KeyError("caption"),
        TypeError("forward() got an unexpected keyword argument"),
        RuntimeError("CUDA error: device-side assert triggered"),
        torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3690"),
        torch.cuda.OutOfMemoryError("Tried to allocate 2 GiB"),
    ],
)
def test_other_errors_keep_their_type_and_get_a_note(error, capsys):
    """Those of a GPU or of the network even where a RuntimeError is expected of a file."""
    expected = (RuntimeError,) if isinstance(error, RuntimeError) else ()
    with pytest.raises(type(error)) as caught, user_errors("--train-data a.tar", *expected):
        raise error
    assert caught.value is error
    assert error.__notes__ == ["while reading --train-data a.tar"]


def test_a_failed_connection_is_one_line(capsys):
    exceptions = pytest.importorskip("botocore.exceptions")

    def read():
        with user_errors("a.tar", Exception):
            raise exceptions.EndpointConnectionError(endpoint_url="http://127.0.0.1:1")

    assert exit_status("vl-plugins demo", read) == 2
    assert capsys.readouterr().err.startswith("vl-plugins demo: error: Could not connect to the endpoint URL")


def test_python_3_10_prints_notes_before_the_traceback(monkeypatch, capsys):
    class OldError(Exception):
        add_note = property()  # Python 3.10 has none

    def read():
        with user_errors("a.tar"):
            raise OldError("a bug")

    with pytest.raises(OldError):
        exit_status("vl-plugins demo", read)
    assert capsys.readouterr().err == "while reading a.tar\n"


class Failing(torch.utils.data.IterableDataset):
    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        try:
            raise FileNotFoundError("no such file")
        except FileNotFoundError as error:
            raise self.kind("shard 3 is missing:\nno such file") from error


@pytest.mark.parametrize("kind", [UserError, OSError])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_message_of_a_loader_is_that_of_its_worker(workers, kind):
    with pytest.raises(kind) as raised:
        list(torch.utils.data.DataLoader(Failing(kind), num_workers=workers))
    assert message(raised.value) == "shard 3 is missing: no such file"


def test_names():
    assert one_of("loss", "vlc", ["unified", "vlc"]) == "vlc"
    for name, hint in (("unifed", r" \(did you mean 'unified'\?\)"), ("xyz", "")):
        with pytest.raises(UserError, match=f"^unknown loss '{name}'{hint}; known: unified, vlc$"):
            one_of("loss", name, ["vlc", "unified"])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("logit_scale", "scale"),
        ("cosine", "CosineSimilarity"),
        ("lpdistance", "LpDistance"),
        ("learn_scal", "learn_scale"),
    ],
)
def test_the_name_that_was_meant(name, meant):
    with pytest.raises(UserError, match=rf"\(did you mean '{meant}'\?\)"):
        one_of("name", name, ["learn_scale", "scale", "CosineSimilarity", "LpDistance"])


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        *((value, {}, "a finite number") for value in (float("nan"), float("inf"), "0.2", None, True)),
        (-0.1, {"least": 0}, "a finite number >= 0"),
        (0, {"above": 0}, "a finite number > 0"),
        *((value, {"least": 1, "kind": int}, "an integer >= 1") for value in (0, 1.0, "1", True)),
    ],
)
def test_wrong_numbers(value, options, expected):
    with pytest.raises(ValueError, match=f"^margin must be {expected}, got {value!r}$"):
        number("margin", value, **options)


def test_numbers():
    for value in (0.5, 1, np.float32(0.5)):
        assert (number("margin", value), type(number("margin", value))) == (value, float)
    assert number("margin", 0, least=0) == 0
    for value in (2, np.int64(2)):
        assert (number("k", value, least=1, kind=int), type(number("k", value, kind=int))) == (2, int)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    """A broken one is not missing."""
    with pytest.raises(MissingExtraError, match=r"^no_such.part is not installed; .* 'vl_plugins\[data\]'$"):
        require("no_such.part", extra="data")
    (tmp_path / "broken_package.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
        require("broken_package", extra="data")
