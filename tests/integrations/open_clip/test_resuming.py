"""Interrupted trainings go on as if nothing had happened."""

import errno
import itertools
import logging
import os
import random
import resource
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

import open_clip_train.main
import pytest
import torch
from torch.multiprocessing import ProcessExitedException
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.helpers.open_clip_training import (
    TINY,
    assert_equal_nested,
    error_line,
    read_checkpoint,
    read_results,
    small_shard_flags,
)
from tests.helpers.processes import in_processes, kill_with_children, start_process
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip import resuming
from vl_plugins.integrations.open_clip.launcher import main
from vl_plugins.integrations.open_clip.trainer_errors import one_line_errors


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shards(toy_shards):
    return small_shard_flags(toy_shards)


# Dropout of patches, augmentation and a loss that counts its steps: all that draws numbers or has a state.
RANDOM = "--force-patch-dropout 0.3 --loss triplet_hn --loss-kwargs warmup_steps=6 --aug-cfg scale=(0.5,1.0)".split()
RANDOM += ["--captions-per-image", "2"]


def kill_at_a_random_step(folder, flags, least, most):
    """Train in a process, and kill it with all its own when it has logged ``least`` to ``most`` steps more."""
    after = random.SystemRandom().randint(least, most)
    print(f"to be killed after step {after}")
    log = folder / "logs/run/out.log"
    logged = count_steps(log)
    process = start_process(train_until, folder, flags, after + 1)
    try:
        while count_steps(log) < logged + after:
            assert is_running(process), "it ended by itself"
            time.sleep(0.002)
    finally:
        kill_with_children(process.pid)
        process.join()


def is_running(process):
    return process.exitcode is None


def count_steps(log):
    return log.read_text().count("Train Epoch") if log.exists() else 0


def train_until(folder, flags, last):
    """Train, but wait to be killed in step ``last``."""
    os.chdir(folder)
    steps = itertools.count(1)
    register_optimizer_step_post_hook(lambda *_: next(steps) == last and threading.Event().wait())
    sys.exit(main(flags))


def check_same_end(folder, epochs):
    killed, straight = folder / "killed", folder / "straight"
    assert read_results(killed) == read_results(straight)
    assert [*read_results(killed)] == list(range(1, epochs + 1))
    assert_equal_nested(read_checkpoint(killed, epochs), read_checkpoint(straight, epochs))


def test_a_killed_training_goes_on_to_the_same_end(folder, shards, monkeypatch, capfd):
    """Also past a damaged checkpoint, which is newer than the last good one."""
    flags = [*TINY, *RANDOM, *shards, "--epochs", "3", "--workers", "1"]
    for name in ("straight", "killed"):
        (folder / name).mkdir()
    kill_at_a_random_step(folder / "killed", flags, least=5, most=9)
    truncated = folder / "killed/logs/run/checkpoints/epoch_3.pt"
    truncated.write_bytes((truncated.parent / "epoch_1.pt").read_bytes()[:-100])
    for name, more in (("straight", []), ("killed", ["--resume", "latest"])):
        monkeypatch.chdir(folder / name)
        assert main([*flags, *more]) == 0
    assert "epoch_3.pt: it is cut off or damaged" in capfd.readouterr().err
    check_same_end(folder, epochs=3)


def train_two(rank, folder, flags, exits=False):
    """Train in one of two processes; with ``exits`` both are gone after a step of the second epoch."""
    os.chdir(folder)
    steps = itertools.count(1)
    if exits:
        register_optimizer_step_post_hook(lambda *_: next(steps) == 3 and os._exit(9))
    assert main(flags) == 0


def test_two_killed_processes_go_on_to_the_same_end(folder, shards):
    """With sets, whose similarity is learned: a parameter without a gradient would end the second step."""
    flags = [*TINY, *RANDOM, *shards, "--epochs", "2", "--local-loss", "--gather-with-grad"]
    flags += ["--head", "set", "--distance", "match_probability"]
    for name in ("straight", "killed"):
        (folder / name).mkdir()
    with pytest.raises(ProcessExitedException, match="exit code 9"):
        in_processes(train_two, 2, folder / "killed", flags, True, joined=False)
    assert [*read_results(folder / "killed")] == [1]
    for name, more in (("straight", []), ("killed", ["--resume", "latest"])):
        in_processes(train_two, 2, folder / name, [*flags, *more], joined=False)
    check_same_end(folder, epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [["--save-most-recent", "--delete-previous-checkpoint"], "--accum-freq 2 --precision amp_bf16 --head set".split()],
    ids=["the last one only", "sets"],
)
def test_killed_again_and_again(folder, shards, more, monkeypatch):
    flags = [*TINY, *RANDOM, *shards, "--epochs", "7", "--workers", "1", *more]
    for name in ("straight", "killed"):
        (folder / name).mkdir()
    for number in range(3):  # never to the end, which is 14 steps away, or 28
        again = [*flags, *(["--resume", "latest"] if number else [])]
        kill_at_a_random_step(folder / "killed", again, 1, 4)
    for name, again in (("straight", []), ("killed", ["--resume", "latest"])):
        monkeypatch.chdir(folder / name)
        assert main([*flags, *again]) == 0
    check_same_end(folder, epochs=7)


