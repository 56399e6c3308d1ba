"""Ranks of image-text retrieval: exact, tile by tile, without sorting and without the whole similarity matrix."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from vl_plugins.retrieval.ground_truth import GroundTruth
from vl_plugins.retrieval.similarities import EmbeddingSimilarities, MatrixSimilarities, Similarities, Similarity

__all__ = ["DirectionRanks", "Ranks", "best_answers", "retrieval_ranks", "similarity_ranks"]

# Places in a tile without right answers.
NOWHERE: tuple[list[int], list[int]] = ([], [])


class DirectionRanks(NamedTuple):
    """What :func:`similarity_ranks` finds for the Q queries of one direction, with P right answers altogether.

    Similarities are float32, or float64 where the given ones are.

    Attributes:
        queries: (Q,) int64, index of each query among the images or captions, ascending.
        rank: (Q,) int64, rank of the query's best-ranked right answer among all candidates, 1 is the best.
        right_answers: (Q,) int64, number R of right answers of each query, also of those that are no candidates.
        positive_query: (P,) int64, for each right answer the position of its query in ``queries``, ascending.
        positives: (P,) int64, index of each right answer among the candidates, the best of a query first.
        positive_similarity: (P,) its similarity with the query.
        hardest_negative_similarity: (Q,) highest similarity of each query with a candidate that is no right answer;
            ``-inf`` where there is no such candidate.
        negatives: (Q, N) int64, indices of the N candidates most similar to each query that are no right answers, the
            most similar first; -1 where there are fewer.
        negative_similarity: (Q, N) their similarity with the query; ``-inf`` where there are fewer.
    """

    queries: Tensor
    rank: Tensor
    right_answers: Tensor
    positive_query: Tensor
    positives: Tensor
    positive_similarity: Tensor
    hardest_negative_similarity: Tensor
    negatives: Tensor
    negative_similarity: Tensor

    def place_in_query(self) -> Tensor:
        """Return for each right answer (P,) how many better ones its query has."""
        counts = self.positive_query.bincount(minlength=len(self.queries))
        first = counts.cumsum(0) - counts
        return torch.arange(len(self.positives), device=counts.device) - first[self.positive_query]


class Ranks(NamedTuple):
    """Both directions of :func:`similarity_ranks`.

    Attributes:
        image_to_text: images as queries, captions as candidates.
        text_to_image: captions as queries, images as candidates.
    """

    image_to_text: DirectionRanks
    text_to_image: DirectionRanks


def retrieval_ranks(
    image_embeddings: Tensor,
    caption_embeddings: Tensor,
    ground_truth: GroundTruth | Tensor,
    similarity: Similarity | None = None,
    *,
    negatives: int = 0,
    progress: bool = False,
) -> Ranks:
    """Rank all captions for every image and all images for every caption, given their embeddings.

    Args:
        image_embeddings, caption_embeddings, similarity: as for :class:`EmbeddingSimilarities`: (I, D) and (C, D), unit
            vectors where the similarity is to be a cosine, or what ``similarity`` takes.
        ground_truth, negatives, progress: as for :func:`similarity_ranks`, which tells what a rank is.

    Raises:
        ValueError: as both of these.

    Captions 0 and 1 belong to image 0 here, and caption 2, which looks like image 0 too, to image 1:

    >>> image_embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> caption_embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> ranks = retrieval_ranks(image_embeddings, caption_embeddings, torch.tensor([0, 0, 1]))
    >>> ranks.image_to_text.rank
    tensor([2, 3])
    >>> ranks.text_to_image.rank
    tensor([1, 2, 2])
    """
    similarities = EmbeddingSimilarities(image_embeddings, caption_embeddings, similarity)
    return similarity_ranks(similarities, ground_truth, negatives=negatives, progress=progress)


@torch.no_grad()
def similarity_ranks(
    similarities: Similarities | Tensor,
    ground_truth: GroundTruth | Tensor,
    *,
    negatives: int = 0,
    progress: bool = False,
) -> Ranks:
    r"""Rank all captions for every image and all images for every caption, given their similarities.

    With :math:`P_q` the right answers to query :math:`q` among its candidates,

    .. math:: \text{rank}_q = 1 + \left|\left\{n \notin P_q : s_{qn} \ge \max_{p \in P_q} s_{qp}\right\}\right|

    Ties count against the model: a wrong candidate that scores as high as the best right one is ranked before it, so
    that equal embeddings everywhere give the worst ranks and not perfect ones. Other right answers are never counted.
    An image whose captions score ``[0.8, 0.8, 0.3]`` and are followed by another image's captions at ``[0.8, 0.5]`` has
    rank 2: the tie with the other image's caption counts, the one between its own two does not.

    Nothing is sorted, each tile serves both directions, and the memory beyond the similarities is that of a few tiles
    and of the result. Tiles with right answers are computed twice: first for the similarities of the right answers,
    then for all comparisons with them. Computed on their own, these similarities could differ in the last bit.

    Args:
        similarities: (I, C) floating point, larger is closer, or something that yields its tiles, such as
            :class:`EmbeddingSimilarities` and :class:`MeanSimilarities`.
        ground_truth: (C,) integers in [0, I), the index of each caption's image, or a :class:`GroundTruth`.
        negatives: how many of the most similar wrong candidates of each query to find. As many as a query has right
            answers (:attr:`GroundTruth.most_positives`) are needed for mAP@R and R-Precision.
        progress: show a progress bar on standard error.

    Raises:
        ValueError: a shape or type is not as above, an index is out of range, an image has no caption, or a similarity
            is not finite.
    """
    if isinstance(similarities, Tensor):
        similarities = MatrixSimilarities(similarities)
    (images, captions), (height, width) = similarities.shape, similarities.tile_shape
    if isinstance(ground_truth, Tensor):
        if ground_truth.shape != (captions,):
            raise ValueError(
                f"image_of_caption must have one index for each of the {captions} captions, "
                f"got shape {tuple(ground_truth.shape)}"
            )
        ground_truth = GroundTruth.from_image_of_caption(ground_truth, images)
    ground_truth.check(images, captions)
    if negatives < 0:
        raise ValueError(f"negatives must not be negative, got {negatives}")

    corners = list(itertools.product(range(0, images, height), range(0, captions, width)))
    directions = [_Direction(dim, pairs, similarities, negatives) for dim, pairs in enumerate(ground_truth)]
    tiles_with_positives = sorted({number for direction in directions for number in direction.places})
    with tqdm(total=len(tiles_with_positives) + len(corners), desc="ranking", unit="tile", disable=not progress) as bar:
        found = []
        for number in tiles_with_positives:
            tile = similarities.tile(*corners[number])
            found.append([tile[direction.places.get(number, NOWHERE)] for direction in directions])
            bar.update()
        for direction, parts in zip(directions, zip(*found, strict=True), strict=True):
            direction.begin(torch.cat(parts))
        for number, corner in enumerate(corners):
            tile = similarities.tile(*corner)
            _check_finite(tile, *corner)
            for direction in directions:
                direction.add(number, tile, corner)
            bar.update()
    return Ranks(*(direction.ranks() for direction in directions))


def best_answers(direction: DirectionRanks, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the candidates that are ranked first for each query, a wrong one before a right one of equal similarity.

    Args:
        direction: with at least ``number`` negatives.
        number: how many candidates.

    Returns:
        Three tensors (Q, number): index of the candidate, its similarity, and whether it is right. Where there are
        fewer candidates the index is -1 and the similarity ``-inf``.

    Raises:
        ValueError: ``direction`` has fewer negatives.
    """
    if number > direction.negatives.shape[1]:
        raise ValueError(f"{number} answers need as many negatives, got {direction.negatives.shape[1]}")
    place = direction.place_in_query()
    kept = place < number
    right_index = direction.positives.new_full((len(direction.queries), number), -1)
    right_similarity = direction.positive_similarity.new_full(right_index.shape, -torch.inf)
    where = direction.positive_query[kept], place[kept]
    right_index[where], right_similarity[where] = direction.positives[kept], direction.positive_similarity[kept]

    # The sort is stable: of equal ones the wrong candidates, which come first here, stay first.
    similarity = torch.cat([direction.negative_similarity[:, :number], right_similarity], dim=1)
    index = torch.cat([direction.negatives[:, :number], right_index], dim=1)
    order = similarity.sort(dim=1, descending=True, stable=True).indices[:, :number]
    index = index.gather(1, order)
    return index, similarity.gather(1, order), order >= number


