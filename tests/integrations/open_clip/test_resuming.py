"""Interrupted trainings go on as if nothing had happened."""

import contextlib
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import time
import types
from argparse import Namespace
from pathlib import Path

import open_clip_train.main
import pytest
import torch

from tests.integrations.open_clip.test_launcher import MODULE, assert_equal_nested, run
from vl_plugins import create_loss
from vl_plugins.integrations.open_clip import resuming
from vl_plugins.integrations.open_clip.launcher import main
from vl_plugins.integrations.open_clip.training import Training
from vl_plugins.losses import TripletHNLoss
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
    return (checkpoints(folder) / "results.jsonl").read_text()


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
    assert [json.loads(line)["epoch"] for line in results(folder / "killed").splitlines()] == [1, 2, 3, 4]
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
    assert len(results(folder / "killed").splitlines()) == 6
    assert_equal_nested(weights(folder / "killed", last), weights(folder / "straight", last))


def save(folder, epoch, **more):
    """Write a checkpoint as the trainer does."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"epoch": epoch, "name": "run", "state_dict": {"weight": torch.full((64,), epoch)}, "optimizer": {}}
    file = folder / f"epoch_{epoch}.pt"
    torch.save({**content, **more}, file)
    return file


def cut(file, size=0.7):
    with file.open("r+b") as stream:
        stream.truncate(int(file.stat().st_size * size))


def latest(folder):
    return resuming.latest_checkpoint(str(folder), False, host_latest=open_clip_train.main.get_latest_checkpoint)


@pytest.mark.parametrize("size", [0, 0.1, 0.7, 0.99])
def test_a_checkpoint_that_is_cut_off_is_named_and_the_one_before_it_is_used(tmp_path, caplog, size):
    files = [save(tmp_path, epoch) for epoch in (1, 2, 9, 10)]
    assert latest(tmp_path) == str(files[3]), "by number, not by letters"
    assert latest(tmp_path) == open_clip_train.main.get_latest_checkpoint(str(tmp_path), False)
    cut(files[3], size)
    assert latest(tmp_path) == str(files[2])
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    reason = "it is cut off or damaged (" if size else "it is empty or not a file of torch.save"
    assert warning.message.startswith(f"checkpoint {files[3]}: {reason}")
    assert warning.message.endswith("going on from the one before it, epoch_9.pt")
    for file in files[:3]:
        cut(file, size)
    with pytest.raises(
        UserError, match=r"no checkpoint in .* can be read: epoch_10.pt \(it is (cut off|empty).*delete them"
    ):
        latest(tmp_path)


def test_only_complete_checkpoints_count(tmp_path):
    assert latest(tmp_path / "nothing") is None
    first = save(tmp_path, 1)
    (tmp_path / "tmp.pt").write_bytes(b"of --save-most-recent, when it was killed")
    (tmp_path / ".epoch_2.pt.0123abcd.partial").write_bytes(b"when it was killed")
    assert latest(tmp_path) == str(first)
    in_parts = tmp_path / "epoch_3"
    in_parts.mkdir()
    assert resuming.latest_checkpoint(str(tmp_path), False, host_latest=lambda *_: str(in_parts)) == str(in_parts)
    assert resuming.latest_checkpoint("s3://bucket", True, host_latest=lambda *given: given) == ("s3://bucket", True)


def test_a_most_recent_checkpoint_that_is_cut_off_is_replaced_by_the_one_before_it(tmp_path, caplog):
    recent = save(tmp_path, 3).rename(tmp_path / "epoch_latest.pt")
    before = recent.read_bytes()
    resuming.mend_most_recent(tmp_path)
    assert recent.read_bytes() == before
    cut(recent)
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read: epoch_latest.pt"):
        resuming.mend_most_recent(tmp_path)
    older = save(tmp_path, 2)
    resuming.mend_most_recent(tmp_path)
    assert recent.read_bytes() == older.read_bytes()
    assert (tmp_path / "epoch_latest.pt.damaged").stat().st_size < older.stat().st_size
    assert "epoch_latest.pt: it is cut off or damaged" in caplog.text
    resuming.mend_most_recent(tmp_path / "nothing")


def test_a_named_checkpoint_that_is_cut_off_is_an_error(tmp_path):
    files = [save(tmp_path, epoch) for epoch in (1, 2, 3)]
    for file in files[1:]:
        cut(file)
    with pytest.raises(UserError) as raised:
        resuming.read_checkpoint(str(files[2]), training=Training())
    assert str(raised.value).startswith(f"--resume {files[2]}: it is cut off or damaged (")
    assert str(raised.value).endswith(f"; the one before it is {files[0]}")
    with pytest.raises(UserError, match=r"--resume nothing.pt: no such file"):
        resuming.read_checkpoint("nothing.pt", training=Training())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (torch.ones(3), "it holds a Tensor"),
        ([1, 2], "it holds a list"),
        ({}, "it holds no weights"),
        ({"format": "another"}, "it holds no weights"),
        ({0: torch.ones(2)}, "its weights have no names"),
        ({"epoch": 1, "optimizer": {}}, "it holds no weights"),
        ({"epoch": "last", "state_dict": {"weight": torch.ones(2)}}, "its epoch is a str"),
    ],
)
def test_checkpoints_of_others(tmp_path, caplog, content, problem):
    file = tmp_path / "epoch_2.pt"
    torch.save(content, file)
    with pytest.raises(UserError, match=f"^--resume {file}: {problem}; give a checkpoint of open_clip's trainer"):
        resuming.read_checkpoint(str(file), training=Training())
    own = save(tmp_path, 1)
    assert latest(tmp_path) == str(own)
    assert f"checkpoint {file}: {problem}; going on from the one before it" in caplog.text


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


def test_a_full_disk(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = save(tmp_path, 1)
    before = file.read_bytes()
    with resuming.complete_checkpoints(Training()):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            for epoch in (1, 2):
                with pytest.raises(UserError, match=f"^cannot write {tmp_path}/epoch_{epoch}.pt: File too large$"):
                    save(tmp_path, epoch, more=torch.zeros(100_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_1.pt"]
    assert file.read_bytes() == before


class Harmful:
    def __reduce__(self):
        return print, ("harm",)


def test_code_in_a_checkpoint_is_not_run(tmp_path, capsys):
    file = save(tmp_path, 1, more=Harmful())
    with pytest.raises(UserError, match="can run code"):
        resuming.read_checkpoint(str(file), training=Training())
    assert "harm" not in capsys.readouterr().out


def test_a_checkpoint_is_complete_or_not_there(tmp_path):
    class Full(Exception):
        pass

    class Never:
        def __reduce__(self):
            raise Full

    training = Training()
    with resuming.complete_checkpoints(training):
        file = save(tmp_path, 1)
        assert torch.load(file, weights_only=True).keys() == {"epoch", "name", "state_dict", "optimizer"}
        training.beside["more"] = lambda: {"a": 3}
        before = file.read_bytes()
        with pytest.raises(Full):
            save(tmp_path, 1, more=Never())
        assert file.read_bytes() == before
        with pytest.raises(Full):
            save(tmp_path, 2, more=Never())
        assert [path.name for path in tmp_path.iterdir()] == ["epoch_1.pt"]
        save(tmp_path, 2)
        torch.save([1], tmp_path / "other.pt")
    assert torch.load(tmp_path / "epoch_2.pt", weights_only=True)["vl_plugins"] == {"more": {"a": 3}}
    resuming.read_checkpoint(str(tmp_path / "epoch_2.pt"), training=training)
    assert training.saved == {"more": {"a": 3}}
    assert torch.load(tmp_path / "other.pt", weights_only=True) == [1]
    assert isinstance(torch.save, types.FunctionType)
    assert torch.save.__module__ == "torch.serialization"


class WithMemory(TripletHNLoss):
    def get_extra_state(self):
        return {"memory": {1, 2}}


def test_the_state_of_a_loss(caplog):
    one, other = (create_loss("triplet_hn", warmup_steps=5) for _ in range(2))
    one.training_calls.fill_(3)
    saved = resuming.state_of_loss(one, "triplet_hn()")
    assert not resuming.restore_loss(other, "triplet_hn(margin=1)", saved)
    assert other.training_calls == 0
    assert resuming.restore_loss(other, "triplet_hn()", saved)
    assert other.training_calls == 3
    assert not resuming.restore_loss(create_loss("vlc"), "triplet_hn()", saved)
    assert not caplog.records
    saved = resuming.state_of_loss(WithMemory(), "triplet_hn()")
    assert saved["state"].keys() == {"training_calls"}
    assert "leaves out _extra_state of the loss" in caplog.text
    assert not resuming.restore_loss(WithMemory(), "triplet_hn()", saved)


def test_other_settings_are_noticed(caplog):
    training = Training(continues=True)
    args = Namespace(seed=1, world_size=2, batch_size=4, workers=1, accum_freq=1, captions_per_image="random")
    resuming.compare_settings(training, args)
    training.saved = training.kept_beside()
    assert training.saved["settings"]["world_size"] == 2
    resuming.compare_settings(training, args)
    assert not caplog.records
    args.workers, args.seed = 2, 3
    resuming.compare_settings(training, args)
    assert "other settings than before (seed 1 -> 3, workers 1 -> 2)" in caplog.text
    caplog.clear()
    resuming.compare_settings(Training(saved=training.saved), args)
    assert not caplog.records, "a new run from old weights"


def test_results_of_epochs_to_be_repeated_are_dropped(tmp_path):
    file = tmp_path / "results.jsonl"
    resuming.drop_later_results(tmp_path, 1)
    lines = [json.dumps({"epoch": epoch, "rsum_percent": 3.5}) + "\n" for epoch in (1, 2, 3)]
    file.write_text("".join(lines) + '{"epoch": 4, "rs')
    resuming.drop_later_results(tmp_path, 2)
    assert file.read_text() == "".join(lines[:2])
    file.write_text('{"zeroshot": 1}\n')
    resuming.drop_later_results(tmp_path, 0)
    assert file.read_text() == '{"zeroshot": 1}\n'


def test_latest_needs_a_name(folder, shards, capfd):
    flags = flags_for(shards, "--resume", "latest", "--loss", "unified")
    assert main([flag for flag in flags if flag not in ("--name", "run")]) == 2
    assert "--resume latest goes on with an earlier run: give its --name" in capfd.readouterr().err


def test_a_cut_off_checkpoint_in_a_training(folder, shards, capfd):
    """The command as its user gives it again, after a disk was full."""
    flags = flags_for(shards, "--loss", "unified", "--epochs", "3")
    assert main(flags) == 0
    expected = results(folder), weights(folder, "3")
    cut(checkpoints(folder) / "epoch_3.pt")
    assert main([*flags, "--resume", "latest"]) == 0
    output = capfd.readouterr().err
    assert "epoch_3.pt: it is cut off or damaged" in output
    assert "going on from the one before it, epoch_2.pt" in output
    assert results(folder) == expected[0]
    assert_equal_nested(weights(folder, "3"), expected[1])
    saved = expected[1]["vl_plugins"]
    assert saved["settings"]["captions_per_image"] == 2
    assert saved["loss"]["description"].startswith("unified(margin=0.2, scale=50.0")
