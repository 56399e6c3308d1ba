"""Ranks of image-text retrieval: exact, tile by tile, without sorting and without the whole similarity matrix."""

from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from vl_plugins.retrieval.ground_truth import GroundTruth, Positives
from vl_plugins.retrieval.similarities import (
    EmbeddingSimilarities,
    MatrixSimilarities,
    Similarities,
    Similarity,
)

__all__ = ["DirectionRanks", "Ranks", "best_answers", "retrieval_ranks", "similarity_ranks"]


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
    tile_shape: tuple[int, int] | None = None,
    progress: bool = False,
) -> Ranks:
    """Rank all captions for every image and all images for every caption, given their embeddings.

    A shell around :func:`similarity_ranks`, which says what a rank is.

    Args:
        image_embeddings: (I, D) floating point; unit vectors where the similarity is to be a cosine in [-1, 1]. With a
            ``similarity`` whatever it takes, such as sets (I, K, D).
        caption_embeddings: (C, D) floating point, on the same device; with a ``similarity`` likewise.
        ground_truth: (C,) integers in [0, I), the index of each caption's image, or a :class:`GroundTruth`.
        similarity: called with image embeddings (i, ...) and caption embeddings (c, ...), returns their similarities
            (i, c), larger is closer, such as :func:`vl_plugins.kernels.pairwise_smooth_chamfer`. The dot product
            if left out.
        negatives, progress: as for :func:`similarity_ranks`.
        tile_shape: images and captions compared at a time; chosen by the device if left out.

    Raises:
        ValueError: a shape or type is not as above, an index is out of range, an image has no caption, an embedding
            holds NaN or infinity, or a similarity is not finite.

    Captions 0 and 1 belong to image 0 here, and caption 2, which looks like image 0 too, to image 1:

    >>> image_embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> caption_embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> ranks = retrieval_ranks(image_embeddings, caption_embeddings, torch.tensor([0, 0, 1]))
    >>> ranks.image_to_text.rank
    tensor([2, 3])
    >>> ranks.text_to_image.rank
    tensor([1, 2, 2])
    """
    similarities = EmbeddingSimilarities(image_embeddings, caption_embeddings, similarity, tile_shape=tile_shape)
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

    Nothing is sorted, similarities serve both directions, and the memory beyond them is that of a few tiles and of the
    result; where the directions have other pairs, also that of the embeddings or similarities of their queries. Each
    tile with right answers in it is asked for twice: ranks compare with the very numbers that stand in the tiles.

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
    images, captions = similarities.shape
    if isinstance(ground_truth, Tensor):
        if ground_truth.shape != (captions,):
            raise ValueError(
                f"image_of_caption must be an integer tensor of shape ({captions},), one index per caption, "
                f"got {ground_truth.dtype} of shape {tuple(ground_truth.shape)}"
            )
        ground_truth = GroundTruth.from_image_of_caption(ground_truth, images)
    _check_ground_truth(ground_truth, similarities.shape)
    if negatives < 0:
        raise ValueError(f"negatives must not be negative, got {negatives}")

    image_to_text, text_to_image = (Positives(*(part.cpu() for part in positives)) for positives in ground_truth)
    if all(torch.equal(*parts) for parts in zip(image_to_text, text_to_image, strict=True)):
        return Ranks(*_rank(similarities, image_to_text, (True, True), (None, None), negatives, progress))

    # Other queries in each direction: similarities of the others are not needed.
    queries, position = image_to_text.images.unique(return_inverse=True)
    rows, _ = _rank(
        similarities.select(images=queries),
        Positives(position, image_to_text.captions),
        (True, False),
        (queries, None),
        negatives,
        progress,
    )
    rows = rows._replace(queries=queries.to(rows.queries.device)[rows.queries])
    queries, position = text_to_image.captions.unique(return_inverse=True)
    _, columns = _rank(
        similarities.select(captions=queries),
        Positives(text_to_image.images, position),
        (False, True),
        (None, queries),
        negatives,
        progress,
    )
    columns = columns._replace(queries=queries.to(columns.queries.device)[columns.queries])
    return Ranks(rows, columns)


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


class _Side:
    """What is known so far of the queries of one direction, which are the rows or the columns of all tiles.

    Args:
        right_answers: number of each query, 0 for what is no query.
        query: (P,) the query of each right answer.
        similarity: (P,) of each right answer.
        negatives: how many of the most similar wrong candidates to keep.
    """

    def __init__(self, right_answers: Tensor, query: Tensor, similarity: Tensor, negatives: int):
        self.right_answers, number = right_answers, len(right_answers)
        self.is_query = torch.zeros_like(right_answers, dtype=torch.bool).index_fill_(0, query, True)
        # Nothing is as similar as an infinite one: who has no right answer counts nothing.
        self.threshold = similarity.new_full((number,), torch.inf)
        self.threshold.scatter_reduce_(0, query, similarity, "amax", include_self=False)
        self.not_worse = torch.zeros(number, dtype=torch.int64, device=query.device)
        self.hardest = torch.full_like(self.threshold, -torch.inf)
        self.index = query.new_full((number, negatives), -1)
        self.similarity = similarity.new_full((number, negatives), -torch.inf)

    def add(self, tile: Tensor, first: int, first_candidate: int, dim: int, scratch: Tensor) -> None:
        """Take in a tile, in whose ``dim`` the candidates are, with ``-inf`` for the right answers."""
        part = slice(first, first + tile.shape[1 - dim])
        threshold = self.threshold[part].unsqueeze(dim)
        # Ones and zeros as floating point add up several times as fast as booleans; a tile has less than 2**24.
        self.not_worse[part] += torch.ge(tile, threshold, out=scratch).sum(dim=dim).to(torch.int64)
        hardest = tile.amax(dim=dim)
        self.hardest[part] = torch.maximum(self.hardest[part], hardest)
        if self.index.shape[1]:
            rows = tile if dim == 1 else tile.T.contiguous()
            similarity, index = rows.topk(min(self.index.shape[1], rows.shape[1]), dim=1)
            similarity = torch.cat([self.similarity[part], similarity], dim=1)
            index = torch.cat([self.index[part], index + first_candidate], dim=1)
            self.similarity[part], order = similarity.topk(self.index.shape[1], dim=1)
            self.index[part] = index.gather(1, order)

    def ranks(self, query: Tensor, candidate: Tensor, similarity: Tensor) -> DirectionRanks:
        queries = self.is_query.nonzero().flatten()
        position = self.is_query.cumsum(0) - 1
        order = similarity.argsort(descending=True, stable=True)
        order = order[query[order].argsort(stable=True)]
        return DirectionRanks(
            queries=queries,
            rank=1 + self.not_worse[queries],
            right_answers=self.right_answers[queries],
            positive_query=position[query[order]],
            positives=candidate[order],
            positive_similarity=similarity[order],
            hardest_negative_similarity=self.hardest[queries],
            negatives=self.index[queries].masked_fill(self.similarity[queries] == -torch.inf, -1),
            negative_similarity=self.similarity[queries],
        )


