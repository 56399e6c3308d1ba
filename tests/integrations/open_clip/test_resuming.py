"""Interrupted trainings go on as if nothing had happened."""

import contextlib
import errno
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import open_clip_train.main
import pytest
import torch

from tests.integrations.open_clip.test_launcher import MODULE, assert_equal_nested, run
from vl_plugins.integrations.open_clip import resuming
from vl_plugins.integrations.open_clip.launcher import main
from vl_plugins.integrations.open_clip.trainer_errors import one_line_errors
from vl_plugins.utils.errors import UserError

LAUNCH = [sys.executable, "-m", MODULE]
TORCHRUN = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2 -m".split(), MODULE, "--"]
TINY = "--model vl-tiny --device cpu --precision fp32 --batch-size 16 --workers 0 --warmup 1 --lr 1e-3 --name run"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shards(toy_shards):
    data = [f"{toy_shards}/toy-train-{{000000..000007}}.tar", f"{toy_shards}/toy-val-{{000000..000002}}.tar"]
    return ["--train-data", data[0], "--val-data", data[1]]


def flags_for(shards, *others):
    return [*TINY.split(), "--log-every-n-steps", "1", "--captions-per-image", "2", *shards, *others]


def checkpoints(folder):
    return folder / "logs" / "run" / "checkpoints"


def results(folder):
    """Return the metrics by epoch; one that was interrupted after its validation is there twice."""
    rows = [json.loads(line) for line in (checkpoints(folder) / "results.jsonl").read_text().splitlines()]
    return {row["epoch"]: row for row in rows}


def weights(folder, epoch):
    return torch.load(checkpoints(folder) / f"epoch_{epoch}.pt", weights_only=True)


