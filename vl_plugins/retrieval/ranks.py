"""Ranks of image-text retrieval, exact and in chunks."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.functional.precision import full_precision

__all__ = ["Ranks", "retrieval_ranks"]


class Ranks(NamedTuple):
    """What :func:`retrieval_ranks` finds for I images and C captions.

    Attributes:
        image_to_text: (I,) int64, rank of each image's best-ranked caption among all captions, 1 is the best.
        text_to_image: (C,) int64, rank of each caption's image among all images, 1 is the best.
        positive_similarity: (C,) similarity of each caption and its image, that is of every positive pair.
        image_to_text_hardest_negative: (I,) highest similarity of each image with a caption of another image.
        text_to_image_hardest_negative: (C,) highest similarity of each caption with another image.

    Similarities are float32, or float64 where an embedding is. A hardest negative is ``-inf`` where there is no
    negative at all, which happens with a single image only.
    """

    image_to_text: Tensor
    text_to_image: Tensor
    positive_similarity: Tensor
    image_to_text_hardest_negative: Tensor
    text_to_image_hardest_negative: Tensor


@torch.no_grad()
def retrieval_ranks(
    image_embeddings: Tensor,
    caption_embeddings: Tensor,
    image_of_caption: Tensor,
    chunk_size: int = 256,
    similarity: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Ranks:
    r"""Rank all captions for every image and all images for every caption by their dot products or sets' similarity.

    With :math:`P_q` the positives of query :math:`q` among its candidates,

    .. math:: \text{rank}_q = 1 + \left|\left\{n \notin P_q : s_{qn} \ge \max_{p \in P_q} s_{qp}\right\}\right|

    Ties count against the model: a negative that scores as high as the best positive is ranked before it, so that
    equal embeddings everywhere give the worst ranks and not perfect ones. The other captions of the query image
    are never counted. An image whose captions score ``[0.8, 0.8, 0.3]`` and are followed by another image's
    captions at ``[0.8, 0.5]`` has rank 2: the tie with the other image's caption counts, the one between its own
    two does not.

    Nothing is sorted, and the memory needed beyond the embeddings is that of a few ``chunk_size`` x max(I, C)
    blocks, and of what ``similarity`` takes for one. Half precision is computed in float32, under autocast too; on a
    GPU the float32 product follows :func:`torch.set_float32_matmul_precision`. A product whose rounding depends on the
    position in the block can separate candidates that tie on paper by one unit in the last place.

    Args:
        image_embeddings: (I, D) floating point; unit vectors where the similarity is to be a cosine in [-1, 1]. With a
            ``similarity`` whatever it takes, such as sets (I, K, D).
        caption_embeddings: (C, D) floating point, on the same device; with a ``similarity`` likewise.
        image_of_caption: (C,) integers in [0, I), the index of each caption's image. The captions of an image
            need not be adjacent, and their number may differ from image to image.
        chunk_size: queries scored at a time.
        similarity: called with embeddings (Q, ...) and (N, ...), each side as queries once, returns their similarities
            (Q, N), larger is closer; a symmetric function, such as
            :func:`vl_plugins.functional.smooth_chamfer_similarity`. The dot product if left out.

    Raises:
        ValueError: a shape or type is not as above, an index is out of range, an image has no caption, an embedding
            holds NaN or infinity, or a similarity overflows.

    Captions 0 and 1 belong to image 0 here, and caption 2, which looks like image 0 too, to image 1:

    >>> image_embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> caption_embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> ranks = retrieval_ranks(image_embeddings, caption_embeddings, torch.tensor([0, 0, 1]))
    >>> ranks.image_to_text
    tensor([2, 3])
    >>> ranks.text_to_image
    tensor([1, 2, 2])
    >>> ranks.positive_similarity
    tensor([1., 0., 0.])
    """
    _check_embeddings(image_embeddings, caption_embeddings, vectors=similarity is None)
    similarity = similarity or _dot_products
    _check_image_of_caption(image_of_caption, len(image_embeddings), len(caption_embeddings))
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")

    images, captions = full_precision(image_embeddings, caption_embeddings)
    image_of_caption = image_of_caption.to(images.device, torch.int64)
    caption_index = torch.arange(len(captions), device=images.device)

    image_to_text, _, image_to_text_hardest_negative = _rank_queries(
        "image-to-text", images, captions, image_of_caption, caption_index, chunk_size, similarity
    )
    text_to_image, positive_similarity, text_to_image_hardest_negative = _rank_queries(
        "text-to-image", captions, images, caption_index, image_of_caption, chunk_size, similarity
    )
    return Ranks(
        image_to_text,
        text_to_image,
        positive_similarity,
        image_to_text_hardest_negative,
        text_to_image_hardest_negative,
    )


def _dot_products(queries: Tensor, candidates: Tensor) -> Tensor:
    return queries @ candidates.T


def _rank_queries(
    direction: str,
    queries: Tensor,
    candidates: Tensor,
    query_of_pair: Tensor,
    candidate_of_pair: Tensor,
    chunk_size: int,
    similarity: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rank, similarity of the best positive and of the hardest negative of each query, all (Q,).

    The positives are the pairs (``query_of_pair[i]``, ``candidate_of_pair[i]``), in any order.
    """
    chunks = []
    for start in range(0, len(queries), chunk_size):
        with torch.autocast(queries.device.type, enabled=False):
            similarities = similarity(queries[start : start + chunk_size], candidates)  # (chunk, N)
        in_chunk = (query_of_pair >= start) & (query_of_pair < start + chunk_size)
        positives = query_of_pair[in_chunk] - start, candidate_of_pair[in_chunk]

        # Read from the block itself: computed on its own, a positive could differ from its entry in the last bit.
        best_positive = similarities.new_full((len(similarities),), -torch.inf)
        best_positive.scatter_reduce_(0, positives[0], similarities[positives], "amax")
        similarities[positives] = -torch.inf
        ranks = 1 + (similarities >= best_positive[:, None]).sum(dim=1)
        chunks.append((ranks, best_positive, similarities.amax(dim=1)))

    ranks, best_positive, hardest_negative = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    # NaN compares false with everything and would pass for rank 1.
    unusable = ~(best_positive.isfinite() & (hardest_negative < torch.inf))
    if unusable.any():
        raise ValueError(
            f"image_embeddings and caption_embeddings must have finite similarities; {direction} similarities overflow "
            f"{similarities.dtype} for {_count_and_first(unusable)}"
        )
    return ranks, best_positive, hardest_negative


