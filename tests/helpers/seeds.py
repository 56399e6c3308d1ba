"""Seeds of random data, all of which VL_PLUGINS_TEST_SEED shifts: the tests hold for any data, not for some."""

import os

import torch

__all__ = ["seed_torch", "seeded"]

SHIFT = 100_000 * int(os.environ.get("VL_PLUGINS_TEST_SEED", "0"))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(SHIFT + seed)


def seed_torch(seed: int) -> None:
    torch.manual_seed(SHIFT + seed)
