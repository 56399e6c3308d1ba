"""Evaluation protocols of published numbers: which images and captions they take, and what they compute."""

import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vl_plugins.errors import UserError, one_of, require
from vl_plugins.regularizers import circular_variance
from vl_plugins.retrieval.comparison import ImageValues, image_values, join_folds, top_for_comparison
from vl_plugins.retrieval.features import Features, first_difference
from vl_plugins.retrieval.metrics import hubness, retrieval_metrics
from vl_plugins.retrieval.ranks import TOP, Answers, Ranks, similarity_ranks
from vl_plugins.retrieval.similarities import MeanSimilarities

__all__ = ["PROTOCOLS", "Evaluation", "Fold", "Protocol", "check_images", "evaluate", "first_captions"]

CAPTIONS_PER_IMAGE = 5


class Protocol(NamedTuple):
    """What a protocol requires.

    Attributes:
        images: how many there must be; any number if None. Of each, five captions are taken.
        coco: whether image ids must be those of Karpathy's test split in its order.
        folds: parts with equal numbers of images of which the mean is taken.
    """

    images: int | None = None
    coco: bool = False
    folds: int = 1


PROTOCOLS = {
    "plain": Protocol(),
    "flickr30k-1k": Protocol(1000),
    "coco-5k": Protocol(5000, coco=True),
    "coco-1k": Protocol(5000, coco=True, folds=5),
    "eccv": Protocol(5000, coco=True),
}


class Fold(NamedTuple):
    """Images and captions that are ranked together.

    Attributes:
        ranks: of the fold; its indices are positions in ``images`` and ``captions``.
        images: (I,) int64, ascending indices of its images among those of the features.
        captions: (C,) int64, ascending indices of its captions.
        image_of_caption: (C,) int64, positions in ``images``.
    """

    ranks: Ranks
    images: Tensor
    captions: Tensor
    image_of_caption: Tensor

    def image_values(self) -> ImageValues:
        """Return what each image contributes, to compare models; needs ranks with ``for_comparison``."""
        return image_values(self.ranks, self.image_of_caption, len(self.images))


class Evaluation(NamedTuple):
    """The results of a protocol.

    Attributes:
        metrics: by name of the result, which is the protocol's, or ``eccv-caption`` and ``cxc``: those of
            :func:`~vl_plugins.retrieval.retrieval_metrics`, ``num_samples``, ``num_captions``, and of the sets of one
            model the means of :func:`~vl_plugins.regularizers.circular_variance` (Kim et al. 2023, Table 3),
            ``image_circular_variance`` and ``caption_circular_variance``.
        ranks: those of the whole split; of ``eccv`` with the right answers of ECCV Caption. None for ``coco-1k``, whose
            folds do not need them, unless they were asked for.
        captions: indices of the captions that the protocol takes.
        folds: by name of the result, one fold with the whole split, or the five of ``coco-1k``.
    """

    metrics: dict[str, dict[str, float]]
    ranks: Ranks | None
    captions: Tensor
    folds: dict[str, list[Fold]]

    def hubness(self, result: str) -> dict[str, float]:
        """Return the hubness of captions and of images as answers, each the mean over the folds."""
        folds = self.folds[result]
        of_captions = [hubness(fold.ranks.image_to_text, len(fold.captions)) for fold in folds]
        of_images = [hubness(fold.ranks.text_to_image, len(fold.images)) for fold in folds]
        return {"image_to_text_hubness": fmean(of_captions), "text_to_image_hubness": fmean(of_images)}

    def image_values(self) -> dict[str, ImageValues]:
        """Return by name of the result what each image contributes, to compare models."""
        values = {}
        for result, folds in self.folds.items():
            values[result] = join_folds([fold.image_values() for fold in folds])
        return values


def check_images(protocol: str, images: int, name: str = "the shards") -> None:
    """Raise ``UserError`` if a protocol is not about so many images, before they are encoded.

    Raises:
        MissingExtraError: ``eccv_caption``, which has COCO's test split, is not installed and needed.
    """
    expected = PROTOCOLS[one_of("protocol", protocol, PROTOCOLS)].images
    if expected not in (None, images):
        raise UserError(f"protocol {protocol} is about {expected:,} images, but there are {images:,} in {name}")
    if PROTOCOLS[protocol].coco:
        _coco_test_split()