def save(folder, epoch, **more):
    """Write a checkpoint as the trainer does."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"epoch": epoch, "name": "run", "state_dict": {"weight": torch.full((64,), epoch)}, "optimizer": {}}
    file = folder / f"epoch_{epoch}.pt"
    torch.save({**content, **more}, file)
    return file


def truncate(file, size=0.7):
    with file.open("r+b") as stream:
        stream.truncate(int(file.stat().st_size * size))


def latest(folder):
    return resuming.latest_checkpoint(str(folder), False, host_latest=open_clip_train.main.get_latest_checkpoint)


@pytest.mark.parametrize("size", [0, 0.7])
def test_a_truncated_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path, caplog, size):
    files = [save(tmp_path, epoch) for epoch in (1, 2, 9, 10)]
    assert latest(tmp_path) == str(files[3]), "by number, not by letters"
    assert latest(tmp_path) == open_clip_train.main.get_latest_checkpoint(str(tmp_path), False)
    truncate(files[3], size)
    assert latest(tmp_path) == str(files[2])
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    reason = "it is cut off or damaged (" if size else "it is empty or not a file of torch.save"
    assert warning.message.startswith(f"checkpoint {files[3]}: {reason}")
    assert warning.message.endswith("going on from the one before it, epoch_9.pt")
    for file in files[:3]:
        truncate(file, size)
    with pytest.raises(
        UserError, match=r"no checkpoint in .* can be read: epoch_10.pt \(it is (cut off|empty).*delete them"
    ):
        latest(tmp_path)


def test_which_files_are_checkpoints(tmp_path):
    assert latest(tmp_path / "nothing") is None
    first = save(tmp_path, 1)
    (tmp_path / "tmp.pt").write_bytes(b"of --save-most-recent, when it was killed")
    assert latest(tmp_path) == str(first)
    sharded = tmp_path / "epoch_3"
    sharded.mkdir()
    assert resuming.latest_checkpoint(str(tmp_path), False, host_latest=lambda *_: str(sharded)) == str(sharded)
    assert resuming.latest_checkpoint("s3://bucket", True, host_latest=lambda *given: given) == ("s3://bucket", True)


class Harmful:
    def __reduce__(self):
        return print, ("harm",)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (torch.ones(3), "it holds neither a checkpoint of open_clip's trainer nor weights by name"),
        ({"epoch": 1, "optimizer": {}}, "it holds neither"),
        ({"epoch": 2, "state_dict": {"a": torch.ones(2), "b": torch.tensor([1, torch.nan])}}, "1 of its weights are n"),
        ({"epoch": 2, "state_dict": {"weight": torch.ones(2)}, "more": Harmful()}, "it holds more than tensors and te"),
    ],
)
def test_files_that_a_training_cannot_go_on_from(tmp_path, caplog, capsys, content, problem):
    file = tmp_path / "epoch_2.pt"
    torch.save(content, file)
    with pytest.raises(UserError, match=f"^--resume {file}: {problem}[^;]*$"):
        resuming.check_resume(str(file), None, save_most_recent=False)
    before = save(tmp_path, 1)
    assert latest(tmp_path) == str(before)
    assert f"checkpoint {file}: {problem}" in caplog.text
    assert "harm" not in capsys.readouterr().out


def test_the_file_of_resume_latest(tmp_path):
    with pytest.raises(UserError, match="--resume latest goes on with an earlier run: give its --name"):
        resuming.check_resume("latest", None, save_most_recent=False)
    folder = tmp_path / "checkpoints"
    recent = save(folder, 3).rename(folder / "epoch_latest.pt")
    resuming.check_resume("latest", tmp_path, save_most_recent=True)
    truncate(recent)
    with pytest.raises(UserError, match=f"--resume {recent}: it is cut off or damaged "):
        resuming.check_resume("latest", tmp_path, save_most_recent=True)
    resuming.check_resume("latest", tmp_path, save_most_recent=False)
    resuming.check_resume("s3://bucket/epoch_1.pt", None, save_most_recent=False)


def test_checkpoints_that_do_not_fit(folder, shards, capfd):
    flags = [*TINY, *shards, "--loss", "unified"]
    assert main(flags) == 0
    content = read_checkpoint(folder)
    del content["optimizer"]
    for saved, message in (
        ({"weight": torch.ones(2)}, "its weights do not fit --model vl-tiny with these flags: Missing key(s) in "),
        (content, "its optimizer state does not fit the parameters that open_clip "),
    ):
        torch.save(saved, "other.pt")
        capfd.readouterr()
        assert main([*flags, "--resume", "other.pt", "--name", "other"]) == 2
        assert error_line(capfd.readouterr().err).startswith(f"--resume other.pt: {message}")


def test_errors_of_files_are_one_line(tmp_path):
    args = Namespace(logs=str(tmp_path), name="run", resume=None, model="vl-tiny")
    with pytest.raises(UserError, match=f"^{tmp_path}/no: No such file or directory$"), one_line_errors(args):
        (tmp_path / "no").read_text()
    with pytest.raises(UserError, match=f"^{tmp_path}/run: No space left on device$"), one_line_errors(args):
        Path("/dev/full").write_text("x")
    in_a_loader = OSError(f"Caught OSError in DataLoader worker process 0.\nTraceback\nOSError: [Errno {errno.EIO}] a")
    with pytest.raises(UserError, match=r"^OSError: \[Errno 5\] a$"), one_line_errors(args):
        raise in_a_loader


def test_a_full_disk(tmp_path):
    args = Namespace(logs=str(tmp_path), name="run", resume=None, model="vl-tiny")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError) as raised, one_line_errors(args):
            torch.save(torch.zeros(100_000), tmp_path / "epoch_1.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(raised.value) == f"{tmp_path}/run: a checkpoint cannot be written; is the disk full?"
