"""What the processes of a training tell one another about a batch: its size, its images, its features."""

import logging
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from open_clip.loss import gather_features
from torch import Tensor, distributed

__all__ = ["JoinedBatch", "Processes"]


class JoinedBatch(NamedTuple):
    """Who is who in the batch of all processes together, process by process.

    Attributes:
        sizes: number of images of each process.
        captions_per_image: k, the same for all.
        labels: of all images, (N,), equal for the same image; None where all are different images.
        share: of the positive pairs those of this process's images, relative to the average of the processes. As many
            are those of its texts.
    """

    sizes: tuple[int, ...]
    captions_per_image: int
    labels: np.ndarray | None
    share: float


@dataclass
class Processes:
    """The processes of a training, seen from one of them.

    Sizes and image numbers are exchanged between the processors' own memories, so that no accelerator is waited for.

    Args:
        gather_with_grad: features of other processes have a gradient, which is sent back to them.
        rank, world_size, use_horovod: as in ``open_clip.ClipLoss``.
    """

    gather_with_grad: bool = False
    rank: int = 0
    world_size: int = 1
    use_horovod: bool = False

    def __post_init__(self):
        self._group: distributed.ProcessGroup | None = None
        self._has_warned = False

    def join(self, num_images: int, num_texts: int, image_ids: Tensor | None = None) -> JoinedBatch:
        """Find out what the batches of all processes are together.

        Args:
            num_images: B, of this process.
            num_texts: k * B.
            image_ids: (B,), on the CPU, numbers that tell images apart in all processes; None takes all for different.

        Raises:
            ValueError: in any process, a number of texts that is no multiple of the number of images, or ``image_ids``
                that do not fit; another k in another process, or ``image_ids`` in some processes only.
        """
        captions_per_image, remainder = divmod(num_texts, max(num_images, 1))
        num_ids = -1 if image_ids is None else image_ids.numel()
        # All say what they have before one of them complains, or the others would wait for it.
        told = self._tell(torch.tensor([num_images, captions_per_image, remainder, num_ids]))
        for rank, (images, captions, remains, ids) in enumerate(told):
            if remains:
                raise ValueError(
                    "text_features must hold the same number of captions for each image: "
                    f"got {images * captions + remains} texts for {images} images{self._of(rank)}"
                )
            if ids not in (-1, images):
                raise ValueError(f"image_ids must be one for each of {images} images, got {ids}{self._of(rank)}")
        of_captions = {captions for images, captions, *_ in told if images}
        if len(of_captions) > 1:
            raise ValueError(f"captions per image must be the same in all processes, got {sorted(of_captions)}")
        if len({ids < 0 for images, *_, ids in told if images}) > 1:
            raise ValueError("image_ids must be given in all processes or in none")
        captions_per_image = max(of_captions, default=0)
        sizes = tuple(row[0] for row in told)
        if len(set(sizes)) > 1 and self.rank == 0 and not self._has_warned:
            self._has_warned = True
            logging.warning(
                f"processes have batches of different sizes, {list(sizes)} images: each pair still counts as in one "
                "process, but all wait for the largest; let the reader drop what does not fill a batch"
            )
        labels = None
        if any(ids >= 0 for *_, ids in told):  # also where this process has no images, and gave none
            all_ids = self._tell_each(torch.zeros(0) if image_ids is None else image_ids, sizes)
            distinct, labels = np.unique(all_ids, return_inverse=True)
            labels = labels if len(distinct) < len(all_ids) else None
        return JoinedBatch(sizes, captions_per_image, labels, self._share(sizes, labels))

    def gather(self, images: Tensor, texts: Tensor, batch: JoinedBatch) -> tuple[Tensor, Tensor]:
        """Return the features of all processes, by open_clip's own function.

        Those of this process always have a gradient, those of others with ``gather_with_grad``.

        Args:
            images: (B, ...).
            texts: (k * B, ...).
            batch: of :meth:`join`.
        """
        if self.world_size == 1:
            return images, texts
        largest, k = max(batch.sizes), batch.captions_per_image
        is_even = min(batch.sizes) == largest
        sides = (images, texts) if is_even else (_padded(images, largest), _padded(texts, k * largest))
        joined = gather_features(
            *sides,
            local_loss=False,
            gather_with_grad=self.gather_with_grad,
            rank=self.rank,
            world_size=self.world_size,
            **({"use_horovod": True} if self.use_horovod else {}),  # 4.x has no such option
        )
        if is_even:
            return joined
        cut = []
        for side, per_image in zip(joined, (1, k), strict=True):
            parts = side.chunk(self.world_size)
            cut.append(torch.cat([part[: per_image * size] for part, size in zip(parts, batch.sizes, strict=True)]))
        return tuple(cut)

    def _share(self, sizes: tuple[int, ...], labels: np.ndarray | None) -> float:
        start, size = sum(sizes[: self.rank]), sizes[self.rank]
        if labels is None:
            return size * self.world_size / max(sum(sizes), 1)
        counts = np.bincount(labels)
        # An image that is there n times makes n * n * k pairs, and each time is the image, or with its texts, of n * k.
        return float(counts[labels[start : start + size]].sum() * self.world_size / (counts**2).sum())

    def _tell(self, numbers: Tensor) -> list[list[int]]:
        """Return the numbers of each process."""
        if self.world_size == 1:
            return [numbers.tolist()]
        if self.use_horovod:
            import horovod.torch as hvd

            return hvd.allgather(numbers[None]).tolist()
        told = [torch.empty_like(numbers) for _ in range(self.world_size)]
        distributed.all_gather(told, numbers, group=self._processors())
        return [each.tolist() for each in told]

    def _tell_each(self, ids: Tensor, sizes: tuple[int, ...]) -> np.ndarray:
        told = self._tell(_padded(ids.cpu().long(), max(sizes)))
        return np.array([number for numbers, size in zip(told, sizes, strict=True) for number in numbers[:size]])

    def _processors(self) -> "distributed.ProcessGroup | None":
        """Return a group that sends from memory to memory; made at the first call, which all processes do together."""
        if distributed.get_backend() == "gloo":
            return None
        if self._group is None:
            self._group = distributed.new_group(backend="gloo")
        return self._group

    def _of(self, rank: int) -> str:
        return f" in process {rank}" if self.world_size > 1 else ""


def _padded(tensor: Tensor, length: int) -> Tensor:
    missing = tensor.new_zeros(length - len(tensor), *tensor.shape[1:])
    return torch.cat([tensor, missing])
