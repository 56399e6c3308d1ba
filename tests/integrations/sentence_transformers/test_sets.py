"""Sets of a MultiVectorEncoder: smooth-Chamfer similarity as its scorer, and our losses of it."""

from functools import partial

import pytest
import torch
from PIL import Image
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.distances import SmoothChamferSimilarity

reason = "needs pip install 'vl_plugins[sentence-transformers]'"
host = pytest.importorskip("sentence_transformers", minversion="6.0", reason=reason)
ours = pytest.importorskip("vl_plugins.integrations.sentence_transformers", exc_type=ImportError, reason=reason)
losses = pytest.importorskip("sentence_transformers.multi_vector_encoder.losses")
evaluation = pytest.importorskip("sentence_transformers.multi_vector_encoder.evaluation")
modules = pytest.importorskip("sentence_transformers.base.modules")
masks = pytest.importorskip("sentence_transformers.multi_vector_encoder.modules")

KEYS = ("token_embeddings", "attention_mask")
CAPTIONS = ["a red circle", "a star and a blue star", "a square", "a green star above a small square"]
SECOND = [*CAPTIONS[1:], "a small red circle left of a star"]


class PatchMask(modules.Module):
    """CLIP's pictures have no attention mask: all patches count."""

    def forward(self, features, **_):
        tokens = features["token_embeddings"]
        features.setdefault("attention_mask", torch.ones(tokens.shape[:2], dtype=torch.long))
        return features

    def save(self, *_, **__):
        pass


def make_encoder(folder):
    outputs = {
        kind: {"method": f"get_{kind}_features", "method_output_name": "last_hidden_state"}
        for kind in ("text", "image")
    }
    clip = modules.Transformer(
        folder, transformer_task="feature-extraction", modality_config=outputs, module_output_name="token_embeddings"
    )
    return host.MultiVectorEncoder(modules=[clip, PatchMask(), masks.MultiVectorMask()], device="cpu")


def make_columns(encoder, rows=slice(4)):
    """Return pictures, two captions of each, and negatives, most of which are captions of other pictures."""
    pictures = [Image.new("RGB", (32, 32), (60 * number, 90, 200)) for number in range(4)]
    texts = [CAPTIONS, SECOND, CAPTIONS[::-1]]
    columns = [encoder.preprocess(pictures[rows], task="query")]
    columns += [encoder.preprocess(captions[rows], task="document") for captions in texts]
    return [column | {"task": "document" if number else "query"} for number, column in enumerate(columns)]


@pytest.mark.parametrize("alpha", [16.0, 2.0])
def test_scores_are_similarities_without_padding(alpha):
    """With masks, groups of documents, and lists of sets."""
    queries = torch.randn(3, 4, 5, dtype=torch.float64)
    documents = torch.randn(2, 2, 6, 5, dtype=torch.float64)
    query_sizes, sizes = [4, 1, 3], [6, 2, 1, 5]
    queries_mask = torch.arange(4) < torch.tensor(query_sizes)[:, None]
    documents_mask = (torch.arange(6) < torch.tensor(sizes)[:, None]).view(2, 2, 6)
    sets = [query[:size] for query, size in zip(queries, query_sizes, strict=True)]
    texts = [text[:size] for text, size in zip(documents.flatten(0, 1), sizes, strict=True)]
    right = torch.tensor([[SmoothChamferSimilarity(alpha)(x[None], y[None]) for y in texts] for x in sets])
    scores = partial(ours.smooth_chamfer_scores, alpha=alpha)
    for found in (scores(queries, documents, queries_mask, documents_mask.long()), scores(sets, texts)):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_it_is_a_scorer_of_the_library(clip_folder):
    """Of the loss and of the evaluator."""
    encoder = make_encoder(clip_folder)
    images, *texts, _ = make_columns(encoder)
    loss = losses.MultiVectorMultipleNegativesRankingLoss(encoder, scale=20, similarity_fct=ours.smooth_chamfer_scores)
    found = loss([dict(images), dict(texts[0])])
    vlc = ours.RetrievalLoss(encoder, "vlc", scale=20, symmetric=False)
    torch.testing.assert_close(found, vlc([images, texts[0]], torch.arange(4)), rtol=1e-5, atol=1e-6)
    corpus = dict(enumerate(CAPTIONS))
    retrieval = evaluation.MultiVectorInformationRetrievalEvaluator(
        {str(key): text for key, text in corpus.items()},
        {str(key): text for key, text in corpus.items()},
        {str(key): {str(key)} for key in corpus},
        score_functions={"smooth_chamfer": ours.smooth_chamfer_scores},
    )
    assert retrieval(encoder)["smooth_chamfer_accuracy@1"] == 1


def expected_gradients(encoder, columns, positives, known):
    """Return value and gradients of the loss of the sets without padding; a known positive is no negative."""
    outputs = [encoder(dict(column), task=column["task"]) for column in columns]
    sets = [tokens[kept.bool()] for out in outputs for tokens, kept in zip(*(out[key] for key in KEYS), strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(sets, batch_first=True)
    similarities = create_loss("unified", distance="smooth_chamfer").distance(padded[:4], padded[4:])
    value = create_loss("unified").from_similarities(similarities, positives, ~known)
    encoder.zero_grad()
    value.backward()
    return [value.detach(), *(part.grad.clone() for part in encoder.parameters() if part.grad is not None)]


@pytest.mark.parametrize("kind", ["RetrievalLoss", "CachedRetrievalLoss"])
def test_losses_of_sets(kind, clip_folder):
    encoder = make_encoder(clip_folder).eval()
    columns = make_columns(encoder)
    texts = [*CAPTIONS, *SECOND, *CAPTIONS[::-1]]
    known = torch.tensor([[text in pair for text in texts] for pair in zip(CAPTIONS, SECOND, strict=True)])
    positives = torch.cat([torch.eye(4), torch.eye(4), torch.zeros(4, 4)], dim=1).bool()
    right = expected_gradients(encoder, columns, positives, known)
    options = {"mini_batch_size": 3} if kind.startswith("Cached") else {}
    value = getattr(ours, kind)(encoder, "unified", 2, **options)(columns)
    encoder.zero_grad()
    value.backward()
    found = [value.detach(), *(part.grad for part in encoder.parameters() if part.grad is not None)]
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)


def in_process(rank, world_size, folder):
    encoder = make_encoder(folder).eval()
    columns = make_columns(encoder, slice(rank * 4 // world_size, (rank + 1) * 4 // world_size))
    loss = ours.RetrievalLoss(encoder, "unified", 2, gather_across_devices=True)
    if world_size > 1:
        loss.model = DistributedDataParallel(encoder, find_unused_parameters=True)  # as the trainer does
    value = loss(columns)
    value.backward()
    weight = next(part for name, part in encoder.named_parameters() if name.endswith("token_embedding.weight"))
    return [value.detach() / world_size, weight.grad / world_size]


def test_sets_of_two_processes(clip_folder):
    """Whose captions are of unequal lengths."""
    first, second = in_processes(in_process, 2, 2, clip_folder)
    found = [a + b for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(found, in_process(0, 1, clip_folder), rtol=1e-4, atol=1e-6)
