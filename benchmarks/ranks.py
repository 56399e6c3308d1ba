"""Time and memory of exact retrieval ranks, both directions, from random unit vectors.

    python -m benchmarks.ranks [--images 5000] [--captions-per-image 5] [--sort]

The peer computes the bare products of both directions, in chunks, with the ten nearest candidates of each query.
``--sort`` adds what open_clip's validation does: all similarities at once, and a sort of each row and column.
One thread; time is processor time. MB is the peak of allocated memory beyond the embeddings.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.measurement import extra_bytes, print_table, time_rounds
from tests.reference.retrieval import full_argsort
from vl_plugins.retrieval import retrieval_ranks


def embeddings(images: int, captions_per_image: int, dimension: int) -> tuple[Tensor, Tensor]:
    """Return unit vectors; the captions of an image are near it and next to each other."""
    generator = torch.Generator().manual_seed(0)
    image_embeddings = normalize(torch.randn(images, dimension, generator=generator), dim=1)
    captions = torch.randn(images * captions_per_image, dimension, generator=generator)
    captions += 3 * image_embeddings.repeat_interleave(captions_per_image, dim=0)
    return image_embeddings, normalize(captions, dim=1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--captions-per-image", type=int, default=5)
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sort", action="store_true")
    arguments = parser.parse_args(argv)

    torch.set_num_threads(1)
    per_image = arguments.captions_per_image
    images, captions = embeddings(arguments.images, per_image, arguments.dimension)
    image_of_caption = torch.arange(arguments.images).repeat_interleave(per_image)

    def products() -> None:
        for queries, candidates in ((images, captions), (captions, images)):
            for part in queries.split(200):
                (part @ candidates.T).topk(10)

    functions = {"ranks": lambda: retrieval_ranks(images, captions, image_of_caption), "products": products}
    if arguments.sort:
        functions["full sort"] = lambda: full_argsort(images, captions, per_image)
    seconds = time_rounds(functions, arguments.rounds)
    memory = {name: extra_bytes(function) for name, function in functions.items()}
    print_table(f"{len(images):,} x {len(captions):,}", seconds, "products", memory)


if __name__ == "__main__":
    main()