def _rank(
    similarities: Similarities,
    positives: Positives,
    directions: tuple[bool, bool],
    names: tuple[Tensor | None, Tensor | None],
    negatives: int,
    progress: bool,
) -> tuple[DirectionRanks | None, DirectionRanks | None]:
    """Rank with the images (rows) and with the captions (columns) as queries, as ``directions`` says.

    ``names`` are the indices that rows and columns had before some were selected, for errors.

    The first pass looks up the similarities of the right answers in the tiles where they stand, since computed on their
    own they could differ in the last bit. The second counts the others that are not lower.
    """
    (images, captions), (height, width) = similarities.shape, similarities.tile_shape
    columns_of_tiles = -(-captions // width)
    right_answers = [
        indices[indices >= 0].bincount(minlength=number).to(similarities.device)
        for indices, number in zip(positives, similarities.shape, strict=True)
    ]
    present = (positives.images >= 0) & (positives.captions >= 0)
    positives = Positives(positives.images[present], positives.captions[present])
    tile_of_pair = positives.images // height * columns_of_tiles + positives.captions // width
    order = tile_of_pair.argsort(stable=True)
    tiles = -(-images // height) * columns_of_tiles
    ends = tile_of_pair.bincount(minlength=tiles).cumsum(0).tolist()
    image, caption = positives.images[order].to(similarities.device), positives.captions[order].to(similarities.device)

    def places(tile: int) -> tuple[slice, tuple[Tensor, Tensor]]:
        """Return which right answers are in a tile, and where in it."""
        pairs = slice(ends[tile - 1] if tile else 0, ends[tile])
        return pairs, (image[pairs] % height, caption[pairs] % width)

    def corner(tile: int) -> tuple[int, int]:
        return tile // columns_of_tiles * height, tile % columns_of_tiles * width

    # Tiles with right answers first, then all of them.
    with_positives = [tile for tile in range(tiles) if ends[tile] > (ends[tile - 1] if tile else 0)]
    with tqdm(total=len(with_positives) + tiles, desc="ranking", unit="tile", disable=not progress) as bar:
        found = []
        for tile in with_positives:
            found.append(similarities.tile(*corner(tile))[places(tile)[1]])
            bar.update()
        similarity = torch.cat(found)
        sides = (
            _Side(right_answers[0], image, similarity, negatives) if directions[0] else None,
            _Side(right_answers[1], caption, similarity, negatives) if directions[1] else None,
        )
        scratch = similarity.new_empty(height * width)
        for tile in range(tiles):
            row, column = corner(tile)
            block = similarities.tile(row, column)
            # NaN compares false with everything and would pass for rank 1. A sum takes less time than a look at each
            # element; it may overflow too.
            if not block.sum().isfinite():
                _check_finite(block, row, column, names)
            block[places(tile)[1]] = -torch.inf
            for dim, (side, first, first_candidate) in enumerate(
                zip(reversed(sides), (column, row), (row, column), strict=True)
            ):
                if side:
                    side.add(block, first, first_candidate, dim, scratch[: block.numel()].view(block.shape))
            bar.update()
    rows, columns = sides
    return (
        rows.ranks(image, caption, similarity) if rows else None,
        columns.ranks(caption, image, similarity) if columns else None,
    )


def _check_ground_truth(ground_truth: GroundTruth, shape: tuple[int, int]) -> None:
    kinds = ("images", "captions")
    for name, queries, positives in zip(GroundTruth._fields, kinds, ground_truth, strict=True):
        for kind, indices, size in zip(kinds, positives, shape, strict=True):
            least = 0 if kind == queries else -1
            if len(indices) == 0 or int(indices.min()) < least or int(indices.max()) >= size:
                extent = f"{int(indices.min())} to {int(indices.max())}" if len(indices) else "none"
                raise ValueError(f"{name} must hold at least one pair, with {kind} in [{least}, {size}), got {extent}")


def _check_finite(tile: Tensor, image: int, caption: int, names: tuple[Tensor | None, Tensor | None]) -> None:
    wrong = (~tile.isfinite()).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        of_image, of_caption = (
            index if name is None else int(name[index])
            for index, name in zip((image + row, caption + column), names, strict=True)
        )
        raise ValueError(
            "similarities must be finite; "
            f"that of image {of_image} and caption {of_caption} is {tile[row, column].item()}"
        )
