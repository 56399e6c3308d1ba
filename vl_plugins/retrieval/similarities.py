"""Where similarities of images and captions come from: a matrix, embeddings, or several models."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from vl_plugins.numerics import full_precision

__all__ = ["EmbeddingSimilarities", "MatrixSimilarities", "MeanSimilarities", "Similarities", "Similarity"]

Similarity = Callable[[Tensor, Tensor], Tensor]

# Elements of a tile. On the CPU it should stay in a cache; elsewhere fewer, larger steps count.
CPU_TILE = 2**18
DEVICE_TILE = 2**24

# What the innermost loops of matrix products take at a time, or a multiple of it. They round a remainder differently,
# in float64 even that of a large product; MKL 2022 treats some of 8 images like that.
PRODUCT = (16, 48)


class Similarities(Protocol):
    """Similarities of I images and C captions that are looked at in tiles.

    Attributes:
        shape: (I, C).
        device: of the tiles.
        tile_shape: images and captions of a tile; the last ones may be smaller.
    """

    shape: tuple[int, int]
    device: torch.device
    tile_shape: tuple[int, int]

    def tile(self, image: int, caption: int) -> Tensor:
        """Return the tile whose first image and caption these are, in float32 or float64; the caller may write to it.

        Asked for again, it is the same to the last bit.
        """
        ...

    def select(self, images: Tensor | None = None, captions: Tensor | None = None) -> "Similarities":
        """Return the similarities of some images and some captions, given by their indices; all where left out."""
        ...


class EmbeddingSimilarities:
    """Similarities of embeddings, computed tile by tile.

    A matrix product rounds according to its shape, and equal embeddings have to tie. So all products have the shape of
    a whole tile. A ``similarity`` too gets the same numbers of images and captions each time.

    Args:
        images: (I, D) floating point; unit vectors where the similarity is to be a cosine. With a ``similarity``
            whatever it takes, such as sets (I, K, D).
        captions: (C, D) on the same device; with a ``similarity`` likewise.
        similarity: called with some of the images (i, ...) and some of the captions (c, ...), returns their
            similarities (i, c), larger is closer. The dot product if left out.

    Raises:
        ValueError: a shape or type is not as above, an embedding holds NaN or infinity, or there is none.
    """

    def __init__(self, images: Tensor, captions: Tensor, similarity: Similarity | None = None):
        _check_embeddings(images, captions, vectors=similarity is None)
        self.shape, self.device = (len(images), len(captions)), images.device
        self.tile_shape = _tile_shape(self.shape, self.device)
        self._similarity = similarity
        self._images, self._captions = full_precision(images.detach(), captions.detach())

    @torch.no_grad()
    def tile(self, image: int, caption: int) -> Tensor:
        images = _rows(self._images, image, self.tile_shape[0])
        captions = _rows(self._captions, caption, self.tile_shape[1])
        with torch.autocast(self.device.type, enabled=False):
            product = images @ captions.T if self._similarity is None else self._similarity(images, captions)
        if product.shape != self.tile_shape or not product.is_floating_point():
            raise ValueError(
                f"similarity must return floating-point values of shape {self.tile_shape}, "
                f"got {product.dtype} of shape {tuple(product.shape)}"
            )
        tile = product[: self.shape[0] - image, : self.shape[1] - caption]
        if self._similarity is None:
            return tile
        # What it returned may be its own memory, or repeat elements; the caller may write to the tile.
        return tile.to(torch.promote_types(tile.dtype, torch.float32), copy=True)

    def select(self, images: Tensor | None = None, captions: Tensor | None = None) -> "EmbeddingSimilarities":
        return EmbeddingSimilarities(
            self._images if images is None else self._images[images.to(self.device)],
            self._captions if captions is None else self._captions[captions.to(self.device)],
            self._similarity,
        )


class MatrixSimilarities:
    """Similarities that somebody else has computed, such as those of a cross-attention model.

    Args:
        matrix: (I, C) floating point. It may be memory-mapped; a tile of it is read at a time.

    Raises:
        ValueError: the shape or type is not as above.
    """

    def __init__(self, matrix: Tensor):
        if matrix.ndim != 2 or not matrix.is_floating_point() or 0 in matrix.shape:
            raise ValueError(
                "similarities must be a floating-point tensor of shape (I, C) with at least one image and one "
                f"caption, got {matrix.dtype} of shape {tuple(matrix.shape)}"
            )
        self._matrix = matrix.detach()
        self.shape, self.device = (matrix.shape[0], matrix.shape[1]), matrix.device
        self.tile_shape = _tile_shape(self.shape, self.device)

    def tile(self, image: int, caption: int) -> Tensor:
        tile = self._matrix[image : image + self.tile_shape[0], caption : caption + self.tile_shape[1]]
        return tile.to(torch.promote_types(tile.dtype, torch.float32), copy=True)

    def select(self, images: Tensor | None = None, captions: Tensor | None = None) -> "MatrixSimilarities":
        matrix = self._matrix if images is None else self._matrix[images.to(self.device)]
        return MatrixSimilarities(matrix if captions is None else matrix[:, captions.to(self.device)])


class MeanSimilarities:
    """Mean of the similarities of several models for the same images and captions: an ensemble.

    Args:
        members: at least one, of the same shape and device.

    Raises:
        ValueError: there is none, or shapes, devices or tile shapes differ.
    """

    def __init__(self, members: Sequence[Similarities]):
        if not members:
            raise ValueError("an ensemble needs at least one model's similarities, got none")
        first, *others = self._members = tuple(members)
        self.shape, self.device, self.tile_shape = first.shape, first.device, first.tile_shape
        for number, other in enumerate(others, start=2):
            if (other.shape, other.device, other.tile_shape) != (first.shape, first.device, first.tile_shape):
                raise ValueError(
                    "similarities of an ensemble must have the same shape, device and tile_shape; the first have "
                    f"{first.shape}, {first.device}, {first.tile_shape}, number {number} "
                    f"{other.shape}, {other.device}, {other.tile_shape}"
                )

    def tile(self, image: int, caption: int) -> Tensor:
        return sum((member.tile(image, caption) for member in self._members), torch.zeros(())) / len(self._members)

    def select(self, images: Tensor | None = None, captions: Tensor | None = None) -> "MeanSimilarities":
        return MeanSimilarities([member.select(images, captions) for member in self._members])


def _tile_shape(shape: tuple[int, int], device: torch.device) -> tuple[int, int]:
    """Return images and captions of tiles of about the same size, up to twice as wide as high.

    >>> _tile_shape((5000, 25000), torch.device("cpu"))
    (336, 768)
    """
    elements = CPU_TILE if device.type == "cpu" else DEVICE_TILE
    height = _even(shape[0], int((elements / 2) ** 0.5), PRODUCT[0])
    return height, _even(shape[1], elements // height, PRODUCT[1])


def _even(length: int, most: int, step: int) -> int:
    """Return the size of equal parts, a multiple of ``step``, of which as few as possible are needed."""
    parts = -(-length // (most // step * step))
    return -(-length // (parts * step)) * step


def _rows(embeddings: Tensor, start: int, number: int) -> Tensor:
    """Return so many rows from ``start`` on; where there are fewer, the last one is repeated."""
    rows = embeddings[start : start + number]
    missing = number - len(rows)
    return rows if missing == 0 else torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])


def _check_embeddings(images: Tensor, captions: Tensor, vectors: bool) -> None:
    if images.device != captions.device or (vectors and images.shape[1:] != captions.shape[1:]):
        raise ValueError(
            "image_embeddings and caption_embeddings must be on one device and have the same width D, got shapes "
            f"{tuple(images.shape)} and {tuple(captions.shape)} on {images.device} and {captions.device}"
        )
    shape = "(rows, D)" if vectors else "(rows, ...)"
    for name, embeddings in (("image_embeddings", images), ("caption_embeddings", captions)):
        right_shape = embeddings.ndim == 2 if vectors else embeddings.ndim > 1
        if not right_shape or not embeddings.is_floating_point() or len(embeddings) == 0:
            raise ValueError(
                f"{name} must be a floating-point tensor of shape {shape} with at least one row, "
                f"got {embeddings.dtype} of shape {tuple(embeddings.shape)}"
            )
        # In parts: what it computes on the way is larger than the embeddings.
        finite = torch.cat([part.flatten(1).isfinite().all(dim=1) for part in embeddings.split(256)])
        if not finite.all():
            wrong = (~finite).nonzero().flatten().tolist()
            raise ValueError(
                f"{name} must be finite; NaN or infinity in {len(wrong)} of {len(finite)} rows, first row {wrong[0]}"
            )
