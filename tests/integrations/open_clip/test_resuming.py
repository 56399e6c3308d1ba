"""Interrupted trainings go on as if nothing had happened."""

import copy
import itertools
import os
import re
import resource
import shutil

import pytest
import torch
from open_clip_train import main as host
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
from tests.helpers.processes import in_processes
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.flags import parse_args
from vl_plugins.integrations.open_clip.launcher import main
from vl_plugins.integrations.open_clip.resume import ResumedRun, check_fits, describe_settings, load_optimizer


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


def train(rank, folder, flags):
    os.chdir(folder)
    assert main(flags) == 0


def die_in_the_second_epoch(rank, folder, flags):
    """Train in one of two processes; both are gone after a step of the second epoch."""
    steps = itertools.count(1)
    register_optimizer_step_post_hook(lambda *_: next(steps) == 3 and os._exit(9))
    train(rank, folder, flags)


def die_while_saving(rank, folder, flags):
    """Train, and exit in the middle of the second checkpoint."""
    saved, numbers = torch.save, itertools.count(1)

    def save(content, file, *given):
        saved(content, file, *given)
        if next(numbers) == (4 if "--save-most-recent" in flags else 2):
            with open(file, "r+b") as stream:
                stream.truncate(100_000)
            os._exit(9)

    torch.save = save
    train(rank, folder, flags)


def train_twice(folder, flags, die, world_size=1):
    """Train straight to the end; and with an interruption, after which the training resumes."""
    straight, killed = folder / "straight", folder / "killed"
    for each in (straight, killed):
        each.mkdir()
    in_processes(train, world_size, straight, flags, joined=False)
    with pytest.raises(ProcessExitedException, match="exit code 9"):
        in_processes(die, world_size, killed, flags, joined=False)
    halves = list(killed.glob("logs/run/checkpoints/.partial/*.pt"))
    in_processes(train, world_size, killed, [*flags, "--resume", "latest"], joined=False)
    assert [*read_results(killed)] == [1, 2]
    return straight, killed, halves


def check_equal(straight, killed):
    assert read_results(killed) == read_results(straight)
    assert_equal_nested(read_checkpoint(killed, 2), read_checkpoint(straight, 2))


def test_two_killed_processes_go_on_to_the_same_end(folder, shards):
    """With sets, whose similarity is learned: a parameter without a gradient would end the second step."""
    flags = [*TINY, *RANDOM, *shards, "--epochs", "2", "--workers", "1"]
    flags += ["--head", "set", "--distance", "match_probability"]
    straight, killed, _ = train_twice(folder, flags, die_in_the_second_epoch, world_size=2)
    check_equal(straight, killed)


@pytest.mark.parametrize("step", [3, pytest.param(4, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)])
def test_killed_in_short_epochs(folder, shards, step):
    """Epochs of half of the images, whose order goes on in the next one; the third resumes from the last one saved."""
    flags = [*TINY, *RANDOM, *shards, "--epochs", "3", "--train-num-samples", "8", "--head", "linear"]
    straight, killed = folder / "straight", folder / "killed"
    for each in (straight, killed):
        each.mkdir()
    in_processes(train, 1, straight, flags, joined=False)
    with pytest.raises(ProcessExitedException, match="exit code 9"):
        in_processes(die_at, 1, killed, flags, step, joined=False)
    in_processes(train, 1, killed, [*flags, "--resume", "latest"], joined=False)
    assert_equal_nested(read_checkpoint(killed, 3), read_checkpoint(straight, 3))


def die_at(rank, folder, flags, step):
    steps = itertools.count(1)
    register_optimizer_step_post_hook(lambda *_: next(steps) == step and os._exit(9))
    train(rank, folder, flags)


