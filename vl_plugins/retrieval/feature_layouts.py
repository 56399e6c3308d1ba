"""Layouts in which other programs save embeddings: errors that name them, and images that are repeated.

Some programs save a row of images for each caption, so that an image with five captions stands in five rows. Here those
rows become one image. Rows belong together if they have one id or, without ids, if they are equal bit by bit, wherever
they stand: a metric must not depend on the order of the pairs. Two pictures with equal rows therefore become one image.
No ranking can tell them apart, and only ids can.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vl_plugins.errors import UserError

__all__ = [
    "JoinedImages",
    "check_names",
    "check_repeated_images",
    "check_same_image",
    "join_repeated_images",
    "missing_owners",
    "note_repeated_images",
]

# Names in the files of transformers, open_clip, VSE++, clip-retrieval and others are a stem with an ending.
STEMS = {
    "image_features": ("image", "images", "img", "imgs"),
    "caption_features": ("caption", "captions", "cap", "caps", "text", "texts", "txt"),
}
ENDINGS = ("", "emb", "embs", "embed", "embeds", "embedding", "embeddings", "feature", "features", "feats", "vectors")

MOST_DIFFERENT = 0.9  # of the rows; data sets have a few pictures twice
NEARLY_EQUAL = 0.001  # of the norm; the same picture in another batch, in single precision, differs by less
TOLERANCE = 0.05  # of the norm; the same picture in another batch, in half precision, differs by less


def check_names(names: Mapping[str, str], listed: Mapping[str, str], cure: str = "") -> None:
    """Raise ``UserError`` if arrays of embeddings are missing, with those in the file and how to rename them.

    Args:
        names: what the kind of file calls the arrays, by the names of ``ARRAYS``.
        listed: shape or type of each array in the file.
        cure: what to do if no array has a usual name.
    """
    missing = [name for name in names if names[name] not in listed]
    if "image_features" not in missing and "caption_features" not in missing:
        return
    descriptions = [f"{name} {shape}".strip() for name, shape in sorted(listed.items())]
    text = f"must have {', '.join(names[name] for name in missing)}, got {', '.join(descriptions) or 'nothing'}"
    changes = []
    for array in missing:
        candidates = [name for name in sorted(listed) if _is_other_name(name, array)]
        if len(candidates) == 1:
            changes.append(_change(candidates[0], names[array]))
        elif candidates:
            changes.append(f"rename one of {', '.join(candidates)} to {names[array]}")
    if changes:
        cure = " and ".join(changes)
    if cure:
        text += f": {cure}"
    raise UserError(text)


def _is_other_name(name: str, array: str) -> bool:
    """Return whether an array, a column, a file or a folder has a usual name of ``image_features`` or captions."""
    stem, _, ending = name.lower().removesuffix("/").removesuffix(".npy").partition("_")
    return stem in STEMS.get(array, ()) and ending in ENDINGS


def _change(name: str, wanted: str) -> str:
    if name.endswith(".npy") and wanted.endswith("/"):
        return f"move {name} into {wanted}"
    return f"rename {name} to {wanted}"


def missing_owners(name: str, images: Tensor, captions: int) -> UserError:
    """Return the error for features without the image of each caption.

    Args:
        name: what the kind of file calls ``image_of_caption``.
        images: (I, D), or sets.
        captions: number of captions.
    """
    number = len(images)
    start = f"no {name}; "
    if number == captions:
        different = len(_groups(images).first_rows)
        if different <= MOST_DIFFERENT * number:
            cure = "is it one row per caption? use --image-per-caption"
            return UserError(f"{start}{number:,} image rows, {different:,} different: {cure}")
        cure = f"if each image has one caption, in the order of images, save numpy.arange({number})"
        return UserError(f"{start}{number:,} images and as many captions: {cure}")
    if number and captions % number == 0:
        times = captions // number
        cure = f"if captions are in the order of images, save numpy.arange({number}).repeat({times})"
        return UserError(f"{start}{captions:,} captions are {times} times {number:,} images: {cure}")
    return UserError(f"{start}save the index of each caption's image, {captions:,} integers from 0 to {number - 1}")


def check_repeated_images(images: Tensor, image_of_caption: Tensor, image_ids: Sequence[int | str] | None) -> None:
    """Raise ``UserError`` if images have a row for each caption although ids or ``image_of_caption`` are of fewer."""
    rows = len(images)
    if rows != len(image_of_caption) or rows == 0:
        return
    cure = "is it one row per caption? use --image-per-caption"
    if image_ids is not None and len(image_ids) == rows and len(set(image_ids)) < rows:
        raise UserError(f"{rows:,} image rows, {len(set(image_ids)):,} different image_ids: {cure}")
    named = len(image_of_caption.unique())
    if named < rows and named - 1 == image_of_caption.max():
        raise UserError(f"{rows:,} image rows, of which image_of_caption names {named:,}: {cure}")


def note_repeated_images(images: Tensor, image_of_caption: Tensor, image_ids: Sequence[int | str] | None) -> str | None:
    """Return a sentence if each image has one caption but many rows of images are equal, otherwise None.

    Recall is low then, because equal images tie. That is right for a model whose images are equal, so it is no error.
    """
    if len(images) != len(image_of_caption) or not _is_range(image_of_caption):
        return None
    different = len(_groups(images).first_rows)
    if different > MOST_DIFFERENT * len(images):
        return _note_neighbors(images)
    cure = "use --image-per-caption"
    if image_ids is not None and len(set(image_ids)) == len(image_ids):
        cure = "give the rows of one image one id, and use --image-per-caption"
    state = f"{len(images):,} image rows, {different:,} different, each with one caption"
    return f"{state}: if images are repeated for their captions, {cure}"


def _note_neighbors(images: Tensor) -> str | None:
    """Return a sentence if many rows hardly differ from the row before, as the same picture in another batch does."""
    rows = images.flatten(1).double()
    difference = torch.linalg.vector_norm(rows[1:] - rows[:-1], dim=1)
    is_close = difference <= NEARLY_EQUAL * torch.linalg.vector_norm(rows[1:], dim=1)
    if int(is_close.sum()) < (1 - MOST_DIFFERENT) * len(images):
        return None
    state = f"{int(is_close.sum()):,} of {len(images):,} image rows hardly differ from the row before"
    return f"{state}: if images are repeated for their captions, add image_ids and use --image-per-caption"


class JoinedImages(NamedTuple):
    """Images without repeated rows, in the order of their first rows, and the image of each caption.

    ``note`` is a sentence if numbers of captions differ and no ids tell images apart.
    """

    images: Tensor
    image_of_caption: Tensor
    image_ids: list[int | str] | None
    note: str | None


def join_repeated_images(
    images: Tensor, captions: int, image_of_caption: Tensor | None, image_ids: Sequence[int | str] | None
) -> JoinedImages:
    """Return one row for each image, where there was one for each caption.

    Images that are fewer than captions, with the image of each caption, are returned as they are: of several files,
    some may repeat images.

    Args:
        images: (C, D), or sets; row c is the image of caption c.
        captions: C.
        image_of_caption: None, or 0, 1, ... C - 1, or the number of the image that each row shows.
        image_ids: of each row, or None if equal rows are one image.

    Raises:
        UserError: images do not have a row for each caption, no rows belong together, all rows are equal without ids,
            or rows of one id differ.
    """
    flag = "--image-per-caption"
    if image_of_caption is not None and len(images) < captions:
        ids = None if image_ids is None else list(image_ids)
        return JoinedImages(images, image_of_caption, ids, None)
    if len(images) != captions:
        raise UserError(f"{flag} needs an image row for each caption, got {len(images):,} and {captions:,}")
    if image_ids is not None and len(image_ids) != len(images):
        raise UserError(f"{flag} needs an id of each of the {len(images):,} image rows, got {len(image_ids):,}")
    keys = image_ids
    if keys is None and image_of_caption is not None and not _is_range(image_of_caption):
        keys = image_of_caption.tolist()
    groups = _groups(images, keys)
    first_rows, number = groups.first_rows, len(groups.first_rows)
    if keys is None:
        if number == len(images):
            raise UserError(
                f"all {number:,} image rows differ, so that {flag} joins nothing: leave it out, or add image_ids if "
                "rows of one image differ in their last bits"
            )
        if number == 1:
            raise UserError(f"all {len(images):,} image rows are equal: {flag} needs image_ids")
        return JoinedImages(images[first_rows], torch.tensor(groups.group_of_row), None, _note_sizes(groups))
    if image_ids is not None and number == len(images):
        raise UserError(f"all {number:,} image_ids differ, so that {flag} joins nothing: leave it out")
    for row, group in enumerate(groups.group_of_row):
        check_same_image(images[first_rows[group]], images[row], keys[row])
    ids = None
    if image_ids is not None:
        ids = [image_ids[row] for row in first_rows]
    return JoinedImages(images[first_rows], torch.tensor(groups.group_of_row), ids, None)


def check_same_image(first: Tensor, row: Tensor, image_id: int | str) -> None:
    """Raise ``UserError`` if two embeddings of one id differ by more than the rounding of half precision."""
    if torch.equal(first, row):
        return
    difference = torch.linalg.vector_norm(row.double() - first.double())
    if not difference <= TOLERANCE * torch.linalg.vector_norm(first.double()):  # NaN differs
        raise UserError(f"image rows with id {image_id!r} differ: ids must tell images apart")


class _Groups(NamedTuple):
    first_rows: list[int]
    group_of_row: list[int]


def _groups(images: Tensor, keys: Sequence[int | str | bytes] | None = None) -> _Groups:
    """Return rows that belong together: those of equal keys, or rows that are equal bit by bit."""
    group_of_key: dict[int | str | bytes, int] = {}
    groups = _Groups([], [])
    if keys is None:
        keys = [_digest(row) for row in images]
    for row, key in enumerate(keys):
        if key not in group_of_key:
            group_of_key[key] = len(group_of_key)
            groups.first_rows.append(row)
        groups.group_of_row.append(group_of_key[key])
    return groups


def _digest(row: Tensor) -> bytes:
    return hashlib.blake2b(row.contiguous().view(torch.uint8).numpy().data, digest_size=16).digest()


def _note_sizes(groups: _Groups) -> str | None:
    sizes = np.bincount(groups.group_of_row)
    if sizes.min() == sizes.max():
        return None
    return (
        f"equal image rows became {len(sizes):,} images with {sizes.min()} to {sizes.max()} captions: "
        "if rows of one image differ in their last bits, or different images have equal rows, add image_ids"
    )


def _is_range(image_of_caption: Tensor) -> bool:
    return torch.equal(image_of_caption, torch.arange(len(image_of_caption)))
