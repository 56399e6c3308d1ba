"""Several processes and mixed precision: gradients are those of one process with the joined batch, and whole runs."""

import contextlib
import io
import json
import os
import sys

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.multiprocessing import ProcessExitedException

from tests.helpers.pml_settings import settings
from tests.helpers.processes import in_processes
from vl_plugins import list_losses
from vl_plugins.data import training_loader
from vl_plugins.data.randomness import seed_everything
from vl_plugins.encoders.vocabulary import Vocabulary
from vl_plugins.errors import MissingExtraError, UserError
from vl_plugins.integrations.pytorch_metric_learning import build_trainer, main
from vl_plugins.integrations.pytorch_metric_learning.config import parse_config
from vl_plugins.integrations.pytorch_metric_learning.models import build_towers
from vl_plugins.integrations.pytorch_metric_learning.parts import loss_from_config
from vl_plugins.integrations.pytorch_metric_learning.processes import Processes, start_processes
from vl_plugins.integrations.pytorch_metric_learning.runs import Run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

IMAGES, REGIONS, WIDTH, DIM = 8, 3, 6, 8
SETS = {"name": "set", "num_slots": 2, "num_iters": 2, "hidden_dim": 8}


def case(captions=2, **changes):
    """Return a configuration of small towers on region features."""
    plain = {
        "image": {"trunk": {"name": "features", "width": WIDTH}, "pooling": "avg", "projection": "residual_mlp"},
        "data": {"inputs": "features", "captions_per_image": captions, "batch_size": IMAGES},
        "training": {"epochs": 1, "optimizer": {"name": "SGD", "lr": 0.1}},
        "dim": DIM,
        "text": {"trunk": {"name": "gru", "word_dim": 4, "hidden_dim": DIM}, "projection": "none"},
    }
    return settings(**plain | changes)


# Batch norm is in all of them, over regions of which the processes have differently many.
CASES = {
    **{f"loss {name}": case(loss=name) for name in list_losses() if name != "smooth_chamfer"},
    "loss NTXentLoss": case(loss="NTXentLoss"),
    "loss with parameters": case(
        loss={"name": "ArcFaceLoss", "num_classes": 10, "embedding_size": DIM}, trainer="MetricLossOnly"
    ),
    "loss with a memory": case(
        loss={"name": "CrossBatchMemory", "loss": "ContrastiveLoss", "embedding_size": DIM, "memory_size": 32},
        trainer="MetricLossOnly",
    ),
    **{f"miner {name}": case(miner=name) for name in ("BatchHardMiner", "MultiSimilarityMiner")},
    "reducer AvgNonZeroReducer": case(reducer="AvgNonZeroReducer", loss="triplet_sh"),
    "distance match_probability": case(head=SETS, distance="match_probability"),
    "smooth_chamfer": case(head=SETS, loss={"name": "smooth_chamfer", "base": "unified", "mmd_weight": 0.3}),
    "frozen": case(training={"freeze": ["image_trunk", "text_trunk"], "optimizer": {"name": "SGD", "lr": 0.1}}),
    "clipped": case(training={"clip_grad_norm": 0.01, "optimizer": {"name": "SGD", "lr": 0.1}}),
    "MetricLossOnly, miner": case(loss="vlc", miner="MultiSimilarityMiner", trainer="MetricLossOnly"),
    "timm": case(
        image={"trunk": {"name": "timm", "model": "test_efficientnet", "image_size": 32}, "pooling": "avg"},
        data={"inputs": "images", "captions_per_image": 2, "batch_size": IMAGES},
    ),
}


class Items(torch.utils.data.Dataset):
    """Region features or pictures, token ids and labels; image 5 has the label of image 1."""

    def __init__(self, plain, share, dtype):
        generator = torch.Generator().manual_seed(0)
        shape = (REGIONS, WIDTH) if plain["data"]["inputs"] == "features" else (3, 32, 32)
        self.images = torch.randn(IMAGES, *shape, generator=generator, dtype=torch.float64).to(dtype)
        if len(shape) == 2:
            self.images[2, 1:] = self.images[6, 2:] = 0  # regions that are not there
        self.texts = torch.randint(1, 9, (IMAGES, plain["data"]["captions_per_image"], 4), generator=generator)
        self.share = share

    def __len__(self):
        return len(self.share)

    def __getitem__(self, index):
        number = self.share[index]
        return self.images[number], self.texts[number], (0, 1, 2, 3, 4, 1, 6, 7)[number]


def collate(items):
    images, texts, labels = zip(*items, strict=True)
    return torch.stack(images), torch.cat(texts), torch.tensor(labels)


