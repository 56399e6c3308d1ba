"""Trainings in two processes: each has a folder of its own, and both evaluate."""

import contextlib
import io
import os

import pytest
import torch
import yaml
from accelerate import Accelerator

from tests.helpers.pml_settings import IMAGE_TRUNK, settings
from tests.helpers.processes import in_processes
from vl_plugins.data import ShardDataset, evaluation_loader
from vl_plugins.errors import UserError
from vl_plugins.integrations.encoding import validate
from vl_plugins.integrations.loading import load_model
from vl_plugins.integrations.pytorch_metric_learning import Run, main, make_accelerator, parse_config
from vl_plugins.integrations.pytorch_metric_learning.run import LATEST

# Batch norm has other statistics in each process.
IMAGE = {"trunk": IMAGE_TRUNK, "pooling": "avg", "projection": "residual_mlp"}


def train(rank, plain, folder):
    """Return the weights of this process, which has a folder of its own, and the metrics of each epoch."""
    run = Run(parse_config(plain), folder / str(rank), make_accelerator(device="cpu"), resume=True)
    history = run.train()
    return {"weights": dict(run.objective.state_dict()), "history": history}


def test_all_processes_continue_after_the_epoch_of_the_first_one(toy_shards, tmp_path):
    """Only its folder has ``latest.pt``, as on nodes without a shared disk. The loss is that of one process."""
    short = settings(toy_shards, training={"epochs": 1}, validate_first=True)
    longer = settings(toy_shards, training={"epochs": 2}, validate_first=True)
    in_processes(train, 2, short, tmp_path / "resumed", joined=False)
    assert (tmp_path / "resumed" / "0" / LATEST).exists()
    assert not (tmp_path / "resumed" / "1" / LATEST).exists()
    resumed = in_processes(train, 2, longer, tmp_path / "resumed", joined=False)
    whole = in_processes(train, 2, longer, tmp_path / "whole", joined=False)
    assert [metrics["epoch"] for metrics in resumed[0]["history"]] == [0, 1, 2]
    assert resumed[0]["history"] == whole[0]["history"]
    alone = train(0, settings(toy_shards, data={"batch_size": 8}, validate_first=True), tmp_path / "alone")["history"]
    assert whole[0]["history"][0] == pytest.approx(alone[0], rel=1e-5)
    for metrics, metrics_of_one in zip(whole[0]["history"][1:], alone[1:], strict=True):
        assert metrics["train_loss"] == pytest.approx(metrics_of_one["train_loss"], rel=1e-3)
    for process in (*resumed, whole[1]):
        torch.testing.assert_close(process["weights"], whole[0]["weights"], rtol=0, atol=0)


@pytest.mark.parametrize("batch_size", [3, 8])
def test_metrics_are_those_of_the_checkpoint_in_one_process(batch_size, toy_shards, tmp_path):
    """Of 8 images: two batches in one process and one in the other, or one and none."""
    plain = settings(toy_shards, image=IMAGE, data={"batch_size": batch_size}, training={"epochs": 1})
    first, second = in_processes(train, 2, plain, tmp_path, joined=False)
    model, transform, tokenizer = load_model(tmp_path / "0" / LATEST)
    dataset = ShardDataset(plain["data"]["val"], transform, tokenizer)
    assert len(dataset) == 8
    metrics = validate(model, evaluation_loader(dataset, batch_size), "cpu")
    (row,), (row_of_other,) = first["history"], second["history"]
    assert row == {**metrics, "epoch": 1, "train_loss": row["train_loss"]}
    assert row_of_other == {"epoch": 1, "train_loss": row["train_loss"]}
    torch.testing.assert_close(second["weights"], first["weights"], rtol=0, atol=0)


def run_command(rank, config, folder):
    """Return the exit status of this process, and what it prints."""
    command = ["--config", config, "--resume", "--device", "cpu", "--out", folder / str(rank)]
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        status = main([*map(str, command)])
    return status, stderr.getvalue()


def test_a_checkpoint_that_the_first_process_cannot_read_ends_all(toy_shards, tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / LATEST).write_bytes(b"nothing")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings(toy_shards)))
    for status, printed in in_processes(run_command, 2, tmp_path / "config.yaml", tmp_path, joined=False):
        assert status == 2
        (line,) = [line for line in printed.splitlines() if "error: " in line]
        assert f"{tmp_path}/0/{LATEST}: it is damaged" in line


def train_without_device(rank, config, folder, has_local_rank):
    """Train on a machine without a GPU and without ``--device cpu``; return the exit status and the processes."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not has_local_rank:
        del os.environ["LOCAL_RANK"]
    status = main(["--config", str(config), "--out", str(folder / str(rank)), "--report-to", "tensorboard"])
    return status, make_accelerator().num_processes


@pytest.mark.parametrize("has_local_rank", [True, False], ids=["torchrun", "variables of a cluster"])
def test_processes_without_a_gpu_train_together_on_the_cpu(has_local_rank, toy_shards, tmp_path):
    plain = settings(toy_shards, training={"epochs": 1})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    arguments = tmp_path / "config.yaml", tmp_path / "found", has_local_rank
    assert in_processes(train_without_device, 2, *arguments, joined=False) == [(0, 2), (0, 2)]
    right = in_processes(train, 2, plain, tmp_path / "right", joined=False)
    found = torch.load(tmp_path / "found" / "0" / LATEST, weights_only=True)
    assert found["history"] == right[0]["history"]
    assert "rsum" in found["history"][0]
    assert not (tmp_path / "found" / "1" / LATEST).exists()


def train_alone(rank, plain, folder):
    """Return the error of a training whose accelerator has not joined the processes; None if it has."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    accelerator = Accelerator()
    if accelerator.num_processes > 1:
        return None
    with pytest.raises(UserError) as caught:
        Run(parse_config(plain), folder, accelerator)
    return str(caught.value)


def test_processes_that_have_not_joined_are_an_error(tmp_path):
    found = in_processes(train_alone, 2, settings(), tmp_path, joined=False)
    if found == [None, None]:
        pytest.skip("accelerate joins processes on the CPU by itself, as version 1.7 does")
    message = "2 processes were started, but this one trains alone: use --device cpu (make_accelerator(device='cpu'))"
    assert [error.partition(", or ")[0] for error in found] == [message] * 2
