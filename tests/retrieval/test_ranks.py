import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.memory import LargestTensor, extra_bytes
from tests.reference import retrieval as reference
from vl_plugins.distances import mil_similarity, smooth_chamfer_similarity
from vl_plugins.retrieval import (
    DirectionRanks,
    EmbeddingSimilarities,
    GroundTruth,
    MatrixSimilarities,
    MeanSimilarities,
    best_answers,
    precision_at_r,
    retrieval_ranks,
    similarities,
    similarity_ranks,
)

SMALL_TILE = 16 * 48


class Tiles:
    """Similarities of a matrix in tiles of any shape."""

    def __init__(self, matrix, tile_shape):
        self.matrix, self.tile_shape = matrix, tile_shape
        self.shape, self.device = tuple(matrix.shape), matrix.device

    def tile(self, image, caption):
        return self.matrix[image : image + self.tile_shape[0], caption : caption + self.tile_shape[1]].clone()


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
    """Right candidates of some of the queries, a few of which are not among the candidates."""
    answers = {}
    for query in generator.sample(range(queries), generator.randint(1, queries)):
        answers[query] = generator.sample(range(candidates), generator.randint(1, min(4, candidates)))
        if generator.random() < 0.2:
            answers[query].append(-1)
    return answers


def ground_truth(by_image, by_caption, images, captions):
    return GroundTruth.from_ids(range(images), range(captions), by_image, by_caption, allow_absent=True)


def assert_direction_equals(got, scores, answers, negatives, **tolerance):
    """Compare with plain loops; which of equally similar candidates comes first is free."""
    expected = reference.direction(scores, answers, negatives)
    assert tuple(expected) == DirectionRanks._fields
    for name, value in expected.items():
        found = getattr(got, name)
        if "similarity" in name:
            torch.testing.assert_close(found, torch.tensor(value, dtype=found.dtype).view(found.shape), **tolerance)
            continue
        assert found.dtype == torch.int64
        if name not in ("positives", "negatives"):
            assert found.tolist() == value, name

    scores = torch.tensor(scores, dtype=got.positive_similarity.dtype)
    positive_query = got.queries[got.positive_query]
    torch.testing.assert_close(scores[positive_query, got.positives], got.positive_similarity, **tolerance)
    pairs = set(zip(positive_query.tolist(), got.positives.tolist(), strict=True))
    assert len(pairs) == len(got.positives)
    assert pairs == {(query, answer) for query, found in answers.items() for answer in found if answer >= 0}
    assert (got.negatives == -1).tolist() == [[index == -1 for index in row] for row in expected["negatives"]]
    for query, found, values in zip(got.queries.tolist(), got.negatives, got.negative_similarity, strict=True):
        torch.testing.assert_close(scores[query, found[found >= 0]], values[found >= 0], **tolerance)
        there = found[found >= 0].tolist()
        assert len(set(there)) == len(there)
        assert not set(there) & set(answers[query])


def assert_equals_reference(ranks, scores, by_image, by_caption, negatives=0, **tolerance):
    parts = (scores, by_image), ([list(column) for column in zip(*scores, strict=True)], by_caption)
    for direction, (rows, answers) in zip(ranks, parts, strict=True):
        assert_direction_equals(direction, rows, answers, negatives, **tolerance)
        if negatives >= max(map(len, answers.values())):
            for got, expected in zip(precision_at_r(direction), reference.precision_at_r(rows, answers), strict=True):
                assert got.dtype == torch.float64
                assert got.tolist() == pytest.approx(expected, abs=1e-12)


def assert_same(got, expected):
    for got_direction, expected_direction in zip(got, expected, strict=True):
        for name in DirectionRanks._fields:
            assert torch.equal(getattr(got_direction, name), getattr(expected_direction, name)), name


@st.composite
def scores_with_ties(draw):
    images, captions = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    row = st.lists(st.integers(-2, 2).map(float), min_size=captions, max_size=captions)
    return draw(st.lists(row, min_size=images, max_size=images))


tile_shapes = st.tuples(st.integers(1, 7), st.integers(1, 15))


