"""Trainings from a configuration on the toy shards: numbers, stages, resuming, and what the folder holds."""

import json

import pytest
import torch
import yaml
from pytorch_metric_learning.trainers import MetricLossOnly
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.pml_settings import IMAGE_TRUNK, settings
from tests.helpers.training_steps import step_of_each_stage
from tests.reference import retrieval as reference
from vl_plugins.data import ShardDataset, evaluation_loader, training_loader
from vl_plugins.data.files import lock
from vl_plugins.errors import UserError
from vl_plugins.integrations.checkpoints import load_model
from vl_plugins.integrations.pytorch_metric_learning import build_trainer
from vl_plugins.integrations.pytorch_metric_learning.config import parse_config
from vl_plugins.integrations.pytorch_metric_learning.runs import LATEST, Run

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
    assert best["metrics"]["rsum"] == max(row["rsum"] for row in rows)
    assert best["epoch"] == max(rows, key=lambda row: (row["rsum"], -row["epoch"]))["epoch"]
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("val/rsum")] == pytest.approx([row["rsum"] for row in rows])
    assert [event.step for event in events.Scalars("val/rsum")] == [3, 7, 11]
    assert [event.step for event in events.Scalars("train/total_loss")] == [0, 2, 4, 6, 8, 10]
    assert [event.value for event in events.Scalars("lr/text_trunk")] == pytest.approx([0.01] * 4 + [0.1] * 2)
    assert [event.step for event in events.Scalars("lr/image_trunk")] == [8, 10]


def test_the_loaded_model_has_the_numbers_of_its_epoch(trained, toy_shards):
    _, folder = trained
    model, transform, tokenizer = load_model(folder / LATEST)
    batches = evaluation_loader(ShardDataset(f"{toy_shards}/toy-val-000000.tar", transform, tokenizer), 16)
    images, captions, image_of_caption = [], [], []
    with torch.no_grad():
        for batch in batches:
            image_of_caption += (sum(map(len, images)) + batch.image_of_caption).tolist()
            images.append(model.encode_image(batch.images))
            captions.append(model.encode_text(batch.texts))
    images, captions = (torch.nn.functional.normalize(torch.cat(parts)) for parts in (images, captions))
    scores = (images @ captions.T).tolist()
    by_image, by_caption = reference.by_image_and_by_caption(image_of_caption)
    row, rsum = results(folder)[-1], 0
    columns = [list(column) for column in zip(*scores, strict=True)]
    for way, rows, answers in (("image_to_text", scores, by_image), ("text_to_image", columns, by_caption)):
        ranks = reference.direction(rows, answers, top=10)["rank"]
        assert row[f"{way}_median_rank"] == reference.median(ranks)
        for k in (1, 5, 10):
            recall = sum(rank <= k for rank in ranks) / len(ranks)
            assert row[f"{way}_R@{k}"] == pytest.approx(recall)
            rsum += 100 * recall
    assert row["rsum"] == pytest.approx(rsum)
    with pytest.raises(UserError, match=r"latest\.pt already specifies its model; drop vl-tiny$"):
        load_model(folder / LATEST, "vl-tiny")


class Killed(Exception):
    pass


def test_a_run_that_is_stopped_again_and_again_ends_with_the_same_numbers(trained, tmp_path, monkeypatch):
    """Before the first checkpoint, in the middle of a stage, and when the next one has begun."""
    plain, folder = trained
    end_of_iteration = Run._end_of_iteration
    for step in (1, 6, 8):

        def kill(self, trainer, step=step):
            end_of_iteration(self, trainer)
            if trainer.get_global_iteration() == step:
                raise Killed

        monkeypatch.setattr(Run, "_end_of_iteration", kill)
        with pytest.raises(Killed):
            train(plain, tmp_path, resume=True)
        torch.manual_seed(step)
    monkeypatch.undo()
    # After the first stage; its checkpoint is taken.
    frozen = torch.load(tmp_path / LATEST, weights_only=True)["models"]["image_trunk"]
    trainer = build_trainer(parse_config(plain))
    assert trainer.freeze_these == ("image_trunk",)
    untrained = trainer.models["image_trunk"].state_dict()
    torch.testing.assert_close(frozen, untrained, rtol=0, atol=0)
    with pytest.raises(UserError, match="holds an earlier run; give another folder with --out, or --resume"):
        train(plain, tmp_path)
    metrics = train(plain, tmp_path, resume=True)
    assert results(tmp_path) == results(folder)
    assert metrics["rsum"] == results(folder)[-1]["rsum"]
    states = [torch.load(path / LATEST, weights_only=True) for path in (folder, tmp_path)]
    for part, state in states[0]["models"].items():
        torch.testing.assert_close(states[1]["models"][part], state, rtol=0, atol=0)
    assert (
        sum(not torch.equal(untrained[name], value) for name, value in states[0]["models"]["image_trunk"].items()) > 5
    )
    assert states[0]["random"]["python"] == states[1]["random"]["python"]
    assert torch.equal(states[0]["random"]["torch"], states[1]["random"]["torch"])
    # One file at a time: their names order only those of different seconds or processes.
    runs = [EventAccumulator(str(file)).Reload() for file in (tmp_path / "tensorboard").iterdir()]
    runs = [run for run in runs if "val/rsum" in run.Tags()["scalars"]]
    assert sorted(event.step for run in runs for event in run.Scalars("val/rsum")) == [3, 7, 11]


