"""One HTML page about a retrieval evaluation: numbers, similarities, examples, and what models differ in."""

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vl_plugins import __version__
from vl_plugins.data import Collection
from vl_plugins.data.files import write_file
from vl_plugins.data.limits import MAX_IMAGE_PIXELS
from vl_plugins.errors import require
from vl_plugins.plots.figures import COLORS, new_figure, style_curves
from vl_plugins.retrieval.comparison_report import Comparison, compare_models
from vl_plugins.retrieval.examples import data_url, example_images, failures_and_successes, thumbnails
from vl_plugins.retrieval.metrics import metrics_table
from vl_plugins.retrieval.ranks import Ranks

__all__ = ["write_report"]

EXAMPLES = 20


def write_report(
    file: str | os.PathLike[str],
    ranks: Ranks,
    tables: Sequence[Mapping[str, Mapping[str, float]]],
    *,
    title: str,
    settings: Mapping[str, str],
    model: str | None = None,
    comparison: Comparison | None = None,
    collection: Collection | None = None,
    examples: int = EXAMPLES,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> None:
    """Write a page with metrics, histograms of similarities, recall curves, and examples with thumbnails.

    It is one file without scripts that loads nothing from the network. Pictures are JPEG of at most 160 pixels.

    Args:
        file: appears complete or not at all; its folder is created.
        ranks: of the model that charts and examples show.
        tables: metrics of :func:`~vl_plugins.retrieval.retrieval_metrics` by name, and those that ECCV Caption judges.
        title: of the page.
        settings: what was evaluated, and how: name -> value.
        model: name of the model of ``ranks``, for the headings of charts and examples.
        comparison: of several models: differences, groups of captions, and queries that one model alone finds.
        collection: images and captions in the order of the ranks; without it the page has no examples and no groups.
        examples: at most so many successes and so many failures of each direction, spread evenly over all of them. A
            success is a query of rank 1.
        max_image_pixels: of larger pictures the page has the size only; 0 for no limit.

    Raises:
        UserError: the file cannot be written, or a shard cannot be read or has changed.
        ValueError: the models of ``comparison`` have different queries.
        MissingExtraError: jinja2, matplotlib or pillow is not installed.
    """
    ranks = ranks.cpu()
    groups = []
    compared = []
    images: set[int] = set()
    if collection is not None:
        groups = failures_and_successes(ranks, examples)
        for group in groups:
            images |= example_images(group.kind, group.examples)
        if comparison is not None:
            compared = compare_models(comparison, collection)
        for model_comparison in compared:
            images |= model_comparison.shown_images()
    pictures = {}
    if collection is not None:
        pictures = thumbnails(collection, images, max_image_pixels)
    page = _template("report.html.jinja").render(
        title=title,
        settings=settings,
        tables=_metrics_tables(tables),
        model=model,
        comparison=comparison,
        compared=compared,
        charts=_charts(ranks),
        groups=groups,
        collection=collection,
        pictures=pictures,
        version=__version__,
    )
    write_file(file, page.encode(errors="replace"))  # file names may hold bytes of no encoding


def _metrics_tables(tables: Sequence[Mapping[str, Mapping[str, float]]]) -> list[list[list[str]]]:
    """Return the rows of each table that has results; the second one is of what ECCV Caption judges."""
    rows_of_tables = []
    for judged, results in enumerate(tables):
        if results:
            rows_of_tables.append(metrics_table(results, bool(judged)))
    return rows_of_tables


def _template(name: str) -> Any:
    """Return a template of this folder, whose values are escaped."""
    jinja2 = require("jinja2", extra="eval")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(name)


def _charts(ranks: Ranks) -> dict[str, str]:
    """Return URLs that hold SVG images of similarities and recalls, by their titles."""
    return {"similarities": _similarity_chart(ranks), "Recall@K by K": _recall_chart(ranks)}


def _similarity_chart(ranks: Ranks) -> str:
    """Return histograms of the similarities of right pairs and of hardest negatives."""
    figure = new_figure(6, 3.6)
    axes = figure.subplots()
    similarities = {
        "right pairs": ranks.image_to_text.positive_similarity,
        "hardest negative of each image": ranks.image_to_text.negative_similarity[:, 0],
        "hardest negative of each caption": ranks.text_to_image.negative_similarity[:, 0],
    }
    for label, values in similarities.items():
        similarities[label] = values[values.isfinite()]
    low, high = torch.cat(list(similarities.values())).aminmax()
    bins = torch.linspace(low, high, 51).numpy()
    for (label, values), color in zip(similarities.items(), COLORS, strict=False):
        weights = values.new_full((len(values),), 100 / max(1, len(values))).numpy()
        axes.hist(values.numpy(), bins, weights=weights, histtype="step", color=color, label=label)
    axes.set(xlabel="similarity", ylabel="percent")
    return _svg_url(figure, axes, "similarities")


def _recall_chart(ranks: Ranks) -> str:
    """Return curves of Recall@K of both directions."""
    figure = new_figure(6, 3.6)
    axes = figure.subplots()
    directions = {"image to text": ranks.image_to_text, "text to image": ranks.text_to_image}
    for (label, direction), color in zip(directions.items(), COLORS, strict=False):
        queries = len(direction.rank)
        share = 100 * torch.arange(1, queries + 1) / queries
        axes.plot(direction.rank.sort().values, share, drawstyle="steps-post", color=color, label=label)
    axes.set(xlabel="K", ylabel="Recall@K in percent", xscale="log", ylim=(0, 100))
    return _svg_url(figure, axes, "Recall@K by K")


def _svg_url(figure: Any, axes: Any, salt: str) -> str:
    style_curves(axes)
    axes.legend()
    stream = io.BytesIO()
    with require("matplotlib", extra="eval").rc_context({"svg.hashsalt": salt}):  # equal bytes in every run
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return data_url("image/svg+xml", stream.getvalue())
