"""Made-up data of the examples: pictures of four things each, with captions that name three of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.retrieval import retrieval_metrics, similarity_ranks

__all__ = [
    "CAPTIONS",
    "CAPTION_LENGTH",
    "END",
    "PATCH_SIZE",
    "PICTURE_SIZE",
    "VOCABULARY_SIZE",
    "Scenes",
    "evaluate",
    "make_scenes",
]

THINGS, NOISE = 30, 0.3
PATCH_SIZE, PICTURE_SIZE = 8, 16  # pixels: 2 x 2 patches
CAPTIONS, CAPTION_LENGTH = 5, 4
# Ids of words: 0 for padding, 1 to THINGS for the things, and the end of the text, which is the largest, as CLIP wants.
END = THINGS + 1
VOCABULARY_SIZE = END + 1


class Scenes(NamedTuple):
    """Pictures with captions.

    Attributes:
        things: (N, 4), in [0, 30): what is top left, top right, bottom left and bottom right.
        pictures: (N, 3, 16, 16), each thing 8 x 8 pixels that look alike in all pictures, plus noise.
        captions: (N, 5, 4) word ids: three things of the picture in any order, then ``END``.
    """

    things: Tensor
    pictures: Tensor
    captions: Tensor


def make_scenes(*counts: int, seed: int = 0) -> list[Scenes]:
    """Return splits with these numbers of scenes, in all of which a thing looks the same."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    appearance = torch.randn(THINGS, 3, PATCH_SIZE, PATCH_SIZE, generator=generator)
    things = torch.rand(total, THINGS, generator=generator).argsort(dim=1)[:, :4]
    patches = appearance[things].unflatten(1, (2, 2))
    pictures = patches.permute(0, 3, 1, 4, 2, 5).reshape(total, 3, PICTURE_SIZE, PICTURE_SIZE)
    pictures = pictures + NOISE * torch.randn(pictures.shape, generator=generator)
    named = torch.rand(total, CAPTIONS, 4, generator=generator).argsort(dim=2)[:, :, : CAPTION_LENGTH - 1]
    words = things[:, None].expand(-1, CAPTIONS, -1).gather(2, named) + 1
    captions = torch.cat([words, torch.full((total, CAPTIONS, 1), END)], dim=2)
    return [
        Scenes(*parts) for parts in zip(*(rows.split(counts) for rows in (things, pictures, captions)), strict=True)
    ]


def evaluate(similarities: Tensor) -> dict[str, float]:
    """Return the retrieval metrics of similarities (N, 5 * N) of pictures and captions, in the order of the scenes."""
    image_of_caption = torch.arange(len(similarities)).repeat_interleave(CAPTIONS)
    return retrieval_metrics(similarity_ranks(similarities, image_of_caption))
