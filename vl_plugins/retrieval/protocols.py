"""Evaluation protocols of published numbers: which images and captions they take, and what they compute."""

import statistics
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vl_plugins.data.collection import Collection, first_captions
from vl_plugins.errors import UserError, one_of, require
from vl_plugins.retrieval.features import Features, id_difference
from vl_plugins.retrieval.ground_truth import GroundTruth
from vl_plugins.retrieval.metrics import retrieval_metrics
from vl_plugins.retrieval.ranks import Ranks, similarity_ranks
from vl_plugins.retrieval.similarities import Similarities

__all__ = ["PROTOCOLS", "Evaluation", "Trial", "check_number", "prepare"]

CAPTIONS_PER_IMAGE = 5
FLICKR30K = (1000, 5000)  # images and captions of the test split
FOLDS = 5
# Answers of a query in a report.
SHOWN_ANSWERS = 5

PROTOCOLS = {
    "plain": "any shards: all images and all captions",
    "flickr30k-1k": "test split of Flickr30K: 1,000 images, 5,000 captions",
    "coco-5k": "Karpathy's test split of COCO: 5,000 images and the first five captions of each",
    "coco-1k": "mean over five folds of 1,000 images of that split, in its order",
    "eccv": "ECCV Caption (mAP@R, R-Precision, R@1) and CxC recalls on that split, by COCO's ids",
}


class Evaluation(NamedTuple):
    """What a protocol finds.

    Attributes:
        results: metrics of :func:`vl_plugins.retrieval.retrieval_metrics` by name: the protocol's, or
            ``eccv-caption`` and ``cxc``.
        ranks: of the whole set, with the five most similar wrong answers at least; of ``eccv`` with the right answers
            of ECCV Caption. None for ``coco-1k`` unless they were asked for, since its folds do not need them.
    """

    results: dict[str, dict[str, float]]
    ranks: Ranks | None


@dataclass(frozen=True, eq=False)
class Trial:
    """A protocol for certain images and captions, made by :func:`prepare`.

    Args:
        protocol: one of ``PROTOCOLS``.
        captions: indices of the captions that it takes, ascending.
        image_of_caption: index of the image of each of these captions.
        ground_truths: of these captions, by the name of the results.
        folds: number of parts with the same number of images, of which the mean is taken.
    """

    protocol: str
    captions: Tensor
    image_of_caption: Tensor
    ground_truths: Mapping[str, GroundTruth]
    folds: int = 1

    @property
    def images(self) -> int:
        """Number of images."""
        return int(self.image_of_caption.max()) + 1

    def evaluate(self, similarities: Similarities, *, ranks: bool = False, progress: bool = False) -> Evaluation:
        """Compute the protocol's numbers.

        Args:
            similarities: of all images and all captions that :func:`prepare` was given.
            ranks: whether the ranks of the whole set are needed in any case.
            progress: show progress bars on standard error.

        Raises:
            ValueError: the shape is another one, or a similarity is not finite.
        """
        if similarities.shape[0] != self.images or similarities.shape[1] <= int(self.captions[-1]):
            raise ValueError(f"similarities do not fit {self.images} images and {len(self.captions)} captions")
        if len(self.captions) < similarities.shape[1]:
            similarities = similarities.select(captions=self.captions)
        results, found = {}, []
        if self.folds > 1:
            results[self.protocol] = self._mean_over_folds(similarities, progress)
        if self.folds == 1 or ranks:
            for name, ground_truth in self.ground_truths.items():
                found.append(_ranks(similarities, ground_truth, progress))
                results.setdefault(name, retrieval_metrics(found[-1]))
        return Evaluation(results, found[0] if found else None)

    def _mean_over_folds(self, similarities: Similarities, progress: bool) -> dict[str, float]:
        folds = []
        for images in torch.arange(self.images).tensor_split(self.folds):
            captions = torch.isin(self.image_of_caption, images).nonzero().flatten()
            ground_truth = GroundTruth.from_image_of_caption(self.image_of_caption[captions] - images[0], len(images))
            fold = similarities.select(images=images, captions=captions)
            folds.append(retrieval_metrics(_ranks(fold, ground_truth, progress)))
        return {name: statistics.fmean(fold[name] for fold in folds) for name in folds[0]}


def check_number(protocol: str, images: int, name: str = "the shards") -> None:
    """Check the number of images and what is installed, before anything is encoded; :func:`prepare` checks the rest.

    Args:
        protocol: one of ``PROTOCOLS``.
        images: number of images in the shards.
        name: of the shards, for errors.

    Raises:
        UserError: an unknown protocol, or another number of images.
        MissingExtraError: ``eccv_caption`` is not installed and needed.
    """
    one_of("protocol", protocol, PROTOCOLS)
    if protocol == "plain":
        return
    expected = FLICKR30K[0] if protocol == "flickr30k-1k" else len(_coco_test_split())
    if images != expected:
        raise UserError(f"protocol {protocol} is about {expected:,} images, but {name} has {images:,}")


