"""What ``vl-plugins evaluate`` does with features: evaluate each model, compare them, and write what was asked for."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from vl_plugins.data import Collection
from vl_plugins.retrieval import Difference, compare, format_metrics_table
from vl_plugins.retrieval.comparison_table import format_comparison
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.protocols import Evaluation, evaluate

__all__ = ["write_evaluation"]

ENSEMBLE = "ensemble"
JUDGED = "eccv-caption"  # by ECCV Caption, with mAP@R

Differences = dict[str, dict[str, dict[str, Difference]]]
"""By result, model and metric."""


@dataclass(eq=False)
class Seed:
    """A training run of a model.

    Attributes:
        path: file of features, or checkpoint; None for the ensemble.
        features: of the run, or of all members of the ensemble.
        evaluations: by protocol.
    """

    path: str | None
    features: Sequence[Features]
    evaluations: dict[str, Evaluation]


Models = dict[str, list[Seed]]
"""The seeds of each model by its name; the ensemble, if there is one, comes first."""


def write_evaluation(
    arguments: argparse.Namespace,
    runs: Sequence[tuple[str, str]],
    features: Sequence[Features],
    collection: Collection | None,
) -> None:
    """Evaluate and compare models, print the results, and write the files that were asked for.

    Args:
        arguments: of the command line.
        runs: name and path of each training run; runs with one name are seeds of a model.
        features: of each run.
        collection: of the shards that the features are of.
    """
    models: Models = {}
    for (name, path), of_run in zip(runs, features, strict=True):
        models.setdefault(name, []).append(Seed(path, [of_run], {}))
    baseline = arguments.baseline or next(iter(models))
    if arguments.ensemble:
        members = [seeds[0].features[0] for seeds in models.values()]
        models = {ENSEMBLE: [Seed(None, members, {})]} | models
    for name, seeds in models.items():
        for seed in seeds:
            seed.evaluations = _evaluate(arguments, name, seed.features, for_comparison=len(models) > 1)
    differences = _differences(models, baseline) if len(models) > 1 else {}
    if arguments.json:
        print(json.dumps(_json(arguments, models, baseline, differences), indent=2))
    else:
        _print(arguments, models, baseline, differences)


def _evaluate(
    arguments: argparse.Namespace, name: str, features: Sequence[Features], for_comparison: bool
) -> dict[str, Evaluation]:
    """Return the evaluation of a run, or of an ensemble, by protocol."""
    evaluations = {}
    for protocol in arguments.protocol:
        evaluations[protocol] = evaluate(
            features,
            protocol,
            name=arguments.shards or name,
            with_ranks=arguments.report is not None and protocol == arguments.protocol[0],
            for_comparison=for_comparison,
            device=arguments.ranking_device,
            progress=sys.stderr.isatty(),
        )
    return evaluations


def _differences(models: Models, baseline: str) -> Differences:
    """Return the differences from the baseline, none where there is one image only."""
    values: dict[str, dict[str, list[Any]]] = {}
    for name, seeds in models.items():
        for seed in seeds:
            for evaluation in seed.evaluations.values():
                for result, image_values in evaluation.image_values().items():
                    values.setdefault(result, {}).setdefault(name, []).append(image_values)
    differences = {}
    for result, values_of_models in values.items():
        images = values_of_models[baseline][0].values.shape[1]
        if images > 1:
            differences[result] = compare(values_of_models, baseline)
    return differences


def _metrics(seed: Seed) -> dict[str, dict[str, float]]:
    """Return the metrics of a run by result."""
    metrics = {}
    for evaluation in seed.evaluations.values():
        metrics.update(evaluation.metrics)
    return metrics


def _mean_metrics(seeds: Sequence[Seed]) -> dict[str, dict[str, float]]:
    """Return the mean over the seeds of the metrics of a model, by result."""
    metrics = [_metrics(seed) for seed in seeds]
    means = {}
    for result, of_first in metrics[0].items():
        means[result] = {metric: fmean(of_seed[result][metric] for of_seed in metrics) for metric in of_first}
    return means


def _json(arguments: argparse.Namespace, models: Models, baseline: str, differences: Differences) -> dict[str, Any]:
    """Return all results as plain data: recalls as fractions, differences in percent."""
    rows = []
    for name, seeds in models.items():
        for number, seed in enumerate(seeds, 1):
            row: dict[str, Any] = {}
            if seed.path is not None:
                row = seed.features[0].description | {"file": seed.path}
            row["name"] = name
            if len(seeds) > 1:
                row["seed"] = number
            row["metrics"] = {}
            for evaluation in seed.evaluations.values():
                for result, metrics in evaluation.metrics.items():
                    row["metrics"][result] = metrics | evaluation.hubness(result)
            rows.append(row)
    content: dict[str, Any] = {"shards": arguments.shards, "results": rows}
    if differences:
        content["baseline"] = baseline
        content["differences"] = {}
        for result, of_models in differences.items():
            content["differences"][result] = {name: _plain(metrics) for name, metrics in of_models.items()}
    return content


def _plain(differences: Mapping[str, Difference]) -> dict[str, dict[str, Any]]:
    """Return differences by metric as plain data."""
    plain = {}
    for metric, difference in differences.items():
        plain[metric] = {"difference": difference.mean, "resolved": difference.is_resolved} | asdict(difference)
    return plain


def _print(arguments: argparse.Namespace, models: Models, baseline: str, differences: Differences) -> None:
    """Print the size of each protocol, the metrics of each model, and the differences."""
    for result, size in _sizes(models).items():
        print(f"{result}: {size}")
    for judged, rows in enumerate(_tables(models)):
        if rows:
            print(format_metrics_table(rows, bool(judged)))
    for name, seeds in models.items():
        metrics = next(iter(_metrics(seeds[0]).values()))
        if "image_circular_variance" in metrics:
            images, captions = metrics["image_circular_variance"], metrics["caption_circular_variance"]
            print(f"circular variance of the sets of {name}: images {images:.4g}, captions {captions:.4g}")
    if arguments.ensemble and any(len(seeds) > 1 for seeds in models.values()):
        print(f"The {ENSEMBLE} has the first seed of each model.")
    for result, of_models in differences.items():
        print(f"\n{result}, compared with {baseline}:")
        print(format_comparison(of_models, baseline, judged=result == JUDGED))


def _sizes(models: Models) -> dict[str, str]:
    """Return how many images and captions each result is about."""
    metrics = _metrics(next(iter(models.values()))[0])
    sizes = {}
    for result, of_result in metrics.items():
        sizes[result] = f"{of_result['num_samples']:,} images, {of_result['num_captions']:,} captions"
    return sizes


def _tables(models: Models) -> list[dict[str, dict[str, float]]]:
    """Return the metrics by the names of their rows: recalls, and those that ECCV Caption judges."""
    recalls: dict[str, dict[str, float]] = {}
    precisions: dict[str, dict[str, float]] = {}
    for name, seeds in models.items():
        model = name if len(seeds) == 1 else f"{name} (mean of {len(seeds)} seeds)"
        for result, metrics in _mean_metrics(seeds).items():
            row = f"{model} {result}"
            if result == "plain":
                row = model
            elif len(models) == 1 and len(seeds) == 1:
                row = result
            table = precisions if result == JUDGED else recalls
            table[row] = metrics
    return [recalls, precisions]
