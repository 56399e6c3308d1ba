"""Recall@K, RSUM, median and mean rank from ranks, and a table of them."""

import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vl_plugins.retrieval.ranks import DirectionRanks, Ranks
from vl_plugins.tables import align_columns

__all__ = ["format_metrics_table", "format_precision_table", "precision_at_r", "retrieval_metrics"]

RSUM_RECALLS = (1, 5, 10)
DIRECTIONS = ("image_to_text", "text_to_image")
DIRECTION_LABELS = ("i2t", "t2i")


def retrieval_metrics(ranks: Ranks, recall_at: Sequence[int] = RSUM_RECALLS) -> dict[str, float]:
    """Sum up ranks under the names that open_clip's validation uses.

    For ``image_to_text`` and ``text_to_image``, with open_clip's counterpart where it differs:

    - ``*_R@K``: queries with a rank of at most K, in percent [0, 100]; open_clip gives fractions [0, 1].
    - ``*_mean_rank``: 1 is the best.
    - ``*_median_rank``: 1 is the best; halfway between the two middle ranks of an even number of queries, which
      open_clip rounds down.
    - ``*_mean_average_precision_at_r`` and ``*_r_precision``: see :func:`precision_at_r`, in percent; only where
      the ranks were computed with enough ``negatives``.

    Besides, over both directions:

    - ``rsum``: R@1, R@5 and R@10 of both directions added, [0, 600]; absent where ``recall_at`` lacks one of them.
    - ``positive_similarity``: mean over all right pairs; where the directions have other pairs, averaged over them.
    - ``hardest_negative_similarity``: mean over the images and mean over the captions, averaged.

    Args:
        ranks: of :func:`vl_plugins.retrieval.retrieval_ranks` or :func:`vl_plugins.retrieval.similarity_ranks`.
        recall_at: the K of Recall@K, positive.

    Raises:
        ValueError: a K is not positive.

    >>> import torch
    >>> from vl_plugins.retrieval import retrieval_ranks
    >>> embeddings = torch.eye(4)
    >>> metrics = retrieval_metrics(retrieval_ranks(embeddings, embeddings, torch.tensor([0, 1, 3, 2])))
    >>> metrics["image_to_text_R@1"], metrics["text_to_image_median_rank"], metrics["rsum"]
    (50.0, 2.5, 500.0)
    """
    if any(k < 1 for k in recall_at):
        raise ValueError(f"recall_at must hold positive numbers, got {tuple(recall_at)}")
    metrics = {}
    for name, direction in zip(DIRECTIONS, ranks, strict=True):
        rank = direction.rank.tolist()
        metrics[f"{name}_mean_rank"] = statistics.fmean(rank)
        metrics[f"{name}_median_rank"] = float(statistics.median(rank))
        for k in recall_at:
            metrics[f"{name}_R@{k}"] = 100 * sum(place <= k for place in rank) / len(rank)
        if direction.right_answers.max() <= direction.negatives.shape[1]:
            average_precision, r_precision = precision_at_r(direction)
            metrics[f"{name}_mean_average_precision_at_r"] = 100 * average_precision.mean().item()
            metrics[f"{name}_r_precision"] = 100 * r_precision.mean().item()
    if set(RSUM_RECALLS) <= set(recall_at):
        metrics["rsum"] = sum(metrics[f"{name}_R@{k}"] for name in DIRECTIONS for k in RSUM_RECALLS)
    for similarity in ("positive_similarity", "hardest_negative_similarity"):
        metrics[similarity] = statistics.fmean(getattr(part, similarity).double().mean().item() for part in ranks)
    return metrics


def precision_at_r(direction: DirectionRanks) -> tuple[Tensor, Tensor]:
    r"""Return average precision at R and R-Precision of each query, where R is its number of right answers.

    With :math:`P(i)` the share of right answers among the first :math:`i`, and :math:`h(i)` 1 where the answer at
    place :math:`i` is right and 0 elsewhere,

    .. math:: \text{AP@R} = \frac{1}{R} \sum_{i=1}^{R} h(i) P(i), \qquad \text{R-Precision} = P(R).

    A wrong candidate is placed before a right one of equal similarity.

    Musgrave et al. 2020, "A Metric Learning Reality Check", section 3.2; Chun et al. 2022, "ECCV Caption", section 4.

    Args:
        direction: with at least as many negatives as a query has right answers.

    Returns:
        Two float64 tensors (Q,) in [0, 1].

    Raises:
        ValueError: ``direction`` has fewer negatives.
    """
    right_answers = direction.right_answers
    if direction.negatives.shape[1] < right_answers.max():
        raise ValueError(
            f"queries have up to {int(right_answers.max())} right answers, which need as many negatives; "
            f"got {direction.negatives.shape[1]}"
        )
    query = direction.positive_query
    better_or_equal = (direction.negative_similarity[query] >= direction.positive_similarity[:, None]).sum(dim=1)
    right_up_to_here = 1 + direction.place_in_query()
    place = right_up_to_here + better_or_equal
    hit = place <= right_answers[query]
    counts = right_answers.double()
    average_precision = torch.zeros_like(counts).index_add_(0, query, hit * right_up_to_here.double() / place)
    return average_precision / counts, torch.zeros_like(counts).index_add_(0, query, hit.double()) / counts


def format_metrics_table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Set named results of :func:`retrieval_metrics` side by side: one line each, recalls in percent.

    Args:
        results: name -> metrics; a metric that is missing shows as ``-``.

    Raises:
        ValueError: ``results`` is empty.

    >>> metrics = {"image_to_text_R@1": 12.5, "image_to_text_R@5": 50.0, "image_to_text_median_rank": 5.5}
    >>> print(format_metrics_table({"clip": metrics}))
          i2t R@1   R@5  R@10  median  t2i R@1  R@5  R@10  median  RSUM
    clip     12.5  50.0     -     5.5        -    -     -       -     -
    """
    columns = {"R@1": "R@1", "R@5": "R@5", "R@10": "R@10", "median": "median_rank"}
    return _format_table(results, [*_both_directions(columns), ("RSUM", "rsum")])


def format_precision_table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Set mAP@R, R-Precision and R@1 of named results side by side, as :func:`format_metrics_table` does recalls.

    >>> metrics = {"image_to_text_mean_average_precision_at_r": 31.4, "image_to_text_r_precision": 42.0}
    >>> print(format_precision_table({"clip": metrics}))
          i2t mAP@R   R-P  R@1  t2i mAP@R  R-P  R@1
    clip       31.4  42.0    -          -    -    -
    """
    columns = {"mAP@R": "mean_average_precision_at_r", "R-P": "r_precision", "R@1": "R@1"}
    return _format_table(results, _both_directions(columns))


def _both_directions(columns: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (heading, name of the metric) for each direction, whose first heading names it."""
    return [
        (f"{label} {heading}" if number == 0 else heading, f"{direction}_{metric}")
        for direction, label in zip(DIRECTIONS, DIRECTION_LABELS, strict=True)
        for number, (heading, metric) in enumerate(columns.items())
    ]


def _format_table(results: Mapping[str, Mapping[str, float]], columns: Sequence[tuple[str, str]]) -> str:
    if not results:
        raise ValueError("results must hold at least one named result, got none")
    rows = [["", *(heading for heading, _ in columns)]]
    for name, metrics in results.items():
        rows.append([name, *(f"{metrics[key]:.1f}" if key in metrics else "-" for _, key in columns)])
    return "\n".join("  ".join(row) for row in align_columns(rows))