class _Direction:
    """What is known so far about the queries of one direction, rows (``query_dim`` 0) or columns (1) of the matrix.

    Attributes:
        places: rows and columns of the right answers in a tile, by the number of the tile.
    """

    def __init__(self, query_dim: int, pairs: Tensor, similarities: Similarities, negatives: int):
        pairs, (height, width) = pairs.to(similarities.device), similarities.tile_shape
        right_answers = pairs[query_dim].bincount()
        pairs = pairs[:, (pairs >= 0).all(dim=0)]
        tile = pairs[0] // height * -(-similarities.shape[1] // width) + pairs[1] // width
        tile, order = tile.sort(stable=True)
        images, captions = pairs = pairs[:, order]
        numbers, counts = (part.tolist() for part in tile.unique_consecutive(return_counts=True))
        places = zip((images % height).split(counts), (captions % width).split(counts), strict=True)
        self.places = dict(zip(numbers, places, strict=True))
        self.query_dim = query_dim
        self.queries, self.positive_query = pairs[query_dim].unique(return_inverse=True)
        self.positives = pairs[1 - query_dim]
        self.right_answers = right_answers[self.queries]
        self.not_worse = torch.zeros_like(self.queries)
        self.negatives = self.queries.new_full((len(self.queries), negatives), -1)

    def begin(self, positive_similarity: Tensor) -> None:
        """Take the similarity of each right answer, in the order of the tiles."""
        self.positive_similarity = positive_similarity
        self.hardest = positive_similarity.new_full(self.queries.shape, -torch.inf)
        self.best_positive = self.hardest.scatter_reduce(0, self.positive_query, positive_similarity, "amax")
        self.negative_similarity = positive_similarity.new_full(self.negatives.shape, -torch.inf)

    def add(self, number: int, tile: Tensor, corner: tuple[int, int]) -> None:
        """Compare with a tile, given its number and its first row and column."""
        places = self.places.get(number, NOWHERE)
        positive_similarity = tile[places]
        tile[places] = -torch.inf
        rows = tile.T if self.query_dim else tile
        first, first_candidate = corner[self.query_dim], corner[1 - self.query_dim]
        part = slice(*torch.searchsorted(self.queries, self.queries.new_tensor([first, first + len(rows)])).tolist())
        queries = self.queries[part] - first
        if len(queries) < len(rows):
            rows = rows[queries]
        # Ones and zeros as floating point add up several times as fast as booleans; a tile has less than 2**24.
        not_worse = torch.ge(rows, self.best_positive[part, None], out=torch.empty_like(rows)).sum(dim=1)
        self.not_worse[part] += not_worse.to(torch.int64)
        self.hardest[part] = torch.maximum(self.hardest[part], rows.amax(dim=1))
        kept = self.negatives.shape[1]
        if kept:
            similarity, index = rows.contiguous().topk(min(kept, rows.shape[1]), dim=1)
            similarity = torch.cat([self.negative_similarity[part], similarity], dim=1)
            index = torch.cat([self.negatives[part], index + first_candidate], dim=1)
            self.negative_similarity[part], order = similarity.topk(kept, dim=1)
            self.negatives[part] = index.gather(1, order)
        tile[places] = positive_similarity

    def ranks(self) -> DirectionRanks:
        """Return the result, once all tiles have been added."""
        order = self.positive_similarity.argsort(descending=True, stable=True)
        order = order[self.positive_query[order].argsort(stable=True)]
        return DirectionRanks(
            queries=self.queries,
            rank=1 + self.not_worse,
            right_answers=self.right_answers,
            positive_query=self.positive_query[order],
            positives=self.positives[order],
            positive_similarity=self.positive_similarity[order],
            hardest_negative_similarity=self.hardest,
            negatives=self.negatives.masked_fill(self.negative_similarity == -torch.inf, -1),
            negative_similarity=self.negative_similarity,
        )


def _check_finite(tile: Tensor, image: int, caption: int) -> None:
    # NaN compares false with everything and would pass for rank 1. A sum takes less time than a look at each element,
    # but it may overflow.
    if not tile.sum().isfinite():
        for row, column in (~tile.isfinite()).nonzero()[:1].tolist():
            value = tile[row, column].item()
            raise ValueError(
                f"similarities must be finite; that of image {image + row} and caption {caption + column} is {value}"
            )
