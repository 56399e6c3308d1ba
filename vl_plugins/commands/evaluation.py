"""What ``vl-plugins evaluate`` does with features: evaluate each model, compare them, and write what was asked for."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vl_plugins.commands.evaluated_models import JUDGED, Results, Seed
from vl_plugins.commands.evaluation_text import print_json, print_text
from vl_plugins.commands.run_names import ENSEMBLE
from vl_plugins.retrieval import Difference, ImageValues, compare
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.per_query import PerQueryTable, write_suspects
from vl_plugins.retrieval.protocols import Evaluation, evaluate
from vl_plugins.retrieval.rules import ToolNumbers, tool_numbers

__all__ = ["write_evaluation"]

CONFIDENCE = 0.5  # of suspect pairs
MANY_SUSPECTS = 0.3  # of the captions


def write_evaluation(
    arguments: argparse.Namespace, runs: Sequence[tuple[str, str]], features: Sequence[Features], collection: Any
) -> None:
    """Evaluate and compare models, print the results, and write the files that were asked for.

    Args:
        arguments: of the command line.
        runs: name and path of each training run; runs with one name are seeds of a model.
        features: of each run.
        collection: of the shards that the features are of, or None.
    """
    first_path = runs[0][1]
    models: dict[str, list[Seed]] = {}
    for (name, path), of_run in zip(runs, features, strict=True):
        of_run.check_same_items(features[0], path, first_path)
        models.setdefault(name, []).append(Seed(path, [of_run], {}))
    baseline = arguments.baseline or next(iter(models))
    if arguments.ensemble:
        members = [seeds[0].features[0] for seeds in models.values()]
        models = {ENSEMBLE: [Seed(None, members, {})]} | models
    for name, seeds in models.items():
        for seed in seeds:
            seed.evaluations = _evaluate(arguments, name, seed.features, for_comparison=len(models) > 1)
    results = Results(
        models,
        baseline,
        differences=_differences(models, baseline) if len(models) > 1 else {},
        rules=_rules(arguments, models) if arguments.rules else {},
    )
    if arguments.json:
        print_json(results, arguments.shards)
    else:
        print_text(results)
    if arguments.per_query:
        _write_queries(arguments.per_query, models)
    if arguments.suspects:
        _write_suspects(arguments, models, collection)
    if arguments.report:
        # It needs packages that the rest can do without.
        from vl_plugins.commands.evaluation_report import write_evaluation_report

        write_evaluation_report(arguments, results, collection)


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


def _differences(models: Mapping[str, Sequence[Seed]], baseline: str) -> dict[str, dict[str, dict[str, Difference]]]:
    """Return the differences from the baseline by result, model and metric; none where there is one image only."""
    values: dict[str, dict[str, list[ImageValues]]] = {}
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


def _rules(arguments: argparse.Namespace, models: Mapping[str, Sequence[Seed]]) -> dict[str, list[ToolNumbers]]:
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


def _write_queries(file: str, models: Mapping[str, Sequence[Seed]]) -> None:
    """Write a row for each query of each protocol, model and seed."""
    with PerQueryTable(file) as table:
        for name, seeds in models.items():
            for number, seed in enumerate(seeds, 1):
                for evaluation in seed.evaluations.values():
                    for result, folds in evaluation.folds.items():
                        for fold_number, fold in enumerate(folds, 1):
                            table.add(result, name, number, fold_number, fold, seed.features[0])
    print(f"wrote {file}", file=sys.stderr)


def _write_suspects(arguments: argparse.Namespace, models: Mapping[str, Sequence[Seed]], collection: Any) -> None:
    """Write the suspect pairs of the first seed of the first model, or of the ensemble, in the first protocol."""
    name, seeds = next(iter(models.items()))
    evaluation = seeds[0].evaluations[arguments.protocol[0]]
    folds = next(iter(evaluation.folds.values()))
    confidence = CONFIDENCE if arguments.confidence is None else arguments.confidence
    pairs = write_suspects(arguments.suspects, folds, collection, confidence)
    captions = len(evaluation.captions)
    counted = f"{pairs:,} suspect pairs of {name} among {captions:,} captions"
    if pairs > MANY_SUSPECTS * captions:
        counted += "; with so many, the model is probably at fault"
    print(f"wrote {arguments.suspects}: {counted}", file=sys.stderr)
