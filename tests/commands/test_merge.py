"""``vl-plugins merge``: what it prints and writes, by what the other commands say of the same models."""

import json
import shutil
from pathlib import Path

import open_clip
import pytest
import torch
from torch import nn

from tests.helpers.open_clip_training import checkpoint_with_heads
from vl_plugins.cli import main
from vl_plugins.data import ShardDataset, evaluation_loader
from vl_plugins.integrations.loading import load_model, read_torch_file
from vl_plugins.integrations.open_clip.models import register_models

FORMER_FILES = Path(__file__).parents[1] / "files_v0_3"


def clip(seed, name="vl-tiny", **options):
    register_models()
    torch.manual_seed(seed)
    model = open_clip.create_model(name, **options)
    nn.init.constant_(model.logit_scale, 3 + seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            module.num_batches_tracked += seed
    return model


def save(file, model, **more):
    torch.save({"epoch": 1, "state_dict": model.state_dict(), **more}, file)
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints: three of one model, two of a ResNet, and two with sets."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed in range(3):
        save(folder / f"{seed}.pt", clip(seed))
    for seed in range(2):
        save(folder / f"resnet_{seed}.pt", clip(seed, "vl-tiny-resnet"))
        content = checkpoint_with_heads(clip(seed), "vl-tiny", "set", {"num_slots": 3, "hidden_dim": 16})
        torch.save(content, folder / f"sets_{seed}.pt")
    return folder


@pytest.fixture(scope="module")
def val(toy_shards):
    return f"{toy_shards}/toy-val-{{000000..000002}}.tar"


@pytest.fixture
def merge(folder, val, tmp_path, capsys):
    """Function that merges checkpoints of the folder; returns rows by name, the line of what was written, the file."""

    def run(names, *options, model="vl-tiny"):
        out = tmp_path / "merged.pt"
        files = [str(folder / f"{name}.pt") for name in names]
        model = ("--model", model) if model else ()
        arguments = ["merge", *files, "--shards", val, "--out", str(out), "--workers", "0", *model, *options]
        assert main(arguments) == 0, capsys.readouterr().err
        _, *rows = capsys.readouterr().out.splitlines()
        written = next(place for place, line in enumerate(rows) if line.startswith("wrote "))
        return {row.split("  ")[0]: row.split()[-1] for row in rows[:written]}, rows[written], out

    return run


def evaluate(capsys, checkpoint, shards, *options):
    """Return RSUM as tables show it."""
    arguments = ["evaluate", "--checkpoint", str(checkpoint), "--shards", shards, "--workers", "0", "--json"]
    assert main([*arguments, *options]) == 0
    return f"{json.loads(capsys.readouterr().out)['results'][0]['metrics']['plain']['rsum']:.1f}"


def assert_same_weights(weights, expected):
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("end", [0, 1])
def test_the_ends_are_both_models(merge, folder, val, capsys, end):
    rows, line, out = merge("01", "--weights", str(end))
    name = f"{end} ({end})"
    assert line.startswith(f"wrote {out}: {name}, with the best RSUM of {val}; ")
    content = read_torch_file(out)
    assert_same_weights(content["state_dict"], read_torch_file(folder / f"{end}.pt")["state_dict"])
    expected = evaluate(capsys, folder / f"{end}.pt", val, "--model", "vl-tiny")
    assert rows == {name: expected}
    # The file says which model it is of.
    assert evaluate(capsys, out, val) == expected


def test_the_best_mean_is_written_with_all_that_other_programs_need(merge, folder, val, toy_shards, capsys, tmp_path):
    retain, plot = f"{toy_shards}/toy-test-000000.tar", tmp_path / "curve.svg"
    rows, line, out = merge("01", "--retain", retain, "--plot", str(plot), "--weights", "1", "0", "0.3", "0.3")
    assert list(rows) == ["0 (0)", "0.3", "1 (1)"]
    best = line.removeprefix(f"wrote {out}: ").partition(",")[0]
    assert evaluate(capsys, out, retain) == rows[best]
    picture = plot.read_text()
    for text in ("to choose by", "to retain", "the best", "weight of 1, from 0"):
        assert f"<!-- {text} -->" in picture
    share = float(best.split()[0])
    states = [read_torch_file(folder / f"{seed}.pt")["state_dict"] for seed in range(2)]
    model = open_clip.create_model("vl-tiny", pretrained=str(out), weights_only=True)
    for name, tensor in model.state_dict().items():
        expected = torch.lerp(states[0][name].double(), states[1][name].double(), share)
        torch.testing.assert_close(tensor, expected.to(tensor.dtype), rtol=2e-7, atol=0)
    assert model.logit_scale.item() == pytest.approx(3 + share)


def test_the_mean_of_three(merge, folder):
    rows, line, out = merge("012")
    assert list(rows) == ["0", "1", "2", "mean of all"]
    best = max(rows, key=lambda name: float(rows[name]))
    assert line.startswith(f"wrote {out}: {best}, ")
    states = [read_torch_file(folder / f"{seed}.pt")["state_dict"] for seed in range(3)]
    expected = {name: sum(state[name].double() for state in states) / 3 for name in states[0]}
    if best in "012":
        expected = states[int(best)]
    for name, tensor in read_torch_file(out)["state_dict"].items():
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype), rtol=2e-7, atol=0)


