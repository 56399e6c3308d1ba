"""The current step of open_clip's training, and ids of what its batches hold."""

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vl_plugins.data.captions import LARGEST_ID
from vl_plugins.data.randomness import random_words
from vl_plugins.numerics import NO_ID

__all__ = ["Steps", "pad_id_of", "token_ids"]


class Steps:
    """The current training step and its images, which open_clip does not pass to its loss.

    Args:
        batches_per_step: open_clip's ``--accum-freq``.

    Attributes:
        number: of the step, from 0, over all epochs.
        batches: what is known of each batch of the step, by the names under which losses take it.
        is_logged: whether open_clip logs the step.
    """

    def __init__(self, batches_per_step: int = 1):
        self.number = 0
        self.is_logged = False
        self.batches: deque[dict[str, Tensor]] = deque(maxlen=batches_per_step)
        self.batches_per_step = batches_per_step
        self._step_of_passes = -1  # none yet
        self._passes = 0

    @property
    def ids(self) -> dict[str, Tensor]:
        """The ``labels`` (B,), ``ref_ids`` and ``matching_ids`` of the step's images, as far as they are known."""
        ids_of_step: dict[str, Tensor] = {}
        for name in self.batches[0] if self.batches else ():
            of_batches = [batch[name] for batch in self.batches]
            if name == "matching_ids":
                longest = max(ids.shape[1] for ids in of_batches)
                of_batches = [pad(ids, (0, longest - ids.shape[1]), value=NO_ID) for ids in of_batches]
            ids_of_step[name] = torch.cat(of_batches)
        return ids_of_step

    def count_pass(self) -> bool:
        """Count a call of the loss; return whether it is the last one of the step.

        open_clip calls the loss ``batches_per_step`` times in a step, each time with the gradients of one batch.
        """
        if self.batches_per_step == 1:
            return True
        if self._step_of_passes != self.number:
            self._step_of_passes, self._passes = self.number, 0
        self._passes += 1
        return self._passes % self.batches_per_step == 0


def token_ids(texts: Tensor, pad_id: int) -> Tensor:
    """Return ids of tokenized texts (B, L), (B,) int64: equal for equal texts, however long their padding is."""
    tokens = texts.numpy()
    is_padding = np.logical_and.accumulate(tokens[:, ::-1] == pad_id, axis=1)[:, ::-1]
    words = random_words(tokens.astype(np.uint64), np.arange(tokens.shape[1])[None])
    words[is_padding] = 0
    sums = words.sum(axis=1, dtype=np.uint64) & np.uint64(LARGEST_ID)
    return torch.from_numpy(sums.astype(np.int64))


def pad_id_of(tokenizer: Any) -> int:
    """Return the token that a tokenizer of open_clip fills up texts with."""
    pad_id = getattr(getattr(tokenizer, "tokenizer", None), "pad_token_id", None)
    return 0 if pad_id is None else pad_id
