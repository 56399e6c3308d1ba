"""The study of the losses, and its noisy pairs."""

import csv
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from benchmarks.noisy_pairs import AdaptiveMarginLoss, swap_captions
from benchmarks.study import Outcome, Run, Setting, difference, image_recalls, main
from vl_plugins.cli import build_parser
from vl_plugins.integrations.open_clip.options import parse_arguments
from vl_plugins.integrations.pytorch_metric_learning import command_line
from vl_plugins.losses import UnifiedLoss, soft_margin
from vl_plugins.retrieval import retrieval_metrics, retrieval_ranks
from vl_plugins.retrieval.features import Features

STUDY = {
    "train": "python -m trainer",
    "checkpoint": "{folder}/best.pt",
    "settings": {"scratch": {"flags": "--lr {lr}", "lr": ["1e-3", "1e-2"], "steps": 10}},
    "baseline": "clip",
    "losses": {"clip": "", "unified": "--loss unified"},
    "seeds": [0, 1],
    "tuning_seeds": [0],
}


@pytest.mark.parametrize("name", ["toy", "stamps", "noise", "pml", "vit_b32"])
def test_the_commands_of_a_study_can_be_parsed(name):
    study = yaml.safe_load(Path(f"benchmarks/studies/{name}.yaml").read_text())
    commands = [command.format(out="out") for command in study["prepare"] if "noisy_pairs" not in command]
    commands.append(study["evaluate"].format(out="out", checkpoint="best.pt", split="test"))
    for setting in study["settings"]:
        made = Setting(setting, study, Path("out"))
        commands += [made.train_command(Run(loss, "1e-3", 0)) for loss in study["losses"]]
        commands += [made.start_command(0)] if "start" in made.options else []
    parse_training = command_line.build_parser().parse_args if name == "pml" else parse_arguments
    for command in commands:
        program, *words = shlex.split(command.replace("noisy_pairs train", "noisy_pairs"))
        build_parser().parse_args(words) if program == "vl-plugins" else parse_training(words[2:])


def outcome(val, test, images=4):
    """Return the outcome of a run with these RSUM."""
    return Outcome("", 1.0, np.full((6, images), val / 6), np.full((6, images), test / 6))