def test_models_with_heads(merge, folder, val, capsys):
    rows, line, out = merge(["sets_0", "sets_1"], "--weights", "0", "0.5", model=None)
    best = line.removeprefix(f"wrote {out}: ").partition(",")[0]
    assert rows["0 (sets_0)"] == evaluate(capsys, folder / "sets_0.pt", val)
    assert rows[best] == evaluate(capsys, out, val)
    assert load_model(out)[0].head == "set"


def test_weights_in_bfloat16_stay_so(merge, folder, val, capsys):
    """Those that open_clip's ``--precision bf16`` leaves in float32 stay in that."""
    for seed in range(2):
        save(folder / f"half_{seed}.pt", clip(seed, precision="bf16"))
    merge(["half_0", "half_1"], "--weights", "1")[2].rename(folder / "end.pt")
    end = read_torch_file(folder / "end.pt")["state_dict"]
    assert_same_weights(end, read_torch_file(folder / "half_1.pt")["state_dict"])
    assert {tensor.dtype for tensor in end.values()} == {torch.bfloat16, torch.float32}
    rows, _, out = merge(["half_0", "half_1"], "--weights", "0.5")
    assert {name: tensor.dtype for name, tensor in read_torch_file(out)["state_dict"].items()} == {
        name: tensor.dtype for name, tensor in end.items()
    }
    assert rows == {"0.5": evaluate(capsys, out, val)}


def test_batch_norm_is_recomputed_but_at_the_ends(merge, folder, val, toy_shards, capsys):
    names = ["resnet_0", "resnet_1"]
    arguments = [str(folder / f"{name}.pt") for name in names] + ["--shards", val, "--out", str(folder / "no.pt")]
    assert main(["merge", *arguments, "--model", "vl-tiny-resnet"]) == 2
    error = capsys.readouterr().err
    assert "RSUM was 35.9 with averaged statistics and 61.9 with recomputed ones. Add --batch-norm SHARDS" in error
    train = f"{toy_shards}/toy-train-{{000000..000001}}.tar"
    options = ["--batch-norm", train, "--batch-size", "16"]
    _, _, out = merge(names, "--weights", "0", *options, model="vl-tiny-resnet")
    assert_same_weights(read_torch_file(out)["state_dict"], read_torch_file(folder / "resnet_0.pt")["state_dict"])
    rows, _, out = merge(names, "--weights", "0.5", *options, model="vl-tiny-resnet")
    assert rows == {"0.5": evaluate(capsys, out, val)}
    # The first layer's input is the pictures, so that the mean over the batches follows from its convolution alone.
    model, transform, tokenizer = load_model(out)
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    inputs = []
    norm.register_forward_hook(lambda module, given, output: inputs.append(given[0]))
    with torch.no_grad():
        for batch in evaluation_loader(ShardDataset(train, transform, tokenizer), 16):
            model.encode_image(batch.images)
    assert (len(inputs), norm.num_batches_tracked.item()) == (1, 1)
    torch.testing.assert_close(norm.running_mean, inputs[0].mean(dim=(0, 2, 3)), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(norm.running_var, inputs[0].var(dim=(0, 2, 3)), rtol=1e-4, atol=1e-6)


def test_tags_folders_and_runs(merge, folder, val, tmp_path, capsys, monkeypatch):
    """A pretrained tag is averaged with a folder of the hub's layout, and with a run."""
    tag = {"vl-tiny": {"tag": {"url": "", "mean": (0.4,) * 3}}}
    monkeypatch.setattr(open_clip.pretrained, "_PRETRAINED", open_clip.pretrained._PRETRAINED | tag)
    monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *_, **__: str(folder / "0.pt"))
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "params.txt").write_text("model: vl-tiny\npretrained: tag\nhead: None\nhead_kwargs: {}\n")
    save(run / "checkpoints" / "epoch_3.pt", clip(1))
    out = tmp_path / "merged.pt"
    flags = ["--shards", val, "--out", str(out), "--workers", "0"]
    assert main(["merge", "tag", str(run), "--model", "vl-tiny", "--weights", "0.5", *flags]) == 0
    assert "0.5" in capsys.readouterr().out
    (mean,) = {normalize.mean for normalize in load_model(out)[1].transforms if hasattr(normalize, "mean")}
    assert mean == (0.4,) * 3
    # Without the tag's mean of pixels, it is another model.
    assert main(["merge", str(run), str(folder / "0.pt"), "--model", "vl-tiny", *flags]) == 2
    assert f"{run} and {folder}/0.pt are different models: they transform pictures by" in capsys.readouterr().err