def test_partial_files_of_a_killed_run_are_removed(toy_shards, tmp_path):
    plain = settings(toy_shards, training={"epochs": 1})
    names = [".latest.pt.0123abcd.partial", ".best.pt.0123abcd.partial", ".results.jsonl.0123abcd.partial"]
    for name in [*names, ".notes.txt.0123abcd.partial"]:
        (tmp_path / name).touch()
    train(plain, tmp_path)
    assert {path.name for path in tmp_path.glob("*.partial")} == {".notes.txt.0123abcd.partial"}


def test_only_the_same_training_is_resumed(trained, tmp_path):
    plain, folder = trained
    with pytest.raises(UserError, match=r"--resume: loss is 'vlc', but was 'unified' in .*whole"):
        train({**plain, "loss": "vlc"}, folder, resume=True)
    (tmp_path / LATEST).write_bytes((folder / LATEST).read_bytes()[:-100])
    with pytest.raises(UserError, match=r"checkpoint .*latest.pt: it is cut off or damaged \("):
        train(plain, tmp_path, resume=True)
    torch.save({"weights": 1}, tmp_path / LATEST)
    with pytest.raises(UserError, match="is not a checkpoint of"):
        train(plain, tmp_path, resume=True)


def test_images_of_a_group_have_one_label(grouped_shards):
    shards, groups = grouped_shards
    made = build_trainer(parse_config(settings(data={"train": shards, "batch_size": 4})))
    labels = torch.cat([labels for *_, labels in training_loader(made.dataset, made.sampler)])
    assert len(labels) == 64
    assert len(labels.unique()) == len(set(groups)) < 64


def test_the_hosts_own_trainer(toy_shards, tmp_path):
    captions = 2
    plain = settings(
        toy_shards,
        trainer="MetricLossOnly",
        data={"captions_per_image": captions},
        training={"epochs": 1, "clip_grad_norm": 2.0},
    )
    config = parse_config(plain)
    made = build_trainer(config)
    assert isinstance(made, MetricLossOnly)
    _, _, labels = next(iter(training_loader(made.dataset, made.sampler)))
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
    assert len(inputs["text"]) == captions * len(inputs["image"]) == captions * 4
    torch.testing.assert_close(embeddings, torch.cat([towers(inputs["image"]), towers(inputs["text"])]))
    train(plain, tmp_path / "run")
    with pytest.raises(UserError, match="freeze has image_trunk, which trainer MetricLossOnly does not have"):
        build_trainer(parse_config({**plain, "training": {"freeze": ["image_trunk"]}}))


def test_a_loss_with_parameters_is_trained_and_saved(toy_shards, tmp_path):
    loss = {"name": "ProxyAnchorLoss", "num_classes": 64, "embedding_size": 16}
    plain = settings(toy_shards, trainer="MetricLossOnly", loss=loss, training={"epochs": 1})
    run = Run(parse_config(plain), tmp_path / "run")
    before = run.loss.proxies.detach().clone()
    run.train()
    assert (run.loss.proxies != before).all()
    saved = torch.load(tmp_path / "run" / LATEST, weights_only=True)
    assert torch.equal(saved["loss_funcs"]["metric_loss"]["proxies"], run.loss.proxies)
    assert saved["optimizers"]["metric_loss_optimizer"]["state"]
    resumed = Run(parse_config(plain), tmp_path / "run", resume=True)
    assert torch.equal(resumed.loss.proxies, run.loss.proxies)


def test_validation_can_be_left_out(toy_shards, tmp_path):
    plain = settings(toy_shards, training={"epochs": 1})
    plain["data"]["val"] = None
    assert train(plain, tmp_path / "run") == {}
    assert not (tmp_path / "run" / "results.jsonl").exists()


