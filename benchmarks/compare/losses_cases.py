"""Values and gradients of losses, miners, reducers, distances and sets, in one process and in two."""

import argparse
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from calls import BATCHES, Call, batch, batch_of_sets, call_loss, generator, side, value_and_gradients
from pytorch_metric_learning import losses
from recording import Recorder, save_cases
from torch import Tensor, distributed, nn

from vl_plugins import create_loss
from vl_plugins.distributed import DistributedLoss
from vl_plugins.registry import create

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "unified": [
        {},
        {"margin": 0.0},
        {"margin": 0.5, "scale": 7.0},
        {"scale": 1.0, "symmetric": False},
        {"weights": [[0.5, -0.7], [0.03, 0.9]], "scale": 9.0},
        {"relative": [0.1, 1.0, 0.0, 0.2]},
    ],
    "vlc": [{}, {"scale": 1.0}, {"scale": 14.3}, {"scale": 100.0, "symmetric": False}],
    "triplet_hn": [{}, {"margin": 0.0}, {"margin": 0.7}, {"warmup_steps": 1}, {"warmup_steps": 2, "symmetric": False}],
    "triplet_sh": [{}, {"margin": 0.0}, {"margin": 0.7}, {"symmetric": False}],
    "goal": [{}, {"warmup_steps": 1}, {"margin": 0.5}, {"symmetric": False}, {"triplet_weight": "cir", "offset": 1.0}],
}
for triplet_weight in ("con", "nca", "cir"):
    for pair_weight in ("con", "lin", "sig", "sig_ms", "lin_ms"):
        OPTIONS["goal"].append({"triplet_weight": triplet_weight, "pair_weight": pair_weight, "tau": 7.0})
for option, value in {"alpha": 5.0, "beta": 40.0, "lam": 0.2, "eps": 0.4}.items():
    OPTIONS["goal"].append({"pair_weight": "sig_ms", option: value})

# Components as ``vl_plugins.registry.create`` takes them.
MINERS = (
    {"name": "MultiSimilarityMiner", "epsilon": 0.5},
    {"name": "TripletMarginMiner", "margin": 0.3},
    {"name": "BatchHardMiner"},
    {"name": "PairMarginMiner"},
    {"name": "HardestNegativeMiner"},
    {"name": "HardestNegativeMiner", "k": 3},
)
REDUCERS = (
    {"name": "SumReducer"},
    {"name": "AvgNonZeroReducer"},
    {"name": "ThresholdReducer", "low": 0.1},
    {"name": "PerAnchorReducer"},
    {"name": "ClassWeightedReducer", "weights": torch.linspace(0.5, 2, 4, dtype=torch.float64)},
    {"name": "DoNothingReducer"},
)
DISTANCES = (
    {"name": "DotProductSimilarity"},
    {"name": "DotProductSimilarity", "normalize_embeddings": False},
    {"name": "CosineSimilarity", "power": 2},
    {"name": "LpDistance"},
    {"name": "SNRDistance"},
)
REGULARIZERS = (
    {"name": "LpRegularizer"},
    {"name": "MMDRegularizer"},
    {"name": "DiversityRegularizer", "set_size": 2},
    {"name": "UniformityRegularizer"},
)
SET_DISTANCES = ("smooth_chamfer", "chamfer", "mil", "match_probability")
SET_SIZES = ((1, 1), (3, 3), (2, 4))  # of images and texts


def describe(options: Mapping[str, Any]) -> str:
    """Return options, or the name and options of a component, as one text."""
    words = []
    for name, value in options.items():
        if name == "name":
            words.append(value)
        elif not isinstance(value, Tensor):
            words.append(f"{name}={value}")
    return " ".join(words) or "defaults"


def pair_losses(recorder: Recorder, name: str) -> None:
    """Options, batches, miners, reducers, distances and regularizers of one loss."""

    def run(case: str, options: Mapping[str, Any], call: Call, miner: nn.Module | None = None, steps: int = 1) -> None:
        recorder.run(f"{name}/{case}", lambda: call_loss(create_loss(name, **options), call, miner, steps))

    for options in OPTIONS[name]:
        steps = 2 if "warmup_steps" in options else 1
        for sets in ("one set", "two sets"):
            run(f"{describe(options)}, {sets}", options, BATCHES[sets](), steps=steps)
    for case, make_batch in BATCHES.items():
        for tiled in (None, False, True):
            run(f"{case}, tiled={tiled}", {"tiled": tiled}, make_batch())
    learned_scale = torch.tensor(4.0, dtype=torch.float64, requires_grad=True)
    for case, scale in {"scale=4": 4.0, "scale=-1": -1.0, "learned scale": learned_scale}.items():
        run(f"called with {case}", {}, batch() | {"scale": scale})
    for miner in MINERS:
        for sets in ("one set", "two sets"):
            run(f"{describe(miner)}, {sets}", {}, BATCHES[sets](), create("miner", miner))
    for reducer in REDUCERS:
        run(f"{describe(reducer)}, labels", {"reducer": reducer}, batch((11, 11)))
        triplets = create("miner", "TripletMarginMiner", margin=0.3)
        run(f"{describe(reducer)}, triplets", {"reducer": reducer}, batch((11, 11)), triplets)
    for distance in DISTANCES:
        run(describe(distance), {"distance": distance}, batch())
    for regularizer in REGULARIZERS:
        options = {"embedding_regularizer": regularizer, "embedding_reg_weight": 0.3}
        run(describe(regularizer), options, batch())
    recorder.run(f"{name}/matrix of similarities", partial(matrix_of_similarities, name))
    if name == "unified":
        recorder.run(f"{name}/margin of each pair", margin_of_each_pair)


