"""Several processes and mixed precision: gradients, launches by torchrun, and what accelerate is needed for."""

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from tests.integrations.pytorch_metric_learning.gradients import CASES, case, difference, step, steps
from tests.integrations.pytorch_metric_learning.settings import settings
from tests.processes import in_processes
from vl_plugins.integrations.pytorch_metric_learning import build_trainer, main
from vl_plugins.integrations.pytorch_metric_learning.processes import Processes, start_processes
from vl_plugins.utils.errors import MissingExtraError, UserError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MODULE = "vl_plugins.integrations.pytorch_metric_learning"
MIXED = ["loss unified", "smooth_chamfer", "miner MultiSimilarityMiner"]


@pytest.fixture(scope="module")
def two_processes():
    return in_processes(steps, 2, 2, {"float64": list(CASES), "bf16": MIXED})


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_one_process_with_the_joined_batch(two_processes, name):
    gradients, after = step(CASES[name], Processes())
    assert gradients
    for found in two_processes:
        assert difference(found["float64"][name][0], gradients) < 1e-10
        assert difference(found["float64"][name][1], after) < 1e-10


@pytest.mark.parametrize("name", MIXED)
def test_mixed_precision(two_processes, name):
    exact, _ = step(CASES[name], Processes())
    gradients, after = two_processes[0]["bf16"][name]
    assert 1e-4 < difference(gradients, exact) < 0.1
    assert {tensor.dtype for tensor in gradients.values()} == {torch.float32}
    assert all(torch.equal(tensor, two_processes[1]["bf16"][name][1][key]) for key, tensor in after.items())


def test_a_loss_that_is_not_finite_stops_all_processes(two_processes):
    assert [found["error"] for found in two_processes] == ["the loss is nan at step 1 of epoch 1"] * 2


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch 2.2 scales losses on GPUs only")
def test_the_loss_scale_of_fp16():
    """On the CPU and in double precision, where it changes nothing, unless gradients overflow."""
    exact = step(case(), Processes())
    processes = Processes()
    processes.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    gradients, after = step(case(), processes, torch.float32)
    assert difference(gradients, exact[0]) < 1e-4
    assert difference(after, exact[1]) < 1e-4
    processes.scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    _, unchanged = step(case(training={"optimizer": {"name": "SGD", "lr": 1e30}}), processes, torch.float32)
    assert all(tensor.abs().max() < 100 for tensor in unchanged.values()), "the step was left out"
    assert processes.scaler.get_scale() == pytest.approx(5e37)


def test_each_process_reads_its_own_share(toy_shards):
    labels = []
    for rank in (0, 1):
        processes = Processes()
        processes.rank, processes.count = rank, 2
        reader = build_trainer(settings(toy_shards), processes=processes).dataset
        labels += [label for *_, batch in DataLoader(reader, batch_size=None) for label in batch.tolist()]
    assert sorted(labels) == list(range(64))


def test_what_accelerate_is_needed_for(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert start_processes("fp32").count == start_processes().count == 1
    with pytest.raises(MissingExtraError, match=r"accelerate is not installed.*vl_plugins\[pml\]"):
        start_processes("bf16")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MissingExtraError, match=r"vl_plugins\[pml\]"):
        start_processes()
    monkeypatch.undo()
    with pytest.raises(UserError, match="--precision fp16: not on the device cpu; use bf16 or fp32"):
        start_processes("fp16", cpu=True)


def launch(folder, *arguments):
    """Train with torchrun and two processes; the configuration is in ``folder``."""
    command = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2 -m".split(), MODULE, "--"]
    command += ["--config", str(folder / "config.yaml"), "--device", "cpu", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def rows(folder):
    return [json.loads(row) for row in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(toy_shards, tmp_path_factory):
    """A folder with a configuration, and a run of it in two processes, which have dropout."""
    folder = tmp_path_factory.mktemp("two")
    plain = settings(toy_shards, data={"batch_size": 8}, training={"epochs": 3}, accuracy=False)
    plain["text"]["trunk"]["word_dropout"] = 0.2
    (folder / "config.yaml").write_text(yaml.safe_dump(plain))
    finished = launch(folder, "--out", folder / "whole")
    assert finished.returncode == 0, finished.stderr
    return folder, finished.stderr


def test_torchrun(trained):
    folder, printed = trained
    assert [row["epoch"] for row in rows(folder / "whole")] == [1, 2, 3]
    assert printed.count("epoch 3: 24 images, 120 captions") == 1
    assert "12/12" not in printed, "an epoch is 64 images in batches of 2 x 8"
    assert "4/4" in printed
    events = EventAccumulator(str(folder / "whole" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("val/rsum_percent")] == [3, 7, 11]
    saved = torch.load(folder / "whole" / "latest.pt", weights_only=True)
    assert not torch.equal(saved["random"]["torch"], saved["other_random"][0]["torch"])


def test_another_number_of_processes_does_not_go_on(trained, capsys):
    folder, _ = trained
    command = ["--config", str(folder / "config.yaml"), "--device", "cpu", "--out", str(folder / "whole"), "--resume"]
    assert main(command) == 2
    assert "--resume: number of processes is 1, but was 2" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_processes_go_on_to_the_same_numbers(trained):
    folder, _ = trained
    (folder / "killed.py").write_text(
        """
import os, sys
from vl_plugins.integrations.pytorch_metric_learning import main
from vl_plugins.integrations.pytorch_metric_learning.runs import Run
end_of_iteration = Run._end_of_iteration
def kill(self, trainer):
    end_of_iteration(self, trainer)
    if trainer.get_global_iteration() == 6:
        os._exit(9)
Run._end_of_iteration = kill
main(sys.argv[1:])
"""
    )
    command = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node 2".split()]
    command += [str(folder / "killed.py"), "--config", str(folder / "config.yaml"), "--device", "cpu"]
    killed = subprocess.run([*command, "--out", str(folder / "killed")], capture_output=True, timeout=240)
    assert killed.returncode != 0
    assert rows(folder / "killed") == rows(folder / "whole")[:1]
    finished = launch(folder, "--out", folder / "killed", "--resume")
    assert finished.returncode == 0, finished.stderr
    assert rows(folder / "killed") == rows(folder / "whole")
    states = [torch.load(folder / run / "latest.pt", weights_only=True)["models"] for run in ("whole", "killed")]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
