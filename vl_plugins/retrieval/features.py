"""Embeddings of images and captions in a file, with the names of what they embed."""

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

from vl_plugins.data.collection import Collection
from vl_plugins.data.files import write_file
from vl_plugins.errors import UserError, require
from vl_plugins.registry import create, options_of
from vl_plugins.retrieval.similarities import EmbeddingSimilarities, Similarity

__all__ = [
    "Features",
    "Id",
    "describe_similarity",
    "features_file",
    "id_difference",
    "load_features",
    "recorded_similarity",
    "save_features",
]

Id = int | str
SUFFIXES = (".npz", ".safetensors")
TENSORS = ("image_features", "caption_features", "image_of_caption")
IDS = ("image_ids", "caption_ids")
NORM_TOLERANCE = 0.01  # half precision rounds norms by less
DESCRIPTION = "vl_plugins"  # key of the JSON text beside the tensors


@dataclass(frozen=True, eq=False, kw_only=True)
class Features:
    """Embeddings of I images and C captions.

    Args:
        images: (I, D) unit vectors, or sets (I, K, D).
        captions: (C, D) unit vectors, or sets (C, K, D).
        image_of_caption: (C,) int64, index of each caption's image.
        image_ids: of the I images, or None.
        caption_ids: of the C captions, or None.
        description: where they come from, for reports and for ``similarity``: JSON values by name, such as ``model``,
            ``checkpoint``, ``shards``, ``precision``, and ``similarity`` with ``similarity_kwargs`` for sets.
    """

    images: Tensor
    captions: Tensor
    image_of_caption: Tensor
    image_ids: Sequence[Id] | None = None
    caption_ids: Sequence[Id] | None = None
    description: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str = "features", *, normalize: bool = False) -> "Features":
        """Return the features as they can be compared by cosines, or say what is wrong with them.

        Args:
            name: of their file or model, for errors.
            normalize: divide each vector by its norm; otherwise it must have the norm 1 already, within 1%.

        Raises:
            UserError: a shape, index or type does not fit, a value is NaN or infinite, a vector is not of unit norm
                or is zero; of a set, elements of zeros are absent, but one must be there.
        """
        self._check_shapes(name)
        checked = {}
        for kind, ids in (("image", self.image_ids), ("caption", self.caption_ids)):
            features = getattr(self, f"{kind}s")
            norms = torch.linalg.vector_norm(features, dim=-1, dtype=torch.float32)
            absent = norms == 0  # of a set, elements that are padding
            problems = {
                f"{kind} features are NaN or infinite": ~norms.isfinite(),
                f"{kind} features are zero": absent if norms.ndim == 1 else absent.all(dim=1),
            }
            if not normalize:
                lowest, highest = torch.where(absent, 1.0, norms).aminmax()
                message = f"{kind} features must be unit vectors, but their norms go from {lowest:.4g} to {highest:.4g}"
                message += "; --normalize (normalize=True) divides by the norms"
                problems[message] = ~absent & ((norms - 1).abs() > NORM_TOLERANCE)
            for problem, wrong in problems.items():
                rows = wrong.reshape(len(wrong), -1).any(dim=1).nonzero().flatten().tolist()
                if rows:
                    first = f"row {rows[0]}" + ("" if ids is None else f" ({kind} id {ids[rows[0]]})")
                    raise UserError(f"{name}: {problem}: {len(rows)} of {len(wrong)} rows, first {first}")
            if normalize:
                features = features / norms.masked_fill(absent, 1).to(features.dtype)[..., None]
            checked[f"{kind}s"] = features
        return replace(self, **checked)

    def with_captions(self, kept: Tensor) -> "Features":
        """Return the same images with some of the captions, given by their indices."""
        caption_ids = self.caption_ids
        return replace(
            self,
            captions=self.captions[kept],
            image_of_caption=self.image_of_caption[kept],
            caption_ids=None if caption_ids is None else tuple(caption_ids[index] for index in kept.tolist()),
        )

    def matches(self, items: "Collection | Features", name: str = "features", expected: str = "the shards") -> None:
        """Compare with the images and captions that these features must be of.

        Args:
            items: images and captions in the order in which the features must be.
            name: of the features' file, for errors.
            expected: name of ``items``, likewise.

        Raises:
            UserError: numbers, captions per image, ids or their order differ; the message spells out how.
        """
        numbers = len(self.images), len(self.captions)
        right_numbers = int(items.image_of_caption.max()) + 1, len(items.image_of_caption)
        if numbers != right_numbers:
            raise UserError(
                f"{name} and {expected} do not belong together: {numbers[0]:,} images with {numbers[1]:,} captions, "
                f"and {right_numbers[0]:,} with {right_numbers[1]:,}"
            )
        for kind in ("image", "caption"):
            ids, right_ids = getattr(self, f"{kind}_ids"), getattr(items, f"{kind}_ids")
            difference = None if None in (ids, right_ids) else id_difference(kind, ids, right_ids, expected)
            if difference:
                raise UserError(f"{name} and {expected} do not belong together: {difference}")
        wrong = (self.image_of_caption != items.image_of_caption).nonzero().flatten()
        if len(wrong):
            row = int(wrong[0])
            raise UserError(
                f"{name} and {expected} do not belong together: {len(wrong):,} captions have another image, the first "
                f"is caption {row} with image {int(self.image_of_caption[row])}, and not "
                f"{int(items.image_of_caption[row])}"
            )

    def similarity(self, device: str | torch.device = "cpu") -> Similarity | None:
        """Return the similarity of sets that ``description`` names; None for vectors, whose cosine it is.

        Raises:
            UserError: ``description`` names none, or not one that exists.
        """
        if self.images.ndim == 2:
            return None
        name = self.description.get("similarity")
        if not isinstance(name, str):
            raise UserError("features are sets, and their description names no similarity, such as 'smooth_chamfer'")
        options = self.description.get("similarity_kwargs") or {}
        return recorded_similarity(name, options).requires_grad_(False).to(device).compute_mat

    def similarities(self, device: str | torch.device = "cpu") -> EmbeddingSimilarities:
        """Return the similarities of all images and captions, to be computed tile by tile on a device."""
        return EmbeddingSimilarities(self.images.to(device), self.captions.to(device), self.similarity(device))

    def _check_shapes(self, name: str) -> None:
        shapes = tuple(self.images.shape), tuple(self.captions.shape)
        same = len(shapes[0]) == len(shapes[1]) and shapes[0][-1:] == shapes[1][-1:]
        if len(shapes[0]) not in (2, 3) or not same or 0 in shapes[0] + shapes[1]:
            raise UserError(
                f"{name}: image and caption features must be (I, D) and (C, D), or sets (I, K, D) and (C, L, D), got "
                f"{shapes[0]} and {shapes[1]}"
            )
        for kind in ("images", "captions"):
            if not getattr(self, kind).is_floating_point():
                raise UserError(f"{name}: {kind[:-1]} features must be floating point, got {getattr(self, kind).dtype}")
        for kind, ids, number in (
            ("image", self.image_ids, shapes[0][0]),
            ("caption", self.caption_ids, shapes[1][0]),
        ):
            if ids is not None and len(ids) != number:
                raise UserError(f"{name}: there are {number:,} {kind}s, but {len(ids):,} {kind} ids")
        if self.image_of_caption.shape != shapes[1][:1] or self.image_of_caption.dtype != torch.int64:
            raise UserError(
                f"{name}: image_of_caption must be int64 of shape {shapes[1][:1]}, one index per caption, got "
                f"{self.image_of_caption.dtype} of shape {tuple(self.image_of_caption.shape)}"
            )
        if int(self.image_of_caption.min()) < 0 or int(self.image_of_caption.max()) >= shapes[0][0]:
            raise UserError(f"{name}: image_of_caption must lie in [0, {shapes[0][0]}), the rows of the image features")
        without = self.image_of_caption.bincount(minlength=shapes[0][0]) == 0
        if without.any():
            row = int(without.nonzero()[0])
            called = "" if self.image_ids is None else f" (image id {self.image_ids[row]})"
            raise UserError(f"{name}: {int(without.sum()):,} images have no caption, first row {row}{called}")


