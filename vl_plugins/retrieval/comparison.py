r"""Differences between retrieval models on the same images, with intervals over images and training seeds.

**A metric as a mean over images.** A metric is the mean :math:`m` of the values :math:`v_q` of its :math:`Q` queries.
An image is drawn together with its captions, so the :math:`I` images are the units, in both directions. Image :math:`i`
contributes its influence on the metric,

.. math:: u_i = m + \frac{I}{Q} \sum_{q \in i} (v_q - m),

whose mean over the images is :math:`m`, and whose spread is the sampling error of :math:`m`. The influence on RSUM is
the sum of the influences on its six recalls.

**A difference of two methods** with :math:`S` and :math:`T` training seeds has on image :math:`i` the mean difference
:math:`\bar d_i`. Its variance has two parts:

.. math::

    V_\text{images} &= \frac{1}{I} \max\Bigl(\operatorname{var}_i \bar d_i,\;
        \operatorname{var}_i(\bar d_i - b_i) - \frac{1}{I} \sum_{ij} b_{ij}^2\Bigr) + \frac{2\,\text{step}^2}{I^2} \\
    V_\text{seeds} &= \max\Bigl(0,\; \frac{s_1^2 - e_1^2 / I}{S} + \frac{s_2^2 - e_2^2 / I}{T}\Bigr)

- *Blocked queries.* :math:`b_{ij}` is what the queries of image :math:`i` would gain if image :math:`j` and its
  captions were not among the candidates, and :math:`b_j = \sum_i b_{ij}`. An image that is drawn is a query and a
  candidate. A hub, which blocks many queries, makes the metric vary more between test sets than the queries alone do.
  The sum of squares takes away what each blocked query adds by chance.
- *Two more queries*, one that only the one model answers and one that only the other does, as in the interval of Bonett
  and Price (2012) for paired proportions. Without them, models that agree on all queries would have an interval of
  width 0. A step is what one query adds, divided by the number of seeds.
- *Seeds.* :math:`s^2` is the variance of the metric over the seeds of a method, and :math:`e^2` the mean square of what
  neither seed nor image explains (two-way random effects). Fewer than three seeds are too few to estimate this part.
  Then it is left out, and the interval is about these checkpoints and not about the methods.

The interval is :math:`\bar d \pm t \sqrt{V_\text{images} + V_\text{seeds}}`, with the degrees of freedom of Welch and
Satterthwaite. With several methods, Bonferroni's correction makes the intervals hold together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import NamedTuple

import torch
from scipy.special import stdtrit
from torch import Tensor

from vl_plugins.retrieval.metrics import RECALL_AT
from vl_plugins.retrieval.ranks import DirectionRanks, Ranks

__all__ = ["BlockedQueries", "Difference", "ImageValues", "compare", "image_values", "join_folds", "top_for_comparison"]

RSUM = "rsum"
PRECISION = "mean_average_precision_at_r"
R_PRECISION = "r_precision"

CONFIDENCE = 0.95
POWER = 0.8
FEWEST_SEEDS = 3


class BlockedQueries(NamedTuple):
    """What images would gain if others were not among the candidates: the entries of a sparse (I, I) matrix.

    Attributes:
        image: (E,) int64, the image whose queries gain.
        blocked_by: (E,) int64, the image that is in their way. No pair of both occurs twice.
        gain: (E,) float64, what the value of ``image`` would gain.
    """

    image: Tensor
    blocked_by: Tensor
    gain: Tensor


class ImageValues(NamedTuple):
    """What each of I images, with its captions, contributes to the M metrics of one model.

    Attributes:
        metrics: names, those of :func:`~vl_plugins.retrieval.retrieval_metrics`, and ``mean_average_precision_at_r``,
            the mean of both directions.
        values: (M, I) float64. Their mean over the images is the metric; recalls and precisions are in percent.
        steps: (M,) float64, the most that one query can add to a value.
        blocked: for each metric what the values would gain without other images. None where it is not computed, as for
            precisions.
    """

    metrics: tuple[str, ...]
    values: Tensor
    steps: Tensor
    blocked: tuple[BlockedQueries | None, ...]


@dataclass(frozen=True)
class Difference:
    """The difference of a metric between a method and the baseline.

    Attributes:
        metric: its name.
        value, baseline: the metric of both, each the mean over its seeds. Recalls and precisions are in percent.
        low, high: 95 % confidence interval of ``value - baseline``.
        image_error: standard error due to the choice of the images.
        seed_error: standard error due to the seeds, or None where a side has fewer than three. Then the interval is
            about these checkpoints and not about the methods.
        freedom: degrees of freedom of both errors together.
        images: number of images.
        seeds: numbers of seeds of the method and of the baseline.
        fixed_gallery: the interval is about other queries to the same candidates, as for precisions. Otherwise it is
            about other test sets.
    """

    metric: str
    value: float
    baseline: float
    low: float
    high: float
    image_error: float
    seed_error: float | None
    freedom: float
    images: int
    seeds: tuple[int, int]
    fixed_gallery: bool

    @property
    def mean(self) -> float:
        """The difference itself, ``value - baseline``."""
        return self.value - self.baseline

    @property
    def half_width(self) -> float:
        """Half of the width of the interval."""
        return (self.high - self.low) / 2

    @property
    def resolved(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    @property
    def error(self) -> float:
        """Standard error of the difference."""
        return sqrt(self.image_error**2 + (self.seed_error or 0) ** 2)

    def smallest(self, power: float = POWER) -> float:
        """Return the smallest true difference that is resolved with this probability."""
        return self.half_width + self.error * float(stdtrit(self.freedom, power))

    def images_needed(self, difference: float, power: float = POWER) -> float:
        """Return how many images would resolve a true difference with this probability.

        It is infinity where the seeds alone vary too much. That recalls fall in a larger gallery is not considered.
        """
        largest_error = difference * self.error / self.smallest(power)
        image_variance = largest_error**2 - (self.seed_error or 0) ** 2
        if image_variance <= 0:
            return inf
        return ceil(self.images * self.image_error**2 / image_variance)


def top_for_comparison(image_of_caption: Tensor) -> int:
    """Return the ``top`` of :func:`~vl_plugins.retrieval.similarity_ranks` that :func:`image_values` needs.

    A query of rank K + n has rank K without an image that has n captions before the right answer.
    """
    return max(RECALL_AT) + int(image_of_caption.bincount().max()) - 1


def image_values(ranks: Ranks, image_of_caption: Tensor, images: int) -> ImageValues:
    r"""Return what each image contributes to recalls, RSUM, mAP@R and R-Precision.

    Args:
        ranks: of :func:`~vl_plugins.retrieval.similarity_ranks`, with ``top`` of at least 9 plus the largest number of
            captions of an image. Not every image and caption has to be a query.
        image_of_caption: (C,) int64, index of each caption's image.
        images: I, how many there are.

    Raises:
        ValueError: ``top`` was smaller.

    >>> import torch
    >>> from vl_plugins.retrieval import retrieval_ranks
    >>> captions = torch.eye(3).repeat_interleave(2, dim=0)
    >>> image_of_caption = torch.tensor([0, 0, 1, 2, 1, 2])
    >>> ranks = retrieval_ranks(torch.eye(3), captions, image_of_caption, top=11)
    >>> values = image_values(ranks, image_of_caption, 3)
    >>> values.metrics[0], values.values[0]
    ('image_to_text_R@1', tensor([100.,   0.,   0.], dtype=torch.float64))
    """
    image_of_caption = image_of_caption.cpu()
    image_of_image = torch.arange(images)
    directions = {
        "image_to_text": (ranks.image_to_text, image_of_image, image_of_caption),
        "text_to_image": (ranks.text_to_image, image_of_caption, image_of_image),
    }
    values: dict[str, Tensor] = {}
    steps: dict[str, float] = {}
    blocked: dict[str, BlockedQueries] = {}
    for direction, (direction_ranks, image_of_query, image_of_candidate) in directions.items():
        image_of_query = image_of_query[direction_ranks.queries.cpu()]
        for metric, query_values in _query_values(direction_ranks).items():
            name = f"{direction}_{metric}"
            values[name] = _influences(query_values, image_of_query, images)
            steps[name] = 100 * images / len(query_values)
        for k in RECALL_AT:
            name = f"{direction}_R@{k}"
            blocked[name] = _blocked_queries(direction_ranks, image_of_query, image_of_candidate, images, k)
    values[RSUM] = torch.stack([values[name] for name in blocked]).sum(dim=0)
    steps[RSUM] = max(steps[name] for name in blocked)
    blocked[RSUM] = _sum_of_blocked(list(blocked.values()), images)
    precisions = [f"{direction}_{PRECISION}" for direction in directions]
    values[PRECISION] = torch.stack([values[name] for name in precisions]).mean(dim=0)
    steps[PRECISION] = max(steps[name] for name in precisions) / 2
    return ImageValues(
        metrics=tuple(values),
        values=torch.stack(list(values.values())),
        steps=torch.tensor(list(steps.values()), dtype=torch.float64),
        blocked=tuple(map(blocked.get, values)),
    )


def _query_values(ranks: DirectionRanks) -> dict[str, Tensor]:
    """Return the values (Q,) of the queries by metric, in percent."""
    rank = ranks.rank.cpu()
    values = {}
    for k in RECALL_AT:
        values[f"R@{k}"] = 100 * (rank <= k).double()
    values[PRECISION] = 100 * ranks.average_precision.cpu()
    values[R_PRECISION] = 100 * ranks.r_precision.cpu()
    return values


def _influences(query_values: Tensor, image_of_query: Tensor, images: int) -> Tensor:
    """Return the influence (I,) of each image on the mean of the queries' values."""
    mean = query_values.mean()
    sums = query_values.new_zeros(images).index_add(0, image_of_query, query_values - mean)
    return mean + images / len(query_values) * sums