def matrix_of_similarities(name: str) -> dict[str, Tensor]:
    similarities = torch.rand(9, 11, dtype=torch.float64, generator=generator("similarities")).requires_grad_()
    positive_mask = torch.rand(9, 11, generator=generator("positives")) < 0.2
    loss = create_loss(name)
    return value_and_gradients(
        loss.from_similarities(similarities, positive_mask, ~positive_mask), {"similarities": similarities}
    )


def margin_of_each_pair() -> dict[str, Tensor]:
    call = batch((9, 9))
    call |= {"labels": torch.arange(9), "ref_labels": torch.arange(9)}
    loss = create_loss("unified")
    loss.margin = torch.linspace(0, 0.5, 9, dtype=torch.float64).requires_grad_()
    leaves = {"embeddings": call["embeddings"], "margin": loss.margin}
    return value_and_gradients(loss(**call), leaves)


def sets(recorder: Recorder) -> None:
    """The objective of embedding sets, and similarities of sets, also in another library's loss."""
    changes: list[dict[str, Any]] = [{}, {"alpha": 4.0}, {"mmd_weight": 0.0}, {"diversity_weight": 0.5}]
    for base in OPTIONS:
        for sizes in SET_SIZES:
            for change in changes:
                case = f"smooth_chamfer/{base}, sets of {sizes}, {describe(change)}"
                call = batch_of_sets(sizes)
                recorder.run(case, partial(set_loss, call, {"base": base, **change}))
    for name in SET_DISTANCES:
        for sizes in SET_SIZES:
            call = batch_of_sets(sizes)
            recorder.run(f"{name}/sets of {sizes}", partial(similarities_of_sets, name, call))
            loss = losses.MultiSimilarityLoss(distance=create("distance", name, set_size=2))
            recorder.run(f"{name}/MultiSimilarityLoss {sizes}", partial(call_loss, loss, batch(shape=(10,))))


def set_loss(call: Call, options: Mapping[str, Any]) -> dict[str, Tensor]:
    return call_loss(create_loss("smooth_chamfer", **options), call)


def similarities_of_sets(name: str, call: Call) -> dict[str, Tensor]:
    images, texts = call["embeddings"], call["ref_emb"]
    return value_and_gradients(create("distance", name).double()(images, texts), {"images": images, "texts": texts})


def memories(recorder: Recorder) -> None:
    """A loss with a queue of embeddings of earlier steps."""
    for name in OPTIONS:
        recorder.run(f"CrossBatchMemory/{name}", partial(steps_of_memory, name))


def steps_of_memory(name: str) -> dict[str, Tensor]:
    from vl_plugins.losses import CrossBatchMemory  # noqa: PLC0415 - its own case fails where there is none

    memory = CrossBatchMemory(create_loss(name), 6, memory_size=20).double()
    results = {}
    for step in range(4):
        embeddings, labels = side(f"step {step}", 9, (6,), classes=4)
        for quantity, value in value_and_gradients(memory(embeddings, labels), {"embeddings": embeddings}).items():
            results[f"{quantity}, step {step}"] = value
    return results


def in_two_processes(recorder: Recorder) -> None:
    """Losses of the joined batch of two processes, which have different numbers of rows."""
    folder = Path("two_processes").absolute()
    folder.mkdir()
    torch.multiprocessing.spawn(losses_of_a_process, (folder, recorder.pattern), nprocs=2)
    for rank in range(2):
        for case, quantities in torch.load(folder / f"{rank}.pt", weights_only=True).items():
            recorder.add(case, quantities)


def losses_of_a_process(rank: int, folder: Path, pattern: str) -> None:
    torch.set_num_threads(1)
    # An error in one process ends the other one after the timeout.
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", store, timedelta(minutes=2), world_size=2, rank=rank)
    recorder = Recorder(pattern)
    own_rows = slice(0, 4) if rank == 0 else slice(4, 9)
    own_texts = slice(0, 6) if rank == 0 else slice(6, 11)
    for name in (*OPTIONS, "smooth_chamfer"):
        for miner in (None, *MINERS):
            for symmetric in (True, False):
                call = {"symmetric": symmetric}
                if miner is not None:
                    call["miner"] = create("miner", miner)
                for argument, value in batch().items():
                    rows = own_texts if argument.startswith("ref_") else own_rows
                    call[argument] = value.detach()[rows].clone()
                for embeddings in ("embeddings", "ref_emb"):
                    call[embeddings].requires_grad_()
                loss = DistributedLoss(create_loss(name))
                case = f"two processes/{name}, {describe(miner or {})}, symmetric={symmetric}, rank {rank}"
                recorder.run(case, partial(call_loss, loss, call))
    torch.save(recorder.results, folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def run_cases(recorder: Recorder, arguments: argparse.Namespace) -> None:
    for name in OPTIONS:
        pair_losses(recorder, name)
    sets(recorder)
    memories(recorder)
    if recorder.may_want("two processes"):
        in_two_processes(recorder)


if __name__ == "__main__":
    save_cases(run_cases)
