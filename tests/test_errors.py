"""Errors of the user, and checks of names and numbers."""

import numpy as np
import pytest
import torch

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


def test_only_the_first_process_prints(monkeypatch, capsys):
    """Unless they have joined: then the error may be of one process."""
    monkeypatch.setenv("RANK", "1")
    assert exit_status("vl-plugins demo", failing(UserError("no such file"))) == 2
    assert exit_status("vl-plugins demo", failing(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert exit_status("vl-plugins demo", failing(UserError("no such file"))) == 2
    assert capsys.readouterr().err == "vl-plugins demo: error: no such file\n"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("first line\nlast line"), "--flag: last line; set VL_PLUGINS_TRACEBACK=1 for the traceback"),
        (AssertionError(), "--flag: AssertionError; set VL_PLUGINS_TRACEBACK=1 for the traceback"),
        (UserError("as it is"), "as it is"),
        (OSError("as it is"), "as it is"),
    ],
)
def test_what_goes_wrong_while_reading_is_an_error_of_the_user(error, text):
    with pytest.raises(OSError if isinstance(error, OSError) else UserError) as caught, user_errors("--flag"):
        raise error
    assert str(caught.value) == text


class Failing(torch.utils.data.IterableDataset):
    def __iter__(self):
        try:
            raise FileNotFoundError("no such file")
        except FileNotFoundError as error:
            raise UserError("shard 3 is missing:\nno such file") from error


@pytest.mark.parametrize("workers", [0, 1])
def test_the_message_of_a_loader_is_that_of_its_worker(workers):
    with pytest.raises(UserError) as raised:
        list(torch.utils.data.DataLoader(Failing(), num_workers=workers))
    assert message(raised.value) == "shard 3 is missing:\nno such file"


def test_names():
    assert one_of("loss", "vlc", ["unified", "vlc"]) == "vlc"
    for name, hint in (("unifed", r" \(did you mean 'unified'\?\)"), ("xyz", "")):
        with pytest.raises(UserError, match=f"^unknown loss '{name}'{hint}; known: unified, vlc$"):
            one_of("loss", name, ["vlc", "unified"])


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
    assert (number("margin", 0, least=0), number("k", 1, least=1, kind=int)) == (0, 1)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    """A broken one is not missing."""
    with pytest.raises(MissingExtraError, match=r"^no_such.part is not installed; .* 'vl_plugins\[data\]'$"):
        require("no_such.part", extra="data")
    (tmp_path / "broken_package.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
        require("broken_package", extra="data")
