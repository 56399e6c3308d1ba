"""Several protocols, and several models or their ensemble, at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vl_plugins.regularizers import circular_variance
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.protocols import Evaluation, Trial
from vl_plugins.retrieval.ranks import Ranks
from vl_plugins.retrieval.similarities import MeanSimilarities, Similarities

__all__ = ["ENSEMBLE", "Result", "evaluate_features"]

ENSEMBLE = "ensemble"


@dataclass(frozen=True)
class Result:
    """What :func:`evaluate_features` finds of one model, or of all of them together.

    Args:
        metrics: of :func:`vl_plugins.retrieval.retrieval_metrics` by the name of what they are of, the protocol mostly.
        ranks: of the first protocol, as in :class:`vl_plugins.retrieval.protocols.Evaluation`.
        circular_variances: mean over the images' sets and over the captions', [0, 1]; None for vectors.
    """

    metrics: dict[str, dict[str, float]]
    ranks: Ranks | None
    circular_variances: tuple[float, float] | None = None


def evaluate_features(
    members: Mapping[str, Features],
    trials: Sequence[Trial],
    *,
    ensemble: bool = False,
    device: str | torch.device = "cpu",
    ranks: bool = False,
    progress: bool = False,
) -> dict[str, Result]:
    """Evaluate the features of models by some protocols.

    Args:
        members: features of the same images and captions by the name of the model.
        trials: at least one, of :func:`vl_plugins.retrieval.protocols.prepare` for these images and captions.
        ensemble: evaluate also the mean of the models' similarities, under the name ``"ensemble"``. They are averaged
            as they are: similarities that are not cosines have weights of their own.
        device: where similarities are computed.
        ranks: whether the ranks of the whole set are needed in any case.
        progress: show progress bars on standard error.

    Raises:
        UserError: sets have no similarity.
        ValueError: shapes differ, or a similarity is not finite.
    """
    similarities = {name: features.similarities(device) for name, features in members.items()}
    results: dict[str, Result] = {}
    for name, features in members.items():
        variances = None
        if features.images.ndim == 3:
            images, captions = circular_variance(features.images), circular_variance(features.captions)
            variances = images.mean().item(), captions.mean().item()
        results[name] = _result(similarities[name], trials, ranks and not ensemble and not results, progress, variances)
    if ensemble:
        results[ENSEMBLE] = _result(MeanSimilarities(list(similarities.values())), trials, ranks, progress)
    return results


def _result(
    similarities: Similarities,
    trials: Sequence[Trial],
    ranks: bool,
    progress: bool,
    variances: tuple[float, float] | None = None,
) -> Result:
    evaluations: list[Evaluation] = []
    for trial in trials:
        evaluations.append(trial.evaluate(similarities, ranks=ranks and not evaluations, progress=progress))
    metrics = {name: values for evaluation in evaluations for name, values in evaluation.results.items()}
    return Result(metrics, evaluations[0].ranks, variances)