def test_behind_open_clips_reader_the_state_is_that_of_the_epochs_start(folder, shards, monkeypatch, capfd):
    """Weights, optimizer and learning rate; the reader shuffles anew, and the log says so."""
    starts = []
    train_one_epoch = host.train_one_epoch

    def noted(model, data, loss, epoch, optimizer, scaler, scheduler, *given, **options):
        scheduler(4 * epoch)
        starts.append((epoch, copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))))
        train_one_epoch(model, data, loss, epoch, optimizer, scaler, scheduler, *given, **options)

    monkeypatch.setattr(host, "train_one_epoch", noted)
    flags = [*TINY, *shards[:2], "--train-num-samples", "16", "--workers", "1", "--loss", "siglip", "--epochs", "2"]
    assert main(flags) == 0
    assert main([*flags, "--name", "resumed", "--resume", "logs/run/checkpoints/epoch_1.pt"]) == 0
    straight, resumed = starts[1:]
    assert straight[0] == resumed[0] == 1
    for expected, found in zip(straight[1], resumed[1], strict=True):
        assert_equal_nested(found, expected)
    assert "open_clip's reader does not repeat the batches of an interrupted epoch" in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "more", [[], pytest.param(["--save-most-recent"], marks=pytest.mark.slow)], ids=["epoch", "most recent"]
)
def test_killed_while_it_saves(folder, shards, more):
    """The former checkpoint is whole, and the training continues from it."""
    flags = [*TINY, *shards, "--loss", "unified", "--captions-per-image", "random", "--epochs", "2", *more]
    straight, killed, (half,) = train_twice(folder, flags, die_while_saving)
    assert not half.exists()
    check_equal(straight, killed)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, toy_shards):
    """A folder with a run of one epoch, of the Unified loss with all captions."""
    folder = tmp_path_factory.mktemp("finished")
    flags = [*TINY, *small_shard_flags(toy_shards)[:2], "--logs", str(folder / "logs")]
    flags += ["--loss", "unified", "--loss-kwargs", "margin=0.1", "--captions-per-image", "2"]
    assert main(flags) == 0
    return folder


@pytest.fixture
def resume(finished, folder, shards):
    """A function that resumes a copy of the run with other flags, for another epoch."""
    shutil.copytree(finished / "logs", folder / "logs")
    return lambda *flags: main([*TINY, *shards[:2], "--resume", "latest", "--epochs", "2", *flags])


@pytest.mark.parametrize(
    ("flags", "trained_with"),
    [
        ("--loss vlc", "--loss unified, not --loss vlc"),
        ("--loss unified --miner MultiSimilarityMiner", "no --miner, not --miner MultiSimilarityMiner"),
        ("--head linear", "no --head, not --head linear"),
    ],
)
def test_another_loss_needs_a_flag(resume, flags, trained_with, capfd):
    assert resume(*flags.split()) == 2
    line = error_line(capfd.readouterr().err)
    assert re.fullmatch(
        rf"--resume \S*/epoch_1.pt: this run was trained with {trained_with}; to change it, add --allow-other-loss",
        line,
    )


def test_another_loss_with_that_flag(resume, folder):
    assert resume("--loss", "vlc", "--allow-other-loss") == 0
    settings = read_checkpoint(folder, 2)["args"]
    assert (settings["loss"], settings["captions_per_image"]) == ("vlc", None)


def test_other_options_are_listed_in_one_line(resume, folder, capfd):
    """What the flags leave open is that of the run; a checkpoint writes out the defaults, too."""
    assert resume("--loss-kwargs", "scale=20", "--captions-per-image", "all") == 0
    printed = "".join(capfd.readouterr())
    assert printed.count("epoch_1.pt: --loss-kwargs scale=20 in place of learned") == 1
    assert printed.count("epoch_1.pt: --captions-per-image all in place of 2") == 1
    settings = read_checkpoint(folder, 2)["args"]
    assert settings["loss_kwargs"].items() >= {"symmetric": True, "margin": 0.1, "scale": 20}.items()
    assert (settings["loss"], settings["captions_per_image"]) == ("unified", "all")


@pytest.mark.parametrize(
    ("loss", "kwargs", "expected"),
    [
        ("unified", {"margin": 0.1}, {"margin": 0.1, "scale": 50.0}),
        ("vlc", {"scale": "learned"}, {"scale": "learned"}),
        ("smooth_chamfer", {"base": "unified"}, {"base": "unified", "scale": 50.0}),
        ("smooth_chamfer", {}, {}),
        ("triplet_hn", {}, {}),
    ],
)
def test_a_run_of_0_3_keeps_the_scale_that_was_its_default(loss, kwargs, expected):
    options = parse_args(["--resume", "epoch_1.pt"])
    ResumedRun("epoch_1.pt", {"epoch": 1}, {"loss": loss, "loss_kwargs": kwargs}).settle(options)
    assert options.loss_kwargs == expected


