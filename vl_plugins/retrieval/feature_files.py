"""Reading and writing of features: ``.npz``, ``.safetensors``, Parquet, and folders of ``.npy``."""

import contextlib
import io
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vl_plugins.data.files import write_file
from vl_plugins.errors import MissingExtraError, UserError, require, user_errors, warn_of_input
from vl_plugins.retrieval.embeddings import Features, OneSide
from vl_plugins.retrieval.feature_arrays import (
    ARRAYS,
    IDS,
    MOST_DECLARED,
    Content,
    check_header,
    read_array,
    read_header,
    tensor_from_array,
)
from vl_plugins.retrieval.feature_folders import check_folder, read_folder, write_folder
from vl_plugins.retrieval.feature_layouts import (
    check_names,
    check_repeated_images,
    join_repeated_images,
    missing_owners,
    note_repeated_images,
)
from vl_plugins.retrieval.feature_tables import read_parquet
from vl_plugins.retrieval.norms import divided_by_norms

__all__ = ["SUFFIXES", "check_features_file", "is_folder_name", "load_features", "save_features"]

SUFFIXES = (".safetensors", ".npz")
METADATA = "vl_plugins"  # key of the JSON text with the ids and the description
NAMES = {name: name for name in ARRAYS}
SAVE = "image_features=..., caption_features=..., image_of_caption=..."
CAN_RUN_CODE = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib")


def is_folder_name(file: str | os.PathLike) -> bool:
    """Return whether features of this name are written as a folder: it is one, or has no ending."""
    return Path(file).suffix == "" or Path(file).is_dir()


def check_features_file(file: str | os.PathLike) -> None:
    """Raise ``UserError`` if features cannot be written to a file or folder of this name, before they are computed."""
    path = Path(file)
    if is_folder_name(file):
        check_folder(file)
    elif path.suffix == ".safetensors":
        require("safetensors", extra="judge")
    elif path.suffix not in SUFFIXES:
        raise UserError(
            f"a file of features must end in {' or '.join(SUFFIXES)}, got {file}; a name without an ending is a folder"
        )


def save_features(features: Features | OneSide, file: str | os.PathLike) -> None:
    """Write features as ``.npz``, ``.safetensors`` or a folder of ``.npy``, completely or not at all.

    ``image_features``, ``caption_features`` and ``image_of_caption`` are arrays; ids and description are a JSON text
    named ``vl_plugins``, an array of one string in ``.npz`` and metadata in ``.safetensors``. NumPy has no bfloat16,
    which becomes float32 in ``.npz`` and in folders.

    Args:
        features: of vectors or of sets. Those of one side have its array alone, and are not for :func:`load_features`.
        file: a name without an ending is a folder; :mod:`vl_plugins.retrieval.feature_folders` describes it. A folder
            of features there is replaced, one of anything else is an error.
    """
    check_features_file(file)
    tensors = _tensors(features)
    values = _values(features)
    if Path(file).suffix == ".safetensors" and not is_folder_name(file):
        save = require("safetensors.torch", extra="judge").save
        write_file(file, save(tensors, metadata={METADATA: json.dumps(values)}))
        return
    arrays = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        arrays[name] = tensor.numpy()
    if is_folder_name(file):
        write_folder(arrays, values, file)
        return
    arrays[METADATA] = np.array(json.dumps(values))
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]
    write_file(file, stream.getbuffer())


def _tensors(features: Features | OneSide) -> dict[str, Tensor]:
    """Return the arrays of features by name, contiguous and on the CPU."""
    if isinstance(features, OneSide):
        tensors = {f"{features.side}_features": features.embeddings}
    else:
        tensors = {
            "image_features": features.images,
            "caption_features": features.captions,
            "image_of_caption": features.image_of_caption,
        }
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _values(features: Features | OneSide) -> dict[str, Any]:
    """Return the ids that features have, and their description."""
    values: dict[str, Any] = {"description": features.description}
    if isinstance(features, OneSide):
        values[f"{features.side}_ids"] = list(features.ids)
        return values
    for name in IDS:
        ids = getattr(features, name)
        if ids is not None:
            values[name] = list(ids)
    return values


def load_features(file: str | os.PathLike, *, normalize: bool = False, image_per_caption: bool = False) -> Features:
    """Read features that :func:`save_features` or another program wrote; nothing in the file is executed.

    Needed are ``image_features`` (I, D) and ``caption_features`` (C, D), or sets, and ``image_of_caption`` (C,), the
    index of each caption's image. ``image_ids`` (I,) and ``caption_ids`` (C,), integers or strings, may be arrays too.
    Folders and Parquet are as :mod:`vl_plugins.retrieval.feature_folders` and
    :mod:`vl_plugins.retrieval.feature_tables` describe them.

    Args:
        file: ``.npz``, ``.safetensors``, ``.parquet``, or a folder.
        normalize: divide embeddings by their norms; otherwise they must be unit vectors.
        image_per_caption: the file may have a row of images for each caption. Rows with one of ``image_ids`` or of
            ``image_of_caption`` become one image or, without these, rows that are equal bit by bit. A file whose images
            are fewer than its captions is read as it is.

    Raises:
        UserError: the file cannot be read, is not as :class:`Features` must be, or has ids that contradict each other.

    Warns:
        InputWarning: each image has one caption, but images repeat as if they stood there once for each caption; or
            equal rows were joined, and images have different numbers of captions now.
    """
    with _errors_of(file):
        content = _read(file)
        features, note = _features(content, normalize, image_per_caption)
    if note:
        warn_of_input(f"features {file}: {note}")
    return features


