"""Losses of several processes against one process with the joined batch, in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.open_clip_training import loss_options
from tests.helpers.processes import in_processes
from vl_plugins import list_losses
from vl_plugins.integrations.open_clip.loss import build_loss
from vl_plugins.integrations.open_clip.steps import Steps

D, K, CAPTIONS = 16, 4, 2
CASES = {
    "unified, learned": loss_options("unified", {"scale": "learned"}),
    "vlc, learned": loss_options("vlc", {"scale": "learned"}),
    "warm-up": loss_options("triplet_hn", {"margin": 0.3, "warmup_steps": 10**6}),
    "miner": loss_options("unified", {"scale": 20}, miner="MultiSimilarityMiner"),
    "reducer": loss_options("triplet_hn", {"margin": 0.1}, reducer="AvgNonZeroReducer"),
    "one direction": loss_options("unified", {"scale": 20, "symmetric": False}),
    "NTXentLoss": loss_options("NTXentLoss", {"temperature": 0.1}),
    "sets": loss_options("smooth_chamfer", {"mmd_weight": 0.3, "diversity_weight": 0.2}, head="set"),
    "match_probability": loss_options("unified", {"scale": 20}, head="set", distance="match_probability"),
    "own scale": loss_options("unified", {"learn_scale": True}),
    "own scale and bias": loss_options("siglip", {"learn_scale": True, "learn_bias": True}),
    "beta": loss_options("MarginLoss", {"learn_beta": True}),
    "proxies": loss_options("ProxyAnchorLoss", {"num_classes": 10, "embedding_size": D}),
    "one set": loss_options("FastAPLoss"),
}
CASES |= {name: loss_options(name) for name in list_losses() if name != "smooth_chamfer"}
OWN_ROWS = {"unified, learned", "vlc, learned", "one direction", "warm-up", "own scale", "own scale and bias"}
OWN_ROWS |= set(list_losses()) - {"smooth_chamfer"}
# Images of each process, and their ids where some are the same.
BATCHES = [((4, 4), (3, 1, 7, 5, 7, 9, 1, 7)), ((4, 2), None)]
NEEDS_LABELS = ("proxies", BATCHES[1])
FOUR = ((1, 4, 0, 2), (1, 2, 3, 1, 1, 2, 6))


def inputs(name, count):
    """Return leaves by the names of open_clip's outputs, for ``count`` images."""
    generator = torch.Generator().manual_seed(1)
    compares_sets = CASES[name].head == "set"
    leaves = {}
    for tower, number in (("image", count), ("text", CAPTIONS * count)):
        shape = (number, K, D) if compares_sets else (number, D)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        leaves[f"{tower}_features"] = F.normalize(drawn, dim=-1).requires_grad_()
        if compares_sets:
            leaves[f"{tower}_slots"] = drawn.requires_grad_()
    for number, value in (("logit_scale", 14.0), ("logit_bias", -3.0)):
        leaves[number] = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    return leaves


def gradients(name, sizes, image_ids, rank=None):
    """Return the gradients of a process, zeros where features are not its own; with ``rank`` None of one process."""
    leaves, steps = inputs(name, sum(sizes)), Steps()
    start, stop = (
        (0, sum(sizes)) if rank is None else [*itertools.pairwise(itertools.accumulate(sizes, initial=0))][rank]
    )
    own = {"image": slice(start, stop), "text": slice(CAPTIONS * start, CAPTIONS * stop)}
    if image_ids is not None:
        labels = torch.tensor(image_ids[start:stop], dtype=torch.long)
        ref_ids, no_ids = torch.arange(CAPTIONS * start, CAPTIONS * stop), labels.new_zeros(len(labels), 0)
        steps.batches.append({"labels": labels, "ref_ids": ref_ids, "matching_ids": no_ids})
    given = {key: leaf[own[key.partition("_")[0]]] if leaf.ndim else leaf for key, leaf in leaves.items()}
    torch.manual_seed(0)  # proxies
    loss = build_loss(CASES[name], steps).double()
    steps.is_logged = True
    sum(loss(**given, output_dict=True).values()).backward()
    leaves |= dict(loss.named_parameters())
    return {key: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for key, leaf in leaves.items()}


def gradients_of_jobs(rank, jobs):
    return [gradients(name, *batch, rank) for name, batch in jobs]


def check(jobs, world_size):
    """Compare the average over processes, as DistributedDataParallel computes it, with one process."""
    for job, *by_rank in zip(jobs, *in_processes(gradients_of_jobs, world_size, jobs), strict=True):
        for key, expected in gradients(*job[:1], *job[1]).items():
            mean = sum(found[key] for found in by_rank) / world_size
            assert (mean - expected).abs().max() <= 1e-12 * (expected.abs().max() or 1), (job, key)


def test_gradients_of_two_processes_are_those_of_one():
    check([job for job in itertools.product(CASES, BATCHES) if job != NEEDS_LABELS], 2)


@pytest.mark.slow
def test_gradients_of_four_processes_are_those_of_one():
    check(list(itertools.product(CASES, [FOUR])), 4)


@pytest.mark.parametrize("name", CASES)
def test_own_rows_are_compared_where_that_gives_the_same(name):
    assert build_loss(CASES[name]).compares_own_rows == (name in OWN_ROWS)


def logged(rank):
    """Return what is logged of two processes that have unequal rows, and the loss that each one has itself."""
    leaves = {key: leaf.detach() for key, leaf in inputs("unified", 8).items()}
    own = {"image": slice(4 * rank, 4 * rank + 4), "text": slice(CAPTIONS * 4 * rank, CAPTIONS * (4 * rank + 4))}
    given = {key: leaf[own[key.partition("_")[0]]] if leaf.ndim else leaf for key, leaf in leaves.items()}
    steps = Steps()
    loss = build_loss(CASES["unified"], steps)
    unlogged = loss(**given, output_dict=True)
    steps.is_logged = True
    return dict(loss(**given, output_dict=True)), dict(unlogged)


def logged_with_nan(rank):
    """Return the names of what a step logs if an image feature of the first process is NaN."""
    leaves = {key: leaf.detach() for key, leaf in inputs("unified", 4).items()}
    leaves["image_features"][0] += torch.nan if rank == 0 else 0
    steps = Steps()
    loss = build_loss(CASES["unified"], steps)
    loss.has_scaler, steps.is_logged = True, True
    logged = loss(**leaves, output_dict=True)
    return sorted(logged), bool(logged["unified_loss"].isnan())


def test_processes_log_together_where_one_has_no_finite_loss():
    first, second = in_processes(logged_with_nan, 2)
    assert first == second
    assert first[1]
    assert "mean_positive" in first[0]


def test_the_mean_over_the_processes_is_logged():
    found = in_processes(logged, 2)
    (first, _), (second, _) = found
    assert first == second
    own = [unlogged["unified_loss"] for _, unlogged in found]
    assert own[0] != own[1]
    torch.testing.assert_close(first["unified_loss"], sum(own) / 2)
    loss, steps = build_loss(CASES["unified"], Steps()), Steps()
    loss.steps, steps.is_logged = steps, True
    whole = loss(**{key: leaf.detach() for key, leaf in inputs("unified", 8).items()}, output_dict=True)
    torch.testing.assert_close(first, dict(whole), check_dtype=False, rtol=1e-6, atol=1e-6)
