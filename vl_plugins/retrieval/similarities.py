"""Where similarities of images and captions come from: a matrix, embeddings, or several models."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from vl_plugins.functional.precision import full_precision
from vl_plugins.retrieval import tiles

__all__ = ["EmbeddingSimilarities", "MatrixSimilarities", "MeanSimilarities", "Similarities", "Similarity"]

Similarity = Callable[[Tensor, Tensor], Tensor]

# What the innermost loops of matrix products take at a time, or a multiple of it. They treat a crooked rest in another
# way, and round it differently; in float64 even that of a large product. Of 8 images MKL 2022 treats some in that way.
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
        """Return the similarities of some images and some captions, given by their indices; of all with None."""
        ...


class EmbeddingSimilarities:
    """Similarities of embeddings, computed tile by tile.

    All products have the same shape, wherever the tile is, without a crooked rest: a matrix product rounds according to
    its shape, and equal embeddings would otherwise differ in the last bit and no longer tie. A ``similarity`` is called
    with the same numbers of images and captions each time; whether equal ones tie is up to it.

    Args:
        images: (I, D) floating point; unit vectors where the similarity is to be a cosine. With a ``similarity``
            whatever it takes, such as sets (I, K, D).
        captions: (C, D) on the same device; with a ``similarity`` likewise.
        similarity: called with some of the images (i, ...) and some of the captions (c, ...), returns their
            similarities (i, c), larger is closer. The dot product if left out.
        tile_shape: images and captions compared at a time; chosen by the device if left out.

    Raises:
        ValueError: a shape or type is not as above, an embedding holds NaN or infinity, or there is none.
    """

    def __init__(
        self,
        images: Tensor,
        captions: Tensor,
        similarity: Similarity | None = None,
        *,
        tile_shape: tuple[int, int] | None = None,
    ):
        _check_embeddings(images, captions, vectors=similarity is None)
        _check_tile_shape(tile_shape)
        self._images, self._captions = full_precision(images.detach(), captions.detach())
        self._similarity = similarity
        self.shape = (len(images), len(captions))
        self.device = images.device
        self.tile_shape = tile_shape or _tile_shape(self.shape, self.device)
        self._product = self.tile_shape
        if similarity is None:
            self._product = tuple(-(-size // part) * part for size, part in zip(self.tile_shape, PRODUCT, strict=True))
            self._images = _at_least(self._images, self._product[0])
            self._captions = _at_least(self._captions, self._product[1])

    @torch.no_grad()
    def tile(self, image: int, caption: int) -> Tensor:
        images, row = _window(self._images, image, self._product[0])
        captions, column = _window(self._captions, caption, self._product[1])
        with torch.autocast(self.device.type, enabled=False):
            product = images @ captions.T if self._similarity is None else self._similarity(images, captions)
        expected = (len(images), len(captions))
        if product.shape != expected or not product.is_floating_point():
            raise ValueError(
                f"similarity must return floating-point values of shape {expected}, "
                f"got {product.dtype} of shape {tuple(product.shape)}"
            )
        height, width = (
            min(size, number - first)
            for size, number, first in zip(self.tile_shape, self.shape, (image, caption), strict=True)
        )
        tile = product[row : row + height, column : column + width]
        if self._similarity is None:
            return tile
        # What it returned may be its own memory, or repeat elements; the caller may write to the tile.
        return tile.to(torch.promote_types(tile.dtype, torch.float32), copy=True)

    def select(self, images: Tensor | None = None, captions: Tensor | None = None) -> "EmbeddingSimilarities":
        rows, columns = self._images[: self.shape[0]], self._captions[: self.shape[1]]
        return EmbeddingSimilarities(
            rows if images is None else rows[images.to(self.device)],
            columns if captions is None else columns[captions.to(self.device)],
            self._similarity,
            tile_shape=self.tile_shape,
        )


class MatrixSimilarities:
    """Similarities that somebody else has computed, such as those of a cross-attention model.

    Args:
        matrix: (I, C) floating point. It may be memory-mapped; a tile of it is read at a time.
        tile_shape: as for :class:`EmbeddingSimilarities`.

    Raises:
        ValueError: the shape or type is not as above.
    """

    def __init__(self, matrix: Tensor, *, tile_shape: tuple[int, int] | None = None):
        if matrix.ndim != 2 or not matrix.is_floating_point() or 0 in matrix.shape:
            raise ValueError(
                "similarities must be a floating-point tensor of shape (I, C) with at least one image and one "
                f"caption, got {matrix.dtype} of shape {tuple(matrix.shape)}"
            )
        _check_tile_shape(tile_shape)
        self._matrix = matrix.detach()
        self.shape = tuple(matrix.shape)
        self.device = matrix.device
        self.tile_shape = tile_shape or _tile_shape(self.shape, self.device)

    def tile(self, image: int, caption: int) -> Tensor:
        tile = self._matrix[image : image + self.tile_shape[0], caption : caption + self.tile_shape[1]]
        return tile.to(torch.promote_types(tile.dtype, torch.float32), copy=True)

    def select(self, images: Tensor | None = None, captions: Tensor | None = None) -> "MatrixSimilarities":
        matrix = self._matrix if images is None else self._matrix[images.to(self.device)]
        matrix = matrix if captions is None else matrix[:, captions.to(self.device)]
        return MatrixSimilarities(matrix, tile_shape=self.tile_shape)


class MeanSimilarities:
    """Mean of the similarities of several models for the same images and captions: an ensemble.

    Args:
        members: at least one, of the same shape and device.

    Raises:
        ValueError: there is none, or shapes or devices differ.
    """

    def __init__(self, members: Sequence[Similarities]):
        if not members:
            raise ValueError("an ensemble needs at least one model's similarities, got none")
        first = members[0]
        for number, member in enumerate(members):
            if member.shape != first.shape or member.device != first.device:
                raise ValueError(
                    "similarities of an ensemble must have the same shape and device; the first are "
                    f"{first.shape} on {first.device}, number {number + 1} {member.shape} on {member.device}"
                )
            if member.tile_shape != first.tile_shape:
                raise ValueError(
                    "similarities of an ensemble must have the same tile_shape, "
                    f"got {first.tile_shape} and {member.tile_shape}"
                )
        self._members = tuple(members)
        self.shape, self.device, self.tile_shape = first.shape, first.device, first.tile_shape

    def tile(self, image: int, caption: int) -> Tensor:
        first, *others = (member.tile(image, caption) for member in self._members)
        mean = first
        for other in others:
            mean = mean + other
        return mean / len(self._members)

    def select(self, images: Tensor | None = None, captions: Tensor | None = None) -> "MeanSimilarities":
        return MeanSimilarities([member.select(images, captions) for member in self._members])


def _tile_shape(shape: tuple[int, int], device: torch.device) -> tuple[int, int]:
    # Ranks need memory for more than the tile.
    return tiles.tile_shape(shape, device, tiles.CPU_TILE // 2 if device.type == "cpu" else None)


def _window(rows: Tensor, start: int, size: int) -> tuple[Tensor, int]:
    """Return ``size`` rows that hold those from ``start`` on, and where in them those begin."""
    first = max(0, min(start, len(rows) - size))
    return rows[first : first + size], start - first


def _at_least(rows: Tensor, number: int) -> Tensor:
    """Append rows of zeros to get so many."""
    missing = number - len(rows)
    return rows if missing <= 0 else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def _check_tile_shape(tile_shape: tuple[int, int] | None) -> None:
    if tile_shape is not None and (len(tile_shape) != 2 or min(tile_shape) < 1):
        raise ValueError(f"tile_shape must be two positive numbers, got {tile_shape}")


def _check_embeddings(images: Tensor, captions: Tensor, vectors: bool) -> None:
    for name, embeddings in (("image_embeddings", images), ("caption_embeddings", captions)):
        right_shape = embeddings.ndim == 2 if vectors else embeddings.ndim > 1
        if not right_shape or not embeddings.is_floating_point() or len(embeddings) == 0:
            shape = "(rows, D)" if vectors else "(rows, ...)"
            raise ValueError(
                f"{name} must be a floating-point tensor of shape {shape} with at least one row, "
                f"got {embeddings.dtype} of shape {tuple(embeddings.shape)}"
            )
    if vectors and images.shape[1] != captions.shape[1]:
        raise ValueError(
            "image_embeddings and caption_embeddings must have the same width D, "
            f"got shapes {tuple(images.shape)} and {tuple(captions.shape)}"
        )
    if images.device != captions.device:
        raise ValueError(
            f"image_embeddings and caption_embeddings must be on one device, got {images.device} and {captions.device}"
        )
    check_finite("image_embeddings", images)
    check_finite("caption_embeddings", captions)


def check_finite(name: str, embeddings: Tensor) -> None:
    """Refuse embeddings (N, ...) of which one holds NaN or infinity."""
    # In parts: what it computes on the way is larger than the embeddings.
    finite = torch.cat([part.flatten(1).isfinite().all(dim=1) for part in embeddings.split(256)])
    if not finite.all():
        raise ValueError(f"{name} must be finite; NaN or infinity in {count_and_first(~finite)}")


def count_and_first(rows: Tensor) -> str:
    """Say which rows of a (N,) mask are set: "2 of 10 rows, first row 3"."""
    return f"{int(rows.sum())} of {len(rows)} rows, first row {int(rows.nonzero()[0])}"
