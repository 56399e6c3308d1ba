"""The study of the losses: its file, its rule for learning rates, its results, and the processes that train."""

import csv
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch
import yaml
from scipy import stats

from benchmarks import study as study_module
from benchmarks import study_tables
from benchmarks.frozen_trunk import region_features
from benchmarks.grid import Cell, Results, Run, Study
from benchmarks.jobs import Jobs, run_command, run_once
from benchmarks.outcomes import Outcome, metric_means, selected_metrics
from benchmarks.study_tables import COLUMNS, comparison_table, rsum_differences, write_tables
from vl_plugins.cli import build_parser
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.flags import parse_args
from vl_plugins.integrations.pytorch_metric_learning import command_line
from vl_plugins.retrieval import ImageValues, image_values, retrieval_ranks
from vl_plugins.retrieval.comparison import BlockedQueries

CLAIMS = Path("benchmarks/studies/claims.yaml")

CONTENT = {
    "data": "toys",
    "prepare": ["prepare {work}"],
    "rates": ["1e-4", "1e-3", "1e-2", "1e-1", "1"],
    "trainers": {
        "small": {
            "train": "train --lr {lr} --seed {seed} --epochs {epochs} {flags} {method_flags}",
            "encode": "encode {features}",
            "methods": {"clip": "", "unified": "--loss unified --steps {steps}", "long": {"flags": "", "length": 1.5}},
        }
    },
    "regimes": {"short": {"trainer": "small", "flags": "--data {work}", "epochs": 4, "first_rate": "1e-3", "steps": 7}},
    "cells": [{"regime": "short", "baseline": "clip", "methods": ["unified", "long"], "seeds": 2}],
}


@pytest.fixture
def results(tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(CONTENT))
    return Results(Study.read(tmp_path / "study.yaml"), tmp_path / "results")


def values_of(rsum, images=4):
    """Image values of a model whose images all contribute the same."""
    values = torch.tensor([[rsum], [rsum / 6], [rsum / 6]], dtype=torch.float64).expand(3, images).contiguous()
    entry = BlockedQueries(torch.tensor([0]), torch.tensor([1]), torch.zeros(1, dtype=torch.float64))
    names = ("rsum", "image_to_text_R@1", "text_to_image_R@1")
    return ImageValues(names, values, torch.ones(3, dtype=torch.float64), (entry,) * 3)


def save(results, run, val=0.0, test=0.0, seconds=10.0):
    """Write the outcome of a run, as if it had been trained."""
    metrics = dict.fromkeys(COLUMNS, test / 6) | {"rsum": test}
    Outcome(
        command=results.study.train_command(run, Path("WORK")),
        made_by="commit 0",
        training_seconds=seconds,
        all_seconds=seconds + 1,
        val={"rsum": val},
        test=metrics,
        image_values=values_of(test),
    ).save(results.file(run))


@pytest.mark.parametrize("name", ["claims", "clipart", "stamps", "vit_b32"])
def test_the_commands_of_a_study_can_be_parsed(name):
    study = Study.read(Path("benchmarks/studies") / f"{name}.yaml")
    commands = [command.format(work="work") for command in study.prepare]
    for cell in study.cells:
        for method in cell.all_methods:
            run = Run(cell.regime, method, "1e-3", 0)
            commands += [study.train_command(run, Path("work")), study.encode_command(run, Path("work"), "test")]
    for command in commands:
        program, *words = shlex.split(command)
        if program == "vl-plugins":
            build_parser().parse_args(words)
        elif words[1].endswith("open_clip"):
            parse_args(words[2:])
        elif words[1].endswith("pytorch_metric_learning"):
            arguments = command_line.build_parser().parse_args(words[2:])
            assert Path(arguments.config).is_file()
            command_line.overrides(arguments)
        else:
            assert words[1] in {
                "benchmarks.swapped_captions",
                "benchmarks.exact_captions",
                "benchmarks.inverted_pictures",
                "benchmarks.frozen_trunk",
            }


def test_commands_have_the_keys_of_the_run_the_regime_and_the_method(results):
    command = results.study.train_command(Run("short", "unified", "1e-3", 5), Path("there"))
    assert command == "train --lr 1e-3 --seed 5 --epochs 4 --data there --loss unified --steps 7"
    assert " --epochs 6 " in results.study.train_command(Run("short", "long", "1e-3", 5), Path("there"))


def test_a_method_without_flags_is_an_error(tmp_path):
    (tmp_path / "study.yaml").write_text(
        yaml.safe_dump(CONTENT | {"cells": [{"regime": "short", "baseline": "vlc", "methods": []}]})
    )
    with pytest.raises(UserError, match="the method vlc of regime short has no flags"):
        Study.read(tmp_path / "study.yaml")


