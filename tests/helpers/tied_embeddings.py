"""Features whose similarities tie, with products that are exact in float32: every program sees the same ties."""

import random

import torch
from torch.nn.functional import normalize

from vl_plugins.retrieval.features import Features

KINDS = ("plain", "signs", "duplicates", "equal images")
WIDTHS = {"signs": 16, "duplicates": 1024, "equal images": 16}


def tied_features(seed, *, kind=None, images=(12, 45), captions=(1, 5), width=None, shuffled=False, ids=True):
    """Return random features.

    Args:
        seed: of everything that is random.
        kind: one of ``KINDS``, drawn by default. "plain" has no ties. The vectors of the others have equal components
            up to signs: short ones, which tie everywhere, or long ones, of which a quarter are copies.
        images, captions: least and largest number of images, and of captions of each. Half of the cases have the
            largest number of captions everywhere.
        width: of embeddings, a power of four; that of the kind by default.
        shuffled: captions are not grouped by image.
        ids: with ids, whose order as text is neither that of positions nor of numbers.
    """
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    kind = kind or draw.choice(KINDS)
    number = draw.randint(*images)
    counts = [captions[1]] * number
    if draw.random() < 0.5:
        counts = [draw.randint(*captions) for _ in range(number)]
    owners = torch.arange(number).repeat_interleave(torch.tensor(counts))
    if shuffled:
        owners = owners[torch.randperm(len(owners), generator=generator)]
    if kind == "plain":
        image_embeddings, caption_embeddings = _plain(owners, number, generator)
    else:
        width = width or WIDTHS[kind]
        image_embeddings, caption_embeddings = _signs(owners, number, width, generator)
    if kind == "duplicates":
        _copy_quarter(image_embeddings, generator)
        _copy_quarter(caption_embeddings, generator)
    if kind == "equal images":
        image_embeddings[:] = image_embeddings[0].clone()
    image_ids = caption_ids = None
    if ids:
        image_ids = draw.sample(range(10 * number), number)
        caption_ids = [f"caption {name}" for name in draw.sample(range(10 * len(owners)), len(owners))]
    return Features(
        images=image_embeddings,
        captions=caption_embeddings,
        image_of_caption=owners,
        image_ids=image_ids,
        caption_ids=caption_ids,
    )


def _plain(owners, images, generator):
    topics = torch.randn(images, 8, generator=generator)
    image_noise = torch.randn(images, 8, generator=generator)
    caption_noise = torch.randn(len(owners), 8, generator=generator)
    return normalize(topics + 0.7 * image_noise, dim=1), normalize(topics[owners] + 0.9 * caption_noise, dim=1)


def _signs(owners, images, width, generator):
    """Return unit vectors of equal components up to signs; captions have some signs of their images turned."""
    image_signs = torch.randint(2, (images, width), generator=generator) * 2 - 1
    is_turned = torch.rand(len(owners), width, generator=generator) < 0.25
    caption_signs = torch.where(is_turned, -image_signs[owners], image_signs[owners])
    return image_signs / width**0.5, caption_signs / width**0.5


def _copy_quarter(embeddings, generator):
    copies = len(embeddings) // 4
    targets = torch.randint(len(embeddings), (copies,), generator=generator)
    sources = torch.randint(len(embeddings), (copies,), generator=generator)
    embeddings[targets] = embeddings[sources].clone()