def evaluate(
    models: Sequence[Features],
    protocol: str = "plain",
    *,
    name: str = "the features",
    with_ranks: bool = False,
    for_comparison: bool = False,
    device: str | torch.device = "cpu",
    progress: bool = False,
) -> Evaluation:
    """Evaluate a model, or an ensemble of several, whose similarities are averaged.

    COCO's protocols compare the image ids, their order and, where they are COCO's annotation ids, the caption ids with
    the test split that the package ``eccv_caption`` ships. Where caption ids tell which five captions of an image the
    split has, these are taken; otherwise the first five. Flickr30K publishes no such list: the number of images, and of
    captions of each, are checked, and the name of the split where ``description`` has it.

    Args:
        models: features of the same images and captions.
        protocol: one of ``PROTOCOLS``.
        name: of the features, for errors.
        with_ranks: compute the ranks of the whole split also where the protocol does not need them.
        for_comparison: keep as many wrong answers of each query as :meth:`Evaluation.image_values` needs.
        device: where similarities are computed.
        progress: show progress bars on standard error.

    Raises:
        UserError: these are not the images and captions of the protocol, or not in its order; models have others.
        MissingExtraError: ``eccv_caption`` is not installed and needed.
    """
    first, *others = models
    for other in others:
        other.check_same_items(first, "one model", "another")
    check_images(protocol, len(first.images), name)
    captions = _captions(first, protocol, name)
    images = torch.arange(len(first.images))
    models = [model.select(images, captions) for model in models]
    image_of_caption = models[0].image_of_caption
    top = top_for_comparison(image_of_caption) if for_comparison else TOP

    def rank(models: Sequence[Features], answers: Tensor | tuple[Answers, Answers]) -> Ranks:
        similarities = MeanSimilarities([model.similarities(device) for model in models])
        return similarity_ranks(similarities, answers, top=top, progress=progress)

    folds: dict[str, list[Fold]] = {}
    if protocol == "eccv":
        for result, answers in _eccv_answers(models[0]).items():
            folds[result] = [Fold(rank(models, answers), images, captions, image_of_caption)]
        ranks: Ranks | None = folds["eccv-caption"][0].ranks
    elif PROTOCOLS[protocol].folds == 1:
        ranks = rank(models, image_of_caption)
        folds[protocol] = [Fold(ranks, images, captions, image_of_caption)]
    else:
        folds[protocol] = []
        for fold_images in images.tensor_split(PROTOCOLS[protocol].folds):
            positions = torch.isin(image_of_caption, fold_images).nonzero().flatten()
            members = [model.select(fold_images, positions) for model in models]
            fold_ranks = rank(members, members[0].image_of_caption)
            fold = Fold(fold_ranks, fold_images, captions[positions], members[0].image_of_caption)
            folds[protocol].append(fold)
        ranks = rank(models, image_of_caption) if with_ranks else None
    sizes: dict[str, float] = {"num_samples": len(images), "num_captions": len(captions)}
    if len(models) == 1 and first.images.ndim == 3:
        sizes["image_circular_variance"] = circular_variance(models[0].images).mean().item()
        sizes["caption_circular_variance"] = circular_variance(models[0].captions).mean().item()
    metrics = {result: _mean_metrics(parts) | sizes for result, parts in folds.items()}
    return Evaluation(metrics, ranks, captions, folds)


def _mean_metrics(folds: Sequence[Fold]) -> dict[str, float]:
    """Return the mean of the metrics of each fold."""
    metrics = [retrieval_metrics(fold.ranks) for fold in folds]
    return {name: fmean(values[name] for values in metrics) for name in metrics[0]}


def _captions(features: Features, protocol: str, name: str) -> Tensor:
    """Return the indices of the captions that a protocol takes, after checking that these are its images."""

    def expect(condition: bool, problem: str) -> None:
        if not condition:
            raise UserError(f"{name} is not what protocol {protocol} is about: {problem}")

    owners, (images, coco, _) = features.image_of_caption, PROTOCOLS[protocol]
    if images is None:
        return torch.arange(len(owners))
    few = owners.bincount() < CAPTIONS_PER_IMAGE
    expect(not few.any(), f"{int(few.sum()):,} images have fewer than {CAPTIONS_PER_IMAGE} captions")
    if not coco:
        splits = features.description.get("splits") or ()
        is_test = len(owners) == images * CAPTIONS_PER_IMAGE and all(split.endswith("-test") for split in splits)
        expect(is_test, f"it has {len(owners):,} captions of the splits {', '.join(splits) or '(unknown)'}")
        return torch.arange(len(owners))
    split = _coco_test_split()
    difference = first_difference(features.image_ids or (), [*split])
    expect(difference is None, f"image ids are not those of COCO's test split: {difference}")
    known: frozenset[Any] = frozenset().union(*split.values())
    image_ids, caption_ids = list(features.image_ids or ()), list(features.caption_ids or ())
    pairs = enumerate(zip(caption_ids, owners.tolist(), strict=False))
    by_id = [index for index, (caption, image) in pairs if caption in split[image_ids[image]]]
    missing = known.difference(caption_ids[index] for index in by_id)
    # Other ids than COCO's; by chance some of them are the same numbers.
    if protocol != "eccv" and len(by_id) < len(known) / 2:
        return first_captions(owners, CAPTIONS_PER_IMAGE)
    what = f"{len(missing):,} of {len(known):,} captions are missing or of another image"
    expect(not missing, f"by COCO's annotation ids, which shards get from COCO's caption files, {what}")
    return torch.tensor(by_id)


def first_captions(image_of_caption: Tensor, number: int) -> Tensor:
    """Return the ascending indices of the first captions of each image, at most ``number`` of each."""
    order, counts = image_of_caption.argsort(stable=True), image_of_caption.bincount()
    number_in_image = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return order[number_in_image < number].sort().values


def _eccv_answers(features: Features) -> dict[str, tuple[Answers, Answers]]:
    """Return the right answers of ECCV Caption and CxC, both directions."""
    images, captions = (
        {name: index for index, name in enumerate(ids or ())} for ids in (features.image_ids, features.caption_ids)
    )

    def indices(queries: Mapping, candidates: Mapping, answers: Mapping) -> Answers:
        return {queries[query]: [candidates.get(one, -1) for one in right] for query, right in answers.items()}

    truths = {"eccv-caption": _eccv_caption().eccv_gts, "cxc": _eccv_caption().cxc_gts}
    return {
        name: (indices(images, captions, truth["i2t"]), indices(captions, images, truth["t2i"]))
        for name, truth in truths.items()
    }


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
        return require("eccv_caption", extra="eccv").Metrics()
