r"""How often the intervals of `vl_plugins.retrieval.compare` hold the true difference: simulations.

    python -m benchmarks.coverage docs/studies/coverage.csv [--draws 2000] [--worlds 'two methods' 'no hubs']
    python -m benchmarks.coverage docs/studies/coverage.csv --table

Each draw is a new test set, and from three seeds on, new seeds. The share of draws whose 95 % interval holds the true
difference should be 95 %. Two kinds of worlds:

**Latent scores, the gallery is fixed.** A query :math:`q` of image :math:`i` has rank at most K in a run if its score
is below the threshold of K, which makes the recalls those of a published model. The score of a run is normal with
variance 1,

.. math:: z = \sqrt{0.3}\, x_i + \sqrt{0.45}\, y_q + \sqrt{0.13}\, m_q + \sqrt{0.12}\, r_q - \delta,

where :math:`x` and :math:`y` are common to all models, :math:`m` to the seeds of a method, and :math:`r` belongs to the
run. So two methods correlate by 0.75, two seeds of a method by 0.88, and captions of one image by 0.3.
:math:`\delta` is the quality of the run: that of the method plus noise between seeds. What blocks a query is drawn from
all candidates.

**Embeddings, the gallery is new, too.** Images are points around 200 centers in 24 dimensions, each with five captions.
A model sees all with errors of its own and adds a popularity to each candidate, a fifth of whose variance is its own.
The larger the popularity, the stronger the hubs. Ranks are those of the whole matrix of similarities.

One row for each world, number of images and number of seeds is appended to the file; rows that it has are not computed
again. `--table` prints the tables of the guide "Is it better?" instead.
"""

import argparse
import csv
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import sqrt
from pathlib import Path
from statistics import fmean

import torch
from scipy.special import ndtr, ndtri
from torch import Tensor
from torch.nn.functional import normalize

from vl_plugins.retrieval import similarity_ranks
from vl_plugins.retrieval.comparison import Difference, ImageValues, compare, image_values, top_for_comparison
from vl_plugins.retrieval.metrics import RECALL_AT, hubness
from vl_plugins.retrieval.ranks import DirectionRanks, Ranks

CAPTIONS = 5
TOP = max(RECALL_AT) + CAPTIONS - 1
RECALLS = [f"{direction}_R@{k}" for direction in Ranks._fields for k in RECALL_AT]
METRICS = ["rsum", *RECALLS]


@dataclass(frozen=True)
class ScoreWorld:
    """Two methods whose queries have latent scores, with a fixed gallery.

    Args:
        recalls: R@1, 5 and 10 of images, then of captions, in percent.
        gain: how much better the second method is in RSUM, about.
        seed_noise: standard deviation of RSUM between seeds.
        same_method: both methods are one.
    """

    recalls: tuple[float, ...]
    gain: float
    seed_noise: float
    same_method: bool = False

    def rsum_slope(self) -> float:
        """Return by how much RSUM grows with the quality of a run."""
        thresholds = score_thresholds(self.recalls)
        return 100 * float(torch.exp(-thresholds.square() / 2).sum()) / sqrt(2 * torch.pi)


@dataclass(frozen=True)
class GalleryWorld:
    """Two models that rank a new gallery in each draw.

    Args:
        popularity: standard deviation of what is added to all similarities of a candidate.
        error: size of the models' errors, of the first and of the second.
        has_hub_term: with what images block; otherwise as if the gallery were always the same.
    """

    popularity: float
    error: tuple[float, float]
    has_hub_term: bool = True


COCO = (60.0, 84.0, 91.0, 45.0, 72.0, 82.0)
FLICKR30K = (90.0, 98.5, 99.3, 77.0, 94.0, 97.0)
WORLDS: dict[str, ScoreWorld | GalleryWorld] = {
    "two methods": ScoreWorld(COCO, gain=3.0, seed_noise=1.5),
    "one method twice": ScoreWorld(COCO, gain=0.0, seed_noise=0.0, same_method=True),
    "unstable training": ScoreWorld(COCO, gain=3.0, seed_noise=5.5),
    "near the ceiling": ScoreWorld(FLICKR30K, gain=4.0, seed_noise=0.6),
    "no hubs": GalleryWorld(popularity=0.0, error=(1.5, 1.5)),
    "mild hubs": GalleryWorld(popularity=0.08, error=(1.5, 1.5)),
    "mild hubs, real difference": GalleryWorld(popularity=0.08, error=(1.5, 1.4)),
    "strong hubs": GalleryWorld(popularity=0.2, error=(1.5, 1.5)),
    "strong hubs, without the hub term": GalleryWorld(popularity=0.2, error=(1.5, 1.5), has_hub_term=False),
}


