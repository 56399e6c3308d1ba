"""Random words are those of SplitMix64, of arrays and of tensors."""

import numpy as np
import torch

from vl_plugins.data.randomness import mix_words, random_words

# The first outputs of the public reference implementation, https://prng.di.unimi.it/splitmix64.c, from the state 0.
WORDS = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]


def test_words_are_those_of_the_reference():
    assert random_words(0, np.arange(4)).tolist() == WORDS


def test_tensors_are_mixed_as_arrays():
    """From states that are multiples of a constant, modulo 2^64; half of them are negative as int64."""
    states = torch.arange(1, 5) * (0x9E3779B97F4A7C15 - 2**64)
    assert (states < 0).any()
    assert [word % 2**64 for word in mix_words(states).tolist()] == WORDS
