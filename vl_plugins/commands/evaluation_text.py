"""The results of ``vl-plugins evaluate`` as text and as JSON."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vl_plugins.commands.evaluated_models import JUDGED, Results, Seed, metrics_by_row, metrics_of, sizes
from vl_plugins.commands.run_names import ENSEMBLE
from vl_plugins.retrieval import Difference, format_metrics_table
from vl_plugins.retrieval.comparison_table import format_comparison
from vl_plugins.retrieval.rules import format_rules

__all__ = ["print_json", "print_text"]


def print_text(results: Results) -> None:
    """Print the size of each protocol, the metrics of each model, the differences, and the rules of other tools."""
    _print_checkpoints(results)
    for result, size in sizes(results.models).items():
        print(f"{result}: {size}")
    for judged, rows in enumerate(metrics_by_row(results.models)):
        if rows:
            print(format_metrics_table(rows, bool(judged)))
    for name, seeds in results.models.items():
        metrics = next(iter(metrics_of(seeds[0]).values()))
        if "image_circular_variance" in metrics:
            images, captions = metrics["image_circular_variance"], metrics["caption_circular_variance"]
            print(f"circular variance of the sets of {name}: images {images:.4g}, captions {captions:.4g}")
    has_seeds = any(len(seeds) > 1 for seeds in results.models.values())
    if ENSEMBLE in results.models and has_seeds:
        print(f"The {ENSEMBLE} has the first seed of each model.")
    if len(results.models) > 1 and not results.differences:
        print("no comparison: it needs two images or more")
    for result, differences in results.differences.items():
        print(f"\n{result}, compared with {results.baseline}:")
        print(format_comparison(differences, results.baseline, judged=result == JUDGED))
    for name, numbers in results.rules.items():
        label = name if len(results.models[name]) == 1 else f"{name}, seed 1"
        print(f"\n{label}, by the rules of other tools:")
        print(format_rules(numbers))


def _print_checkpoints(results: Results) -> None:
    """Print which checkpoint was taken of each folder of a run."""
    for name, seeds in results.models.items():
        for seed in seeds:
            checkpoint = seed.features[0].description.get("checkpoint")
            if seed.path is not None and os.path.isdir(seed.path) and checkpoint:
                print(f"{name}: {checkpoint}")


def print_json(results: Results, shards: str | None) -> None:
    """Print all results: recalls as fractions, differences in percent."""
    rows = []
    for name, seeds in results.models.items():
        for number, seed in enumerate(seeds, 1):
            row = _run_row(name, seed)
            if len(seeds) > 1:
                row["seed"] = number
            rows.append(row)
    content: dict[str, Any] = {"shards": shards, "results": rows}
    if results.differences:
        content["baseline"] = results.baseline
        content["differences"] = {}
        for result, of_models in results.differences.items():
            content["differences"][result] = {name: _plain(metrics) for name, metrics in of_models.items()}
    if results.rules:
        content["rules"] = {}
        for name, numbers in results.rules.items():
            content["rules"][name] = [asdict(of_rule) for of_rule in numbers]
    print(json.dumps(content, indent=2))


def _run_row(name: str, seed: Seed) -> dict[str, Any]:
    """Return what is known of a run, with its metrics."""
    row: dict[str, Any] = {}
    if seed.path is not None:
        row.update(seed.features[0].description)
        row["file"] = seed.path
    row["name"] = name
    row["metrics"] = {}
    for evaluation in seed.evaluations.values():
        for result, metrics in evaluation.metrics.items():
            row["metrics"][result] = metrics | evaluation.hubness(result)
    return row


def _plain(differences: Mapping[str, Difference]) -> dict[str, dict[str, Any]]:
    """Return differences by metric as plain data."""
    plain = {}
    for metric, difference in differences.items():
        plain[metric] = {"difference": difference.mean, "resolved": difference.resolved} | asdict(difference)
    return plain
