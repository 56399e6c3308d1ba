"""Recall@K, RSUM, median and mean rank, mAP@R and R-Precision, and a table of them."""

from collections.abc import Mapping, Sequence

import torch

from vl_plugins.retrieval.ranks import DirectionRanks, Ranks
from vl_plugins.tables import align_columns

__all__ = ["format_metrics_table", "hubness", "metrics_table", "retrieval_metrics"]

RECALL_AT = (1, 5, 10)
DIRECTIONS = {"image_to_text": "i2t", "text_to_image": "t2i"}


def retrieval_metrics(ranks: Ranks, recall_at: Sequence[int] = RECALL_AT) -> dict[str, float]:
    """Return metrics under open_clip's names, and as open_clip recalls and precisions as fractions [0, 1].

    For ``image_to_text`` and ``text_to_image``:

    - ``*_R@K``: queries with a rank of at most K.
    - ``*_mean_rank``, ``*_median_rank``: 1 is the best; the median of an even number of queries is halfway between the
      two middle ranks, which open_clip rounds down.
    - ``*_mean_average_precision_at_r``, ``*_r_precision``: see :func:`vl_plugins.retrieval.similarity_ranks`.

    Over both directions:

    - ``rsum``: R@1, R@5 and R@10 of both directions added, in percent as it is quoted everywhere, [0, 600].
    - ``positive_similarity``: mean over all right pairs; ``hardest_negative_similarity``: mean over the queries. Both
      are averaged over the directions.

    Args:
        ranks: of :func:`vl_plugins.retrieval.retrieval_ranks`.
        recall_at: the K of Recall@K.

    >>> import torch
    >>> from vl_plugins.retrieval import retrieval_ranks
    >>> metrics = retrieval_metrics(retrieval_ranks(torch.eye(4), torch.eye(4), torch.tensor([0, 1, 3, 2])))
    >>> metrics["image_to_text_R@1"], metrics["text_to_image_median_rank"], metrics["rsum"]
    (0.5, 2.5, 500.0)
    """
    metrics: dict[str, float] = {}
    for name, direction in zip(DIRECTIONS, ranks, strict=True):
        rank = direction.rank.double()
        for k in recall_at:
            metrics[f"{name}_R@{k}"] = (rank <= k).double().mean().item()
        metrics[f"{name}_mean_rank"] = rank.mean().item()
        metrics[f"{name}_median_rank"] = rank.quantile(0.5).item()
        metrics[f"{name}_mean_average_precision_at_r"] = direction.average_precision.mean().item()
        metrics[f"{name}_r_precision"] = direction.r_precision.mean().item()
    if set(RECALL_AT) <= set(recall_at):
        metrics["rsum"] = 0.0
        for name in DIRECTIONS:
            for k in RECALL_AT:
                metrics["rsum"] += 100 * metrics[f"{name}_R@{k}"]
    positive = 0.0
    hardest = 0.0
    for direction in ranks:
        positive += direction.positive_similarity.double().mean().item()
        hardest += direction.negative_similarity[:, 0].double().mean().item()
    metrics["positive_similarity"] = positive / 2
    metrics["hardest_negative_similarity"] = hardest / 2
    return metrics


def hubness(ranks: DirectionRanks, candidates: int, k: int = 10) -> float:
    r"""Return the skewness of how often each candidate is among the first K answers of a query.

    With :math:`N` that number of a candidate, it is :math:`\mathrm{E}(N - \bar N)^3 / \mathrm{E}((N - \bar N)^2)^{3/2}`
    (Radovanović et al. 2010, "Hubs in Space", section 2). Around 0 no candidate stands out. Above about 3 a few
    candidates, the hubs, are among the first of very many queries. Where all candidates are equally frequent it is 0.

    Args:
        ranks: with the first K wrong candidates of each query at least.
        candidates: how many there are.
        k: how many answers of each query count.

    Raises:
        ValueError: ranks have fewer wrong candidates.

    >>> from vl_plugins.retrieval import retrieval_ranks
    >>> ranks = retrieval_ranks(torch.eye(4), torch.eye(4)[[0, 1, 0, 0]], torch.arange(4))
    >>> round(hubness(ranks.text_to_image, 4, k=1), 4)
    0.8165
    """
    if ranks.negatives.shape[1] < min(k, candidates):
        first = f"the first {ranks.negatives.shape[1]} wrong candidates"
        raise ValueError(f"ranks have {first} of each query, but {k} are needed")
    queries = len(ranks.queries)
    device = ranks.negatives.device
    # The place of right answer number i, from 0, is 1 + i + the number of wrong ones that are as similar at least.
    negative_similarity = ranks.negative_similarity[ranks.positive_query, :k]
    wrong_before = (negative_similarity >= ranks.positive_similarity[:, None]).sum(dim=1)
    is_positive_shown = ranks.positive_numbers() + wrong_before < k
    shown_positives = torch.zeros(queries, dtype=torch.int64, device=device)
    shown_positives.index_add_(0, ranks.positive_query, is_positive_shown.long())
    negatives = ranks.negatives[:, :k]
    is_negative_shown = torch.arange(negatives.shape[1], device=device) < k - shown_positives[:, None]
    shown = torch.cat([ranks.positives[is_positive_shown], negatives[is_negative_shown & (negatives >= 0)]])
    deviation = shown.bincount(minlength=candidates).double()
    deviation -= deviation.mean()
    variance = deviation.square().mean()
    if variance == 0:
        return 0.0
    return (deviation.pow(3).mean() / variance**1.5).item()


def metrics_table(results: Mapping[str, Mapping[str, float]], judged: bool = False) -> list[list[str]]:
    """Return a heading and a row for each named result, recalls and precisions in percent, ``-`` for what is missing.

    Args:
        results: metrics of :func:`retrieval_metrics` by name.
        judged: mAP@R, R-Precision and R@1, as ECCV Caption reports them, in place of recalls and median ranks.
    """
    columns = {"R@1": "R@1", "R@5": "R@5", "R@10": "R@10", "median": "median_rank"}
    if judged:
        columns = {"mAP@R": "mean_average_precision_at_r", "R-P": "r_precision", "R@1": "R@1"}
    heading = [""]
    keys = []
    for direction, label in DIRECTIONS.items():
        start = f"{label} "
        for column, metric in columns.items():
            heading.append(start + column)
            keys.append(f"{direction}_{metric}")
            start = ""
    if not judged:
        heading.append("RSUM")
        keys.append("rsum")
    rows = [heading]
    for name, metrics in results.items():
        row = [name]
        for key in keys:
            scale = 1 if key == "rsum" or key.endswith("rank") else 100
            row.append(f"{scale * metrics[key]:.1f}" if key in metrics else "-")
        rows.append(row)
    return rows


def format_metrics_table(results: Mapping[str, Mapping[str, float]], judged: bool = False) -> str:
    """Return :func:`metrics_table` as text.

    >>> metrics = {"image_to_text_R@1": 0.125, "image_to_text_R@5": 0.5, "image_to_text_median_rank": 5.5}
    >>> print(format_metrics_table({"clip": metrics}))
          i2t R@1   R@5  R@10  median  t2i R@1  R@5  R@10  median  RSUM
    clip     12.5  50.0     -     5.5        -    -     -       -     -
    """
    return "\n".join("  ".join(row) for row in align_columns(metrics_table(results, judged)))
