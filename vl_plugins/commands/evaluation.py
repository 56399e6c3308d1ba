"""What ``vl-plugins evaluate`` does with features: evaluate each model, compare them, and write what was asked for."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from vl_plugins.retrieval import Difference, compare, format_metrics_table
from vl_plugins.retrieval.comparison_table import comparison_notes, comparison_tables, format_comparison
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.per_query import PerQueryTable, write_suspects
from vl_plugins.retrieval.protocols import Evaluation, evaluate
from vl_plugins.retrieval.rules import ToolNumbers, format_rules, tool_numbers

__all__ = ["write_evaluation"]

ENSEMBLE = "ensemble"
JUDGED = "eccv-caption"  # by ECCV Caption, with mAP@R
CONFIDENCE = 0.5  # of suspect pairs

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
    collection: Any,
) -> None:
    """Evaluate and compare models, print the results, and write the files that were asked for.

    Args:
        arguments: of the command line.
        runs: name and path of each training run; runs with one name are seeds of a model.
        features: of each run.
        collection: of the shards that the features are of, or None.
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
    rules = _rules(arguments, models) if arguments.rules else {}
    if arguments.json:
        print(json.dumps(_json(arguments, models, baseline, differences, rules), indent=2))
    else:
        _print(arguments, models, baseline, differences, rules)
    if arguments.per_query:
        _write_queries(arguments, models)
    if arguments.suspects:
        _write_suspects(arguments, models, collection)
    if arguments.report:
        _write_report(arguments, models, baseline, differences, collection)


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


def _rules(arguments: argparse.Namespace, models: Models) -> dict[str, list[ToolNumbers]]:
    """Return what the rules of other tools give from the first seed of each model but the ensemble."""
    rules = {}
    for name, seeds in models.items():
        features = seeds[0].features[0]
        evaluation = seeds[0].evaluations[arguments.protocol[0]]
        if name != ENSEMBLE:
            selected = features.select(torch.arange(len(features.images)), evaluation.captions)
            # Ranks of ECCV Caption have other right answers.
            ranks = None if JUDGED in evaluation.folds else evaluation.ranks
            rules[name] = tool_numbers(selected, ranks, device=arguments.ranking_device)
    return rules


def _json(
    arguments: argparse.Namespace,
    models: Models,
    baseline: str,
    differences: Differences,
    rules: Mapping[str, Sequence[ToolNumbers]],
) -> dict[str, Any]:
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
    if rules:
        content["rules"] = {name: [asdict(numbers) for numbers in of_model] for name, of_model in rules.items()}
    return content


def _plain(differences: Mapping[str, Difference]) -> dict[str, dict[str, Any]]:
    """Return differences by metric as plain data."""
    plain = {}
    for metric, difference in differences.items():
        plain[metric] = {"difference": difference.mean, "resolved": difference.resolved} | asdict(difference)
    return plain


def _print(
    arguments: argparse.Namespace,
    models: Models,
    baseline: str,
    differences: Differences,
    rules: Mapping[str, Sequence[ToolNumbers]],
) -> None:
    """Print the size of each protocol, the metrics of each model, the differences, and the rules of other tools."""
    for name, seeds in models.items():
        for seed in seeds:
            if seed.path is not None and os.path.isdir(seed.path) and "checkpoint" in seed.features[0].description:
                print(f"{name}: {seed.features[0].description['checkpoint']}")
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
    if len(models) > 1 and not differences:
        print("no comparison: it needs two images or more")
    for result, of_models in differences.items():
        print(f"\n{result}, compared with {baseline}:")
        print(format_comparison(of_models, baseline, judged=result == JUDGED))
    for name, numbers in rules.items():
        which = name if len(models[name]) == 1 else f"{name}, seed 1"
        print(f"\n{which}, by the rules of other tools:")
        print(format_rules(numbers))


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


