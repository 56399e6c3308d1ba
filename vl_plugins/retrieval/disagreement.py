r"""Where two models differ: groups of captions on which one model gains or loses most; queries that one alone finds.

Let :math:`d_q` be the difference of two models in R@1 on query q, in percent; with several seeds, R@1 of a query is the
share of the seeds that find it. A group of n of the Q queries deviates from all queries by

.. math:: D = \frac{1}{n} \sum_{q \in g} d_q - \frac{1}{Q} \sum_q d_q = \bar{d}_g - \bar{d}

An image with its captions is one draw, so queries of one image stay together. With image i's influence on D,

.. math:: u_i = \frac{1}{n} \sum_{q \in i \cap g} (d_q - \bar{d}_g) - \frac{1}{Q} \sum_{q \in i} (d_q - \bar{d})

the variance of D is

.. math:: V = \frac{G}{G - 1} \sum_i u_i^2
    + 2 \left(\frac{100}{n} \left(1 - \frac{n}{Q}\right)\right)^2 + 2 \left(\frac{100}{Q}\right)^2

G is the effective number of images. With :math:`n_i` queries of image i in the group, the group has
:math:`n^2 / \sum_i n_i^2` images. These are fewer than it touches if a few of them have most of its queries. The same
holds for the queries outside, and G is the smaller one of the two numbers.

The last two terms are two queries more inside the group and two outside, one found by each model alone (Bonett and
Price 2012, for paired proportions). Without them the interval has no width where the two models agree on each query.

The interval is :math:`D \pm t \sqrt{V}` with the quantile t of Student's distribution with G - 1 degrees of freedom.
Its level is 95 % for all groups together (Bonferroni).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

import torch
from scipy.special import stdtrit
from torch import Tensor

from vl_plugins.retrieval.ranks import DirectionRanks

if TYPE_CHECKING:
    from vl_plugins.data import Collection

__all__ = ["Group", "caption_groups", "group_differences", "groups_of_shards", "only_one_finds"]

FEWEST = 30  # captions of a group
FEWEST_IMAGES = 2  # effective ones
LEVEL = 0.95
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~" + "“”‘’„‚«»‹›…–—¡¿·。、，．！？；：।॥؟،؛"


@dataclass(frozen=True)
class Group:
    """How a model differs from the baseline on a group of captions, compared with all captions.

    Attributes:
        name: a word in quotes, a range of lengths, or a group of the shards.
        captions, images: how many captions the group has, and of how many images they are.
        value, baseline: R@1 of both models in the group, in percent.
        deviation: their difference in the group, less their difference over all captions.
        low, high: the interval of ``deviation``; the intervals of all groups together hold in 95 of 100 repetitions.
    """

    name: str
    captions: int
    images: int
    value: float
    baseline: float
    deviation: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """R@1 of the model less that of the baseline, in percent."""
        return self.value - self.baseline

    @property
    def resolved(self) -> bool:
        """Whether the group deviates from all captions by more than chance."""
        return self.low > 0 or self.high < 0

    @property
    def certainty(self) -> float:
        """The deviation in half widths of its interval; groups above 1 are resolved."""
        return abs(self.deviation) / ((self.high - self.low) / 2)


def groups_of_shards(collection: "Collection") -> list[int | str | None]:
    """Return the ``group`` of each caption's image, such as the video of a frame; None where the shards have none."""
    records = collection.records
    return [records[image].group for image in collection.image_of_caption.tolist()]


def caption_groups(
    captions: Sequence[str], group_of_caption: Sequence[int | str | None] | None = None
) -> dict[str, Tensor]:
    """Return groups of captions: by length in words, by group of the shards, and by word.

    Words are separated by white space, without case and without punctuation at their ends. Lengths fall into thirds as
    far as ties allow: captions of one length stay together, so there may be two groups, or none where nearly all
    captions have one length.

    Args:
        captions: (C,) texts.
        group_of_caption: (C,) as of :func:`groups_of_shards`.

    Returns:
        Ascending indices of captions by the name of the group, such as ``“dog”``, ``up to 9 words`` or ``group 17``.
    """
    members: dict[str, list[int]] = {}
    of_words: dict[str, list[int]] = {}
    lengths = []
    for index, caption in enumerate(captions):
        words = _words(caption)
        lengths.append(len(words))
        for word in set(words):
            of_words.setdefault(f"“{word}”", []).append(index)
    for index, group in enumerate(group_of_caption or ()):
        if group is not None:
            members.setdefault(f"group {group}", []).append(index)
    for word in sorted(of_words):
        members[word] = of_words[word]
    groups = _length_groups(torch.tensor(lengths, dtype=torch.int64))
    for name, indices in members.items():
        groups[name] = torch.tensor(indices)
    return groups


def _words(caption: str) -> list[str]:
    words = []
    for token in caption.casefold().split():
        word = token.strip(PUNCTUATION)
        if word:
            words.append(word)
    return words


