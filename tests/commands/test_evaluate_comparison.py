"""``vl-plugins evaluate`` with several models: differences, tables of queries, and other tools' rules."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from vl_plugins.cli import main
from vl_plugins.retrieval import compare, retrieval_metrics
from vl_plugins.retrieval.features import load_features
from vl_plugins.retrieval.protocols import evaluate as evaluate_protocol

IMAGES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Features of three seeds of two models, and of one more model: 60 images with one to four captions."""
    folder = tmp_path_factory.mktemp("features")
    draws = np.random.default_rng(0)
    image_of_caption = np.repeat(np.arange(IMAGES), draws.integers(1, 5, size=IMAGES))
    content = draws.normal(size=(IMAGES, 8))
    errors = {"clip-0": 1.0, "clip-1": 1.0, "clip-2": 1.0, "unified-0": 0.5, "unified-1": 0.5, "unified-2": 0.5}
    for name, error in (errors | {"other": 0.9}).items():
        images = content + error * draws.normal(size=content.shape)
        captions = content[image_of_caption] + error * draws.normal(size=(len(image_of_caption), 8))
        np.savez(
            folder / f"{name}.npz",
            image_features=images / np.linalg.norm(images, axis=1, keepdims=True),
            caption_features=captions / np.linalg.norm(captions, axis=1, keepdims=True),
            image_of_caption=image_of_caption,
        )
    (folder / "copy.npz").write_bytes((folder / "clip-0.npz").read_bytes())
    return folder


@pytest.fixture
def run(folder, capsys):
    """Function that evaluates features, ``NAME=FILE`` or ``FILE`` without the folder, and returns what is printed."""

    def run_command(features, *options, status=0):
        words = []
        for word in features.split():
            name, _, file = word.rpartition("=")
            words.append(f"{name}={folder}/{file}.npz" if name else f"{folder}/{file}.npz")
        assert main(["evaluate", "--features", *words, *map(str, options)]) == status
        printed = capsys.readouterr()
        return printed.err if status else printed.out

    return run_command


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_an_output_without_minus_signs_gets_all_numbers(folder, encoding):
    """As a file that Windows writes, or a terminal without a locale."""
    command = [sys.executable, "-m", "vl_plugins.cli", "evaluate", "--features", "clip-0.npz", "other.npz"]
    printed = {}
    for name in ("utf-8", encoding):
        environment = {**os.environ, "PYTHONIOENCODING": name}
        finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
        printed[name] = finished.stdout.decode(name)
    assert "\N{MINUS SIGN}" in printed["utf-8"]
    plain = printed["utf-8"].replace("\N{MINUS SIGN}", "-")
    if encoding == "ascii":
        plain = plain.replace("\N{PLUS-MINUS SIGN}", "+/-")
    assert printed[encoding] == plain


SEEDS = "clip=clip-0 clip=clip-1 clip=clip-2 unified=unified-0 unified=unified-1 unified=unified-2"


def evaluation(folder, name):
    return evaluate_protocol([load_features(folder / f"{name}.npz")], for_comparison=True)


def test_a_repeated_name_is_another_seed(run, folder):
    """JSON has what Python computes from the same files, and text rounds it."""
    content = json.loads(run(f"{SEEDS} other", "--json"))
    assert [(row["name"], row.get("seed")) for row in content["results"]] == [
        *[(name, seed) for name in ("clip", "unified") for seed in (1, 2, 3)],
        ("other", None),
    ]
    models = {name: [f"{name}-{seed}" for seed in range(3)] for name in ("clip", "unified")} | {"other": ["other"]}
    values = {}
    for name, files in models.items():
        values[name] = [evaluation(folder, file).image_values()["plain"] for file in files]
    expected = compare(values, "clip")
    assert content["baseline"] == "clip"
    assert [*content["differences"]["plain"]] == ["unified", "other"]
    for name, by_metric in expected.items():
        for metric, difference in by_metric.items():
            found = content["differences"]["plain"][name][metric]
            assert (found["low"], found["high"]) == pytest.approx((difference.low, difference.high))
            assert found["difference"] == pytest.approx(difference.mean)
            assert found["resolved"] == difference.resolved
    lines = run(f"{SEEDS} other").splitlines()
    assert lines[0] == f"plain: {IMAGES} images, {content['results'][0]['metrics']['plain']['num_captions']} captions"
    rsum = expected["unified"]["rsum"]
    assert [line.partition("  ")[0] for line in lines[2:5]] == [
        "clip (mean of 3 seeds)",
        "unified (mean of 3 seeds)",
        "other",
    ]
    assert lines[3].split()[-1] == f"{rsum.value:.1f}"
    assert lines[5:7] == ["", "plain, compared with clip:"]
    assert lines[8].split() == [
        *["unified", "3", "vs", "3", f"{rsum.value:.1f}", f"{rsum.mean:+.1f}"],
        *[f"[{rsum.low:+.1f},", f"{rsum.high:+.1f}]", "better"],
    ]
    assert "other: with fewer than three seeds on a side, it is about these checkpoints" in lines[-2]


