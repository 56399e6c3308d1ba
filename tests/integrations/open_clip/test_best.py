"""The best epoch and early stopping, against the curve of the same training without them."""

import logging
import math
import os
import shutil

import pytest

from tests.helpers.open_clip_training import (
    TINY,
    assert_equal_nested,
    best_and_end,
    error_line,
    read_best,
    read_checkpoint,
    read_results,
    small_shard_flags,
)
from tests.helpers.processes import in_processes
from vl_plugins.errors import InputWarning
from vl_plugins.integrations.loading import find_checkpoint, load_model, read_torch_file
from vl_plugins.integrations.open_clip.best import BestEpoch
from vl_plugins.integrations.open_clip.launcher import main

EPOCHS = 6
RANK = "image_to_text_mean_rank"


@pytest.fixture(scope="module")
def flags(toy_shards):
    flags = [*TINY, *small_shard_flags(toy_shards), "--captions-per-image", "random", "--validate-first"]
    return [*flags, "--train-num-samples", "8", "--epochs", str(EPOCHS), "--lr", "3e-3"]


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory):
    """A folder with a training without our flags."""
    folder = tmp_path_factory.mktemp("straight")
    assert main([*flags, "--logs", str(folder / "logs")]) == 0
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logging.getLogger().handlers.clear()  # each training adds its own
    return tmp_path


def log_of(folder, name="run"):
    return (folder / "logs" / name / "out.log").read_text()


@pytest.mark.parametrize(
    ("metric", "patience"),
    [
        ("rsum", 2),
        (RANK, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((RANK, 2), ("clip_val_loss", 4))),
    ],
)
def test_the_best_epoch_and_the_end(flags, straight, folder, metric, patience):
    values = [row[metric] for row in read_results(straight).values()]
    best, end = best_and_end(values, metric, patience)
    flags = [*flags, "--save-frequency", "100", "--save-best", metric, "--patience", str(patience)]
    flags += ["--remote-sync", "remote", "--remote-sync-protocol", "fsspec"]
    assert main(flags) == 0
    assert read_results(folder) == {epoch: read_results(straight)[epoch] for epoch in range(end + 1)}
    assert sorted(os.listdir("logs/run/checkpoints")) == ["best.pt", f"epoch_{end}.pt", "results.jsonl"]
    last, saved = read_checkpoint(folder, end), read_best(folder)
    assert_equal_nested(dict(last["state_dict"]), dict(read_checkpoint(straight, end)["state_dict"]))
    assert (saved["epoch"], saved["best"]["value"]) == (best, values[best])
    assert last["best"] == {**saved["best"], "evaluations_since": end - best}
    assert last.keys() - saved.keys() - {"global_step", "samples_seen"} == {"optimizer"}  # 4.x has counters, too
    if best > 0:
        assert_equal_nested(dict(saved["state_dict"]), dict(read_checkpoint(straight, best)["state_dict"]))
    line = log_of(folder).splitlines()[-1]
    assert f"{metric}" in line
    assert f"{values[best]:.4f}" in line
    assert ("vl-plugins merge" in line) is (best == 0)
    assert os.path.exists(f"remote/run/checkpoints/epoch_{end}.pt"), "open_clip's own end of the run"


@pytest.mark.parametrize("before_best", [True, False])
def test_a_resumed_training_is_the_same(flags, folder, before_best):
    """With another name and without the flags; and what has ended stays so."""
    assert main([*flags, "--loss", "unified", "--save-best", RANK, "--patience", "2"]) == 0
    end, best = max(read_results(folder)), read_best(folder)
    epoch = best["epoch"] - 1 if before_best else end - 1
    assert 0 < epoch < end
    file = f"logs/run/checkpoints/epoch_{epoch}.pt"
    logging.getLogger().handlers.clear()
    assert main([*flags, "--name", "resumed", "--resume", file]) == 0
    resumed, straight = (read_checkpoint(folder, end, name) for name in ("resumed", "run"))
    assert_equal_nested({**resumed, "name": "run"}, straight)
    assert_equal_nested({**read_best(folder, "resumed"), "name": "run"}, {**best, "name": "run"})
    rows = read_results(folder)
    assert read_results(folder, "resumed") == {number: rows[number] for number in range(epoch + 1, end + 1)}
    logging.getLogger().handlers.clear()
    assert main([*flags, "--resume", "latest"]) == 0
    assert [*read_results(folder)] == [*rows]
    assert log_of(folder).count(f"the training ends after epoch {end}\n") == 2