def make_trainer(plain, processes, dtype, **options):
    """Return a trainer on this process's share of the images; of several processes only the first is seeded alike."""
    config = parse_config(plain)
    towers = build_towers(config, Vocabulary(tuple("abcdefgh"))).to(dtype)
    loss = loss_from_config(config).to(dtype)
    for parameter in (*towers.parameters(), *loss.parameters()):
        parameter.data += processes.rank  # until the first process gives its own to all
    share = range(IMAGES)[processes.rank * IMAGES // processes.count : (processes.rank + 1) * IMAGES // processes.count]
    options |= {"dataset": Items(plain, share, dtype), "sampler": range(len(share)), "collate_fn": collate}
    options |= {"batch_size": len(share), "towers": towers, "loss": loss}
    return build_trainer(config, processes=processes, **options)


def step(plain, processes, dtype=torch.float64):
    """Take a step; return gradients, then parameters and statistics after it, by name."""
    torch.manual_seed(0)  # for the parameters of losses
    trainer = make_trainer(plain, processes, dtype)
    seed_everything(0)  # for miners that draw at random
    trainer.train()
    modules = {**trainer.models, **trainer.loss_funcs}
    parameters = {f"{part}.{name}": p for part, module in modules.items() for name, p in module.named_parameters()}
    statistics = {f"{part}.{name}": t for part in trainer.models for name, t in modules[part].named_buffers()}
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    return gradients, {name: tensor.detach() for name, tensor in (parameters | statistics).items()}


def diverge(processes):
    """Return the error of a training whose loss becomes NaN."""
    plain = case(training={"epochs": 1, "optimizer": {"name": "SGD", "lr": 1e30}})
    with pytest.raises(UserError) as raised:
        make_trainer(plain, processes, torch.float32, iterations_per_epoch=3).train()
    return str(raised.value)


def steps(rank, names):
    """Return what :func:`step` does in this process, by precision and case, and the error of :func:`diverge`.

    Args:
        names: cases by precision; ``"float64"`` is without mixed precision and in double.
    """
    os.environ["TQDM_DISABLE"] = "1"
    found = {}
    for precision, cases in names.items():
        AcceleratorState._reset_state(reset_partial_state=True)
        processes = start_processes(precision.replace("float64", "fp32"), cpu=True)
        dtype = torch.float64 if precision == "float64" else torch.float32
        found[precision] = {name: step(CASES[name], processes, dtype) for name in cases}
    return {**found, "error": diverge(processes)}


def difference(tensors, expected):
    """Return the largest difference, divided by the largest expected number."""
    assert tensors.keys() == expected.keys()
    largest = max(tensor.abs().max() for tensor in expected.values())
    return max(((tensors[name] - tensor).abs().max() / largest).item() for name, tensor in expected.items())


MIXED = ["loss unified", "smooth_chamfer", "miner MultiSimilarityMiner"]


@pytest.fixture(scope="module")
def two_processes():
    return in_processes(steps, 2, {"float64": list(CASES), "bf16": MIXED})


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
        trainer = build_trainer(settings(toy_shards), processes=processes)
        batches = training_loader(trainer.dataset, trainer.sampler)
        labels += [label for *_, batch in batches for label in batch.tolist()]
    assert sorted(labels) == list(range(16))


def test_what_accelerate_is_needed_for(monkeypatch):
    AcceleratorState._reset_state(reset_partial_state=True)
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


def train(rank, *arguments):
    """Return what this process prints."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        assert main([*map(str, arguments), "--device", "cpu"]) == 0
    return stderr.getvalue()


def train_and_be_killed(rank, *arguments):
    end_of_iteration = Run._end_of_iteration

    def kill(self, trainer):
        end_of_iteration(self, trainer)
        if trainer.get_global_iteration() == 2:  # in the second epoch
            os._exit(9)

    Run._end_of_iteration = kill
    train(rank, *arguments)


def rows(folder):
    return [json.loads(row) for row in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(toy_shards, tmp_path_factory):
    """A folder with a configuration, and a run of it in two processes, which have dropout."""
    folder = tmp_path_factory.mktemp("two")
    plain = settings(toy_shards, training={"epochs": 2})
    plain["text"]["trunk"]["word_dropout"] = 0.2
    (folder / "config.yaml").write_text(yaml.safe_dump(plain))
    return folder, in_processes(train, 2, *config_and_out(folder, "whole"), joined=False)


def config_and_out(folder, name):
    return "--config", folder / "config.yaml", "--out", folder / name


def test_a_run_in_two_processes(trained):
    folder, (printed, by_other) = trained
    assert [row["epoch"] for row in rows(folder / "whole")] == [1, 2]
    assert "epoch 2: 8 images, 40 captions" in printed
    assert "epoch" not in by_other
    assert "2/2" in printed
    assert "4/4" not in printed, "an epoch is 16 images in batches of 2 x 4"
    events = EventAccumulator(str(folder / "whole" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("val/rsum")] == [1, 3]
    saved = torch.load(folder / "whole" / "latest.pt", weights_only=True)
    assert not torch.equal(saved["random"]["torch"], saved["other_random"][0]["torch"])


def test_another_number_of_processes_does_not_go_on(trained, capsys):
    folder, _ = trained
    assert main([*map(str, config_and_out(folder, "whole")), "--device", "cpu", "--resume"]) == 2
    assert "--resume: number of processes is 1, but was 2" in capsys.readouterr().err


def test_killed_processes_go_on_to_the_same_numbers(trained):
    folder, _ = trained
    arguments = config_and_out(folder, "killed")
    with pytest.raises(ProcessExitedException, match="exit code 9"):
        in_processes(train_and_be_killed, 2, *arguments, joined=False)
    assert rows(folder / "killed") == rows(folder / "whole")[:1]
    in_processes(train, 2, *arguments, "--resume", joined=False)
    assert rows(folder / "killed") == rows(folder / "whole")
    states = [torch.load(folder / run / "latest.pt", weights_only=True)["models"] for run in ("whole", "killed")]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
