"""Recall@K, RSUM, median and mean rank, mAP@R and R-Precision, and a table of them."""

from collections.abc import Mapping

from vl_plugins.retrieval.ranks import Ranks
from vl_plugins.tables import align_columns

__all__ = ["format_metrics_table", "metrics_table", "retrieval_metrics"]

RECALL_AT = (1, 5, 10)
DIRECTIONS = {"image_to_text": "i2t", "text_to_image": "t2i"}


def retrieval_metrics(ranks: Ranks) -> dict[str, float]:
    """Return metrics under open_clip's names, and as open_clip recalls and precisions as fractions [0, 1].

    For ``image_to_text`` and ``text_to_image``:

    - ``*_R@K``: queries with a rank of at most K, 1, 5 and 10.
    - ``*_mean_rank``, ``*_median_rank``: 1 is the best; the median of an even number of queries is halfway between the
      two middle ranks, which open_clip rounds down.
    - ``*_mean_average_precision_at_r``, ``*_r_precision``: see :func:`vl_plugins.retrieval.similarity_ranks`.

    Over both directions:

    - ``rsum``: R@1, R@5 and R@10 of both directions added, in percent as it is quoted everywhere, [0, 600].
    - ``positive_similarity``: mean over all right pairs; ``hardest_negative_similarity``: mean over the queries. Both
      are averaged over the directions.

    Args:
        ranks: of :func:`vl_plugins.retrieval.retrieval_ranks`.

    >>> import torch
    >>> from vl_plugins.retrieval import retrieval_ranks
    >>> metrics = retrieval_metrics(retrieval_ranks(torch.eye(4), torch.eye(4), torch.tensor([0, 1, 3, 2])))
    >>> metrics["image_to_text_R@1"], metrics["text_to_image_median_rank"], metrics["rsum"]
    (0.5, 2.5, 500.0)
    """
    metrics: dict[str, float] = {}
    for name, direction in zip(DIRECTIONS, ranks, strict=True):
        rank = direction.rank.double()
        values = {f"R@{k}": (rank <= k).double().mean() for k in RECALL_AT}
        values |= {"mean_rank": rank.mean(), "median_rank": rank.quantile(0.5)}
        values["mean_average_precision_at_r"] = direction.average_precision.mean()
        values["r_precision"] = direction.r_precision.mean()
        metrics |= {f"{name}_{metric}": value.item() for metric, value in values.items()}
    metrics["rsum"] = sum(100 * metrics[f"{name}_R@{k}"] for name in DIRECTIONS for k in RECALL_AT)
    positive = [part.positive_similarity.double().mean().item() for part in ranks]
    hardest = [part.negative_similarity[:, 0].double().mean().item() for part in ranks]
    metrics |= {"positive_similarity": sum(positive) / 2, "hardest_negative_similarity": sum(hardest) / 2}
    return metrics


def metrics_table(results: Mapping[str, Mapping[str, float]], judged: bool = False) -> list[list[str]]:
    """Return a heading and a row for each named result, recalls and precisions in percent, ``-`` for what is missing.

    Args:
        results: metrics of :func:`retrieval_metrics` by name.
        judged: mAP@R, R-Precision and R@1, as ECCV Caption reports them, in place of recalls and median ranks.
    """
    columns = {"R@1": "R@1", "R@5": "R@5", "R@10": "R@10", "median": "median_rank"}
    if judged:
        columns = {"mAP@R": "mean_average_precision_at_r", "R-P": "r_precision", "R@1": "R@1"}
    keys = [f"{direction}_{metric}" for direction in DIRECTIONS for metric in columns.values()]
    heading = [
        f"{label} {column}" if number == 0 else column
        for label in DIRECTIONS.values()
        for number, column in enumerate(columns)
    ]
    rows = [["", *heading, *(["RSUM"] if not judged else [])]]
    for name, metrics in results.items():
        scale = {key: 1 if key.endswith("rank") else 100 for key in keys} | ({} if judged else {"rsum": 1})
        rows.append([name, *(f"{scale[key] * metrics[key]:.1f}" if key in metrics else "-" for key in scale)])
    return rows


def format_metrics_table(results: Mapping[str, Mapping[str, float]], judged: bool = False) -> str:
    """Return :func:`metrics_table` as text.

    >>> metrics = {"image_to_text_R@1": 0.125, "image_to_text_R@5": 0.5, "image_to_text_median_rank": 5.5}
    >>> print(format_metrics_table({"clip": metrics}))
          i2t R@1   R@5  R@10  median  t2i R@1  R@5  R@10  median  RSUM
    clip     12.5  50.0     -     5.5        -    -     -       -     -
    """
    return "\n".join("  ".join(row) for row in align_columns(metrics_table(results, judged)))