def prepare(protocol: str, items: Collection | Features, name: str = "the shards") -> Trial:
    """Check that images and captions are those that a protocol is about.

    COCO's protocols compare the image ids, their order and, where they are COCO's annotation ids, the caption ids with
    the test split that the package ``eccv_caption`` ships. Where caption ids tell which five captions of an image the
    split has, these are taken; otherwise the first five. Flickr30K publishes no such list: number of images, captions
    of each and name of the split are checked.

    Args:
        protocol: one of ``PROTOCOLS``.
        items: what is to be evaluated, in its order.
        name: of it, for errors.

    Raises:
        UserError: an unknown protocol; other images or captions, or another order: the message says which.
        MissingExtraError: ``eccv_caption`` is not installed and needed.
    """
    one_of("protocol", protocol, PROTOCOLS)
    captions = torch.arange(len(items.image_of_caption))
    try:
        if protocol == "flickr30k-1k":
            _check_flickr30k(items)
        elif protocol != "plain":
            captions = _coco_captions(items, ids_needed=protocol == "eccv")
    except _MismatchError as error:
        splits = getattr(items, "splits", ())
        these = f" (these are {', '.join(splits)})" if splits else ""
        raise UserError(f"{name} is not what protocol {protocol} is about: {error}{these}") from None
    image_of_caption = items.image_of_caption[captions].cpu()
    if protocol == "eccv":
        benchmark, image_ids, caption_ids = _eccv_caption(), items.image_ids or (), items.caption_ids or ()
        caption_ids = [caption_ids[index] for index in captions.tolist()]
        ground_truths = {
            result: GroundTruth.from_ids(image_ids, caption_ids, maps["i2t"], maps["t2i"], allow_absent=True)
            for result, maps in (("eccv-caption", benchmark.eccv_gts), ("cxc", benchmark.cxc_gts))
        }
    else:
        images = int(image_of_caption.max()) + 1
        ground_truths = {protocol: GroundTruth.from_image_of_caption(image_of_caption, images)}
    return Trial(protocol, captions, image_of_caption, ground_truths, FOLDS if protocol == "coco-1k" else 1)


def _ranks(similarities: Similarities, ground_truth: GroundTruth, progress: bool) -> Ranks:
    negatives = max(SHOWN_ANSWERS, ground_truth.most_positives)
    return similarity_ranks(similarities, ground_truth, negatives=negatives, progress=progress)


class _MismatchError(Exception):
    """In what the images or captions are not those of the protocol."""


def _check_flickr30k(items: Collection | Features) -> None:
    images, captions = int(items.image_of_caption.max()) + 1, len(items.image_of_caption)
    if (images, captions) != FLICKR30K:
        raise _MismatchError(
            "it has {:,} images and {:,} captions, and the test split of Flickr30K {:,} and {:,}".format(
                images, captions, *FLICKR30K
            )
        )
    _check_caption_counts(items)
    if not all(split.endswith("-test") for split in getattr(items, "splits", ())):
        raise _MismatchError("it is the test split")


def _check_caption_counts(items: Collection | Features) -> None:
    counts = items.image_of_caption.bincount(minlength=len(items.image_ids or ()))
    wrong = (counts < CAPTIONS_PER_IMAGE).nonzero().flatten().tolist()
    if wrong:
        image = wrong[0] if items.image_ids is None else items.image_ids[wrong[0]]
        raise _MismatchError(
            f"{len(wrong):,} images have fewer than {CAPTIONS_PER_IMAGE} captions, such as image {image} with "
            f"{int(counts[wrong[0]])}"
        )


def _coco_captions(items: Collection | Features, ids_needed: bool) -> Tensor:
    """Return the indices of five captions of each image of the test split."""
    split = _coco_test_split()
    if items.image_ids is None:
        raise _MismatchError("it has no image ids, which tell the split; give --shards")
    difference = id_difference("image", items.image_ids, list(split), "COCO's test split")
    if difference:
        raise _MismatchError(difference)
    _check_caption_counts(items)
    known = frozenset().union(*split.values())
    caption_ids = items.caption_ids or ()
    pairs = zip(caption_ids, items.image_of_caption.tolist(), strict=False)
    by_id = [index for index, (caption, image) in enumerate(pairs) if caption in split[items.image_ids[image]]]
    missing = sorted(known.difference(caption_ids[index] for index in by_id))
    if not missing and len(by_id) == len(known):
        return torch.tensor(by_id)
    # Other ids than COCO's; by chance some of them are the same numbers.
    if not ids_needed and len(by_id) < len(known) / 2:
        return first_captions(items.image_of_caption, CAPTIONS_PER_IMAGE)
    what = "caption ids occur twice"
    if missing:
        what = f"{len(missing):,} of the {len(known):,} captions are missing or belong to another image, such as "
        what += str(missing[0])
    raise _MismatchError(
        "by COCO's annotation ids, which shards get from Karpathy's file or from vl-plugins shards coco "
        f"--coco-annotations, {what}"
    )


@lru_cache(maxsize=1)
def _coco_test_split() -> dict[int, frozenset[int]]:
    """Return the annotation ids of the five captions of each image of Karpathy's test split, in its order."""
    benchmark = _eccv_caption()
    image_ids = dict.fromkeys(benchmark.coco_gts["t2i"][int(caption)][0] for caption in benchmark.coco_ids)
    return {image: frozenset(benchmark.coco_gts["i2t"][image]) for image in image_ids}


@lru_cache(maxsize=1)
def _eccv_caption() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ujson, a faster reader, is not installed
        return require("eccv_caption", extra="eval").Metrics()
