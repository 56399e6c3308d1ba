"""Trainings from a configuration on the toy shards: numbers, stages, resuming, and what the folder holds."""

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import yaml
from pytorch_metric_learning.trainers import MetricLossOnly, TwoStreamMetricLoss
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from tests.integrations.pytorch_metric_learning.settings import IMAGE_TRUNK, settings
from tests.reference import retrieval as reference
from vl_plugins import list_losses
from vl_plugins.cli import main as vl_plugins_main
from vl_plugins.data.reader import evaluation_pipeline
from vl_plugins.integrations.checkpoints import load_model
from vl_plugins.integrations.pytorch_metric_learning import build_trainer
from vl_plugins.integrations.pytorch_metric_learning.checkpoints import write_checkpoint
from vl_plugins.integrations.pytorch_metric_learning.config import parse_config
from vl_plugins.integrations.pytorch_metric_learning.runs import LATEST, Run, dry_run
from vl_plugins.utils.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def results(folder):
    return [json.loads(row) for row in (folder / "results.jsonl").read_text().splitlines()]


def train(plain, folder, **options):
    return Run(parse_config(plain), folder, **options).train()


@pytest.fixture(scope="module")
def trained(toy_shards, tmp_path_factory):
    """A run of three epochs in two stages, the second with the image trunk unfrozen."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    stages = [{"epochs": 2, "freeze": ["image_trunk"]}, {"epochs": 1, "optimizer": {"name": "SGD", "lr": 0.1}}]
    plain = settings(toy_shards, stages=stages)
    train(plain, folder)
    return plain, folder


def test_what_the_folder_holds(trained):
    plain, folder = trained
    rows = results(folder)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert parse_config(yaml.safe_load((folder / "config.yaml").read_text())) == parse_config(plain)
    best = torch.load(folder / "best.pt", weights_only=True)
    assert best["metrics"]["rsum_percent"] == max(row["rsum_percent"] for row in rows)
    assert best["epoch"] == max(rows, key=lambda row: (row["rsum_percent"], -row["epoch"]))["epoch"]
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("val/rsum_percent")] == pytest.approx(
        [row["rsum_percent"] for row in rows]
    )
    assert [event.step for event in events.Scalars("val/rsum_percent")] == [3, 7, 11]
    assert [event.step for event in events.Scalars("train/total_loss")] == [0, 2, 4, 6, 8, 10]
    assert [event.value for event in events.Scalars("lr/text_trunk")] == pytest.approx([0.01] * 4 + [0.1] * 2)
    assert [event.step for event in events.Scalars("lr/image_trunk")] == [8, 10]


def test_the_loaded_model_has_the_numbers_of_its_epoch(trained, toy_shards):
    _, folder = trained
    model, transform, tokenizer = load_model(folder / LATEST)
    batches = evaluation_pipeline(f"{toy_shards}/toy-val-{{000000..000002}}.tar", transform, tokenizer, 16)
    images, captions, image_of_caption = [], [], []
    with torch.no_grad():
        for pictures, texts, image_in_batch, positions in batches:
            images.append(model.encode_image(pictures))
            captions.append(model.encode_text(texts))
            image_of_caption += positions[image_in_batch].tolist()
    images, captions = (torch.nn.functional.normalize(torch.cat(parts)) for parts in (images, captions))
    scores = (images @ captions.T).tolist()
    by_image, by_caption = reference.by_image_and_by_caption(image_of_caption)
    row, rsum = results(folder)[-1], 0
    columns = [list(column) for column in zip(*scores, strict=True)]
    for way, rows, answers in (("image_to_text", scores, by_image), ("text_to_image", columns, by_caption)):
        ranks = reference.direction(rows, answers)["rank"]
        assert row[f"{way}_median_rank"] == reference.median(ranks)
        for k in (1, 5, 10):
            recall = 100 * sum(rank <= k for rank in ranks) / len(ranks)
            assert row[f"{way}_R@{k}_percent"] == pytest.approx(recall)
            rsum += recall
    assert row["rsum_percent"] == pytest.approx(rsum)
    # A hit among ties is one for AccuracyCalculator; random vectors have none.
    for way in ("image_to_text", "text_to_image"):
        accuracy = row[f"accuracy_calculator/{way}_precision_at_1_percent"]
        assert accuracy == pytest.approx(row[f"{way}_R@1_percent"])


def test_stages_freeze_and_unfreeze(trained, toy_shards, tmp_path):
    plain, folder = trained
    first = {**plain, "stages": plain["stages"][:1]}
    train(first, tmp_path / "first")
    states = [torch.load(path / LATEST, weights_only=True)["models"] for path in (folder, tmp_path / "first")]
    untrained = build_trainer(parse_config(first)).models["image_trunk"].state_dict()
    torch.testing.assert_close(states[1]["image_trunk"], untrained, rtol=0, atol=0)
    changed = [name for name, value in states[0]["image_trunk"].items() if not torch.equal(value, untrained[name])]
    assert len(changed) > 5
    assert results(tmp_path / "first") == results(folder)[:2]


def test_the_command_line_evaluates_its_checkpoint(trained, toy_shards, capsys):
    _, folder = trained
    arguments = ["evaluate", "--checkpoint", folder / LATEST, "--device", "cpu", "--workers", "0", "--batch-size", "16"]
    arguments += ["--shards", f"{toy_shards}/toy-val-{{000000..000002}}.tar", "--json"]
    assert vl_plugins_main([*map(str, arguments)]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    row = results(folder)[-1]
    assert result["metrics"]["plain"]["rsum"] == pytest.approx(row["rsum_percent"])
    assert result["metrics"]["plain"]["image_to_text_R@5"] == pytest.approx(row["image_to_text_R@5_percent"])
    assert vl_plugins_main([*map(str, arguments), "--model", "vl-tiny"]) == 2
    assert "already specifies its model; drop vl-tiny" in capsys.readouterr().err


def test_pictures_of_a_run_and_of_its_sets(toy_shards, tmp_path):
    head = {"name": "set", "num_slots": 2, "num_iters": 2, "hidden_dim": 16}
    train(settings(toy_shards, head=head, training={"epochs": 1}, accuracy=False), tmp_path / "run")
    shards = f"{toy_shards}/toy-val-000000.tar"
    attention = ["plot", "attention", "--checkpoint", tmp_path / "run" / LATEST, "--shards", shards, "--images", "1"]
    assert vl_plugins_main([*map(str, attention), "--out", str(tmp_path / "a.png"), "--device", "cpu"]) == 0
    assert vl_plugins_main(["plot", "training", str(tmp_path / "run"), "--out", str(tmp_path / "b.png")]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == {"a.png", "b.png"}


def test_region_features(toy_scenes, tmp_path):
    """From arrays to numbers: each image has as many regions as objects, in colours and places that captions name."""
    (tmp_path / "arrays").mkdir()
    annotations = json.loads((toy_scenes / "dataset_toy.json").read_text())
    words = {word: number for number, word in enumerate(("red", "green", "blue", "yellow", "purple", "cyan"))}
    for item in annotations["images"]:
        text = " ".join(sentence["raw"] for sentence in item["sentences"])
        present = [number for word, number in words.items() if word in text]
        array = np.eye(len(words), dtype=np.float32)[present]
        np.save(tmp_path / "arrays" / f"{item['cocoid']}.npy", array)
    source = ["shards", "coco", "--annotations", toy_scenes / "dataset_toy.json", "--features", tmp_path / "arrays"]
    assert vl_plugins_main([*map(str, source), "--out", str(tmp_path / "shards"), "--samples-per-shard", "8"]) == 0
    plain = settings(
        tmp_path / "shards",
        image={"trunk": {"name": "features", "width": len(words), "dropout": 0.2}, "pooling": "gpo"},
        training={"epochs": 8},
        accuracy=False,
    )
    plain["data"]["inputs"] = "features"
    metrics = train(plain, tmp_path / "run")
    # A model that knows nothing finds 41.7 and 20.8 percent among the first ten of 24 images with 120 captions.
    assert metrics["image_to_text_R@10_percent"] > 50
    arguments = ["evaluate", "--checkpoint", tmp_path / "run" / LATEST, "--device", "cpu", "--workers", "0"]
    assert vl_plugins_main([*map(str, arguments), "--shards", plain["data"]["val"]]) == 0
    with pytest.raises(UserError, match="features"):
        train({**plain, "data": plain["data"] | {"inputs": "images"}}, tmp_path / "other")


class Killed(Exception):
    pass


@pytest.mark.parametrize("step", [1, 6, 8])
def test_a_run_that_was_stopped_goes_on_to_the_same_numbers(trained, tmp_path, monkeypatch, step):
    plain, folder = trained
    end_of_iteration = Run._end_of_iteration

    def kill(self, trainer):
        end_of_iteration(self, trainer)
        if trainer.get_global_iteration() == step:
            raise Killed

    monkeypatch.setattr(Run, "_end_of_iteration", kill)
    with pytest.raises(Killed):
        train(plain, tmp_path / "run")
    monkeypatch.undo()
    torch.manual_seed(step)  # whatever else has happened since
    if step >= 4:
        with pytest.raises(UserError, match="holds an earlier run; give another folder with --out, or --resume"):
            train(plain, tmp_path / "run")
    metrics = train(plain, tmp_path / "run", resume=True)
    assert results(tmp_path / "run") == results(folder)
    assert metrics["rsum_percent"] == results(folder)[-1]["rsum_percent"]
    of_both = [torch.load(path / LATEST, weights_only=True) for path in (folder, tmp_path / "run")]
    for part, state in of_both[0]["models"].items():
        torch.testing.assert_close(of_both[1]["models"][part], state, rtol=0, atol=0)
    assert of_both[0]["random"]["python"] == of_both[1]["random"]["python"]
    assert torch.equal(of_both[0]["random"]["torch"], of_both[1]["random"]["torch"])
    rsum = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload().Scalars("val/rsum_percent")
    assert [event.step for event in rsum] == [3, 7, 11]


@pytest.mark.slow
def test_a_killed_process_goes_on(toy_shards, tmp_path):
    """With loader processes and a scheduler by iteration, killed without a chance to say goodbye."""
    plain = settings(
        toy_shards,
        data={"workers": 2, "captions_per_image": 2},
        training={"epochs": 6, "lr_scheduler": {"name": "CosineAnnealingLR", "T_max": 24, "by": "iteration"}},
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    command = [sys.executable, "-m", "vl_plugins.integrations.pytorch_metric_learning"]
    command += ["--config", str(tmp_path / "config.yaml"), "--device", "cpu", "--out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(tmp_path / "whole")], check=True, env=environment, timeout=280, capture_output=True)
    process = subprocess.Popen([*command, str(tmp_path / "killed")], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 250
    while not (tmp_path / "killed" / "results.jsonl").is_file() or len(results(tmp_path / "killed")) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run(
        [*command, str(tmp_path / "killed"), "--resume"], check=True, env=environment, timeout=280, capture_output=True
    )
    assert len(results(tmp_path / "killed")) == 6
    assert results(tmp_path / "killed") == results(tmp_path / "whole")


def test_one_run_at_a_time_in_a_folder(toy_shards, tmp_path, monkeypatch):
    plain, folder = settings(toy_shards, training={"epochs": 1}), tmp_path / "run"
    late = Run(parse_config(plain), folder)
    end_of_iteration = Run._end_of_iteration
    errors = []

    def start_another(self, trainer):
        end_of_iteration(self, trainer)
        with pytest.raises(UserError) as raised:
            train(plain, folder)
        errors.append(str(raised.value))

    monkeypatch.setattr(Run, "_end_of_iteration", start_another)
    train(plain, folder)
    assert set(errors) == {f"another process is writing to {folder}: wait for it or choose another folder"}
    files = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(UserError, match=f"^{folder} has changed since this start; give another folder"):
        late.train()
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == files


def test_partial_files_of_a_killed_run_are_removed(toy_shards, tmp_path):
    plain = settings(toy_shards, training={"epochs": 1})
    names = [".latest.pt.0123abcd.partial", ".best.pt.0123abcd.partial", ".results.jsonl.0123abcd.partial"]
    for name in [*names, ".notes.txt.0123abcd.partial"]:
        (tmp_path / name).touch()
    train(plain, tmp_path)
    assert {path.name for path in tmp_path.glob(".*")} == {".notes.txt.0123abcd.partial"}


def test_only_the_same_training_is_resumed(trained, tmp_path):
    plain, folder = trained
    with pytest.raises(UserError, match=r"--resume: loss is 'vlc', but was 'unified' in .*whole"):
        train({**plain, "loss": "vlc"}, folder, resume=True)
    (tmp_path / LATEST).write_bytes((folder / LATEST).read_bytes()[:-100])
    with pytest.raises(UserError, match=r"checkpoint .*latest.pt: it is cut off or damaged \("):
        train(plain, tmp_path, resume=True)
    torch.save({"weights": 1}, tmp_path / LATEST)
    with pytest.raises(UserError, match="is no checkpoint of"):
        train(plain, tmp_path, resume=True)


def test_a_checkpoint_does_not_choose_a_model_of_the_hub(tmp_path):
    trunk = {"name": "open_clip", "model": "hf-hub:someone/something"}
    config = parse_config(settings(text={"trunk": trunk}))
    write_checkpoint(tmp_path / LATEST, config, None, {"models": {}, "loss_funcs": {}})
    with pytest.raises(
        UserError, match=r"has the text trunk hf-hub:someone/something: name that model if you trust it$"
    ):
        load_model(tmp_path / LATEST)
    write_checkpoint(tmp_path / LATEST, parse_config(settings(text={"trunk": "gru"})), None, {})
    with pytest.raises(UserError, match=r"latest\.pt already specifies its model; drop vl-tiny$"):
        load_model(tmp_path / LATEST, "vl-tiny")


@pytest.mark.parametrize("name", list_losses())
def test_any_loss_by_its_name(toy_shards, tmp_path, name):
    plain = settings(toy_shards, loss=name, training={"epochs": 1}, accuracy=False)
    if name == "smooth_chamfer":
        plain["head"] = {"name": "set", "num_slots": 2, "num_iters": 2, "hidden_dim": 16}
        plain["loss"] = {"name": name, "base": "unified"}
        plain["accuracy"] = {"include": ["precision_at_1"]}
    metrics = train(plain, tmp_path / "run")
    assert 0 <= metrics["rsum_percent"] <= 600
    of_sets = {"image_circular_variance", "accuracy_calculator/text_to_image_precision_at_1_percent"}
    assert of_sets.intersection(metrics) == (of_sets if name == "smooth_chamfer" else set())


def test_a_learned_similarity_is_trained_and_loaded(toy_shards, tmp_path):
    plain = settings(
        toy_shards,
        head={"name": "set", "num_slots": 2, "num_iters": 1, "hidden_dim": 16},
        distance="match_probability",
        training={"epochs": 1},
        accuracy=False,
    )
    train(plain, tmp_path / "run")
    model, *_ = load_model(tmp_path / "run" / LATEST)
    state = torch.load(tmp_path / "run" / LATEST, weights_only=True)["loss_funcs"]["metric_loss"]
    assert {name.rpartition(".")[2]: value.item() for name, value in state.items() if value.ndim == 0} == {
        name: parameter.item() for name, parameter in model.similarity.named_parameters()
    }
    assert model.similarity.scale.item() != type(model.similarity)().scale.item()
    assert model.encode_image(torch.zeros(1, 3, 32, 32), normalize=True).shape == (1, 2, 16)
    assert model.head == "set"
    assert model.grid == (4, 4)


@pytest.mark.parametrize("same_group", ["apart", "positive"])
def test_images_of_a_group(grouped_shards, same_group):
    shards, groups = grouped_shards
    plain = settings(data={"train": shards, "batch_size": 4, "same_group": same_group})
    made = build_trainer(parse_config(plain))
    labels = torch.cat([labels for *_, labels in DataLoader(made.dataset, batch_size=None)])
    assert len(labels) == 64
    assert len(labels.unique()) == (64 if same_group == "apart" else len(set(groups)))


@pytest.mark.parametrize(
    ("trainer", "host", "captions"),
    [("TwoStreamMetricLoss", TwoStreamMetricLoss, 1), ("MetricLossOnly", MetricLossOnly, 2)],
)
def test_the_hosts_own_trainers(toy_shards, tmp_path, trainer, host, captions):
    plain = settings(
        toy_shards,
        trainer=trainer,
        data={"captions_per_image": captions},
        training={"epochs": 1, "clip_grad_norm": 2.0},
        accuracy=False,
    )
    config = parse_config(plain)
    made = build_trainer(config)
    assert isinstance(made, host)
    _, _, labels = next(iter(DataLoader(made.dataset, batch_size=None)))
    inputs, calls = {}, []
    for side in ("image", "text"):
        trunk = made.models["trunk"].parts[f"{side}_trunk"]
        trunk.register_forward_pre_hook(lambda module, given, side=side: inputs.update({side: given[0]}))
    made.loss_funcs["metric_loss"].register_forward_pre_hook(lambda module, given: calls.append(given))
    made.iterations_per_epoch = 1
    made.train()
    ((embeddings, all_labels, *_),) = calls
    assert all_labels.tolist() == labels.tolist() + labels.repeat_interleave(captions).tolist()
    towers = build_trainer(config).models["trunk"].train()
    assert len(inputs["text"]) == captions * len(inputs["image"]) == captions * 16
    torch.testing.assert_close(embeddings, torch.cat([towers(inputs["image"]), towers(inputs["text"])]))
    train(plain, tmp_path / "run")
    with pytest.raises(UserError, match="trains one model, so it has no parts to freeze"):
        build_trainer(parse_config({**plain, "training": {"freeze": ["image_trunk"]}}))


def test_a_loss_with_parameters_is_trained_and_saved(toy_shards, tmp_path):
    loss = {"name": "ProxyAnchorLoss", "num_classes": 64, "embedding_size": 16}
    plain = settings(toy_shards, trainer="MetricLossOnly", loss=loss, training={"epochs": 1}, accuracy=False)
    run = Run(parse_config(plain), tmp_path / "run")
    before = run.loss.proxies.detach().clone()
    run.train()
    assert (run.loss.proxies != before).all()
    saved = torch.load(tmp_path / "run" / LATEST, weights_only=True)
    assert torch.equal(saved["loss_funcs"]["metric_loss"]["proxies"], run.loss.proxies)
    assert saved["optimizers"]["metric_loss_optimizer"]["state"]
    resumed = Run(parse_config(plain), tmp_path / "run", resume=True)
    assert torch.equal(resumed.loss.proxies, run.loss.proxies)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_classes": 63}, "each of the 64 training images is a class of its own, but num_classes is 63"),
        ({"embedding_size": 8}, "embedding_size is 8, but dim is 16"),
        ({}, "ProxyAnchorLoss takes no ref_emb .*MetricLossOnly"),
    ],
)
def test_a_loss_with_parameters_that_do_not_fit(toy_shards, tmp_path, changed, message):
    loss = {"name": "ProxyAnchorLoss", "num_classes": 64, "embedding_size": 16, **changed}
    trainer = "MetricLossOnly" if changed else "CrossModalTrainer"
    with pytest.raises(UserError, match=message):
        train(settings(toy_shards, trainer=trainer, loss=loss, accuracy=False), tmp_path / "run")


def test_accuracy_and_validation_can_be_left_out(toy_shards, tmp_path):
    plain = settings(toy_shards, training={"epochs": 1})
    plain["data"]["val"] = None
    assert train(plain, tmp_path / "a") == {}
    assert not (tmp_path / "a" / "results.jsonl").exists()
    plain = settings(toy_shards, training={"epochs": 1}, accuracy={"include": ["mean_average_precision"], "k": 3})
    metrics = train(plain, tmp_path / "b")
    named = {name for name in metrics if name.startswith("accuracy_calculator/")}
    assert named == {
        f"accuracy_calculator/{way}_mean_average_precision_percent" for way in ("image_to_text", "text_to_image")
    }
    with pytest.raises(UserError, match=r"accuracy: .*mean_reciprocal_rank"):
        train({**plain, "accuracy": {"include": ["recall"]}}, tmp_path / "c")


def test_a_plateau_of_rsum_lowers_the_learning_rate(toy_shards, tmp_path):
    scheduler = {"name": "ReduceLROnPlateau", "patience": 0, "threshold": 1e9, "threshold_mode": "abs", "factor": 0.5}
    plain = settings(
        toy_shards,
        training={"epochs": 3, "lr_scheduler": scheduler, "lr_scale": {"image_trunk": 0.1}},
        accuracy=False,
    )
    train(plain, tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    # The first epoch is the best so far, and each later one no better.
    rates = [event.value for event in events.Scalars("lr/image_trunk")]
    assert rates == pytest.approx([1e-3] * 4 + [5e-4] * 2)
    assert [event.value for event in events.Scalars("lr/text_trunk")] == pytest.approx([1e-2] * 4 + [5e-3] * 2)


BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"text": {"trunk": {"name": "open_clip", "model": "vl-tiny"}, "pooling": "own"}},
        {"text": {"trunk": {"name": "open_clip", "model": "vl-tiny"}, "pooling": "gpo", "projection": "residual_mlp"}},
        {"text": {"trunk": {"name": "hugging_face", "model": "none", "config": BERT}, "pooling": "avg"}},
        {
            "text": {"trunk": {"name": "gru", "bidirectional": True, "word_dropout": 0.2, "local": "words"}},
            "head": {"name": "set", "num_slots": 2, "hidden_dim": 8},
            "image": {"trunk": {"name": "timm", "model": "test_resnet", "image_size": 32}, "pooling": "max"},
        },
        {
            "image": {"trunk": {"name": "features", "width": 9}, "pooling": "gpo", "projection": "residual_mlp"},
            "data": {"inputs": "features"},
        },
    ],
    ids=["open_clip", "open_clip, gpo", "hugging_face", "bi-gru and sets", "features"],
)
def test_encoders_by_name(changes):
    dry_run(parse_config(settings(**changes)))


def test_a_text_tower_of_open_clip(toy_shards, tmp_path):
    """With its tokenizer, which loader processes can take along."""
    text = {"trunk": {"name": "open_clip", "model": "vl-tiny"}, "pooling": "own"}
    train(
        settings(toy_shards, text=text, data={"workers": 1}, training={"epochs": 1}, accuracy=False), tmp_path / "run"
    )
    model, _, tokenizer = load_model(tmp_path / "run" / LATEST)
    tokens = pickle.loads(pickle.dumps(tokenizer))(["a red circle", "a blue square"])
    assert model.encode_text(tokens).shape == (2, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": {"trunk": "features"}}, "image.trunk 'features' takes features, but data.inputs is 'images'"),
        ({"image": {"trunk": {**IMAGE_TRUNK, "model": "resnet151"}}}, "resnet15"),
        ({"image": {"trunk": "tim"}}, "unknown trunk of images 'tim'"),
        ({"text": {"trunk": "gru", "projection": "none"}}, "text: projection 'none' needs features of width"),
        ({"text": {"trunk": {"name": "gru", "size": 3}}}, "unknown option 'size' of trunk of texts 'gru'"),
        ({"training": {"freeze": ["image_head"]}}, "freeze has image_head, which the model does not have"),
        ({"training": {"lr_scale": {"text_head": 0.1}}}, "lr_scale has text_head, which has no parameters"),
        ({"training": {"optimizer": "Adan"}}, "unknown optimizer 'Adan'"),
        ({"training": {"optimizer": {"name": "Adam", "lr": -1}}}, "optimizer 'Adam': Invalid learning rate"),
        (
            {"training": {"lr_scheduler": "StepLR"}},
            r"invalid arguments for lr_scheduler 'StepLR': .*step_size",
        ),
        ({"training": {"lr_scheduler": {"name": "StepLR", "step_size": 1, "by": "batch"}}}, "lr_scheduler.by"),
        ({"head": {"name": "set", "slots": 4}}, "head: slots must be"),
        ({"loss": {"name": "unified", "scale": "learned"}}, "loss: scale must be a finite number"),
        ({"miner": {"name": "HardestNegativeMiner", "k": 0}}, "miner: k must be"),
        ({"image": {"trunk": {**IMAGE_TRUNK, "crop_pct": 2}}}, "image.trunk: crop_pct must be in"),
        (
            {"head": "set", "loss": {"name": "unified", "distance": "LpDistance"}},
            "makes sets, which UnifiedLoss does not compare",
        ),
        ({"loss": {"name": "MultipleLosses", "losses": ["vlc"]}}, "MultipleLosses takes no ref_emb"),
    ],
)
def test_what_is_wrong_is_found_by_a_dry_run(changes, message):
    with pytest.raises(UserError, match=message):
        dry_run(parse_config(settings(**changes)))


@pytest.mark.parametrize("which", ["train", "val"])
def test_missing_shards_are_found_before_anything_is_written(toy_shards, tmp_path, which):
    plain = settings(toy_shards)
    plain["data"][which] = str(tmp_path / "none-000000.tar")
    with pytest.raises(UserError, match="do not exist"):
        train(plain, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(toy_shards, tmp_path):
    plain = settings(toy_shards, training={"epochs": 1, "optimizer": {"name": "SGD", "lr": 1e30}})
    with pytest.raises(UserError, match="the loss is nan at step 2 of epoch 1"):
        train(plain, tmp_path / "run")


def test_progress_is_logged(toy_shards, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="vl_plugins"):
        train(settings(toy_shards, training={"epochs": 1, "freeze": ["image_trunk"]}, accuracy=False), tmp_path / "run")
    assert "words of the training captions" in caplog.text
    assert "stage 1 of 1: epochs 1 to 1, frozen: image_trunk" in caplog.text
    assert "epoch 1: 24 images, 120 captions" in caplog.text
