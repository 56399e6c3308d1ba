r"""Right answers among the first K candidates, where ties count against the model, and where they count in its favor.

Let :math:`p_1 \ge p_2 \ge \dots \ge p_R` be the similarities of the R right answers to a query and :math:`s_n` those of
its wrong candidates. The places of the right answers among all candidates, from 1, are

.. math::
    \text{against}_i = i + |\{n: s_n \ge p_i\}|, \qquad \text{in favor}_i = i + |\{n: s_n > p_i\}|

A place of at most 10 depends only on the ten most similar wrong candidates, which :class:`DirectionRanks` holds. So
these two ends need no further similarities.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.retrieval.metrics import RECALL_AT
from vl_plugins.retrieval.ranks import DirectionRanks

__all__ = ["Bounds", "caption_rows", "image_rows", "right_counts"]


class Bounds(NamedTuple):
    """Values (Q, 3) of each query and K where ties count against the model, and where they count in its favor."""

    low: Tensor
    high: Tensor


def right_counts(ranks: DirectionRanks, *, only_positive: bool = False) -> Bounds:
    """Return how many right answers each query has among its first K candidates.

    Args:
        ranks: with at least ten wrong candidates of each query, or all of them.
        only_positive: leave out right answers whose similarity is 0 or less.
    """
    wrong_at_least, wrong_above = _wrong_candidates(ranks)
    number = 1 + ranks.positive_numbers()
    counted = ranks.positive_similarity > 0 if only_positive else torch.ones_like(number, dtype=torch.bool)
    ends = []
    for wrong in (wrong_at_least, wrong_above):
        is_within = _within(number + wrong) & counted[:, None]
        counts = torch.zeros(len(ranks.queries), len(RECALL_AT), dtype=torch.int64)
        ends.append(counts.index_add(0, ranks.positive_query, is_within.long()))
    return Bounds(*ends)


def image_rows(ranks: DirectionRanks) -> Bounds:
    """Return the hits (C, 3) of image-to-text retrieval with a row for each pair of an image and a caption.

    Each image is a query once for each of its captions, and only that caption is right.
    """
    wrong_at_least, wrong_above = _wrong_candidates(ranks)
    number = ranks.positive_numbers()
    query, similarity = ranks.positive_query, ranks.positive_similarity
    is_first_of_ties = torch.ones_like(query, dtype=torch.bool)
    is_first_of_ties[1:] = (query[1:] != query[:-1]) | (similarity[1:] != similarity[:-1])
    group = is_first_of_ties.long().cumsum(0) - 1
    captions_above = number[is_first_of_ties][group]
    captions_at_least = captions_above + group.bincount()[group]
    low = _within(captions_at_least + wrong_at_least)
    high = _within(1 + captions_above + wrong_above)
    return Bounds(low, high)


def caption_rows(ranks: DirectionRanks, captions_of_image: Tensor) -> Bounds:
    """Return the hits (C, 3) of text-to-image retrieval with a row for each pair of an image and a caption.

    Each image is a candidate once for each of its captions, so it ties with itself, and only the caption's own row is
    right.

    Args:
        ranks: of captions with one right image each.
        captions_of_image: (I,) int64, number of captions of each image.
    """
    wrong_at_least, wrong_above = _wrong_candidates(ranks, captions_of_image)
    own_rows = captions_of_image[ranks.positives]
    return Bounds(_within(own_rows + wrong_at_least), _within(1 + wrong_above))


def _wrong_candidates(ranks: DirectionRanks, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return how many wrong candidates are as similar as each right answer or more, and how many are more similar.

    Args:
        weights: (C,) int64, each candidate counts that often; once by default.
    """
    weight = torch.ones_like(ranks.negatives)
    if weights is not None:
        weight = weights[ranks.negatives.clamp(min=0)]  # padding of negatives has similarity -inf
    weight = weight[ranks.positive_query]
    wrong = ranks.negative_similarity[ranks.positive_query]
    right = ranks.positive_similarity[:, None]
    at_least = (weight * (wrong >= right)).sum(dim=1)
    above = (weight * (wrong > right)).sum(dim=1)
    return at_least, above


def _within(places: Tensor) -> Tensor:
    """Return which places (N,) are at most K, (N, 3)."""
    return places[:, None] <= torch.tensor(RECALL_AT)
