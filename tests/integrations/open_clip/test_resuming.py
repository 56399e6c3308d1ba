"""Interrupted trainings go on as if nothing had happened."""

import itertools
import os
import random
import re
import resource
import sys
import threading
import time

import pytest
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
from vl_plugins.integrations.open_clip import train as launched
from vl_plugins.integrations.open_clip.launcher import main


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


def test_a_killed_training_goes_on_to_the_same_end(folder, shards, monkeypatch):
    flags = [*TINY, *RANDOM, *shards, "--epochs", "3", "--workers", "1"]
    for name in ("straight", "killed"):
        (folder / name).mkdir()
    kill_at_a_random_step(folder / "killed", flags, least=5, most=9)
    for name, more in (("straight", []), ("killed", ["--resume", "latest"])):
        monkeypatch.chdir(folder / name)
        assert main([*flags, *more]) == 0
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


@pytest.mark.gpu
@pytest.mark.parametrize("sets", [False, True], ids=["vectors", "sets"])
def test_killed_on_a_gpu(folder, shards, sets):
    """Adam makes whole steps of rounding errors where a gradient is 0, so weights are compared by the median."""
    flags = [*TINY, *shards, "--device", "cuda", "--precision", "amp_bf16", "--epochs", "2", "--batch-size", "8"]
    flags += ["--loss", "smooth_chamfer", "--head", "set"] if sets else ["--loss", "unified"]
    for name in ("straight", "killed"):
        (folder / name).mkdir()
    with pytest.raises(ProcessExitedException, match="exit code 9"):
        in_processes(train_two, 1, folder / "killed", flags, True, joined=False)
    for name, more in (("straight", []), ("killed", ["--resume", "latest"])):
        in_processes(train_two, 1, folder / name, [*flags, *more], joined=False)
    killed, straight = (read_checkpoint(folder / name, 2)["state_dict"] for name in ("killed", "straight"))
    assert killed.keys() == straight.keys()
    for name, weight in straight.items():
        assert (killed[name] - weight).abs().median() <= 1e-4, name


@pytest.mark.parametrize("more", [[], ["--save-most-recent"]], ids=["epoch", "most recent"])
def test_killed_while_it_saves(folder, shards, monkeypatch, more):
    """The former checkpoint is whole, and the training continues from it."""
    flags = [*TINY, *shards, "--loss", "unified", "--epochs", "2", *more]
    for name in ("straight", "killed"):
        (folder / name).mkdir()
    with pytest.raises(ProcessExitedException, match="exit code 9"):
        in_processes(save_half, 1, folder / "killed", flags, joined=False)
    (half,) = (folder / "killed/logs/run/checkpoints").glob(".partial/*.pt")
    assert 0 < half.stat().st_size < (folder / "killed/logs/run/checkpoints/epoch_1.pt").stat().st_size
    for name, again in (("straight", []), ("killed", ["--resume", "latest"])):
        monkeypatch.chdir(folder / name)
        assert main([*flags, *again]) == 0
    check_same_end(folder, epochs=2)


def save_half(rank, folder, flags):
    """Train, and exit in the middle of the second checkpoint."""
    os.chdir(folder)
    saved, numbers = launched.save, itertools.count(1)

    def save(content, file):
        saved(content, file)
        if next(numbers) == (4 if "--save-most-recent" in flags else 2):
            with open(file, "r+b") as stream:
                stream.truncate(100_000)
            os._exit(9)

    launched.save = save
    main(flags)


def test_a_full_disk(folder, shards, capfd):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert main([*TINY, *shards, "--loss", "unified"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    line = error_line(capfd.readouterr().err)
    assert re.match(r"cannot write .*/epoch_1\.pt: .*; is the disk full\?$", line)
    assert not list(folder.rglob("checkpoints/*.pt"))
