"""Time and memory of exact retrieval ranks, both directions, from random unit vectors.

    python -m benchmarks.ranks [--images 5000] [--captions-per-image 5] [--sort]
    python -m benchmarks.ranks --images 50000 --queries 1000

The peer computes the bare products of both directions, in chunks, with the ten nearest candidates of each query.
``--sort`` adds what open_clip's validation does: all similarities at once, and a sort of each row and column.
``--queries`` ranks for the first images and their captions only, to estimate the time of large sets. One thread; time
is processor time. MB is the peak of allocated memory beyond the embeddings.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.measurement import extra_bytes, print_table, time_rounds
from tests.reference.retrieval import full_argsort
from vl_plugins.retrieval import Ranks, retrieval_ranks

CHUNK = 2**22  # similarities


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
    parser.add_argument("--queries", type=int, help="images that are queries, with their captions (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sort", action="store_true")
    arguments = parser.parse_args(argv)

    torch.set_num_threads(1)
    per_image, queries = arguments.captions_per_image, min(arguments.queries or arguments.images, arguments.images)
    images, captions = embeddings(arguments.images, per_image, arguments.dimension)
    answers = (
        {image: range(per_image * image, per_image * (image + 1)) for image in range(queries)},
        {caption: [caption // per_image] for caption in range(per_image * queries)},
    )

    def ranks() -> Ranks:
        return retrieval_ranks(images, captions, answers)

    def products() -> None:
        for rows, candidates in ((images[:queries], captions), (captions[: per_image * queries], images)):
            for part in rows.split(max(1, CHUNK // len(candidates))):
                (part @ candidates.T).topk(10)

    functions = {"ranks": ranks, "products": products}
    if arguments.sort:
        functions["full sort"] = lambda: full_argsort(images, captions, per_image)
    seconds = time_rounds(functions, arguments.rounds)
    memory = {name: extra_bytes(function) for name, function in functions.items()}
    print_table(f"{len(images):,} x {len(captions):,}, {queries:,} queries", seconds, "products", memory)


if __name__ == "__main__":
    main()