def test_a_plateau_of_rsum_lowers_the_learning_rate(toy_shards, tmp_path):
    scheduler = {"name": "ReduceLROnPlateau", "patience": 0, "threshold": 1e9, "threshold_mode": "abs", "factor": 0.5}
    plain = settings(
        toy_shards,
        training={"epochs": 3, "lr_scheduler": scheduler, "lr_scale": {"image_trunk": 0.1}},
    )
    train(plain, tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    # The first epoch is the best so far, and each later one no better.
    rates = [event.value for event in events.Scalars("lr/image_trunk")]
    assert rates == pytest.approx([1e-3] * 4 + [5e-4] * 2)
    assert [event.value for event in events.Scalars("lr/text_trunk")] == pytest.approx([1e-2] * 4 + [5e-3] * 2)


BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_encoders_by_name():
    """Those that no configuration of ours has."""
    text = {"trunk": {"name": "hugging_face", "model": "none", "config": BERT}, "pooling": "avg"}
    step_of_each_stage(parse_config(settings(text=text)))


@pytest.mark.parametrize("which", ["train", "val"])
def test_missing_shards_are_found_before_anything_is_written(toy_shards, tmp_path, which):
    plain = settings(toy_shards)
    plain["data"][which] = str(tmp_path / "none-000000.tar")
    with pytest.raises(UserError, match="do not exist"):
        train(plain, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_first_image_is_read_before_anything_is_written(toy_shards, tmp_path):
    plain = settings(toy_shards, image={"trunk": {"name": "features", "width": 4}, "pooling": "avg"})
    plain["data"]["inputs"] = "features"
    with pytest.raises(UserError, match=r"image 0, in .*: it has no features, expected npy"):
        train(plain, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": {"trunk": "features"}}, "image.trunk 'features' takes features, but data.inputs is 'images'"),
        ({"image": {"trunk": {**IMAGE_TRUNK, "model": "resnet151"}}}, "resnet15"),
        ({"text": {"trunk": "gru", "projection": "none"}}, "text: projection 'none' needs features of width"),
        ({"training": {"freeze": ["image_head"]}}, "freeze has image_head, which trainer CrossModalTrainer does not"),
        ({"training": {"optimizer": {"name": "Adam", "lr": -1}}}, "optimizer 'Adam': Invalid learning rate"),
        ({"training": {"lr_scheduler": {"name": "StepLR", "step_size": 1, "by": "batch"}}}, "lr_scheduler.by"),
        ({"head": {"name": "set", "num_slots": 0}}, "head: num_slots must be"),
        ({"loss": {"name": "unified", "scale": "learned"}}, "scale of loss 'unified' must be a number"),
        ({"loss": {"name": "unified", "scale": 0}}, "loss: scale must be a finite number"),
        ({"loss": {"scale": 9}}, "loss must be a name or a mapping such as"),
        ({"miner": {"name": "HardestNegativeMiner", "k": 0}}, "miner: k must be"),
        ({"head": "set", "loss": {"name": "unified", "distance": "LpDistance"}}, "LpDistance does not compare"),
        ({"loss": {"name": "MultipleLosses", "losses": ["vlc"]}}, "MultipleLosses takes no ref_emb"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(UserError, match=message):
        step_of_each_stage(parse_config(settings(**changes)))


def test_one_run_at_a_time_in_a_folder(toy_shards, tmp_path):
    run = Run(parse_config(settings(toy_shards)), tmp_path)
    with lock(tmp_path / ".lock"), pytest.raises(UserError, match=f"another process is writing {tmp_path}"):
        run.train()
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}


def test_sets_with_a_learned_similarity(toy_shards, tmp_path):
    plain = settings(
        toy_shards,
        head={"name": "set", "num_slots": 2, "num_iters": 1, "hidden_dim": 16},
        distance="match_probability",
        training={"epochs": 1},
    )
    assert "image_circular_variance" in train(plain, tmp_path / "run")
    model, *_ = load_model(tmp_path / "run" / LATEST)
    state = torch.load(tmp_path / "run" / LATEST, weights_only=True)["loss_funcs"]["metric_loss"]
    assert {name.rpartition(".")[2]: value.item() for name, value in state.items() if value.ndim == 0} == {
        name: parameter.item() for name, parameter in model.similarity.named_parameters()
    }
    assert model.similarity.scale.item() != type(model.similarity)().scale.item()
    assert model.encode_image(torch.zeros(1, 3, 32, 32), normalize=True).shape == (1, 2, 16)