@dataclass(frozen=True)
class Coverage:
    """What was simulated, and in how many percent of the draws the interval held the true difference.

    Attributes:
        half_width: mean of RSUM's interval.
        width_ratio: mean standard error of RSUM, divided by the standard deviation of the difference over the draws.
        hubness: mean skewness of how often an image is among the first ten of a caption; 0 for latent scores.
        rsum, recalls: percent of the draws; recalls in the order of ``RECALLS``.
    """

    world: str
    images: int
    seeds: int
    draws: int
    half_width: float
    width_ratio: float
    hubness: float
    rsum: float
    recalls: str


def score_draws(
    world: ScoreWorld, images: int, seeds: int, draws: int, generator: torch.Generator
) -> Iterator[tuple[dict[str, Difference], dict[str, float]]]:
    """Yield the differences of a draw and the true ones.

    With fewer than three seeds the true difference is that of the two checkpoints; otherwise that of the methods.
    """
    slope = world.rsum_slope()
    noise = world.seed_noise / slope
    quality = 0.0, world.gain / slope
    for _ in range(draws):
        shifts = torch.randn(2, seeds, generator=generator, dtype=torch.float64) * noise
        runs = _score_runs(world, images, seeds, torch.tensor(quality)[:, None] + shifts, generator)
        differences = compare({"first": runs[0], "second": runs[1]}, baseline="first")["second"]
        if seeds < 3:
            first, second = (_true_recalls(world, quality[m] + shifts[m], 0.0) for m in range(2))
        else:
            first, second = (_true_recalls(world, torch.tensor([quality[m]]), noise) for m in range(2))
        truth = dict(zip(RECALLS, (second - first).tolist(), strict=True))
        truth["rsum"] = sum(truth.values())
        yield differences, truth


def score_thresholds(recalls: Sequence[float]) -> Tensor:
    """Return the scores below which these percentages of a standard normal distribution are."""
    return torch.from_numpy(ndtri(torch.tensor(recalls, dtype=torch.float64).numpy() / 100))


def _true_recalls(world: ScoreWorld, quality: Tensor, noise: float) -> Tensor:
    """Return the six recalls of all queries that there could be, the mean over runs of these qualities."""
    thresholds = score_thresholds(world.recalls)
    scores = (thresholds[:, None] + quality) / sqrt(1 + noise**2)
    return 100 * torch.from_numpy(ndtr(scores.double().numpy())).mean(dim=1)


def _score_runs(
    world: ScoreWorld, images: int, seeds: int, quality: Tensor, generator: torch.Generator
) -> list[list[ImageValues]]:
    """Return the image values of each seed of both methods, given the quality (2, seeds) of each run."""
    image_of_caption = torch.arange(images).repeat_interleave(CAPTIONS)
    captions = len(image_of_caption)
    image_scores = torch.randn(images, generator=generator)
    scores = {}
    for direction, image_of_query in (("image_to_text", torch.arange(images)), ("text_to_image", image_of_caption)):
        queries = len(image_of_query)
        common = sqrt(0.3) * image_scores[image_of_query] + sqrt(0.45) * torch.randn(queries, generator=generator)
        of_method = torch.randn(2, 1, queries, generator=generator)
        if world.same_method:
            of_method = of_method[:1].expand(2, 1, queries)
        of_run = torch.randn(2, seeds, queries, generator=generator)
        scores[direction] = common + sqrt(0.13) * of_method + sqrt(0.12) * of_run - quality[..., None]
    runs: list[list[ImageValues]] = []
    for method in range(2):
        values = []
        for seed in range(seeds):
            i2t = _ranks_of_scores(scores["image_to_text"][method, seed], world.recalls[:3], captions, generator)
            t2i = _ranks_of_scores(scores["text_to_image"][method, seed], world.recalls[3:], images, generator)
            values.append(image_values(Ranks(i2t, t2i), image_of_caption, images))
        runs.append(values)
    return runs


