"""Every command and snippet of the README's first screen is run as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import torch

from vl_plugins.integrations.open_clip.models import register_models

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def run(command, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    finished = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr


@pytest.mark.parametrize("snippet", blocks("python"), ids=["pml", "functional"])
def test_python_snippets(snippet):
    variables = {}
    exec(compile(snippet, "README.md", "exec"), variables)
    gradients = [value.grad for name, value in variables.items() if name in ("image_embeddings", "text_embeddings")]
    gradients += [variables["similarities"].grad] if "similarities" in variables else []
    assert gradients
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


def test_install_line(install):
    (line,) = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("pip install")]
    command = shlex.split(line, comments=True)
    assert command[:2] == ["pip", "install"]
    (requirement,) = command[2:]
    # Without what it depends on, which the environment of this test has already.
    site = install(requirement)
    assert (site / "vl_plugins" / "integrations" / "open_clip" / "launcher.py").is_file()
    assert (site / "vl_plugins" / "configs" / "models" / "vl-tiny.json").is_file()
    extra = re.search(r"\[(.+)\]", requirement)[1]
    (metadata,) = site.glob("vl_plugins-*.dist-info/METADATA")
    assert f"Provides-Extra: {extra}\n" in metadata.read_text()


def changed_command(sign):
    """Return the open_clip command before ("-") or after ("+") the change that the README shows."""
    (diff,) = blocks("diff")
    lines = [line[1:].strip().removesuffix("\\") for line in diff.splitlines() if line[0] in (" ", sign)]
    return shlex.split(" ".join(lines))


def test_the_change_is_one_module_and_one_flag():
    before, after = changed_command("-"), changed_command("+")
    assert [token for token in after if token not in before] == [
        "vl_plugins.integrations.open_clip",
        "--loss",
        "unified",
    ]
    assert [token for token in before if token not in after] == ["open_clip_train.main"]


def test_the_open_clip_command(tmp_path, toy_shards):
    """It is run to its end, on two processes, with a small model, on toy shards."""
    command = changed_command("+")
    assert command[0] == "torchrun"
    command[command.index("--nproc_per_node") + 1] = "2"
    small = "--model vl-tiny --device cpu --precision fp32 --batch-size 16 --workers 0 --epochs 1 --name run".split()
    small += ["--pretrained", "", "--train-data", f"{toy_shards}/toy-train-{{000000..000007}}.tar"]
    small += ["--val-data", f"{toy_shards}/toy-val-{{000000..000002}}.tar"]
    output = run([*command, *small], tmp_path)
    assert "Training with the loss of vl_plugins: unified(margin=0.2, scale=50.0" in output
    assert (tmp_path / "logs" / "run" / "checkpoints" / "epoch_1.pt").is_file()


def test_shards_and_evaluate_commands(tmp_path, toy_scenes):
    """The lines for COCO, on the toy scenes under COCO's names."""
    shards, _, evaluate = [
        shlex.split(line)
        for block in blocks("bash")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("vl-plugins")
    ]
    (tmp_path / "coco").symlink_to(toy_scenes)
    (tmp_path / "dataset_coco.json").symlink_to(toy_scenes / "dataset_toy.json")
    run([*shards, "--dataset-name", "coco", "--samples-per-shard", "5"], tmp_path)
    assert len(list((tmp_path / "shards").glob("coco-test-*.tar"))) == 5

    register_models()
    checkpoint = tmp_path / "logs/run/checkpoints/epoch_10.pt"
    checkpoint.parent.mkdir(parents=True)
    torch.save({"state_dict": open_clip.create_model("vl-tiny").state_dict()}, checkpoint)
    output = run([*evaluate, "--model", "vl-tiny", "--device", "cpu"], tmp_path)
    assert "24 images, 120 captions" in output
    assert "RSUM" in output


def test_every_flag_and_file_it_names_exists():
    from vl_plugins.integrations.open_clip.options import format_help

    text = format_help()
    for flag in set(re.findall(r"`(--[a-z-]+)", README)) - {"--max-captions"}:
        assert flag in text, flag
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / link).exists(), link
