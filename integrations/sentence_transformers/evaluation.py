"""Recalls of image-text retrieval as an evaluator of sentence-transformers."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.evaluation import BaseEvaluator
from torch import Tensor

from vl_plugins.data.captions import is_blank
from vl_plugins.integrations.sentence_transformers.scoring import join_sets
from vl_plugins.retrieval import retrieval_metrics, retrieval_ranks

__all__ = ["CrossModalRetrievalEvaluator"]

INPUTS = 1024  # given to the model at a time, because images that were decoded stay in memory
METRICS = tuple(f"{way}_{name}" for way in ("image_to_text", "text_to_image") for name in ("R@1", "R@5", "R@10"))
METRICS += ("image_to_text_median_rank", "text_to_image_median_rank", "rsum")


class CrossModalRetrievalEvaluator(BaseEvaluator):
    """Recall@1, 5 and 10 and median rank, image to text and text to image, and RSUM, the primary metric.

    The ranks are exact, and ties count against the model. Recalls are fractions under open_clip's names, such as
    ``image_to_text_R@1``; RSUM is their sum in percent, [0, 600].

    Args:
        images: R inputs of the model, such as PIL images, given to ``encode_query``.
        captions: for each of them a caption or a list of captions, given to ``encode_document``. They are not
            blank, and every image has at least one, in any of its rows.
        image_ids: R hashable ids, or a tensor (R,); rows of one id are one image. By default each row is another one.
        name: of the data, a prefix of the metrics.
        batch_size: of encoding.
        write_csv: append a row to ``Cross-Modal-Retrieval_evaluation_<name>_results.csv`` at each evaluation with an
            output path, as the trainer gives one: epoch, steps and the metrics, as the evaluators of the library do.
        similarity_fct: from images (i, D) and captions (c, D), or sets with zeros as padding, to similarities (i, c),
            such as :func:`smooth_chamfer_scores`. By default ``model.similarity``.

    Raises:
        ValueError: the numbers of images, captions and ids differ, a caption is blank or no text, or an image has no
            caption; the message names the row.
    """

    def __init__(
        self,
        images: Sequence[Any],
        captions: Sequence[str | Sequence[str]],
        image_ids: Sequence[Any] | Tensor | None = None,
        name: str = "",
        batch_size: int = 32,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] | None = None,
        write_csv: bool = True,
    ):
        super().__init__()
        if isinstance(image_ids, Tensor):
            image_ids = image_ids.tolist()  # equal tensors have different hashes
        image_ids = list(range(len(images)) if image_ids is None else image_ids)
        texts = _checked_captions(captions)
        _check_number(len(images), texts, image_ids)
        row_of_image = {image_id: row for row, image_id in enumerate(image_ids)}  # any of its rows
        place = {image_id: place for place, image_id in enumerate(row_of_image)}
        owners = []
        for image_id, texts_of_row in zip(image_ids, texts, strict=True):
            owners += [place[image_id]] * len(texts_of_row)
        with_captions = set(owners)
        for row, image_id in enumerate(image_ids):
            if place[image_id] not in with_captions:
                raise ValueError(f"captions[{row}] is empty: every image needs at least one caption")
        self.images, self.rows = images, list(row_of_image.values())
        self.captions, self.image_of_caption = list(chain.from_iterable(texts)), torch.tensor(owners)
        self.name, self.batch_size, self.similarity_fct = name, batch_size, similarity_fct
        self.write_csv = write_csv
        self.csv_file = "_".join(filter(None, ("Cross-Modal-Retrieval_evaluation", name, "results.csv")))
        self.primary_metric = "rsum"

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Return the metrics of a model by name, which the trainer logs; see ``write_csv`` for ``output_path``."""
        options = {} if isinstance(model, MultiVectorEncoder) else {"convert_to_tensor": True}
        images = self._encode(model.encode_query, self.images, self.rows, options)
        captions = self._encode(model.encode_document, self.captions, range(len(self.captions)), options)
        similarity, is_cosine = self.similarity_fct or model.similarity, False
        if isinstance(model, MultiVectorEncoder):
            images, captions = join_sets(images), join_sets(captions)
        else:
            images, captions = torch.stack(images), torch.stack(captions)
            if similarity == model.similarity and model.similarity_fn_name == "cosine":  # as products, which tie
                similarity, is_cosine = None, True
        ranks = retrieval_ranks(images, captions, self.image_of_caption, similarity, normalize=is_cosine)
        found = retrieval_metrics(ranks)
        metrics = {metric: found[metric] for metric in METRICS}
        if output_path is not None and self.write_csv and _is_first_process():
            self._append_row(Path(output_path, self.csv_file), [epoch, steps, *metrics.values()])
        metrics = self.prefix_name_to_metrics(metrics, self.name)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    def _append_row(self, file: Path, values: Sequence[float]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not file.exists()
        with open(file, "a", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            if is_new:
                writer.writerow(["epoch", "steps", *METRICS])
            writer.writerow(values)

    def _encode(self, encode: Callable[..., Any], inputs: Any, rows: Sequence[int], options: dict) -> list[Tensor]:
        parts = [[inputs[row] for row in rows[start : start + INPUTS]] for start in range(0, len(rows), INPUTS)]
        return [row for part in parts for row in encode(part, batch_size=self.batch_size, **options)]


def _checked_captions(captions: Sequence[str | Sequence[str]]) -> list[list[str]]:
    """Return the captions of each row as a list.

    Raises:
        ValueError: a caption is blank or no text.
    """
    if isinstance(captions, str):
        raise ValueError(f"captions must be a list with captions of each image, got the text {captions!r}")
    texts = []
    for row, given in enumerate(captions):
        if isinstance(given, str):
            _check_caption(f"captions[{row}]", given)
            texts.append([given])
            continue
        if not isinstance(given, Iterable) or isinstance(given, (Mapping, bytes)):
            raise ValueError(f"captions[{row}] must be a caption or a list of captions, got {given!r}")
        texts_of_row = list(given)
        for number, text in enumerate(texts_of_row):
            _check_caption(f"captions[{row}][{number}]", text)
        texts.append(texts_of_row)
    return texts


def _check_caption(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a text, got {text!r}")
    if is_blank(text):
        raise ValueError(f"{name} is blank: leave it out, and its image if it has no other")


def _check_number(images: int, captions: Sequence[Any], image_ids: Sequence[Any]) -> None:
    """Raise ``ValueError`` unless there are captions and an id of each image."""
    if images == 0:
        raise ValueError("images must be at least one, got none")
    for name, what, rows in (("captions", "captions", captions), ("image_ids", "an id", image_ids)):
        expected = f"expected {what} of each of {images} images, got {len(rows)}"
        if len(rows) < images:
            raise ValueError(f"{name}[{len(rows)}] is missing: {expected}")
        if len(rows) > images:
            raise ValueError(f"{name}[{images}] is of no image: {expected}")


def _is_first_process() -> bool:
    """Return whether this is the one of several processes that writes files."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return True
    return torch.distributed.get_rank() == 0
