"""Whole trainings on the toy shards: numbers, stages, resuming in one and two processes, and the folder."""

import contextlib
import io
import json
import math
import os
import shutil
from statistics import fmean

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.multiprocessing import ProcessExitedException
from torch.nn import functional

from tests.helpers.pml_settings import settings
from tests.helpers.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.data import ShardDataset, evaluation_loader
from vl_plugins.errors import UserError
from vl_plugins.integrations.encoding import validate
from vl_plugins.integrations.loading import load_model
from vl_plugins.integrations.pytorch_metric_learning import (
    Run,
    build_objective,
    main,
    make_accelerator,
    parse_config,
    run,
)
from vl_plugins.integrations.pytorch_metric_learning.objective import Objective
from vl_plugins.integrations.pytorch_metric_learning.run import LATEST


@pytest.fixture(autouse=True)
def new_accelerator():
    """Its precision stays for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def results(folder):
    return [json.loads(row) for row in (folder / "results.jsonl").read_text().splitlines()]


def train(plain, folder, **options):
    return Run(parse_config(plain), folder, **options).train()


def weights(folder):
    """Return the weights of model and loss at the end of a run."""
    saved = torch.load(folder / LATEST, weights_only=True)
    return {**saved["models"], **saved["loss_funcs"]}


def kill_at(step, monkeypatch, action):
    """Let ``action()`` happen in the given step of a training, from 0."""
    forward, steps = Objective.forward, iter(range(1000))

    def stop(self, *batch):
        if next(steps) == step:
            action()
        return forward(self, *batch)

    monkeypatch.setattr(Objective, "forward", stop)


class Killed(Exception):
    pass


def kill():
    raise Killed


@pytest.fixture(scope="module")
def trained(toy_shards, tmp_path_factory):
    """A run of three epochs in two stages, the second with the image trunk unfrozen."""
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tmp_path_factory.mktemp("runs") / "whole"
    stages = [{"epochs": 2, "freeze": ["image_trunk"]}, {"epochs": 1, "optimizer": {"name": "SGD", "lr": 0.1}}]
    plain = settings(toy_shards, stages=stages)
    train(plain, folder, accelerator=make_accelerator(folder=folder, report_to=["tensorboard"]))
    return plain, folder


def test_what_the_folder_holds(trained):
    plain, folder = trained
    rows = results(folder)
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert parse_config(yaml.safe_load((folder / "config.yaml").read_text())) == parse_config(plain)
    best = torch.load(folder / "best.pt", weights_only=True)
    assert best["epoch"] == max(rows, key=lambda row: (row["rsum"], -row["epoch"]))["epoch"]
    events = EventAccumulator(str(folder / "logs" / "vl_plugins")).Reload()
    assert [event.value for event in events.Scalars("val/rsum")] == pytest.approx([row["rsum"] for row in rows])
    assert [event.step for event in events.Scalars("val/rsum")] == [3, 7, 11]
    assert [event.step for event in events.Scalars("train/loss")] == [0, 2, 4, 6, 8, 10]
    assert [event.value for event in events.Scalars("lr/text_trunk")] == pytest.approx([0.01] * 4 + [0.1] * 2)
    assert [event.step for event in events.Scalars("lr/image_trunk")] == [8, 10]
    with pytest.raises(UserError, match=r"latest\.pt already specifies its model; drop vl-tiny$"):
        load_model(folder / LATEST, "vl-tiny")


def test_a_run_that_is_stopped_again_and_again_ends_with_the_same_numbers(trained, tmp_path, monkeypatch):
    """Before the first checkpoint, in the middle of a stage, and in the first epoch of the next one."""
    plain, folder = trained
    for step in (1, 6, 5):
        with monkeypatch.context() as patch:
            kill_at(step, patch, kill)
            with pytest.raises(Killed):
                train(plain, tmp_path, resume=True)
        torch.manual_seed(step)
    with pytest.raises(UserError, match="holds an earlier run; give another folder with --out, or --resume"):
        train(plain, tmp_path)
    train(plain, tmp_path, resume=True)
    assert results(tmp_path) == results(folder)
    torch.testing.assert_close(weights(tmp_path), weights(folder), rtol=0, atol=0)


@pytest.mark.parametrize(("by", "length"), [pytest.param("epoch", 4, marks=pytest.mark.slow), ("iteration", 16)])
def test_a_run_is_extended(by, length, toy_shards, tmp_path, caplog):
    """With a schedule of the final length, it is the longer run; what changed is one warning.

    An option that an earlier version did not have is no change.
    """
    scheduler = {"name": "CosineAnnealingLR", "T_max": length, "by": by}
    training = {"epochs": 2, "lr_scheduler": scheduler, "lr_scale": {"image_trunk": 0.1}}
    train(settings(toy_shards, training=training), tmp_path / "short")
    longer = settings(toy_shards, training={**training, "epochs": 4})
    train(longer, tmp_path / "long")
    checkpoint = torch.load(tmp_path / "short" / LATEST, weights_only=True)
    del checkpoint["config"]["data"]["max_image_pixels"]
    torch.save(checkpoint, tmp_path / "short" / LATEST)
    train(longer, tmp_path / "short", resume=True)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning == "resuming after epoch 2 with changes in: training"
    assert results(tmp_path / "short") == results(tmp_path / "long")
    torch.testing.assert_close(weights(tmp_path / "short"), weights(tmp_path / "long"), rtol=0, atol=0)


def test_only_runs_of_this_version_are_resumed(trained, tmp_path):
    plain, folder = trained
    torch.save({"weights": 1}, tmp_path / LATEST)
    with pytest.raises(UserError, match="is not of this version"):
        train(plain, tmp_path, resume=True)
    shutil.copy(folder / LATEST, tmp_path)
    with pytest.raises(UserError, match="this stage trains other parts than before"):
        train({**plain, "stages": [{"epochs": 4, "freeze": ["text_trunk"]}]}, tmp_path, resume=True)


def test_a_loss_that_is_not_finite_stops_the_run_before_a_checkpoint(toy_shards, tmp_path):
    plain = settings(toy_shards, training={"optimizer": {"name": "SGD", "lr": 1e30}})
    with pytest.raises(UserError, match="the loss is nan at the end of epoch 1"):
        train(plain, tmp_path)
    assert not (tmp_path / LATEST).exists()


def test_a_learned_similarity_of_sets_is_trained_saved_and_resumed(toy_shards, tmp_path):
    head = {"name": "set", "num_slots": 2, "num_iters": 1, "hidden_dim": 16}
    config = parse_config(settings(toy_shards, head=head, distance="match_probability", training={"epochs": 1}))
    run = Run(config, tmp_path)
    before = [parameter.detach().clone() for parameter in run.objective.loss.parameters()]
    assert "image_circular_variance" in run.train()[0]
    learned = [parameter.detach() for parameter in run.objective.loss.parameters()]
    assert not any(torch.equal(*pair) for pair in zip(before, learned, strict=True))
    model, *_ = load_model(tmp_path / LATEST)
    resumed = Run(config, tmp_path, resume=True).objective.loss
    for found in (model.similarity, resumed):
        torch.testing.assert_close([parameter.detach() for parameter in found.parameters()], learned, rtol=0, atol=0)
    assert model.encode_image(torch.zeros(1, 3, 32, 32), normalize=True).shape == (1, 2, 16)


def test_validation_before_the_first_step(trained, tmp_path, monkeypatch):
    """Of the untrained model, and training goes on as without it; once, also for a run that is resumed."""
    plain, folder = trained
    config = parse_config(plain | {"validate_first": True})
    kill_at(6, monkeypatch, kill)
    with pytest.raises(Killed):
        Run(config, tmp_path).train()
    monkeypatch.undo()
    Run(config, tmp_path, resume=True).train()
    first, *rows = results(tmp_path)
    towers = build_objective(config).towers.eval()
    dataset = ShardDataset(plain["data"]["val"], towers.image.trunk.image_transform(False), towers.tokenizer)
    assert first == {"epoch": 0, **validate(towers, evaluation_loader(dataset, 4), "cpu")}
    assert rows == results(folder)
    torch.testing.assert_close(weights(tmp_path), weights(folder), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("rsum", [9, 1, 3, 2]),
        ("image_to_text_R@1", [9, 1, 3, 3]),
        ("text_to_image_mean_rank", [0, 3, 1, 2]),
        ("hardest_negative_similarity", [0, 3, 1, 2]),
    ],
)
def test_the_best_epoch_by_a_metric(metric, values, toy_shards, tmp_path, monkeypatch):
    """The second one, which is not the last; epoch 0 has trained nothing."""
    measured = iter(values)
    monkeypatch.setattr(run, "validate", lambda *args, **options: validate(*args, **options) | {metric: next(measured)})
    train(settings(toy_shards, training={"epochs": 3}, validate_first=True, best_metric=metric), tmp_path)
    assert [row[metric] for row in results(tmp_path)] == values
    assert torch.load(tmp_path / "best.pt", weights_only=True)["epoch"] == 2


def test_a_learned_scale_is_trained_saved_and_resumed(toy_shards, tmp_path, monkeypatch):
    """By the gradient of a loss that is given its scale, and without weight decay."""
    optimizer = {"name": "SGD", "lr": 0.1, "weight_decay": 0.1}
    loss = {"name": "unified", "scale": 20, "learn_scale": True}
    config = parse_config(settings(toy_shards, loss=loss, training={"optimizer": optimizer}))
    calls = []

    def see(module, args, options):
        if module.training:
            calls.append({name: value.detach() for name, value in options.items()})

    whole = Run(config, tmp_path / "whole")
    whole.objective.loss.register_forward_pre_hook(see, with_kwargs=True)
    whole.train()
    log_scale, given_scale = torch.tensor(math.log(20), requires_grad=True), create_loss("unified")
    for options in calls:
        value = given_scale(**options, scale=log_scale.exp())
        (gradient,) = torch.autograd.grad(value, log_scale)
        log_scale.data -= 0.1 * gradient
    assert len(calls) == 8
    assert abs(log_scale.item() - math.log(20)) > 0.01
    saved = torch.load(tmp_path / "whole" / LATEST, weights_only=True)["loss_funcs"]["metric_loss"]["log_scale"]
    assert saved.item() == pytest.approx(log_scale.item(), abs=1e-5)
    kill_at(6, monkeypatch, kill)
    with pytest.raises(Killed):
        Run(config, tmp_path / "resumed").train()
    monkeypatch.undo()
    Run(config, tmp_path / "resumed", resume=True).train()
    torch.testing.assert_close(weights(tmp_path / "resumed"), weights(tmp_path / "whole"), rtol=0, atol=0)
    assert results(tmp_path / "resumed") == results(tmp_path / "whole")


@pytest.mark.parametrize(("chunk_size", "largest"), [(None, 2), (1, 1)])
def test_steps_of_several_batches(chunk_size, largest, toy_shards, tmp_path):
    """Four batches of two are a step of a batch of eight, and no more than one of them is encoded at a time."""
    training = {"optimizer": {"name": "SGD", "lr": 0.1}}
    train(settings(toy_shards, training=training, data={"batch_size": 8}), tmp_path / "whole")
    data = {"batch_size": 2, "accumulation_steps": 4, "chunk_size": chunk_size}
    accumulated = Run(parse_config(settings(toy_shards, training=training, data=data)), tmp_path / "accumulated")
    sizes = set()

    def see(tower, inputs):
        if tower.training:
            sizes.add(len(inputs[0]))

    accumulated.objective.towers.image.register_forward_pre_hook(see)
    accumulated.train()
    assert sizes == {largest}
    for row, whole in zip(results(tmp_path / "accumulated"), results(tmp_path / "whole"), strict=True):
        assert row["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-5)
    # Float32 in four steps of gradients near 1.
    torch.testing.assert_close(weights(tmp_path / "accumulated"), weights(tmp_path / "whole"), rtol=0, atol=1e-5)


WARM_UP = {"name": "triplet_hn", "warmup_steps": 3}


@pytest.mark.parametrize("loss", [{"name": "unified", "scale": 20}, WARM_UP], ids=["unified", "warm-up"])
def test_means_of_an_epoch(loss, toy_shards, tmp_path):
    """Of the loss and of its statistics, against those of each step."""
    accelerator = make_accelerator(folder=tmp_path, report_to=["tensorboard"])
    plain = settings(toy_shards, loss=loss | {"collect_stats": True}, log_every=1)
    losses, similarities = [], []

    def see(module, args, options, value):
        if module.training:
            losses.append(value.item())
            similarities.append(functional.cosine_similarity(options["embeddings"], options["ref_emb"]).mean().item())

    trained = Run(parse_config(plain), tmp_path, accelerator)
    trained.objective.loss.register_forward_hook(see, with_kwargs=True)
    trained.train()
    assert len(losses) == 8, "two epochs of 16 images in batches of 4"
    for row, steps in zip(results(tmp_path), (slice(0, 4), slice(4, 8)), strict=True):
        assert row["train_loss"] == pytest.approx(fmean(losses[steps]))
        assert row["mean_positive"] == pytest.approx(fmean(similarities[steps]), abs=1e-6)
        assert row["scale_in_use"] == pytest.approx(loss.get("scale", 1))
        assert row["known_positives_left_out"] >= 0
        assert 0 < row["active_pairs"] <= 1
        assert -1 < row["mean_negative"] < 1
    events = EventAccumulator(str(tmp_path / "logs" / "vl_plugins")).Reload()
    assert [event.value for event in events.Scalars("train/mean_positive")] == pytest.approx(similarities, abs=1e-6)


def test_a_miner_leaves_no_statistics(toy_shards, tmp_path):
    loss = {"name": "unified", "collect_stats": True}
    train(settings(toy_shards, loss=loss, miner="MultiSimilarityMiner", training={"epochs": 1}), tmp_path)
    (row,) = results(tmp_path)
    assert row["train_loss"] > 0
    assert "mean_positive" not in row


def run_command(rank, *arguments, kill_step=None):
    """Return what this process prints."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr, pytest.MonkeyPatch.context() as monkeypatch:
        if kill_step is not None:
            kill_at(kill_step, monkeypatch, lambda: os._exit(9))
        assert main([*map(str, arguments), "--device", "cpu", "--precision", "bf16"]) == 0
    return stderr.getvalue()


