"""``vl-plugins export``: plain open_clip opens the folder as the model that the checkpoint is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import torch
from clip_benchmark.metrics import zeroshot_retrieval
from clip_benchmark.models import load_clip
from PIL import Image
from transformers import BertConfig

from tests.helpers.open_clip_training import checkpoint_with_heads
from vl_plugins.cli import main
from vl_plugins.data import ShardDataset
from vl_plugins.integrations.loading import load_model
from vl_plugins.integrations.open_clip.models import register_models

FORMER_FILES = Path(__file__).parents[1] / "files_v0_3"
PICTURE = Image.effect_noise((70, 50), 90).convert("RGB")
TEXTS = ["a red ball!", "two green squares and a very long text about what else there is to be seen, " * 3]

# Without this package, in a process of its own.
OPEN = """
import sys, torch, open_clip
folder, file = sys.argv[1:]
inputs = torch.load(file, weights_only=False)
model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(inputs["texts"])
image = transform(inputs["picture"])[None]
model.eval()
with torch.inference_mode():
    output = {"image": image, "tokens": tokens, "images": model.encode_image(image), "texts": model.encode_text(tokens)}
assert not any(name.startswith("vl_plugins") for name in sys.modules)
torch.save({**output, "bias": getattr(model, "logit_bias", None)}, file)
print(open_clip.__version__)
"""


def opened(folder, tmp_path, version="", **environment):
    """Return what plain open_clip of a version makes of a picture and texts."""
    file = tmp_path / "inputs.pt"
    torch.save({"picture": PICTURE, "texts": TEXTS}, file)
    command = [sys.executable, "-c", OPEN, str(folder), str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    assert subprocess.check_output(command, cwd=tmp_path, env=environment, text=True).startswith(version)
    return torch.load(file, weights_only=True)


def of_checkpoint(file, model=None):
    """Return the same of the checkpoint."""
    loaded, transform, tokenizer = load_model(file, model)
    image, tokens = transform(PICTURE)[None], tokenizer(TEXTS)
    with torch.inference_mode():
        images, texts = loaded.encode_image(image), loaded.encode_text(tokens)
    return {"image": image, "tokens": tokens, "images": images, "texts": texts, "bias": loaded.logit_bias}


def save(file, name="vl-tiny", precision="fp32", **options):
    register_models()
    torch.manual_seed(0)
    bias = {"init_logit_bias": -10} if options.pop("siglip", False) else {}
    model, *_ = open_clip.create_model_and_transforms(name, precision=precision, **options, **bias)
    args = {"model": name, "head": None, "siglip": bool(bias), **options}
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"epoch": 2, "state_dict": model.state_dict(), "args": args}, file)
    return str(file)


BUILT = {"force_quick_gelu": True, "force_image_size": 32, "force_context_length": 20, "force_custom_text": True}
TRANSFORM = {"image_mean": (0.1, 0.2, 0.3), "image_std": (0.4,) * 3, "image_resize_mode": "squash"}


@pytest.mark.parametrize(
    "options",
    [
        {**BUILT, **TRANSFORM, "image_interpolation": "bilinear", "siglip": True},
        {"precision": "bf16"},
        {"name": "vl-tiny-resnet"},
    ],
    ids=["forced", "bf16", "timm"],
)
def test_plain_open_clip_opens_the_model(options, tmp_path, capsys):
    file = save(tmp_path / "epoch_2.pt", **options)
    assert main(["export", file, "--to", str(tmp_path / "out")]) == 0
    line = f'wrote {tmp_path}/out: open_clip.create_model_and_transforms("local-dir:{tmp_path}/out") opens it\n'
    assert capsys.readouterr().out == line
    assert sorted(os.listdir(tmp_path / "out")) == ["README.md", "open_clip_config.json", "open_clip_model.safetensors"]
    expected = of_checkpoint(file)
    for name, tensor in opened(tmp_path / "out", tmp_path).items():
        assert (tensor is None) == (expected[name] is None)
        assert tensor is None or torch.equal(tensor, expected[name]), name


def test_a_tokenizer_of_hugging_face_comes_along(tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(FORMER_FILES, tmp_path / "files"))
    assert main(["export", "logs/plain", "--to", "out"]) == 0
    expected = of_checkpoint("logs/plain")
    shutil.move("out", tmp_path / "moved")
    shutil.rmtree("model")
    found = opened(tmp_path / "moved", tmp_path)
    for name in ("image", "tokens", "images", "texts"):
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.skipif("VL_PLUGINS_OPEN_CLIP_4" not in os.environ, reason="VL_PLUGINS_OPEN_CLIP_4 names no sources")
def test_open_clip_4_opens_the_folder(tmp_path):
    file = save(tmp_path / "epoch_2.pt", **BUILT, **TRANSFORM, siglip=True)
    assert main(["export", file, "--to", str(tmp_path / "out")]) == 0
    expected = of_checkpoint(file)
    sources = os.environ["VL_PLUGINS_OPEN_CLIP_4"]
    for name, tensor in opened(tmp_path / "out", tmp_path, version="4.", PYTHONPATH=sources).items():
        torch.testing.assert_close(tensor, expected[name])  # another version computes attention in another order


def test_clip_benchmark_measures_what_evaluate_does(tmp_path, toy_shards, capsys):
    shards = f"{toy_shards}/toy-val-{{000000..000002}}.tar"
    file, out = save(tmp_path / "epoch_2.pt"), tmp_path / "out"
    assert main(["evaluate", "--checkpoint", file, "--shards", shards, "--workers", "0", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert main(["export", file, "--to", str(out)]) == 0
    model, transform, tokenizer = load_clip("open_clip", f"local-dir:{out}", None, cache_dir=None, device="cpu")
    model.eval()
    dataset = ShardDataset(shards, transform, tokenizer)
    batch = torch.stack([item.image for item in dataset]), [item.captions for item in dataset]
    recalls = zeroshot_retrieval.evaluate(model, [batch], tokenizer, "cpu", amp=False, recall_k_list=[1, 5, 10])
    assert 100 * sum(recalls.values()) == pytest.approx(row["metrics"]["plain"]["rsum"])


def results_of(rows, shards="val.tar", **more):
    return json.dumps({"shards": shards, "results": rows, **more})


def test_the_card_has_data_loss_flags_and_numbers(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    save(run / "checkpoints" / "epoch_2.pt")
    params = {
        "model": "vl-tiny",
        "pretrained": "tag",
        "train_data": "train-{0..7}.tar",
        "val_data": "val.tar",
        "loss": "unified",
        "loss_kwargs": {"margin": 0.3},
        "lr": 0.0123,
        "epochs": 5,
        "world_size": 4,
        "log_path": "/home/me/logs",
    }
    (run / "params.txt").write_text("".join(f"{name}: {value}\n" for name, value in sorted(params.items())))
    recalls = {f"{way}_R@{k}": 0.5 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    epochs = [{**recalls, "rsum": 123.4, "epoch": 1}, {**recalls, "rsum": 234.5, "epoch": 2}]
    (run / "checkpoints" / "results.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in epochs))
    assert main(["export", "run", "--to", "one"]) == 0
    card = Path("one/README.md").read_text()
    assert card.startswith("---\nlibrary_name: open_clip\n")
    for text in (
        "# one\n",
        "- Epoch: 2 of 5\n- Data: `train-{0..7}.tar`\n- Validation data: `val.tar`\n",
        "- Processes: 4, ",
        "- Loss: unified of vl_plugins (margin=0.3)\n",
        "| `--lr` | 0.0123 |\n",
        "In the validation after epoch 2 on `val.tar`:\n",
        "| validation | 50.0 | 50.0 | 50.0 | - | 50.0 | 50.0 | 50.0 | - | 234.5 |\n",
    ):
        assert text in card
    assert "123.4" not in card
    assert "/home/me" not in card


def test_the_card_of_a_merged_model_says_how_it_was_merged(tmp_path, toy_shards, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, after = save(tmp_path / "before.pt"), save(tmp_path / "after.pt")
    val = f"{toy_shards}/toy-val-000000.tar"
    flags = ["--shards", val, "--workers", "0", "--weights", "0.25", "--out", "merged.pt"]
    assert main(["merge", before, after, *flags]) == 0
    assert main(["export", "merged.pt", "--to", "out"]) == 0
    mean = f"Its weights are a mean, chosen on `{val}`: 0.75 of `{before}`, 0.25 of `{after}`.\n"
    assert mean in Path("out/README.md").read_text()


def test_results_are_those_of_the_checkpoint(tmp_path, toy_shards, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours, baseline = save(tmp_path / "ours.pt"), save(tmp_path / "baseline.pt", force_quick_gelu=True)
    flags = ["--shards", f"{toy_shards}/toy-val-000000.tar", "--workers", "0", "--json", "--baseline", "clip"]
    assert main(["evaluate", "--checkpoint", f"clip={baseline}", f"ours={ours}", *flags]) == 0
    printed = capsys.readouterr().out
    Path("results.json").write_text(printed)
    content = json.loads(printed)
    rsum = content["results"][1]["metrics"]["plain"]["rsum"]
    assert main(["export", ours, "--to", "out", "--results", "results.json"]) == 0
    card = Path("out/README.md").read_text()
    difference = content["differences"]["plain"]["ours"]["rsum"]
    interval = f"95 % interval [{difference['low']:+.1f}, {difference['high']:+.1f}], from 8 images, seeds 1 vs 1"
    assert f"- plain: RSUM − clip: {difference['difference']:+.1f}, {interval}\n" in card
    assert f"| {rsum:.1f} |\n" in card
    other = save(tmp_path / "other.pt", force_context_length=20)
    assert main(["export", other, "--to", "no", "--results", "results.json"]) == 2
    error = capsys.readouterr().err
    assert f"--results results.json are of {baseline}, {ours}, not of {other} as it is now" in error
    Path("results.json").write_text("[]")
    assert main(["export", ours, "--to", "no", "--results", "results.json"]) == 2
    assert "--results results.json is not what `vl-plugins evaluate --json` prints" in capsys.readouterr().err
    assert not Path("no").exists()


def test_models_that_open_clip_cannot_hold(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(shutil.copytree(FORMER_FILES, tmp_path / "files"))
    encode = "`vl-plugins encode` writes its embeddings"
    clip, *_ = open_clip.create_model_and_transforms("vl-tiny")
    torch.save(checkpoint_with_heads(clip, "vl-tiny", "linear", {"dim": 8}), "linear.pt")
    for checkpoint, message in (
        ("linear.pt", f"linear.pt has a linear head, which models of open_clip do not have: {encode}"),
        ("logs/set", f"logs/set has a set head, which models of open_clip do not have: {encode}"),
        (
            "runs/pictures",
            f"runs/pictures is of the trainer for pytorch-metric-learning, no model of open_clip: {encode}",
        ),
    ):
        assert main(["export", checkpoint, "--to", "out"]) == 2
        assert message in capsys.readouterr().err
    assert main(["export", "logs/plain", "--to", "model"]) == 2
    assert "model exists and is not empty: choose another name" in capsys.readouterr().err
    assert sorted(name for name in os.listdir() if "out" in name) == []


def test_a_text_tower_whose_configuration_is_on_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    BertConfig(
        vocab_size=28, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    ).save_pretrained("bert")
    shutil.copytree(FORMER_FILES / "model" / "tokenizer", "tokenizer")
    config = json.loads((FORMER_FILES / "model" / "tiny.json").read_text())
    config["text_cfg"] = {"hf_model_name": "bert", "hf_tokenizer_name": "tokenizer", "context_length": 24}
    Path("local.json").write_text(json.dumps(config))
    open_clip.add_model_config("local.json")
    model = open_clip.create_model("local", pretrained_text=False)
    torch.save({"state_dict": model.state_dict()}, "epoch_1.pt")
    assert main(["export", "epoch_1.pt", "--model", "local", "--model-config", "local.json", "--to", "out"]) == 2
    assert (
        "open_clip reads the configuration of the text tower from bert, which another machine"
        in capsys.readouterr().err
    )