def descendants(pid):
    """Return all processes below one, where they were before any of them ends."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def kill_at_a_random_step(command, cwd, log, least, most):
    """Run a command, and kill it with all its processes when it has logged ``least`` to ``most`` steps more."""
    after = random.SystemRandom().randint(least, most)
    print(f"to be killed after step {after}")
    logged = count_steps(log)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(cwd / "output", "wb") as output:
        process = subprocess.Popen([*map(str, command)], cwd=cwd, env=environment, stdout=output, stderr=output)
    deadline = time.monotonic() + 200
    while count_steps(log) < logged + after and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    is_running = process.poll() is None
    for pid in descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    print((cwd / "output").read_text()[-3000:])
    assert is_running, "it ended by itself"


def count_steps(log):
    return log.read_text().count("Train Epoch") if log.exists() else 0


# Dropout of patches, augmentation and a loss that counts its steps: all that draws numbers or has a state.
RANDOM = "--force-patch-dropout 0.3 --loss triplet_hn --loss-kwargs warmup_steps=6 --aug-cfg scale=(0.5,1.0)".split()


def test_a_killed_training_goes_on_to_the_same_end(folder, shards, monkeypatch):
    flags = flags_for(shards, *RANDOM, "--epochs", "4", "--workers", "2")
    for name in ("straight", "killed"):
        (folder / name).mkdir()
    log = folder / "killed/logs/run/out.log"
    kill_at_a_random_step([*LAUNCH, *flags], folder / "killed", log, least=5, most=15)  # after a checkpoint, or several
    for name, more in (("straight", []), ("killed", ["--resume", "latest"])):
        monkeypatch.chdir(folder / name)
        assert main([*flags, *more]) == 0
    assert results(folder / "killed") == results(folder / "straight")
    assert [*results(folder / "killed")] == [1, 2, 3, 4]
    assert_equal_nested(weights(folder / "killed", "4"), weights(folder / "straight", "4"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "last", "more"),
    [
        pytest.param(1, "latest", ["--save-most-recent", "--save-frequency", "0"], id="the most recent only"),
        pytest.param(1, "6", ["--save-most-recent", "--delete-previous-checkpoint"], id="the last one only"),
        pytest.param(1, "6", ["--accum-freq", "2"], id="accumulation"),
        pytest.param(1, "6", ["--precision", "amp_bf16", "--head", "set", "--loss", "smooth_chamfer"], id="sets"),
        pytest.param(2, "6", ["--batch-size", "8", "--local-loss", "--gather-with-grad"], id="two processes"),
    ],
)
@pytest.mark.timeout(900)
def test_killed_again_and_again(folder, shards, processes, last, more):
    command = LAUNCH if processes == 1 else TORCHRUN
    flags = flags_for(shards, *RANDOM, "--epochs", "6", "--workers", "1", *more)
    for name in ("straight", "killed"):
        (folder / name).mkdir()
    for number in range(3):  # never to the end, which is 12 steps away, or 24
        again = ["--resume", "latest"] if number else []
        log = folder / "killed/logs/run/out.log"
        kill_at_a_random_step([*command, *flags, *again], folder / "killed", log, least=1, most=4)
    for name, again in (("straight", []), ("killed", ["--resume", "latest"])):
        assert run([*command, *flags, *again], folder / name).returncode == 0
    assert results(folder / "killed") == results(folder / "straight")
    assert len(results(folder / "killed")) == 6
    assert_equal_nested(weights(folder / "killed", last), weights(folder / "straight", last))


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


@pytest.mark.parametrize("size", [0, 0.1, 0.7, 0.99])
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
        ([1, 2], "it holds neither"),
        ({}, "it holds neither"),
        ({0: torch.ones(2)}, "it holds neither"),
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
    with pytest.raises(UserError, match=f"^--resume {file}: .*; go on from --resume {before}$"):
        resuming.check_resume(str(file), None, save_most_recent=False)
    assert "harm" not in capsys.readouterr().out


def test_the_file_of_resume_latest(tmp_path):
    with pytest.raises(UserError, match="--resume latest goes on with an earlier run: give its --name"):
        resuming.check_resume("latest", None, save_most_recent=False)
    folder = tmp_path / "checkpoints"
    recent = save(folder, 3).rename(folder / "epoch_latest.pt")
    older = save(folder, 2)
    resuming.check_resume("latest", tmp_path, save_most_recent=True)
    truncate(recent)
    with pytest.raises(UserError, match=f"--resume {recent}: it is cut off or damaged .*; go on from --resume {older}"):
        resuming.check_resume("latest", tmp_path, save_most_recent=True)
    resuming.check_resume("latest", tmp_path, save_most_recent=False)
    resuming.check_resume("s3://bucket/epoch_1.pt", None, save_most_recent=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weight": torch.ones(2)}, "its weights do not fit --model vl-tiny with these flags: Missing key(s) in "),
        (None, "its optimizer state does not fit the parameters that open_clip "),
    ],
)
def test_checkpoints_that_do_not_fit(folder, shards, capfd, content, message):
    if content is None:
        assert main(flags_for(shards, "--loss", "unified", "--epochs", "1")) == 0
        content = weights(folder, 1)
        del content["optimizer"]
    torch.save(content, folder / "other.pt")
    flags = flags_for(shards, "--loss", "unified", "--epochs", "1", "--resume", "other.pt")
    assert main([*flags, "--name", "other"]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("vl_plugins: error: ")]
    assert line.startswith(f"vl_plugins: error: --resume other.pt: {message}")


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


def test_a_truncated_checkpoint_in_a_training(folder, shards, capfd):
    flags = flags_for(shards, "--loss", "unified", "--epochs", "3")
    assert main(flags) == 0
    expected = results(folder), weights(folder, 3)
    truncate(checkpoints(folder) / "epoch_3.pt")
    assert main([*flags, "--resume", "latest"]) == 0
    output = capfd.readouterr().err
    assert "epoch_3.pt: it is cut off or damaged" in output
    assert "going on from the one before it, epoch_2.pt" in output
    assert results(folder) == expected[0]
    assert_equal_nested(weights(folder, 3), expected[1])
