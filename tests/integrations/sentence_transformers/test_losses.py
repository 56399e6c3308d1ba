"""RetrievalLoss and its cached form against the formulas of a similarity matrix, in one process and in two."""

import pytest
import torch
from pytorch_metric_learning.losses import BaseMetricLossFunction, MultiSimilarityLoss
from torch import nn

from tests.helpers.processes import in_processes
from vl_plugins import create_loss, list_losses
from vl_plugins.distributed import DistributedLoss
from vl_plugins.losses import CrossModalLoss, Warmup

reason = "needs pip install 'vl_plugins[sentence-transformers]'"
pytest.importorskip("sentence_transformers", minversion="6.0", reason=reason)
ours = pytest.importorskip("vl_plugins.integrations.sentence_transformers", exc_type=ImportError, reason=reason)
host = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
CachedRetrievalLoss, RetrievalLoss = ours.CachedRetrievalLoss, ours.RetrievalLoss

CHUNKS = slice(4), slice(4, None)
# Image of each row, and its captions: 13 describes images 1 and 2; 16, which row 0 has as a negative, describes 3.
REPEATED = [1, 2, 1, 3, 4, 4]
POSITIVES = [[11, 21, 31, 41, 51], [12, 13, 32, 42, 52], [13, 23, 33, 43, 53], [16, 24, 34, 44, 54]]
POSITIVES += [[15, 25, 35, 45, 55], [17, 26, 36, 46, 56]]
NEGATIVES = [[16, 61], [62, 63], [64, 65], [66, 67], [68, 69], [15, 60]]
# Losses with parameters.
LEARNING = {
    "unified": {"learn_scale": True, "scale": 20},
    "siglip": {"learn_scale": True, "scale": 10, "learn_bias": True},
    "vlc": {"distance": "match_probability"},
}