def _blocked_queries(
    ranks: DirectionRanks, image_of_query: Tensor, image_of_candidate: Tensor, images: int, k: int
) -> BlockedQueries:
    """Return how much R@K of an image, in percent, would gain without another image and its captions."""
    most = int(image_of_candidate.bincount().max())
    rank, negatives = ranks.rank.cpu(), ranks.negatives.cpu()
    if negatives.shape[1] < min(k + most - 1, len(image_of_candidate)):
        raise ValueError(
            f"ranks have the first {negatives.shape[1]} wrong candidates of each query, but the comparison needs "
            f"{max(RECALL_AT) + most - 1}: rank with top={max(RECALL_AT) + most - 1}"
        )
    near_misses = ((rank > k) & (rank <= k + most)).nonzero().flatten()
    # The rank of a query is 1 plus the number of wrong candidates before its right answer.
    place = torch.arange(negatives.shape[1])
    row, column = (place < rank[near_misses, None] - 1).nonzero(as_tuple=True)
    query = near_misses[row]
    blocking_image = image_of_candidate[negatives[query, column]]
    pair, candidates = (query * images + blocking_image).unique(return_counts=True)
    query, blocking_image = pair // images, pair % images
    is_freed = (rank[query] - candidates <= k) & (image_of_query[query] != blocking_image)
    query, blocking_image = query[is_freed], blocking_image[is_freed]
    gain = torch.full((len(query),), 100 * images / len(rank), dtype=torch.float64)
    return _sum_of_blocked([BlockedQueries(image_of_query[query], blocking_image, gain)], images)