@settings(max_examples=150)
@given(scores=scores_with_ties(), tile_shape=tile_shapes, negatives=st.integers(0, 16), seed=st.integers(0, 2**32))
def test_equals_plain_loops(scores, tile_shape, negatives, seed):
    """Ties, several images per caption, other pairs in each direction, and few queries."""
    shape = len(scores), len(scores[0])
    generator = random.Random(seed)
    answers = random_answers(generator, *shape), random_answers(generator, *shape[::-1])
    tiles = Tiles(torch.tensor(scores), tile_shape)
    ranks = similarity_ranks(tiles, ground_truth(*answers, *shape), negatives=negatives)
    assert_equals_reference(ranks, scores, *answers, negatives, rtol=0, atol=0)

    number = generator.randint(0, negatives)
    for direction, rows, by_query in zip(ranks, (scores, list(zip(*scores, strict=True))), answers, strict=True):
        for query, *found in zip(
            sorted(by_query), *(part.tolist() for part in best_answers(direction, number)), strict=True
        ):
            order = reference.ranking(rows[query], by_query[query])[:number]
            missing = number - len(order)
            index, similarity, is_right = found
            assert similarity == [rows[query][candidate] for candidate in order] + [-torch.inf] * missing
            assert is_right == [candidate in by_query[query] for candidate in order] + [False] * missing
            there = index[: len(order)]
            assert index[len(order) :] == [-1] * missing
            assert len(set(there)) == len(there)
            assert [rows[query][candidate] for candidate in there] == similarity[: len(there)]
            assert [candidate in by_query[query] for candidate in there] == is_right[: len(there)]


@pytest.mark.parametrize("elements", [SMALL_TILE, similarities.CPU_TILE])
@pytest.mark.parametrize("captions_per_image", [(1,), (5,), (1, 9, 2)])
def test_embeddings_equal_plain_loops(monkeypatch, captions_per_image, elements):
    monkeypatch.setattr(similarities, "CPU_TILE", elements)
    images, captions, image_of_caption = embeddings(images=37, captions_per_image=captions_per_image)
    ranks = retrieval_ranks(images, captions, image_of_caption, negatives=9)
    assert ranks.image_to_text.positive_similarity.dtype == torch.float64
    scores = reference.matrix(images.tolist(), captions.tolist())
    assert_equals_reference(ranks, scores, *reference.by_image_and_by_caption(image_of_caption.tolist()), 9)


def test_a_similarity_sees_tiles_of_one_shape_in_full_precision(monkeypatch):
    monkeypatch.setattr(similarities, "CPU_TILE", SMALL_TILE)
    images, captions, _ = embeddings(images=40, captions_per_image=(3,), dtype=torch.float16)
    image_of_caption = torch.arange(40).repeat_interleave(3)
    seen = []

    def similarity(queries, candidates):
        assert (queries @ candidates.T).dtype == torch.float32  # no autocast
        assert not torch.is_grad_enabled()
        seen.append((tuple(queries.shape), tuple(candidates.shape), queries.dtype, candidates.dtype))
        return queries @ candidates.T

    with torch.autocast("cpu", torch.bfloat16):
        ranks = retrieval_ranks(images, captions, image_of_caption, similarity)
    # Of 3 x 3 tiles, 3 hold right answers.
    assert seen == [((16, 8), (48, 8), torch.float32, torch.float32)] * (3 + 9)
    assert_same(ranks, retrieval_ranks(images.float(), captions.float(), image_of_caption))


def test_worked_example_of_ties():
    scores = torch.tensor([[0.8, 0.8, 0.3, 0.8, 0.5], [0.0, 0.0, 0.0, 1.0, 1.0]])
    image_of_caption = torch.tensor([0, 0, 0, 1, 1])
    ranks = similarity_ranks(scores, image_of_caption, negatives=4)
    assert_same(ranks, retrieval_ranks(torch.eye(2), scores.T, image_of_caption, negatives=4))
    assert ranks.image_to_text.rank.tolist() == [2, 1]
    assert ranks.text_to_image.rank.tolist() == [1, 1, 1, 1, 1]
    index, _, is_right = best_answers(ranks.image_to_text, 4)
    assert index[0].tolist() in ([3, 0, 1, 4], [3, 1, 0, 4])
    assert is_right[0].tolist() == [False, True, True, False]
    with pytest.raises(ValueError, match="5 answers need as many negatives, got 4"):
        best_answers(ranks.image_to_text, 5)


def are_worst(ranks, image_of_caption):
    own = image_of_caption.bincount()
    worst = torch.equal(ranks.image_to_text.rank, len(image_of_caption) - own + 1)
    return worst and (ranks.text_to_image.rank == len(own)).all().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [3, 17, 512, 513])
@pytest.mark.parametrize("elements", [SMALL_TILE, similarities.CPU_TILE])
def test_constant_models_have_the_worst_ranks(monkeypatch, elements, width, dtype):
    monkeypatch.setattr(similarities, "CPU_TILE", elements)
    vector = torch.randn(width, generator=torch.Generator().manual_seed(width), dtype=dtype)
    vector = torch.nn.functional.normalize(vector, dim=0)
    # Less than a tile, a tile, one more, and several with a remainder.
    for images, captions in ((1, 7), (7, 7), (13, 1025), (16, 48), (17, 49), (257, 1009), (300, 300)):
        image_of_caption = torch.arange(captions) % images
        inputs = vector.expand(images, -1).contiguous(), vector.expand(captions, -1).contiguous()
        assert are_worst(retrieval_ranks(*inputs, image_of_caption), image_of_caption), (images, captions)