def id_difference(kind: str, ids: Sequence[Id], expected: Sequence[Id], where: str) -> str | None:
    """Say in what the ids of images or captions differ from what is expected; None when they are equal.

    Args:
        kind: ``"image"`` or ``"caption"``.
        ids: what is there.
        expected: what there should be, in order.
        where: who expects it.

    >>> id_difference("image", [3, 1, 2], [1, 2, 3], "the benchmark")
    'the same 3 images are in another order: image 3 stands at place 0, where the benchmark has 1'
    """
    ids, expected = list(ids), list(expected)
    if ids == expected:
        return None
    missing, unknown = _without(expected, ids), _without(ids, expected)
    if missing:
        return f"{len(missing):,} of the {len(expected):,} {kind}s of {where} are missing, such as {missing[0]}"
    if unknown:
        return f"{len(unknown):,} {kind}s are not in {where}, such as {unknown[0]}"
    if len(ids) != len(expected):
        return f"there are {len(ids):,} {kind}s with repetitions, {where} has {len(expected):,}"
    place = next(place for place, pair in enumerate(zip(ids, expected, strict=True)) if pair[0] != pair[1])
    return (
        f"the same {len(ids):,} {kind}s are in another order: {kind} {ids[place]} stands at place {place}, where "
        f"{where} has {expected[place]}"
    )