@pytest.mark.parametrize(
    ("rsums", "tried", "best"),
    [
        ({"1e-3": 1, "1e-2": 2, "1e-1": 1}, ["1e-3", "1e-2", "1e-1"], "1e-2"),
        ({"1e-3": 3, "1e-2": 2, "1e-1": 1, "1e-4": 2}, ["1e-4", "1e-3", "1e-2", "1e-1"], "1e-3"),
        ({"1e-3": 1, "1e-2": 2, "1e-1": 3, "1": 4}, ["1e-3", "1e-2", "1e-1", "1"], "1"),
    ],
)
def test_more_rates_are_tried_while_the_best_is_the_lowest_or_the_highest(results, rsums, tried, best):
    """On validation: the test split would choose another one."""
    (cell,) = results.study.cells
    while missing := results.missing(cell, "clip"):
        if missing[0].seed == 1:
            break
        assert {run.seed for run in missing} == {0}
        for run in missing:
            save(results, run, val=rsums[run.rate], test=-rsums[run.rate])
    assert {run.rate for run in results.all_runs()} == set(tried)
    assert results.missing(cell, "clip") == [Run("short", "clip", best, 1)]
    assert results.is_at_edge("short", "clip") == (best == "1")
    assert not results.seed_outcomes("short", "clip")
    save(results, Run("short", "clip", best, 1), val=9, test=5)
    assert [outcome.test["rsum"] for outcome in results.seed_outcomes("short", "clip")] == [-rsums[best], 5]


def test_results_of_another_command_are_an_error(results):
    run = Run("short", "clip", "1e-3", 0)
    save(results, run)
    results.study.trainers["small"].train += " --more"
    with pytest.raises(UserError, match=r"lr1e-3-seed0.npz was made by another command: delete it"):
        results.outcome(run)


