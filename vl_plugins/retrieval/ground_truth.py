"""Which captions belong to which images."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.retrieval.similarities import count_and_first

__all__ = ["GroundTruth", "Positives"]


class Positives(NamedTuple):
    """Pairs of an image and a caption that belong together, each once, sorted by image and then by caption.

    A right answer that is not among the candidates has the index -1: it is never found, but it counts in the R of
    mAP@R and R-Precision.

    Attributes:
        images: (P,) int64, index of each pair's image.
        captions: (P,) int64, index of each pair's caption.
    """

    images: Tensor
    captions: Tensor


class GroundTruth(NamedTuple):
    """The right answers of both directions.

    They are two sets of pairs, since benchmarks such as ECCV Caption judge other images than captions. An image without
    a pair in ``image_to_text`` is no query, and neither is a caption without one in ``text_to_image``; as candidates
    they all remain.

    Attributes:
        image_to_text: pairs whose images are the queries.
        text_to_image: pairs whose captions are the queries.
    """

    image_to_text: Positives
    text_to_image: Positives

    @classmethod
    def from_image_of_caption(cls, image_of_caption: Tensor, images: int) -> "GroundTruth":
        """Return the ground truth where each caption describes one image, and every image has a caption.

        Args:
            image_of_caption: (C,) integers in [0, I), the index of each caption's image. The captions of an image need
                not be adjacent, and their number may differ from image to image.
            images: number I of images.

        Raises:
            ValueError: a shape or type is not as above, an index is out of range, or an image has no caption.
        """
        _check_image_of_caption(image_of_caption, images)
        image_of_caption = image_of_caption.to(torch.int64)
        captions = image_of_caption.argsort(stable=True)
        positives = Positives(image_of_caption[captions], captions)
        return cls(positives, positives)

    @classmethod
    def from_ids(
        cls,
        image_ids: Sequence[Hashable],
        caption_ids: Sequence[Hashable],
        image_to_text: Mapping[Hashable, Iterable[Hashable]],
        text_to_image: Mapping[Hashable, Iterable[Hashable]] | None = None,
        *,
        allow_absent: bool = False,
    ) -> "GroundTruth":
        """Return the ground truth that maps of ids give; an image may have several captions, and a caption images.

        Args:
            image_ids: of the I images, in the order of the similarities' rows.
            caption_ids: of the C captions, in the order of the columns.
            image_to_text: the captions of each image that is a query.
            text_to_image: the images of each caption that is a query; by default ``image_to_text`` the other way
                round.
            allow_absent: whether right answers may have ids that are not there, as two of ECCV Caption's have.

        Raises:
            ValueError: an id occurs twice in ``image_ids`` or ``caption_ids``, or the maps have one that is not there,
                or a query has no answer that is there.

        >>> truth = GroundTruth.from_ids(["a", "b"], [7, 8, 9], {"a": [7, 8], "b": [8]})
        >>> truth.text_to_image
        Positives(images=tensor([0, 0, 1]), captions=tensor([0, 1, 1]))
        """
        image_index = _index("image", image_ids)
        caption_index = _index("caption", caption_ids)
        images, captions = ("image", image_index), ("caption", caption_index)
        forward = _pairs("image_to_text", image_to_text, images, captions, allow_absent)
        if text_to_image is None:
            backward = [(image, caption) for image, caption in forward if caption >= 0]
        else:
            pairs = _pairs("text_to_image", text_to_image, captions, images, allow_absent)
            backward = [(image, caption) for caption, image in pairs]
        return cls(_positives(forward), _positives(backward))

    @property
    def most_positives(self) -> int:
        """Largest number of right answers of a query: the largest R of mAP@R."""
        return int(max(self.image_to_text.images.bincount().max(), self.text_to_image.captions.bincount().max()))


def _positives(pairs: list[tuple[int, int]]) -> Positives:
    images, captions = torch.tensor(sorted(pairs), dtype=torch.int64).reshape(-1, 2).unbind(dim=1)
    return Positives(images.contiguous(), captions.contiguous())


def _index(kind: str, ids: Sequence[Hashable]) -> dict[Hashable, int]:
    index = {name: number for number, name in enumerate(ids)}
    if len(index) < len(ids):
        first = next(number for number, name in enumerate(ids) if index[name] != number)
        raise ValueError(f"{kind} ids must differ; {ids[first]!r} occurs at {first} and at {index[ids[first]]}")
    return index


def _pairs(
    name: str,
    ground_truth: Mapping[Hashable, Iterable[Hashable]],
    queries: tuple[str, Mapping[Hashable, int]],
    candidates: tuple[str, Mapping[Hashable, int]],
    allow_absent: bool,
) -> list[tuple[int, int]]:
    """Return a query's and a candidate's index for each right answer; -1 for a candidate that is not there."""
    (query_kind, query_index), (candidate_kind, candidate_index) = queries, candidates
    pairs = []
    for query, answers in ground_truth.items():
        if query not in query_index:
            raise ValueError(f"{name} has the {query_kind} {query!r}, which is not among the {query_kind} ids")
        found = {answer: candidate_index.get(answer, -1) for answer in answers}
        absent = next((answer for answer, index in found.items() if index < 0), None)
        if absent is not None and not allow_absent:
            raise ValueError(
                f"{name} gives {query_kind} {query!r} the {candidate_kind} {absent!r}, which is not among the "
                f"{candidate_kind} ids"
            )
        if all(index < 0 for index in found.values()):
            raise ValueError(f"{name} gives {query_kind} {query!r} no {candidate_kind} that is there")
        pairs += [(query_index[query], index) for index in found.values()]
    if not pairs:
        raise ValueError(f"{name} is empty; expected a map from {query_kind} ids to {candidate_kind} ids")
    return pairs


def _check_image_of_caption(image_of_caption: Tensor, images: int) -> None:
    is_integer = not (image_of_caption.is_floating_point() or image_of_caption.is_complex())
    if image_of_caption.ndim != 1 or not is_integer or image_of_caption.dtype == torch.bool:
        raise ValueError(
            "image_of_caption must be an integer tensor of shape (C,), one index per caption, "
            f"got {image_of_caption.dtype} of shape {tuple(image_of_caption.shape)}"
        )
    out_of_range = (image_of_caption < 0) | (image_of_caption >= images)
    if out_of_range.any():
        raise ValueError(
            f"image_of_caption must lie in [0, {images}), the images; it does not in "
            f"{count_and_first(out_of_range)}: {image_of_caption[out_of_range][0].item()}"
        )
    without_caption = torch.bincount(image_of_caption, minlength=images) == 0
    if without_caption.any():
        raise ValueError(
            f"image_of_caption must give every image at least one caption; none for {count_and_first(without_caption)}"
        )
