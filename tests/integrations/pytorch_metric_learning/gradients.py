"""Gradients of a training step in several processes, compared with those of one process with the joined batch.

As a script it writes a table: ``python -m tests.integrations.pytorch_metric_learning.gradients``.
"""

import os

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.integrations.pytorch_metric_learning.settings import settings
from tests.processes import in_processes
from vl_plugins import list_losses
from vl_plugins.data.randomness import seed_everything
from vl_plugins.data.vocabulary import Vocabulary
from vl_plugins.integrations.pytorch_metric_learning import build_trainer
from vl_plugins.integrations.pytorch_metric_learning.config import parse_config
from vl_plugins.integrations.pytorch_metric_learning.models import build_towers
from vl_plugins.integrations.pytorch_metric_learning.parts import loss_from_config
from vl_plugins.integrations.pytorch_metric_learning.processes import Processes, start_processes
from vl_plugins.registry import list_components
from vl_plugins.utils.errors import UserError

IMAGES, REGIONS, WIDTH, DIM = 8, 3, 6, 8
SETS = {"name": "set", "num_slots": 2, "num_iters": 2, "hidden_dim": 8}
CLASSES = {"num_classes": 10, "embedding_size": DIM}
PROXIES = ("ArcFaceLoss", "CosFaceLoss", "NormalizedSoftmaxLoss", "ProxyAnchorLoss", "ProxyNCALoss", "SoftTripleLoss")
OPTIONS = {
    **dict.fromkeys((*PROXIES, "SphereFaceLoss", "SubCenterArcFaceLoss", "LargeMarginSoftmaxLoss"), CLASSES),
    "CrossBatchMemory": {"loss": "ContrastiveLoss", "embedding_size": DIM, "memory_size": 32},
    "MultipleLosses": {"losses": ["ContrastiveLoss", {"name": "unified", "margin": 0.1}]},
    "MultipleReducers": {"reducers": {"loss": "SumReducer"}},
    "P2SGradLoss": {"descriptors_dim": DIM, "num_classes": 10},
    "RankedListLoss": {"margin": 0.5, "Tn": 10},
    "ThresholdReducer": {"low": 0.1},
}
# These take no ref_emb.
ONE_SET = [name for name in OPTIONS if "Loss" in name]
ONE_SET += ["CrossBatchMemory", "FastAPLoss", "HistogramLoss", "InstanceLoss", "NPairsLoss", "PNPLoss"]
# These fail in one process too: without labels, with an image in two batches, or with more texts than images.
UNUSABLE = {"ManifoldLoss", "SelfSupervisedLoss", "SmoothAPLoss", "ThresholdConsistentMarginLoss", "VICRegLoss"}
UNUSABLE |= {"ClassWeightedReducer", "DoNothingReducer", "EmbeddingsAlreadyPackagedAsTriplets", "PerAnchorReducer"}


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


def named(name):
    return {"name": name, **OPTIONS.get(name, {})}


def usable(kind):
    return sorted(set(list_components(kind)) - UNUSABLE)


# Batch norm is in all of them, over regions of which the processes have differently many.
CASES = {
    **{f"loss {name}": case(loss=name) for name in list_losses() if name != "smooth_chamfer"},
    **{f"loss {name}": case(loss=named(name)) for name in usable("loss") if name not in ONE_SET},
    **{f"loss {name}": case(loss=named(name), trainer="MetricLossOnly") for name in ONE_SET},
    **{f"miner {name}": case(miner=named(name)) for name in usable("miner")},
    **{f"reducer {name}": case(reducer=named(name), loss="triplet_sh") for name in usable("reducer")},
    **{f"distance {name}": case(head=SETS, distance=name) for name in ("chamfer", "mil", "match_probability")},
    "smooth_chamfer": case(head=SETS, loss={"name": "smooth_chamfer", "base": "unified", "mmd_weight": 0.3}),
    "frozen": case(training={"freeze": ["image_trunk", "text_trunk"], "optimizer": {"name": "SGD", "lr": 0.1}}),
    "clipped": case(training={"clip_grad_norm": 0.01, "optimizer": {"name": "SGD", "lr": 0.1}}),
    "MetricLossOnly, miner": case(loss="vlc", miner="MultiSimilarityMiner", trainer="MetricLossOnly"),
    "TwoStreamMetricLoss": case(captions=1, loss="CircleLoss", trainer="TwoStreamMetricLoss"),
    "TwoStreamMetricLoss, miner": case(captions=1, miner="BatchHardMiner", trainer="TwoStreamMetricLoss"),
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
    options |= {"batch_size": len(share), "towers": towers, "loss_funcs": {"metric_loss": loss}}
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


def steps(rank, world_size, names):
    """Return what :func:`step` does in this process, by precision and case, and the error of :func:`diverge`.

    Args:
        names: cases by precision; ``"float64"`` is without mixed precision and in double.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "TQDM_DISABLE": "1"}
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


def main():
    names = ["loss unified", "loss triplet_hn", "loss vlc", "smooth_chamfer", "miner MultiSimilarityMiner", "timm"]
    print("| processes | precision | " + " | ".join(names) + " |")
    expected = {name: step(CASES[name], Processes())[0] for name in names}
    for world_size in (1, 2):
        found = in_processes(steps, world_size, world_size, dict.fromkeys(("float64", "fp32", "bf16"), names))[0]
        del found["error"]
        for precision, by_case in found.items():
            values = [f"{difference(by_case[name][0], expected[name]):.1e}" for name in names]
            print(f"| {world_size} | {precision} | " + " | ".join(values) + " |")


if __name__ == "__main__":
    main()
