"""One HTML page about a retrieval evaluation: its numbers, its similarities, and examples of successes and failures."""

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vl_plugins import __version__
from vl_plugins.data import Collection
from vl_plugins.data.files import write_file
from vl_plugins.data.limits import MAX_IMAGE_PIXELS
from vl_plugins.data.samples import decode, inspect_image
from vl_plugins.errors import UserError, require
from vl_plugins.plots.figures import COLORS, new_figure, style_curves
from vl_plugins.retrieval.metrics import metrics_table
from vl_plugins.retrieval.ranks import DirectionRanks, Ranks

__all__ = ["write_report"]

ANSWERS, EXAMPLES = 5, 20
LONGEST_SIDE, QUALITY = 160, 80  # of thumbnails: pixels, JPEG


class Example(NamedTuple):
    """A query and its answers, by index.

    Attributes:
        query: index of the image or caption.
        rank: of its best right answer.
        answers: (place, candidate, similarity, is right) of the first answers, and of the best right one.
    """

    query: int
    rank: int
    answers: list[tuple[int, int, float, bool]]


def write_report(
    file: str | os.PathLike[str],
    ranks: Ranks,
    tables: Sequence[Mapping[str, Mapping[str, float]]],
    *,
    title: str,
    settings: Mapping[str, str],
    collection: Collection | None = None,
    examples: int = EXAMPLES,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> None:
    """Write a page with metrics, histograms of similarities, recall curves, and examples with thumbnails.

    It is one file without scripts that loads nothing from the network. Pictures are JPEG of at most 160 pixels.

    Args:
        file: appears complete or not at all; its folder is created.
        ranks: of the model that is shown.
        tables: metrics of :func:`~vl_plugins.retrieval.retrieval_metrics` by name, and those that ECCV Caption judges.
        title: of the page.
        settings: what was evaluated, and how: name -> value.
        collection: images and captions in the order of the ranks; without it the page has no examples.
        examples: at most so many successes and so many failures of each direction, spread evenly over all of them. A
            success is a query of rank 1.
        max_image_pixels: of larger pictures the page has the size only; 0 for no limit.

    Raises:
        UserError: the file cannot be written, or a shard cannot be read or has changed.
        MissingExtraError: jinja2, matplotlib or pillow is not installed.
    """
    jinja2 = require("jinja2", extra="eval")
    ranks = Ranks(*(DirectionRanks(*(field.cpu() for field in part)) for part in ranks))
    groups = [] if collection is None else _examples(ranks, examples)
    images = set()
    for queries, _, _, shown in groups:
        for example in shown:
            images |= {example.query} if queries == "image" else {candidate for _, candidate, _, _ in example.answers}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("report.html.jinja").render(
        title=title,
        settings=settings,
        tables=[metrics_table(results, bool(judged)) for judged, results in enumerate(tables) if results],
        charts=_charts(ranks),
        groups=groups,
        collection=collection,
        pictures=_thumbnails(collection, images, max_image_pixels) if collection else {},
        version=__version__,
    )
    write_file(file, page.encode(errors="replace"))  # file names may hold bytes of no encoding


def _charts(ranks: Ranks) -> dict[str, str]:
    """Return histograms of similarities and curves of Recall@K: URLs that hold SVG images, by what they show."""
    figures = [new_figure(6, 3.6) for _ in range(2)]
    left, right = (figure.subplots() for figure in figures)
    similarities = {"right pairs": ranks.image_to_text.positive_similarity}
    similarities |= {
        f"hardest negative of each {query}": part.negative_similarity[:, 0]
        for query, part in zip(("image", "caption"), ranks, strict=True)
    }
    similarities = {label: values[values.isfinite()] for label, values in similarities.items()}
    bins = torch.linspace(*torch.cat([*similarities.values()]).aminmax(), 51).numpy()
    for (label, values), color in zip(similarities.items(), COLORS, strict=False):
        weights = values.new_full((len(values),), 100 / max(1, len(values))).numpy()
        left.hist(values.numpy(), bins, weights=weights, histtype="step", color=color, label=label)
    for label, part, color in zip(("image to text", "text to image"), ranks, COLORS, strict=False):
        share = 100 * torch.arange(1, len(part.rank) + 1) / len(part.rank)
        right.plot(part.rank.sort().values, share, drawstyle="steps-post", color=color, label=label)
    left.set(xlabel="similarity", ylabel="percent")
    right.set(xlabel="K", ylabel="Recall@K in percent", xscale="log", ylim=(0, 100))
    urls = {}
    for figure, axes, what in zip(figures, (left, right), ("similarities", "Recall@K by K"), strict=True):
        style_curves(axes)
        axes.legend()
        stream = io.BytesIO()
        with require("matplotlib", extra="eval").rc_context({"svg.hashsalt": what}):  # equal bytes in every run
            figure.savefig(stream, format="svg", metadata={"Date": None})
        urls[what] = _url("image/svg+xml", stream)
    return urls


def _url(kind: str, stream: io.BytesIO) -> str:
    return f"data:{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"


def _examples(ranks: Ranks, number: int) -> list[tuple[str, str, int, list[Example]]]:
    """Return kind of the queries, outcome, how many there are, and examples: failures, then successes.

    Failures go from the worst rank to the nearest miss, successes from the largest lead over the hardest negative.
    """
    groups = []
    for queries, part in zip(("image", "caption"), ranks, strict=True):
        ends = part.positive_query.bincount(minlength=len(part.queries)).cumsum(0).tolist()
        starts = [0, *ends[:-1]]  # of the right answers of each query, the best of which comes first
        lead = part.positive_similarity[starts] - part.negative_similarity[:, 0]
        by_lead = lead.argsort()
        worst_first = by_lead[part.rank[by_lead].argsort(descending=True, stable=True)]
        is_hit = part.rank[worst_first] == 1
        for outcome, order in (("failures", worst_first[~is_hit]), ("successes", worst_first[is_hit].flip(0))):
            spread = torch.linspace(0, len(order) - 1, min(number, len(order))).round().long()
            shown = [_example(part, query, slice(starts[query], ends[query])) for query in order[spread].tolist()]
            groups.append((queries, outcome, len(order), shown))
    return groups


def _example(part: DirectionRanks, query: int, own: slice) -> Example:
    """Return an example, given the position of a query and those of its right answers."""
    both = part.positives[own].tolist(), part.positive_similarity[own].tolist()
    right = [(*pair, True) for pair in zip(*both, strict=True)]
    wrong = zip(part.negatives[query].tolist(), part.negative_similarity[query].tolist(), strict=True)
    answers = [(*pair, False) for pair in wrong if pair[0] >= 0] + right
    answers.sort(key=lambda answer: -answer[1])  # of equal ones the wrong ones stay first
    rank, rows = int(part.rank[query]), [(place, *answer) for place, answer in enumerate(answers, 1)]
    best = [(rank, *right[0])] if rank > ANSWERS else []
    return Example(int(part.queries[query]), rank, rows[:ANSWERS] + best)


def _thumbnails(collection: Collection, images: set[int], max_image_pixels: int) -> dict[int, dict[str, Any]]:
    """Return a ``url`` that holds the picture, or the ``problem`` with it, for each image."""
    thumbnails = {}
    for index, data in collection.pictures(images).items():
        stream = io.BytesIO()
        try:
            inspect_image(data, max_image_pixels=max_image_pixels)
            picture = decode({"jpg": data}, max_image_pixels=max_image_pixels)
            picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            picture.save(stream, "JPEG", quality=QUALITY, optimize=True)
            thumbnails[index] = {"url": _url("image/jpeg", stream)}
        except UserError as error:
            thumbnails[index] = {"problem": str(error)}
    return thumbnails
