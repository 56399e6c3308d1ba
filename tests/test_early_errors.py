"""Misspelled names and missing files are reported before torch, which takes seconds to import."""

import os
import subprocess
import sys

import pytest

WITHOUT_TORCH = """
import importlib, sys
sys.modules["torch"] = None  # importing it raises an error
sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
"""
LAUNCHER = "vl_plugins.integrations.open_clip.launcher"
TRAINER = "vl_plugins.integrations.pytorch_metric_learning.command_line"


@pytest.mark.parametrize(
    ("module", "command_line", "message"),
    [
        (LAUNCHER, "--model vl-tinny --train-data no.tar", "unknown model 'vl-tinny' (did you mean 'vl-tiny'?)"),
        (LAUNCHER, "--model vl-tiny --loss unifed", "unknown loss 'unifed' (did you mean 'unified'?)"),
        (LAUNCHER, "--model vl-tiny --train-data no-{0..2}.tar", "3 of 3 shards do not exist: no-0.tar"),
        (LAUNCHER, "--model vl-tiny --train-data .", "--train-data .: it is a folder; give shards"),
        (LAUNCHER, "--model vl-tiny --pretrained no/epoch_1.pt", "--pretrained no/epoch_1.pt: no such file"),
        (LAUNCHER, "--model vl-tiny --resume no.pt", "--resume no.pt: no such file"),
        (TRAINER, "--config toy.yaml --train-data no.tar", "1 of 1 shards do not exist: no.tar"),
        ("vl_plugins.cli", "evaluate --model RN5 --checkpoint openai --shards no.tar", "unknown model 'RN5'"),
        ("vl_plugins.cli", "evaluate --checkpoint no.pt --shards no.tar", "--checkpoint no.pt: no such file"),
        ("vl_plugins.cli", "evaluate --features no.npz", "--features no.npz: no such file"),
        ("vl_plugins.cli", "plot attention --checkpoint {here} --shards no.tar", "1 of 1 shards do not exist: no.tar"),
        ("vl_plugins.cli", "plot weights --loss unifed", "unknown loss 'unifed'"),
    ],
)
def test_before_torch_is_imported(module, command_line, message):
    arguments = command_line.replace("{here}", __file__).split()
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, module, *arguments], capture_output=True, text=True, timeout=60
    )
    assert message in finished.stderr
    assert finished.stderr.count("\n") == 1
    assert finished.returncode == 2


@pytest.mark.parametrize("module", [LAUNCHER, "vl_plugins.cli"])
def test_one_process_of_several_prints_an_error(module):
    command = {LAUNCHER: ["--model", "RN5"], "vl_plugins.cli": ["evaluate", "--features", "no.npz"]}[module]
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, module, *command],
        env={**os.environ, "RANK": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (finished.returncode, finished.stderr) == (2, "")