def _without(names: Sequence[Id], others: Sequence[Id]) -> list[Id]:
    others = set(others)
    return [name for name in names if name not in others]


def describe_similarity(similarity: BaseDistance, *, parameters: bool = True) -> dict[str, Any]:
    """Return what :meth:`Features.similarity` makes the same similarity of: its class, and its options as they are now.

    Args:
        similarity: one of :mod:`vl_plugins.distances`.
        parameters: with those that are trained; without them they are for a state dict to give.

    >>> describe_similarity(create("distance", "SmoothChamferSimilarity", alpha=8.0))["similarity_kwargs"]
    {'alpha': 8.0, 'set_size': 1}
    """
    left_out = {*options_of(BaseDistance), "tiled", *(() if parameters else dict(similarity.named_parameters()))}
    values = {name: getattr(similarity, name) for name in options_of(type(similarity)) if name not in left_out}
    return {
        "similarity": type(similarity).__name__,
        "similarity_kwargs": {
            name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()
        },
    }


def recorded_similarity(name: str, options: Mapping[str, Any]) -> Any:
    """Return the similarity of :func:`describe_similarity`, also of version 0.2, whose ``backend`` is gone."""
    return create("distance", name, **{option: value for option, value in options.items() if option != "backend"})


def features_file(file: str | os.PathLike) -> Path:
    """Return the path of a file of features, to be checked before the work of computing them.

    Raises:
        UserError: a suffix other than ``.npz`` or ``.safetensors``.
        MissingExtraError: safetensors is not installed and needed.
    """
    file = Path(file)
    if file.suffix not in SUFFIXES:
        raise UserError(f"a file of features must end in {' or '.join(SUFFIXES)}, got {file}")
    if file.suffix == ".safetensors":
        require("safetensors", extra="eval")
    return file


def save_features(features: Features, file: str | os.PathLike) -> None:
    """Write features, completely or not at all.

    The file has ``image_features``, ``caption_features`` and ``image_of_caption``, with ``image_ids`` and
    ``caption_ids`` where they are whole numbers; other ids and the description are a JSON text named ``vl_plugins``: in
    ``.npz`` an array of one string, in ``.safetensors`` metadata. ``.npz`` has no bfloat16; it becomes float32.

    Raises:
        UserError: a suffix other than ``.npz`` or ``.safetensors``, or the file cannot be written.
    """
    file = features_file(file)
    tensors = {
        "image_features": features.images,
        "caption_features": features.captions,
        "image_of_caption": features.image_of_caption,
    }
    texts: dict[str, Any] = {"description": dict(features.description)}
    for name in IDS:
        ids = getattr(features, name)
        if ids is None:
            continue
        if all(isinstance(value, int) and abs(value) < 1 << 63 for value in ids):
            tensors[name] = torch.tensor(ids, dtype=torch.int64)
        else:
            texts[name] = list(ids)
    text = json.dumps(texts, ensure_ascii=False)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if file.suffix == ".safetensors":
        data = require("safetensors.torch", extra="eval").save(tensors, metadata={DESCRIPTION: text})
    else:
        arrays = {
            name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in tensors.items()
        }
        buffer = io.BytesIO()
        np.savez(buffer, **arrays, **{DESCRIPTION: np.array(text)})  # type: ignore[arg-type]
        data = buffer.getbuffer()
    write_file(file, data)


