"""Captions that are longer than the context of a model, which its tokenizer cuts."""

import multiprocessing
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from vl_plugins.integrations.open_clip.steps import pad_id_of

__all__ = ["CountingTokenizer", "cut_captions"]

TOGETHER = 1000  # captions


def cut_captions(tokenizer: Any, captions: Sequence[str], length: int) -> int:
    """Return how many captions have more than ``length`` tokens, with those for the beginning and the end."""
    count = 0
    for start in range(0, len(captions), TOGETHER):
        tokens = tokenizer(list(captions[start : start + TOGETHER]), context_length=2 * length)
        beyond = tokens[:, length:] != pad_id_of(tokenizer)
        count += int(beyond.any(dim=1).sum())
    return count


class CountingTokenizer:
    """A tokenizer of open_clip that counts the first captions of a training, and those that it cuts.

    The processes of loaders count together.

    Args:
        tokenizer: of open_clip.
        captions: how many to count.
    """

    def __init__(self, tokenizer: Any, captions: int):
        self._tokenizer, self._captions = tokenizer, captions
        self._counts = multiprocessing.Array("q", 2)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __call__(self, texts: str | list[str], **options: Any) -> Tensor:
        """Return the tokens of texts, (n, L)."""
        tokens = self._tokenizer(texts, **options)
        # Some draw what they leave out of a long caption, so that a second call would change the training.
        is_fixed = not options and getattr(self._tokenizer, "reduction_fn", None) is None
        if is_fixed and self._counts[0] < self._captions:
            captions = [texts] if isinstance(texts, str) else texts
            cut = cut_captions(self._tokenizer, captions, tokens.shape[1])
            with self._counts.get_lock():
                self._counts[0] += len(captions)
                self._counts[1] += cut
        return tokens

    def restart(self) -> None:
        """Count anew: what was counted before was no training."""
        self._counts[:] = [0, 0]

    @property
    def counts(self) -> tuple[int, int]:
        """How many captions were counted, and how many of them are cut."""
        captions, cut = self._counts[:]
        return captions, cut