def test_the_log_has_the_settings_that_say_something():
    options = parse_args("--loss unified --loss-kwargs margin=0.1 products=float32".split())
    assert describe_settings(options) == (
        "margin=0.1 scale=50.0 symmetric=True products=float32 known_positives=True; read by open_clip"
    )
    options = parse_args("--loss vlc --captions-per-image 5".split())
    assert describe_settings(options) == ("scale=50.0 symmetric=True known_positives=True; captions per image: 5")


def test_nothing_is_noted_of_a_run_of_open_clip_alone():
    """Its params.txt has no option of ours."""
    options = parse_args(["--resume", "epoch_1.pt"])
    assert ResumedRun("epoch_1.pt", {"epoch": 1}, {"model": "RN50"}).settle(options) == []
    assert options == parse_args(["--resume", "epoch_1.pt"])


def test_what_a_run_read_is_read_again():
    """Unless the flags say otherwise."""
    run = {"loss": "unified", "version": "0.4", "captions_per_image": 2, "text_key": "caption", "caption_lines": "yes"}
    options = parse_args("--resume epoch_1.pt --captions-per-image 2 --caption-lines no".split())
    lines = ResumedRun("epoch_1.pt", {"epoch": 1}, run).settle(options)
    assert (options.captions_per_image, options.text_key, options.caption_lines) == (2, "caption", "no")
    assert [line for line in lines if "in place of" in line and "kwargs" not in line] == [
        "--resume epoch_1.pt: --caption-lines no in place of yes"
    ]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_numbers_fit_in_either_shape(shape):
    """A sharded model has (1,), and its checkpoint ()."""
    model = torch.nn.Linear(2, 2)
    model.logit_scale = torch.nn.Parameter(torch.ones(shape))
    weights = {**model.state_dict(), "logit_scale": torch.ones(())}
    check_fits("epoch_1.pt", {"epoch": 1, "state_dict": weights}, model)
    weights["trained_loss.proxies"] = torch.ones(2)
    with pytest.raises(UserError, match="its loss has other trained parameters: start a new run with --pretrained"):
        check_fits("epoch_1.pt", {"epoch": 1, "state_dict": weights}, model)


def test_a_rate_may_be_a_tensor():
    """As 4.x compiles a step with it, and resumes without, and the other way around."""
    model = torch.nn.Linear(2, 2)
    for rate, other_rate in ((0.1, torch.tensor(0.1)), (torch.tensor(0.1), 0.1)):
        optimizer, other = (torch.optim.AdamW(model.parameters(), lr=lr) for lr in (rate, other_rate))
        load_optimizer(optimizer, other.state_dict(), subject="--resume epoch_1.pt")
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)


def test_a_checkpoint_names_no_code():
    options = parse_args(["--resume", "epoch_1.pt"])
    with pytest.raises(UserError, match="files name registered losses only"):
        ResumedRun("epoch_1.pt", {"epoch": 1}, {"loss": "planted:Loss"}).settle(options)


@pytest.mark.gpu
@pytest.mark.parametrize("sets", [False, True], ids=["vectors", "sets"])
def test_killed_on_a_gpu(folder, shards, sets):
    """Adam makes whole steps of rounding errors where a gradient is 0, so weights are compared by the median."""
    flags = [*TINY, *shards, "--device", "cuda", "--precision", "amp_bf16", "--epochs", "2", "--batch-size", "8"]
    flags += ["--loss", "smooth_chamfer", "--head", "set"] if sets else ["--loss", "unified"]
    flags += ["--captions-per-image", "random"]
    folders = train_twice(folder, flags, die_in_the_second_epoch)[:2]
    straight, killed = (read_checkpoint(each, 2)["state_dict"] for each in folders)
    assert killed.keys() == straight.keys()
    for name, weight in straight.items():
        assert (killed[name] - weight).abs().median() <= 1e-4, name


def test_a_full_disk(folder, shards, capfd):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert main([*TINY, *shards, "--loss", "unified"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.match(r"cannot write .*/epoch_1\.pt: ", error_line(capfd.readouterr().err))
    assert not list(folder.rglob("checkpoints/*.pt"))
