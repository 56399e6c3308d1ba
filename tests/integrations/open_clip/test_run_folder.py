"""One process at a time in a run's folder, and what runs that did not begin leave there."""

import errno
from argparse import Namespace
from pathlib import Path

import pytest

from vl_plugins.integrations.open_clip.run_folder import check_is_free, files_named, occupied
from vl_plugins.integrations.open_clip.training import Training
from vl_plugins.utils.errors import UserError

STARTED = "2026-01-01 | INFO | Model:\n"
TRAINED = STARTED + "2026-01-01 | INFO | Train Epoch: 0 [ 16/64 (25%)] Loss: 0.5\n"


def write(file, text=""):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("files", "is_free"),
    [
        pytest.param({}, True, id="nothing"),
        pytest.param({"out.log": STARTED, "params.txt": "", "checkpoints/.x": ""}, True, id="a failed start"),
        pytest.param({"out.log": TRAINED}, False, id="a step"),
        pytest.param({"out-0": TRAINED}, False, id="a step, with --log-local"),
        pytest.param({"checkpoints/epoch_1.pt": ""}, False, id="a checkpoint"),
        pytest.param({"checkpoints/epoch_1/.metadata": ""}, False, id="a checkpoint in parts"),
        pytest.param({"out.log": STARTED, "checkpoints/results.jsonl": ""}, False, id="an evaluation"),
    ],
)
def test_a_failed_start_does_not_occupy_a_name(tmp_path, files, is_free):
    folder = tmp_path / "run"
    for name, text in files.items():
        write(folder / name, text)
    if is_free:
        check_is_free(folder)
        with occupied(folder, continues=False):
            assert not (folder / "out.log").exists(), "the trainer would not start"
        return
    for check in (check_is_free, occupied(folder, continues=False).__enter__):
        with pytest.raises(UserError, match=r"^--name run: .* holds an earlier run; give another name, or --resume"):
            check(*([folder] if check is check_is_free else []))
    with occupied(folder, continues=True):
        assert all((folder / name).read_text() == text for name, text in files.items())


@pytest.mark.parametrize("continues", [False, True])
def test_one_process_at_a_time(tmp_path, continues):
    folder = tmp_path / "run"
    with occupied(folder, continues=False):
        write(folder / "out.log", STARTED)
        with pytest.raises(UserError, match=f"^another process is writing to {folder}"):
            occupied(folder, continues=continues).__enter__()
        assert (folder / "out.log").exists()
    with occupied(folder, continues=True):
        pass


def test_partial_checkpoints_of_a_killed_run_are_removed(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in (".epoch_2.pt.0123abcd.partial", ".tmp.pt.01234567.partial", "epoch_1.pt"):
        write(checkpoints / name)
    with occupied(tmp_path / "run", continues=True):
        assert [file.name for file in checkpoints.iterdir()] == ["epoch_1.pt"]


def test_errors_of_files_are_one_line(tmp_path):
    training = Training(args=Namespace(logs=str(tmp_path), name="run"))
    with pytest.raises(UserError, match=f"^{tmp_path}/no: No such file or directory$"), files_named(training):
        (tmp_path / "no").read_text()
    with pytest.raises(UserError, match=f"^{tmp_path}/run: No space left on device$"), files_named(training):
        Path("/dev/full").write_text("x")
    in_a_loader = OSError(
        f"Caught OSError in DataLoader worker process 0.\nTraceback\nOSError: [Errno {errno.EIO}] a.jpg"
    )
    with pytest.raises(UserError, match=r"^OSError: \[Errno 5\] a.jpg$"), files_named(training):
        raise in_a_loader