def _sum_of_blocked(terms: Sequence[BlockedQueries], images: int) -> BlockedQueries:
    """Return the sum of several sparse (I, I) matrices, or of the entries of one that has some more than once."""
    image = torch.cat([term.image for term in terms])
    blocked_by = torch.cat([term.blocked_by for term in terms])
    gain = torch.cat([term.gain for term in terms])
    pairs, entry = (image * images + blocked_by).unique(return_inverse=True)
    total = gain.new_zeros(len(pairs)).index_add(0, entry, gain)
    return BlockedQueries(pairs // images, pairs % images, total)


def join_folds(folds: Sequence[ImageValues]) -> ImageValues:
    """Return the values of all images of folds, such as those of COCO 1K, whose metric is the mean over the folds.

    Each fold has candidates of its own, so that no image blocks a query of another fold.

    Args:
        folds: with equal numbers of images.
    """
    if len(folds) == 1:
        return folds[0]
    values = torch.cat([fold.values for fold in folds], dim=1)
    blocked: list[BlockedQueries | None] = []
    for metric in range(len(folds[0].metrics)):
        blocked.append(_joined_blocked([fold.blocked[metric] for fold in folds], folds[0].values.shape[1]))
    return ImageValues(folds[0].metrics, values, folds[0].steps, tuple(blocked))


def _joined_blocked(folds: Sequence[BlockedQueries | None], images: int) -> BlockedQueries | None:
    """Return a matrix with those of the folds on its diagonal."""
    images_of_folds, blocking_images, gains = [], [], []
    for number, fold in enumerate(folds):
        if fold is None:
            return None
        images_of_folds.append(fold.image + number * images)
        blocking_images.append(fold.blocked_by + number * images)
        gains.append(fold.gain)
    return BlockedQueries(torch.cat(images_of_folds), torch.cat(blocking_images), torch.cat(gains))


def compare(
    runs: Mapping[str, Sequence[ImageValues]], baseline: str, comparisons: int | None = None
) -> dict[str, dict[str, Difference]]:
    """Return the difference of each metric between each method and the baseline, with 95 % confidence intervals.

    The formulas are at the top of this module. From three seeds on each side, the interval covers other test sets and
    other seeds: it is about the methods. With fewer it covers other test sets only: it is about these checkpoints. All
    intervals of one metric hold together in 95 of 100 repetitions, however many methods there are.

    Args:
        runs: for each method the values of its seeds, all of the same images.
        baseline: name of the method that the others are compared with.
        comparisons: how many differences of one metric should hold together; by default all of this call. Give more
            where others from further calls are read beside them.

    Returns:
        By name of each other method, and by metric.

    Raises:
        ValueError: there is no such baseline, nothing to compare, runs have other images, or there is only one image.
    """
    if baseline not in runs:
        raise ValueError(f"the baseline {baseline!r} is none of {', '.join(runs)}")
    methods = [name for name in runs if name != baseline]
    sizes = set()
    for seeds in runs.values():
        for run in seeds:
            sizes.add((run.metrics, run.values.shape[1]))
    if not methods or not all(runs.values()) or len(sizes) > 1:
        raise ValueError("a comparison needs two methods or more, and runs of each with the same images and metrics")
    if runs[baseline][0].values.shape[1] < 2:
        raise ValueError("a comparison needs two images or more")
    differences = {}
    for name in methods:
        differences[name] = _compare_with(runs[name], runs[baseline], comparisons or len(methods))
    return differences


def _compare_with(
    method: Sequence[ImageValues], baseline: Sequence[ImageValues], comparisons: int
) -> dict[str, Difference]:
    """Return the difference of each metric between two methods; ``comparisons`` is how many such pairs there are."""
    images = method[0].values.shape[1]
    seeds = len(method), len(baseline)
    method_values = torch.stack([run.values for run in method])  # (S, M, I)
    baseline_values = torch.stack([run.values for run in baseline])  # (T, M, I)
    means = method_values.mean(dim=(0, 2)), baseline_values.mean(dim=(0, 2))
    difference = method_values.mean(dim=0) - baseline_values.mean(dim=0)  # (M, I)

    two_queries = 2 * (method[0].steps / min(seeds)).square() / images
    image_variance = (_variance_of_images(method, baseline, difference) + two_queries) / images
    has_seed_error = min(seeds) >= FEWEST_SEEDS
    seed_variance = torch.zeros_like(image_variance)
    variance_by_freedom = image_variance.square() / (images - 1)
    if has_seed_error:
        for values in (method_values, baseline_values):
            side_variance = _variance_of_seeds(values)
            seed_variance += side_variance
            variance_by_freedom += side_variance.clamp(min=0).square() / (len(values) - 1)
        seed_variance.clamp_(min=0)
    variance = image_variance + seed_variance
    freedom = variance.square() / variance_by_freedom

    differences = {}
    probability = 1 - (1 - CONFIDENCE) / 2 / comparisons
    for row, metric in enumerate(method[0].metrics):
        value, base = means[0][row].item(), means[1][row].item()
        half_width = float(stdtrit(freedom[row].item(), probability)) * sqrt(variance[row].item())
        differences[metric] = Difference(
            metric=metric,
            value=value,
            baseline=base,
            low=value - base - half_width,
            high=value - base + half_width,
            image_error=sqrt(image_variance[row].item()),
            seed_error=sqrt(seed_variance[row].item()) if has_seed_error else None,
            freedom=freedom[row].item(),
            images=images,
            seeds=seeds,
            fixed_gallery=method[0].blocked[row] is None,
        )
    return differences


def _variance_of_images(method: Sequence[ImageValues], baseline: Sequence[ImageValues], difference: Tensor) -> Tensor:
    """Return for each metric (M,) the variance of an image's contribution to the difference (M, I)."""
    variance = difference.var(dim=1)
    images = difference.shape[1]
    for row in range(len(variance)):
        terms = _shares_of_blocked(method, row, 1) + _shares_of_blocked(baseline, row, -1)
        if not terms:
            continue
        blocked = _sum_of_blocked(terms, images)
        blocked_by_image = torch.zeros_like(difference[row]).index_add(0, blocked.blocked_by, blocked.gain)
        by_chance = blocked.gain.square().sum() / images
        variance_with_gallery = (difference[row] - blocked_by_image).var() - by_chance
        variance[row] = torch.maximum(variance[row], variance_with_gallery)
    return variance


def _shares_of_blocked(runs: Sequence[ImageValues], row: int, sign: int) -> list[BlockedQueries]:
    """Return matrices whose sum is the mean over the seeds of the blocked values of a metric, times a sign."""
    shares = []
    for run in runs:
        blocked = run.blocked[row]
        if blocked is not None:
            shares.append(blocked._replace(gain=blocked.gain * sign / len(runs)))
    return shares


def _variance_of_seeds(values: Tensor) -> Tensor:
    """Return for each metric (M,) the variance of the mean over seeds, which may be negative, given (S, M, I)."""
    seeds, _, images = values.shape
    of_seed = values.mean(dim=2, keepdim=True)
    of_image = values.mean(dim=0, keepdim=True)
    residual = values - of_seed - of_image + of_seed.mean(dim=0, keepdim=True)
    mean_square = residual.square().sum(dim=(0, 2)) / ((seeds - 1) * (images - 1))
    return (of_seed.squeeze(2).var(dim=0) - mean_square / images) / seeds
