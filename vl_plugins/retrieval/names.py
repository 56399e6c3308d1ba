"""The same metrics under other names: in a training's results, and as other tools name them, in their units."""

import re
from collections.abc import Mapping

__all__ = ["clip_benchmark_names", "eccv_caption_names", "percent_names"]

Results = Mapping[str, Mapping[str, float]]

IN_PERCENT = re.compile(r"rsum|.*_(R@\d+|mean_average_precision_at_r|r_precision)")

WAYS = {"i2t": "image_to_text", "t2i": "text_to_image"}
ECCV_CAPTION_PREFIXES = {"coco-1k": "coco_1k", "coco-5k": "coco_5k", "cxc": "cxc", "eccv-caption": "eccv"}


def clip_benchmark_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the recalls as ``clip_benchmark`` names them, as fractions.

    There the direction is called by what is retrieved: ``text_retrieval_recall@5`` is ``image_to_text_R@5``.

    Args:
        metrics: of :func:`vl_plugins.retrieval.retrieval_metrics`.

    >>> clip_benchmark_names({"image_to_text_R@5": 50.0, "text_to_image_R@5": 25.0})
    {'text_retrieval_recall@5': 0.5, 'image_retrieval_recall@5': 0.25}
    """
    retrieved = {"image_to_text": "text", "text_to_image": "image"}
    return {
        f"{retrieved[way]}_retrieval_recall@{k}": value / 100
        for way, k, value in ((*name.split("_R@"), value) for name, value in metrics.items() if "_R@" in name)
    }


def percent_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as a training's ``results.jsonl`` names them: what is in percent says so.

    open_clip writes fractions as ``image_to_text_R@1`` there.

    Args:
        metrics: of :func:`vl_plugins.retrieval.retrieval_metrics`.

    >>> percent_names({"image_to_text_R@1": 50.0, "image_to_text_mean_rank": 2.0, "rsum": 420.0})
    {'image_to_text_R@1_percent': 50.0, 'image_to_text_mean_rank': 2.0, 'rsum_percent': 420.0}
    """
    return {f"{name}_percent" if IN_PERCENT.fullmatch(name) else name: value for name, value in metrics.items()}


def eccv_caption_names(results: Results) -> dict[str, dict[str, float]]:
    """Return metrics as the package ``eccv_caption`` names them, as fractions.

    Args:
        results: of :attr:`vl_plugins.retrieval.protocols.Evaluation.results`; those of other protocols than COCO's are
            left out.

    >>> eccv_caption_names({"cxc": {"image_to_text_R@1": 50.0, "text_to_image_R@1": 25.0}})
    {'cxc_r1': {'i2t': 0.5, 't2i': 0.25}}
    """
    renamed: dict[str, dict[str, float]] = {}
    for name, prefix in ECCV_CAPTION_PREFIXES.items():
        for metric, value in results.get(name, {}).items():
            for short, way in WAYS.items():
                found = re.fullmatch(rf"{way}_(?:R@(\d+)|(mean_average_precision_at_r)|(r_precision))", metric)
                if found is None or (prefix != "eccv" and found[1] is None):
                    continue
                other = f"r{found[1]}" if found[1] else "map_at_r" if found[2] else "rprecision"
                renamed.setdefault(f"{prefix}_{other}", {})[short] = value / 100
    return renamed