def test_recalls_of_images_have_the_recalls_as_their_mean():
    embeddings = torch.nn.functional.normalize(torch.randn(70, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    images, captions, image_of_caption = embeddings[:20], embeddings[20:], torch.arange(50) % 20
    metrics = retrieval_metrics(retrieval_ranks(images, captions, image_of_caption))
    expected = [metrics[f"{direction}_R@{k}"] for direction in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
    features = Features(images=images, captions=captions, image_of_caption=image_of_caption)
    np.testing.assert_allclose(image_recalls(features).mean(axis=1), expected, rtol=1e-12)


@pytest.mark.parametrize("shape", [(400, 1), (1, 400)], ids=["seeds", "images"])
def test_the_interval_is_that_of_a_mean(shape):
    """Of 400 independent numbers: 1.96 standard errors both ways."""
    noise = np.random.default_rng(0).normal(size=shape)
    ours, baseline = (3 + noise)[:, None] * np.eye(6)[0][:, None], np.zeros((shape[0], 6, shape[1]))
    mean, low, high = difference(list(ours), list(baseline))
    assert mean == pytest.approx(3 + noise.mean())
    error = noise.std() / 20
    assert (mean - low, high - mean) == pytest.approx((1.96 * error, 1.96 * error), rel=0.1)


def test_a_difference_is_paired():
    """What both have, by seed and by image, is no part of the interval."""
    common = np.random.default_rng(0).normal(size=(5, 6, 100))
    assert difference(list(common + 1), list(common)) == pytest.approx((6, 6, 6))


def test_learning_rates_are_chosen_on_validation(tmp_path):
    setting = Setting("scratch", STUDY, tmp_path)
    assert setting.pending()[:2] == [Run("clip", "1e-3", 0), Run("clip", "1e-2", 0)]
    assert list(setting.tables()) == []
    setting.outcomes = {Run("clip", "1e-3", 0): outcome(100, 300), Run("clip", "1e-2", 0): outcome(200, 90)}
    assert setting.best_lr("clip") == "1e-2"
    # The baseline's rate for all, then the tuning of the others.
    expected = [Run("unified", "1e-2", 0), Run("clip", "1e-2", 1), Run("unified", "1e-2", 1), Run("unified", "1e-3", 0)]
    assert setting.pending() == expected
    setting.outcomes |= dict(zip(expected, map(outcome, (1, 1, 1, 2), (96, 90, 96, 1)), strict=True))
    assert setting.pending() == [Run("unified", "1e-3", 1)]
    table = "\n".join(setting.tables())
    assert "| unified | 1e-2 | 96.0 ± 0.0 | +6.0 [+6.0, +6.0] |" in table


def test_a_run_of_another_command_is_not_mixed_in(tmp_path, capsys):
    (tmp_path / "runs" / "scratch").mkdir(parents=True)
    np.savez(tmp_path / "runs" / "scratch" / "clip-lr1e-3-seed0.npz", **outcome(1, 1)._asdict())
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY | {"prepare": []}))
    assert main([str(tmp_path / "study.yaml"), "--out", str(tmp_path)]) == 2
    assert "was made by another command" in capsys.readouterr().err


# The study, which is killed when it starts a training after the first fine-tuned one.
KILLED = """
import os, signal, sys
from pathlib import Path
from benchmarks import study

execute = study.execute

def execute_or_die(command, log):
    if list(Path(sys.argv[3]).glob("runs/fine-tuned/*.npz")):
        os.kill(os.getpid(), signal.SIGKILL)
    execute(command, log)

study.execute = execute_or_die
sys.exit(study.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_study_goes_on(tmp_path):
    study = yaml.safe_load(Path("benchmarks/studies/toy.yaml").read_text()) | {"seeds": [0, 1], "tuning_seeds": [0]}
    study["prepare"][0] = study["prepare"][0].replace("4096", "64").replace("500", "16").replace("1000", "16")
    study["prepare"][1] = study["prepare"][1].replace("1024", "16")
    study["losses"] = {name: study["losses"][name] for name in ("clip", "unified", "sets")}
    for setting in study["settings"].values():
        setting["lr"] = setting["lr"][:1]
    (tmp_path / "study.yaml").write_text(
        yaml.safe_dump(study, sort_keys=False).replace("--batch-size 64", "--batch-size 16")
    )
    arguments = [tmp_path / "study.yaml", "--out", tmp_path / "out"]
    assert subprocess.run([sys.executable, "-c", KILLED, *arguments]).returncode == -signal.SIGKILL
    finished = {file: file.read_bytes() for file in tmp_path.glob("out/runs/*/*.npz")}
    assert len(finished) == 7  # from scratch 2 x 3, and the first one after them
    subprocess.run([sys.executable, "-m", "benchmarks.study", *arguments], check=True)
    assert all(file.read_bytes() == content for file, content in finished.items())
    with (tmp_path / "out" / "study.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 12
    assert (tmp_path / "out" / "study.md").read_text().count("| sets |") == 2


def test_swapped_captions():
    sentences = [[{"raw": f"caption {image}", "sentid": image}] for image in range(30)]
    images = [{"split": "train" if image < 20 else "val", "sentences": each} for image, each in enumerate(sentences)]
    before = json.loads(json.dumps(images))
    swap_captions({"images": images}, 0.4)
    changed = [image for image in range(30) if images[image]["sentences"] != before[image]["sentences"]]
    assert len(changed) == 8
    assert max(changed) < 20, "only training images"
    texts = [{image["sentences"][0]["raw"] for image in each[:20]} for each in (images, before)]
    assert texts[0] == texts[1]
    assert all(image["sentids"] == [image["sentences"][0]["sentid"]] for image in (images[i] for i in changed))


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