@pytest.mark.parametrize("run", ["pictures", "features"])
def test_runs_of_the_trainer_for_pml(run, tmp_path, monkeypatch, capsys):
    """One of vectors, and one of sets whose similarity is learned."""
    monkeypatch.chdir(shutil.copytree(FORMER_FILES, tmp_path / "files"))
    files = ["other.pt", f"runs/{run}/latest.pt"]
    content = torch.load(files[1], weights_only=True)
    states = [*content["models"].values(), content["loss_funcs"]["metric_loss"]]
    for tensor in (tensor for state in states for tensor in state.values() if tensor.is_floating_point()):
        tensor *= 1 + torch.rand_like(tensor)
    torch.save(content, files[0])
    shards = f"shards/{run}/toy-test-{{000000..000001}}.tar"
    flags = ["--shards", shards, "--workers", "0", "--out", "merged.pt"]
    ends = [evaluate(capsys, file, shards) for file in files]
    for weight, expected in (("0", ends[0]), ("1", ends[1]), ("0.5", None)):
        assert main(["merge", *files, *flags, "--weights", weight]) == 0
        row = capsys.readouterr().out.splitlines()[1].split()[-1]
        assert row == evaluate(capsys, "merged.pt", shards)
        assert expected in (None, row)


def test_models_that_differ(folder, val, tmp_path, capsys):
    content = checkpoint_with_heads(clip(0), "vl-tiny", "set", {"num_slots": 3, "hidden_dim": 16, "num_iters": 1})
    torch.save(content, tmp_path / "one_iteration.pt")
    params = {"model": "vl-tiny", "head": None, "force_quick_gelu": True}
    save(tmp_path / "quick.pt", clip(0, force_quick_gelu=True), args=params)
    save(tmp_path / "smaller.pt", clip(0, force_image_size=32), args={**params, "force_image_size": 32})
    save(tmp_path / "plain.pt", clip(0), args={**params, "force_quick_gelu": False})
    for first, second, difference in (
        ("plain", folder / "sets_0.pt", "head None and 'set'"),
        ("one_iteration", folder / "sets_0.pt", "their head_kwargs differ"),
        ("quick", tmp_path / "plain.pt", "QuickGELU"),
        ("plain", tmp_path / "smaller.pt", "visual.positional_embedding of the shape (65, 96) and (17, 96)"),
    ):
        files = [str(tmp_path / f"{first}.pt"), str(second)]
        assert main(["merge", *files, "--shards", val, "--out", str(tmp_path / "out.pt")]) == 2
        error = capsys.readouterr().err
        assert f"error: {files[0]} and {second} are different models: " in error
        assert difference in error
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("0.pt", "give two checkpoints or more"),
        ("0.pt 1.pt 2.pt --weights 0.5", "--weights and --plot are for two models, got 3"),
        ("0.pt 1.pt 2.pt --plot a.png", "--weights and --plot are for two models, got 3"),
        ("0.pt 1.pt --weights 0.5 1.5", "--weights must be from 0 to 1, got 1.5"),
        ("0.pt 1.pt --out 1.pt", "--out 1.pt would replace a file of 1.pt"),
        ("0.pt 1.pt TORCHRUN", "merge runs in one process: start it without torchrun"),
        ("0.pt 1.pt --out merged", "--out must end in .pt"),
        ("0.pt 1.pt --plot curve.gif", "the picture must end in .png, .pdf or .svg"),
        ("0.pt 1.pt --retain no.csv", "no.csv does not exist"),
        ("0.pt 1.pt --batch-norm {val}", "--batch-norm: the models have no batch norm"),
    ],
)
def test_wrong_options(folder, val, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(folder)
    if words.endswith("TORCHRUN"):
        words = words.removesuffix("TORCHRUN")
        monkeypatch.setenv("WORLD_SIZE", "2")
    flags = ["--shards", val, "--out", str(tmp_path / "out.pt"), "--model", "vl-tiny"]
    assert main(["merge", *flags, *words.format(val=val).split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()
