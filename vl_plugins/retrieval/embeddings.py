"""Embeddings of images and captions with their ids: the class, and the similarity that its description names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor

from vl_plugins.errors import UserError
from vl_plugins.registry import create, options_of
from vl_plugins.retrieval.norms import has_unit_norm, norms
from vl_plugins.retrieval.similarities import EmbeddingSimilarities

__all__ = [
    "Features",
    "OneSide",
    "check_embeddings",
    "describe_similarity",
    "first_difference",
    "recorded_similarity",
]


@dataclass(frozen=True, eq=False, kw_only=True)
class Features:
    """Embeddings of I images and C captions.

    Args:
        images: (I, D) unit vectors, or sets (I, K, D), whose elements of zeros are padding.
        captions: (C, D) unit vectors, or sets (C, L, D).
        image_of_caption: (C,) int64, index of each caption's image; every image has a caption.
        image_ids, caption_ids: different integers or strings, or None.
        description: JSON values by name, such as ``model`` and ``checkpoint``, and for sets and order embeddings
            ``similarity`` and ``similarity_kwargs``.

    Raises:
        UserError: a shape, index or type does not fit, an embedding is not a finite unit vector, or the description has
            NaN or infinity.
    """

    images: Tensor
    captions: Tensor
    image_of_caption: Tensor
    image_ids: Sequence[int | str] | None = None
    caption_ids: Sequence[int | str] | None = None
    description: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = f"{(*self.images.shape,)} and {(*self.captions.shape,)}"
        _expect(self.images.ndim in (2, 3) and self.images.ndim == self.captions.ndim, f"vectors or sets, got {shapes}")
        _expect(self.images.shape[-1] == self.captions.shape[-1], f"images and captions of one width, got {shapes}")
        _check_owners(self.image_of_caption, len(self.images), len(self.captions))
        check_embeddings("image", self.images, self.image_ids)
        check_embeddings("caption", self.captions, self.caption_ids)
        _expect(isinstance(self.description, dict), "a description that is a dictionary")
        try:
            json.dumps(self.description, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"features must have a description of JSON values without NaN and infinity: {error}"
            ) from None

    def select(self, images: Tensor, captions: Tensor) -> "Features":
        """Return some of the images and captions, given by ascending indices."""
        new_index = torch.full((len(self.images),), -1).index_put((images,), torch.arange(len(images)))
        return replace(
            self,
            images=self.images[images],
            captions=self.captions[captions],
            image_of_caption=new_index[self.image_of_caption[captions]],
            image_ids=self.image_ids and [self.image_ids[index] for index in images.tolist()],
            caption_ids=self.caption_ids and [self.caption_ids[index] for index in captions.tolist()],
        )

    def similarities(self, device: str | torch.device = "cpu") -> EmbeddingSimilarities:
        """Return the similarities of all images and captions: cosines, or what ``description`` names."""
        compare = None
        name = self.description.get("similarity")
        if self.images.ndim == 3 or name is not None:
            options = self.description.get("similarity_kwargs") or {}
            compare = recorded_similarity(name, options).to(device).compute_mat
        return EmbeddingSimilarities(self.images.to(device), self.captions.to(device), compare)

    def check_same_items(self, other: Any, name: str, other_name: str) -> None:
        """Raise ``UserError`` unless images, captions and their ids are those of other features, or of a collection.

        Args:
            other: with ``image_ids``, ``caption_ids`` and ``image_of_caption``.
            name, other_name: for errors.
        """
        for what in ("image_ids", "caption_ids", "image_of_caption"):
            ours, theirs = getattr(self, what), getattr(other, what)
            if ours is not None and theirs is not None and (difference := first_difference(ours, theirs)):
                raise UserError(f"{name} and {other_name} do not belong together: {what}: {difference}")


@dataclass(frozen=True, eq=False, kw_only=True)
class OneSide:
    """Embeddings of images without captions, or of captions without images.

    Args:
        side: ``"image"`` or ``"caption"``.
        embeddings: (N, D) unit vectors, or sets (N, K, D), whose elements of zeros are padding.
        ids: different integers or strings.
        description: JSON values by name, as of :class:`Features`.

    Raises:
        UserError: as :class:`Features` does.
    """

    side: str
    embeddings: Tensor
    ids: Sequence[int | str]
    description: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_embeddings(self.side, self.embeddings, self.ids)


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise UserError(f"features must have {what}")


def _check_owners(image_of_caption: Tensor, images: int, captions: int) -> None:
    """Raise ``UserError`` unless each caption has the index of an image, and each image a caption."""
    _expect(image_of_caption.dtype == torch.int64, f"an int64 image of each caption, got {image_of_caption.dtype}")
    if image_of_caption.shape != (captions,):
        problem = f"an image of each of the {captions:,} captions, got {(*image_of_caption.shape,)} images"
        if image_of_caption.shape == (images,):
            problem += ": are images and captions swapped?"
        _expect(False, problem)
    wanted = f"image_of_caption in [0, {images}) and a caption of every image"
    _expect(images > 0 and captions > 0, wanted)
    lowest, highest = int(image_of_caption.min()), int(image_of_caption.max())
    hint = ""
    if (lowest, highest) == (1, images):
        hint = ": does it count from 1? subtract 1"
    _expect(lowest >= 0 and highest < images, f"{wanted}, got {lowest} to {highest}{hint}")
    missing = (image_of_caption.bincount(minlength=images) == 0).nonzero().flatten()
    if len(missing):
        _expect(False, f"{wanted}; {len(missing):,} images have none, the first is row {missing[0]}")


def check_embeddings(kind: str, embeddings: Tensor, ids: Sequence[int | str] | None) -> None:
    """Raise ``UserError`` unless embeddings are unit vectors, or sets of them, with an id each if they have any."""
    _expect(embeddings.is_floating_point(), f"floating-point {kind}s, got {embeddings.dtype}")
    if ids is not None:
        types = {type(value) for value in ids}
        _expect(types <= {int, str}, f"{kind} ids that are integers or strings, got {types}")
        _expect(len(ids) == len(embeddings), f"an id of each of the {len(embeddings)} {kind}s")
        _check_different(kind, ids)
    lengths = norms(embeddings)
    wrong = ~has_unit_norm(lengths)
    if embeddings.ndim == 3:
        wrong = (wrong & (lengths != 0)).any(dim=1) | (lengths == 0).all(dim=1)
    rows = wrong.nonzero().flatten().tolist()
    if not rows:
        return
    row = f"row {rows[0]}" if ids is None else f"row {rows[0]} (id {ids[rows[0]]})"
    problem = f"{len(rows):,} of {len(embeddings):,} {kind}s are not, the first is {row}"
    cure = ""
    if (lengths[rows].isfinite() & (lengths[rows] > 0)).any():
        cure = "; `normalize` (--normalize) divides by the norms"
    _expect(False, f"finite unit vectors; {problem} of norm {lengths[rows[0]].flatten()[0]:.4g}{cure}")


def _check_different(kind: str, ids: Sequence[int | str]) -> None:
    """Raise ``UserError`` if two rows have one id, as samples that two processes have encoded."""
    rows: dict[int | str, int] = {}
    for row, value in enumerate(ids):
        first = rows.setdefault(value, row)
        if first != row:
            problem = f"different {kind} ids; rows {first} and {row} have the id {value!r}"
            _expect(False, f"{problem}: if processes encoded it twice, keep one row for each id")


def first_difference(items: Sequence[int | str] | Tensor, expected: Sequence[int | str] | Tensor) -> str | None:
    """Return how two lists differ, None if they are equal."""
    items, expected = (value.tolist() if isinstance(value, Tensor) else list(value) for value in (items, expected))
    if len(items) != len(expected):
        return f"there are {len(items):,}, expected {len(expected):,}"
    pairs = enumerate(zip(items, expected, strict=True))
    found = (
        f"number {place} of {len(items):,} is {one}, expected {other}" for place, (one, other) in pairs if one != other
    )
    return next(found, None)


def describe_similarity(similarity: BaseDistance, *, parameters: bool = True) -> dict[str, Any]:
    """Return what :meth:`Features.similarities` makes the same similarity of: its class and its current options.

    Args:
        similarity: one of :mod:`vl_plugins.distances`.
        parameters: with those that are trained; without them they are for a state dict to give.
    """
    left_out = {*options_of(BaseDistance), "tiled", *(() if parameters else dict(similarity.named_parameters()))}
    values = {name: getattr(similarity, name) for name in options_of(type(similarity)) if name not in left_out}
    return {
        "similarity": type(similarity).__name__,
        "similarity_kwargs": {
            name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()
        },
    }


def recorded_similarity(name: Any, options: Mapping[str, Any]) -> Any:
    """Return the similarity of :func:`describe_similarity`, also of version 0.2, whose ``backend`` is gone."""
    return create("distance", name, **{option: value for option, value in options.items() if option != "backend"})
