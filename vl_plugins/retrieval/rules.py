r"""The recalls that other tools' rules give from the same embeddings.

With :math:`h_q(K)` the number of right answers among the first K candidates of query :math:`q`, and :math:`R_q` the
number of all its right answers, a tool averages over the queries one of

.. math:: [h_q(K) > 0], \qquad h_q(K) / R_q, \qquad h_q(K) / K

Tools also differ in the images and captions that are compared, in the right answers, and in the order of ties.
:mod:`vl_plugins.retrieval.tools` has a sentence for each rule.

All rules are applied to similarities that this project computes: in float32 at least, where equal embeddings tie
exactly. The tools compute plain products, in which equal embeddings may differ in the last bits. So their own numbers
may differ from these where embeddings occur twice or similarities are very close.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from vl_plugins.retrieval import tools
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.id_order import CountsById, Direction, counts_by_id, unique_texts
from vl_plugins.retrieval.metrics import DIRECTIONS, RECALL_AT
from vl_plugins.retrieval.places import Bounds, caption_rows, image_rows, right_counts
from vl_plugins.retrieval.protocols import first_captions
from vl_plugins.retrieval.ranks import Ranks, similarity_ranks
from vl_plugins.retrieval.similarities import Similarities
from vl_plugins.retrieval.tools import Rule, ToolNumbers, format_rules, rules_notes, rules_table

__all__ = ["ToolNumbers", "format_rules", "rules_notes", "rules_table", "tool_numbers"]

MTEB_RETRIEVED = 1001  # candidates of a query that mteb takes with `torch.topk`, one more than its top_k of 1,000
VSEPP_CAPTIONS = 5
FOLDS = 5
FOLDED_IMAGES = 5000

Score = Callable[[Tensor, Tensor], Tensor]
"""Maps the right answers among the first K (Q, 3) and all right answers (Q,) to what each query scores (Q, 3)."""


@torch.no_grad()
def tool_numbers(
    features: Features, ranks: Ranks | None = None, *, device: str | torch.device = "cpu"
) -> list[ToolNumbers]:
    """Return the recalls that the rules of other tools give from the same embeddings, one item for each rule.

    Use it to find out why a number differs from another program's, or from a paper's. To compare models, use
    :func:`vl_plugins.retrieval.retrieval_metrics`, whose recalls are the first item.

    Ids decide ties in two tools. Where ``features`` has no ids, or ids that are not unique as text, the positions are
    taken, as text.

    Args:
        features: images and captions.
        ranks: of all images and captions of ``features``, with ``top`` 10 or more; computed by default.
        device: where similarities are computed.

    Raises:
        ValueError: ranks of other images and captions, or with a smaller ``top``.

    >>> images = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> captions = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    >>> numbers = tool_numbers(Features(images=images, captions=captions, image_of_caption=torch.tensor([0, 0, 1])))
    >>> [(one.tool, one.rule, one.low["image_to_text_R@1"]) for one in numbers[4:6]]
    [('sentence-transformers', 'accuracy@K', 1.0), ('sentence-transformers', 'recall@K', 0.75)]
    """
    similarities = features.similarities(device)
    if ranks is None:
        ranks = similarity_ranks(similarities, features.image_of_caption)
    _check_ranks(ranks, features)
    ranks = ranks.cpu()
    counts = (right_counts(ranks.image_to_text), right_counts(ranks.text_to_image))
    return [
        _numbers(tools.OURS, ranks, (_at_low(counts[0]), _at_low(counts[1])), _any),
        *_open_clip(features, ranks, device),
        _clip_benchmark(features, ranks, counts),
        *_by_id(features, similarities, ranks, counts),
        *_torchmetrics(ranks, counts),
        *_any_right_answer(features, ranks, counts, device),
    ]


def _check_ranks(ranks: Ranks, features: Features) -> None:
    captions = len(features.captions)
    shapes = [(len(one.queries), len(one.positives)) for one in ranks]
    if shapes != [(len(features.images), captions), (captions, captions)]:
        raise ValueError("expected ranks of all images and captions of the features, each caption right for one image")
    for one, candidates in zip(ranks, (captions, len(features.images)), strict=True):
        if one.negatives.shape[1] < min(max(RECALL_AT), candidates):
            raise ValueError(f"expected ranks with top={max(RECALL_AT)} or more, got {one.negatives.shape[1]}")


# What a query scores.


def _any(counts: Tensor, relevant: Tensor) -> Tensor:
    return (counts > 0).double()


def _share_of_answers(counts: Tensor, relevant: Tensor) -> Tensor:
    return counts.double() / relevant[:, None]


def _precision(counts: Tensor, relevant: Tensor) -> Tensor:
    return counts.double() / torch.tensor(RECALL_AT)


def _at_low(counts: Bounds) -> Bounds:
    return Bounds(counts.low, counts.low)


def _numbers(rule: Rule, ranks: Ranks, counts: tuple[Bounds, Bounds], score: Score, note: str = "") -> ToolNumbers:
    """Return the mean over the queries of what each scores."""
    scores = []
    for direction, (low, high) in zip(ranks, counts, strict=True):
        scores.append(Bounds(score(low, direction.relevant), score(high, direction.relevant)))
    return _means(rule, (scores[0], scores[1]), note)


def _means(rule: Rule, scores: tuple[Bounds, Bounds], note: str = "") -> ToolNumbers:
    """Return the mean over the queries of scores (Q, 3)."""
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    for direction, bounds in zip(DIRECTIONS, scores, strict=True):
        for column, k in enumerate(RECALL_AT):
            low[f"{direction}_R@{k}"] = bounds.low[:, column].double().mean().item()
            high[f"{direction}_R@{k}"] = bounds.high[:, column].double().mean().item()
    return ToolNumbers(rule.tool, rule.name, low, high, note)


def _inapplicable(rule: Rule, reason: str) -> ToolNumbers:
    return ToolNumbers(rule.tool, rule.name, {}, {}, reason)


# The rules, tool by tool.


def _open_clip(features: Features, ranks: Ranks, device: str | torch.device) -> Iterator[ToolNumbers]:
    captions_of_image = features.image_of_caption.cpu().bincount()
    rows = (image_rows(ranks.image_to_text), caption_rows(ranks.text_to_image, captions_of_image))
    yield _means(tools.OPEN_CLIP_ROWS, rows)
    if (captions_of_image > 1).any():
        images = torch.arange(len(features.images))
        selection = features.select(images, first_captions(features.image_of_caption, 1))
        ranks = _ranks(selection, device)
    counts = (right_counts(ranks.image_to_text), right_counts(ranks.text_to_image))
    yield _numbers(tools.OPEN_CLIP_FIRST, ranks, counts, _any)


def _ranks(features: Features, device: str | torch.device) -> Ranks:
    return similarity_ranks(features.similarities(device), features.image_of_caption).cpu()


def _clip_benchmark(features: Features, ranks: Ranks, counts: tuple[Bounds, Bounds]) -> ToolNumbers:
    for kind, embeddings in (("images", features.images), ("captions", features.captions)):
        if len(embeddings) < max(RECALL_AT):
            reason = f"`torch.topk` needs at least {max(RECALL_AT)} candidates, and there are {len(embeddings)} {kind}"
            return _inapplicable(tools.CLIP_BENCHMARK, reason)
    return _numbers(tools.CLIP_BENCHMARK, ranks, counts, _any)


def _by_id(
    features: Features, similarities: Similarities, ranks: Ranks, counts: tuple[Bounds, Bounds]
) -> Iterator[ToolNumbers]:
    """Yield the numbers of sentence-transformers and mteb, which order ties by ids."""
    image_ids, image_note = unique_texts("image", features.image_ids, len(features.images))
    caption_ids, caption_note = unique_texts("caption", features.caption_ids, len(features.captions))
    notes = [note for note in (image_note, caption_note) if note]
    images = torch.arange(len(features.images))
    owners = features.image_of_caption.cpu()
    device = similarities.device
    of_images = Direction(ranks.image_to_text, similarities.of_images, images, owners, caption_ids, device)
    of_captions = Direction(ranks.text_to_image, similarities.of_captions, owners, images, image_ids, device)
    by_id = (counts_by_id(of_images, counts[0]), counts_by_id(of_captions, counts[1]))
    rising = (Bounds(by_id[0].rising, by_id[0].rising), Bounds(by_id[1].rising, by_id[1].rising))
    yield _numbers(tools.ST_ACCURACY, ranks, rising, _any, "; ".join(notes))
    yield _numbers(tools.ST_RECALL, ranks, rising, _share_of_answers, "; ".join(notes))
    yield _numbers(tools.ST_PRECISION, ranks, rising, _precision, "; ".join(notes))
    unordered = sum(int((one.tied > MTEB_RETRIEVED).sum()) for one in by_id)
    if unordered:
        notes.append(
            f"ties of {unordered:,} queries reach beyond the {MTEB_RETRIEVED:,} candidates that `torch.topk` takes "
            "without an order"
        )
    falling = (_falling(by_id[0], counts[0]), _falling(by_id[1], counts[1]))
    yield _numbers(tools.MTEB_RECALL, ranks, falling, _share_of_answers, "; ".join(notes))
    yield _numbers(tools.MTEB_HIT_RATE, ranks, falling, _any, "; ".join(notes))


def _falling(by_id: CountsById, counts: Bounds) -> Bounds:
    """Return the right answers among the first K for mteb, whose order by falling ids is that of what it retrieved."""
    is_unordered = (by_id.tied > MTEB_RETRIEVED)[:, None]
    low = torch.where(is_unordered, counts.low, by_id.falling)
    high = torch.where(is_unordered, counts.high, by_id.falling)
    return Bounds(low, high)


def _torchmetrics(ranks: Ranks, counts: tuple[Bounds, Bounds]) -> Iterator[ToolNumbers]:
    of_images = right_counts(ranks.image_to_text, only_positive=True)
    of_captions = right_counts(ranks.text_to_image, only_positive=True)
    yield _numbers(tools.TORCHMETRICS_RECALL, ranks, (of_images, of_captions), _share_of_answers)
    yield _numbers(tools.TORCHMETRICS_HIT_RATE, ranks, counts, _any)
    yield _numbers(tools.TORCHMETRICS_PRECISION, ranks, (of_images, of_captions), _precision)


def _any_right_answer(
    features: Features, ranks: Ranks, counts: tuple[Bounds, Bounds], device: str | torch.device
) -> Iterator[ToolNumbers]:
    """Yield the numbers of eccv_caption and VSE++, of all images and in folds."""
    images = len(features.images)
    if images == FOLDED_IMAGES:
        eccv_folds = _fold_means(tools.ECCV_CAPTION_FOLDS, features, device)
    else:
        reason = f"its {FOLDS} folds take {FOLDED_IMAGES:,} images, and there are {images:,}"
        eccv_folds = _inapplicable(tools.ECCV_CAPTION_FOLDS, reason)
    vsepp = _numbers(tools.VSEPP, ranks, counts, _any)
    vsepp_folds = replace(eccv_folds, tool=tools.VSEPP_FOLDS.tool, rule=tools.VSEPP_FOLDS.name)
    deviating = int((features.image_of_caption.bincount() != VSEPP_CAPTIONS).sum())
    if deviating:
        reason = f"it takes {VSEPP_CAPTIONS} captions of each image; {deviating:,} of {images:,} have another number"
        vsepp = _inapplicable(tools.VSEPP, reason)
        vsepp_folds = _inapplicable(tools.VSEPP_FOLDS, reason)
    yield _numbers(tools.ECCV_CAPTION, ranks, counts, _any)
    yield eccv_folds
    yield vsepp
    yield vsepp_folds


def _fold_means(rule: Rule, features: Features, device: str | torch.device) -> ToolNumbers:
    """Return the mean over folds of consecutive images, each with its captions as its gallery."""
    folds = []
    for images in torch.arange(len(features.images)).chunk(FOLDS):
        captions = torch.isin(features.image_of_caption, images).nonzero().flatten()
        ranks = _ranks(features.select(images, captions), device)
        counts = (right_counts(ranks.image_to_text), right_counts(ranks.text_to_image))
        folds.append(_numbers(rule, ranks, counts, _any))
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    for metric in folds[0].low:
        low[metric] = fmean(fold.low[metric] for fold in folds)
        high[metric] = fmean(fold.high[metric] for fold in folds)
    return ToolNumbers(rule.tool, rule.name, low, high)
