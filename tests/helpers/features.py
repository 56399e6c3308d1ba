"""Features of four images and eight captions, made at random."""

import torch

from vl_plugins.retrieval.features import Features

__all__ = ["features", "unit"]


def unit(*shape, seed=0, dtype=torch.float32):
    vectors = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(vectors, dim=-1).to(dtype)


def features(**changes):
    """Four images with 2, 1, 3 and 2 captions."""
    fields = {
        "images": unit(4, 6),
        "captions": unit(8, 6, seed=1),
        "image_of_caption": torch.tensor([0, 0, 1, 2, 2, 2, 3, 3]),
        "image_ids": [11, 5, 9, 7],
        "caption_ids": [101, 102, 103, 104, 105, 106, 107, 108],
        "description": {"model": "vl-tiny", "shards": "toy-{00..03}.tar"},
    }
    return Features(**fields | changes)
