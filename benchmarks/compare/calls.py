"""Batches for the cases of losses, and what a loss makes of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Call = dict[str, Any]  # arguments of a loss


def generator(name: str) -> torch.Generator:
    """Return random numbers that depend on a name, and not on the cases before."""
    return torch.Generator().manual_seed(sum(index * ord(character) for index, character in enumerate(name, start=1)))


def side(name: str, count: int, shape: Sequence[int], classes: int) -> tuple[Tensor, Tensor]:
    """Return embeddings (count, *shape) around the centers of their classes, and their labels."""
    numbers = generator(name)
    labels = torch.randint(classes, (count,), generator=numbers)
    centers = torch.randn(classes, *shape, dtype=torch.float64, generator=generator("centers"))
    noise = torch.randn(count, *shape, dtype=torch.float64, generator=numbers)
    return (centers[labels] + noise).requires_grad_(), labels


def batch(sizes: tuple[int, ...] = (9, 11), classes: int = 4, shape: Sequence[int] = (6,)) -> Call:
    """Return the arguments of a loss: one set of embeddings, or two."""
    embeddings, labels = side("images", sizes[0], shape, classes)
    call = {"embeddings": embeddings, "labels": labels}
    if len(sizes) == 2:
        call["ref_emb"], call["ref_labels"] = side("texts", sizes[1], shape, classes)
    return call


def batch_without_pairs() -> Call:
    return batch((3, 2)) | {"labels": torch.arange(3), "ref_labels": torch.arange(5, 7)}


def batch_in_bfloat16() -> Call:
    call = batch()
    for name in ("embeddings", "ref_emb"):
        call[name] = call[name].detach().bfloat16().requires_grad_()
    return call


BATCHES: dict[str, Callable[[], Call]] = {
    "two sets": batch,
    "one set": partial(batch, (9,)),
    "one pair": partial(batch, (1, 1), classes=1),
    "no pairs": batch_without_pairs,
    "no negatives": partial(batch, (4, 3), classes=1),
    "nothing": partial(batch, (0, 3)),
    "large": partial(batch, (300, 280), classes=90),
    "bfloat16": batch_in_bfloat16,
}


def value_and_gradients(output: Any, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of a loss, and the gradients of their sum with weights, so that no two can be exchanged."""
    values = {"value": output}
    if isinstance(output, dict):  # of DoNothingReducer
        values = {f"value of {name}": term["losses"] for name, term in output.items()}
    results = {name: torch.as_tensor(value) for name, value in values.items()}
    total = torch.zeros((), dtype=torch.float64)
    for value in results.values():
        weights = torch.linspace(0.5, 1.5, value.numel(), dtype=torch.float64).view(value.shape)
        total = total + (weights * value).sum()
    if total.requires_grad:
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        for name, leaf, gradient in zip(leaves, leaves.values(), gradients, strict=True):
            results[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


def call_loss(loss: nn.Module, call: Call, miner: nn.Module | None = None, steps: int = 1) -> dict[str, Tensor]:
    """Return the results of a loss in the last of some steps, of which a warm-up counts those before."""
    loss = loss.double()
    if miner is not None:
        call = call | {"indices_tuple": miner(**call)}
    for _ in range(steps - 1):
        loss(**call)
    leaves = dict(loss.named_parameters())
    for name, value in call.items():
        if isinstance(value, Tensor) and value.requires_grad:
            leaves[name] = value
    return value_and_gradients(loss(**call), leaves)


def batch_of_sets(sizes: tuple[int, int]) -> Call:
    """Return images and texts as sets, some of them padded with zero vectors, and the slots they come from."""
    call = {}
    for prefix, embeddings, count, size in (("", "embeddings", 9, sizes[0]), ("ref_", "ref_emb", 11, sizes[1])):
        vectors, call[f"{prefix}labels"] = side(embeddings, count, (size, 5), classes=4)
        with torch.no_grad():
            vectors[::3, 1:] = 0
        call[embeddings] = vectors
        call[f"{prefix}slots"] = side(f"{prefix}slots", count, (3, 5), classes=4)[0]
    return call
