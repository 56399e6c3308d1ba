"""The launcher with heads, as its user runs it."""

import json
import re
import sys

import pytest
import torch

from tests.integrations.open_clip.test_launcher import MODULE, SHORT, checkpoint, launch, run, shard_pattern
from vl_plugins.cli import main as vl_plugins
from vl_plugins.integrations.checkpoints import load_model

SMALL = ["--head-kwargs", "num_slots=3", "num_iters=2", "hidden_dim=32"]
SETS = ["--loss", "smooth_chamfer", "--head", "set", *SMALL]


@pytest.fixture(scope="module")
def data(toy_shards):
    return ["--train-data", shard_pattern(toy_shards, "train"), "--val-data", shard_pattern(toy_shards, "val")]


def results(cwd, name="run"):
    lines = (cwd / "logs" / name / "checkpoints/results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_sets_are_trained_validated_saved_resumed_and_evaluated(tmp_path, toy_shards, data, capsys, monkeypatch):
    flags = [*SHORT, *data, "--name", "run", *SETS, "--captions-per-image", "2"]
    finished = launch(tmp_path, *flags)
    assert finished.returncode == 0
    log = (tmp_path / "logs/run/out.log").read_text()
    assert "Both towers end in the head set(num_slots=3, num_iters=2, hidden_dim=32, slots='learned'" in log
    assert "sets are compared by SmoothChamferSimilarity(" in log
    assert "Training with the loss of vl_plugins: smooth_chamfer(base='triplet_hn', alpha=16.0" in log
    for term in ("Smooth_chamfer", "Mmd", "Diversity"):
        values = [float(value) for value in re.findall(rf"{term}_loss: (\S+)", log)]
        assert len(values) == 4, term
        assert all(0 < value < 1 for value in values), term
    assert len(re.findall(r"Circular variance of the sets: images 0\.\d+, texts 0\.\d+\n", log)) == 4
    (row,) = results(tmp_path)
    assert 0 < row["image_circular_variance"] < 1
    assert 0 < row["caption_circular_variance"] < 1
    assert f"images {row['image_circular_variance']:.4g}, captions {row['caption_circular_variance']:.4g}" in log

    # The file alone says what it is of, and gives the numbers of the training.
    path = str(tmp_path / "logs/run/checkpoints/epoch_1.pt")
    shards = f"{toy_shards}/toy-val-{{000000..000002}}.tar"
    evaluate = ["evaluate", "--checkpoint", path, "--shards", shards, "--device", "cpu"]
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert vl_plugins([*evaluate, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["metrics"]["plain"]["rsum"] == pytest.approx(row["rsum_percent"])
    assert result["caption_circular_variance"] == pytest.approx(row["caption_circular_variance"], rel=1e-5)
    assert vl_plugins(evaluate) == 0
    assert "circular variance of the sets: images 0." in capsys.readouterr().out
    assert vl_plugins([*evaluate, "--model", "ViT-B-32"]) == 2
    assert "is of model vl-tiny, not ViT-B-32" in capsys.readouterr().err

    finished = launch(tmp_path, *flags, "--resume", "latest", "--epochs", "2")
    assert finished.returncode == 0
    assert [row["epoch"] for row in results(tmp_path)] == [1, 2]
    before, after = (load_model(tmp_path / f"logs/run/checkpoints/epoch_{epoch}.pt")[0] for epoch in (1, 2))
    assert not torch.equal(before.text_head.prediction.initial_slots, after.text_head.prediction.initial_slots)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            ["--accum-freq", "2", "--captions-per-image", "all"], id="accum-freq-all-captions", marks=pytest.mark.slow
        ),
        pytest.param(
            ["--precision", "amp_bf16", "--loss-kwargs", "base=unified"], id="amp_bf16", marks=pytest.mark.slow
        ),
        pytest.param(
            ["--grad-checkpointing", "--lock-image", "--lock-text", "--lock-text-freeze-layer-norm"],
            id="locked",
            marks=pytest.mark.slow,
        ),
        pytest.param(["--miner", "BatchHardMiner"], id="miner", marks=pytest.mark.slow),
        pytest.param(["--loss-kwargs", "base=goal", "warmup_steps=2"], id="goal", marks=pytest.mark.slow),
        pytest.param(["--distance", "mil"], id="mil", marks=pytest.mark.slow),
        pytest.param(["--torchcompile"], id="torchcompile", marks=pytest.mark.slow),
        pytest.param(["--force-patch-dropout", "0.5"], id="patch-dropout", marks=pytest.mark.slow),
    ],
)
def test_trainer_flags(tmp_path, data, flags):
    finished = launch(tmp_path, *SHORT, *data, "--name", "run", *SETS, *flags)
    assert finished.returncode == 0
    (row,) = results(tmp_path)
    assert row["rsum_percent"] > 0
    state = checkpoint(tmp_path, "run")["state_dict"]
    assert state["_extra_state"]["head_kwargs"]["num_slots"] == 3
    assert all(tensor.isfinite().all() for name, tensor in state.items() if name != "_extra_state")


@pytest.mark.slow
def test_other_heads_than_those_of_the_checkpoint_are_refused(tmp_path, data):
    flags = [*SHORT, *data, "--name", "run", "--epochs", "2", "--resume", "latest"]
    assert launch(tmp_path, *flags, *SETS).returncode == 0
    finished = launch(tmp_path, *flags, *SETS, "--head-kwargs", "num_slots=2", "num_iters=2", "hidden_dim=32")
    assert finished.returncode == 2
    assert "the checkpoint has the head set(num_slots=3, num_iters=2, hidden_dim=32" in finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", [pytest.param([], id="clip"), pytest.param(["--siglip"], id="siglip")])
def test_a_linear_head_under_the_losses_of_open_clip(tmp_path, data, flags):
    finished = launch(
        tmp_path, *SHORT, *data[:2], "--name", "run", "--head", "linear", "--head-kwargs", "dim=24", *flags
    )
    assert finished.returncode == 0
    losses = [float(loss) for loss in re.findall(r"Contrastive_loss: (\S+)", finished.stderr + finished.stdout)]
    assert len(losses) == 4
    assert all(0 < loss < 20 for loss in losses)
    model, _, tokenizer = load_model(tmp_path / "logs/run/checkpoints/epoch_1.pt")
    assert model.encode_text(tokenizer(["a red circle"]), normalize=True).shape == (1, 24)
    assert (model.clip.logit_bias is not None) == bool(flags)


@pytest.mark.slow
def test_two_processes_train_a_similarity_with_the_model(tmp_path, data):
    """A parameter without a gradient in any process would end the second step."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        MODULE,
        "--",
    ]
    flags = [*SHORT, *data, "--name", "run", *SETS, "global_feature=false", "--batch-size", "8"]
    flags += ["--distance", "match_probability", "--gather-with-grad", "--local-loss"]
    finished = run([*torchrun, *flags], tmp_path)
    assert finished.returncode == 0
    assert len(results(tmp_path)) == 1
    path = tmp_path / "logs/run/checkpoints/epoch_1.pt"
    assert "module._extra_state" in torch.load(path, weights_only=True)["state_dict"]
    similarity = load_model(path)[0].similarity
    assert type(similarity).__name__ == "MatchProbability"
    trained = {name: parameter.item() for name, parameter in similarity.named_parameters()}
    assert len(trained) == 2
    assert not {1.0, 0.0} & set(trained.values())
