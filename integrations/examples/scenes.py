"""Made-up data of the examples: scenes of four things each, with captions that name three of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from vl_plugins.retrieval import retrieval_metrics, similarity_ranks

__all__ = ["CAPTIONS", "PATCH_SIZE", "THINGS", "Scenes", "evaluate", "make_scenes"]

THINGS, CAPTIONS, PATCH_SIZE, NOISE = 30, 5, 8, 0.3


class Scenes(NamedTuple):
    """Regions with captions.

    Attributes:
        things: (N, 4), in [0, 30): what is in each region.
        regions: (N, 4, 192): 3 x 8 x 8 pixels each, in which a thing looks alike in all scenes, plus noise.
        words: (N, 5, 3), in [1, 30]: the captions, three things of the scene in any order.
    """

    things: Tensor
    regions: Tensor
    words: Tensor


def make_scenes(count: int, seed: int = 0) -> Scenes:
    """Return scenes; with other seeds there are other scenes of the same things."""
    appearance = torch.randn(THINGS, 3 * PATCH_SIZE**2, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    thing_ids = torch.rand(count, THINGS, generator=generator).argsort(dim=1)[:, :4]
    regions = appearance[thing_ids]
    regions = regions + NOISE * torch.randn(regions.shape, generator=generator)
    named_places = torch.rand(count, CAPTIONS, 4, generator=generator).argsort(dim=2)[:, :, :3]
    words = thing_ids[:, None].expand(-1, CAPTIONS, -1).gather(2, named_places) + 1
    return Scenes(thing_ids, regions, words)


def evaluate(similarities: Tensor) -> dict[str, float]:
    """Return the retrieval metrics of similarities (N, 5 * N) of images and captions, in the order of the scenes."""
    image_of_caption = torch.arange(len(similarities)).repeat_interleave(CAPTIONS)
    return retrieval_metrics(similarity_ranks(similarities, image_of_caption))
