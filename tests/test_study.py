"""The study of the losses, and its noisy pairs."""

import csv
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from benchmarks import study
from benchmarks.noisy_pairs import AdaptiveMarginLoss, swap_captions
from benchmarks.study import Outcome, Run, Study
from vl_plugins.cli import build_parser
from vl_plugins.integrations.open_clip.flags import parse_args
from vl_plugins.integrations.pytorch_metric_learning import command_line
from vl_plugins.losses import UnifiedLoss, soft_margin
from vl_plugins.retrieval import retrieval_metrics, retrieval_ranks
from vl_plugins.retrieval.features import Features

CONTENT = {
    "prepare": [],
    "train": "python -m trainer --out {folder}",
    "checkpoint": "{folder}/best.pt",
    "settings": {"scratch": {"flags": "--lr {lr}", "lr": ["1e-3", "1e-2"], "steps": 10}},
    "baseline": "clip",
    "losses": {"clip": "", "unified": "--loss unified"},
    "seeds": [0, 1],
    "tuning_seeds": [0],
}


@pytest.mark.parametrize("name", ["toy", "stamps", "noise", "pml", "vit_b32"])
def test_the_commands_of_a_study_can_be_parsed(name):
    content = yaml.safe_load(Path(f"benchmarks/studies/{name}.yaml").read_text())
    commands = [command.format(out="out") for command in content["prepare"] if "noisy_pairs" not in command]
    commands.append(content["encode"].format(out="out", checkpoint="best.pt", split="test", features="test.npz"))
    made = Study(content, Path("out"))
    for setting, options in content["settings"].items():
        runs = [Run(setting, loss, "1e-3", 0) for loss in content["losses"]]
        commands += [*map(made.command, runs), *([made.command(runs[0], start=True)] if "start" in options else [])]
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
    def outcome(val, test):
        return Outcome("", 1.0, np.full((6, 4), val / 6), np.full((6, 4), test / 6))

    made = Study(CONTENT, tmp_path)
    clip, other = (Run("scratch", "clip", lr, 0) for lr in ("1e-3", "1e-2"))
    assert made.pending()[:2] == [clip, other]
    assert list(made.tables("scratch")) == []
    made.outcomes = {clip: outcome(100, 300), other: outcome(200, 90)}
    # The baseline's rate for all, then the tuning of the others.
    runs = [("unified", "1e-2", 0), ("clip", "1e-2", 1), ("unified", "1e-2", 1), ("unified", "1e-3", 0)]
    assert made.pending() == [Run("scratch", *run) for run in runs]
    made.outcomes |= dict(zip(made.pending(), map(outcome, (1, 1, 1, 2), (96, 90, 96, 1)), strict=True))
    assert made.pending() == [Run("scratch", "unified", "1e-3", 1)]
    assert "| unified | 1e-2 | 96.0 ± 0.0 | +6.0 [+6.0, +6.0] |" in "\n".join(made.tables("scratch"))


def test_a_stopped_study_goes_on(tmp_path, monkeypatch, capsys):
    """Commands are replaced: each training leaves a file, and is stopped once; RSUM is above 0."""
    executed, features = [], Features(images=torch.eye(2), captions=torch.eye(2), image_of_caption=torch.arange(2))
    monkeypatch.setattr(study, "load_features", lambda file: features)

    def execute(command, log):
        executed.append(command)
        (log.parent / "part").touch(exist_ok=False)
        if len(executed) == 3:
            raise KeyboardInterrupt

    content = CONTENT | {"prepare": ["make data"], "encode": "encode {features}"}
    content["settings"] = {"tuned": CONTENT["settings"]["scratch"] | {"lr": ["1e-3"], "start": "--epochs 1"}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(study, "execute", lambda command, log: None if "encode" in command else execute(command, log))
    arguments = [str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")]
    assert study.main(arguments) == 130
    assert study.main(arguments) == 0
    # Once the data and two checkpoints to start from; four runs, of which the first one was stopped.
    assert (len(executed), len(set(executed))) == (8, 7)
    with (tmp_path / "out" / "study.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["loss"], row["seed"], row["RSUM"], row["i2t R@1"]) for row in rows] == [
        (loss, seed, "600.000", "100.000") for loss in ("clip", "unified") for seed in "01"
    ]
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(content | {"losses": {"clip": "", "unified": "--loss vlc"}}))
    assert study.main(arguments) == 2
    assert "was made by another command" in capsys.readouterr().err


@pytest.mark.slow
def test_a_study_of_real_commands(tmp_path):
    content = yaml.safe_load(Path("benchmarks/studies/noise.yaml").read_text())
    content |= {"seeds": [0, 1], "settings": {"noise-40": content["settings"]["noise-40"]}}
    text = yaml.safe_dump(content, sort_keys=False)
    for old, new in (("2048", "64"), ("500", "16"), ("1000", "16"), ("1024", "32"), ("batch-size 64", "batch-size 16")):
        text = text.replace(old, new)
    (tmp_path / "study.yaml").write_text(text)
    assert study.main([str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "study.md").read_text().count("| adaptive |") == 1


def test_swapped_captions():
    images = [{"split": "train" if i < 20 else "val", "sentences": [{"sentid": i}], "sentids": [i]} for i in range(30)]
    swap_captions({"images": images}, 0.4)
    found = [image["sentences"][0]["sentid"] for image in images]
    assert [image["sentids"] for image in images] == [[caption] for caption in found]
    assert sorted(found[:20]) == [*range(20)]
    assert sum(image != caption for image, caption in enumerate(found[:20])) == 8
    assert found[20:] == [*range(20, 30)], "only training images"


def test_adaptive_margin():
    """Against the unified loss with the margins that follow from the similarities of the pairs."""
    similarities = torch.tensor([[0.8, 0.1, 0.3], [0.2, 0.4, 0.5], [0.1, 0.3, -0.2]], requires_grad=True)
    positive_mask = torch.eye(3, dtype=torch.bool)
    value = AdaptiveMarginLoss(scale=7).from_similarities(similarities, positive_mask, ~positive_mask)
    confidence = torch.tensor([1.0, 0.5, 0.0])  # relative to 0.8, the best tenth of three
    loss = UnifiedLoss(margin=soft_margin(confidence, margin=0.2).diag(), scale=7)
    expected = loss.from_similarities(similarities, positive_mask, ~positive_mask)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, similarities), torch.autograd.grad(expected, similarities))
