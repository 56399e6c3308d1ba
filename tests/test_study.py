"""The study of the losses."""

import csv
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scipy import stats

from benchmarks import study
from benchmarks.study import Outcome, Run, Study
from vl_plugins.cli import build_parser
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.flags import parse_args
from vl_plugins.integrations.pytorch_metric_learning import command_line
from vl_plugins.retrieval import ImageValues, image_values, retrieval_ranks
from vl_plugins.retrieval.comparison import BlockedQueries
from vl_plugins.retrieval.features import Features

CONTENT = {
    "prepare": ["make data", "start {seed}"],
    "train": "python -m trainer --out {folder}",
    "encode": "encode {features}",
    "settings": {"scratch": {"flags": "--lr {lr}", "lr": ["1e-3", "1e-2"]}},
    "baseline": "clip",
    "losses": {"clip": "", "unified": "--loss unified"},
    "seeds": [0, 1],
    "tuning_seeds": [0],
}


@pytest.mark.parametrize("name", ["toy", "stamps", "pml", "vit_b32"])
def test_the_commands_of_a_study_can_be_parsed(name):
    content = yaml.safe_load(Path(f"benchmarks/studies/{name}.yaml").read_text())
    commands = [command.format(out="out", seed=0) for command in content["prepare"]]
    commands.append(content["encode"].format(out="out", folder="run", split="test", features="test.npz"))
    made = Study(content, Path("out"))
    commands += [
        made.command(Run(setting, loss, "1e-3", 0)) for setting in content["settings"] for loss in content["losses"]
    ]
    parse_training = command_line.build_parser().parse_args if name == "pml" else parse_args
    for command in commands:
        program, *words = shlex.split(command)
        build_parser().parse_args(words) if program == "vl-plugins" else parse_training(words[2:])


def image_values_of(rsum, images=4):
    """Image values of a model whose images all contribute the same."""
    values = torch.full((2, images), float(rsum), dtype=torch.float64)
    entry = BlockedQueries(torch.tensor([0]), torch.tensor([1]), torch.zeros(1, dtype=torch.float64))
    recalls = torch.full((len(study.RECALLS), images), rsum / 6, dtype=torch.float64)
    names = ("rsum", "mean_average_precision_at_r", *study.RECALLS)
    blocked = (entry, None, *[entry] * 6)
    return ImageValues(names, torch.cat([values, recalls]), torch.ones(8, dtype=torch.float64), blocked)


def test_outcomes_are_kept_whole(tmp_path):
    """What each image contributes, and which images block its queries."""
    draws = torch.Generator().manual_seed(0)
    owners = torch.arange(50) % 20
    embeddings = torch.nn.functional.normalize(torch.randn(70, 8, generator=draws), dim=1)
    ranks = retrieval_ranks(embeddings[:20], embeddings[20:], owners, top=12)
    values = image_values(ranks, owners, 20)
    Outcome("train", 1.5, image_values_of(3.0), values).save(tmp_path / "run.npz")
    outcome = Outcome.load(tmp_path / "run.npz")
    assert (outcome.command, outcome.seconds) == ("train", 1.5)
    assert study.means(outcome.val)["rsum"] == 3.0
    assert outcome.test.metrics == values.metrics
    assert torch.equal(outcome.test.values, values.values)
    assert torch.equal(outcome.test.steps, values.steps)
    for loaded, saved in zip(outcome.test.blocked, values.blocked, strict=True):
        assert (loaded is None) == (saved is None)
        for column, expected in zip(loaded or (), saved or (), strict=True):
            assert torch.equal(column, expected)
    np.savez(tmp_path / "old.npz", command="train", seconds=1.0, val=np.zeros((6, 2)), test=np.zeros((6, 2)))
    with pytest.raises(UserError, match=r"old.npz was written by version 0.3: delete it to train the run again"):
        Outcome.load(tmp_path / "old.npz")


def test_learning_rates_are_chosen_on_validation(tmp_path):
    """Of the seeds for tuning; RSUM is of the test split and all seeds."""
    made = Study(CONTENT, tmp_path)
    rsums = {"clip": {"1e-3": (100, 300), "1e-2": (200, 90)}, "unified": {"1e-3": (2, 99), "1e-2": (1, 96)}}
    for loss, by_rate in rsums.items():
        for lr, (val, test) in by_rate.items():
            for seed in (0, 1):
                values = image_values_of(val - 300 * seed), image_values_of(test)
                made.outcomes[Run("scratch", loss, lr, seed)] = Outcome("", 1.0, *values)
    assert [made.best_lr("scratch", loss) for loss in rsums] == ["1e-2", "1e-3"]
    table = made.table("scratch", {"clip": "1e-2", "unified": "1e-2"})
    # Four images that agree: the interval is that of two queries more, of a step of 1 / 2 seeds in 4 images.
    half = stats.t.ppf(0.975, 3) * (2 * 0.5**2 / 4**2) ** 0.5
    assert f"| unified | 1e-2 | 96.0 ± 0.0 | +6.0 [+{6 - half:.1f}, +{6 + half:.1f}] | 16.0 |" in table


def test_a_stopped_study_continues(tmp_path, monkeypatch, capsys):
    """Commands are replaced: each leaves a file, and the fifth is stopped once; RSUM is above 0."""
    executed, features = [], Features(images=torch.eye(2), captions=torch.eye(2), image_of_caption=torch.arange(2))
    monkeypatch.setattr(study, "load_features", lambda file: features)

    def execute(command, log):
        if "encode" not in command:
            executed.append(command)
            (log.parent / "part").touch(exist_ok=False)
        if len(executed) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(study, "execute", execute)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(CONTENT))
    arguments = [str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")]
    assert study.main(arguments) == 130
    assert study.main(arguments) == 0
    assert study.main(arguments) == 0
    # The data, two checkpoints to start from, and one run for each rate and two more at the best one, of each loss.
    assert (len(executed), len(set(executed))) == (1 + 2 + 2 * (2 + 1) + 1, 1 + 2 + 2 * (2 + 1))
    with (tmp_path / "out" / "study.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["loss"], row["lr"], row["seed"]) for row in rows] == [
        (loss, lr, seed) for loss in ("clip", "unified") for lr, seed in (("1e-2", "0"), ("1e-3", "0"), ("1e-3", "1"))
    ]
    assert {(row["RSUM"], row["i2t R@1"]) for row in rows} == {("600.000", "100.000")}
    assert (tmp_path / "out" / "study.md").read_text().count("## scratch, ") == 2
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(CONTENT | {"losses": {"clip": "", "unified": "--loss vlc"}}))
    assert study.main(arguments) == 2
    assert "was made by another command" in capsys.readouterr().err


@pytest.mark.slow
def test_a_study_of_real_commands(tmp_path):
    content = yaml.safe_load(Path("benchmarks/studies/toy.yaml").read_text())
    content |= {"seeds": [0, 1], "losses": {name: content["losses"][name] for name in ("clip", "unified")}}
    content["settings"] = {"fine-tuned": content["settings"]["fine-tuned"] | {"lr": ["1e-3"]}}
    text = yaml.safe_dump(content, sort_keys=False, width=1000)
    for old, new in (
        ("4096", "256"),
        ("500", "16"),
        ("1000", "16"),
        ("1024", "64"),
        ("batch-size 64", "batch-size 16"),
    ):
        text = text.replace(old, new)
    (tmp_path / "study.yaml").write_text(text.replace("--epochs 8", "--epochs 1"))
    assert study.main([str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "study.md").read_text().count("| unified |") == 2
