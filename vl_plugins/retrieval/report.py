"""One HTML page about a retrieval evaluation: its numbers, its similarities, and examples to browse."""

import base64
import hashlib
import io
import math
import os
import re
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import torch
from markupsafe import Markup
from torch import Tensor

from vl_plugins import __version__
from vl_plugins.data.collection import Collection
from vl_plugins.data.images import IMAGE_EXTENSIONS, scaled_picture
from vl_plugins.data.storage import write_file
from vl_plugins.retrieval.metrics import RSUM_RECALLS
from vl_plugins.retrieval.queries import Answers
from vl_plugins.retrieval.ranks import DirectionRanks, Ranks, best_answers
from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = ["expected_recall", "report_file", "write_report"]

TEMPLATE = "report.html.jinja"

# What stands for a number that there is not.
MISSING = "–"

ANSWERS = 5
EXAMPLES = 60

# What shards hold; MPO is opened as the JPEG it begins with. Of the others that pillow knows some start programs.
FORMATS = tuple(name for name in IMAGE_EXTENSIONS if name != "MPO")
# Pixels, and of JPEG.
LONGEST_SIDE = 160
QUALITY = 80
# How many pictures are read at a time: as files they are a hundred times as large as what is kept of them.
PICTURES_AT_A_TIME = 100

BINS = 50
# Of a rank curve.
POINTS = 200

# What matplotlib draws in these colours gets the colour that the page has for it, light or dark.
COLOURS = {
    "#010101": "var(--text)",
    "#020202": "var(--faint)",
    "#030303": "var(--line)",
    "#040404": "var(--first)",
    "#050505": "var(--second)",
    "#060606": "var(--third)",
    "#070707": "var(--fourth)",
}
TEXT, FAINT, LINE, FIRST, SECOND, THIRD, FOURTH = COLOURS

STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": LINE,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
}


class _Direction(NamedTuple):
    """One direction as the page shows it.

    Args:
        name: such as ``"Image to text"``.
        anchor: the same as part of an address.
        queries: what they are called.
        ranks: on the CPU.
        right_answers: (Q,) number of right answers of each query.
        number_of_candidates: among which the right answers are ranked.
    """

    name: str
    anchor: str
    queries: str
    ranks: DirectionRanks
    right_answers: Tensor
    number_of_candidates: int

    @property
    def lead(self) -> Tensor:
        """By how much (Q,) the best right answer is more similar than the hardest negative; infinite without one."""
        best = self.ranks.positive_similarity[self.ranks.place_in_query() == 0]
        return best.double() - self.ranks.hardest_negative_similarity.double()

    def recall(self, k: Tensor) -> Tensor:
        """Return Recall@K in [0, 1] for each of some K."""
        ranks = self.ranks.rank.sort().values
        return torch.searchsorted(ranks, k, right=True).double() / len(ranks)

    def chance(self, k: Tensor) -> Tensor:
        """Return the Recall@K in [0, 1] that is to be expected of a random order, for each of some K."""
        return expected_recall(self.right_answers, self.number_of_candidates, k)


def report_file(file: str | os.PathLike[str]) -> Path:
    """Return the path of a report that can be written. To be called before the work that the report is about.

    Raises:
        UserError: it does not end in ``.html``, or is a folder.
        MissingExtraError: matplotlib is not installed.
    """
    file = Path(file)
    if file.suffix.lower() != ".html":
        raise UserError(f"the report must end in .html, got {file}")
    if file.is_dir():
        raise UserError(f"the report must be a file, {file} is a folder")
    require("matplotlib.figure", extra="eval")  # and pillow, without which there is no matplotlib
    return file


