"""Pictures, and texts of captions, that several images have, and how often they meet in a batch."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vl_plugins.data.captions import normalize_caption

__all__ = ["Occurrence", "Repeats", "repeated_captions", "repeats"]


@dataclass(frozen=True)
class Repeats:
    """Pictures, or texts of captions, that more than one image has.

    Args:
        number: how many images, or captions, have one of them.
        share: the same as part of all, [0, 1].
        different: how many different pictures, or texts, they are.
        batch_size: images in a batch; no more than there are.
        expected_pairs: expected number of pairs of images that repeat one another in a batch drawn at random without
            replacement, each image with one of its captions at random.
        example: the key of the first image with the most frequent picture, or the most frequent text as
            :func:`vl_plugins.data.captions.normalize_caption` returns it; None when nothing repeats.
        example_images: how many images have that.
    """

    number: int
    share: float
    different: int
    batch_size: int
    expected_pairs: float
    example: str | None
    example_images: int


class Occurrence(NamedTuple):
    """A picture or text that an image has: how often, and with which probability it is drawn with the image."""

    image: Hashable
    number: int
    probability: float


def repeats(occurrences: Iterable[tuple[str, list[Occurrence]]], total: int, images: int, batch_size: int) -> Repeats:
    """Return what several images have, of ``total`` pictures or captions, given a name and where it occurs."""
    # Of one image that occurs twice, nothing is a negative of the other.
    repeated = [(name, group) for name, group in occurrences if len({item.image for item in group}) > 1]
    pairs = 0.0
    for _, group in repeated:
        by_image: dict[Hashable, float] = defaultdict(float)
        for item in group:
            by_image[item.image] += item.probability
        # That two images show it has the product of their probabilities. The square of the sum is the sum over all
        # ordered pairs, which contains each image with itself.
        pairs += (sum(by_image.values()) ** 2 - sum(value**2 for value in by_image.values())) / 2
    number = sum(item.number for _, group in repeated for item in group)
    example, largest = max(repeated, key=lambda item: len(item[1]), default=(None, []))
    batch_size = min(batch_size, images)
    return Repeats(
        number=number,
        share=number / total if total else 0.0,
        different=len(repeated),
        batch_size=batch_size,
        # Every pair of images is as likely to be in the batch as any other.
        expected_pairs=pairs * math.comb(batch_size, 2) / math.comb(images, 2) if images > 1 else 0.0,
        example=example,
        example_images=len(largest),
    )


def repeated_captions(captions: Sequence[Sequence[str]], batch_size: int) -> Repeats:
    """Return the texts of several images, given the captions of each."""
    occurrences: dict[str, list[Occurrence]] = defaultdict(list)
    for image, texts in enumerate(captions):
        for text, number in Counter(map(normalize_caption, texts)).items():
            occurrences[text].append(Occurrence(image, number, number / len(texts)))
    return repeats(occurrences.items(), sum(map(len, captions)), len(captions), batch_size)