def test_tables(results):
    """Each method at its own rate, with its time; a method that is not complete has no row."""
    rsums = {("clip", "1e-3"): 60.0, ("clip", "1e-2"): 90.0, ("unified", "1e-3"): 93.0, ("unified", "1e-2"): 96.0}
    for (method, rate), rsum in rsums.items():
        for seed in (0, 1):
            save(results, Run("short", method, rate, seed), val=rsum, test=rsum, seconds=10 if method == "clip" else 15)
        save(results, Run("short", method, "1e-1", 0))
    (cell,) = results.study.cells
    assert comparison_table(cell, results, rsum_differences(cell, results)).count("\n| `") == 2
    text = write_tables(results.study, results)
    # Four images that agree: the interval is that of two queries more, of a step of 1 / 2 seeds in 4 images.
    half = stats.t.ppf(0.975, 3) * (2 * 0.5**2 / 4**2) ** 0.5
    expected = (
        f"| `unified` | 1e-2 | 4 | 1.50 | 96.0 ± 0.0 | **+6.0 [{6 - half:+.1f}, {6 + half:+.1f}]** | 16.0 | 16.0 |"
    )
    assert expected in text
    assert (results.folder / "study.md").read_text() == text
    with (results.folder / "study.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert rows[-1]["method"] == "unified"
    assert {row["RSUM"] for row in rows if row["rate"] == "1e-2"} == {"90.000", "96.000"}


def test_the_picture_has_the_methods_of_all_cells(results, monkeypatch):
    """Also of cells with the same baseline; what two of them have is drawn from the first."""
    for method, rsum in (("clip", 90.0), ("unified", 96.0), ("long", 93.0)):
        for rate in ("1e-3", "1e-2", "1e-1"):
            for seed in (0, 1, 2):
                save(results, Run("short", method, rate, seed), val=rsum + (rate == "1e-2"), test=rsum + seed)
    first, second = Cell("short", "clip", ["unified"], seeds=3), Cell("short", "clip", ["unified", "long"], seeds=2)
    results.study.cells = [first, second]
    drawn = []
    monkeypatch.setattr(study_tables, "draw_differences", lambda panels, file: drawn.append(panels))
    write_tables(results.study, results)
    (panel,) = drawn[0].values()
    assert list(panel) == ["unified", "long"]
    assert panel["unified"].half_width == rsum_differences(first, results)["unified"].half_width


def test_outcomes_are_kept_whole(tmp_path):
    """What each image contributes, and which images block its queries."""
    draws = torch.Generator().manual_seed(0)
    owners = torch.arange(50) % 20
    embeddings = torch.nn.functional.normalize(torch.randn(70, 8, generator=draws), dim=1)
    values = image_values(retrieval_ranks(embeddings[:20], embeddings[20:], owners, top=12), owners, 20)
    kept = selected_metrics(values)
    before = Outcome("train", "commit 0", 1.5, 2.5, {"rsum": 3.0}, metric_means(values), kept)
    before.save(tmp_path / "folder" / "run.npz")
    after = Outcome.load(tmp_path / "folder" / "run.npz")
    assert after[:6] == before[:6]
    assert after.image_values.metrics == ("rsum", "image_to_text_R@1", "text_to_image_R@1")
    torch.testing.assert_close(after.image_values.values.mean(dim=1)[0].item(), values.values.mean(dim=1)[-2].item())
    torch.testing.assert_close(after.image_values.values, kept.values, rtol=1e-6, atol=0)
    assert torch.equal(after.image_values.steps, kept.steps)
    for loaded, saved in zip(after.image_values.blocked, kept.blocked, strict=True):
        for column, expected in zip(loaded, saved, strict=True):
            torch.testing.assert_close(column, expected, rtol=1e-6, atol=0)


def test_a_command_runs_once(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr("benchmarks.jobs.run_command", commands.append)
    for command in ("one", "one", "another"):
        run_once(command, tmp_path / "done")
    assert commands == ["one", "another"]


def test_a_command_that_fails_is_an_error(tmp_path, capfd):
    with pytest.raises(UserError, match=r"exit status 2 of: vl-plugins evaluate --features none\.npz"):
        run_command("vl-plugins evaluate --features none.npz")
    assert "none.npz" in capfd.readouterr().err


def test_region_features_are_those_of_two_feature_maps():
    """Each position of the finer map, with the cell of the coarser one in which it lies."""
    trunk = timm.create_model("test_resnet", num_classes=0).eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    features = region_features(trunk, images)
    with torch.inference_mode():
        coarser = trunk.forward_features(images)
    assert features.shape == (2, 16, 192 + 96)
    torch.testing.assert_close(features[:, 0, 192:], coarser[:, :, 0, 0])
    torch.testing.assert_close(features[:, 15, 192:], coarser[:, :, 1, 1])
    torch.testing.assert_close(features[:, 2, 192:], coarser[:, :, 0, 1])


def fail(message):
    print(message, flush=True)
    raise ValueError


@pytest.mark.slow
def test_the_log_of_a_process_that_fails_is_shown(tmp_path):
    jobs = Jobs(1)
    jobs.start("first", tmp_path / "log", fail, "the reason")
    with pytest.raises(UserError, match=r"first failed; .*log ends with:\n.*the reason"):
        jobs.wait()


def group_is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="process groups are POSIX's")
def test_a_study_that_is_ended_ends_its_trainings(tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(CONTENT | {"prepare": ["python -m http.server 0"]}))
    command = [sys.executable, "-m", "benchmarks.study", tmp_path / "study.yaml", "--work", tmp_path / "work"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    log = tmp_path / "work" / "prepare.log"
    while not log.exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    process.wait()
    while group_is_alive(process.pid):
        time.sleep(0.1)


def test_methods_of_a_study_are_trained_alone(results):
    """Of all methods, or of some, in some regimes."""
    assert {run.method for run in study_module.missing_runs(results, [], [])} == {"clip", "unified", "long"}
    assert {run.method for run in study_module.missing_runs(results, ["short"], ["unified", "clip"])} == {
        "clip",
        "unified",
    }
    assert study_module.missing_runs(results, ["long"], []) == []


@pytest.mark.slow
def test_a_small_study_of_real_commands(tmp_path):
    """All kinds of regimes: fine-tuned, on frozen features, and sets. It is stopped by its budget, and continues."""
    content = yaml.safe_load(CLAIMS.read_text())
    content["cells"] = [
        {"regime": "fine-tuned", "baseline": "clip", "seeds": 1, "methods": ["unified-learned"]},
        {"regime": "frozen", "baseline": "triplet-hn", "seeds": 1, "methods": []},
        {"regime": "sets", "baseline": "vector", "seeds": 1, "methods": ["sets-4"]},
    ]
    content["rates"] = ["1e-3", "3e-3"]
    for regime in content["regimes"].values():
        regime |= {"epochs": 1, "first_rate": "1e-3"}
    text = yaml.safe_dump(content, sort_keys=False, width=10_000)
    smaller = {
        "--train 3072 --val 500 --test 1000": "--train 48 --val 8 --test 8",
        "--train 2048": "--train 16",
        "--samples-per-shard 512": "--samples-per-shard 8",
        "--batch-size 128": "--batch-size 8",
        "batch: 64": "batch: 8",
        "--epochs 14": "--epochs 1",
        "training.epochs={epochs}": "training.epochs={epochs} data.batch_size=8",
    }
    for old, new in smaller.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "study.yaml").write_text(text)
    words = [str(tmp_path / "study.yaml"), "--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    assert study_module.main([*words, "--hours", "1e-9"]) == 0
    first = len(list((tmp_path / "results").rglob("*.npz")))
    assert 0 < first < 10
    assert study_module.main(words) == 0
    assert len(list((tmp_path / "results").rglob("*.npz"))) == 10
    assert "## sets, 1 seeds, against `vector`" in (tmp_path / "results" / "study.md").read_text()
    sets = Outcome.load(next((tmp_path / "results" / "sets" / "sets-4").glob("*.npz")))
    assert 0 < sets.test["image_circular_variance"] < 1
