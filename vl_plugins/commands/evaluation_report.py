"""The report of ``vl-plugins evaluate``, with what is known of each model."""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import torch

from vl_plugins.commands.evaluated_models import JUDGED, Results, metrics_by_row, sizes
from vl_plugins.commands.run_names import ENSEMBLE
from vl_plugins.retrieval.comparison_report import ComparedModel, Comparison
from vl_plugins.retrieval.comparison_table import comparison_notes, comparison_tables
from vl_plugins.retrieval.report import write_report

__all__ = ["write_evaluation_report"]

NOT_SHOWN = ("splits", "similarity_kwargs")  # the latter are shown with the similarity
NO_EFFECT = ("set_size",)  # of packed sets; sets of features are not packed


def write_evaluation_report(arguments: argparse.Namespace, results: Results, collection: Any) -> None:
    """Write the page about the first protocol, with charts and examples of the first seed of the first model."""
    protocol = arguments.protocol[0]
    name, seeds = next(iter(results.models.items()))
    evaluation = seeds[0].evaluations[protocol]
    assert evaluation.ranks is not None  # with_ranks
    models = list(results.models)
    titled = " and ".join(models) if len(models) < 3 else f"{len(models)} models"
    write_report(
        arguments.report,
        evaluation.ranks,
        metrics_by_row(results.models),
        title=f"Image-text retrieval of {titled}, protocol {protocol}",
        settings=sizes(results.models) | _settings(_descriptions(results)),
        model=name,
        comparison=_comparison(results, protocol),
        collection=collection and collection.with_captions(evaluation.captions),
        max_image_pixels=arguments.max_image_pixels,
    )
    print(f"wrote {arguments.report}", file=sys.stderr)


def _comparison(results: Results, protocol: str) -> Comparison | None:
    """Return what the report shows of the differences in the first result of a protocol; None if there are none."""
    result = next(iter(results.models[results.baseline][0].evaluations[protocol].folds))
    if result not in results.differences:
        return None
    differences = results.differences[result]
    verdicts, details = comparison_tables(differences, results.baseline, judged=result == JUDGED)
    table = [verdict + detail[1:] for verdict, detail in zip(verdicts, details, strict=True)]
    compared = {}
    for name, seeds in results.models.items():
        ranks: Any = [seed.evaluations[protocol].ranks for seed in seeds]  # not None, because of with_ranks
        hits = torch.stack([(of_seed.text_to_image.rank == 1).double() for of_seed in ranks]).mean(dim=0)
        compared[name] = ComparedModel(name=name, ranks=ranks[0], hits=hits, seeds=len(seeds))
    return Comparison(
        title=f"{result}, compared with {results.baseline}",
        baseline=compared.pop(results.baseline),
        models=list(compared.values()),
        table=table,
        notes=comparison_notes(differences, judged=result == JUDGED),
    )


def _descriptions(results: Results) -> dict[str, Mapping[str, Any]]:
    """Return the descriptions of the features of all runs, by model and seed."""
    descriptions: dict[str, Mapping[str, Any]] = {}
    for name, seeds in results.models.items():
        for number, seed in enumerate(seeds, 1):
            if name != ENSEMBLE:
                label = name if len(seeds) == 1 else f"{name}, seed {number}"
                descriptions[label] = seed.features[0].description
    return descriptions


def _settings(descriptions: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return in one line of each run what is known of its features, and in one what all have in common."""
    facts = {name: _facts(description) for name, description in descriptions.items()}
    in_common: set[str] = set()
    if len(facts) > 1:
        in_common = set.intersection(*map(set, facts.values()))
    lines = {}
    if in_common:
        first = next(iter(facts.values()))
        lines["all models"] = ", ".join(fact for fact in first if fact in in_common)
    for name, of_run in facts.items():
        own = [fact for fact in of_run if fact not in in_common]
        if own or not in_common:
            lines[name] = ", ".join(own) or "features of unknown origin"
    return lines


def _facts(description: Mapping[str, Any]) -> list[str]:
    """Return what is known of features, such as ``precision fp32``."""
    facts = []
    for key, value in description.items():
        if not value or key in NOT_SHOWN:
            continue
        text = str(value)
        if "sha256" in key:
            text = text[:12]
        if key == "similarity":
            text += _options(description.get("similarity_kwargs") or {})
        facts.append(f"{key.replace('_', ' ')} {text}")
    return facts


def _options(options: Mapping[str, Any]) -> str:
    """Return the options of a similarity in parentheses, such as `` (alpha 16)``."""
    texts = []
    for option, value in options.items():
        if option not in NO_EFFECT:
            texts.append(f"{option} {value:g}" if isinstance(value, float) else f"{option} {value}")
    return f" ({', '.join(texts)})" if texts else ""
