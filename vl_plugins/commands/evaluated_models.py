"""What ``vl-plugins evaluate`` knows of the models: their seeds, metrics and differences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from vl_plugins.retrieval import Difference
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.protocols import Evaluation
from vl_plugins.retrieval.tools import ToolNumbers

__all__ = ["JUDGED", "Results", "Seed", "metrics_by_row", "metrics_of", "sizes"]

JUDGED = "eccv-caption"  # by ECCV Caption, with mAP@R

Metrics = dict[str, dict[str, float]]
"""By result, which is the protocol or one of its two results, and name of the metric."""


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


@dataclass(frozen=True, eq=False)
class Results:
    """All that was computed.

    Attributes:
        models: the seeds of each model by its name; the ensemble, if there is one, comes first.
        baseline: the model that the others are compared with.
        differences: from the baseline, by result, model and metric; empty for one model or one image.
        rules: the numbers of other tools by model, if they were asked for.
    """

    models: Mapping[str, Sequence[Seed]]
    baseline: str
    differences: Mapping[str, Mapping[str, Mapping[str, Difference]]]
    rules: Mapping[str, Sequence[ToolNumbers]]


def metrics_of(seed: Seed) -> Metrics:
    """Return the metrics of a run."""
    metrics = {}
    for evaluation in seed.evaluations.values():
        metrics.update(evaluation.metrics)
    return metrics


def mean_metrics(seeds: Sequence[Seed]) -> Metrics:
    """Return the mean of the metrics over the seeds of a model."""
    of_seeds = [metrics_of(seed) for seed in seeds]
    means: Metrics = {}
    for result, metrics in of_seeds[0].items():
        means[result] = {}
        for metric in metrics:
            means[result][metric] = fmean(of_seed[result][metric] for of_seed in of_seeds)
    return means


def sizes(models: Mapping[str, Sequence[Seed]]) -> dict[str, str]:
    """Return how many images and captions each result is about."""
    first_seeds = next(iter(models.values()))
    texts = {}
    for result, metrics in metrics_of(first_seeds[0]).items():
        texts[result] = f"{metrics['num_samples']:,} images, {metrics['num_captions']:,} captions"
    return texts


def metrics_by_row(models: Mapping[str, Sequence[Seed]]) -> list[Metrics]:
    """Return the metrics by the names of their rows: recalls, and those that ECCV Caption judges."""
    recalls: Metrics = {}
    precisions: Metrics = {}
    for name, seeds in models.items():
        model = name
        if len(seeds) > 1:
            model = f"{name} (mean of {len(seeds)} seeds)"
        for result, metrics in mean_metrics(seeds).items():
            row = f"{model} {result}"
            if result == "plain":
                row = model
            elif len(models) == 1 and len(seeds) == 1:
                row = result
            table = precisions if result == JUDGED else recalls
            table[row] = metrics
    return [recalls, precisions]