def test_one_model_is_not_compared(run):
    assert "compared" not in run("clip-0")
    assert {"baseline", "differences"}.isdisjoint(json.loads(run("clip-0", "--json")))
    # Three seeds of one model are its mean.
    assert "compared" not in run("clip=clip-0 clip=clip-1 clip=clip-2")


def test_the_baseline_can_be_any_model(run):
    first = json.loads(run("clip-0 other", "--json"))["differences"]["plain"]["other"]["rsum"]
    second = json.loads(run("clip-0 other", "--json", "--baseline", "other"))["differences"]["plain"]["clip-0"]["rsum"]
    assert (first["low"], first["high"]) == pytest.approx((-second["high"], -second["low"]))


def test_an_ensemble_has_the_first_seeds(run, folder):
    text = run(SEEDS, "--ensemble")
    assert "The ensemble has the first seed of each model." in text
    names = "clip-0", "unified-0"
    features = [load_features(folder / f"{name}.npz") for name in names]
    metrics = evaluate_protocol(features).metrics["plain"]
    (row,) = [line for line in text.split("\n\n")[0].splitlines() if line.startswith("ensemble")]
    assert row.split()[-1] == f"{metrics['rsum']:.1f}"


def test_hubness_is_beside_the_metrics(run, folder):
    (row,) = json.loads(run("clip-0", "--json"))["results"]
    assert row["metrics"]["plain"].items() >= evaluation(folder, "clip-0").hubness("plain").items()


def test_seeds_without_a_common_name_bring_a_hint(folder, capsys):
    files = [f"{folder}/{name}.npz" for name in ("clip-0", "clip-1", "clip-2", "other")]
    assert main(["evaluate", "--features", *files]) == 0
    line = "clip-0, clip-1, clip-2 are compared as 3 models; give seeds of one model one name: clip=FILE"
    assert capsys.readouterr().err == f"vl-plugins evaluate: warning: {line}\n"
    named = [f"clip-{number}={file}" for number, file in enumerate(files)]
    assert main(["evaluate", "--features", *named]) == 0
    assert capsys.readouterr().err == ""


def test_one_image_has_no_interval(run, folder):
    for name in ("one", "two"):
        arrays = {"image_features": np.eye(1, 4), "caption_features": np.eye(2, 4)[:: -1 if name == "two" else 1]}
        np.savez(folder / f"{name}.npz", **arrays, image_of_caption=np.zeros(2, int))
    assert "no comparison: it needs two images or more" in run("one two")


@pytest.mark.parametrize(
    ("features", "options", "message"),
    [
        ("clip-0 x=clip-0", "", "clip-0.npz is given twice: as clip-0 and x, a model would be compared with itself"),
        ("x=clip-0 y=copy", "", "copy.npz have the same content: as x and y, a model would be compared with itself"),
        ("x=clip-0 x=copy", "", "copy.npz have the same content: one training cannot be two seeds of x"),
        ("clip-0 clip-0", "", "clip-0.npz is given twice"),
        ("clip-0", "--baseline clip-0", "--baseline: there is nothing to compare with; give two models or more"),
        ("clip-0 clip-1", "--baseline clip_0", "unknown baseline 'clip_0' (did you mean 'clip-0'?)"),
        ("clip-0", "--suspects a.csv", "--suspects writes captions, which only shards have: give --shards"),
        ("clip-0", "--confidence 0.3", "--confidence is for --suspects"),
        ("clip-0", "--suspects a.csv --shards x.tar --confidence 1", "--confidence must be above 0 and below 1, got 1"),
        ("clip-0", "--suspects a.tsv --shards x.tar", "a.tsv"),
        ("clip-0", "--per-query a.xlsx", "a.xlsx"),
    ],
)
def test_wrong_input(run, features, options, message):
    (line,) = run(features, *options.split(), status=2).splitlines()
    assert line.startswith("vl-plugins evaluate: error: ")
    assert message in line