class Lookup(nn.Module):
    """Embeds the sum of a row's tokens, as a text encoder that ignores padding."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(100, 8, generator=generator, dtype=dtype))

    def forward(self, features, **_):
        weights = features["attention_mask"].to(self.table.dtype)[:, :, None]
        return {"sentence_embedding": (self.table[features["input_ids"]] * weights).sum(dim=1)}


def column(tokens, width=1):
    """Return tokenized inputs of one word each, padded by what would change the embedding."""
    ids = torch.full((len(tokens), width), 99)
    ids[:, 0] = torch.tensor(tokens)
    return {"input_ids": ids, "attention_mask": (torch.arange(width) == 0).long().repeat(len(tokens), 1)}


def make_batch(positives, negatives, images=REPEATED):
    """Return the columns, of several widths, and the tokens of all captions."""
    captions = [[row[number] for row in POSITIVES] for number in range(positives)]
    captions += [[row[number] for row in NEGATIVES] for number in range(negatives)]
    columns = [column(images), *(column(tokens, width=1 + number % 2) for number, tokens in enumerate(captions))]
    return columns, [token for tokens in captions for token in tokens]


def masks_of(images, captions, positives, labels=None):
    """Return which captions are positives and which are negatives of which rows, by going through all of them.

    A caption that equals a positive of the row is neither, unless it is one.
    """
    rows, labels = len(images), images if labels is None else labels
    positive, negative = torch.zeros(2, rows, len(captions), dtype=torch.bool)
    for row in range(rows):
        own = [place for place in range(positives * rows) if labels[place % rows] == labels[row]]
        known = {captions[place] for place in own}
        for place, caption in enumerate(captions):
            positive[row, place] = place in own
            negative[row, place] = caption not in known
    return positive, negative


def expected(loss, model, images, captions, masks):
    """Return value and gradient of a loss of the cosines and the masks."""
    table = model.table.detach().clone().requires_grad_()
    unit = table / table.norm(dim=1, keepdim=True)
    value = loss.from_similarities(unit[images] @ unit[captions].T, *masks)
    return value.detach(), torch.autograd.grad(value, table)[0]


def value_and_gradient(loss, columns, labels=None):
    value = loss(columns, labels)
    loss.model.zero_grad()
    value.backward()
    return value.detach(), loss.model.table.grad.clone()


@pytest.mark.parametrize("kind", [RetrievalLoss, CachedRetrievalLoss])
@pytest.mark.parametrize("labels", [None, [7, 7, 8, -1, 9, 8]], ids=["inputs", "labels"])
@pytest.mark.parametrize(("positives", "negatives"), [(1, 0), (1, 2), (2, 0), (2, 1), (5, 0), (5, 2)])
@pytest.mark.parametrize("name", list_losses())
def test_value_and_gradient_are_those_of_the_similarity_matrix(name, positives, negatives, labels, kind):
    columns, captions = make_batch(positives, negatives)
    options = {"mmd_weight": 0, "diversity_weight": 0} if name == "smooth_chamfer" else {}
    reference = create_loss("triplet_hn" if name == "smooth_chamfer" else name)
    model = Lookup()
    masks = masks_of(REPEATED, captions, positives, labels)
    options |= {"mini_batch_size": 4} if kind is CachedRetrievalLoss else {}
    loss = kind(model, name, num_positives=positives, **options)
    found = value_and_gradient(loss, columns, None if labels is None else torch.tensor(labels))
    # sentence-transformers 6.0 embeds again with gradients in float32.
    tolerances = {"rtol": 1e-10, "atol": 1e-12} if kind is RetrievalLoss else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(found, expected(reference, model, REPEATED, captions, masks), **tolerances)


def test_one_direction_and_the_regularizers():
    """Which the losses have of their own, also where pairs are found by inputs."""
    columns, captions = make_batch(2, 0)
    model, masks = Lookup(), masks_of(REPEATED, captions, 2)
    right = expected(create_loss("unified", symmetric=False), model, REPEATED, captions, masks)
    torch.testing.assert_close(
        value_and_gradient(RetrievalLoss(model, "unified", 2, symmetric=False), columns), right, rtol=1e-10, atol=1e-12
    )
    plain, regularized = (
        RetrievalLoss(model, "smooth_chamfer", 2, mmd_weight=weight, diversity_weight=0)(columns) for weight in (0, 0.5)
    )
    base = create_loss("smooth_chamfer", mmd_weight=0.5, diversity_weight=0)
    term = base.regularization(model.table[REPEATED], model.table[captions])["mmd_loss"]
    torch.testing.assert_close(regularized - plain, term, rtol=1e-9, atol=0)


def test_losses_of_pytorch_metric_learning():
    columns, _ = make_batch(1, 1, images=[1, 2, 3, 4, 5, 6])
    model, labels = Lookup(), torch.tensor([0, 1, 2, 0, 1, 3])
    images, captions = model.table[[1, 2, 3, 4, 5, 6]], model.table[[row[0] for row in POSITIVES + NEGATIVES]]
    ids = torch.cat([labels, torch.arange(6) + 100])
    right = MultiSimilarityLoss()(images, labels, ref_emb=captions, ref_labels=ids)
    for loss in ("MultiSimilarityLoss", {"name": "MultiSimilarityLoss"}, MultiSimilarityLoss()):
        torch.testing.assert_close(RetrievalLoss(model, loss)(columns, labels), right, rtol=1e-12, atol=0)


def test_losses_that_have_parts():
    """A warm-up of the host's loss and ours, and the host's in both directions."""
    columns, _ = make_batch(1, 0, images=[1, 2, 3, 4, 5, 6])
    model = Lookup()
    images, captions, labels = (
        model.table[[1, 2, 3, 4, 5, 6]],
        model.table[[row[0] for row in POSITIVES]],
        torch.arange(6),
    )
    one_direction = MultiSimilarityLoss()(images, labels, ref_emb=captions, ref_labels=labels.clone())
    both = one_direction + MultiSimilarityLoss()(captions, labels, ref_emb=images, ref_labels=labels.clone())
    warm = Warmup(MultiSimilarityLoss(), create_loss("triplet_hn", symmetric=False), steps=1)
    after = create_loss("triplet_hn", symmetric=False)(images, ref_emb=captions)
    loss = RetrievalLoss(model, warm)
    torch.testing.assert_close(loss(columns), one_direction)
    torch.testing.assert_close(loss(columns), after)
    torch.testing.assert_close(RetrievalLoss(model, CrossModalLoss(MultiSimilarityLoss()))(columns), both)
    with pytest.raises(
        ValueError, match="loss must be one of vl_plugins or of pytorch-metric-learning, got Distributed"
    ):
        RetrievalLoss(model, DistributedLoss(create_loss("unified")))


@pytest.mark.parametrize("kind", [RetrievalLoss, CachedRetrievalLoss])
def test_in_matryoshka_loss(kind):
    """Value and gradients are the weighted sum over the first dimensions of the unit vectors, in a plain loop."""
    columns, captions = make_batch(2, 1)
    reference, model, masks = create_loss("unified", **LEARNING["unified"]), Lookup(), masks_of(REPEATED, captions, 2)
    right = 0
    for dim, weight in ((8, 1.0), (4, 0.5), (2, 3.0)):
        cosines = torch.empty(len(REPEATED), len(captions), dtype=torch.float64)
        for row, image in enumerate(REPEATED):
            for place, caption in enumerate(captions):
                cosines[row, place] = torch.cosine_similarity(
                    model.table[image, :dim], model.table[caption, :dim], dim=0
                )
        right = right + weight * reference.from_similarities(cosines, *masks)
    gradients = torch.autograd.grad(3 * right, [model.table, reference.log_scale])
    options = {"mini_batch_size": 4} if kind is CachedRetrievalLoss else {}
    own = kind(Lookup(), "unified", 2, **options, **LEARNING["unified"])
    own.model.get_embedding_dimension = lambda: 8
    value = host.MatryoshkaLoss(own.model, own, [8, 4, 2], [1.0, 0.5, 3.0])(columns, None)
    (3 * value).backward()
    results = [value.detach(), own.model.table.grad, own.loss.log_scale.grad]
    torch.testing.assert_close(results, [right.detach(), *gradients], rtol=1e-5, atol=1e-6)


class ByPixels(Lookup):
    def forward(self, features, **_):
        if "pixel_values" not in features:
            return super().forward(features)
        return {"sentence_embedding": self.table[[1, 2, 2, 3, 3, 3]]}


def test_pixels_are_compared_too():
    """Images that differ in one value, or in the order of two, are different ones."""
    pixels = torch.rand(1, 3, 4, 4).repeat(6, 1, 1, 1)
    pixels[1:3, 2, 3, 3] += 1e-6
    pixels[3:, 0, 0, :2] = pixels[3:, 0, 0, :2].flip(1)
    model, (columns, captions), images = ByPixels(), make_batch(1, 0), [1, 2, 2, 3, 3, 3]
    right = expected(create_loss("unified"), model, images, captions, masks_of(images, captions, 1))
    found = value_and_gradient(RetrievalLoss(model), [{"pixel_values": pixels}, *columns[1:]])
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


def test_vlc_is_multiple_negatives_ranking_loss():
    """On pairs, with the scale and the direction of sentence-transformers."""
    model = Lookup(torch.float32)
    columns = [column([1, 2, 3, 4]), column([11, 12, 13, 14], width=3), column([15, 16, 17, 18])]
    theirs = value_and_gradient(host.MultipleNegativesRankingLoss(model), columns)
    found = value_and_gradient(RetrievalLoss(model, "vlc", scale=20, symmetric=False), columns)
    torch.testing.assert_close(found, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.rand(6), "integer image ids"),
        (torch.ones(6, 2, dtype=torch.long), "integer image ids"),
        (None, "add a column `label`"),
    ],
)
def test_rows_that_cannot_be_told_apart(labels, message):
    """Flattened inputs have no rows."""
    columns, _ = make_batch(1, 0)
    columns[1] |= {"cu_seq_lens_q": torch.arange(7)}
    with pytest.raises(ValueError, match=message):
        RetrievalLoss(Lookup(), "unified")(columns, labels)


def value_and_gradients(loss, columns):
    """Return the value and the gradients of 3 times the loss, of the model and of the loss's parameters."""
    value = loss(columns)
    loss.zero_grad()
    (3 * value).backward()
    return [value.detach(), loss.model.table.grad.clone(), *(number.grad.clone() for number in loss.loss.parameters())]


