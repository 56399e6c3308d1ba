"""Examples of a report: queries with their first answers, and thumbnails of the pictures."""

import base64
import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.data import Collection
from vl_plugins.data.picture_formats import inspect_image
from vl_plugins.data.samples import decode
from vl_plugins.errors import UserError
from vl_plugins.retrieval.ranks import DirectionRanks, Ranks

__all__ = [
    "QUERY_KINDS",
    "Answer",
    "Example",
    "Examples",
    "Thumbnail",
    "data_url",
    "example_images",
    "examples_of",
    "failures_and_successes",
    "thumbnails",
]

QUERY_KINDS = ("image", "caption")  # of the two directions
ANSWERS = 5
LONGEST_SIDE, QUALITY = 160, 80  # of thumbnails: pixels, JPEG


class Answer(NamedTuple):
    """An answer to a query: place from 1, index of the image or caption, similarity, and whether it is right."""

    place: int
    candidate: int
    similarity: float
    is_right: bool


class Example(NamedTuple):
    """A query and its answers.

    Attributes:
        query: index of the image or caption.
        rank: of its best right answer.
        answers: the first ones, and the best right one where it is not among them.
    """

    query: int
    rank: int
    answers: list[Answer]


class Examples(NamedTuple):
    """Some of the failures or successes of a direction.

    Attributes:
        kind: of the queries, ``image`` or ``caption``.
        outcome: ``failures`` or ``successes``.
        total: how many there are.
        examples: some of them.
    """

    kind: str
    outcome: str
    total: int
    examples: list[Example]


@dataclass(frozen=True)
class Thumbnail:
    """A picture as a data URL with its size in pixels; or the problem with it, and no URL."""

    url: str = ""
    width: int = 0
    height: int = 0
    problem: str = ""


def data_url(media_type: str, content: bytes) -> str:
    """Return a URL that holds the content."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def failures_and_successes(ranks: Ranks, number: int) -> list[Examples]:
    """Return failures, then successes, of each direction, at most ``number`` spread evenly over all of them.

    Failures go from the worst rank to the nearest miss, successes from the largest lead over the hardest negative.
    """
    groups = []
    for kind, direction in zip(QUERY_KINDS, ranks, strict=True):
        best_right = direction.positive_similarity[direction.first_positives()]
        lead = best_right - direction.negative_similarity[:, 0]
        by_lead = lead.argsort()
        worst_first = by_lead[direction.rank[by_lead].argsort(descending=True, stable=True)]
        is_hit = direction.rank[worst_first] == 1
        for outcome, order in (("failures", worst_first[~is_hit]), ("successes", worst_first[is_hit].flip(0))):
            spread = torch.linspace(0, len(order) - 1, min(number, len(order))).round().long()
            groups.append(Examples(kind, outcome, len(order), examples_of(direction, order[spread])))
    return groups


def examples_of(direction: DirectionRanks, positions: Tensor) -> list[Example]:
    """Return the queries at these positions of the ranks with their answers."""
    first_right = direction.first_positives().tolist()
    first_right.append(len(direction.positives))
    examples = []
    for position in positions.tolist():
        own = slice(first_right[position], first_right[position + 1])
        examples.append(_example(direction, position, own))
    return examples


def _example(direction: DirectionRanks, position: int, own: slice) -> Example:
    """Return an example, given the position of a query and those of its right answers."""
    wrong = _pairs(direction.negatives[position], direction.negative_similarity[position])
    right = _pairs(direction.positives[own], direction.positive_similarity[own])
    scored = []
    for candidate, similarity in wrong:
        if candidate >= 0:
            scored.append((candidate, similarity, False))
    for candidate, similarity in right:
        scored.append((candidate, similarity, True))
    scored.sort(key=lambda answer: -answer[1])  # of equal ones the wrong ones stay first
    answers = []
    for place, (candidate, similarity, is_right) in enumerate(scored[:ANSWERS], start=1):
        answers.append(Answer(place, candidate, similarity, is_right))
    rank = int(direction.rank[position])
    if rank > ANSWERS:
        candidate, similarity = right[0]
        answers.append(Answer(rank, candidate, similarity, True))
    return Example(int(direction.queries[position]), rank, answers)


def _pairs(candidates: Tensor, similarities: Tensor) -> list[tuple[int, float]]:
    return list(zip(candidates.tolist(), similarities.tolist(), strict=True))


def example_images(kind: str, examples: Iterable[Example]) -> set[int]:
    """Return the indices of the images that examples show, given the kind of their queries."""
    images = set()
    for example in examples:
        if kind == "image":
            images.add(example.query)
        else:
            images.update(answer.candidate for answer in example.answers)
    return images


def thumbnails(collection: Collection, images: Iterable[int], max_image_pixels: int) -> dict[int, Thumbnail]:
    """Return a JPEG of at most 160 pixels of each image, or the problem with it."""
    pictures = {}
    for index, content in collection.pictures(images).items():
        stream = io.BytesIO()
        try:
            inspect_image(content, max_image_pixels=max_image_pixels)
            picture = decode({"jpg": content}, max_image_pixels=max_image_pixels)
            picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
            picture.save(stream, "JPEG", quality=QUALITY, optimize=True)
        except UserError as error:
            pictures[index] = Thumbnail(problem=str(error))
            continue
        pictures[index] = Thumbnail(data_url("image/jpeg", stream.getvalue()), picture.width, picture.height)
    return pictures
