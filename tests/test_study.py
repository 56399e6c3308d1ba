"""The study of the losses."""

import csv
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from benchmarks import study
from benchmarks.study import Outcome, Run, Study
from vl_plugins.cli import build_parser
from vl_plugins.integrations.open_clip.flags import parse_args
from vl_plugins.integrations.pytorch_metric_learning import command_line
from vl_plugins.retrieval import retrieval_metrics, retrieval_ranks
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


def test_recalls_of_images_have_the_recalls_as_their_mean():
    embeddings = torch.nn.functional.normalize(torch.randn(70, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    images, captions, image_of_caption = embeddings[:20], embeddings[20:], torch.arange(50) % 20
    metrics = retrieval_metrics(retrieval_ranks(images, captions, image_of_caption))
    expected = [metrics[f"{direction}_R@{k}"] for direction in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
    features = Features(images=images, captions=captions, image_of_caption=image_of_caption)
    np.testing.assert_allclose(study.image_recalls(features).mean(axis=1), 100 * np.array(expected), rtol=1e-12)


@pytest.mark.parametrize("shape", [(400, 1), (1, 400)], ids=["seeds", "images"])
def test_the_interval_is_that_of_a_mean(shape):
    """Of 400 independent numbers: 1.96 standard errors both ways."""
    noise = np.random.default_rng(0).normal(size=shape)
    ours, baseline = (3 + noise)[:, None] * np.eye(6)[0][:, None], np.zeros((shape[0], 6, shape[1]))
    mean, low, high = study.difference(list(ours), list(baseline))
    assert mean == pytest.approx(3 + noise.mean())
    error = noise.std() / 20
    assert (mean - low, high - mean) == pytest.approx((1.96 * error, 1.96 * error), rel=0.1)
    # What both have, by seed and by image, is no part of it.
    assert study.difference(list(ours + 1), list(ours)) == pytest.approx((6, 6, 6))


def test_learning_rates_are_chosen_on_validation(tmp_path):
    """Of the seeds for tuning; RSUM is of the test split and all seeds."""
    made = Study(CONTENT, tmp_path)
    rsums = {"clip": {"1e-3": (100, 300), "1e-2": (200, 90)}, "unified": {"1e-3": (2, 99), "1e-2": (1, 96)}}
    for loss, by_rate in rsums.items():
        for lr, (val, test) in by_rate.items():
            for seed in (0, 1):
                recalls = (np.full((6, 4), rsum / 6) for rsum in (val - 300 * seed, test))
                made.outcomes[Run("scratch", loss, lr, seed)] = Outcome("", 1.0, *recalls)
    assert [made.best_lr("scratch", loss) for loss in rsums] == ["1e-2", "1e-3"]
    table = made.table("scratch", {"clip": "1e-2", "unified": "1e-2"})
    assert "| unified | 1e-2 | 96.0 ± 0.0 | +6.0 [+6.0, +6.0] | 16.0 |" in table


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