def _check_embeddings(image_embeddings: Tensor, caption_embeddings: Tensor, vectors: bool) -> None:
    for name, embeddings in (("image_embeddings", image_embeddings), ("caption_embeddings", caption_embeddings)):
        right_shape = embeddings.ndim == 2 if vectors else embeddings.ndim > 1
        if not right_shape or not embeddings.is_floating_point() or len(embeddings) == 0:
            shape = "(rows, D)" if vectors else "(rows, ...)"
            raise ValueError(
                f"{name} must be a floating-point tensor of shape {shape} with at least one row, "
                f"got {embeddings.dtype} of shape {tuple(embeddings.shape)}"
            )
    if vectors and image_embeddings.shape[1] != caption_embeddings.shape[1]:
        raise ValueError(
            "image_embeddings and caption_embeddings must have the same width D, "
            f"got shapes {tuple(image_embeddings.shape)} and {tuple(caption_embeddings.shape)}"
        )
    for name, embeddings in (("image_embeddings", image_embeddings), ("caption_embeddings", caption_embeddings)):
        not_finite = ~embeddings.flatten(1).isfinite().all(dim=1)
        if not_finite.any():
            raise ValueError(f"{name} must be finite; NaN or infinity in {_count_and_first(not_finite)}")


def _check_image_of_caption(image_of_caption: Tensor, images: int, captions: int) -> None:
    is_integer = not (image_of_caption.is_floating_point() or image_of_caption.is_complex())
    if image_of_caption.shape != (captions,) or not is_integer or image_of_caption.dtype == torch.bool:
        raise ValueError(
            f"image_of_caption must be an integer tensor of shape ({captions},), one index per caption, "
            f"got {image_of_caption.dtype} of shape {tuple(image_of_caption.shape)}"
        )
    out_of_range = (image_of_caption < 0) | (image_of_caption >= images)
    if out_of_range.any():
        raise ValueError(
            f"image_of_caption must lie in [0, {images}), the rows of image_embeddings; it does not in "
            f"{_count_and_first(out_of_range)}: {image_of_caption[out_of_range][0].item()}"
        )
    without_caption = torch.bincount(image_of_caption, minlength=images) == 0
    if without_caption.any():
        raise ValueError(
            f"image_of_caption must give every image at least one caption; none for {_count_and_first(without_caption)}"
        )


def _count_and_first(rows: Tensor) -> str:
    """Say which rows of a (N,) mask are set: "2 of 10 rows, first row 3"."""
    return f"{int(rows.sum())} of {len(rows)} rows, first row {int(rows.nonzero()[0])}"
