import contextlib
import random

import numpy as np
import torch

from vl_plugins.data.randomness import seed_everything, seeded


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


def test_generators_go_on_as_if_nothing_had_been_drawn():
    seed_everything(5)
    expected = [draw(), draw()]
    seed_everything(5)
    found = [draw()]
    with contextlib.suppress(KeyError), seeded(7):
        draw()
        raise KeyError
    assert [*found, draw()] == expected
