"""``--dry-run``: a step as the flags ask for, and nothing besides."""

import json
import logging
import sys
import tempfile
from argparse import Namespace

import open_clip
import open_clip_train.main as trainer
import pytest
import torch

from tests.integrations.open_clip.test_launcher import MODULE, run
from vl_plugins.integrations.open_clip.dry_run import made_up
from vl_plugins.integrations.open_clip.launcher import main
from vl_plugins.integrations.open_clip.options import parse_arguments

TINY = ["--model", "vl-tiny", "--device", "cpu", "--precision", "fp32", "--train-data", "no-such-{000000..000003}.tar"]


@pytest.fixture
def steps(monkeypatch):
    """What the trainer was given to train, with the parameters that changed and the batches."""
    given = []
    host_train = trainer.train_one_epoch

    def train_one_epoch(model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, tb_writer=None):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        host_train(model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, tb_writer=tb_writer)
        changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
        given.append(Namespace(model=model, loss=loss, args=args, changed=changed, data=data, optimizer=optimizer))

    monkeypatch.setattr(trainer, "train_one_epoch", train_one_epoch)
    return given


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Working directory, with the folder for temporary files in it."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_step_as_asked_and_nothing_left(folder, steps, capsys):
    loggers = [logging.root, logging.getLogger("torch._dynamo")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    flags = ["--loss", "unified", "--loss-kwargs", "margin=0.3", "--lr", "0.01", "--opt", "timm/sgd", "--epochs", "7"]
    assert main([*TINY, *flags, "--batch-size", "512", "--save-most-recent", "--dry-run"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("dry run: one step of vl-tiny with unified(margin=0.3, scale=50.0, ")
    assert line.endswith(" in fp32, on made-up data; nothing was read or kept")
    (step,) = steps
    assert list(step.data) == ["train"]
    ((images, texts),) = step.data["train"].dataloader
    assert len(images) == len(texts) == 2
    assert not torch.equal(*images)
    assert not torch.equal(*texts)
    assert step.loss.loss.pair_loss.margin == 0.3
    assert type(step.optimizer).__name__.startswith("SGD")
    assert [group["lr"] for group in step.optimizer.param_groups] == [0.01] * len(step.optimizer.param_groups)
    assert len(step.changed) > 50

    assert sorted(path.name for path in folder.rglob("*")) == ["temporary"]
    assert [(logger.level, list(logger.handlers)) for logger in loggers] == before
    assert logging.root.manager.disable == logging.NOTSET


@pytest.mark.parametrize(
    ("flags", "head", "changed"),
    [
        (["--loss", "vlc", "--head", "linear", "--head-kwargs", "dim=24"], "LinearHead", "image_head.weight"),
        (["--loss", "smooth_chamfer", "--head", "set", "--accum-freq", "2"], "SetHead", "image_head.prediction."),
    ],
    ids=["linear", "set"],
)
def test_heads(flags, head, changed, folder, steps, capsys):
    locks = ["--lock-image", "--lock-text", "--lock-text-freeze-layer-norm"]
    assert main([*TINY, *flags, *locks, "--dry-run"]) == 0
    (step,) = steps
    assert type(step.model.image_head).__name__ == head
    assert {name.split(".")[0] for name in step.changed} == {"image_head", "text_head"}
    assert any(name.startswith(changed) for name in step.changed)
    assert f" and the head {flags[3]}(" in capsys.readouterr().out


@pytest.mark.parametrize(("captions", "number"), [("random", 1), ("3", 3), ("all", 5)])
def test_captions_per_image(captions, number, folder, steps):
    assert main([*TINY, "--loss", "unified", "--captions-per-image", captions, "--accum-freq", "2", "--dry-run"]) == 0
    (step,) = steps
    assert [(len(images), len(texts)) for images, texts in step.data["train"].dataloader] == [(2, 2 * number)] * 2
    assert len(step.changed) > 50


def test_without_a_loss_it_is_that_of_open_clip(folder, steps, capsys):
    assert main([*TINY, "--dry-run"]) == 0
    assert type(steps[0].loss).__name__ == "ClipLoss"
    assert "one step of vl-tiny with the loss of open_clip in fp32" in capsys.readouterr().out


def test_weights_are_not_loaded_but_looked_for(folder, steps, capsys):
    (folder / "weights.pt").write_text("no weights at all")
    assert main([*TINY, "--pretrained", "weights.pt", "--dry-run"]) == 0
    assert len(steps) == 1
    assert main([*TINY, "--pretrained", "wieghts.pt", "--dry-run"]) == 2
    assert "--pretrained wieghts.pt: no such file\n" in capsys.readouterr().err
    assert main([*TINY, "--model", "RN50", "--pretrained", "opnai", "--dry-run"]) == 2
    assert "nor a pretrained tag of RN50 (did you mean 'openai'?)\n" in capsys.readouterr().err
    assert main([*TINY, "--model", "local-dir:hub", "--pretrained", "weights.pt", "--dry-run"]) == 2
    assert "--pretrained weights.pt: local-dir:hub brings its own weights, which" in capsys.readouterr().err


def test_a_model_configuration_of_the_user(folder, steps):
    (folder / "vl-tinier.json").write_text(json.dumps(open_clip.get_model_config("vl-tiny") | {"embed_dim": 24}))
    assert main([*TINY, "--model", "vl-tinier", "--model-config", "vl-tinier.json", "--dry-run"]) == 0
    assert steps[0].args.model_config == str(folder / "vl-tinier.json")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loss", "unifed"], "unknown loss 'unifed' (did you mean 'unified'?)"),
        (["--loss", "unified", "--loss-kwargs", "marge=1"], "'marge'"),
        (["--loss", "unified", "--siglip"], "--loss unified and --siglip both name a loss"),
        (["--model", "ViT-B-23"], "unknown model 'ViT-B-23'"),
    ],
)
def test_errors_are_those_of_training(flags, message, folder, steps, capsys):
    assert main([*TINY, *flags, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not steps


def test_what_is_changed_and_what_stays(tmp_path):
    flags = "--val-data v.tar --imagenet-val i --imagenet-v2 j --resume latest --report-to wandb --remote-sync s3://b"
    flags += " --pretrained openai --pretrained-image --copy-codebase --distill-model RN50 --distill-pretrained openai"
    flags += " --logs logs --name run --workers 8 --epochs 30 --accum-freq 4 --lr 0.5 --wd 0.25 --precision amp_bf16"
    _, options, _ = parse_arguments([*TINY, *flags.split()])
    made = made_up(options, tmp_path)
    different = {name for name, value in vars(made).items() if value != getattr(options, name)}
    assert vars(made).keys() == vars(options).keys()
    for name in ("train_data", "val_data", "imagenet_val", "imagenet_v2", "resume", "remote_sync", "pretrained"):
        assert not getattr(made, name)
        different.remove(name)
    for name in ("report_to", "pretrained_image", "copy_codebase", "distill_pretrained"):
        assert not getattr(made, name)
        different.remove(name)
    assert (made.logs, made.name) == ("none", str(tmp_path / "dry-run"))
    assert (made.batch_size, made.epochs, made.warmup) == (2, 1, 0)
    assert different == {"dataset_type", "batch_size", "logs", "name", "epochs", "warmup"}
    assert made.distill_pretrained is not None, "distillation stays"


@pytest.mark.slow
def test_processes(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", MODULE, "--"]
    finished = run([*torchrun, *TINY, "--loss", "unified", "--dist-backend", "gloo", "--dry-run"], tmp_path)
    assert finished.returncode == 0
    assert finished.stdout.count("dry run: one step") == 1
    assert not list(tmp_path.iterdir())