@contextlib.contextmanager
def _errors_of(file: str | os.PathLike) -> Iterator[None]:
    """Put the name of the file before each error of its content."""
    subject = f"features {file}"
    with user_errors(subject, Exception):
        try:
            yield
        except MissingExtraError:
            raise
        except UserError as error:
            raise UserError(f"{subject}: {str(error).removeprefix('features ')}") from error


def _read(file: str | os.PathLike) -> Content:
    path = Path(file)
    if path.is_dir():
        return read_folder(path)
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        return _read_safetensors(path)
    if suffix == ".npz":
        return _read_npz(path)
    if suffix == ".parquet":
        return read_parquet(path)
    save = f"numpy.savez('{path.stem}.npz', {SAVE})"
    if suffix == ".npy":
        raise UserError(f"is one array, and images and captions are needed: {save}")
    if suffix in CAN_RUN_CODE:
        raise UserError(f"is not read, because {suffix} files can run code: load it where you trust it, then {save}")
    if not suffix and not path.exists():
        raise UserError("there is no such folder")
    raise UserError(f"must be a folder or end in {', '.join(SUFFIXES)} or .parquet")


def _read_safetensors(file: Path) -> Content:
    tensors, listed, values = {}, {}, {}
    with require("safetensors", extra="judge").safe_open(file, framework="pt") as opened:
        text = (opened.metadata() or {}).get(METADATA, "{}")
        for name in opened.keys():  # noqa: SIM118
            shape = opened.get_slice(name).get_shape()
            listed[name] = str(tuple(shape))
            if name in ARRAYS:
                tensors[name] = opened.get_tensor(name)
            elif name in IDS:
                values[name] = opened.get_tensor(name).tolist()
    return Content(tensors, _with_text(values, text), NAMES, listed)


def _read_npz(file: Path) -> Content:
    tensors, listed, values, text = {}, {}, {}, "{}"
    if not zipfile.is_zipfile(file):
        raise UserError(f"it is cut off or empty, or no .npz: {os.path.getsize(file):,} bytes")
    with zipfile.ZipFile(file) as archive:
        declared = sum(member.file_size for member in archive.infolist())
        if declared > MOST_DECLARED * os.path.getsize(file):
            raise UserError(f"{declared:,} bytes, compressed more than {MOST_DECLARED} times")
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                continue
            name = member.filename.removesuffix(".npy")
            with archive.open(member) as stream:
                header = read_header(stream, name)  # type: ignore[arg-type]
            listed[name] = str(header.shape)
            if name not in (*ARRAYS, *IDS, METADATA):
                continue
            check_header(header, name, member.file_size)
            with archive.open(member) as stream:
                array = read_array(stream)  # type: ignore[arg-type]
            if name in ARRAYS:
                tensors[name] = tensor_from_array(array, name)
            elif name in IDS:
                values[name] = array.tolist()
            else:
                text = str(array)
                del listed[name]
    return Content(tensors, _with_text(values, text), NAMES, listed)


def _with_text(values: dict[str, Any], text: str) -> dict[str, Any]:
    """Return ids and description of a JSON text, with the ids that are arrays."""
    described = json.loads(text)
    if not isinstance(described, dict):
        raise UserError(f"must have a JSON object as {METADATA}, got {text[:40]}")
    for name, ids in values.items():
        if described.get(name, ids) != ids:
            raise UserError(f"must have one list of {name}, got two that differ")
    return described | values


def _features(content: Content, normalize: bool, image_per_caption: bool) -> tuple[Features, str | None]:
    """Return the features, and a sentence for the user where their layout is doubtful."""
    cure = f"save all in one file, numpy.savez('NAME.npz', {SAVE})" if content.names == NAMES else ""
    check_names(content.names, content.listed, cure)
    images, captions = content.tensors["image_features"], content.tensors["caption_features"]
    if images.ndim not in (2, 3) or captions.ndim != images.ndim:
        problem = f"must have vectors or sets, got {(*images.shape,)} and {(*captions.shape,)}"
        if images.ndim == 2 and captions.ndim == 3 and len(images) == len(captions):
            _, per_image, width = captions.shape
            owners_cure = f"numpy.arange({len(images)}).repeat({per_image})"
            problem += f": save the captions as array.reshape(-1, {width}), and {owners_cure} as image_of_caption"
        raise UserError(problem)
    owners = _owners(content)
    values = {}
    for name in (*IDS, "description"):
        if content.values.get(name) is not None:
            values[name] = content.values[name]
    for name in IDS:
        if not isinstance(values.get(name, []), list):
            raise UserError(f"must have a list as {name}")
    note = None
    if image_per_caption:
        joined = join_repeated_images(images, len(captions), owners, values.get("image_ids"))
        images, owners, note = joined.images, joined.image_of_caption, joined.note
        if joined.image_ids is not None:
            values["image_ids"] = joined.image_ids
    elif owners is None:
        raise missing_owners(content.names["image_of_caption"], images, len(captions))
    else:
        check_repeated_images(images, owners, values.get("image_ids"))
        note = note_repeated_images(images, owners, values.get("image_ids"))
    if normalize:
        images, captions = divided_by_norms(images), divided_by_norms(captions)
    return Features(images=images, captions=captions, image_of_caption=owners, **values), note


def _owners(content: Content) -> Tensor | None:
    """Return the image of each caption as int64, None if the file does not have it."""
    owners = content.tensors.get("image_of_caption")
    if owners is None:
        return None
    if owners.is_floating_point() or owners.is_complex() or owners.dtype == torch.bool:
        raise UserError(f"must have integers as image_of_caption, got {owners.dtype}: save array.astype(int)")
    return owners.to(torch.int64)
