"""One batch from those of all processes: labels of images and texts, and features with gradients."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

__all__ = ["BatchGatherer", "GlobalBatch", "all_gather_rows"]


@dataclass(frozen=True)
class GlobalBatch:
    """The images and texts of all processes, in the order of their ranks.

    Attributes:
        image_counts: number of images in each process.
        text_counts: number of texts in each process.
        image_labels: (N,), int64, equal for the same image.
        text_labels: (k * N,), each text has the label of its image.
        pair_weight: number of positive pairs of this process's images, divided by the average over processes. The means
            of the processes over their own pairs, times this weight, average to the mean over all pairs.
    """

    image_counts: tuple[int, ...]
    text_counts: tuple[int, ...]
    image_labels: Tensor
    text_labels: Tensor
    pair_weight: float


class BatchGatherer:
    """Gathers the batches of all processes, which have to call its methods together.

    Args:
        gather_with_grad: send the gradients of gathered features back to the process that they come from. Otherwise
            only a process's own features have a gradient.
        rank: rank of this process.
        world_size: number of processes.
    """

    def __init__(self, gather_with_grad: bool = False, rank: int = 0, world_size: int = 1):
        self.gather_with_grad = gather_with_grad
        self.rank = rank
        self.world_size = world_size
        self._cpu_group: distributed.ProcessGroup | int | None = None
        self._has_warned = False

    def global_batch(
        self, num_images: int, num_texts: int, image_ids: Tensor | None = None, device=None
    ) -> GlobalBatch:
        """Return what the processes' batches are together. Only CPUs communicate, so that no GPU is waited for.

        Args:
            num_images: number of images in this process.
            num_texts: number of texts in this process; the k texts of an image are side by side.
            image_ids: (num_images,), integers, equal for the same image; if left out, all images are different.
            device: of the labels in the result.

        Raises:
            ValueError: in all processes, if the numbers of one do not fit each other or those of another one.
        """
        num_ids = -1 if image_ids is None else len(image_ids)
        # Gathered before they are checked, so that all processes raise the error and none waits for the others.
        rows = self._gather_on_cpu(torch.tensor([[num_images, num_texts, num_ids]]), [1] * self.world_size).tolist()
        k = self._check(rows)
        image_counts, text_counts, id_counts = zip(*rows, strict=True)
        labels = torch.arange(sum(image_counts))
        if max(id_counts) >= 0:  # a process without images need not give any
            ids = torch.zeros(0) if image_ids is None else image_ids.cpu()
            labels = self._gather_on_cpu(ids.long(), image_counts).unique(return_inverse=True)[1]
        pairs = labels.bincount()[labels]  # each image's positive pairs, divided by k
        own_pairs = pairs.split(image_counts)[self.rank].sum().item()
        weight = own_pairs * self.world_size / max(pairs.sum().item(), 1)
        labels = labels.to(device)
        return GlobalBatch(image_counts, text_counts, labels, labels.repeat_interleave(k), weight)

    def features(self, images: Tensor, texts: Tensor, batch: GlobalBatch) -> tuple[Tensor, Tensor]:
        """Return the features of all images and texts, given those of this process and :meth:`global_batch`."""
        images = all_gather_rows(images, batch.image_counts, with_grad=self.gather_with_grad)
        return images, all_gather_rows(texts, batch.text_counts, with_grad=self.gather_with_grad)

    def _check(self, rows: Sequence[Sequence[int]]) -> int:
        """Check the numbers of images, texts and image ids in each process, and return k."""
        for rank, (images, texts, ids) in enumerate(rows):
            where = f" in process {rank}" if self.world_size > 1 else ""
            if texts % images if images else texts:
                raise ValueError(
                    f"each image must have the same number of texts, got {texts} for {images} images{where}"
                )
            if ids not in (-1, images):
                raise ValueError(f"image_ids must be one for each of {images} images, got {ids}{where}")
        captions_per_image = {texts // images for images, texts, _ in rows if images}
        if len(captions_per_image) > 1:
            raise ValueError(f"captions per image must be the same in all processes, got {sorted(captions_per_image)}")
        if len({ids < 0 for images, _, ids in rows if images}) > 1:
            raise ValueError("image_ids must be given in all processes or in none")
        image_counts = [images for images, _, _ in rows]
        if len(set(image_counts)) > 1 and self.rank == 0 and not self._has_warned:
            self._has_warned = True
            logging.warning(
                f"batches of different sizes, {image_counts} images: every pair counts the same, but all processes "
                "wait for the largest batch; drop incomplete batches in the data loader"
            )
        return max(captions_per_image, default=0)

    def _gather_on_cpu(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        if self.world_size > 1 and self._cpu_group is None and distributed.get_backend() != "gloo":
            self._cpu_group = distributed.new_group(backend="gloo")
        return all_gather_rows(rows, counts, group=self._cpu_group)


def all_gather_rows(rows: Tensor, counts: Sequence[int], *, with_grad: bool = False, group=None) -> Tensor:
    """Return the rows of all processes, in the order of their ranks. A process's own rows have a gradient.

    Args:
        rows: (n, ...), of this process.
        counts: n of each process.
        with_grad: gradients are summed over all processes, which have to run the backward pass together.
        group: process group of ``torch.distributed``, by default of all processes.
    """
    return rows if len(counts) == 1 else _AllGatherRows.apply(rows, counts, with_grad, group)


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, counts, with_grad, group):
        ctx.counts, ctx.with_grad, ctx.group = counts, with_grad, group
        padded = torch.cat([rows, rows.new_zeros(max(counts) - len(rows), *rows.shape[1:])])
        gathered = [torch.empty_like(padded) for _ in counts]
        distributed.all_gather(gathered, padded, group)
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        if ctx.with_grad:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            distributed.all_reduce(gradient, group=ctx.group)
        rank = distributed.get_rank(ctx.group)
        return gradient.split(ctx.counts)[rank], None, None, None