def _ranks_of_scores(
    scores: Tensor, recalls: Sequence[float], candidates: int, generator: torch.Generator
) -> DirectionRanks:
    """Return ranks whose recalls are expected to be those given, with wrong candidates by chance before the answer."""
    thresholds = score_thresholds(recalls).float()
    level = (scores.float()[:, None] > thresholds).sum(dim=1)
    lowest, highest = torch.tensor([1, 2, 6, 11]), torch.tensor([1, 5, 10, 30])
    span = (highest - lowest + 1)[level]
    rank = lowest[level] + (torch.rand(len(scores), generator=generator) * span).long()
    queries = torch.arange(len(scores))
    is_first = (rank == 1).double()
    return DirectionRanks(
        queries=queries,
        rank=rank,
        relevant=torch.ones_like(queries),
        average_precision=is_first,
        r_precision=is_first,
        positive_query=queries,
        positives=queries % candidates,
        positive_similarity=torch.zeros(len(queries)),
        negatives=torch.randint(candidates, (len(queries), TOP), generator=generator),
        negative_similarity=torch.zeros(len(queries), TOP),
    )


def gallery_draws(
    world: GalleryWorld, images: int, draws: int, generator: torch.Generator
) -> tuple[list[dict[str, Difference]], float]:
    """Return the differences of each draw, and the mean hubness of the models."""
    dimensions, centers = 24, 200
    center = torch.randn(centers, dimensions, generator=generator)
    image_of_caption = torch.arange(images).repeat_interleave(CAPTIONS)
    differences, hubnesses = [], []
    for _ in range(draws):
        content = center[torch.randint(centers, (images,), generator=generator)]
        content = content + 0.6 * torch.randn(images, dimensions, generator=generator)
        described = content[image_of_caption]
        described = described + 0.5 * torch.randn(described.shape, generator=generator)
        sides = content, described
        common = [torch.randn(len(side), generator=generator) for side in sides]
        common_errors = [torch.randn(side.shape, generator=generator) for side in sides]
        values = []
        for error in world.error:
            embeddings, popularity = [], []
            for side, popular, common_error in zip(sides, common, common_errors, strict=True):
                own_error = torch.randn(side.shape, generator=generator)
                seen = side + error * (sqrt(0.75) * common_error + 0.5 * own_error) * 0.7
                embeddings.append(normalize(seen, dim=1))
                own = torch.randn(len(side), generator=generator)
                popularity.append(world.popularity * (sqrt(0.8) * popular + sqrt(0.2) * own))
            similarities = embeddings[0] @ embeddings[1].T + popularity[0][:, None] + popularity[1]
            ranks = similarity_ranks(similarities, image_of_caption, top=top_for_comparison(image_of_caption))
            of_images = image_values(ranks, image_of_caption, images)
            if not world.has_hub_term:
                of_images = of_images._replace(blocked=(None,) * len(of_images.metrics))
            values.append(of_images)
            hubnesses.append(hubness(ranks.text_to_image, images))
        differences.append(compare({"first": values[:1], "second": values[1:]}, baseline="first")["second"])
    return differences, fmean(hubnesses)


