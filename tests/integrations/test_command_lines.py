import pytest
import torch

from vl_plugins.errors import UserError, exit_status, message


def failing(error):
    def run():
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "status", "line"),
    [
        (lambda: None, 0, ""),
        (lambda: 1, 1, ""),
        (failing(UserError("no such file")), 2, "vl-plugins demo: error: no such file\n"),
        (failing(KeyboardInterrupt()), 130, "vl-plugins demo: interrupted\n"),
    ],
)
def test_exit_status(run, status, line, capsys):
    assert exit_status("vl-plugins demo", run) == status
    assert capsys.readouterr().err == line


def test_only_the_first_process_prints(monkeypatch, capsys):
    """Unless they have joined: then the error may be of one process."""
    monkeypatch.setenv("RANK", "1")
    assert exit_status("vl-plugins demo", failing(UserError("no such file"))) == 2
    assert exit_status("vl-plugins demo", failing(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert exit_status("vl-plugins demo", failing(UserError("no such file"))) == 2
    assert capsys.readouterr().err == "vl-plugins demo: error: no such file\n"


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