def test_a_best_epoch_that_is_trained_again(flags, folder):
    """A run that was killed after a better epoch was found, and before that was saved."""
    flags = [*flags, "--save-best", RANK]
    assert main(flags) == 0
    checkpoints = folder / "logs/run/checkpoints"
    ahead = read_torch_file(checkpoints / "best.pt")
    shutil.copy(checkpoints / "best.pt", "ahead.pt")
    assert ahead["epoch"] > 1, "so that an earlier checkpoint names another one"
    for epoch in range(ahead["epoch"], EPOCHS + 1):
        (checkpoints / f"epoch_{epoch}.pt").unlink()
    logging.getLogger().handlers.clear()
    assert main([*flags, "--resume", "latest", "--epochs", str(ahead["epoch"] - 1)]) == 0  # trains nothing
    saved = read_checkpoint(folder, ahead["epoch"] - 1)["best"]
    assert read_best(folder)["epoch"] == saved["epoch"] < ahead["epoch"]
    assert main([*flags, "--resume", "latest"]) == 0
    assert_equal_nested(read_best(folder), read_torch_file("ahead.pt"))


def test_the_latest_checkpoint_is_never_the_best_one(flags, folder, capfd):
    """Which has no optimizer."""
    flags = [*flags, "--save-best", "--epochs", "1", "--train-num-samples", "4"]
    assert main(flags) == 0
    os.remove("logs/run/checkpoints/epoch_1.pt")
    assert main([*flags, "--name", "other", "--resume", "logs/run/checkpoints/best.pt"]) == 2
    assert "it has no state of an optimizer" in error_line(capfd.readouterr().err)
    assert main([*flags, "--resume", "latest"]) == 0
    assert "No latest resume checkpoint found" in log_of(folder)
    assert os.path.exists("logs/run/checkpoints/epoch_1.pt")


def test_what_takes_the_folder_of_a_run_takes_the_best(flags, folder):
    assert main([*flags, "--save-best", "--epochs", "2"]) == 0
    best = "logs/run/checkpoints/best.pt"
    with pytest.warns(InputWarning, match=f"logs/run: its best checkpoint is taken, {best}"):
        model, *_ = load_model("logs/run")
    assert_equal_nested(dict(model.state_dict()), dict(read_best(folder)["state_dict"]))
    os.remove(best)
    assert str(find_checkpoint("logs/run")) == "logs/run/checkpoints/epoch_2.pt"


def test_pairs_of_open_clip_have_an_rsum(flags, folder):
    """Without our reader, where `--save-best` chooses by it."""
    shards = flags[len(TINY) : len(TINY) + 4]
    more = "--val-num-samples 8 --train-num-samples 8 --workers 1 --dataset-type webdataset --save-best".split()
    assert main([*TINY, *shards, *more]) == 0
    assert read_best(folder)["best"]["value"] == read_results(folder)[1]["rsum"]


def train(rank, folder, flags):
    os.chdir(folder)
    assert main(flags) == 0


def test_processes_end_together(flags, tmp_path):
    """Of which only the first has metrics."""
    flags = [*flags, "--loss", "unified", "--dist-backend", "gloo", "--batch-size", "2"]
    in_processes(train, 2, tmp_path, [*flags, "--name", "straight"], joined=False)
    in_processes(train, 2, tmp_path, [*flags, "--save-best", RANK, "--patience", "1"], joined=False)
    values = [row[RANK] for row in read_results(tmp_path, "straight").values()]
    best, end = best_and_end(values, RANK, 1)
    assert end < EPOCHS
    assert [*read_results(tmp_path)] == [*range(end + 1)]
    assert read_best(tmp_path)["epoch"] == best


def test_values_that_are_no_numbers():
    """They count as validations, and any number is better."""
    best = BestEpoch("rsum").after(math.nan, 1)
    assert (best.epoch, best.evaluations_since) == (-1, 1)
    best = best.after(-5.0, 2)
    assert best == BestEpoch("rsum", -5.0, 2, 0)
    assert best.after(math.nan, 3) == best.after(-5.0, 3) == BestEpoch("rsum", -5.0, 2, 1)


def test_equal_recalls_are_no_improvement():
    """Their sums may differ by rounding."""
    best = BestEpoch("rsum").after(51.85185185185185, 2)
    assert best.after(51.851851851851855, 3) == BestEpoch("rsum", 51.85185185185185, 2, evaluations_since=1)
    assert best.after(51.86, 3).epoch == 3
    smallest = BestEpoch("clip_val_loss").after(0.3, 1)
    assert smallest.after(0.1 + 0.2 - 1e-16, 2).epoch == 1
    assert smallest.after(0.29, 2).epoch == 2
