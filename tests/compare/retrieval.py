"""Ranks and metrics of all protocols, on random features with many ties, with sets, and of ensembles.

Version 0.2 has other names and units, which are translated here. Not compared, because they differ on purpose: the
circular variance of sets with padding, which 0.2 took for elements; the order of equally similar candidates; what
``--json`` says beside the metrics; ``--csv``, which is gone.
"""

# ruff: noqa: B023, F811 - a case is computed where it is defined

import itertools
import json
import warnings

import numpy as np
import torch
from common import Cases, attribute, flatten, get, run, vl_plugins

COUNTS = {"plain": (300, 1500), "flickr30k-1k": (1000, 5000)}
SETS = {
    "smooth_chamfer": {"alpha": 8.0},
    "chamfer": {},
    "mil": {},
    "match_probability": {"scale": 5.0, "shift": -1.0, "learnable": False},
}
FIELDS = ("queries", "rank", "relevant", "positive_query", "positive_similarity", "negative_similarity")
FRACTIONS = ("R@1", "R@5", "R@10", "mean_average_precision_at_r", "r_precision")  # percent in version 0.2
MOST = 1500  # more than any right answers
IS_OLD = hasattr(get("retrieval"), "GroundTruth")


def random_features(seed: int, images: int, image_of_caption: np.ndarray, kind: str, sets: bool = False) -> dict:
    """Return features of a model that is often right.

    Args:
        kind: ``"ties"`` have products that are exact in float32, so that many are equal; ``"normal"`` have none that
            are; ``"unnormalized"`` have any norm.
    """
    g = np.random.default_rng(seed)
    shape = (3, 16) if sets else (16,)
    x = g.normal(size=(images, *shape))
    y = 1.2 * x[image_of_caption] + g.normal(size=(len(image_of_caption), *shape))
    y = y[:, :2] if sets else y
    if kind == "ties":
        x, y = (np.where(side > 0, 0.25, -0.25) for side in (x, y))
    elif kind == "normal":
        x, y = (side / np.linalg.norm(side, axis=-1, keepdims=True) for side in (x, y))
    if sets:  # elements of zeros are absent
        absent = g.random(x.shape[:2]) < 0.2
        absent[:, 0] = False
        x[absent] = 0
    return {"image_features": x.astype(np.float32), "caption_features": y.astype(np.float32)}