def write_report(
    file: str | os.PathLike[str],
    ranks: Ranks,
    results: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    settings: Mapping[str, str],
    collection: Collection | None = None,
    examples: int = EXAMPLES,
    queries: Sequence[Answers] = (),
) -> None:
    """Write a page with the numbers, the distribution of similarities, rank curves, and examples to browse.

    It is one file that asks the network for nothing. Where JavaScript is switched off the examples are missing, and
    nothing else is. The same arguments give the same bytes.

    Pictures are JPEG of at most 160 pixels, 4 to 8 kB for a photograph and a third more in the page, and each is in it
    once. With 60 examples a test set of the size of COCO's has 650 to 850 of them, which makes 4 to 8 MB. All else is
    less than 0.3 MB.

    Args:
        file: ends in ``.html``; it appears complete or not at all, and its folder is made when missing.
        ranks: with at least 5 ``negatives`` where there is a collection.
        results: name of an evaluation, such as ``"coco-5k"``, -> metrics of
            :func:`vl_plugins.retrieval.retrieval_metrics`; a metric that is missing shows as –.
        title: of the page.
        settings: what was evaluated, and how: name -> value, shown as they are.
        collection: images and captions in the order of the ranks; without it the page has no examples.
        examples: at most so many successes and so many failures of each direction, at least 1. A success is a query
            whose best right answer has rank 1. They are spread evenly over all successes, sorted by how much more
            similar the right answer is than the hardest negative, and over all failures, sorted by rank.
        queries: answers to queries of one's own, by indices of the collection, which they need.

    Raises:
        ValueError: ``results`` is empty, ``examples`` is not positive, ``ranks`` has too few ``negatives``, or indices
            beyond the collection.
        UserError: the file has another ending or cannot be written, or a shard cannot be read or has changed.
        MissingExtraError: matplotlib is not installed.
    """
    file = report_file(file)
    if not results:
        raise ValueError("results must hold at least one named result, got none")
    if examples < 1:
        raise ValueError(f"examples must be positive, got {examples}")
    directions = _directions(ranks, collection)
    page = (
        _environment()
        .get_template(TEMPLATE)
        .render(
            title=title,
            settings=settings,
            directions=directions,
            table=_metrics_table(results),
            histograms=_histograms(directions),
            curves=_draw_curves(directions),
            recalls=_recall_table(directions),
            examples=None if collection is None else _examples(directions, collection, examples),
            queries=[_shown_answers(answers, collection) for answers in queries],
            version=__version__,
        )
    )
    # File names may hold bytes that are no letters in any encoding.
    write_file(file, page.encode(errors="replace"))


def expected_recall(right_answers: Tensor, candidates: int, k: Tensor) -> Tensor:
    r"""Return the mean Recall@K of queries whose candidates are in random order.

    With :math:`N` candidates of which :math:`R` are right, a query is a hit at K with probability

    .. math:: 1 - \binom{N - R}{K} \Big/ \binom{N}{K}

    Args:
        right_answers: (Q,) integers in [1, N], number of each query's right answers.
        candidates: N.
        k: (M,) integers in [1, N].

    Returns:
        (M,) float64 in [0, 1].

    >>> expected_recall(torch.tensor([1, 2]), 4, torch.tensor([1, 2, 4]))  # 1/4 and 2/4, 2/4 and 5/6, 1 and 1
    tensor([0.3750, 0.6667, 1.0000], dtype=torch.float64)
    """
    numbers, queries = right_answers.unique(return_counts=True)
    wrong = candidates - numbers[:, None]

    def log_factorial(number: Tensor) -> Tensor:
        return torch.lgamma(number.double() + 1)

    log_missed = log_factorial(wrong) - log_factorial((wrong - k).clamp_min(0))
    log_missed = log_missed - log_factorial(torch.tensor(candidates)) + log_factorial(candidates - k)
    hit = 1 - log_missed.exp().masked_fill(k > wrong, 0)
    return (hit * queries[:, None]).sum(dim=0) / queries.sum()


def _directions(ranks: Ranks, collection: Collection | None) -> list[_Direction]:
    parts = [DirectionRanks(*(field.cpu() for field in part)) for part in ranks]
    # Whoever is a query of one direction is a candidate of the other.
    images, captions = (
        max(
            1 + _largest(of_queries.queries),
            1 + _largest(of_candidates.positives),
            1 + _largest(of_candidates.negatives),
            _largest(of_candidates.rank),
        )
        for of_queries, of_candidates in (parts, parts[::-1])
    )
    if collection is not None:
        there = len(collection.keys), len(collection.captions)
        if images > there[0] or captions > there[1]:
            raise ValueError(
                f"ranks must be of the collection's {there[0]} images and {there[1]} captions, "
                f"got ranks of at least {images} and {captions}"
            )
        images, captions = there
        fewest = min(part.negatives.shape[1] for part in parts)
        if fewest < ANSWERS:
            raise ValueError(f"ranks must have at least {ANSWERS} negatives to show examples, got {fewest}")
    names = (
        ("Image to text", "image-to-text", "images"),
        ("Text to image", "text-to-image", "captions"),
    )
    return [
        _Direction(*name, part, part.positive_query.bincount(minlength=len(part.queries)), candidates)
        for name, part, candidates in zip(names, parts, (captions, images), strict=True)
    ]


def _largest(numbers: Tensor) -> int:
    return int(numbers.max()) if numbers.numel() else -1


