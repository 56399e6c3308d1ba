"""The tools themselves against the numbers of their rules, with the extra ``peers``.

VSE++ is no package: its own functions run where ``VL_PLUGINS_VSEPP`` names a checkout, and otherwise loops written from
its description.
"""

import ast
import os
import warnings
from pathlib import Path

import numpy
import pytest
import torch

from tests.helpers.tied_embeddings import KINDS, tied_features
from vl_plugins.retrieval import rules
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.rules import tool_numbers

pytestmark = pytest.mark.slow
for package in ("mteb", "open_clip_train", "clip_benchmark", "torchmetrics", "eccv_caption", "sentence_transformers"):
    pytest.importorskip(package, reason="needs the extra peers")

CASES = 100
CUTOFFS = (1, 5, 10)
DIRECTIONS = ("image_to_text", "text_to_image")
FLOAT32 = 1e-6  # the tool averages in float32
MTEB_ROUNDING = 5.1e-6  # mteb rounds to five decimals


def texts(ids, number):
    return [str(one) for one in (range(number) if ids is None else ids)]


def directions(features):
    """Yield name, query embeddings, candidate embeddings, ids of queries and candidates, and the right pairs (Q, C)."""
    image_ids = texts(features.image_ids, len(features.images))
    caption_ids = texts(features.caption_ids, len(features.captions))
    is_right = torch.arange(len(features.images))[:, None] == features.image_of_caption
    yield DIRECTIONS[0], features.images, features.captions, image_ids, caption_ids, is_right
    yield DIRECTIONS[1], features.captions, features.images, caption_ids, image_ids, is_right.T


def right_ids(query_ids, candidate_ids, is_right):
    return {
        query: {candidate_ids[index] for index in row.nonzero().flatten().tolist()}
        for query, row in zip(query_ids, is_right, strict=True)
    }


def open_clip_rows(features):
    from open_clip_train.train import get_clip_metrics

    metrics = get_clip_metrics(features.images[features.image_of_caption], features.captions, torch.tensor(100.0))
    return {"a row for each caption": metrics}


def open_clip_first_captions(features):
    from open_clip_train.train import get_clip_metrics

    owners = features.image_of_caption.tolist()
    first = [owners.index(image) for image in range(len(features.images))]
    return {"first captions": get_clip_metrics(features.images, features.captions[first], torch.tensor(100.0))}


class EmbeddingModel:
    """Embeddings by index, in place of a model that encodes pictures and texts."""

    def __init__(self, images, captions):
        self.encode_image = images.__getitem__
        self.encode_text = captions.__getitem__


def clip_benchmark(features):
    from clip_benchmark.metrics import zeroshot_retrieval

    captions_of_image = [
        (features.image_of_caption == image).nonzero().flatten().tolist() for image in range(len(features.images))
    ]
    batches = []
    for images in torch.arange(len(features.images)).split(16):
        batches.append((images, [captions_of_image[image] for image in images.tolist()]))
    model = EmbeddingModel(features.images, features.captions)
    recalls = zeroshot_retrieval.evaluate(model, batches, torch.tensor, "cpu", amp=False, recall_k_list=list(CUTOFFS))
    metrics = {}
    for direction, name in zip(DIRECTIONS, ("text_retrieval", "image_retrieval"), strict=True):
        for k in CUTOFFS:
            metrics[f"{direction}_R@{k}"] = recalls[f"{name}_recall@{k}"]
    return {"any right answer": metrics}


class Encoder:
    """The embeddings of queries and candidates, for texts that are their indices."""

    def __init__(self, queries, candidates):
        self.queries, self.candidates = queries, candidates

    def encode_query(self, sentences, **options):
        return self.queries[[int(sentence) for sentence in sentences]]

    def encode_document(self, sentences, **options):
        return self.candidates[[int(sentence) for sentence in sentences]]


def sentence_transformers(features):
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.util import cos_sim

    metrics = {"accuracy@K": {}, "recall@K": {}, "precision@K": {}}
    for direction, queries, candidates, query_ids, candidate_ids, is_right in directions(features):
        evaluator = InformationRetrievalEvaluator(
            {name: str(index) for index, name in enumerate(query_ids)},
            {name: str(index) for index, name in enumerate(candidate_ids)},
            right_ids(query_ids, candidate_ids, is_right),
            accuracy_at_k=list(CUTOFFS),
            precision_recall_at_k=list(CUTOFFS),
            score_functions={"cosine": cos_sim},
            write_csv=False,
        )
        scores = evaluator.compute_all_metrics(Encoder(queries, candidates))["cosine"]
        for rule, values in metrics.items():
            for k in CUTOFFS:
                values[f"{direction}_R@{k}"] = scores[rule.replace("K", "k")][k]
    return metrics


class MtebEncoder:
    """The same for mteb's data loaders."""

    mteb_model_meta = None

    def __init__(self, queries, candidates):
        self.embeddings = {"query": queries, "document": candidates}

    def encode(self, inputs, *, prompt_type, **options):
        indices = [int(text) for batch in inputs for text in batch["text"]]
        return self.embeddings[prompt_type.value][indices]

    def similarity(self, queries, candidates):
        return queries @ candidates.T


