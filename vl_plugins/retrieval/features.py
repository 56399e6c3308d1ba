"""Embeddings of images and captions with the names of what they embed, in memory and in a file."""

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor

from vl_plugins.data.files import write_file
from vl_plugins.errors import UserError, require, user_errors
from vl_plugins.registry import create, options_of
from vl_plugins.retrieval.norms import divided_by_norms, has_unit_norm, norms
from vl_plugins.retrieval.similarities import EmbeddingSimilarities

__all__ = [
    "SUFFIXES",
    "Features",
    "check_features_file",
    "describe_similarity",
    "first_difference",
    "load_features",
    "recorded_similarity",
    "save_features",
]

SUFFIXES = (".safetensors", ".npz")
TENSORS = {"image_features": "images", "caption_features": "captions", "image_of_caption": "image_of_caption"}
IDS = ("image_ids", "caption_ids")
METADATA = "vl_plugins"  # key of the JSON text with the ids and the description
MOST_DECLARED = 100  # times the size of an .npz file; embeddings are hardly compressed


@dataclass(frozen=True, eq=False, kw_only=True)
class Features:
    """Embeddings of I images and C captions.

    Args:
        images: (I, D) unit vectors, or sets (I, K, D), whose elements of zeros are padding.
        captions: (C, D) unit vectors, or sets (C, L, D).
        image_of_caption: (C,) int64, index of each caption's image; every image has a caption.
        image_ids, caption_ids: integers or strings, or None.
        description: JSON values by name, such as ``model`` and ``checkpoint``, and for sets ``similarity`` and
            ``similarity_kwargs``.

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
        owners, number = self.image_of_caption, len(self.images)
        _expect(
            owners.dtype == torch.int64 and owners.shape == self.captions.shape[:1], "an int64 image of each caption"
        )
        counts = owners.bincount(minlength=number) if len(owners) and owners.min() >= 0 else owners
        has_all = 0 < number == len(counts) and bool((counts > 0).all())
        _expect(has_all, f"image_of_caption in [0, {number}) and a caption of every image")
        sides = ("image", self.images, self.image_ids), ("caption", self.captions, self.caption_ids)
        for kind, embeddings, ids in sides:
            _expect(embeddings.is_floating_point(), f"floating-point {kind}s, got {embeddings.dtype}")
            types = {type(value) for value in ids or ()}
            _expect(types <= {int, str}, f"{kind} ids that are integers or strings, got {types}")
            _expect(ids is None or len(ids) == len(embeddings), f"an id of each of the {len(embeddings)} {kind}s")
            lengths = norms(embeddings)
            wrong = ~has_unit_norm(lengths)
            if embeddings.ndim == 3:
                wrong = (wrong & (lengths != 0)).any(dim=1) | (lengths == 0).all(dim=1)
            if rows := wrong.nonzero().flatten().tolist():
                which = f"row {rows[0]}{'' if ids is None else f' (id {ids[rows[0]]})'}"
                _expect(
                    False,
                    f"finite unit vectors; {len(rows):,} of {len(embeddings):,} {kind}s are not, the first is {which} "
                    f"of norm {lengths[rows[0]].flatten()[0]:.4g}; `normalize` divides by the norms",
                )
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
        """Return the similarities of all images and captions: cosines, or what ``description`` names for sets."""
        compare = None
        if self.images.ndim == 3:
            name, options = self.description.get("similarity"), self.description.get("similarity_kwargs") or {}
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


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise UserError(f"features must have {what}")


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


def check_features_file(file: str | os.PathLike) -> None:
    """Raise ``UserError`` if features cannot be written to a file of this name, before they are computed."""
    if Path(file).suffix not in SUFFIXES:
        raise UserError(f"a file of features must end in {' or '.join(SUFFIXES)}, got {file}")
    if Path(file).suffix == ".safetensors":
        require("safetensors", extra="eval")


def save_features(features: Features, file: str | os.PathLike) -> None:
    """Write features as ``.npz`` or ``.safetensors``, completely or not at all.

    ``image_features``, ``caption_features`` and ``image_of_caption`` are arrays; ids and description are a JSON text
    named ``vl_plugins``, an array of one string in ``.npz`` and metadata in ``.safetensors``. ``.npz`` has no bfloat16,
    which becomes float32.
    """
    check_features_file(file)
    tensors = {name: getattr(features, attribute).detach().cpu().contiguous() for name, attribute in TENSORS.items()}
    values = {name: getattr(features, name) for name in (*IDS, "description")}
    text = json.dumps({name: value for name, value in values.items() if value is not None}, default=list)
    if Path(file).suffix == ".safetensors":
        write_file(file, require("safetensors.torch", extra="eval").save(tensors, metadata={METADATA: text}))
        return
    arrays = {n: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for n, t in tensors.items()}
    stream = io.BytesIO()
    np.savez(stream, **arrays, **{METADATA: np.array(text)})  # type: ignore[arg-type]
    write_file(file, stream.getbuffer())


def load_features(file: str | os.PathLike, *, normalize: bool = False) -> Features:
    """Read features that :func:`save_features` or another program wrote; nothing in the file is executed.

    Needed are ``image_features`` (I, D) and ``caption_features`` (C, D), or sets, and ``image_of_caption`` (C,), the
    index of each caption's image. ``image_ids`` (I,) and ``caption_ids`` (C,), integers or strings, may be arrays too.

    Args:
        file: ``.npz`` or ``.safetensors``.
        normalize: divide embeddings by their norms; otherwise they must be unit vectors.

    Raises:
        UserError: the file cannot be read, is not as :class:`Features` must be, or has ids that contradict each other.
    """
    check_features_file(file)
    with user_errors(f"features {file}", Exception):
        if Path(file).suffix == ".safetensors":
            with require("safetensors", extra="eval").safe_open(file, framework="pt") as opened:
                arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                text = (opened.metadata() or {}).get(METADATA, "{}")
        else:
            with np.load(file, allow_pickle=False) as opened:
                declared = sum(member.file_size for member in opened.zip.infolist())
                if declared > MOST_DECLARED * os.path.getsize(file):
                    raise UserError(f"features {file}: {declared:,} bytes, compressed more than {MOST_DECLARED} times")
                arrays = {name: opened[name] for name in (*TENSORS, *IDS, METADATA) if name in opened.files}
            text = str(arrays.pop(METADATA, "{}"))
    try:
        missing = [name for name in TENSORS if name not in arrays]
        _expect(not missing, f"{', '.join(missing)}, got {', '.join(sorted(arrays)) or 'nothing'}")
        values = json.loads(text)
        for name in IDS:
            ids = arrays[name].tolist() if name in arrays else None
            _expect(None in (ids, values.get(name)) or ids == values[name], f"one list of {name}, got two that differ")
            values[name] = values.get(name) if ids is None else ids
        tensors: dict[str, Any] = {attribute: torch.as_tensor(arrays[name]) for name, attribute in TENSORS.items()}
        _expect(not tensors["image_of_caption"].is_floating_point(), "integers as image_of_caption")
        tensors["image_of_caption"] = tensors["image_of_caption"].to(torch.int64)
        for side in ("images", "captions") if normalize else ():
            tensors[side] = divided_by_norms(tensors[side])
        known = {name: values[name] for name in (*IDS, "description") if values.get(name) is not None}
        return Features(**tensors, **known)
    except Exception as error:  # of damaged files
        raise UserError(f"features {file}: {str(error).removeprefix('features ')}") from error