class _Table(NamedTuple):
    """The numbers, as text.

    Args:
        groups: heading of adjacent columns, with the headings of each.
        rows: name, and the cells of each group.
    """

    groups: list[tuple[str, list[str]]]
    rows: list[tuple[str, list[list[str]]]]

    def _lines(self) -> list[list[str]]:
        short = {"Image to text": "i2t ", "Text to image": "t2i "}
        heading = [f"{short.get(group, '')}{column}" for group, columns in self.groups for column in columns]
        return [["", *heading], *([" ".join(name.split()), *chain(*cells)] for name, cells in self.rows)]

    def tabs(self) -> str:
        """Return lines of cells with tabs between them, with nothing where a value is missing."""
        return "".join("\t".join("" if cell == MISSING else cell for cell in line) + "\n" for line in self._lines())

    def markdown(self) -> str:
        """Return a Markdown table."""
        heading, *rows = ([cell.replace("|", r"\|") for cell in line] for line in self._lines())
        lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _metrics_table(results: Mapping[str, Mapping[str, float]]) -> _Table:
    there = {key for metrics in results.values() for key in metrics}
    groups, keys = [], []
    for name, direction in (("Image to text", "image_to_text"), ("Text to image", "text_to_image")):
        found = (re.fullmatch(rf"{direction}_R@(\d+)", key) for key in there)
        recalls = sorted({*RSUM_RECALLS, *(int(match[1]) for match in found if match)})
        columns = {f"R@{k}": f"{direction}_R@{k}" for k in recalls}
        columns |= {"median": f"{direction}_median_rank", "mean": f"{direction}_mean_rank"}
        precisions = {"mAP@R": f"{direction}_mean_average_precision_at_r", "R-Precision": f"{direction}_r_precision"}
        columns |= {column: key for column, key in precisions.items() if key in there}
        groups.append((name, list(columns)))
        keys.append(list(columns.values()))
    groups.append(("Both", ["RSUM"]))
    keys.append(["rsum"])
    return _Table(
        groups,
        [(name, [[_number(metrics.get(key)) for key in group] for group in keys]) for name, metrics in results.items()],
    )


def _number(value: float | None) -> str:
    return MISSING if value is None or not math.isfinite(value) else f"{value:.1f}"


class _Histogram(NamedTuple):
    """Similarities of one direction.

    Args:
        direction: its name.
        picture: the histograms as SVG.
        positive, negative: mean similarities, as text.
        queries: what they are called.
        number: of queries.
        hits: queries whose best right answer is more similar than each wrong candidate.
        share: the same in percent, as text.
        lead: median of what :attr:`_Direction.lead` says, as text; empty where it is infinite.
    """

    direction: str
    picture: Markup
    positive: str
    negative: str
    queries: str
    number: int
    hits: int
    share: str
    lead: str


def _histograms(directions: list[_Direction]) -> list[_Histogram]:
    decimals = _decimals(directions)
    numpy = require("numpy", extra="eval")
    pairs = []
    for direction in directions:
        negative = direction.ranks.hardest_negative_similarity.double()
        pairs.append((direction.ranks.positive_similarity.double(), negative[negative.isfinite()]))
    edges = numpy.histogram_bin_edges(torch.cat([part for pair in pairs for part in pair]).numpy(), BINS)
    shares = [[100 * numpy.histogram(part, edges)[0] / max(len(part), 1) for part in pair] for pair in pairs]
    highest = max(share.max() for pair in shares for share in pair)

    histograms = []
    for direction, pair, (positive, negative) in zip(directions, pairs, shares, strict=True):
        with require("matplotlib.style", extra="eval").context(["default", STYLE]):
            figure, axes = _figure()
            # The outline of the second is dashed, so that print without colours tells them apart.
            for share, colour, line_style in ((positive, FIRST, "-"), (negative, SECOND, (0, (3, 1.5)))):
                axes.stairs(share, edges, fill=True, color=colour, alpha=0.25)
                axes.stairs(share, edges, color=colour, linewidth=1.3, linestyle=line_style)
            axes.set(
                xlim=(edges[0], edges[-1]), ylim=(0, 1.08 * highest), xlabel="similarity", ylabel="percent in a bin"
            )
            picture = _svg(figure, f"similarities-{direction.anchor}", f"Histograms of similarities, {direction.name}")
        hits, number = int((direction.ranks.rank == 1).sum()), len(direction.ranks.rank)
        lead = statistics.median(direction.lead.tolist())
        histograms.append(
            _Histogram(
                direction.name,
                picture,
                *(f"{part.mean():.{decimals}f}" if len(part) else MISSING for part in pair),
                queries=direction.queries,
                number=number,
                hits=hits,
                share=f"{100 * hits / number:.1f}",
                lead=f"{lead:+.{decimals}f}".replace("-", "−") if math.isfinite(lead) else "",
            )
        )
    return histograms