def _write_queries(arguments: argparse.Namespace, models: Models) -> None:
    """Write a row for each query of each protocol, model and seed."""
    with PerQueryTable(arguments.per_query) as table:
        for name, seeds in models.items():
            for number, seed in enumerate(seeds, 1):
                for evaluation in seed.evaluations.values():
                    for result, folds in evaluation.folds.items():
                        for fold_number, fold in enumerate(folds, 1):
                            table.add(result, name, number, fold_number, fold, seed.features[0])
    print(f"wrote {arguments.per_query}", file=sys.stderr)


def _write_suspects(arguments: argparse.Namespace, models: Models, collection: Any) -> None:
    """Write the suspect pairs of the first seed of the first model, or of the ensemble, in the first protocol."""
    name, seeds = next(iter(models.items()))
    evaluation = seeds[0].evaluations[arguments.protocol[0]]
    folds = next(iter(evaluation.folds.values()))
    confidence = CONFIDENCE if arguments.confidence is None else arguments.confidence
    pairs = write_suspects(arguments.suspects, folds, collection, confidence)
    print(f"wrote {arguments.suspects}: {pairs:,} suspect pairs of {name}", file=sys.stderr)


def _write_report(
    arguments: argparse.Namespace, models: Models, baseline: str, differences: Differences, collection: Any
) -> None:
    """Write the page about the first protocol, with charts and examples of the first model."""
    from vl_plugins.retrieval.report import write_report

    protocol = arguments.protocol[0]
    name, seeds = next(iter(models.items()))
    shown = seeds[0].evaluations[protocol]
    assert shown.ranks is not None  # with_ranks
    settings = _sizes(models)
    for model, of_model in models.items():
        for number, seed in enumerate(of_model, 1):
            if model != ENSEMBLE:
                label = model if len(of_model) == 1 else f"{model}, seed {number}"
                settings[label] = _settings(seed.features[0].description)
    titled = " and ".join(models) if len(models) < 3 else f"{len(models)} models"
    write_report(
        arguments.report,
        shown.ranks,
        _tables(models),
        title=f"Image-text retrieval of {titled}, protocol {protocol}",
        settings=settings,
        model=name,
        comparison=_comparison(protocol, models, baseline, differences),
        collection=collection and collection.with_captions(shown.captions),
        max_image_pixels=arguments.max_image_pixels,
    )
    print(f"wrote {arguments.report}", file=sys.stderr)


def _comparison(protocol: str, models: Models, baseline: str, differences: Differences) -> Any:
    """Return what the report shows of the differences in the first result of a protocol; None if there are none."""
    from vl_plugins.retrieval.comparison_report import ComparedModel, Comparison

    result = next(iter(models[baseline][0].evaluations[protocol].folds))
    if result not in differences:
        return None
    verdicts, details = comparison_tables(differences[result], baseline, judged=result == JUDGED)
    compared = {}
    for name, seeds in models.items():
        ranks: Any = [seed.evaluations[protocol].ranks for seed in seeds]  # not None, because of with_ranks
        hits = torch.stack([(of_seed.text_to_image.rank == 1).double() for of_seed in ranks]).mean(dim=0)
        compared[name] = ComparedModel(name=name, ranks=ranks[0], hits=hits, seeds=len(seeds))
    return Comparison(
        title=f"{result}, compared with {baseline}",
        baseline=compared.pop(baseline),
        models=list(compared.values()),
        table=[verdict + detail[1:] for verdict, detail in zip(verdicts, details, strict=True)],
        notes=comparison_notes(differences[result], judged=result == JUDGED),
    )


def _settings(description: Mapping[str, Any]) -> str:
    """Return in one line what is known of features."""
    texts = []
    for key, value in description.items():
        if value and key != "splits":
            length = 12 if "sha256" in key else None
            texts.append(f"{key.replace('_', ' ')} {str(value)[:length]}")
    return ", ".join(texts) or "features of unknown origin"
