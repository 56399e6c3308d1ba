"""The launcher on the interface of open_clip 4.x: it trains what it trains on the installed 3.x."""

import contextlib
import functools
import json
import logging
import math
import re
import sys
from argparse import Namespace
from pathlib import Path

import open_clip.factory
import open_clip_train.main
import pytest
import torch

from tests.integrations.open_clip import open_clip_4
from tests.integrations.open_clip.test_launcher import MODULE, SHORT, checkpoint, run, shard_pattern
from vl_plugins.commands.torchrun import stop_processes
from vl_plugins.integrations.open_clip import host_4, launcher
from vl_plugins.integrations.open_clip.data import Reader, get_data
from vl_plugins.integrations.open_clip.loss import TwoTowerLoss, build_loss
from vl_plugins.integrations.open_clip.options import PluginOptions
from vl_plugins.integrations.open_clip.training import Training
from vl_plugins.utils.eager import is_compiling
from vl_plugins.utils.errors import UserError

VERSIONS = {"3": contextlib.nullcontext, "4": open_clip_4.installed}
SETS = ["--loss", "smooth_chamfer", "--head", "set", "--head-kwargs", "num_slots=3", "num_iters=2", "hidden_dim=32"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Working directory; open_clip's set-up of logging is undone."""
    monkeypatch.chdir(tmp_path)
    loggers = [logging.root, *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
    levels, handlers = [logger.level for logger in loggers], list(logging.root.handlers)
    yield tmp_path
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    for handler in set(logging.root.handlers).difference(handlers):
        logging.root.removeHandler(handler)
        handler.close()


@pytest.fixture(scope="module")
def data(toy_shards):
    return ["--train-data", shard_pattern(toy_shards, "train"), "--val-data", shard_pattern(toy_shards, "val")]


@pytest.fixture
def train(folder, data):
    """Function that runs the launcher on a version; gives what our loss returned at each call, by term."""

    def train(version, *flags):
        terms = []

        def note(module, args, output):
            if isinstance(module, TwoTowerLoss):
                terms.append({name: value.item() for name, value in output.items()})

        with VERSIONS[version](), torch.nn.modules.module.register_module_forward_hook(note):
            assert launcher.main([*SHORT, *data, "--name", version, *flags]) == 0
        return terms

    return train


def results(cwd, name):
    return [json.loads(line) for line in (cwd / "logs" / name / "checkpoints/results.jsonl").read_text().splitlines()]


def assert_same_weights(actual, expected, tolerance=1e-6):
    assert actual.keys() == expected.keys()
    assert len(expected) > 50
    for name, tensor in expected.items():
        if name == "_extra_state":
            assert actual[name] == tensor
        else:
            torch.testing.assert_close(actual[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("flags", "calls"),
    [
        pytest.param(["--loss", "unified", "--loss-kwargs", "scale=learned"], 4, id="unified"),
        pytest.param(["--loss", "unified", "--accum-freq", "2", "--captions-per-image", "2"], 4, id="accum"),
        pytest.param(SETS, 4, id="set", marks=pytest.mark.slow),
        pytest.param([*SETS, "--accum-freq", "2", "--distance", "match_probability"], 4, id="set-accum"),
        pytest.param(["--head", "linear", "--head-kwargs", "dim=24", "--captions-per-image", "first"], 0, id="no-loss"),
    ],
)
def test_training_is_that_of_3(flags, calls, folder, train):
    expected, actual = (train(version, *flags) for version in VERSIONS)
    assert len(expected) == calls
    assert actual == [pytest.approx(terms, abs=1e-6) for terms in expected]
    assert_same_weights(*(checkpoint(folder, version)["state_dict"] for version in ("4", "3")))
    (row,) = results(folder, "4")
    assert (row["num_samples"], row["num_captions"]) == (24, 120)
    assert [row] == results(folder, "3")
    log = (folder / "logs/4/out.log").read_text()
    logged = [dict(re.findall(r"(\w+_loss): (\S+)", line)) for line in log.splitlines() if "Train Epoch" in line]
    assert len(logged) == (4 if "--accum-freq" not in flags else 2)
    if calls:
        assert logged[0].keys() == {name.capitalize() for name in expected[0]}
        assert "Training with the loss of vl_plugins" in log
    assert "captions_per_image: " in (folder / "logs/4/params.txt").read_text()


def trainer_with(version, monkeypatch, name, wrapper):
    """Wrap a function that the trainer of a version calls."""
    main = open_clip_4.main if version == "4" else open_clip_train.main
    monkeypatch.setattr(main, name, functools.partial(wrapper, getattr(main, name)))


def error_of(capfd):
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("vl_plugins: error: ")]
    return line.removeprefix("vl_plugins: error: ")


@pytest.mark.parametrize("version", VERSIONS)
def test_validation_that_fails_in_training_ends_it_after_the_checkpoint(
    version, folder, toy_shards, data, monkeypatch, capfd
):
    for shard in toy_shards.glob("*val*"):
        (folder / shard.name).write_bytes(shard.read_bytes())
    for name in ("sizes.json", "manifest.json"):
        (folder / name).write_bytes((toy_shards / name).read_bytes())
    gone = folder / "toy-val-000001.tar"
    content = gone.read_bytes()

    def cosine_lr(host_cosine_lr, *args):
        gone.unlink()  # once it has been looked at
        return host_cosine_lr(*args)

    flags = [*SHORT, *data, "--val-data", shard_pattern(folder, "val"), "--name", "run", "--loss", "unified"]
    flags += ["--epochs", "2", *(["--save-frequency", "2"] if version == "3" else [])]
    with VERSIONS[version]():
        with monkeypatch.context() as patch:
            trainer_with(version, patch, "cosine_lr", cosine_lr)
            assert launcher.main(flags) == 2
        assert error_of(capfd).startswith(f"cannot read shard {gone}: FileNotFoundError")
        assert [file.name for file in (folder / "logs/run/checkpoints").glob("*.pt")] == ["epoch_1.pt"]
        gone.write_bytes(content)
        assert launcher.main([*flags, "--resume", "latest"]) == 0
    assert [row["epoch"] for row in results(folder, "run")] == [2]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("validates", "lr"), [(True, 1e30), (False, math.inf)])
def test_a_divergence_in_the_last_step_of_an_epoch(version, validates, lr, folder, data, monkeypatch, capfd):
    """The loss is finite before that step."""

    def cosine_lr(host_cosine_lr, optimizer, *args):
        schedule = host_cosine_lr(optimizer, *args)

        def set_lr(step):
            schedule(step)
            if step == 7:
                optimizer.param_groups[1]["lr"] = lr

        return set_lr

    flags = [*SHORT, *(data if validates else data[:2]), "--name", "run", "--loss", "unified", "--epochs", "3"]
    with VERSIONS[version]():
        trainer_with(version, monkeypatch, "cosine_lr", cosine_lr)
        assert launcher.main([*flags, *(["--save-most-recent"] if version == "3" else [])]) == 2
    line = error_of(capfd)
    assert line.startswith("step 7: ")
    assert re.search(r"(weights are|embeddings are) not finite after it.*; this epoch is not saved\.", line)
    saved = sorted(file.name for file in (folder / "logs/run/checkpoints").glob("*.pt"))
    assert saved == ["epoch_1.pt", *(["epoch_latest.pt"] if version == "3" else [])]
    for file in saved:
        content = torch.load(folder / "logs/run/checkpoints" / file, weights_only=True)
        assert content["epoch"] == 1


def test_resumed_warm_up_goes_on_where_it_was(folder, train):
    """Six steps of warm-up end in the second epoch of four."""
    flags = ["--loss", "triplet_hn", "--loss-kwargs", "warmup_steps=6"]
    terms = {}
    for version in VERSIONS:
        train(version, *flags)
        terms[version] = train(version, *flags, "--epochs", "2", "--resume", "latest")
    values = [term["triplet_hn_loss"] for term in terms["4"]]
    assert len(values) == 4
    assert values == pytest.approx([term["triplet_hn_loss"] for term in terms["3"]], abs=1e-6)
    assert min(values[:2]) > 2 * max(values[2:]), "sums over all negatives, then the hardest ones"
    of_4 = checkpoint(folder, "4", epoch=2)
    assert (of_4["global_step"], of_4["samples_seen"]) == (8, 128)
    assert_same_weights(of_4["state_dict"], checkpoint(folder, "3", epoch=2)["state_dict"])


def test_evaluation_alone(folder, data, train):
    train("4", "--loss", "unified")
    saved = str(folder / "logs/4/checkpoints/epoch_1.pt")
    with open_clip_4.installed():
        assert launcher.main([*SHORT, *data[2:], "--name", "again", "--loss", "unified", "--resume", saved]) == 0
    assert results(folder, "again") == results(folder, "4")


def test_a_checkpoint_that_is_cut_off_is_named(folder, data, train, capfd):
    train("4", "--loss", "unified")
    file = folder / "logs/4/checkpoints/epoch_2.pt"
    file.write_bytes((file.parent / "epoch_1.pt").read_bytes()[:-100])
    again = [*SHORT, *data, "--name", "4", "--loss", "unified", "--epochs", "2", "--resume"]
    with open_clip_4.installed():
        assert launcher.main([*again, "latest"]) == 0
        assert "epoch_2.pt: it is cut off or damaged" in capfd.readouterr().err
        file.write_bytes(file.read_bytes()[:-100])
        assert launcher.main([*again, str(file), "--name", "other"]) == 2
    assert f"vl_plugins: error: --resume {file}: it is cut off or damaged" in capfd.readouterr().err
    saved = torch.load(file.parent / "epoch_1.pt", weights_only=True)["vl_plugins"]
    assert saved["loss"]["description"].startswith("unified(")


@pytest.mark.parametrize(
    ("version", "flags", "remedy"),
    [
        (
            "3",
            [],
            "the open_clip version and flags that wrote it, or begin a new run from its weights: --pretrained {file}",
        ),
        ("4", ["--head", "linear", "--head-kwargs", "dim=24"], "the open_clip version and flags that wrote it"),
    ],
    ids=["latest", "file-with-heads"],
)
def test_a_checkpoint_of_another_optimizer_is_named(version, flags, remedy, folder, data, train, capfd):
    """Versions exempt different parameters from weight decay; here, one tower has none to train."""
    train(version, "--loss", "unified", *flags)
    file = f"logs/{version}/checkpoints/epoch_1.pt"
    again = ["--resume", "latest", "--name", "3"] if version == "3" else ["--resume", file, "--name", "other"]
    with VERSIONS[version]():
        assert launcher.main([*SHORT, *data, "--loss", "unified", *flags, "--lock-image", "--epochs", "2", *again]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith(f"vl_plugins: error: --resume {file}: its optimizer state does not fit")
    assert line.endswith(f"; resume it with {remedy.format(file=file)}")


def test_compiled_task_without_the_loss(folder, train, monkeypatch):
    compiling = []
    terms = TwoTowerLoss._terms

    def note(*args, **kwargs):
        compiling.append(is_compiling())
        return terms(*args, **kwargs)

    monkeypatch.setattr(TwoTowerLoss, "_terms", note)
    expected = train("3", "--loss", "unified")
    compiling.clear()
    actual = train("4", "--loss", "unified", "--torchcompile", "--torchcompile-backend", "eager")
    assert actual == [pytest.approx(terms, abs=1e-5) for terms in expected]
    assert len(compiling) == 4
    assert not any(compiling)


def test_dry_run(folder, capsys):
    with open_clip_4.installed():
        flags = [
            "--train-data",
            "no-such-{000..003}.tar",
            "--captions-per-image",
            "3",
            "--accum-freq",
            "2",
            "--dry-run",
        ]
        assert launcher.main([*SHORT, *SETS, *flags]) == 0
    assert "dry run: one step of vl-tiny with smooth_chamfer(" in capsys.readouterr().out
    assert not list(folder.iterdir())


REFUSED = {
    "siglip": (["--loss", "unified", "--siglip"], "--loss unified and --siglip both name a loss"),
    "distill": (
        ["--loss", "unified", "--distill-model", "RN50"],
        "--loss unified and --distill-model both name a loss",
    ),
    "coca": (["--loss", "unified", "--model", "coca_ViT-B-32"], "has no captioning term, which model coca_ViT-B-32"),
    "naflex": (
        ["--loss", "unified", "--use-naflex"],
        "--loss unified is for pictures and captions, and --use-naflex is",
    ),
    "naflex-reader": (["--captions-per-image", "2", "--loss", "vlc", "--use-naflex"], "and --use-naflex is not"),
    "audio": (
        ["--captions-per-image", "random", "--dataset-type", "webdataset-audio"],
        "--captions-per-image random is for pictures and captions, and --dataset-type webdataset-audio is not",
    ),
    "audio-model": (
        ["--head", "linear", "--model", "hears"],
        "--head linear is for pictures and captions, and --model h",
    ),
    "generating-model": (["--loss", "unified", "--model", "tells"], "and --model tells is not"),
    "head-distill": (["--head", "linear", "--distill-model", "RN50"], "--head linear does not go with --distill-model"),
    "linear-fsdp": (["--head", "linear", "--fsdp"], "--head linear does not go with --fsdp: give one of them"),
    "set-fsdp": ([*SETS, "--distance", "match_probability", "--fsdp"], "--head set does not go with --fsdp"),
    "text-key": (
        ["--loss", "unified", "--text-key", "cap"],
        "--text-key is for open_clip's reader: that of vl_plugins, which reads --train-data here, takes captions from",
    ),
    "json-text-key": (
        ["--captions-per-image", "2", "--loss", "unified", "--json-text-key", "cap"],
        "--json-text-key is",
    ),
    "json-text-key-probs": (["--loss", "unified", "--json-text-key-probs", "1", "2"], "--json-text-key-probs is for"),
    "image-key": (["--loss", "unified", "--image-key", "jpg"], "takes images from jpg, jpeg, png or webp; leave"),
    "validation": (
        ["--loss", "unified", "--dataset-resampled", "--image-key", "jpg"],
        "that of vl_plugins, which reads --val-data here, takes images",
    ),
    "length-bucketing": (["--loss", "unified", "--length-bucketing"], "pads all captions to the same length; leave"),
    "gone": (["--loss", "unified", "--horovod"], "--horovod"),
}


@pytest.mark.parametrize(("flags", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together(flags, message, folder, data, monkeypatch, capsys):
    for model, entry in {"hears": "audio_cfg", "tells": "multimodal_cfg"}.items():
        monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, model, {entry: {}})
    with open_clip_4.installed():
        assert launcher.main([*SHORT, *data, "--name", "run", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vl_plugins: error: ")
    assert message in line
    assert not list(folder.iterdir())


def test_models_that_are_described_elsewhere_are_let_through():
    options = Namespace(use_naflex=False, dataset_type="auto", model="hf-hub:timm/ViT-B-16-SigLIP")
    assert host_4.other_than_pairs(options) is None


def test_more_arguments_of_get_data_are_passed_on():
    given = {}

    def host_get_data(args, preprocess_fns, **options):
        given.update(options)
        return {}

    args = Namespace(train_data=None, val_data=None)
    ours = {"reader": Reader(), "training": Training(), "host_get_data": host_get_data}
    assert get_data(args, (None, None), 3, "t", **ours, naflex_data_config="n") == {}
    assert given == {"epoch": 3, "tokenizer": "t", "naflex_data_config": "n"}


def test_a_sharded_scale_is_refused():
    sharded = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(sharded, "DTensor"):
        pytest.skip(f"torch {torch.__version__} has no public DTensor")
    loss = build_loss(PluginOptions(loss="unified"))
    create_task = host_4.with_loss(lambda args: loss, lambda made, args: made, None, None, None)["create_task"]
    with open_clip_4.installed():
        task = create_task(Namespace(fsdp=True, torchcompile=False), model=torch.nn.Identity())
    features = torch.eye(4)
    assert task.loss(image_features=features, text_features=features, logit_scale=torch.ones(1)) >= 0
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        scale = sharded.distribute_tensor(torch.ones(1), mesh)
        with pytest.raises(UserError, match=r"logit scale reaches the loss sharded, .*--fsdp-no-reshard-after-forward"):
            task.loss(image_features=features, text_features=features, logit_scale=scale)
    finally:
        stop_processes()


@pytest.mark.slow
def test_two_processes(tmp_path, data):
    """Data parallelism is that of 3.x, and a sharded model learns and is evaluated as a copied one is."""
    root = Path(__file__).parents[3]
    stand_in = "tests.integrations.open_clip.open_clip_4"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m"]
    flags = [*SHORT, *data, "--dist-backend", "gloo", "--loss", "unified", "--loss-kwargs", "scale=learned"]
    flags += ["--local-loss", "--gather-with-grad", "--lr", "1e-4"]
    for name, module, others in (
        ("3", MODULE, []),
        ("4", stand_in, []),
        ("sharded", stand_in, ["--fsdp", "--fsdp-no-reshard-after-forward"]),
    ):
        finished = run([*torchrun, module, "--", *flags, "--name", name, *others], tmp_path, PYTHONPATH=str(root))
        assert finished.returncode == 0
        output = finished.stderr + finished.stdout
        assert output.count(" 24 images, 120 captions") == 1, "of the first process alone"
    of_3 = {name.removeprefix("module."): t for name, t in checkpoint(tmp_path, "3")["state_dict"].items()}
    copied, sharded = (checkpoint(tmp_path, name)["state_dict"] for name in ("4", "sharded"))
    assert_same_weights(copied, of_3)
    assert_same_weights(sharded, copied, tolerance=1e-5)
    assert results(tmp_path, "4") == results(tmp_path, "3")
    (row,), (expected,) = results(tmp_path, "sharded"), results(tmp_path, "4")
    assert row == pytest.approx(expected, abs=1e-6)
