"""Evaluation protocols of published numbers: which images and captions they take, and what they compute."""

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vl_plugins.data.collection import Collection, Id, first_captions
from vl_plugins.retrieval.features import Features, id_difference
from vl_plugins.retrieval.ground_truth import GroundTruth
from vl_plugins.retrieval.metrics import retrieval_metrics
from vl_plugins.retrieval.ranks import Ranks, similarity_ranks
from vl_plugins.retrieval.similarities import Similarities
from vl_plugins.utils.errors import UserError, check_name
from vl_plugins.utils.optional import require

__all__ = ["PROTOCOLS", "Evaluation", "Trial", "prepare"]

CAPTIONS_PER_IMAGE = 5
FLICKR30K_IMAGES = 1000
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
        results: metrics of :func:`vl_plugins.retrieval.retrieval_metrics` by the name of what they are of: the
            protocol, or ``eccv-caption`` and ``cxc``.
        ranks: of the whole set, with the five most similar wrong answers at least; of ``eccv`` with the right answers
            of ECCV Caption. None for ``coco-1k`` unless they were asked for, since its folds do not need them.
    """

    results: dict[str, dict[str, float]]
    ranks: Ranks | None


@dataclass(frozen=True, eq=False)
class Trial:
    """A protocol that fits certain images and captions, made by :func:`prepare`.

    Args:
        protocol: one of ``PROTOCOLS``.
        captions: indices of the captions that it takes, ascending.
        images: number of images.
    """

    protocol: str
    captions: Tensor
    images: int
    _evaluate: Callable[[Similarities, bool, bool], Evaluation]

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
        return self._evaluate(similarities, ranks, progress)


def prepare(protocol: str, items: Collection | Features, name: str = "the shards") -> Trial:
    """Check that images and captions are those that a protocol is about, before anything is encoded.

    COCO's protocols compare the image ids, their order and, where they are COCO's annotation ids, the caption ids with
    the test split that the package ``eccv_caption`` ships. Where caption ids tell which five captions of an image the
    split has, these are taken; otherwise the first five. Flickr30K publishes no such list: number of images, captions
    of each, name of the split and ascending ids are checked.

    Args:
        protocol: one of ``PROTOCOLS``.
        items: what is to be evaluated, in its order.
        name: of it, for errors.

    Raises:
        UserError: an unknown protocol; other images or captions, or another order: the message says which.
        MissingExtraError: ``eccv_caption`` is not installed and needed.
    """
    check_name("protocol", protocol, PROTOCOLS)
    if protocol == "plain":
        captions = torch.arange(len(items.image_of_caption))
        return _trial(protocol, items, captions, _rank_all)
    if protocol == "flickr30k-1k":
        _check_flickr30k(items, name)
        return _trial(protocol, items, torch.arange(len(items.image_of_caption)), _rank_all)

    test_split = _coco_test_split()
    if items.image_ids is None:
        raise UserError(f"protocol {protocol} needs image ids to check the split, and {name} has none; give --shards")
    difference = id_difference("image", items.image_ids, test_split.image_ids, "COCO's test split")
    if difference:
        raise UserError(f"{name} is not what protocol {protocol} is about: {difference}{_splits(items)}")
    captions = _coco_captions(items, test_split, name, protocol)
    if protocol == "eccv":
        caption_ids = [items.caption_ids[index] for index in captions.tolist()]
        return _trial(protocol, items, captions, _EccvCaption(items.image_ids, caption_ids))
    return _trial(protocol, items, captions, _rank_all if protocol == "coco-5k" else _rank_folds)


def _trial(protocol, items, captions: Tensor, evaluate) -> Trial:
    image_of_caption = items.image_of_caption[captions].cpu()
    images = int(image_of_caption.max()) + 1

    def run(similarities: Similarities, ranks: bool, progress: bool) -> Evaluation:
        return evaluate(protocol, similarities, image_of_caption, ranks, progress)

    return Trial(protocol, captions, images, run)


def _rank_all(
    protocol: str, similarities: Similarities, image_of_caption: Tensor, ranks: bool, progress: bool
) -> Evaluation:
    ground_truth = GroundTruth.from_image_of_caption(image_of_caption, similarities.shape[0])
    found = _ranks(similarities, ground_truth, progress)
    return Evaluation({protocol: retrieval_metrics(found)}, found)


def _rank_folds(
    protocol: str, similarities: Similarities, image_of_caption: Tensor, ranks: bool, progress: bool
) -> Evaluation:
    """Average the metrics of five parts, each by itself."""
    of_folds = []
    for images in torch.arange(similarities.shape[0]).tensor_split(FOLDS):
        captions = ((image_of_caption >= images[0]) & (image_of_caption <= images[-1])).nonzero().flatten()
        fold = similarities.select(images=images, captions=captions)
        evaluation = _rank_all(protocol, fold, image_of_caption[captions] - images[0], ranks, progress)
        of_folds.append(evaluation.results[protocol])
    means = {name: statistics.fmean(fold[name] for fold in of_folds) for name in of_folds[0]}
    whole = _rank_all(protocol, similarities, image_of_caption, ranks, progress).ranks if ranks else None
    return Evaluation({protocol: means}, whole)


class _EccvCaption:
    """Evaluates with the right answers of the package ``eccv_caption``.

    Args:
        image_ids: COCO's, in the order of the similarities.
        caption_ids: COCO's, likewise.
    """

    def __init__(self, image_ids: Sequence[Id], caption_ids: Sequence[Id]):
        benchmark = _eccv_caption()
        self._ground_truths = {
            name: GroundTruth.from_ids(image_ids, caption_ids, maps["i2t"], maps["t2i"], allow_absent=True)
            for name, maps in (("eccv-caption", benchmark.eccv_gts), ("cxc", benchmark.cxc_gts))
        }

    def __call__(
        self, protocol: str, similarities: Similarities, image_of_caption: Tensor, ranks: bool, progress: bool
    ) -> Evaluation:
        found = {
            name: _ranks(similarities, ground_truth, progress) for name, ground_truth in self._ground_truths.items()
        }
        return Evaluation({name: retrieval_metrics(of_name) for name, of_name in found.items()}, found["eccv-caption"])


def _ranks(similarities: Similarities, ground_truth: GroundTruth, progress: bool) -> Ranks:
    negatives = max(SHOWN_ANSWERS, ground_truth.most_positives)
    return similarity_ranks(similarities, ground_truth, negatives=negatives, progress=progress)


def _check_flickr30k(items: Collection | Features, name: str) -> None:
    about = f"{name} is not what protocol flickr30k-1k is about"
    counts = items.image_of_caption.bincount()
    if len(counts) != FLICKR30K_IMAGES:
        raise UserError(
            f"{about}: it has {len(counts):,} images, and the test split of Flickr30K has {FLICKR30K_IMAGES:,}"
            f"{_splits(items)}"
        )
    wrong = (counts != CAPTIONS_PER_IMAGE).nonzero().flatten()
    if len(wrong):
        image = int(wrong[0]) if items.image_ids is None else items.image_ids[int(wrong[0])]
        raise UserError(
            f"{about}: {len(wrong):,} images do not have {CAPTIONS_PER_IMAGE} captions, such as image {image} with "
            f"{int(counts[wrong[0]])}{_splits(items)}"
        )
    splits = getattr(items, "splits", ())
    if splits and not all(split.endswith("-test") for split in splits):
        raise UserError(f"{about}: it is the test split{_splits(items)}")
    # Karpathy's file numbers its images, and the shards keep its order.
    if items.image_ids is not None and all(isinstance(value, int) for value in items.image_ids):
        difference = id_difference("image", items.image_ids, sorted(items.image_ids), "the source")
        if difference:
            raise UserError(f"{about}: {difference}")


def _splits(items: Collection | Features) -> str:
    splits = getattr(items, "splits", ())
    return f" (these are {', '.join(splits)})" if splits else ""


class _CocoTestSplit(NamedTuple):
    """Karpathy's test split.

    Attributes:
        image_ids: COCO's, in its order.
        captions: the annotation ids of the five captions of each image.
    """

    image_ids: list[int]
    captions: Mapping[int, frozenset[int]]


def _coco_captions(items: Collection | Features, split: _CocoTestSplit, name: str, protocol: str) -> Tensor:
    """Return the indices of five captions of each image."""
    about = f"{name} is not what protocol {protocol} is about"
    counts = items.image_of_caption.bincount(minlength=len(items.image_ids))
    few = (counts < CAPTIONS_PER_IMAGE).nonzero().flatten()
    if len(few):
        raise UserError(
            f"{about}: {len(few):,} images have less than {CAPTIONS_PER_IMAGE} captions, such as image "
            f"{items.image_ids[int(few[0])]} with {int(counts[few[0]])}"
        )
    known = set().union(*split.captions.values())
    caption_ids = items.caption_ids or ()
    by_id = [
        index
        for index, (caption, image) in enumerate(zip(caption_ids, items.image_of_caption.tolist(), strict=False))
        if caption in split.captions[items.image_ids[image]]
    ]
    if len(by_id) == len({caption_ids[index] for index in by_id}) == len(known):
        return torch.tensor(by_id)
    # Other ids than COCO's; by chance some of them are the same numbers.
    if protocol != "eccv" and len(by_id) < len(known) / 2:
        return first_captions(items.image_of_caption, CAPTIONS_PER_IMAGE)
    missing = sorted(known - {caption_ids[index] for index in by_id})
    what = (
        f"{len(missing):,} of the {len(known):,} captions are missing or belong to another image, such as {missing[0]}"
        if missing
        else "caption ids occur twice"
    )
    raise UserError(
        f"{about}: by COCO's annotation ids, {what}. Shards get these ids from Karpathy's file or from "
        "vl-plugins shards coco --coco-annotations"
    )


@lru_cache(maxsize=1)
def _coco_test_split() -> _CocoTestSplit:
    benchmark = _eccv_caption()
    image_of_caption = benchmark.coco_gts["t2i"]
    image_ids = dict.fromkeys(image_of_caption[int(caption)][0] for caption in benchmark.coco_ids)
    return _CocoTestSplit(
        list(image_ids), {image: frozenset(captions) for image, captions in benchmark.coco_gts["i2t"].items()}
    )


@lru_cache(maxsize=1)
def _eccv_caption() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ujson, a faster reader, is not installed
        return require("eccv_caption", extra="eval").Metrics()
