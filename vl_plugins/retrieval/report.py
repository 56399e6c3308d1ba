"""One HTML page about a retrieval evaluation: its numbers, its similarities, and examples of successes and failures."""

import base64
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2
import torch

from vl_plugins import __version__
from vl_plugins.data.collection import Collection
from vl_plugins.data.files import write_file
from vl_plugins.data.images import scaled_picture
from vl_plugins.errors import UserError, require
from vl_plugins.retrieval.features import Id
from vl_plugins.retrieval.queries import Answers
from vl_plugins.retrieval.ranks import DirectionRanks, Ranks, best_answers

__all__ = ["report_file", "write_report"]

MISSING = "–"
ANSWERS = 5
EXAMPLES = 20

LONGEST_SIDE = 160  # pixels
QUALITY = 80  # of JPEG

COLUMNS = {"median_rank": "median", "mean_rank": "mean", "mean_average_precision_at_r": "mAP@R", "r_precision": "R-P"}
BINS = 50
POINTS = 200  # of a rank curve


class _Direction(NamedTuple):
    """Texts of one direction, and what its queries and candidates are."""

    name: str
    metrics: str
    queries: str
    candidates: str


DIRECTIONS = (
    _Direction("Image to text", "image_to_text", "image", "caption"),
    _Direction("Text to image", "text_to_image", "caption", "image"),
)


class _Line(NamedTuple):
    """A line of a chart, of points (x, y) in [0, 1] from the lower left."""

    label: str
    points: list[tuple[float, float]]


