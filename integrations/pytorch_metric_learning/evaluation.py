"""Retrieval metrics of two towers, ours and those of pytorch-metric-learning's ``AccuracyCalculator``."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pytorch_metric_learning.distances import BaseDistance, CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN

from vl_plugins.integrations.pytorch_metric_learning.models import TwoTowers
from vl_plugins.registry import construct
from vl_plugins.retrieval.encoding import Encoded, encode_batches, join, validation_metrics
from vl_plugins.retrieval.metrics import DIRECTIONS
from vl_plugins.utils.errors import UserError

__all__ = ["ACCURACY", "accuracies", "evaluate_towers"]

ACCURACY = "accuracy_calculator"
"""What the names of its metrics begin with, since some mean nearly the same as ours: a tie is no error there."""

# Of all that AccuracyCalculator has, what is defined for retrieval; others by the configuration.
DEFAULTS = {"include": ("precision_at_1", "mean_average_precision_at_r", "r_precision"), "k": "max_bin_count"}
QUERIES_AT_ONCE = 256


def evaluate_towers(
    towers: TwoTowers,
    batches: Iterable,
    device: torch.device | str,
    accuracy: Mapping[str, Any] | bool = True,
) -> dict[str, float]:
    """Return retrieval metrics of all images and all captions, rates in percent.

    Args:
        towers: in evaluation mode on ``device``.
        batches: of :func:`vl_plugins.data.reader.evaluation_pipeline`.
        device: where the towers are.
        accuracy: options of ``AccuracyCalculator``, whose metrics are there too, in percent, under
            ``accuracy_calculator/<direction>_<metric>_percent``; True for its defaults here, False for none.
    """
    encoded = join(encode_batches(towers, batches, device))
    similarity = None if towers.similarity is None else copy.deepcopy(towers.similarity).cpu()
    metrics = validation_metrics(encoded, None if similarity is None else similarity.compute_mat)
    if accuracy is not False:
        metrics |= accuracies(encoded, similarity or CosineSimilarity(), {} if accuracy is True else accuracy)
    return metrics


def accuracies(encoded: Encoded, distance: BaseDistance, options: Mapping[str, Any]) -> dict[str, float]:
    """Return what ``AccuracyCalculator`` finds with images as queries and captions as references, and the reverse.

    Its numbers are fractions; here they are in percent, as all others of a training.

    Raises:
        UserError: invalid options.
    """
    # On the CPU as ours; the host's own default for nearest neighbours is FAISS, which knows no sets.
    knn = CustomKNN(distance, batch_size=QUERIES_AT_ONCE)
    given = {**DEFAULTS, "knn_func": knn, "device": torch.device("cpu"), **options}
    try:
        calculator = construct("section", "accuracy", AccuracyCalculator, given)
    except ValueError as error:
        raise UserError(f"accuracy: {error}") from error
    images = encoded.images, torch.arange(len(encoded.images))
    captions = encoded.captions, encoded.image_of_caption
    return {
        f"{ACCURACY}/{direction}_{name}_percent": 100 * float(value)
        for direction, sides in zip(DIRECTIONS, ((images, captions), (captions, images)), strict=True)
        for name, value in calculator.get_accuracy(*sides[0], *sides[1]).items()
    }
