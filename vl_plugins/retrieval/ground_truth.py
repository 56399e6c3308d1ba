"""Which captions belong to which images."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["GroundTruth"]

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class GroundTruth(NamedTuple):
    """The right answers of both directions: pairs of an image and a caption that belong together, each once.

    They are two sets of pairs, since benchmarks such as ECCV Caption judge other images than captions. An image without
    a pair in ``image_to_text`` is no query, and neither is a caption without one in ``text_to_image``; as candidates
    they all remain. A right answer that is not among the candidates has the index -1: it is never found, but it counts
    in the R of mAP@R and R-Precision.

    Attributes:
        image_to_text: (2, P) int64, indices of images, which are the queries, and of their captions.
        text_to_image: (2, P) int64, indices of images and of captions, which are the queries.
    """

    image_to_text: Tensor
    text_to_image: Tensor

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
        if image_of_caption.ndim != 1 or image_of_caption.dtype not in INTEGERS:
            raise ValueError(
                "image_of_caption must be an integer tensor of shape (C,), one index per caption, "
                f"got {image_of_caption.dtype} of shape {tuple(image_of_caption.shape)}"
            )
        image_of_caption = image_of_caption.to(torch.int64)
        _check_range("image_of_caption", image_of_caption, 0, images)
        without_caption = (image_of_caption.bincount(minlength=images) == 0).nonzero().flatten()
        if len(without_caption):
            raise ValueError(
                f"image_of_caption must give every image at least one caption; {len(without_caption)} of {images} have "
                f"none, such as image {int(without_caption[0])}"
            )
        captions = image_of_caption.argsort(stable=True)
        pairs = torch.stack([image_of_caption[captions], captions])
        return cls(pairs, pairs)

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

        >>> GroundTruth.from_ids(["a", "b"], [7, 8, 9], {"a": [7, 8], "b": [8]}).text_to_image
        tensor([[0, 0, 1],
                [0, 1, 1]])
        """
        images, captions = _index("image_ids", image_ids), _index("caption_ids", caption_ids)
        forward = _pairs("image_to_text", image_to_text, images, captions, allow_absent)
        if text_to_image is None:
            backward = [(image, caption) for image, caption in forward if caption >= 0]
        else:
            pairs = _pairs("text_to_image", text_to_image, captions, images, allow_absent)
            backward = [(image, caption) for caption, image in pairs]
        return cls(*(torch.tensor(sorted(pairs)).T for pairs in (forward, backward)))

    def check(self, images: int, captions: int) -> None:
        """Raise ``ValueError`` if a pair is not among so many images and captions."""
        for direction, pairs, least in zip(self._fields, self, ((0, -1), (-1, 0)), strict=True):
            for number, (kind, size) in enumerate((("images", images), ("captions", captions))):
                _check_range(f"{kind} of {direction}", pairs[number], least[number], size)

    @property
    def most_positives(self) -> int:
        """Largest number of right answers of a query: the largest R of mAP@R."""
        return int(max(self.image_to_text[0].bincount().max(), self.text_to_image[1].bincount().max()))


def _check_range(name: str, indices: Tensor, least: int, size: int) -> None:
    lowest, highest = indices.aminmax() if len(indices) else (-1, -1)
    if lowest < least or not 0 <= highest < size:
        extent = f"{int(lowest)} to {int(highest)}" if len(indices) else "none"
        raise ValueError(f"{name} must lie in [{least}, {size}){' and not all be -1' if least else ''}, got {extent}")


def _index(name: str, ids: Sequence[Hashable]) -> dict[Hashable, int]:
    index = {value: number for number, value in enumerate(ids)}
    for number, value in enumerate(ids):
        if index[value] != number:
            raise ValueError(f"{name} must differ; {value!r} occurs at {number} and at {index[value]}")
    return index


def _pairs(
    name: str,
    answers_of: Mapping[Hashable, Iterable[Hashable]],
    query_index: Mapping[Hashable, int],
    candidate_index: Mapping[Hashable, int],
    allow_absent: bool,
) -> list[tuple[int, int]]:
    """Return a query's and a candidate's index for each right answer; -1 for a candidate that is not there."""
    if not answers_of:
        raise ValueError(f"{name} must have the right answers of at least one query, got none")
    pairs = []
    for query, answers in answers_of.items():
        found = {answer: candidate_index.get(answer, -1) for answer in answers}
        absent = [answer for answer, index in found.items() if index < 0]
        if query not in query_index:
            raise ValueError(f"{name} has the query {query!r}, which is not among the ids")
        if absent and not allow_absent:
            raise ValueError(f"{name}[{query!r}] has {absent[0]!r}, which is not among the ids")
        if len(absent) == len(found):
            raise ValueError(f"{name}[{query!r}] has no right answer that is among the ids")
        pairs += [(query_index[query], index) for index in found.values()]
    return pairs
