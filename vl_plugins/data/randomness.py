"""Random numbers that are the same each time: of torch, of NumPy's legacy generator and of ``random``."""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


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

    This is the output function of SplitMix64 (Steele et al. 2014), after a step of so many times its constant.
    """
    steps = numbers.astype(np.uint64) + np.uint64(1)
    words = np.asarray(seeds).astype(np.uint64) + steps * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
