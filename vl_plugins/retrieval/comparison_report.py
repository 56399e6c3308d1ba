"""The comparison of models on the page of a report: differences, groups of captions, queries that one model finds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from vl_plugins.data import Collection
from vl_plugins.retrieval.disagreement import (
    Group,
    caption_groups,
    group_differences,
    groups_of_shards,
    only_one_finds,
)
from vl_plugins.retrieval.examples import QUERY_KINDS, Example, example_images, examples_of
from vl_plugins.retrieval.ranks import DirectionRanks, Ranks

__all__ = ["ComparedModel", "Comparison", "ModelComparison", "OneFinds", "compare_models"]

EXAMPLES = 6  # of each list
GROUPS = 12  # that are shown of each model


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """A model of a comparison.

    Attributes:
        name: of the model.
        ranks: of its first seed, whose answers are shown; all models have the same queries.
        hits: (Q,) for each query of ``ranks.text_to_image`` the share of the seeds that find it first, 0 to 1.
        seeds: how many.
    """

    name: str
    ranks: Ranks
    hits: Tensor
    seeds: int = 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What :func:`~vl_plugins.retrieval.report.write_report` shows of two or more models.

    Attributes:
        title: heading of the comparison.
        baseline: the model that the others are compared with.
        models: the others.
        table: rows of cells, the heading first; the first cell of a row is its name.
        notes: sentences below the table.
    """

    title: str
    baseline: ComparedModel
    models: Sequence[ComparedModel]
    table: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    @property
    def has_several_seeds(self) -> bool:
        """Whether one of the models has more than one seed."""
        return any(model.seeds > 1 for model in (self.baseline, *self.models))


@dataclass(frozen=True)
class OneFinds:
    """Queries of a direction whose right answer one model alone ranks first, the largest gain in rank first.

    Attributes:
        kind: of the queries, ``image`` or ``caption``.
        finder: name of the model that finds them.
        number, queries: how many it finds alone, and how many queries there are.
        examples: some of them, each with the answers of the model and of the baseline.
    """

    kind: str
    finder: str
    number: int
    queries: int
    examples: list[tuple[Example, Example]]


@dataclass(frozen=True)
class ModelComparison:
    """One model compared with the baseline, as the page shows it.

    Attributes:
        name: of the model.
        value, baseline: text to image R@1 of both over all captions, in percent.
        captions, images: how many captions are queries, and of how many images they are.
        groups: those that deviate most clearly from all captions.
        tried, resolved: how many groups were tried, and how many of these are resolved.
        lists: queries that one model alone finds: of each direction those of the model, then those of the baseline.
    """

    name: str
    value: float
    baseline: float
    captions: int
    images: int
    groups: list[Group]
    tried: int
    resolved: int
    lists: list[OneFinds]

    def shown_images(self) -> set[int]:
        """Return the indices of the images that are shown."""
        images = set()
        for queries in self.lists:
            for pair in queries.examples:
                images |= example_images(queries.kind, pair)
        return images


def compare_models(comparison: Comparison, collection: Collection) -> list[ModelComparison]:
    """Return groups and examples of each model.

    Args:
        comparison: models on any device.
        collection: images and captions in the order of the ranks.
    """
    baseline = _on_cpu(comparison.baseline)
    queries = baseline.ranks.text_to_image.queries
    image_of_query = collection.image_of_caption[queries]
    groups = _groups_of_queries(collection, queries)
    compared = []
    for compared_model in comparison.models:
        model = _on_cpu(compared_model)
        differences = group_differences(model.hits, baseline.hits, image_of_query, groups)
        compared.append(
            ModelComparison(
                name=model.name,
                value=100 * float(model.hits.double().mean()),
                baseline=100 * float(baseline.hits.double().mean()),
                captions=len(queries),
                images=len(image_of_query.unique()),
                groups=differences[:GROUPS],
                tried=len(differences),
                resolved=sum(group.resolved for group in differences),
                lists=_lists(model, baseline),
            )
        )
    return compared


def _on_cpu(model: ComparedModel) -> ComparedModel:
    return replace(model, ranks=model.ranks.cpu(), hits=model.hits.cpu())


def _groups_of_queries(collection: Collection, queries: Tensor) -> dict[str, Tensor]:
    captions = []
    groups = []
    group_of_caption = groups_of_shards(collection)
    for caption in queries.tolist():
        captions.append(collection.captions[caption])
        groups.append(group_of_caption[caption])
    return caption_groups(captions, groups)


def _lists(model: ComparedModel, baseline: ComparedModel) -> list[OneFinds]:
    lists = []
    for kind, ours, theirs in zip(QUERY_KINDS, model.ranks, baseline.ranks, strict=True):
        lists.append(_one_finds(kind, model.name, only_one_finds(ours, theirs), ours, theirs))
        lists.append(_one_finds(kind, baseline.name, only_one_finds(theirs, ours), ours, theirs))
    return lists


def _one_finds(kind: str, finder: str, positions: Tensor, ours: DirectionRanks, theirs: DirectionRanks) -> OneFinds:
    first = positions[:EXAMPLES]
    pairs = list(zip(examples_of(ours, first), examples_of(theirs, first), strict=True))
    return OneFinds(kind, finder, len(positions), len(ours.queries), pairs)
