"""What open_clip's trainer does not pass to its loss: the training step and its images."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vl_plugins.integrations.open_clip.host import OpenCLIP3

__all__ = ["BatchRecord", "RecordedLoader"]


class BatchRecord:
    """The current training step and its images: written by the data loader, read by the loss.

    Args:
        batches_per_step: open_clip's ``--accum-freq``.

    Attributes:
        step: number of the current step, from 0, counted over all epochs.
        first_step: number of the first step of the epoch.
    """

    def __init__(self, batches_per_step: int = 1):
        self.batches_per_step = batches_per_step
        self.step = self.first_step = 0
        self._batches: deque[tuple[Tensor | None, list[str] | None]] = deque(maxlen=batches_per_step)

    def add(self, batch_index: int, image_ids: Tensor | None, keys: list[str] | None) -> None:
        """Note a batch.

        Args:
            batch_index: in the epoch, from 0.
            image_ids: (B,), equal for images of one group; None if open_clip's reader made the batch.
            keys: of the B samples, or None.
        """
        if batch_index == 0:
            self._batches.clear()
        self._batches.append((image_ids, keys))
        self.step = self.first_step + batch_index // self.batches_per_step

    @property
    def image_ids(self) -> Tensor | None:
        """The ids of the images of the step, (B,), in the order of its batches."""
        ids = [ids for ids, _ in self._batches if ids is not None]
        return torch.cat(ids) if ids else None

    @property
    def keys(self) -> list[str]:
        """The keys of the images of the step; none if open_clip's reader made the batches."""
        return [key for _, keys in self._batches for key in keys or ()]


class RecordedLoader:
    """A loader for the trainer that notes its batches in a record.

    Args:
        loader: with ``num_batches`` and ``num_samples``, as the trainer needs them.
        record: of its batches.
        host: if the batches are those of our reader, images, texts, image ids and keys; None for open_clip's reader.
    """

    def __init__(self, loader: Any, record: BatchRecord, host: OpenCLIP3 | None):
        self.loader = loader
        self.record = record
        self.host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.loader):
            image_ids = keys = None
            if self.host is not None:
                images, texts, image_ids, keys = batch
                batch = self.host.batch(images, texts)
            self.record.add(index, image_ids, keys)
            yield batch
