"""Exact ranks of image-text retrieval, without sorting and without the whole similarity matrix."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from vl_plugins.retrieval.norms import divided_by_norms, has_unit_norm, norms
from vl_plugins.retrieval.similarities import (
    KERNEL,
    EmbeddingSimilarities,
    MatrixSimilarities,
    Similarities,
    Similarity,
)

__all__ = ["Answers", "DirectionRanks", "Ranks", "retrieval_ranks", "right_answers", "similarity_ranks"]

Answers = Mapping[int, Sequence[int]]
"""The right candidates of each query, by index; -1 stands for one that is not among the candidates."""

BLOCK = 2**22  # similarities computed at a time in a thread
SEVERAL_BLOCKS = 2**25  # in all threads
TOP = 10  # wrong candidates of each query that are returned


class DirectionRanks(NamedTuple):
    """The ranks of the Q queries of one direction, with P right answers among the candidates.

    Attributes:
        queries: (Q,) int64, index of each query among the images or captions.
        rank: (Q,) int64, rank of the best right answer among all candidates, from 1.
        relevant: (Q,) int64, number R of right answers, also of those that are not among the candidates.
        average_precision, r_precision: (Q,) float64 in [0, 1], see :func:`similarity_ranks`.
        positive_query: (P,) int64, position in ``queries`` of the query of each right answer, ascending.
        positives: (P,) int64, index of each right answer among the candidates, the best of a query first.
        positive_similarity: (P,) its similarity.
        negatives: (Q, N) int64, the most similar wrong candidates, best first; -1 where there are fewer.
        negative_similarity: (Q, N) their similarities, ``-inf`` where there are fewer.
    """

    queries: Tensor
    rank: Tensor
    relevant: Tensor
    average_precision: Tensor
    r_precision: Tensor
    positive_query: Tensor
    positives: Tensor
    positive_similarity: Tensor
    negatives: Tensor
    negative_similarity: Tensor

    def first_positives(self) -> Tensor:
        """Return where the right answers of each query start in ``positives``, (Q,) int64; the best one comes first."""
        counts = self.positive_query.bincount(minlength=len(self.queries))
        return counts.cumsum(0) - counts

    def positive_numbers(self) -> Tensor:
        """Return the number of each right answer in its query, (P,) int64; the best one has 0."""
        places = torch.arange(len(self.positives), device=self.positives.device)
        return places - self.first_positives()[self.positive_query]


class Ranks(NamedTuple):
    """Both directions: images as queries and captions as candidates, and the reverse."""

    image_to_text: DirectionRanks
    text_to_image: DirectionRanks

    def cpu(self) -> "Ranks":
        """Return the same ranks with tensors on the CPU."""
        directions = []
        for direction in self:
            fields = [field.cpu() for field in direction]
            directions.append(DirectionRanks(*fields))
        image_to_text, text_to_image = directions
        return Ranks(image_to_text, text_to_image)


def right_answers(image_of_caption: Tensor) -> tuple[Answers, Answers]:
    """Return the right answers of both directions where each caption describes one image (C,)."""
    captions: dict[int, list[int]] = {}
    for caption, image in enumerate(image_of_caption.tolist()):
        captions.setdefault(image, []).append(caption)
    return dict(sorted(captions.items())), {caption: [image] for caption, image in enumerate(image_of_caption.tolist())}


def retrieval_ranks(
    image_embeddings: Tensor,
    caption_embeddings: Tensor,
    answers: Tensor | tuple[Answers, Answers],
    similarity: Similarity | None = None,
    *,
    normalize: bool | None = None,
    top: int = TOP,
    progress: bool = False,
) -> Ranks:
    """Rank all captions for every image and all images for every caption, given their embeddings.

    Args:
        image_embeddings, caption_embeddings, similarity: as for :class:`EmbeddingSimilarities`.
        answers, top, progress: as for :func:`similarity_ranks`.
        normalize: True divides the embeddings, or the elements of sets, by their norms, for cosines. False compares
            them as they are, for dot products. By default, embeddings that are compared by dot products must have norm
            1 up to 0.01, in any type; what a ``similarity`` takes is left to it. Those of :mod:`vl_plugins.distances`
            normalize themselves.

    Raises:
        ValueError: embeddings without unit norm, if ``normalize`` is None; embeddings without a ``similarity`` that are
            no vectors of one width; or :func:`similarity_ranks` raises it.

    >>> images = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> captions = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> ranks = retrieval_ranks(images, captions, torch.tensor([0, 0, 1]))
    >>> ranks.image_to_text.rank, ranks.text_to_image.rank
    (tensor([2, 3]), tensor([1, 2, 2]))
    """
    if similarity is None:
        _check_vectors(image_embeddings, caption_embeddings)
        if normalize is None:
            _check_norms("images", image_embeddings)
            _check_norms("captions", caption_embeddings)
    if normalize:
        image_embeddings, caption_embeddings = divided_by_norms(image_embeddings), divided_by_norms(caption_embeddings)
    similarities = EmbeddingSimilarities(image_embeddings, caption_embeddings, similarity)
    return similarity_ranks(similarities, answers, top=top, progress=progress)


def _check_vectors(images: Tensor, captions: Tensor) -> None:
    if images.ndim != 2 or captions.ndim != 2 or images.shape[1] != captions.shape[1]:
        shapes = f"{tuple(images.shape)} and {tuple(captions.shape)}"
        raise ValueError(f"expected images (I, D) and captions (C, D), or a similarity of others; got {shapes}")


def _check_norms(kind: str, embeddings: Tensor) -> None:
    lengths = norms(embeddings.detach())
    # Ranking raises an error for NaN.
    rows = (~has_unit_norm(lengths) & ~lengths.isnan()).nonzero().flatten()
    if len(rows):
        raise ValueError(
            f"{len(rows):,} of {len(lengths):,} {kind} have embeddings without unit norm, the first is row {rows[0]} "
            f"of norm {lengths[rows[0]]:.4g}; pass normalize=True to compare cosines, or normalize=False for dot "
            "products"
        )


@torch.no_grad()
def similarity_ranks(
    similarities: Similarities | Tensor,
    answers: Tensor | tuple[Answers, Answers],
    *,
    top: int = TOP,
    progress: bool = False,
) -> Ranks:
    r"""Rank all captions for every image and all images for every caption, given their similarities.

    With :math:`P_q` the right answers to query :math:`q` among its candidates,

    .. math:: \text{rank}_q = 1 + \left|\left\{n \notin P_q : s_{qn} \ge \max_{p \in P_q} s_{qp}\right\}\right|

    Ties count against the model: a wrong candidate as similar as the best right one is ranked before it, so equal
    embeddings everywhere give the worst ranks. Other right answers are never counted.

    With R the number of right answers, :math:`P(i)` the share of right ones among the first :math:`i`, and
    :math:`h(i)` 1 where answer :math:`i` is right, there are also

    .. math:: \text{AP@R} = \frac{1}{R} \sum_{i=1}^{R} h(i) P(i), \qquad \text{R-Precision} = P(R)

    (Musgrave et al. 2020, "A Metric Learning Reality Check", section 3.2; Chun et al. 2022, "ECCV Caption", section 4).

    Args:
        similarities: (I, C), or an object that computes them for some queries at a time.
        answers: (C,) integers, the image of each caption, each image with a caption; or the right captions of each
            image that is a query, and the right images of each caption that is one.
        top: how many wrong candidates of each query to return.
        progress: show a progress bar on standard error.

    Raises:
        ValueError: an image has no caption, a query no right answer among the candidates, an index is out of range, or
            a similarity is not finite.
    """
    if isinstance(similarities, Tensor):
        similarities = MatrixSimilarities(similarities)
    images, captions = similarities.shape
    if isinstance(answers, Tensor):
        is_valid = answers.ndim == 1 and len(answers) == captions and answers.min() >= 0
        counts = answers.bincount() if is_valid else answers.new_zeros(0)
        if len(counts) != images or not counts.all():
            raise ValueError(f"expected the image, 0 to {images - 1}, of {captions} captions, and captions of each")
        answers = right_answers(answers)
    device = similarities.device
    return Ranks(
        _rank(similarities.of_images, answers[0], similarities.shape, device, top, progress),
        _rank(similarities.of_captions, answers[1], similarities.shape[::-1], device, top, progress),
    )


def _rank(
    similarity_of: Callable[[Tensor], Tensor],
    answers: Answers,
    shape: tuple[int, int],
    device: torch.device,
    top: int,
    progress: bool,
) -> DirectionRanks:
    """Rank the candidates of each query; ``similarity_of`` maps queries (q,) to similarities (q, candidates)."""
    answers = dict(sorted(answers.items()))
    present = [list(dict.fromkeys(candidate for candidate in right if candidate >= 0)) for right in answers.values()]
    absent = [sum(candidate < 0 for candidate in right) for right in answers.values()]
    queries, flat = torch.tensor(list(answers)), torch.tensor([c for right in present for c in right])
    counts = torch.tensor(list(map(len, present)))
    relevant = counts + torch.tensor(absent)
    if not len(queries) or not counts.all():
        raise ValueError("each query needs a right answer among the candidates")
    if queries.min() < 0 or queries.max() >= shape[0] or flat.max() >= shape[1]:
        raise ValueError(f"answers have indices beyond the {shape[0]} queries or the {shape[1]} candidates")
    queries, relevant, counts, flat = (tensor.to(device) for tensor in (queries, relevant, counts, flat))
    first = counts.cumsum(0) - counts
    rows = max(1, BLOCK // shape[1] // KERNEL) * KERNEL

    @torch.no_grad()  # in each thread
    def rank_block(part: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(int(counts[part].max()), device=device)
        padding = places >= counts[part, None]
        right = flat[first[part, None] + places.masked_fill(padding, 0)]
        similarity = similarity_of(queries[part])
        if not (similarity.amin() > -torch.inf and similarity.amax() < torch.inf):  # NaN is neither
            raise ValueError("similarities must be finite")
        positive, by_similarity = similarity.gather(1, right).masked_fill(padding, -torch.inf).sort(descending=True)
        best = positive[:, :1]
        similarity.scatter_(1, right, -torch.inf)
        negative, negatives = similarity.topk(min(max(top, int(relevant[part].max())), shape[1]))
        rank = 1 + similarity.ge_(best).sum(dim=1)  # faster than counting, and exact below 2**24
        place = torch.searchsorted(-negative, -positive, right=True) + places + 1
        hit = (place <= relevant[part, None]) & ~padding
        share = (hit * (places + 1).double() / place).sum(dim=1), hit.double().sum(dim=1)
        average_precision, r_precision = (value / relevant[part] for value in share)
        positives = (part[:, None].expand_as(right), right.gather(1, by_similarity), positive)
        negative = negative[:, :top].clone()  # one query with thousands of right answers must not set the memory of all
        negatives = negatives[:, :top].masked_fill(negative == -torch.inf, -1)
        of_positives = (value[~padding] for value in positives)
        return rank.long(), average_precision, r_precision, *of_positives, negatives, negative

    blocks = torch.arange(len(queries), device=device).split(rows)
    with _threads(max(1, SEVERAL_BLOCKS // (rows * shape[1])) if device.type == "cpu" else 1) as run:
        parts = list(tqdm(run(rank_block, blocks), total=len(blocks), disable=not progress, desc="rank"))
    rank, *fields = (torch.cat(column) for column in zip(*parts, strict=True))
    return DirectionRanks(queries, rank, relevant, *fields)


@contextmanager
def _threads(most: int) -> Iterator[Callable]:
    """Yield a ``map`` that runs a function in threads, which share those of PyTorch.

    On busy cores the threads of one operation wait for each other at its end, which takes time slices. Threads with
    blocks of their own do not.
    """
    threads = torch.get_num_threads()
    workers = min(threads, most)
    if workers == 1:
        yield map
        return
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(threads)