@pytest.mark.parametrize("similarity", [mil_similarity, smooth_chamfer_similarity])
def test_constant_sets_have_the_worst_ranks(similarity):
    vector = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    image_of_caption = torch.arange(96) % 32
    inputs = vector.expand(32, -1, -1).contiguous(), vector.expand(96, -1, -1).contiguous()
    assert are_worst(retrieval_ranks(*inputs, image_of_caption, similarity), image_of_caption)


@pytest.mark.parametrize("width", [17, 512, 513])
def test_copies_of_captions_tie_wherever_they_stand(width):
    """One caption more in the second half of the collection for each in the first, of another image."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(300, width, generator=generator)
    captions = torch.randn(557, width, generator=generator)
    image_of_caption = torch.arange(557) % 300
    image_of_caption = torch.cat([image_of_caption, (image_of_caption.flip(0) + 1) % 300])
    ranks = retrieval_ranks(images, torch.cat([captions, captions.flip(0)]), image_of_caption, negatives=1)
    # The copy of the best right caption is a wrong one, so no image finds its caption first.
    assert (ranks.image_to_text.rank >= 2).all()
    best = ranks.text_to_image.negative_similarity[:, 0].maximum(ranks.text_to_image.positive_similarity)
    assert torch.equal(best[:557], best[557:].flip(0))


def test_similarities_of_right_answers_are_those_of_the_tiles():
    images, captions, image_of_caption = embeddings(images=300, width=513, dtype=torch.float32)
    tiles = EmbeddingSimilarities(images, captions)
    height, width = tiles.tile_shape
    rows = [[tiles.tile(row, column) for column in range(0, len(captions), width)] for row in range(0, 300, height)]
    whole = torch.cat([torch.cat(row, dim=1) for row in rows])
    assert_same(similarity_ranks(tiles, image_of_caption), similarity_ranks(whole, image_of_caption))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_all_is_computed_in_float32_at_least(dtype):
    images, captions, image_of_caption = embeddings(images=23, dtype=torch.float32)
    images, captions = images.to(dtype), captions.to(dtype)
    expected = retrieval_ranks(images.float(), captions.float(), image_of_caption, negatives=3)
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            got = retrieval_ranks(images, captions, image_of_caption, negatives=3)
        assert got.image_to_text.positive_similarity.dtype == torch.float32
        assert_same(got, expected)


def test_mixed_types_non_contiguous_and_small_integers():
    image_embeddings, caption_embeddings, image_of_caption = embeddings(images=9)
    expected = retrieval_ranks(image_embeddings, caption_embeddings, image_of_caption)
    strided = torch.stack([caption_embeddings, caption_embeddings], dim=2)[:, :, 0]
    assert not strided.is_contiguous()
    # As an index, uint8 would be taken for a mask.
    for dtype in (torch.int32, torch.uint8):
        assert_same(retrieval_ranks(image_embeddings, strided, image_of_caption.to(dtype)), expected)
    mixed = retrieval_ranks(image_embeddings.float(), caption_embeddings, image_of_caption)
    assert mixed.image_to_text.positive_similarity.dtype == torch.float64


@pytest.mark.parametrize("similarity", [None, lambda images, captions: images @ captions.T])
def test_inputs_of_any_mode_stay_as_they_are(similarity):
    images, captions, image_of_caption = embeddings(images=9)
    copies = images.clone(), captions.clone()
    expected = retrieval_ranks(images.requires_grad_(), captions, image_of_caption, similarity)
    assert not expected.image_to_text.positive_similarity.requires_grad
    with torch.inference_mode():
        inputs = images * 1, captions * 1, image_of_caption, similarity
        assert_same(retrieval_ranks(*inputs), expected)
    assert_same(retrieval_ranks(*inputs), expected)
    assert torch.equal(images, copies[0])
    assert torch.equal(captions, copies[1])


def test_progress_reaches_its_end(capsys):
    inputs = embeddings(images=10)
    retrieval_ranks(*inputs)
    assert capsys.readouterr() == ("", "")
    retrieval_ranks(*inputs, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "ranking: 100%" in captured.err


@pytest.mark.parametrize("negatives", [0, 3])
def test_memory_is_that_of_a_tile(monkeypatch, negatives):
    monkeypatch.setattr(similarities, "CPU_TILE", 2**13)
    inputs = embeddings(400, width=2, captions_per_image=(5,))
    with LargestTensor() as largest:
        retrieval_ranks(*inputs, negatives=negatives)
    height, width = EmbeddingSimilarities(*inputs[:2]).tile_shape
    # Besides a tile: embeddings and pairs, and what is found so far.
    assert largest.elements <= max(height * width, 2 * 2000 * max(2, negatives)) < 400 * 2000 / 50


def test_a_full_sort_finds_the_same_ranks_in_more_memory():
    images, captions, _ = embeddings(1000, width=512, captions_per_image=(5,))
    image_of_caption = torch.arange(1000).repeat_interleave(5)
    for got, expected in zip(
        retrieval_ranks(images, captions, image_of_caption), reference.full_argsort(images, captions, 5), strict=True
    ):
        assert torch.equal(got.rank, expected)
    ours = extra_bytes(lambda: retrieval_ranks(images, captions, image_of_caption))
    full_sort = extra_bytes(lambda: reference.full_argsort(images, captions, 5))
    assert ours < 0.1 * full_sort, f"{ours / 1e6:.1f} MB, {full_sort / 1e6:.1f} MB"


PAIR = [[0], [0]]


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (torch.tensor([0, 1, 2, 3, 3]), r"one index for each of the 6 captions, got shape \(5,\)"),
        (torch.tensor([0, 1, 2, 3, 3, 4]), r"image_of_caption must lie in \[0, 4\), got 0 to 4"),
        (([[4], [0]], PAIR), r"images of image_to_text must lie in \[0, 4\), got 4 to 4"),
        (([[0, 3], [0, 6]], PAIR), r"captions of image_to_text must lie in \[-1, 6\) .*, got 0 to 6"),
        (([[-1, 2], [0, 0]], PAIR), r"images of image_to_text must lie in \[0, 4\), got -1 to 2"),
        ((PAIR, [[0], [-1]]), r"captions of text_to_image must lie in \[0, 6\), got -1 to -1"),
        ((PAIR, [[-2, 0], [0, 0]]), r"images of text_to_image must lie in \[-1, 4\) .*, got -2 to 0"),
        ((PAIR, [[-1], [0]]), r"images of text_to_image must lie in \[-1, 4\) and not all be -1, got -1 to -1"),
        (([[], []], PAIR), r"images of image_to_text must lie in \[0, 4\), got none"),
    ],
)
def test_bad_ground_truth_is_named(truth, message):
    if not isinstance(truth, torch.Tensor):
        truth = GroundTruth(*(torch.tensor(pairs, dtype=torch.int64) for pairs in truth))
    with pytest.raises(ValueError, match=message):
        similarity_ranks(torch.ones(4, 6), truth)


def test_bad_number_of_negatives_is_named():
    with pytest.raises(ValueError, match="negatives must not be negative, got -1"):
        similarity_ranks(torch.ones(1, 1), torch.tensor([0]), negatives=-1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (3, 3), (0, 1), (2, 5)])
def test_similarities_that_are_not_finite_are_errors(place, value):
    """As the only right answer of a query, as one of several, and as a wrong one."""
    scores = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    scores[place] = value
    image_of_caption = torch.tensor([0, 1, 2, 3, 3, 0])
    matrix = MatrixSimilarities(scores)
    indices = torch.arange(4.0)[:, None], torch.arange(6.0)[:, None]
    computed = EmbeddingSimilarities(*indices, lambda i, c: scores[i.long(), c.long().T])
    for tiles in (Tiles(scores, (1, 1)), Tiles(scores, (3, 4)), matrix, MeanSimilarities([matrix, matrix]), computed):
        message = rf"similarities must be finite; that of image {place[0]} and caption {place[1]} is {value}$"
        with pytest.raises(ValueError, match=message):
            similarity_ranks(tiles, image_of_caption)


@pytest.mark.parametrize("row", [[3e38, 3e38], [-3e38, -3e38], [3e38, -3e38]])
@pytest.mark.parametrize("huge_image", [0, 1])
def test_overflow_is_an_error(row, huge_image):
    # inf, -inf, and inf - inf = NaN; as positives and as negatives.
    images = torch.ones(2, 2)
    images[huge_image] = torch.tensor(row)
    with pytest.raises(ValueError, match=rf"must be finite; that of image {huge_image} and caption 0 is "):
        retrieval_ranks(images, torch.full((2, 2), 10.0), torch.tensor([0, 1]))


def test_a_sum_that_overflows_is_no_error():
    ranks = similarity_ranks(torch.tensor([[3e38, 2e38], [2e38, 3e38]]), torch.tensor([0, 1]))
    assert ranks.image_to_text.rank.tolist() == ranks.text_to_image.rank.tolist() == [1, 1]