def mteb_scores(features):
    import mteb
    from datasets import Dataset
    from mteb._evaluators import RetrievalEvaluator
    from mteb.models import SearchEncoderWrapper
    from mteb.timing import TimingStack

    metrics = {"recall@K": {}, "hit_rate@K": {}}
    for direction, queries, candidates, query_ids, candidate_ids, is_right in directions(features):
        evaluator = RetrievalEvaluator(
            corpus=Dataset.from_dict({"id": candidate_ids, "text": list(map(str, range(len(candidates))))}),
            queries=Dataset.from_dict({"id": query_ids, "text": list(map(str, range(len(queries))))}),
            task_metadata=mteb.get_task("NFCorpus").metadata,
            hf_split="test",
            hf_subset="default",
            top_k=1000,
            timer=TimingStack(),
        )
        model = SearchEncoderWrapper(MtebEncoder(queries, candidates))
        results = evaluator(model, {"show_progress_bar": False})
        right = right_ids(query_ids, candidate_ids, is_right)
        relevant = {query: dict.fromkeys(answers, 1) for query, answers in right.items()}
        scores = evaluator.evaluate(relevant, results, CUTOFFS)
        for k in CUTOFFS:
            metrics["recall@K"][f"{direction}_R@{k}"] = scores.recall[f"Recall@{k}"]
            metrics["hit_rate@K"][f"{direction}_R@{k}"] = scores.hit_rate[f"HitRate@{k}"]
    return metrics


def torchmetrics(features):
    from torchmetrics.retrieval import RetrievalHitRate, RetrievalPrecision, RetrievalRecall

    metrics = {}
    for metric in (RetrievalRecall, RetrievalHitRate, RetrievalPrecision):
        values = metrics.setdefault(metric.__name__, {})
        for direction, queries, candidates, _, _, is_right in directions(features):
            scores = queries @ candidates.T
            indexes = torch.arange(len(queries))[:, None].expand_as(scores)
            for k in CUTOFFS:
                value = metric(top_k=k)(scores.flatten(), is_right.flatten(), indexes=indexes.flatten())
                values[f"{direction}_R@{k}"] = float(value)
    return metrics


def eccv_caption(features):
    from eccv_caption._metrics import compute_r_at_k

    values = {}
    for direction, queries, candidates, _, _, is_right in directions(features):
        lists = dict(enumerate((queries @ candidates.T).argsort(dim=1, descending=True).tolist()))
        right = {query: row.nonzero().flatten().tolist() for query, row in enumerate(is_right)}
        for k in CUTOFFS:
            values[f"{direction}_R@{k}"] = float(compute_r_at_k(lists, right, k))
    return {"compute_r_at_k": values}


