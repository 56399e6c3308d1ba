"""Random numbers that are the same each time: of torch, of NumPy's legacy generator and of ``random``."""

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import torch

Words = TypeVar("Words", np.ndarray, torch.Tensor)


def derived_seed(*parts: int | str) -> int:
    """Return a seed, [0, 2^32), that is another for every other ``parts``."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def seed_everything(seed: int) -> None:
    """Begin all random numbers anew, those of accelerators too; ``seed`` is in [0, 2^32)."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def seed_cpu(*parts: int | str) -> None:
    """Let random numbers on the CPU depend on ``parts`` alone from now on."""
    seed = derived_seed(*parts)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Let all generators on the CPU go on after the block as before it."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(torch_state)


def random_words(seeds: np.ndarray | int, numbers: np.ndarray) -> np.ndarray:
    """Return random 64-bit integers that depend on a seed and a number alone, elementwise.

    This is SplitMix64 (Steele et al. 2014) after as many steps as each number says.
    """
    steps = numbers.astype(np.uint64) + np.uint64(1)
    states = np.asarray(seeds).astype(np.uint64) + steps * np.uint64(0x9E3779B97F4A7C15)
    return mix_words(states.view(np.int64)).view(np.uint64)


def mix_words(words: Words) -> Words:
    """Map 64-bit integers one-to-one to integers that look random, by the output function of SplitMix64.

    Args:
        words: int64, an array or a tensor on any device. A mask after each shift keeps the sign out, as in unsigned
            integers, which torch lacks.
    """
    words = (words ^ (words >> 30 & (1 << 34) - 1)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    words = (words ^ (words >> 27 & (1 << 37) - 1)) * (0x94D049BB133111EB - (1 << 64))
    return words ^ (words >> 31 & (1 << 33) - 1)