@pytest.mark.parametrize("change", ["other captions", "another order", "fewer images"])
def test_models_of_other_images_are_not_compared(run, folder, change):
    """Nor of the same images in another order, where ids tell."""
    arrays = dict(np.load(folder / "clip-0.npz"))
    owners = arrays["image_of_caption"]
    ids = np.arange(IMAGES)
    np.savez(folder / "with-ids.npz", **arrays, image_ids=ids)
    message = "image_ids: number 0 of 60 is 59, expected 0"
    if change == "other captions":
        arrays["image_of_caption"], message = owners[::-1].copy(), "image_of_caption: number 0 of"
    elif change == "another order":
        arrays |= {"image_ids": ids[::-1].copy()}
    else:
        kept = owners < 50
        arrays = {"image_features": arrays["image_features"][:50], "caption_features": arrays["caption_features"][kept]}
        arrays |= {"image_of_caption": owners[kept]}
        message = "image_of_caption: there are"
    np.savez(folder / "changed.npz", **arrays)
    (line,) = run("with-ids changed", status=2).splitlines()
    assert f"changed.npz and {folder}/with-ids.npz do not belong together: {message}" in line


def test_a_row_for_each_query(run, folder, tmp_path):
    """Of each seed; the recalls of its rows are those of the table."""
    run(SEEDS, "--per-query", tmp_path / "queries.csv")
    with open(tmp_path / "queries.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    captions = len(load_features(folder / "clip-0.npz").captions)
    assert len(rows) == 6 * (IMAGES + captions)
    metrics = retrieval_metrics(evaluation(folder, "unified-1").ranks)
    for direction, queries in (("image_to_text", IMAGES), ("text_to_image", captions)):
        own = [row for row in rows if (row["model"], row["seed"], row["direction"]) == ("unified", "2", direction)]
        assert len(own) == queries
        recall = sum(int(row["rank"]) <= 5 for row in own) / queries
        assert recall == pytest.approx(metrics[f"{direction}_R@5"])


def test_rules_of_other_tools(run, folder):
    """The first row is our own; the others are in the tests of rules."""
    text = run("clip=clip-0 clip=clip-1 other", "--rules")
    (_, first), (_, second) = (part.split(", by the rules of other tools:\n") for part in text.split("\n\n")[-2:])
    for table, name in ((first, "clip-0"), (second, "other")):
        metrics = evaluation(folder, name).metrics["plain"]
        recalls = [metrics[f"{way}_R@{k}"] for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
        row = table.splitlines()[1]
        assert row.split()[-6:] == [f"{100 * recall:.1f}" for recall in recalls]
    assert "\nclip, seed 1, by the rules of other tools:\n" in text
    rules = json.loads(run("clip-0", "--rules", "--json"))["rules"]
    assert [*rules] == ["clip-0"]
    assert len(rules["clip-0"]) == len(first.split("A range")[0].splitlines()) - 1


def test_images_that_are_repeated_for_their_captions(run, folder):
    """Without the flag a warning says what to do; with it the numbers are those of images that stand there once."""
    features = load_features(folder / "clip-0.npz")
    np.savez(
        folder / "pairs.npz",
        image_features=features.images[features.image_of_caption].numpy(),
        caption_features=features.captions.numpy(),
    )
    captions = len(features.captions)
    message = run("pairs", status=2)
    assert f"{captions} image rows, {IMAGES} different: is it one row per caption? use --image-per-caption" in message
    lines = run("pairs", "--image-per-caption").splitlines()
    assert lines[0] == f"plain: {IMAGES} images, {captions} captions"
    assert lines[2].split()[1:] == run("clip-0").splitlines()[2].split()[1:]


def test_numbers_of_all_protocols_are_means_of_what_images_contribute(coco_features):
    """To all digits that are printed; COCO 1K has five folds, and ECCV Caption other right answers."""
    for protocol in ("plain", "coco-5k", "coco-1k", "eccv"):
        evaluation = evaluate_protocol([coco_features], protocol, for_comparison=True)
        for result, values in evaluation.image_values().items():
            metrics = evaluation.metrics[result]
            for name, mean in zip(values.metrics, values.values.mean(dim=1).tolist(), strict=True):
                if name in metrics:
                    scale = 1 if name == "rsum" else 100
                    assert mean == pytest.approx(scale * metrics[name], abs=1e-9), (result, name)


@pytest.fixture
def coco_features():
    """Features of COCO's test split, with its ids."""
    pytest.importorskip("eccv_caption")
    from vl_plugins.retrieval.features import Features
    from vl_plugins.retrieval.protocols import _coco_test_split

    split = _coco_test_split()
    draws = torch.Generator().manual_seed(0)
    image_of_caption = torch.arange(5000).repeat_interleave(5)
    content = torch.randn(5000, 16, generator=draws)
    captions = content[image_of_caption] + torch.randn(25000, 16, generator=draws)
    return Features(
        images=torch.nn.functional.normalize(content, dim=1),
        captions=torch.nn.functional.normalize(captions, dim=1),
        image_of_caption=image_of_caption,
        image_ids=list(split),
        caption_ids=[caption for captions in split.values() for caption in captions],
    )