def vsepp_functions(checkout):
    """Return ``i2t`` and ``t2i`` of a checkout, whose Python 2 divides integers."""
    tree = ast.parse((Path(checkout) / "evaluation.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in ("i2t", "t2i")]
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and ast.unparse(node.right) == "5":
                node.op = ast.FloorDiv()
    names = {"numpy": numpy, "torch": torch}
    exec(compile(ast.Module(functions, []), "evaluation.py", "exec"), names)
    return names["i2t"], names["t2i"]


def described_i2t(images, captions):
    """Every fifth row is an image; the rank of its best of five captions in a reversed ascending sort."""
    ranks = []
    for image in range(len(images) // 5):
        order = numpy.argsort(images[5 * image] @ captions.T)[::-1].tolist()
        ranks.append(min(order.index(caption) for caption in range(5 * image, 5 * image + 5)))
    return recalls_of(ranks)


def described_t2i(images, captions):
    ranks = []
    for caption in range(len(captions)):
        order = numpy.argsort(captions[caption] @ images[::5].T)[::-1].tolist()
        ranks.append(order.index(caption // 5))
    return recalls_of(ranks)


def recalls_of(ranks):
    return [100 * sum(rank < k for rank in ranks) / len(ranks) for k in CUTOFFS]


if "VL_PLUGINS_VSEPP" in os.environ:
    VSEPP = vsepp_functions(os.environ["VL_PLUGINS_VSEPP"])
else:
    VSEPP = (described_i2t, described_t2i)


def vsepp_recalls(images, captions):
    """Return recalls of rows of images, each five times, and their captions, as arrays."""
    values = {}
    for direction, function in zip(DIRECTIONS, VSEPP, strict=True):
        for k, percent in zip(CUTOFFS, function(images, captions), strict=False):
            values[f"{direction}_R@{k}"] = percent / 100
    return values


def vsepp(features):
    rows = features.images[features.image_of_caption]
    return {"i2t, t2i": vsepp_recalls(rows.numpy(), features.captions.numpy())}


# Where captions are not grouped by image, CLIP_benchmark and VSE++ would be called with other rows.
TOOLS = {
    "open_clip": ([open_clip_rows, open_clip_first_captions], FLOAT32, True),
    "CLIP_benchmark": ([clip_benchmark], FLOAT32, False),
    "sentence-transformers": ([sentence_transformers], FLOAT32, True),
    "mteb": ([mteb_scores], MTEB_ROUNDING, True),
    "torchmetrics": ([torchmetrics], FLOAT32, True),
    "eccv_caption": ([eccv_caption], FLOAT32, True),
    "VSE++": ([vsepp], FLOAT32, False),
}


def compare(features, tool):
    """Compare all numbers of a tool; return how many of ours are one number, and how many are two ends."""
    functions, tolerance, _ = TOOLS[tool]
    single = ranges = 0
    ours = {one.rule: one for one in tool_numbers(features) if one.tool == tool}
    for function in functions:
        for rule, metrics in function(features).items():
            for direction in DIRECTIONS:
                for k in CUTOFFS:
                    metric = f"{direction}_R@{k}"
                    low, high = ours[rule].low[metric], ours[rule].high[metric]
                    assert low - tolerance <= metrics[metric] <= high + tolerance, (rule, metric, low, high)
                    single += low == high
                    ranges += low != high
    return single, ranges


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tool", TOOLS)
def test_the_tool_gives_the_numbers_of_its_rule(tool, kind):
    has_any_order = TOOLS[tool][2]
    fewest_captions = 5 if tool == "VSE++" else 1
    single = ranges = 0
    for seed in range(CASES // len(KINDS)):
        shuffled = has_any_order and seed % 2 == 1
        features = tied_features(seed, kind=kind, captions=(fewest_captions, 5), shuffled=shuffled, ids=seed % 3 > 0)
        counts = compare(features, tool)
        single += counts[0]
        ranges += counts[1]
    if kind in ("plain", "duplicates"):  # of others, ties decide nearly all numbers
        assert single > 30
    has_order = tool in ("sentence-transformers", "mteb")
    rows_tie = tool == "open_clip"  # each image with its own copies
    assert (ranges > 0) == (not has_order and (kind != "plain" or rows_tie))


@pytest.mark.parametrize("captions", [1001, 1100])
def test_mteb_is_within_the_two_ends_where_it_retrieves_some_of_the_ties(captions):
    images = torch.eye(12)
    owners = torch.arange(captions) % 12
    features = Features(images=images, captions=images[:1].expand(captions, -1), image_of_caption=owners)
    _, ranges = compare(features, "mteb")
    assert (ranges > 0) == (captions > 1001)


@pytest.fixture(scope="module")
def coco():
    """Return eccv_caption's metrics, and features of the ids of COCO's test split, in its order, with many ties."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ujson is not installed
        from eccv_caption import Metrics

        metrics = Metrics()
    features = tied_features(0, kind="duplicates", images=(5000, 5000), captions=(5, 5), width=64, ids=False)
    image_ids = list(dict.fromkeys(metrics.coco_gts["t2i"][int(caption)][0] for caption in metrics.coco_ids))
    caption_ids = [caption for image in image_ids for caption in metrics.coco_gts["i2t"][image]]
    features = Features(
        images=features.images,
        captions=features.captions,
        image_of_caption=features.image_of_caption,
        image_ids=image_ids,
        caption_ids=caption_ids,
    )
    ours = {(one.tool, one.rule): one for one in tool_numbers(features)}
    return metrics, features, ours


def assert_within(metrics, numbers):
    for metric, value in metrics.items():
        assert numbers.low[metric] - FLOAT32 <= value <= numbers.high[metric] + FLOAT32, metric
    assert numbers.low != numbers.high


def test_the_folds_are_those_of_eccv_caption(coco):
    metrics, features, ours = coco
    lists = {"i2t": {}, "t2i": {}}
    for fold in range(rules.FOLDS):  # only the first of a query's own fold are looked at, so the lists hold no others
        images = slice(1000 * fold, 1000 * (fold + 1))
        captions = slice(5000 * fold, 5000 * (fold + 1))
        scores = features.images[images] @ features.captions[captions].T
        for name, similarity, queries, candidates in (
            ("i2t", scores, features.image_ids[images], features.caption_ids[captions]),
            ("t2i", scores.T, features.caption_ids[captions], features.image_ids[images]),
        ):
            for query, order in zip(queries, similarity.topk(20, dim=1).indices.tolist(), strict=True):
                lists[name][query] = [candidates[index] for index in order]
    values = {}
    for k in CUTOFFS:
        recalls = metrics.coco_1k_recalls(lists, "all", k)
        for direction, name in zip(DIRECTIONS, ("i2t", "t2i"), strict=True):
            values[f"{direction}_R@{k}"] = float(recalls[name])
    assert_within(values, ours["eccv_caption", "coco_1k_recalls"])


def test_the_folds_are_those_of_vsepp(coco):
    _, features, ours = coco
    rows = features.images[features.image_of_caption].numpy()
    captions = features.captions.numpy()
    folds = []
    for fold in range(rules.FOLDS):
        part = slice(5000 * fold, 5000 * (fold + 1))
        folds.append(vsepp_recalls(rows[part], captions[part]))
    means = {metric: numpy.mean([fold[metric] for fold in folds]) for metric in folds[0]}
    assert_within(means, ours["VSE++", "fold5"])
    assert_within(vsepp_recalls(rows, captions), ours["VSE++", "i2t, t2i"])