def coco_split() -> tuple[dict, np.ndarray]:
    """Return the ids of COCO's test split as files of features have them, and the image of each caption."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from eccv_caption import Metrics

        benchmark = Metrics()
    images = list(dict.fromkeys(benchmark.coco_gts["t2i"][int(caption)][0] for caption in benchmark.coco_ids))
    captions = [sorted(benchmark.coco_gts["i2t"][image]) for image in images]
    image_of_caption = np.repeat(np.arange(len(images)), [len(ids) for ids in captions])
    return {"image_ids": np.array(images), "caption_ids": np.concatenate(captions)}, image_of_caption


def write(file: str, image_of_caption: np.ndarray, features: dict, similarity: str | None = None, **ids) -> str:
    """Write a file of features, as .npz or .safetensors, and return its name."""
    description = {"similarity": similarity, "similarity_kwargs": SETS[similarity]} if similarity else {}
    text = json.dumps({"description": description})
    arrays = {"image_of_caption": image_of_caption.astype(np.int64), **features, **ids}
    if file.endswith(".npz"):
        np.savez(file, **arrays, vl_plugins=np.array(text))
    else:
        from safetensors.numpy import save_file

        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, file, {"vl_plugins": text})
    return file


def fractions(metrics: dict) -> dict:
    """Return metrics with recalls and precisions as fractions."""
    return {name: value / 100 if IS_OLD and name.endswith(FRACTIONS) else value for name, value in metrics.items()}


def evaluate(found: Cases, case: str, *arguments) -> None:
    """Add the metrics of ``vl-plugins evaluate --json``, and the numbers of images and captions."""
    status, output = vl_plugins("evaluate", "--features", *arguments, "--json")
    printed = json.loads(output) if output.startswith("{") else {"results": []}
    values = {}
    for result in printed["results"]:
        for protocol, metrics in result["metrics"].items():
            known = printed | result | metrics
            sizes = {name: known.get(name) for name in ("num_samples", "num_captions", "caption_circular_variance")}
            metrics = {name: value for name, value in metrics.items() if name != "image_circular_variance"}
            for name in ("positive_similarity", "hardest_negative_similarity"):  # of sets, rounded by other kernels
                metrics[name] = round(metrics[name], 6)
            values |= flatten(fractions(metrics) | sizes, f"{result['name']}.{protocol}.")
    found.add(f"evaluate {case}", status=status, **values)


def evaluations(found: Cases) -> None:
    for protocol, (images, captions) in COUNTS.items():
        files = []
        of_caption = np.random.default_rng(1).permutation(np.arange(captions) % images)
        for number, kind in enumerate(("ties", "normal", "unnormalized")):
            features = random_features(number, images, of_caption, kind)
            files.append(write(f"{protocol}-{kind}{('.npz', '.safetensors')[number % 2]}", of_caption, features))
            evaluate(found, f"{protocol}/{kind}", files[-1], "--protocol", protocol)
            evaluate(found, f"{protocol}/{kind} normalize", files[-1], "--normalize", "--protocol", protocol, "plain")
            evaluate(found, f"{protocol}/{kind} max-captions", files[-1], "--normalize", "--max-captions", 2)
        evaluate(found, f"{protocol}/ensemble", *files[:2], f"third={files[2]}", "--ensemble", "--normalize")
        for number, similarity in enumerate(SETS):
            kind = "ties" if similarity == "mil" else "normal"  # logarithms of the others round differently
            features = random_features(number, images, of_caption, kind, sets=True)
            file = write(f"{protocol}-{similarity}.npz", of_caption, features, similarity)
            evaluate(found, f"{protocol}/{similarity} {kind}", file, "--protocol", protocol)
            evaluate(found, f"{protocol}/{similarity} ensemble", file, files[0], "--ensemble")


def coco_evaluations(found: Cases) -> None:
    ids, of_caption = coco_split()
    protocols = ("coco-5k", "coco-1k", "eccv")
    files = []
    for number, kind in enumerate(("ties", "normal")):
        features = random_features(number, len(ids["image_ids"]), of_caption, kind)
        files.append(write(f"coco-{kind}.npz", of_caption, features, **ids))
        for protocol in protocols:
            evaluate(found, f"{protocol}/{kind}", files[-1], "--protocol", protocol)
    evaluate(found, "eccv/ensemble", *files, "--ensemble", "--protocol", *protocols)
    changed = {
        "no ids": {},
        "image ids": {"image_ids": ids["image_ids"]},
        "another order": {"image_ids": ids["image_ids"][::-1], "caption_ids": ids["caption_ids"]},
        "running ids": ids | {"caption_ids": np.arange(len(of_caption))},
    }
    for name, given in changed.items():
        file = write("changed.npz", of_caption, features, **given)
        for protocol in ("coco-1k", "eccv"):
            evaluate(found, f"{protocol}/{name}", file, "--protocol", protocol)


def ranks_of(similarities, answers, top: int):
    """Return the ranks of similarities, given the image of each caption, or the answers of both directions."""
    if not IS_OLD:
        return get("retrieval").similarity_ranks(similarities, answers, top=top)
    if isinstance(answers, tuple):  # 0.2 takes ids, and each only once
        answers = [
            {
                query: [one if one >= 0 else -1 - place for place, one in enumerate(right)]
                for query, right in part.items()
            }
            for part in answers
        ]
        truth = get("retrieval").GroundTruth
        answers = truth.from_ids(*map(range, similarities.shape), *answers, allow_absent=True)
    return get("retrieval").similarity_ranks(similarities, answers, negatives=top)


def rank_arrays(ranks, ties: bool = True) -> dict:
    """Return what both directions have; -1 and -inf stand for nothing and are left out. With ties, indices are free."""
    values = {}
    for name in ("image_to_text", "text_to_image"):
        direction = getattr(ranks, name)
        for field in (*FIELDS, *(() if ties else ("positives", "negatives"))):
            value = attribute(direction, field).flatten()
            values[f"{name}_{field}"] = value[torch.isfinite(value) & (value != -1)]
    return values


def metric_arrays(ranks) -> dict:
    """Return metrics, and AP@R and R-Precision of each query."""
    values = fractions(get("retrieval").retrieval_metrics(ranks))
    for name in ("image_to_text", "text_to_image"):
        direction = getattr(ranks, name)
        both = (
            get("retrieval").precision_at_r(direction)
            if IS_OLD
            else (direction.average_precision, direction.r_precision)
        )
        values |= {f"{name}_of_each_{number}": value for number, value in enumerate(both)}
    return values


def random_answers(queries: int, candidates: int, seed: int) -> dict:
    """Return right candidates of some of the queries, some of them not among the candidates."""
    g = np.random.default_rng(seed)
    answers = {}
    for query in g.permutation(queries)[: 1 + queries // 2].tolist():
        answers[query] = g.permutation(candidates)[: g.integers(1, 9)].tolist() + [-1] * int(g.integers(0, 3))
    return answers


def ranks(found: Cases) -> None:
    """Ranks by the public functions, with ties, unequal numbers of captions and other right answers."""
    shapes = ((1, 1), (7, 7), (5, 23), (40, 90), (600, 1400))
    for (images, captions), kind, top, number in itertools.product(
        shapes, ("ties", "normal", "equal"), (0, 1, 7), (0, 1)
    ):
        g = torch.Generator().manual_seed(images + number)
        of_caption = torch.cat([torch.arange(images), torch.randint(images, (captions - images,), generator=g)])
        of_caption = of_caption[torch.randperm(captions, generator=g)]
        x, y = (torch.randn(n, 8, generator=g) for n in (images, captions))
        x, y = (x.sign() / 8**0.5, y.sign() / 8**0.5) if kind == "ties" else (x, y + 0.7 * x[of_caption])
        x, y = (torch.ones_like(x), torch.ones_like(y)) if kind == "equal" else (x, y)
        rounded = (x.double() @ y.T.double() * 4).round() / 4
        both = random_answers(images, captions, number), random_answers(captions, images, number)
        name = f"{images}x{captions} {kind} top={top} {number}"

        @found.case(f"ranks embeddings/{name}")
        def compute():
            return rank_arrays(ranks_of(get("EmbeddingSimilarities")(x, y), of_caption, top), kind != "normal")

        @found.case(f"ranks matrix/{name}")
        def compute():
            return rank_arrays(ranks_of(rounded, of_caption, top))

        @found.case(f"ranks answers/{name}")
        def compute():
            return rank_arrays(ranks_of(rounded, both, top))

        @found.case(f"ranks mean/{name}")
        def compute():
            members = [get("EmbeddingSimilarities")(x, y), get("EmbeddingSimilarities")(x.flip(1), y)]
            return rank_arrays(ranks_of(get("MeanSimilarities")(members), of_caption, top))

        @found.case(f"best answers/{name}")
        def compute():
            direction = ranks_of(rounded, of_caption, top).image_to_text
            _, similarity, is_right = get("retrieval").best_answers(direction, top)
            return {"similarity": similarity, "is_right": is_right}

        if top == 0:  # 0.2 needs as many negatives as right answers for AP@R

            @found.case(f"metrics/{name}")
            def compute():
                return metric_arrays(ranks_of(get("EmbeddingSimilarities")(x, y), of_caption, MOST))

            @found.case(f"metrics answers/{name}")
            def compute():
                return metric_arrays(ranks_of(rounded, both, MOST))


def cases(found: Cases, arguments) -> None:
    torch.set_num_threads(1)
    ranks(found)
    evaluations(found)
    coco_evaluations(found)


if __name__ == "__main__":
    run(cases)
