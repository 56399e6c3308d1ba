"""Time and memory of exact retrieval ranks against sorting everything.

    python tests/benchmarks/bench_ranks.py [--images 5000] [--captions-per-image 5] [--negatives 0] [--rounds 3]
    python tests/benchmarks/bench_ranks.py --large [--tiles 200] [--queries 2000]

Ranks of both directions, from random unit vectors in float32, with one thread. The other side is ``full_argsort`` in
``tests/reference/retrieval.py``: all similarities and a full sort of each row and of each column, as open_clip 3.3.0
validates, with the rank of the best of several captions. Both find the same ranks, or the program stops.

Seconds are of processor time, which other programs on the machine disturb less than wall time: their median, and ours
divided by the other's in the same round, median, least and most. Memory is the most that was allocated beyond what was
there before; it is the same in every round. With ``--negatives`` ours also finds so many of the hardest wrong
candidates of each query, as mAP@R needs them.

``--large`` compares nothing: it ranks 100,000 images and 500,000 captions, whose similarities alone would take 200 GB.
First, both directions on ``--tiles`` of the tiles, which is timed and scaled up to all of them. Then some queries of
each direction among all candidates, to the end.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import normalize

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.memory import extra_bytes
from tests.reference.retrieval import full_argsort
from vl_plugins.retrieval import EmbeddingSimilarities, GroundTruth, Positives, retrieval_ranks, similarity_ranks
from vl_plugins.utils.tables import align_columns


class Enough(Exception):
    """As many tiles as were asked for."""


class SomeTiles(EmbeddingSimilarities):
    """Stops after so many tiles."""

    def __init__(self, images: torch.Tensor, captions: torch.Tensor, tiles: int):
        super().__init__(images, captions)
        self.left = tiles

    def tile(self, image: int, caption: int) -> torch.Tensor:
        if self.left == 0:
            raise Enough
        self.left -= 1
        return super().tile(image, caption)


def embeddings(images: int, captions_per_image: int, dimension: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unit vectors; the captions of an image are near to it and next to each other."""
    generator = torch.Generator().manual_seed(0)
    of_images = normalize(torch.randn(images, dimension, generator=generator), dim=1)
    of_captions = torch.randn(images * captions_per_image, dimension, generator=generator)
    of_captions.view(images, captions_per_image, dimension).add_(of_images[:, None], alpha=3)
    for rows in of_captions.split(1000):
        rows.copy_(normalize(rows, dim=1))
    return of_images, of_captions


def seconds(function) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def against_a_sort(arguments: argparse.Namespace) -> None:
    per_image = arguments.captions_per_image
    images, captions = embeddings(arguments.images, per_image, arguments.dimension)
    image_of_caption = torch.arange(arguments.images).repeat_interleave(per_image)

    def ours():
        return retrieval_ranks(images, captions, image_of_caption, negatives=arguments.negatives)

    def other():
        return full_argsort(images, captions, per_image)

    ranks, sorted_ranks = ours(), other()
    for direction, expected in zip(ranks, sorted_ranks, strict=True):
        # Products of other shapes round differently, which may swap neighbours.
        different = (direction.rank != expected).float().mean().item()
        assert different < 0.01, f"{different:.2%} of the ranks differ"
    del ranks, sorted_ranks

    taken = {ours: [], other: []}
    for number in range(arguments.rounds):
        for function in (ours, other)[:: 1 if number % 2 else -1]:
            taken[function].append(seconds(function))
    ratios = [mine / its for mine, its in zip(taken[ours], taken[other], strict=True)]
    megabytes = {function: extra_bytes(function) / 1e6 for function in (ours, other)}
    rows = [
        ("", "seconds", "its", "ratio", "least", "most", "MB", "its", "ratio"),
        (
            f"{arguments.images} x {len(captions)}, {arguments.negatives} negatives",
            *(f"{statistics.median(taken[function]):.2f}" for function in (ours, other)),
            *(f"{ratio:.3f}" for ratio in (statistics.median(ratios), min(ratios), max(ratios))),
            *(f"{megabytes[function]:.1f}" for function in (ours, other)),
            f"{megabytes[ours] / megabytes[other]:.4f}",
        ),
    ]
    print("\n".join("  ".join(row) for row in align_columns(rows)))


def large(arguments: argparse.Namespace) -> None:
    images, captions = embeddings(100_000, 5, arguments.dimension)
    image_of_caption = torch.arange(100_000).repeat_interleave(5)
    print(f"embeddings: {(images.nbytes + captions.nbytes) / 1e9:.2f} GB; all similarities would take 200 GB")

    similarities = SomeTiles(images, captions, tiles=0)
    height, width = similarities.tile_shape
    tiles = -(-len(images) // height) * -(-len(captions) // width)
    with_answers = len({(pair // 5 // height, pair // width) for pair in range(len(captions))})

    def some():
        similarities.left = arguments.tiles
        try:
            similarity_ranks(similarities, one_tile, negatives=arguments.negatives)
        except Enough:
            return
        raise AssertionError("there were fewer tiles")

    # Right answers only in one tile, so that it alone is asked for twice.
    number = min(height, width // 5)
    pairs = Positives(torch.arange(number), torch.arange(number) * 5)
    one_tile = GroundTruth(pairs, pairs)
    taken = seconds(some)
    whole = taken / arguments.tiles * (tiles + with_answers)
    print(
        f"{arguments.tiles} of {tiles} tiles, both directions, {arguments.negatives} negatives: {taken:.1f} s; "
        f"all of them, {with_answers} twice: {whole / 60:.0f} min"
    )
    truth = GroundTruth.from_image_of_caption(image_of_caption, len(images))

    def beginning():
        similarities.left = with_answers + arguments.tiles
        try:
            similarity_ranks(similarities, truth, negatives=arguments.negatives)
        except Enough:
            return
        raise AssertionError("there were fewer tiles")

    print(f"memory beyond the embeddings with all right answers: {extra_bytes(beginning) / 1e6:.0f} MB")

    # Every k-th image with its captions, and every k-th caption, among all candidates.
    of_images = torch.arange(0, len(images), len(images) // arguments.queries)
    of_captions = torch.arange(0, len(captions), len(captions) // arguments.queries)
    queries = GroundTruth(
        Positives(of_images.repeat_interleave(5), (of_images[:, None] * 5 + torch.arange(5)).flatten()),
        Positives(of_captions // 5, of_captions),
    )

    def ranked():
        nonlocal ranks
        ranks = retrieval_ranks(images, captions, queries, negatives=arguments.negatives)

    ranks = None
    started = time.process_time()
    extra = extra_bytes(ranked)
    taken = time.process_time() - started
    recalls = [100 * (direction.rank == 1).float().mean().item() for direction in ranks]
    print(
        f"{len(of_images)} images among all captions and {len(of_captions)} captions among all images: {taken:.0f} s, "
        f"{extra / 1e6:.0f} MB beyond the embeddings; R@1 {recalls[0]:.1f} and {recalls[1]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--captions-per-image", type=int, default=5)
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--negatives", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--tiles", type=int, default=200, help="to time, with --large")
    parser.add_argument("--queries", type=int, default=2000, help="of each direction, with --large")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    (large if arguments.large else against_a_sort)(arguments)


if __name__ == "__main__":
    main()
