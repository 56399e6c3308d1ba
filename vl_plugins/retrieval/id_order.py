"""Right answers among the first K candidates, where ties go by the candidates' ids as text.

Only queries whose first K a tie decides need their similarities again; these are computed in blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.retrieval.metrics import RECALL_AT
from vl_plugins.retrieval.places import Bounds
from vl_plugins.retrieval.ranks import DirectionRanks
from vl_plugins.retrieval.similarities import KERNEL

__all__ = ["CountsById", "Direction", "counts_by_id", "unique_texts"]

DEPTH = max(RECALL_AT)
BLOCK = 2**22  # similarities computed at a time


@dataclass(frozen=True)
class Direction:
    """Queries of one kind and candidates of the other.

    Attributes:
        ranks: of the Q queries, on the CPU.
        similarity_of: maps queries (q,), by index, to similarities (q, C) with all candidates.
        image_of_query, image_of_candidate: (Q,) and (C,) int64; a candidate is right if it has the query's image.
        candidate_ids: unique texts.
        device: where ``similarity_of`` computes.
    """

    ranks: DirectionRanks
    similarity_of: Callable[[Tensor], Tensor]
    image_of_query: Tensor
    image_of_candidate: Tensor
    candidate_ids: Sequence[str]
    device: torch.device


class CountsById(NamedTuple):
    """Right answers (Q, 3) among the first K where ties go by id as text.

    Attributes:
        rising: the lowest id first.
        falling: the highest id first.
        tied: (Q,) int64, how many candidates are as similar as the tenth or more; 0 where no tie decides.
    """

    rising: Tensor
    falling: Tensor
    tied: Tensor


def unique_texts(kind: str, ids: Sequence[int | str] | None, number: int) -> tuple[list[str], str]:
    """Return unique ids as text, and a note if they are positions in place of ids that are not unique."""
    positions = [str(position) for position in range(number)]
    if ids is None:
        return positions, ""
    texts = [str(one) for one in ids]
    if len(set(texts)) < number:
        return positions, f"{kind} ids are not unique as text, so positions decide ties"
    return texts, ""


def counts_by_id(direction: Direction, counts: Bounds) -> CountsById:
    """Return the right answers among the first K where ties go by id.

    Args:
        direction: queries and candidates.
        counts: :func:`right_counts` of its ranks.
    """
    rising, falling = counts.low.clone(), counts.low.clone()
    tied = torch.zeros(len(rising), dtype=torch.int64)
    image_of_query = direction.image_of_query.to(direction.device)
    image_of_candidate = direction.image_of_candidate.to(direction.device)
    place = _places_of_ids(direction.candidate_ids).to(direction.device)
    reverse_place = len(place) - 1 - place
    undecided = (counts.low != counts.high).any(dim=1).nonzero().flatten()
    rows = max(1, BLOCK // len(place) // KERNEL) * KERNEL
    for queries in undecided.split(rows):
        similarity = direction.similarity_of(queries.to(direction.device))
        tenth = similarity.topk(min(DEPTH, len(place))).values[:, -1:]
        is_below = similarity < tenth
        tied[queries] = (len(place) - is_below.sum(dim=1)).cpu()
        group = is_below.int() + (similarity <= tenth)  # 0 is above the tenth, 1 ties with it, 2 is below
        for by_id, order in ((rising, place), (falling, reverse_place)):
            candidates = _first_candidates(similarity, group, order)
            is_right = image_of_candidate[candidates] == image_of_query[queries, None]
            for column, k in enumerate(RECALL_AT):
                by_id[queries, column] = is_right[:, :k].sum(dim=1).cpu()
    return CountsById(rising, falling, tied)


def _first_candidates(similarity: Tensor, group: Tensor, order: Tensor) -> Tensor:
    """Return the first ten candidates (q, 10), the most similar first and ties by a rising ``order`` (C,).

    Only ties with the tenth similarity may have to stay out of the first ten, so ``group`` (q, C) and then the order
    tell which ten these are.
    """
    candidates = len(order)
    key = candidates * group + order
    chosen = key.topk(min(DEPTH, candidates), largest=False).indices
    chosen = chosen.gather(1, order[chosen].argsort(dim=1))
    by_similarity = similarity.gather(1, chosen).sort(dim=1, descending=True, stable=True).indices
    return chosen.gather(1, by_similarity)


def _places_of_ids(ids: Sequence[str]) -> Tensor:
    """Return the place (C,) of each id in their order as text, from 0."""
    in_order = sorted(range(len(ids)), key=ids.__getitem__)
    places = torch.empty(len(ids), dtype=torch.int32)
    places[torch.tensor(in_order)] = torch.arange(len(ids), dtype=torch.int32)
    return places
