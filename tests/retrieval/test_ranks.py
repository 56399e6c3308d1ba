import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measurement import extra_bytes
from tests.reference import retrieval as reference
from vl_plugins.distances import MILSimilarity, SmoothChamferSimilarity
from vl_plugins.retrieval import (
    DirectionRanks,
    ranks,
    retrieval_ranks,
    similarities,
    similarity_ranks,
)


def embeddings(images, width=8, captions_per_image=(5, 6, 7), dtype=torch.float64):
    """Random embeddings of images with cycling numbers of captions, the captions shuffled."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([captions_per_image[i % len(captions_per_image)] for i in range(images)])
    image_of_caption = torch.arange(images).repeat_interleave(counts)
    image_of_caption = image_of_caption[torch.randperm(len(image_of_caption), generator=generator)]
    image_embeddings = torch.randn(images, width, generator=generator, dtype=dtype)
    caption_embeddings = torch.randn(len(image_of_caption), width, generator=generator, dtype=dtype)
    return image_embeddings, caption_embeddings + 0.5 * image_embeddings[image_of_caption], image_of_caption


def random_answers(generator, queries, candidates):
    """Right candidates of some of the queries, some of them absent or given twice."""
    answers = {}
    for query in generator.sample(range(queries), generator.randint(1, queries)):
        answers[query] = generator.sample(range(candidates), generator.randint(1, min(4, candidates)))
        if generator.random() < 0.3:
            answers[query] += generator.choice([[-1], [-1, -1], answers[query][:1]])
    return answers


def assert_direction_equals(got, scores, answers, top, **tolerance):
    """Compare with plain loops; which of equally similar candidates comes first is free."""
    expected = reference.direction(scores, answers, top)
    assert tuple(expected) == DirectionRanks._fields
    for name, value in expected.items():
        found = getattr(got, name)
        if name in ("average_precision", "r_precision"):
            assert found.dtype == torch.float64
            assert found.tolist() == pytest.approx(value, abs=1e-12)
        elif "similarity" in name:
            torch.testing.assert_close(found, torch.tensor(value, dtype=found.dtype).view(found.shape), **tolerance)
        else:
            assert found.dtype == torch.int64
            if name not in ("positives", "negatives"):
                assert found.tolist() == value, name

    scores = torch.tensor(scores, dtype=got.positive_similarity.dtype)
    positive_query = got.queries[got.positive_query]
    torch.testing.assert_close(scores[positive_query, got.positives], got.positive_similarity, **tolerance)
    pairs = sorted(zip(positive_query.tolist(), got.positives.tolist(), strict=True))
    assert pairs == sorted({(query, answer) for query, right in answers.items() for answer in right if answer >= 0})
    assert (got.negatives == -1).tolist() == [[index == -1 for index in row] for row in expected["negatives"]]
    for query, found, values in zip(got.queries.tolist(), got.negatives, got.negative_similarity, strict=True):
        torch.testing.assert_close(scores[query, found[found >= 0]], values[found >= 0], **tolerance)
        there = found[found >= 0].tolist()
        assert len({*there} - {*answers[query]}) == len(there)


def directions(found, scores, answers):
    """For each direction its ranks, scores and answers."""
    return zip(found, (scores, [list(column) for column in zip(*scores, strict=True)]), answers, strict=True)


@st.composite
def scores_with_ties(draw):
    images, captions = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    row = st.lists(st.integers(-2, 2).map(float), min_size=captions, max_size=captions)
    return draw(st.lists(row, min_size=images, max_size=images))


@settings(max_examples=150)
@given(scores=scores_with_ties(), top=st.integers(0, 16), seed=st.integers(0, 2**32))
def test_equals_plain_loops(scores, top, seed):
    """Ties, several right answers, other ones in each direction, absent ones, and few queries."""
    shape = len(scores), len(scores[0])
    generator = random.Random(seed)
    answers = random_answers(generator, *shape), random_answers(generator, *shape[::-1])
    found = similarity_ranks(torch.tensor(scores), answers, top=top)
    for direction, rows, by_query in directions(found, scores, answers):
        assert_direction_equals(direction, rows, by_query, top, rtol=0, atol=0)


@pytest.fixture
def set_threads():
    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("block", "threads"), [(1, 3), (1, 1), (ranks.BLOCK, 1)])
@pytest.mark.parametrize("captions_per_image", [(1,), (1, 9, 2)])
def test_embeddings_equal_plain_loops(monkeypatch, set_threads, captions_per_image, block, threads):
    """In blocks of any size, in threads that leave those of PyTorch as they were."""
    monkeypatch.setattr(ranks, "BLOCK", block)
    set_threads(threads)
    images, captions, image_of_caption = embeddings(images=67, captions_per_image=captions_per_image)
    found = retrieval_ranks(images, captions, image_of_caption, normalize=False, top=9)
    assert torch.get_num_threads() == threads
    assert found.image_to_text.positive_similarity.dtype == torch.float64
    scores = reference.matrix(images.tolist(), captions.tolist())
    answers = reference.by_image_and_by_caption(image_of_caption.tolist())
    for direction, rows, by_query in directions(found, scores, answers):
        assert_direction_equals(direction, rows, by_query, 9)


SETS = [((4, 512), similarity) for similarity in (MILSimilarity(), SmoothChamferSimilarity())]


@pytest.mark.parametrize(("shape", "similarity"), [*[((width,), None) for width in (3, 17, 512, 513)], *SETS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("blocks", [True, False])
def test_constant_models_have_the_worst_ranks(monkeypatch, blocks, dtype, shape, similarity):
    if blocks:
        monkeypatch.setattr(ranks, "BLOCK", 1)
        monkeypatch.setattr(similarities, "SET_BLOCK", 1)
        monkeypatch.setattr(similarities, "KEPT", 0)
    vector = torch.nn.functional.normalize(torch.randn(shape, dtype=dtype), dim=-1)
    # Less than what products are padded to, as many, one more, and several with a remainder.
    for images, captions in ((1, 7), (7, 7), (13, 1025), (16, 48), (17, 49), (157, 309)):
        image_of_caption = torch.arange(captions) % images
        inputs = (vector.expand(number, *shape).contiguous() for number in (images, captions))
        found = retrieval_ranks(*inputs, image_of_caption, similarity)
        assert torch.equal(found.image_to_text.rank, captions - image_of_caption.bincount() + 1)
        assert (found.text_to_image.rank == images).all()


@pytest.mark.parametrize("similarity", [None, lambda images, captions: images @ captions.T])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_inputs_of_any_type_and_mode(monkeypatch, set_threads, dtype, similarity):
    """All is computed in float32 at least, without gradients, in several threads."""
    monkeypatch.setattr(ranks, "BLOCK", 1)
    set_threads(2)
    images, captions, image_of_caption = embeddings(images=23, dtype=torch.float32)
    images, captions = images.to(dtype), captions.to(dtype)
    expected = retrieval_ranks(images.float(), captions.float(), image_of_caption, normalize=False)
    assert expected.image_to_text.positive_similarity.dtype == torch.float32
    strided = torch.stack([captions, captions], dim=2)[:, :, 0]
    for inference, autocast in ((False, False), (False, True), (True, False)):
        with torch.inference_mode(inference), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = retrieval_ranks(images, strided, image_of_caption, similarity, normalize=False)
            torch.testing.assert_close(found, expected, atol=0, rtol=0)
    for owners in (image_of_caption.int(), image_of_caption.to(torch.uint8)):  # as an index, uint8 would be a mask
        found = retrieval_ranks(images.requires_grad_(), captions, owners, similarity, normalize=False)
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
    mixed = retrieval_ranks(images, captions.double(), image_of_caption, similarity, normalize=False)
    assert mixed.image_to_text.positive_similarity.dtype == torch.float64


def test_memory_is_that_of_a_block(monkeypatch, set_threads):
    """Also where one image has as many captions as all others together."""
    set_threads(1)  # other threads would not be measured
    monkeypatch.setattr(ranks, "BLOCK", 2**15)
    images, captions, image_of_caption = embeddings(600, width=2, captions_per_image=(600, *[1] * 599))
    extra = extra_bytes(lambda: retrieval_ranks(images, captions, image_of_caption, normalize=False))
    assert extra < 0.6 * 8 * 600 * 1199


def test_norms_decide_what_is_compared():
    """By default they must be 1. Zero vectors, and numbers that are not finite, are errors too."""
    images, captions, image_of_caption = embeddings(images=9)
    with pytest.raises(ValueError, match=r"^9 of 9 images have embeddings without unit norm, .* pass normalize=True"):
        retrieval_ranks(images, captions, image_of_caption)
    dots = retrieval_ranks(images, captions, image_of_caption, normalize=False)
    cosines = retrieval_ranks(images, captions, image_of_caption, normalize=True)
    units = [torch.nn.functional.normalize(vectors, dim=1) for vectors in (images, captions)]
    torch.testing.assert_close(dots, similarity_ranks(images @ captions.T, image_of_caption))
    torch.testing.assert_close(cosines, similarity_ranks(units[0] @ units[1].T, image_of_caption))
    torch.testing.assert_close(retrieval_ranks(*units, image_of_caption), cosines)
    assert not torch.equal(dots.text_to_image.rank, cosines.text_to_image.rank)
    for value, message in ((0, r"^1 of 54 captions .* is row 3 of norm 0; "), (torch.nan, "must be finite")):
        wrong = units[1].clone()
        wrong[3] = value
        with pytest.raises(ValueError, match=message):
            retrieval_ranks(units[0], wrong, image_of_caption)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_embeddings_that_half_precision_has_normalized_have_unit_norm(dtype):
    images, captions, image_of_caption = embeddings(images=200, width=512, captions_per_image=(1,))
    halves = [torch.nn.functional.normalize(vectors.to(dtype), dim=1) for vectors in (images, captions)]
    for vectors in (halves, [half.float() for half in halves]):
        retrieval_ranks(*vectors, image_of_caption)


def test_a_similarity_takes_embeddings_of_any_norm():
    """Those of sets normalize their elements; ``normalize=True`` does it before."""
    images, captions = 3 * torch.randn(5, 2, 4), torch.randn(7, 3, 4)
    image_of_caption = torch.arange(7) % 5
    expected = similarity_ranks(MILSimilarity()(images, captions), image_of_caption)
    torch.testing.assert_close(retrieval_ranks(images, captions, image_of_caption, MILSimilarity()), expected)
    raw = MILSimilarity(normalize_embeddings=False)
    found = retrieval_ranks(images, captions, image_of_caption, raw, normalize=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(7, 5), (7, 2, 4), (7,)])
def test_embeddings_that_do_not_fit(shape):
    with pytest.raises(ValueError, match=r"^expected images \(I, D\) and captions \(C, D\), or a similarity of others"):
        retrieval_ranks(torch.ones(7, 4), torch.ones(shape), torch.arange(7), normalize=False)


RIGHT, WRONG = {0: [0]}, ([0, 1, 2, 3, 3], [0, 1, 2, 3, 3, 4], [0, 1, 2, 3, 3, -1], [0, 1, 3, 3, 3, 0])


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        *((torch.tensor(owners), "the image, 0 to 3, of 6 captions, and captions of each") for owners in WRONG),
        (({4: [0]}, RIGHT), "beyond the 4 queries or the 6 candidates"),
        (({-1: [0], 2: [0]}, RIGHT), "beyond the 4 queries or the 6 candidates"),
        (({0: [0], 3: [6]}, RIGHT), "beyond the 4 queries or the 6 candidates"),
        ((RIGHT, {0: [4]}), "beyond the 6 queries or the 4 candidates"),
        ((RIGHT, {0: [1], 1: [-1]}), "each query needs a right answer among the candidates"),
        ((RIGHT, {0: [1], 1: []}), "each query needs a right answer among the candidates"),
    ],
)
def test_bad_answers_are_named(answers, message):
    with pytest.raises(ValueError, match=message):
        similarity_ranks(torch.ones(4, 6), answers)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (3, 3), (0, 1), (2, 5)])
def test_similarities_that_are_not_finite_are_errors(place, value):
    """As the only right answer of a query, as one of several, and as a wrong one."""
    scores = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    scores[place] = value
    with pytest.raises(ValueError, match="similarities must be finite"):
        similarity_ranks(scores, torch.tensor([0, 1, 2, 3, 3, 0]))
