"""The trainer and the evaluator of sentence-transformers with our losses and metrics."""

import csv
import os
import tempfile

import numpy as np
import pytest
import torch

from tests.helpers.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.retrieval import retrieval_metrics, similarity_ranks

reason = "needs pip install 'vl_plugins[sentence-transformers]'"
host = pytest.importorskip("sentence_transformers", minversion="6.0", reason=reason)
ours = pytest.importorskip("vl_plugins.integrations.sentence_transformers", exc_type=ImportError, reason=reason)
example = pytest.importorskip("vl_plugins.integrations.examples.sentence_transformers_trainer", exc_type=ImportError)

CAPTIONS = example.CAPTIONS
LEARNING_RATE = 0.5


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Data sets of 8 images and of 24."""
    return example.read_scenes(tmp_path_factory.mktemp("scenes"), train=8, val=1, test=24)


def train(folder, training, kind, **options):
    """Return the trained model, after one step on 8 images."""
    model = host.SentenceTransformer(folder, device="cpu")
    loss = getattr(ours, kind)(model, "unified", num_positives=5, **options)
    with tempfile.TemporaryDirectory() as output:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        options = {"per_device_train_batch_size": 8 // world_size, "max_steps": 1, "learning_rate": LEARNING_RATE}
        options |= {"optim": "sgd", "max_grad_norm": 0, "warmup_steps": 0, "lr_scheduler_type": "constant"}
        example.train(model, training, training, loss, output, use_cpu=True, **options)
    return model


def weights(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def expected_weights(folder, training):
    """Return the weights after one step of the formula on all 8 images."""
    model = host.SentenceTransformer(folder, device="cpu")
    columns = [model.preprocess(list(training[name])) for name in ("image", *CAPTIONS)]
    images, *texts = (model(column)["sentence_embedding"] for column in columns)
    units = [side / side.norm(dim=1, keepdim=True) for side in (images, torch.cat(texts))]
    mask = torch.eye(8, dtype=torch.bool).repeat(1, 5)
    create_loss("unified").from_similarities(units[0] @ units[1].T, mask, ~mask).backward()
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    return weights(model)


def test_a_step_of_the_trainer_is_that_of_the_formula(clip_folder, scenes, tmp_path):
    right = expected_weights(clip_folder, scenes[0])
    model = train(clip_folder, scenes[0], "RetrievalLoss")
    torch.testing.assert_close(weights(model), right, rtol=1e-4, atol=1e-6)
    before = weights(host.SentenceTransformer(clip_folder, device="cpu"))
    assert sum(not torch.equal(before[name], right[name]) for name in right) > len(right) / 2
    model.save_pretrained(str(tmp_path))
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert '"num_positives": 5' in card
    assert "Unified Loss of Pair Similarity Optimization" in card
    assert "text_to_image_R@10" in card


def in_process(rank, folder, pictures):
    training, _ = example.read_scenes(pictures, train=8, val=1, test=24)
    plain = train(folder, training, "RetrievalLoss", gather_across_devices=True)
    cached = train(folder, training, "CachedRetrievalLoss", gather_across_devices=True, mini_batch_size=3)
    return [weights(plain), weights(cached)]


def test_a_step_of_two_processes(clip_folder, scenes, tmp_path):
    """DistributedDataParallel takes the towers of CLIP, which are separate calls of the model."""
    right = expected_weights(clip_folder, scenes[0])
    for weights_of_process in in_processes(in_process, 2, clip_folder, str(tmp_path), joined=False):
        torch.testing.assert_close(weights_of_process, [right, right], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_example_learns():
    metrics = example.main()
    assert metrics["after"]["rsum"] > 3 * metrics["before"]["rsum"]


def check_file(evaluator, model, metrics, folder):
    """Evaluate twice more, and compare what is appended to the CSV file."""
    for epoch in (1, 2):
        evaluator(model, output_path=str(folder / "eval"), epoch=epoch, steps=10 * epoch)
    with open(folder / "eval/Cross-Modal-Retrieval_evaluation_toy_results.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for epoch, row in enumerate(rows, start=1):
        values = {f"toy_{name}": float(value) for name, value in row.items()}
        assert values == pytest.approx({**metrics, "toy_epoch": epoch, "toy_steps": 10 * epoch})
    assert len(rows) == 2


@pytest.mark.parametrize("similarity", [None, lambda x, y: -torch.cdist(x, y)], ids=["cosine", "distance"])
def test_metrics_are_those_of_all_similarities(similarity, clip_folder, scenes, tmp_path):
    """Of 24 images with 2 or 3 captions, which 12 of them have in two rows."""
    model, test = host.SentenceTransformer(clip_folder, device="cpu"), scenes[1]
    rows = [*range(24), *range(12)]
    captions = [[test["caption_0"][row], test["caption_1"][row]] for row in range(24)] + list(test["caption_2"][:12])
    evaluator = ours.CrossModalRetrievalEvaluator(
        [test["image"][row] for row in rows], captions, rows, name="toy", similarity_fct=similarity
    )
    found = evaluator(model)
    texts = [
        (row, text)
        for row, part in zip(rows, captions, strict=True)
        for text in ([part] if isinstance(part, str) else part)
    ]
    x, y = model.encode(list(test["image"])), model.encode([text for _, text in texts])
    cosines = (x / np.linalg.norm(x, axis=1)[:, None]) @ (y / np.linalg.norm(y, axis=1)[:, None]).T
    scores = cosines if similarity is None else -np.linalg.norm(x[:, None] - y, axis=2)
    right = retrieval_metrics(similarity_ranks(torch.tensor(scores), torch.tensor([row for row, _ in texts])))
    assert len(found) == 9
    check_file(evaluator, model, found, tmp_path)
    assert found == pytest.approx({name: right[name.removeprefix("toy_")] for name in found}, abs=1e-9)
    assert evaluator.primary_metric == "toy_rsum"
