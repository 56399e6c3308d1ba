"""Similarities of images and captions, computed for some queries and all candidates at a time."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from vl_plugins.numerics import full_precision

__all__ = ["KERNEL", "EmbeddingSimilarities", "MatrixSimilarities", "MeanSimilarities", "Similarities", "Similarity"]

Similarity = Callable[[Tensor, Tensor], Tensor]

# BLAS rounds edge rows differently; products are padded to a multiple of this, so that equal embeddings tie.
KERNEL = 48
SET_BLOCK = 2**24  # pairs of elements of sets that are compared at a time
KEPT = 2**28  # similarities other than dot products that are kept for both directions, 1 GB


class Similarities(Protocol):
    """Similarities of I images and C captions. On the CPU they may be asked for in several threads.

    Attributes:
        shape: (I, C).
        device: where they are computed.
    """

    shape: tuple[int, int]
    device: torch.device

    def of_images(self, images: Tensor) -> Tensor:
        """Return the similarities (i, C) of images, given by index, with all captions; the caller may write to them."""
        ...

    def of_captions(self, captions: Tensor) -> Tensor:
        """Return the similarities (c, I) of captions, given by index, with all images; the caller may write to them."""
        ...


class EmbeddingSimilarities:
    """Similarities of embeddings, in float32, or float64 where the embeddings are.

    Dot products are computed when they are needed. Other similarities take longer: up to 1 GB of them are computed once
    and kept for both directions.

    Args:
        images: (I, D) floating point, unit vectors for cosines. With a ``similarity`` whatever it takes, such as sets
            (I, K, D).
        captions: (C, D), or likewise, on the same device.
        similarity: maps images (i, ...) and captions (c, ...) to similarities (i, c), larger is closer. The dot product
            by default.
    """

    def __init__(self, images: Tensor, captions: Tensor, similarity: Similarity | None = None):
        self.shape, self.device, self.similarity = (len(images), len(captions)), images.device, similarity
        self._images, self._captions = map(_padded, full_precision(images.detach(), captions.detach()))
        is_kept = similarity is not None and len(images) * len(captions) <= KEPT
        self._all = self._compare(self._images, self._captions) if is_kept else None

    def of_images(self, images: Tensor) -> Tensor:
        if self._all is not None:
            return self._all[images, : self.shape[1]]
        return self._compare(_padded(self._images[images]), self._captions)[: len(images), : self.shape[1]]

    def of_captions(self, captions: Tensor) -> Tensor:
        if self._all is not None:
            return self._all[: self.shape[0], captions].T.contiguous()
        chosen = _padded(self._captions[captions])
        if self.similarity is None:
            return self._compare(chosen, self._images)[: len(captions), : self.shape[0]]
        return self._compare(self._images, chosen)[: self.shape[0], : len(captions)].T.contiguous()

    @torch.no_grad()
    def _compare(self, images: Tensor, captions: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            if self.similarity is None:
                return images @ captions.T
            sizes = [embeddings[0].numel() // embeddings.shape[-1] for embeddings in (images, captions)]
            side = max(1, int((SET_BLOCK / (sizes[0] * sizes[1])) ** 0.5) // KERNEL) * KERNEL
            found = images.new_empty(len(images), len(captions))
            for part, rows in zip(images.split(side), found.split(side), strict=True):
                for other, block in zip(captions.split(side), rows.split(side, dim=1), strict=True):
                    block.copy_(self.similarity(part, other))
            return found


class MatrixSimilarities:
    """Similarities that are already computed, such as those of a cross-attention model.

    Args:
        matrix: (I, C) floating point; it may be memory-mapped.
    """

    def __init__(self, matrix: Tensor):
        self.matrix, self.shape, self.device = matrix.detach(), (matrix.shape[0], matrix.shape[1]), matrix.device

    def of_images(self, images: Tensor) -> Tensor:
        return full_precision(self.matrix[images])[0]

    def of_captions(self, captions: Tensor) -> Tensor:
        return full_precision(self.matrix[:, captions].T.contiguous())[0]


class MeanSimilarities:
    """The mean of the similarities of several models: an ensemble.

    Args:
        members: at least one, of the same images and captions.
    """

    def __init__(self, members: Sequence[Similarities]):
        self.members, self.shape, self.device = members, members[0].shape, members[0].device

    def of_images(self, images: Tensor) -> Tensor:
        return reduce(torch.add, (member.of_images(images) for member in self.members)).div_(len(self.members))

    def of_captions(self, captions: Tensor) -> Tensor:
        return reduce(torch.add, (member.of_captions(captions) for member in self.members)).div_(len(self.members))


def _padded(embeddings: Tensor) -> Tensor:
    """Return embeddings with rows of zeros up to a multiple of ``KERNEL``."""
    return pad(embeddings, (0, 0) * (embeddings.ndim - 1) + (0, -len(embeddings) % KERNEL))
