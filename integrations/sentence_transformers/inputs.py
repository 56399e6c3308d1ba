"""The inputs of a batch, which the data collator of sentence-transformers has turned into tensors, column by column."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vl_plugins.data.randomness import mix_words
from vl_plugins.errors import warn_of_input
from vl_plugins.integrations.sentence_transformers import host

__all__ = ["check_path", "check_texts", "hash_inputs", "warn_of_hard_negatives"]

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HASHED_ROWS = 32  # at a time, because an image has some 150,000 values
# Endings of pictures: those that the host reads, and further ones that it takes for text.
ENDINGS = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tiff", ".webp", ".tif", ".avif", ".heic", ".jp2", ".ppm")

Column = dict[str, Any]


def hash_inputs(column: Column) -> Tensor:
    """Return a 64-bit hash of each row's input, (B,) int64, >= 0, by which equal images or captions are recognized.

    Only tensors reach a loss, neither files nor texts. So the hash is of all pixels or tokens and their places, where
    padding does not count. Different inputs have one hash with a probability of 2^-63. A column ``label`` of image ids
    takes its place for images.

    Raises:
        ValueError: the rows of the column are not rows of its tensors.
    """
    tensors = {}
    for name, value in column.items():
        if isinstance(value, Tensor) and value.ndim > 0 and name != "prompt_length":  # which is of the whole column
            tensors[name] = value
    lengths = {len(tensor) for tensor in tensors.values()}
    if len(lengths) != 1 or "cu_seq_lens_q" in tensors or "offsets" in tensors:
        raise ValueError(
            f"{', '.join(tensors)} cannot be compared by rows: add a column `label` with integer image ids"
        )
    mask = tensors.pop("attention_mask", torch.empty(0))
    hashes = torch.zeros((), dtype=torch.int64)
    for name in sorted(tensors):
        values = tensors[name].reshape(len(tensors[name]), -1)  # (B, N)
        if values.is_floating_point():
            values = values.contiguous().view(INTEGERS[values.element_size()])
        weights = mask if mask.shape == values.shape else values.new_ones(()).expand_as(values)
        sums = []
        for start in range(0, len(values), HASHED_ROWS):
            rows = slice(start, start + HASHED_ROWS)
            weight = weights[rows].long()
            places = mix_words(weight.cumsum(1))
            sums.append((mix_words(values[rows] + places) * weight).sum(1))
        hashes = mix_words(hashes + torch.cat(sums))
    return hashes & torch.iinfo(torch.int64).max


def is_text(column: Column) -> bool:
    """Return whether a column has tokens, and no pictures."""
    return "input_ids" in column and "pixel_values" not in column


def check_path(name: str, value: Any) -> None:
    """Raise ``ValueError`` for a text that is meant to be the path of a picture, but would be embedded as text."""
    if not isinstance(value, str) or host.is_image_path(value):
        return
    if os.path.isfile(value):
        raise ValueError(
            f"{name} is the file {value!r}, whose ending sentence-transformers takes for text: open it by PIL"
        )
    if value.lower().endswith(ENDINGS):
        raise ValueError(
            f"{name} is {value!r}, but there is no such file, so it would be embedded as text: correct the path"
        )


def check_texts(model: nn.Module, columns: Sequence[Column]) -> None:
    """Raise ``ValueError`` if no column has pictures, though the model takes some, and a text is a path to nothing.

    The data collator reads paths as pictures if they exist, and takes the others for text.
    """
    encoder: Any = host.unwrapped(model)
    if not hasattr(encoder, "supports") or not encoder.supports("image") or not all(map(is_text, columns)):
        return
    for column, name in zip(columns, host.column_names(model, len(columns)), strict=True):
        texts = encoder.tokenizer.batch_decode(column["input_ids"], skip_special_tokens=True)
        for row, text in enumerate(texts):
            check_path(f"row {row} of {name}", text.replace(" ", ""))  # tokenizers divide "a.jpg" into three words


def warn_of_hard_negatives(model: nn.Module, columns: Sequence[Column]) -> None:
    """Warn of texts after an image and one caption: further captions of the image need ``num_positives``."""
    if "pixel_values" not in columns[0]:
        return
    negatives = []
    for column, name in zip(columns[2:], host.column_names(model, len(columns))[2:], strict=True):
        if is_text(column) and "negative" not in name.lower():
            negatives.append(name)
    if negatives:
        warn_of_input(
            f"num_positives is 1, so {', '.join(negatives)} are hard negatives, wrong captions of the image; if they "
            f"are captions of it, set num_positives={len(columns) - 1}, else give them names such as negative_1"
        )
