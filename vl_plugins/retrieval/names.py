"""The names of metrics in the results of a training."""

import re
from collections.abc import Mapping

__all__ = ["percent_names"]

IN_PERCENT = re.compile(r"rsum|.*_(R@\d+|mean_average_precision_at_r|r_precision)")


def percent_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as a training's ``results.jsonl`` names them: what is in percent says so.

    open_clip writes fractions as ``image_to_text_R@1`` there.

    Args:
        metrics: of :func:`vl_plugins.retrieval.retrieval_metrics`.

    >>> percent_names({"image_to_text_R@1": 50.0, "image_to_text_mean_rank": 2.0, "rsum": 420.0})
    {'image_to_text_R@1_percent': 50.0, 'image_to_text_mean_rank': 2.0, 'rsum_percent': 420.0}
    """
    return {f"{name}_percent" if IN_PERCENT.fullmatch(name) else name: value for name, value in metrics.items()}