def simulate(name: str, images: int, seeds: int, draws: int) -> Coverage:
    """Return the coverage in a world; equal arguments give equal results."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {images} {seeds}".encode()))
    world = WORLDS[name]
    if isinstance(world, ScoreWorld):
        pairs = list(score_draws(world, images, seeds, draws, generator))
        differences = [difference for difference, _ in pairs]
        truths = [truth for _, truth in pairs]
        mean_hubness = 0.0
    else:
        differences, mean_hubness = gallery_draws(world, images, draws, generator)
        # Nobody knows the recalls of all galleries; the mean over the draws comes near.
        means = {metric: fmean(difference[metric].mean for difference in differences) for metric in METRICS}
        truths = [means] * draws
    percent = {}
    for metric in METRICS:
        holds = [d[metric].low <= truth[metric] <= d[metric].high for d, truth in zip(differences, truths, strict=True)]
        percent[metric] = 100 * fmean(holds)
    errors = torch.tensor([d["rsum"].mean - truth["rsum"] for d, truth in zip(differences, truths, strict=True)])
    return Coverage(
        world=name,
        images=images,
        seeds=seeds,
        draws=draws,
        half_width=round(fmean(difference["rsum"].half_width for difference in differences), 2),
        width_ratio=round(fmean(difference["rsum"].error for difference in differences) / float(errors.std()), 3),
        hubness=round(mean_hubness, 1),
        rsum=round(percent["rsum"], 2),
        recalls=" ".join(f"{percent[recall]:.1f}" for recall in RECALLS),
    )


def cells(draws: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield world, images, seeds and draws of all rows of the table, the quickest ones first."""
    for images in (150, 500, 1000, 5000):
        for name, world in WORLDS.items():
            if isinstance(world, ScoreWorld):
                for seeds in (1, 3, 5):
                    yield name, images, seeds, draws
            elif images == 150:
                yield name, images, 1, draws
            elif images == 500:
                yield name, images, 1, max(1, draws // 5)


def read_rows(file: Path) -> list[Coverage]:
    """Return the rows of a table."""
    rows = []
    with file.open(newline="") as stream:
        for row in csv.DictReader(stream):
            values = {}
            for field in fields(Coverage):
                convert = {"str": str, "int": int, "float": float}[str(getattr(field.type, "__name__", field.type))]
                values[field.name] = convert(row[field.name])
            rows.append(Coverage(**values))
    return rows


def width_table(rows: Sequence[Coverage]) -> str:
    """Return the half widths of RSUM's interval for two methods, by images and seeds, in Markdown."""
    widths = {(row.images, row.seeds): row.half_width for row in rows if row.world == "two methods"}
    images = sorted({number for number, _ in widths})
    seeds = sorted({number for _, number in widths})
    lines = ["| images | " + " | ".join(_seeds(number) for number in seeds) + " |"]
    lines.append("|---:|" + "---:|" * len(seeds))
    for number in images:
        cells = [f"{widths[number, of_each]:.1f}" for of_each in seeds]
        lines.append(f"| {number:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _seeds(number: int) -> str:
    return "one seed each" if number == 1 else f"{number} seeds each"


def coverage_table(rows: Sequence[Coverage]) -> str:
    """Return the percent of the draws whose interval held the true difference, in Markdown."""
    lines = ["| world | images | seeds | draws | hubness | RSUM | recalls, lowest to highest |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for name in WORLDS:
        for row in sorted(rows, key=lambda row: (row.images, row.seeds)):
            if row.world == name:
                recalls = sorted(map(float, row.recalls.split()))
                hubs = "" if isinstance(WORLDS[name], ScoreWorld) else f"{row.hubness:.1f}"
                cells = [name, f"{row.images:,}", str(row.seeds), f"{row.draws:,}", hubs, f"{row.rsum:.1f}"]
                lines.append(f"| {' | '.join(cells)} | {recalls[0]:.1f} to {recalls[-1]:.1f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="table, .csv; rows that it has are not computed again")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--worlds", nargs="+", metavar="NAME", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--images", nargs="+", type=int, default=[150, 500, 1000, 5000])
    parser.add_argument("--table", action="store_true", help="print the tables of the guide, and compute nothing")
    arguments = parser.parse_args(argv)

    if arguments.table:
        rows = read_rows(arguments.file)
        print(f"{width_table(rows)}\n\n{coverage_table(rows)}")
        return
    torch.set_num_threads(1)
    columns = [field.name for field in fields(Coverage)]
    if not arguments.file.exists():
        arguments.file.write_text(",".join(columns) + "\n")
    done = {(row.world, row.images, row.seeds) for row in read_rows(arguments.file)}
    for name, images, seeds, draws in cells(arguments.draws):
        if name not in arguments.worlds or images not in arguments.images or (name, images, seeds) in done:
            continue
        coverage = simulate(name, images, seeds, draws)
        with arguments.file.open("a", newline="") as stream:
            csv.DictWriter(stream, columns, lineterminator="\n").writerow(vars(coverage))
        print(coverage, flush=True)


if __name__ == "__main__":
    main()
