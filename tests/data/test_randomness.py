import random

import numpy as np
import pytest
import torch

from vl_plugins.data.randomness import derived_seed, seed_everything, seeded


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002


def test_seeded_draws_depend_on_the_parts_alone():
    draws = {}
    for parts in ((1, 2, "a"), (1, 3, "a"), (2, 2, "a"), (1, 2, "b"), (1, 2, "a")):
        seed_everything(len(draws))
        with seeded(*parts):
            drawn = draw()
        assert draws.setdefault(parts, drawn) == drawn
    assert len(draws) == 4
    assert all(len(set(column)) == 4 for column in zip(*draws.values(), strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_generators_go_on_as_if_nothing_had_been_drawn(fails):
    seed_everything(5)
    expected = [draw(), draw()]
    seed_everything(5)
    found = [draw()]
    try:
        with seeded(7):
            draw()
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert [*found, draw()] == expected


def test_derived_seeds_are_different_and_fit_numpy():
    seeds = {derived_seed(*parts) for parts in [(0, 0), (0, 1), (1, 0), ("0/0", ""), (10, 0), (1, "00")]}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**32 for seed in seeds)