def _decimals(directions: list[_Direction]) -> int:
    """Return how many digits after the point similarities need: three for cosines that are not all alike."""
    parts = [
        getattr(part.ranks, f"{kind}_similarity") for part in directions for kind in ("positive", "hardest_negative")
    ]
    similarities = torch.cat(parts).double()
    similarities = similarities[similarities.isfinite()]
    spread = float(similarities.max() - similarities.min())
    return min(max(3 - math.ceil(math.log10(spread / 2)), 0), 8) if spread else 3


def _draw_curves(directions: list[_Direction]) -> Markup:
    numpy = require("numpy", extra="eval")
    ticker = require("matplotlib.ticker", extra="eval")
    with require("matplotlib.style", extra="eval").context(["default", STYLE]):
        figure, axes = _figure()
        axes.set_xscale("log")
        for direction, colour, marker in zip(directions, (THIRD, FOURTH), "os", strict=True):
            last = direction.number_of_candidates
            k = torch.from_numpy(numpy.unique(numpy.geomspace(1, last, POINTS).round().astype(numpy.int64)))
            marked = torch.tensor([mark for mark in RSUM_RECALLS if mark <= last])
            axes.plot(k, 100 * direction.chance(k), "--", color=colour, linewidth=1)
            axes.plot(k, 100 * direction.recall(k), color=colour, linewidth=1.6)
            axes.plot(marked, 100 * direction.recall(marked), marker, color=colour, markersize=4)
        last = max(direction.number_of_candidates for direction in directions)
        axes.set(xlim=(0.93, max(1.07 * last, 2)), ylim=(0, 102), xlabel="K", ylabel="Recall@K in percent")
        axes.xaxis.set_major_locator(ticker.FixedLocator(_round_numbers(last, (1,) if last >= 100 else (1, 2, 5))))
        axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        return _svg(figure, "rank-curves", "Recall@K of both directions over K, with the level of chance")


class _RecallRow(NamedTuple):
    """Recall@K and its level of chance in percent, as text, for both directions one after the other."""

    k: int
    numbers: list[str]


def _recall_table(directions: list[_Direction]) -> list[_RecallRow]:
    rows = []
    for k in _round_numbers(max(direction.number_of_candidates for direction in directions), (1, 5)):
        numbers = []
        for direction in directions:
            if k <= direction.number_of_candidates:
                at = torch.tensor([k])
                recall, chance = 100 * direction.recall(at).item(), 100 * direction.chance(at).item()
                numbers += [f"{recall:.1f}", f"{chance:.1f}" if chance >= 1 else f"{chance:.2g}"]
            else:
                numbers += [MISSING, MISSING]
        rows.append(_RecallRow(k, numbers))
    return rows


def _round_numbers(last: int, digits: Iterable[int]) -> list[int]:
    """Return digits followed by zeros, up to a number.

    >>> _round_numbers(60, (1, 5))
    [1, 5, 10, 50]
    """
    return [digit * 10**zeros for zeros in range(len(str(last))) for digit in digits if digit * 10**zeros <= last]


def _figure() -> tuple[Any, Any]:
    """Return an empty figure and its axes; a point of it is a little more than a pixel of the page."""
    figure = require("matplotlib.figure", extra="eval").Figure(figsize=(5.6, 3.1), layout="constrained")
    axes = figure.subplots()
    return figure, axes


