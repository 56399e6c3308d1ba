"""Time and memory of exact retrieval ranks, both directions, from random unit vectors.

    python -m benchmarks.ranks [--images 5000] [--captions-per-image 5] [--negatives 0]
    python -m benchmarks.ranks --images 100000 --no-sort

The peer computes all similarities and sorts each row and each column, as open_clip's validation does, and takes the
best rank of several captions. Both have to find the same ranks. One thread; time is processor time. MB is the most that
was allocated beyond the embeddings. ``--negatives`` also finds the hardest wrong candidates of each query, which mAP@R
needs. ``--no-sort`` runs ours alone, once, for sizes whose similarities do not fit in memory.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.measurement import extra_bytes, print_table, time_rounds
from tests.reference.retrieval import full_argsort
from vl_plugins.retrieval import retrieval_ranks

MOST_DIFFERENT = 0.01


def embeddings(images: int, captions_per_image: int, dimension: int) -> tuple[Tensor, Tensor]:
    """Return unit vectors; the captions of an image are near it and next to each other."""
    generator = torch.Generator().manual_seed(0)
    image_embeddings = normalize(torch.randn(images, dimension, generator=generator), dim=1)
    captions = torch.randn(images * captions_per_image, dimension, generator=generator)
    captions.view(images, captions_per_image, dimension).add_(image_embeddings[:, None], alpha=3)
    for rows in captions.split(1000):  # in place, because there may be gigabytes
        rows.copy_(normalize(rows, dim=1))
    return image_embeddings, captions


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--captions-per-image", type=int, default=5)
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--negatives", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-sort", action="store_true")
    arguments = parser.parse_args(argv)

    torch.set_num_threads(1)
    per_image = arguments.captions_per_image
    images, captions = embeddings(arguments.images, per_image, arguments.dimension)
    image_of_caption = torch.arange(len(images)).repeat_interleave(per_image)
    ours = partial(retrieval_ranks, images, captions, image_of_caption, negatives=arguments.negatives)
    title = f"{len(images):,} x {len(captions):,}, negatives: {arguments.negatives}"
    if arguments.no_sort:
        started = time.process_time()
        memory = extra_bytes(ours)
        print(f"{title}: {time.process_time() - started:,.1f} s, {memory / 1e6:,.1f} MB beyond the embeddings")
        return
    functions = {"ranks": ours, "full sort": partial(full_argsort, images, captions, per_image)}
    for direction, expected in zip(*(function() for function in functions.values()), strict=True):
        # Products of other shapes round differently, which may swap neighbors.
        different = (direction.rank != expected).double().mean().item()
        if different > MOST_DIFFERENT:
            raise ValueError(f"{different:.2%} of the ranks differ")
    seconds = time_rounds(functions, arguments.rounds)
    memory = {name: extra_bytes(function) for name, function in functions.items()}
    print_table(title, seconds, "full sort", memory=memory)


if __name__ == "__main__":
    main()