def run_and_be_killed(rank, *arguments):
    run_command(rank, *arguments, kill_step=3)


def test_killed_processes_continue_to_the_same_numbers(toy_shards, tmp_path):
    """Two processes with dropout in bf16, killed in the second of three epochs, the first of two stages."""
    plain = settings(toy_shards, stages=[{"epochs": 2, "freeze": ["image_trunk"]}, {"epochs": 1}])
    plain["text"]["trunk"]["word_dropout"] = 0.2
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    command = ["--config", tmp_path / "config.yaml", "--out"]
    printed, by_other = in_processes(run_command, 2, *command, tmp_path / "whole", joined=False)
    assert [row["epoch"] for row in results(tmp_path / "whole")] == [1, 2, 3]
    assert "\nepoch 3 " in printed, "a row of the table"
    assert "2/2" in printed
    assert "4/4" not in printed, "an epoch is 16 images in batches of 2 x 4"
    assert "epoch" not in by_other
    with pytest.raises(ProcessExitedException, match="exit code 9"):
        in_processes(run_and_be_killed, 2, *command, tmp_path / "killed", joined=False)
    assert results(tmp_path / "killed") == results(tmp_path / "whole")[:1]
    in_processes(run_command, 2, *command, tmp_path / "killed", "--resume", joined=False)
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    torch.testing.assert_close(weights(tmp_path / "killed"), weights(tmp_path / "whole"), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_toy_recipe_in_half_precision(toy_shards, tmp_path, precision):
    data = f"--train-data {toy_shards}/toy-train-{{000000..000007}}.tar --val-data {toy_shards}/toy-val-000000.tar"
    flags = f"--precision {precision} --device cuda --out {tmp_path} --set training.epochs=3 data.batch_size=16"
    assert main(f"--config toy.yaml {data} {flags} text.vocabulary.min_count=1".split()) == 0
    assert [row["epoch"] for row in results(tmp_path)] == [1, 2, 3]
