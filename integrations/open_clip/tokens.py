"""Captions that are longer than the context of a model, which its tokenizer cuts."""

from collections.abc import Sequence
from typing import Any

from vl_plugins.integrations.open_clip.steps import pad_id_of

__all__ = ["cut_captions"]

TOGETHER = 1000  # captions


def cut_captions(tokenizer: Any, captions: Sequence[str], length: int) -> int:
    """Return how many captions have more than ``length`` tokens, with those for the beginning and the end."""
    count = 0
    for start in range(0, len(captions), TOGETHER):
        tokens = tokenizer(list(captions[start : start + TOGETHER]), context_length=2 * length)
        beyond = tokens[:, length:] != pad_id_of(tokenizer)
        count += int(beyond.any(dim=1).sum())
    return count