def _length_groups(lengths: Tensor) -> dict[str, Tensor]:
    """Return indices by thirds of the lengths (C,), without thirds that are empty or hold all captions."""
    if not len(lengths):
        return {}
    ascending = lengths.sort().values
    first = int(ascending[(len(lengths) - 1) // 3])
    second = int(ascending[(len(lengths) - 1) * 2 // 3])
    middle = f"{first + 1} to {_words_of(second)}"
    if second == first + 1:
        middle = _words_of(second)
    thirds = {
        f"up to {_words_of(first)}": lengths <= first,
        middle: (lengths > first) & (lengths <= second),
        f"more than {_words_of(second)}": lengths > second,
    }
    groups = {}
    for name, is_member in thirds.items():
        if is_member.any() and not is_member.all():
            groups[name] = is_member.nonzero().flatten()
    return groups


def _words_of(length: int) -> str:
    if length == 1:
        return "1 word"
    return f"{length} words"


def group_differences(
    hits: Tensor,
    baseline_hits: Tensor,
    image_of_query: Tensor,
    groups: Mapping[str, Tensor],
    fewest: int = FEWEST,
) -> list[Group]:
    """Return on which groups of captions a model differs from the baseline more, or less, than on all captions.

    Use it to see what a model has learned or lost. All groups that are tried are returned, because each of them widens
    the intervals of the others. The interval is about these trained models, the choice of the images, and this gallery.

    Args:
        hits, baseline_hits: (Q,) for each text query whether it is found first, or the share of the seeds that find it.
        image_of_query: (Q,) int64, the image that each caption describes.
        groups: positions of queries by name, each position once, as of :func:`caption_groups`.
        fewest: groups with fewer queries are not tried, nor those outside of which there are fewer. A group of one
            image is not tried either.

    Returns:
        The group that deviates most clearly first.

    Raises:
        ValueError: the three tensors have different shapes, or ``fewest`` is below 2.
    """
    if not hits.shape == baseline_hits.shape == image_of_query.shape or hits.ndim != 1:
        shapes = [tuple(tensor.shape) for tensor in (hits, baseline_hits, image_of_query)]
        raise ValueError(f"hits, baseline_hits and image_of_query must have one shape (Q,), got {shapes}")
    if fewest < 2:
        raise ValueError(f"fewest must be at least 2, got {fewest}")
    owners = image_of_query.cpu()
    value = 100 * hits.double().cpu()
    baseline = 100 * baseline_hits.double().cpu()
    tried = {}
    for name, queries in groups.items():
        is_large = fewest <= len(queries) <= len(value) - fewest
        if is_large and _effective_images(queries, owners) >= FEWEST_IMAGES:
            tried[name] = queries
    differences = []
    for name, queries in tried.items():
        differences.append(_group(name, queries, value, baseline, owners, len(tried)))
    differences.sort(key=lambda group: -group.certainty)
    return differences


def _effective_images(queries: Tensor, owners: Tensor) -> float:
    """Return the effective number of images G, given positions in the group and the image of each query."""
    images = owners.bincount().double()
    inside = owners[queries].bincount(minlength=len(images)).double()
    outside = images - inside
    of_group = inside.sum().square() / inside.square().sum()
    of_others = outside.sum().square() / outside.square().sum()
    return min(float(of_group), float(of_others))


def _group(name: str, queries: Tensor, value: Tensor, baseline: Tensor, owners: Tensor, tried: int) -> Group:
    """Compute one group as the head of this file says; value and baseline in percent."""
    difference = value - baseline
    all_queries, members = len(difference), len(queries)
    in_group = difference[queries]
    influence = torch.zeros(int(owners.max()) + 1, dtype=torch.float64)
    influence.index_add_(0, owners[queries], (in_group - in_group.mean()) / members)
    influence.index_add_(0, owners, (difference.mean() - difference) / all_queries)
    freedom = _effective_images(queries, owners) - 1
    inside = 100 / members * (1 - members / all_queries)
    outside = 100 / all_queries
    of_images = (freedom + 1) / freedom * float(influence.square().sum())
    variance = of_images + 2 * inside**2 + 2 * outside**2
    half_width = float(stdtrit(freedom, 1 - (1 - LEVEL) / 2 / tried)) * sqrt(variance)
    deviation = float(in_group.mean() - difference.mean())
    return Group(
        name=name,
        captions=members,
        images=len(owners[queries].unique()),
        value=float(value[queries].mean()),
        baseline=float(baseline[queries].mean()),
        deviation=deviation,
        low=deviation - half_width,
        high=deviation + half_width,
    )


def only_one_finds(ours: DirectionRanks, baseline: DirectionRanks, k: int = 1) -> Tensor:
    """Return the queries that our model finds among the first K answers and the baseline does not.

    Exchange the arguments for the queries that the baseline alone finds.

    Args:
        ours, baseline: ranks of one direction for the same queries.
        k: a query is found if its best right answer has at most this rank.

    Returns:
        Positions of queries in the ranks, int64, the largest gain in rank first.

    Raises:
        ValueError: the two are about different queries.
    """
    if not torch.equal(ours.queries, baseline.queries):
        raise ValueError("ours and baseline must have the same queries")
    positions = ((ours.rank <= k) & (baseline.rank > k)).nonzero().flatten()
    gain = baseline.rank[positions] - ours.rank[positions]
    return positions[gain.argsort(descending=True, stable=True)]