def expected_of_learned(name):
    columns, captions = make_batch(2, 1)
    loss, model, masks = create_loss(name, **LEARNING[name]), Lookup(), masks_of(REPEATED, captions, 2)
    vectors = model.table[REPEATED], model.table[captions]
    value = loss.from_similarities(loss.distance(*vectors), *masks)
    gradients = torch.autograd.grad(3 * value, [model.table, *loss.parameters()])
    assert all(gradient.abs().max() > 1e-3 for gradient in gradients)
    return columns, [value.detach(), *gradients]


@pytest.mark.parametrize("kind", [RetrievalLoss, CachedRetrievalLoss])
@pytest.mark.parametrize("name", LEARNING)
def test_parameters_of_losses(name, kind):
    """Their gradients are those of the whole batch, with gradient caching, too."""
    columns, right = expected_of_learned(name)
    options = {"mini_batch_size": 4} if kind is CachedRetrievalLoss else {}
    loss = kind(Lookup(), name, 2, **options, **LEARNING[name])
    torch.testing.assert_close(value_and_gradients(loss, columns), right, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(value_and_gradients(loss, columns), right, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(loss(columns), right[0], rtol=1e-6, atol=1e-6)


def learn_in_process(rank):
    """Return value and gradients of each loss with half of the rows; the model's are not averaged."""
    columns, _ = make_batch(2, 1)
    columns = [{name: value[3 * rank : 3 * rank + 3] for name, value in part.items()} for part in columns]
    results = {}
    for name, options in LEARNING.items():
        for kind in ("RetrievalLoss", "CachedRetrievalLoss"):
            loss = getattr(ours, kind)(Lookup(), name, 2, gather_across_devices=True, **options)
            value_and_gradients(loss, columns)  # again: what a step leaves behind does not count
            results[f"{name} {kind}"] = value_and_gradients(loss, columns)
    return results


def test_parameters_of_losses_in_two_processes():
    """Each process gets the gradients of the whole batch, as nothing else averages those of parameters of the loss."""
    first, second = in_processes(learn_in_process, 2)
    assert len(first) == 6
    for name, (value, table, *numbers) in first.items():
        value_there, table_there, *numbers_there = second[name]
        _, right = expected_of_learned(name.split()[0])
        mean = [(value + value_there) / 2, (table + table_there) / 2]
        torch.testing.assert_close([*mean, *numbers], right, rtol=1e-6, atol=1e-6)
        assert numbers == numbers_there


class Weighted(BaseMetricLossFunction):
    """A loss of one's own with a parameter, which it does not use for a batch of one image."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        value = (embeddings @ ref_emb.T).sum()
        value = value if len(labels.unique()) == 1 else value * self.weight
        return {"loss": {"losses": value, "indices": None, "reduction_type": "already_reduced"}}


def weight_in_process(rank):
    columns = [column([1, 1] if rank == 0 else [2, 3]), column([11, 12])]
    loss = RetrievalLoss(Lookup(), Weighted())
    loss(columns).backward()
    table = loss.model.table
    own = 0.0 if rank == 0 else (table[[2, 3]] @ table[[11, 12]].T).sum().item()
    return [loss.loss.weight.grad.item(), own]


def test_a_process_that_does_not_use_a_parameter():
    """It takes part in the mean with a gradient of 0."""
    (first, _), (second, own) = in_processes(weight_in_process, 2)
    assert first == second == pytest.approx(own / 2)


def half_of_the_data(rank):
    """Return the gradient of the scale where each process compares its own rows, and the first has a single image."""
    columns, _ = make_batch(2, 0, images=[1, 1, 1, 3, 4, 5])
    columns = [{name: value[3 * rank : 3 * rank + 3] for name, value in part.items()} for part in columns]
    gradients = [value_and_gradients(RetrievalLoss(Lookup(), "unified", 2, **LEARNING["unified"]), columns)[2]]
    loss = create_loss("unified", **LEARNING["unified"])
    captions = [row[number] for number in range(2) for row in POSITIVES[3 * rank : 3 * rank + 3]]
    images = [1, 1, 1] if rank == 0 else [3, 4, 5]
    similarities = loss.distance(Lookup().table[images], Lookup().table[captions])
    (3 * loss.from_similarities(similarities, *masks_of(images, captions, 2))).backward()
    return [*gradients, loss.log_scale.grad]


def test_parameters_of_processes_that_compare_their_own_rows():
    """The model's gradients are averaged over the processes, and so are those of the loss."""
    (first, own_first), (second, own_second) = in_processes(half_of_the_data, 2)
    assert first == second
    assert own_first != own_second
    torch.testing.assert_close(first, (own_first + own_second) / 2)


class Dropout(Lookup):
    def forward(self, features, **_):
        return {"sentence_embedding": nn.functional.dropout(super().forward(features)["sentence_embedding"], 0.5)}


def test_cached_gradients_with_dropout_are_those_of_the_same_chunks():
    model, (columns, captions) = Dropout(), make_batch(2, 0)
    torch.manual_seed(1)
    cached = value_and_gradient(CachedRetrievalLoss(model, "unified", 2, mini_batch_size=4), columns)
    torch.manual_seed(1)
    parts = [{name: value[rows] for name, value in part.items()} for part in columns for rows in CHUNKS]
    chunks = [model(part)["sentence_embedding"] for part in parts]
    images, texts = torch.cat(chunks[:2]), torch.cat(chunks[2:])
    unit_images, unit_texts = (side / side.norm(dim=1, keepdim=True) for side in (images, texts))
    masks = masks_of(REPEATED, captions, 2)
    value = create_loss("unified").from_similarities(unit_images @ unit_texts.T, *masks)
    torch.testing.assert_close(
        cached, (value.detach(), torch.autograd.grad(value, model.table)[0]), rtol=1e-6, atol=1e-7
    )


CASES = [(kind, labels) for kind in ("RetrievalLoss", "CachedRetrievalLoss") for labels in (None, [7, 7, 8, 7, 9, 8])]


def in_process(rank, world_size):
    """Return value and gradient of each case with the rows of one process."""
    columns, _ = make_batch(2, 1)
    rows = slice(rank * 6 // world_size, (rank + 1) * 6 // world_size)
    columns = [{name: value[rows] for name, value in part.items()} for part in columns]
    found = []
    for kind, labels in CASES:
        loss = getattr(ours, kind)(Lookup(), "unified", 2, gather_across_devices=True)
        found += value_and_gradient(loss, columns, None if labels is None else torch.tensor(labels)[rows])
    return [part / world_size for part in found]


def test_two_processes_are_one():
    first, second = in_processes(in_process, 2, 2)
    found = [a + b for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(found, in_process(0, 1), rtol=1e-6, atol=1e-7)
