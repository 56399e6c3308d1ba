"""Recalls of image-text retrieval as an evaluator of sentence-transformers."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vl_plugins.data.captions import is_blank
from vl_plugins.integrations.sentence_transformers.host import BaseEvaluator, MultiVectorEncoder
from vl_plugins.integrations.sentence_transformers.inputs import check_path
from vl_plugins.integrations.sentence_transformers.scoring import join_sets
from vl_plugins.retrieval import retrieval_metrics, retrieval_ranks

__all__ = ["CrossModalRetrievalEvaluator"]

INPUTS = 1024  # images given to the model at a time, because those that were decoded stay in memory
METRICS = tuple(f"{way}_{name}" for way in ("image_to_text", "text_to_image") for name in ("R@1", "R@5", "R@10"))
METRICS += ("image_to_text_median_rank", "text_to_image_median_rank", "rsum")


class CrossModalRetrievalEvaluator(BaseEvaluator):
    """Recall@1, 5 and 10 and median rank, image to text and text to image, and RSUM, the primary metric.

    The ranks are exact, and ties count against the model. Recalls are fractions under open_clip's names, such as
    ``image_to_text_R@1``; RSUM is their sum in percent, [0, 600].

    Args:
        images: R inputs of the model, such as PIL images or paths of pictures, given to ``encode_query``.
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
        ValueError: the numbers of images, captions and ids differ, a caption is blank or no text, an image has no
            caption, or, in a call, a path is that of no picture; the message names the row.
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
        if image_ids is None:
            image_ids = range(len(images))
        elif isinstance(image_ids, Tensor):
            image_ids = image_ids.tolist()  # equal tensors have different hashes
        texts = _checked_captions(captions)
        _check_number(len(images), texts, image_ids)
        row_of_image: dict[Any, int] = {}  # the first of its rows, in the order of the images
        index_of_image: dict[Any, int] = {}
        self.captions: list[str] = []
        owners = []
        for row, (image_id, texts_of_row) in enumerate(zip(image_ids, texts, strict=True)):
            row_of_image.setdefault(image_id, row)
            index = index_of_image.setdefault(image_id, len(index_of_image))
            self.captions += texts_of_row
            owners += [index] * len(texts_of_row)
        with_captions = set(owners)
        for image_id, row in row_of_image.items():
            if index_of_image[image_id] not in with_captions:
                raise ValueError(f"captions[{row}] is empty: every image needs at least one caption")
        self.images, self.rows = images, list(row_of_image.values())
        self.image_of_caption = torch.tensor(owners)
        self.name, self.batch_size, self.similarity_fct = name, batch_size, similarity_fct
        self.write_csv = write_csv
        prefix = f"{name}_" if name else ""
        self.csv_file = f"Cross-Modal-Retrieval_evaluation_{prefix}results.csv"
        self.primary_metric = "rsum"

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Return the metrics of a model by name, which the trainer logs; see ``write_csv`` for ``output_path``."""
        images, captions = self._encode(model)
        similarity, is_cosine = self.similarity_fct or model.similarity, False
        if not isinstance(model, MultiVectorEncoder) and similarity == model.similarity:
            is_cosine = model.similarity_fn_name == "cosine"
        if is_cosine:
            similarity = None  # plain products, of which equal ones tie
        ranks = retrieval_ranks(images, captions, self.image_of_caption, similarity, normalize=is_cosine)
        values = retrieval_metrics(ranks)
        metrics = {metric: values[metric] for metric in METRICS}
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

    def _encode(self, model: Any) -> tuple[Tensor, Tensor]:
        """Return the embeddings of the images and of the captions, or sets with zeros as padding."""
        options: dict[str, Any] = {"batch_size": self.batch_size}
        if not isinstance(model, MultiVectorEncoder):
            options["convert_to_tensor"] = True
        image_embeddings: list[Tensor] = []
        for start in range(0, len(self.rows), INPUTS):
            images = []
            for row in self.rows[start : start + INPUTS]:
                image = self.images[row]
                check_path(f"images[{row}]", image)
                images.append(image)
            image_embeddings += model.encode_query(images, **options)
        caption_embeddings = model.encode_document(self.captions, **options)
        if isinstance(model, MultiVectorEncoder):
            return join_sets(image_embeddings), join_sets(caption_embeddings)
        return torch.stack(image_embeddings), caption_embeddings


def _checked_captions(captions: Sequence[str | Sequence[str]]) -> list[list[str]]:
    """Return the captions of each row as a list.

    Raises:
        ValueError: a caption is blank or no text.
    """
    if isinstance(captions, str):
        raise ValueError(f"captions must be a list with captions of each image, got the text {captions!r}")
    texts = []
    for row, captions_of_row in enumerate(captions):
        if isinstance(captions_of_row, str):
            _check_caption(f"captions[{row}]", captions_of_row)
            texts.append([captions_of_row])
            continue
        if not isinstance(captions_of_row, Iterable) or isinstance(captions_of_row, (Mapping, bytes)):
            raise ValueError(f"captions[{row}] must be a caption or a list of captions, got {captions_of_row!r}")
        texts_of_row = list(captions_of_row)
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
    for name, contents, rows in (("captions", "captions", captions), ("image_ids", "an id", image_ids)):
        expected = f"expected {contents} of each of {images} images, got {len(rows)}"
        if len(rows) < images:
            raise ValueError(f"{name}[{len(rows)}] is missing: {expected}")
        if len(rows) > images:
            raise ValueError(f"{name}[{images}] is of no image: {expected}")


def _is_first_process() -> bool:
    """Return whether this is the one of several processes that writes files."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return True
    return torch.distributed.get_rank() == 0
