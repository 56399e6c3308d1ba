"""Failures that nobody foresees keep their traceback, from the first step on and before it."""

import contextlib
import io
import re

import pytest
import torch

from tests.helpers.open_clip_training import TINY, error_line, small_shard_flags
from tests.helpers.processes import in_processes
from vl_plugins.integrations.open_clip.launcher import main

CUDA = """CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""
NCCL = """NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error
Last error:
socketPollConnect: connect to 10.0.0.2 failed : Software caused connection abort"""
LOSSES = f"""
import torch
from pytorch_metric_learning.losses import NTXentLoss


class Cuda(NTXentLoss):
    def forward(self, *batch, **options):
        raise RuntimeError({CUDA!r})


class Nccl(NTXentLoss):
    def forward(self, *batch, **options):
        raise torch.distributed.DistBackendError({NCCL!r})


class Bug(NTXentLoss):
    def forward(self, *batch, **options):
        return {{}}["caption"]


class ImagesOnly(NTXentLoss):
    symmetric = False

    def forward(self, embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
        return embeddings.square().sum()
"""


@pytest.fixture
def flags(toy_shards, tmp_path, monkeypatch):
    (tmp_path / "failing_losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return [*TINY, *small_shard_flags(toy_shards)]


@pytest.mark.parametrize(
    ("loss", "error", "reason"),
    [
        ("Cuda", RuntimeError, "CUDA error: device-side assert triggered"),
        ("Nccl", torch.distributed.DistBackendError, "remote process exited or there was a network error"),
        ("Bug", KeyError, "'caption'"),
    ],
)
def test_a_failure_in_the_first_step_keeps_its_type_and_reason(loss, error, reason, flags):
    with pytest.raises(error, match=reason):
        main([*flags, "--loss", f"failing_losses:{loss}"])


def status_and_errors(rank, flags):
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        status = main(flags)
    return status, stderr.getvalue()


def test_both_processes_print_why_parameters_have_no_gradient(flags):
    """The text tower gets none; torch notices in the second step."""
    flags = [*flags, "--loss", "failing_losses:ImagesOnly"]
    results = in_processes(status_and_errors, 2, flags, joined=False)
    for rank, (status, errors) in enumerate(results):
        assert status == 1
        lines = [line for line in errors.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert lines[0].endswith("Traceback (most recent call last):")
        assert "Expected to have finished reduction in the prior iteration" in "\n".join(lines)


def test_a_process_without_the_data_says_so(flags, tmp_path):
    flags = [*flags, "--loss", "unified", "--train-data", str(tmp_path / "missing.tar")]
    results = in_processes(status_and_errors, 2, flags, joined=False)
    for rank, (status, errors) in enumerate(results):
        assert status == 2
        expected = rf"\[rank {rank}\] vl_plugins: error: .*1 of 1 shards do not exist: .*missing.tar\n"
        assert re.search(expected, errors)


ONE_LINE = {
    "--loss unified --model coca_ViT-B-32": "--loss does not support CoCa models such as coca_ViT-B-32",
    "--captions-per-image all": "--captions-per-image all needs --loss, such as unified",
    "--captions-per-image 2": "--captions-per-image 2 needs --loss, such as unified",
    "--loss smooth_chamfer": "--loss smooth_chamfer compares embedding sets: add --head set",
    "--loss unified --batch-size 1": "--loss unified compares images, and there is only one: raise --batch-size",
}


@pytest.mark.parametrize(("more", "line"), ONE_LINE.items())
def test_one_line_before_the_model_is_built(more, line, flags, tmp_path, capfd):
    assert main([*flags, *more.split()]) == 2
    assert line in error_line(capfd.readouterr().err)
    assert not list(tmp_path.glob("logs")), "open_clip makes the folder before it builds the model"


@pytest.mark.parametrize("more", ["--accum-freq 2", "--captions-per-image first"])
def test_what_is_near_to_an_error_trains(more, flags):
    loss = ["--loss", "unified", "--batch-size", "1"] if "accum" in more else []
    assert main([*flags, *loss, *more.split()]) == 0