def load_features(file: str | os.PathLike) -> Features:
    """Read features that :func:`save_features` or another program wrote.

    Needed are ``image_features`` (I, D) and ``caption_features`` (C, D), or sets, and ``image_of_caption`` (C,), the
    index of each caption's image. ``image_ids`` (I,) and ``caption_ids`` (C,), whole numbers or, in ``.npz``, strings,
    are used where they are there. Nothing in the file is executed.

    Raises:
        UserError: it does not exist, cannot be read, or lacks one of these.
    """
    file = features_file(file)
    if not file.is_file():
        raise UserError(f"features {file}: no such file")
    try:
        arrays, text = (_read_npz if file.suffix == ".npz" else _read_safetensors)(file)
        texts = json.loads(text) if text is not None else {}
        if not isinstance(texts, dict):
            raise ValueError(f"{DESCRIPTION} is not a JSON object")
    # Both readers meet damaged files with many kinds of errors.
    except Exception as error:
        raise UserError(f"features {file} cannot be read: {str(error).strip() or repr(error)}") from error
    for name in TENSORS:
        if name not in arrays:
            raise UserError(f"features {file} has no {name}; it has {', '.join(sorted(arrays)) or 'nothing'}")
    images, captions, image_of_caption = (_tensor(file, name, arrays[name]) for name in TENSORS)
    if image_of_caption.is_floating_point() or image_of_caption.dtype == torch.bool:
        raise UserError(f"features {file}: image_of_caption must be whole numbers, got {image_of_caption.dtype}")
    description = texts.get("description")
    features = Features(
        images=images,
        captions=captions,
        image_of_caption=image_of_caption.to(torch.int64),
        image_ids=_ids(file, "image_ids", arrays, texts),
        caption_ids=_ids(file, "caption_ids", arrays, texts),
        description=description if isinstance(description, dict) else {},
    )
    features._check_shapes(str(file))
    return features


def _read_npz(file: Path) -> tuple[dict[str, Any], str | None]:
    with np.load(file, allow_pickle=False) as arrays:
        wanted = {name: arrays[name] for name in (*TENSORS, *IDS) if name in arrays}
        return wanted, str(arrays[DESCRIPTION]) if DESCRIPTION in arrays else None


def _read_safetensors(file: Path) -> tuple[dict[str, Any], str | None]:
    with require("safetensors", extra="eval").safe_open(file, framework="pt") as tensors:
        wanted = {name: tensors.get_tensor(name) for name in (*TENSORS, *IDS) if name in tensors.keys()}  # noqa: SIM118
        return wanted, (tensors.metadata() or {}).get(DESCRIPTION)


def _tensor(file: Path, name: str, array: Any) -> Tensor:
    try:
        return array if isinstance(array, Tensor) else torch.from_numpy(array)
    except TypeError as error:
        raise UserError(f"features {file}: {name} must be numbers, got {array.dtype}") from error


def _ids(file: Path, name: str, arrays: Mapping[str, Any], texts: Mapping[str, Any]) -> tuple[Id, ...] | None:
    values = arrays[name] if name in arrays else texts.get(name)
    if values is None:
        return None
    values = values if isinstance(values, list) else values.tolist()
    if not isinstance(values, list) or not all(type(value) in (int, str) for value in values):
        raise UserError(f"features {file}: {name} must be a list of whole numbers or strings")
    return tuple(values)
