"""The nearest images and captions of queries of one's own."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.retrieval.features import Features

__all__ = ["Answers", "answer_queries"]

# Candidates that are compared at a time: sets need a block of all pairs of elements.
CANDIDATES = 4096


class Answers(NamedTuple):
    """The answers to a query, the nearest first.

    Attributes:
        query: a text, or the path of an image.
        images: indices and similarities of the nearest images.
        captions: those of the nearest captions.
    """

    query: str
    images: list[tuple[int, float]]
    captions: list[tuple[int, float]]


@torch.no_grad()
def answer_queries(
    queries: Sequence[str],
    embeddings: Tensor,
    features: Features,
    *,
    number: int = 5,
    device: str | torch.device = "cpu",
) -> list[Answers]:
    """Return the nearest images and captions of each query.

    Args:
        queries: Q texts, or paths of images.
        embeddings: (Q, D) unit vectors, or sets (Q, K, D), of the model that made the features.
        features: of the images and captions.
        number: of images, and of captions, for each query.
        device: where they are compared.
    """
    similarity = features.similarity(device)
    nearest = []
    for candidates in (features.images, features.captions):
        blocks = (block.to(device) for block in candidates.split(CANDIDATES))
        own = embeddings.to(device)
        parts = [own @ block.T if similarity is None else similarity(own, block) for block in blocks]
        values, indices = torch.cat(parts, dim=1).topk(min(number, len(candidates)), dim=1)
        nearest.append([[*zip(*pair, strict=True)] for pair in zip(indices.tolist(), values.tolist(), strict=True)])
    return [Answers(*answers) for answers in zip(queries, *nearest, strict=True)]