def _svg(figure: Any, name: str, description: str) -> Markup:
    """Return a figure as an element of a page.

    Args:
        figure: in whose texts there is nothing from outside.
        name: no other figure of the page has.
        description: for who cannot see it.
    """
    stream = io.StringIO()
    with require("matplotlib.style", extra="eval").context({"svg.hashsalt": name}):
        figure.savefig(stream, format="svg", transparent=True)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    # What matplotlib says of itself, and a style that would hold for the whole page.
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    # All figures number their groups alike; what is referred to has a name of its own.
    referred = set(re.findall(r"#([\w.-]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in referred else "", text)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub("|".join(COLOURS), lambda match: COLOURS[match[0]], text)
    text = re.sub(r"\s*\n\s*", " ", text)
    return Markup(text.replace("<svg", f'<svg class="plot" role="img" aria-label="{description}"', 1))


def _examples(directions: list[_Direction], collection: Collection, number: int) -> dict[str, Any]:
    """Return what the page's script shows, for JSON.

    ``groups`` has a list of examples for ``<direction>/<outcome>``, from the one nearest to the other outcome to the
    farthest, and how many there are altogether. Examples refer to ``images`` and ``captions`` by index.
    """
    decimals = _decimals(directions)
    shown: dict[str, set[int]] = {"images": set(), "captions": set()}
    groups = {}
    for direction, candidates in zip(directions, ("captions", "images"), strict=True):
        part, lead = direction.ranks, direction.lead
        answers = [field.tolist() for field in best_answers(part, ANSWERS)]
        best = part.place_in_query() == 0
        best_index, best_similarity = part.positives[best].tolist(), part.positive_similarity[best].tolist()
        is_hit = part.rank == 1
        for outcome, is_shown, order in (
            ("failures", ~is_hit, _sorted_by(part.rank, -lead)),
            ("successes", is_hit, _sorted_by(lead)),
        ):
            order = order[is_shown[order]]
            examples = []
            for query in _evenly_spaced(order, number).tolist():
                example = {
                    "query": int(part.queries[query]),
                    "rank": int(part.rank[query]),
                    "rightAnswers": int(direction.right_answers[query]),
                    "lead": round(float(lead[query]), decimals) if lead[query].isfinite() else None,
                    "best": [best_index[query], round(best_similarity[query], decimals)],
                    "answers": [
                        [index, round(similarity, decimals), right]
                        for index, similarity, right in zip(*(field[query] for field in answers), strict=True)
                        if index >= 0
                    ],
                }
                shown[direction.queries].add(example["query"])
                shown[candidates].update(index for index, *_ in (example["best"], *example["answers"]))
                examples.append(example)
            groups[f"{direction.anchor}/{outcome}"] = {"altogether": len(order), "examples": examples}
    return {
        "decimals": decimals,
        "candidates": {direction.anchor: direction.number_of_candidates for direction in directions},
        "groups": groups,
        "images": dict(_shown_images(collection, sorted(shown["images"]))),
        "captions": {
            index: {"id": str(collection.caption_ids[index]), "text": collection.captions[index]}
            for index in sorted(shown["captions"])
        },
    }


def _shown_answers(answers: Answers, collection: Collection) -> dict[str, Any]:
    images = dict(_shown_images(collection, [index for index, _ in answers.images]))
    return {
        "query": answers.query,
        "images": [(images[index], similarity) for index, similarity in answers.images],
        "captions": [(collection.captions[index], similarity) for index, similarity in answers.captions],
    }


def _sorted_by(*keys: Tensor) -> Tensor:
    """Return the order (Q,) that sorts by the first key (Q,), where that is equal by the second, and so on."""
    order = torch.arange(len(keys[0]))
    for key in reversed(keys):
        order = order[key[order].argsort(stable=True)]
    return order


def _evenly_spaced(order: Tensor, number: int) -> Tensor:
    """Return so many entries at equal distances, the first and the last among them; all where there are not more."""
    if len(order) <= number:
        return order
    return order[torch.linspace(0, len(order) - 1, number, dtype=torch.float64).round().long()]


def _shown_images(collection: Collection, indices: list[int]) -> Iterable[tuple[int, dict[str, str]]]:
    for start in range(0, len(indices), PICTURES_AT_A_TIME):
        for index, data in collection.pictures(indices[start : start + PICTURES_AT_A_TIME]).items():
            image = {"key": collection.keys[index], "id": str(collection.image_ids[index])}
            try:
                image["picture"] = "data:image/jpeg;base64," + base64.b64encode(_thumbnail(data)).decode()
            except UserError as error:
                image["problem"] = str(error)
            yield index, image


def _thumbnail(data: bytes) -> bytes:
    """Return a JPEG file of a picture, scaled down where it is larger than 160 pixels.

    Raises:
        UserError: the picture is damaged, or one that shards do not hold.
    """
    pillow = require("PIL.Image", extra="data")
    with warnings.catch_warnings():
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        picture = scaled_picture(data, _fit, "white", formats=FORMATS)
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=QUALITY, optimize=True)
    return stream.getvalue()


def _fit(width: int, height: int) -> tuple[int, int]:
    scale = min(LONGEST_SIDE / max(width, height), 1)
    return max(1, round(width * scale)), max(1, round(height * scale))


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vl_plugins.retrieval", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sha256"] = _sha256
    # `tojson` escapes what would end a script element.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _sha256(script: str) -> str:
    """Return the hash by which a Content-Security-Policy knows a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