class _Chart(NamedTuple):
    """A chart; ticks are places in [0, 1] with their labels."""

    title: str
    x_label: str
    lines: list[_Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


class _Picture(NamedTuple):
    """An image to be shown, as a URL that holds it, or else with the problem."""

    key: str
    id: Id
    url: str
    problem: str


class _Answer(NamedTuple):
    """A candidate, given by its index, at a place among the answers to a query."""

    place: int
    candidate: int
    similarity: float
    right: bool


class _Example(NamedTuple):
    """A query, by its index, with the rank of its best right answer."""

    query: int
    rank: int
    answers: list[_Answer]


class _Group(NamedTuple):
    """Examples of the successes or failures of one direction, and how many there are altogether."""

    direction: _Direction
    outcome: str
    total: int
    examples: list[_Example]


def report_file(file: str | os.PathLike[str]) -> Path:
    """Return the path of a report that can be written. To be called before the work that the report is about.

    Raises:
        UserError: it does not end in ``.html``, or is a folder.
        MissingExtraError: pillow is not installed.
    """
    file = Path(file)
    if file.suffix.lower() != ".html":
        raise UserError(f"the report must end in .html, got {file}")
    if file.is_dir():
        raise UserError(f"the report must be a file, {file} is a folder")
    require("PIL.Image", extra="data")
    return file


def write_report(
    file: str | os.PathLike[str],
    ranks: Ranks,
    results: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    settings: Mapping[str, str],
    paths: Mapping[str, str] | None = None,
    collection: Collection | None = None,
    examples: int = EXAMPLES,
    queries: Sequence[Answers] = (),
) -> None:
    """Write a page with the numbers, the distribution of similarities, rank curves, and examples.

    It is one file without scripts that asks the network for nothing. The same arguments give the same bytes. Pictures
    are JPEG of at most 160 pixels, 4 to 8 kB for a photograph and a third more in the page.

    Args:
        file: ends in ``.html``; it appears complete or not at all, and its folder is created.
        ranks: of the model that is shown, with at least 5 ``negatives`` where there is a collection.
        results: name of an evaluation, such as ``"coco-5k"``, -> metrics of
            :func:`vl_plugins.retrieval.retrieval_metrics`; a metric that is missing shows as –.
        title: of the page.
        settings: what was evaluated, and how: name -> value.
        paths: name in ``results`` -> file that it belongs to, shown as a tooltip.
        collection: images and captions in the order of the ranks; without it the page has no examples.
        examples: at most so many successes and so many failures of each direction, >= 1. A success is a query whose
            best right answer has rank 1. They are spread evenly over all successes, from the largest lead over the
            hardest negative to the smallest, and over all failures, from the worst rank to the best.
        queries: answers to the user's queries, by indices of the collection, which they need.

    Raises:
        ValueError: ``results`` is empty, ``examples`` is not positive, or ``ranks`` has too few ``negatives``.
        UserError: the file has another ending or cannot be written, or a shard cannot be read or has changed.
        MissingExtraError: pillow is not installed.
    """
    file = report_file(file)
    if not results:
        raise ValueError("results must hold at least one named result, got none")
    if examples < 1:
        raise ValueError(f"examples must be positive, got {examples}")
    ranks = Ranks(*(DirectionRanks(*(field.cpu() for field in part)) for part in ranks))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vl_plugins.retrieval", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    groups = [] if collection is None else _examples(ranks, examples)
    page = environment.get_template("report.html.jinja").render(
        title=title,
        settings=settings,
        columns=_columns(results),
        rows={name: {key: _number(value) for key, value in metrics.items()} for name, metrics in results.items()},
        paths=paths or {},
        missing=MISSING,
        charts=[_similarity_chart(ranks), _recall_chart(ranks)],
        groups=groups,
        queries=queries,
        collection=collection,
        pictures={} if collection is None else _pictures(collection, _shown_images(groups, queries)),
        version=__version__,
    )
    # File names may hold bytes that are no letters in any encoding.
    write_file(file, page.encode(errors="replace"))


def _columns(results: Mapping[str, Mapping[str, float]]) -> list[tuple[str, dict[str, str]]]:
    """Return for each direction its name, and the metrics that any result has: name -> heading."""
    names = list(dict.fromkeys(name for metrics in results.values() for name in metrics))
    columns = []
    for direction in DIRECTIONS:
        prefix = f"{direction.metrics}_"
        keys = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        keys.sort(key=lambda key: (key in COLUMNS, [*COLUMNS].index(key) if key in COLUMNS else 0))
        columns.append((direction.name, {prefix + key: COLUMNS.get(key, key) for key in keys}))
    return columns


def _number(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else MISSING


def _similarity_chart(ranks: Ranks) -> _Chart:
    """Return histograms of the similarities of right pairs and of the hardest negatives of both directions."""
    similarities = {"right pairs": ranks.image_to_text.positive_similarity}
    for direction, part in zip(DIRECTIONS, ranks, strict=True):
        similarities[f"hardest negative of each {direction.queries}"] = part.hardest_negative_similarity
    # Where there are no negatives, the hardest one is -inf.
    similarities = {label: values[values.isfinite()].double() for label, values in similarities.items()}
    everything = torch.cat(list(similarities.values()))
    low, high = everything.min().item(), everything.max().item()
    if low == high:
        low, high = low - 0.5, high + 0.5
    shares = {label: values.histc(BINS, low, high) / max(len(values), 1) for label, values in similarities.items()}
    highest = max(share.max().item() for share in shares.values())
    lines = []
    for label, share in shares.items():
        steps = [(edge / BINS, y / highest) for place, y in enumerate(share.tolist()) for edge in (place, place + 1)]
        mean = similarities[label].mean().item()
        lines.append(_Line(f"{label}, mean {f'{mean:.3f}' if math.isfinite(mean) else MISSING}", steps))
    x_ticks = [(place / 4, f"{low + place / 4 * (high - low):.2f}") for place in range(5)]
    y_ticks = [(place / 2, f"{50 * place * highest:.0f}%") for place in range(3)]
    return _Chart("Similarities", "similarity", lines, x_ticks, y_ticks)


def _recall_chart(ranks: Ranks) -> _Chart:
    """Return Recall@K over K of both directions, up to the worst rank."""
    last = max(10, *(int(part.rank.max()) for part in ranks))
    k = torch.logspace(0, math.log10(last), POINTS, dtype=torch.float64).round().unique()
    lines = []
    for direction, part in zip(DIRECTIONS, ranks, strict=True):
        recall = torch.searchsorted(part.rank.double().sort().values, k, right=True) / len(part.rank)
        places = k.log() / math.log(last)
        lines.append(_Line(direction.name, list(zip(places.tolist(), recall.tolist(), strict=True))))
    x_ticks = [(zeros / math.log10(last), f"{10**zeros:,}") for zeros in range(len(str(last)))]
    y_ticks = [(percent / 100, f"{percent}%") for percent in range(0, 101, 25)]
    return _Chart("Recall@K", "K", lines, x_ticks, y_ticks)


def _examples(ranks: Ranks, number: int) -> list[_Group]:
    """Return the failures and the successes of both directions."""
    fewest = min(part.negatives.shape[1] for part in ranks)
    if fewest < ANSWERS:
        raise ValueError(f"ranks must have at least {ANSWERS} negatives to show examples, got {fewest}")
    groups = []
    for direction, part in zip(DIRECTIONS, ranks, strict=True):
        best = part.place_in_query() == 0
        lead = (part.positive_similarity[best].double() - part.hardest_negative_similarity.double()).tolist()
        rank, positives = part.rank.tolist(), part.positives[best].tolist()
        similarities = part.positive_similarity[best].tolist()
        answers = [field.tolist() for field in best_answers(part, ANSWERS)]
        # From the clearest success to the worst failure.
        order = sorted(range(len(rank)), key=lambda query: (rank[query], -lead[query]))
        hits = rank.count(1)
        for outcome, queries in (("failures", order[hits:][::-1]), ("successes", order[:hits])):
            shown = []
            for query in _spread(queries, number):
                rows = zip(*(field[query] for field in answers), strict=True)
                listed = [_Answer(place, *row) for place, row in enumerate(rows, 1) if row[0] >= 0]
                if positives[query] not in [answer.candidate for answer in listed]:
                    listed.append(_Answer(rank[query], positives[query], similarities[query], True))
                shown.append(_Example(int(part.queries[query]), rank[query], listed))
            groups.append(_Group(direction, outcome, len(queries), shown))
    return groups


def _spread(queries: list[int], number: int) -> list[int]:
    """Return so many queries at equal distances, with the first and the last; all where there are not more.

    >>> _spread([3, 5, 4, 1, 2], 3)
    [3, 4, 2]
    """
    if len(queries) <= number:
        return queries
    return [queries[round(place * (len(queries) - 1) / max(number - 1, 1))] for place in range(number)]


def _shown_images(groups: Sequence[_Group], queries: Sequence[Answers]) -> set[int]:
    """Return the indices of the images in examples and answers."""
    images = {index for answers in queries for index, _ in answers.images}
    for group in groups:
        for example in group.examples:
            is_query = group.direction.queries == "image"
            images |= {example.query} if is_query else {answer.candidate for answer in example.answers}
    return images


def _pictures(collection: Collection, images: Iterable[int]) -> dict[int, _Picture]:
    """Return the images to be shown by their indices."""
    pictures = {}
    for index, data in collection.pictures(images).items():
        url, problem = "", ""
        try:
            url = f"data:image/jpeg;base64,{base64.b64encode(_thumbnail(data)).decode()}"
        except UserError as error:
            problem = str(error)
        pictures[index] = _Picture(collection.keys[index], collection.image_ids[index], url, problem)
    return pictures


def _thumbnail(data: bytes) -> bytes:
    """Return a JPEG file of a picture, scaled down where it is larger than 160 pixels.

    Raises:
        UserError: the picture is damaged, or one that shards do not hold.
    """
    stream = io.BytesIO()
    scaled_picture(data, LONGEST_SIDE).save(stream, "JPEG", quality=QUALITY, optimize=True)
    return stream.getvalue()
