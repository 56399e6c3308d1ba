"""Seeds of random data, all of which VL_PLUGINS_TEST_SEED shifts: the tests hold for any data, not for some."""

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

__all__ = ["first_that", "seed_torch", "seeded"]

T = TypeVar("T")

SHIFT = 100_000 * int(os.environ.get("VL_PLUGINS_TEST_SEED", "0"))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(SHIFT + seed)


def seed_torch(seed: int) -> None:
    torch.manual_seed(SHIFT + seed)


def first_that(holds: Callable[[T], bool], draws: Iterable[T]) -> T:
    """Return the first of some random data that has what a test needs, such as no ties, or pairs within a margin."""
    for number, data in enumerate(draws):
        if holds(data):
            return data
        assert number < 1000, "no data are as the test needs them"
    raise AssertionError("no data are left")
