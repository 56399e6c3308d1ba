import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory import LargestTensor, extra_bytes
from tests.reference import retrieval as reference
from vl_plugins.functional import smooth_chamfer_similarity
from vl_plugins.functional.set_similarity import mil_similarity
from vl_plugins.retrieval import (
    DirectionRanks,
    EmbeddingSimilarities,
    GroundTruth,
    MatrixSimilarities,
    MeanSimilarities,
    Positives,
    Ranks,
    best_answers,
    precision_at_r,
    retrieval_ranks,
    similarity_ranks,
)

TILES = [(1, 1), (1, 40), (3, 5), (7, 13), (16, 1), (7, 14), (1000, 1000), None]


def embeddings(images, width=8, seed=0, captions_per_image=(5, 6, 7), dtype=torch.float64):
    """Random embeddings of images with cycling numbers of captions, the captions shuffled."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor([captions_per_image[i % len(captions_per_image)] for i in range(images)])
    image_of_caption = torch.arange(images).repeat_interleave(counts)
    image_of_caption = image_of_caption[torch.randperm(len(image_of_caption), generator=generator)]
    image_embeddings = torch.randn(images, width, generator=generator, dtype=dtype)
    caption_embeddings = torch.randn(len(image_of_caption), width, generator=generator, dtype=dtype)
    return image_embeddings, caption_embeddings + 0.5 * image_embeddings[image_of_caption], image_of_caption


def random_answers(seed, queries, candidates, part, most, absent=0.0):
    """Right candidates of a part of the queries, some of which may not be among the candidates."""
    generator = random.Random(seed)
    chosen = generator.sample(range(queries), max(1, int(part * queries)))
    answers = {}
    for query in chosen:
        answers[query] = generator.sample(range(candidates), generator.randint(1, min(most, candidates)))
        if generator.random() < absent:
            answers[query].append(-1)
    return answers


def general_truth(by_image, by_caption, images, captions):
    """Ground truth through ids: ints for images and strings for captions, neither in the order of the indices."""

    def image_id(index):
        return 10_000 - 7 * index

    def caption_id(index):
        return f"caption {index * 37 % 1009}"

    return GroundTruth.from_ids(
        [image_id(index) for index in range(images)],
        [caption_id(index) for index in range(captions)],
        {image_id(image): [caption_id(caption) for caption in answers] for image, answers in by_image.items()},
        {caption_id(caption): [image_id(image) for image in answers] for caption, answers in by_caption.items()},
        allow_absent=True,
    )


def assert_direction_equals(got, scores, answers, negatives, **tolerance):
    """Compare with plain loops; which of equally similar candidates comes first is free."""
    expected = reference.direction(scores, answers, negatives)
    assert tuple(expected) == DirectionRanks._fields
    for name in ("queries", "rank", "right_answers", "positive_query", "positives", "negatives"):
        assert getattr(got, name).dtype == torch.int64
    for name in ("queries", "rank", "right_answers", "positive_query"):
        assert getattr(got, name).tolist() == expected[name], name
    for name in ("positive_similarity", "hardest_negative_similarity", "negative_similarity"):
        values = getattr(got, name)
        wanted = torch.tensor(expected[name], dtype=values.dtype).view(values.shape)
        torch.testing.assert_close(values, wanted, **tolerance)

    positives = {query: [] for query in expected["queries"]}
    for position, candidate, similarity in zip(
        got.positive_query.tolist(), got.positives.tolist(), got.positive_similarity.tolist(), strict=True
    ):
        query = expected["queries"][position]
        positives[query].append(candidate)
        assert similarity == pytest.approx(scores[query][candidate], rel=1e-5, abs=1e-5)
    assert {query: sorted(found) for query, found in positives.items()} == {
        query: sorted(candidate for candidate in found if candidate >= 0) for query, found in answers.items()
    }
    assert got.negatives.shape == (len(answers), negatives)
    for query, found, similarities in zip(
        expected["queries"], got.negatives.tolist(), got.negative_similarity.tolist(), strict=True
    ):
        there = [candidate for candidate in found if candidate >= 0]
        assert len(there) == min(negatives, len(scores[query]) - len(positives[query]))
        assert found == there + [-1] * (negatives - len(there))
        assert len(set(there)) == len(there)
        assert not set(there) & set(positives[query])
        for candidate, similarity in zip(there, similarities, strict=False):
            assert similarity == pytest.approx(scores[query][candidate], rel=1e-5, abs=1e-5)


def assert_equals_reference(ranks, scores, by_image, by_caption, negatives=0, **tolerance):
    scores_by_caption = [list(column) for column in zip(*scores, strict=True)]
    parts = ((scores, by_image), (scores_by_caption, by_caption))
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


@pytest.mark.parametrize("tile_shape", TILES)
@pytest.mark.parametrize("captions_per_image", [(1,), (5,), (5, 6, 7), (1, 9, 2)])
def test_equals_plain_loops(captions_per_image, tile_shape):
    images, captions, image_of_caption = embeddings(images=7, captions_per_image=captions_per_image)
    scores = reference.matrix(images.tolist(), captions.tolist())
    for negatives in (0, max(captions_per_image), len(captions) + 3):
        ranks = retrieval_ranks(images, captions, image_of_caption, negatives=negatives, tile_shape=tile_shape)
        assert isinstance(ranks, Ranks)
        assert ranks.image_to_text.positive_similarity.dtype == torch.float64
        answers = reference.by_image_and_by_caption(image_of_caption.tolist())
        assert_equals_reference(ranks, scores, *answers, negatives)


@pytest.mark.parametrize("tile_shape", TILES)
@pytest.mark.parametrize("seed", range(3))
def test_general_ground_truth_equals_plain_loops(seed, tile_shape):
    """Several images per caption, other pairs in each direction, and few queries."""
    images, captions, _ = embeddings(images=8, seed=seed, captions_per_image=(2, 3))
    by_image = random_answers(seed, 8, len(captions), part=(0.2, 0.6, 1)[seed], most=6, absent=0.3)
    by_caption = random_answers(seed + 10, len(captions), 8, part=(0.1, 1, 0.4)[seed], most=4, absent=0.3)
    truth = general_truth(by_image, by_caption, 8, len(captions))
    scores = reference.matrix(images.tolist(), captions.tolist())
    for negatives in (0, 7, 60):
        ranks = retrieval_ranks(images, captions, truth, negatives=negatives, tile_shape=tile_shape)
        assert_equals_reference(ranks, scores, by_image, by_caption, negatives)
        matrix = MatrixSimilarities(images @ captions.T, tile_shape=tile_shape)
        assert_equals_reference(
            similarity_ranks(matrix, truth, negatives=negatives), scores, by_image, by_caption, negatives
        )


def test_the_same_pairs_with_few_queries_in_both_directions():
    images, captions, _ = embeddings(images=11, captions_per_image=(2, 3))
    by_image = {3: [1, 5], 4: [5, 0], 9: [20]}
    by_caption = {1: [3], 5: [3, 4], 0: [4], 20: [9]}
    truth = GroundTruth.from_ids(range(11), range(len(captions)), by_image)
    scores = reference.matrix(images.tolist(), captions.tolist())
    for tile_shape in TILES:
        ranks = retrieval_ranks(images, captions, truth, negatives=3, tile_shape=tile_shape)
        assert_equals_reference(ranks, scores, by_image, by_caption, 3)


def closest_pair(left, right):
    """The similarity of two sets that is easiest to write down: the largest product of an element of each."""
    return max(reference.dot(x, y) for x in left for y in right)


@pytest.mark.parametrize("tile_shape", [(2, 3), (7, 30), None])
def test_sets_equal_plain_loops(tile_shape):
    images, captions, image_of_caption = embeddings(images=13, width=12)
    images, captions = images.view(-1, 3, 4), captions.view(-1, 3, 4)[:, :2]
    scores = reference.matrix(images.tolist(), captions.tolist(), closest_pair)
    similarity = partial(mil_similarity, normalize=False)
    ranks = retrieval_ranks(images, captions, image_of_caption, similarity, negatives=7, tile_shape=tile_shape)
    assert_equals_reference(ranks, scores, *reference.by_image_and_by_caption(image_of_caption.tolist()), 7)
    # Selected queries keep the similarity.
    by_image = random_answers(0, 13, len(captions), part=0.3, most=6)
    by_caption = random_answers(1, len(captions), 13, part=0.3, most=6)
    truth = general_truth(by_image, by_caption, 13, len(captions))
    ranks = retrieval_ranks(images, captions, truth, similarity, negatives=7, tile_shape=tile_shape)
    assert_equals_reference(ranks, scores, by_image, by_caption, 7)


def test_a_similarity_need_not_be_symmetric():
    def similarity(images, captions):
        return (images[:, None, :2] - captions[:, 2:]).abs().sum(dim=2).neg() + images[:, None, 0]

    images, captions, image_of_caption = embeddings(images=13, width=4)

    def of_a_pair(image, caption):
        return image[0] - sum(abs(a - b) for a, b in zip(image[:2], caption[2:], strict=True))

    scores = reference.matrix(images.tolist(), captions.tolist(), of_a_pair)
    ranks = retrieval_ranks(images, captions, image_of_caption, similarity, tile_shape=(5, 8))
    assert_equals_reference(ranks, scores, *reference.by_image_and_by_caption(image_of_caption.tolist()))


def test_a_similarity_sees_tiles_of_one_shape_in_full_precision():
    images, captions, _ = embeddings(images=10, captions_per_image=(3,), dtype=torch.float16)
    image_of_caption = torch.arange(10).repeat_interleave(3)
    seen = []

    def similarity(queries, candidates):
        assert (queries @ candidates.T).dtype == torch.float32  # no autocast
        assert not torch.is_grad_enabled()
        seen.append((tuple(queries.shape), tuple(candidates.shape), queries.dtype, candidates.dtype))
        return queries @ candidates.T

    with torch.autocast("cpu", torch.bfloat16):
        ranks = retrieval_ranks(images, captions, image_of_caption, similarity, tile_shape=(4, 11))
    # Of 3 x 3 tiles, 5 hold right answers: images 0-3 have captions 0-11, images 4-7 12-23, images 8-9 24-29.
    assert seen == [((4, 8), (11, 8), torch.float32, torch.float32)] * (5 + 9)
    expected = retrieval_ranks(images, captions, image_of_caption)
    for got_direction, expected_direction in zip(ranks, expected, strict=True):
        for got, values in zip(got_direction, expected_direction, strict=True):
            torch.testing.assert_close(got, values)


def test_a_similarity_may_return_its_own_memory():
    stored = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    copy = stored.clone()
    image_of_caption = torch.tensor([0, 1, 2, 3, 3, 0])
    answers = reference.by_image_and_by_caption(image_of_caption.tolist())
    for _ in range(2):
        ranks = retrieval_ranks(torch.ones(4, 1), torch.ones(6, 1), image_of_caption, lambda i, c: stored, negatives=2)
        assert_equals_reference(ranks, stored.tolist(), *answers, 2)
    assert torch.equal(stored, copy)
    ranks = retrieval_ranks(
        torch.ones(4, 1), torch.ones(6, 1), image_of_caption, lambda i, c: torch.zeros(1, 1).expand(4, 6)
    )
    assert_equals_reference(ranks, [[0.0] * 6] * 4, *answers)


@st.composite
def integer_embeddings(draw):
    """Small integers: many ties, and products that are exact in float32."""
    images = draw(st.integers(2, 6))
    more_captions = draw(st.lists(st.integers(0, images - 1), max_size=8))
    image_of_caption = draw(st.permutations([*range(images), *more_captions]))
    row = st.lists(st.integers(-1, 1).map(float), min_size=2, max_size=2)
    captions = len(image_of_caption)
    return (
        torch.tensor(draw(st.lists(row, min_size=images, max_size=images))),
        torch.tensor(draw(st.lists(row, min_size=captions, max_size=captions))),
        torch.tensor(image_of_caption),
    )


tile_shapes = st.none() | st.tuples(st.integers(1, 7), st.integers(1, 15))


@settings(deadline=None, max_examples=40)
@given(inputs=integer_embeddings(), tile_shape=tile_shapes, negatives=st.integers(0, 16))
def test_equals_plain_loops_with_ties(inputs, tile_shape, negatives):
    images, captions, image_of_caption = inputs
    ranks = retrieval_ranks(*inputs, tile_shape=tile_shape, negatives=negatives)
    scores = reference.matrix(images.tolist(), captions.tolist())
    answers = reference.by_image_and_by_caption(image_of_caption.tolist())
    assert_equals_reference(ranks, scores, *answers, negatives, rtol=0, atol=0)


@settings(deadline=None, max_examples=40)
@given(inputs=integer_embeddings(), tile_shape=tile_shapes, negatives=st.integers(0, 16), seed=st.integers(0, 2**32))
def test_general_ground_truth_equals_plain_loops_with_ties(inputs, tile_shape, negatives, seed):
    images, captions, _ = inputs
    generator = random.Random(seed)
    by_image, by_caption = (
        random_answers(seed + number, *sizes, part=generator.random(), most=4, absent=0.2)
        for number, sizes in enumerate(((len(images), len(captions)), (len(captions), len(images))))
    )
    truth = general_truth(by_image, by_caption, len(images), len(captions))
    ranks = retrieval_ranks(images, captions, truth, tile_shape=tile_shape, negatives=negatives)
    scores = reference.matrix(images.tolist(), captions.tolist())
    assert_equals_reference(ranks, scores, by_image, by_caption, negatives, rtol=0, atol=0)


@settings(deadline=None, max_examples=40)
@given(inputs=integer_embeddings(), tile_shape=tile_shapes, seed=st.integers(0, 2**32))
def test_best_answers_equal_a_sorted_list(inputs, tile_shape, seed):
    images, captions, image_of_caption = inputs
    by_image = random_answers(seed, len(images), len(captions), part=0.7, most=4)
    by_caption = reference.by_image_and_by_caption(image_of_caption.tolist())[1]
    truth = general_truth(by_image, by_caption, len(images), len(captions))
    number = random.Random(seed).randint(1, 16)
    ranks = retrieval_ranks(images, captions, truth, tile_shape=tile_shape, negatives=number + seed % 2)
    scores = reference.matrix(images.tolist(), captions.tolist())
    scores_by_caption = [list(column) for column in zip(*scores, strict=True)]
    for direction, rows, answers in ((ranks[0], scores, by_image), (ranks[1], scores_by_caption, by_caption)):
        index, similarity, is_right = best_answers(direction, number)
        assert index.shape == similarity.shape == is_right.shape == (len(answers), number)
        for query, *got in zip(sorted(answers), index.tolist(), similarity.tolist(), is_right.tolist(), strict=True):
            order = reference.ranking(rows[query], answers[query])[:number]
            missing = number - len(order)
            assert got[1] == [rows[query][candidate] for candidate in order] + [-torch.inf] * missing
            assert got[2] == [candidate in answers[query] for candidate in order] + [False] * missing
            there = got[0][: len(order)]
            assert got[0][len(order) :] == [-1] * missing
            assert len(set(there)) == len(there)
            assert [rows[query][candidate] for candidate in there] == got[1][: len(there)]
            assert [candidate in answers[query] for candidate in there] == got[2][: len(there)]


def test_best_answers_by_hand():
    scores = torch.tensor([[0.8, 0.8, 0.3, 0.8, 0.5], [0.0, 0.0, 0.0, 1.0, 1.0]])
    ranks = similarity_ranks(scores, torch.tensor([0, 0, 0, 1, 1]), negatives=4)
    index, similarity, is_right = best_answers(ranks.image_to_text, 4)
    assert index[0].tolist() in ([3, 0, 1, 4], [3, 1, 0, 4])
    torch.testing.assert_close(similarity[0], torch.tensor([0.8, 0.8, 0.8, 0.5]))
    assert is_right[0].tolist() == [False, True, True, False]
    index, similarity, is_right = best_answers(ranks.text_to_image, 3)
    assert index[3].tolist() == [1, 0, -1]
    assert similarity[3].tolist() == [1, scores[0, 3].item(), -torch.inf]
    assert is_right[3].tolist() == [True, False, False]
    with pytest.raises(ValueError, match="5 answers need as many negatives, got 4"):
        best_answers(ranks.image_to_text, 5)


@settings(deadline=None, max_examples=40)
@given(inputs=integer_embeddings(), seed=st.integers(0, 1000), tile_shape=tile_shapes)
def test_permuting_captions_permutes_their_ranks(inputs, seed, tile_shape):
    image_embeddings, caption_embeddings, image_of_caption = inputs
    order = torch.randperm(len(image_of_caption), generator=torch.Generator().manual_seed(seed))
    ranks = retrieval_ranks(*inputs, negatives=2, tile_shape=tile_shape)
    permuted = retrieval_ranks(
        image_embeddings, caption_embeddings[order], image_of_caption[order], negatives=2, tile_shape=tile_shape
    )
    for name in ("rank", "positive_query", "positive_similarity", "hardest_negative_similarity", "negative_similarity"):
        assert torch.equal(getattr(permuted[0], name), getattr(ranks[0], name))
    # A caption has one positive here.
    for name in ("rank", "positives", "positive_similarity", "hardest_negative_similarity", "negative_similarity"):
        assert torch.equal(getattr(permuted[1], name), getattr(ranks[1], name)[order])


@settings(deadline=None, max_examples=40)
@given(inputs=integer_embeddings(), seed=st.integers(0, 1000), tile_shape=tile_shapes)
def test_permuting_images_permutes_their_ranks(inputs, seed, tile_shape):
    image_embeddings, caption_embeddings, image_of_caption = inputs
    order = torch.randperm(len(image_embeddings), generator=torch.Generator().manual_seed(seed))
    ranks = retrieval_ranks(*inputs, negatives=2, tile_shape=tile_shape)
    permuted = retrieval_ranks(
        image_embeddings[order],
        caption_embeddings,
        order.argsort()[image_of_caption],
        negatives=2,
        tile_shape=tile_shape,
    )
    for name in ("rank", "hardest_negative_similarity", "negative_similarity"):
        assert torch.equal(getattr(permuted[0], name), getattr(ranks[0], name)[order])
    for name in ("rank", "positive_similarity", "hardest_negative_similarity", "negative_similarity"):
        assert torch.equal(getattr(permuted[1], name), getattr(ranks[1], name))


def test_swapping_images_and_captions_swaps_the_directions():
    images, captions, _ = embeddings(images=19, captions_per_image=(2, 3))
    by_image = random_answers(0, 19, len(captions), part=0.6, most=6)
    by_caption = random_answers(1, len(captions), 19, part=0.4, most=4)
    truth = general_truth(by_image, by_caption, 19, len(captions))
    swapped = GroundTruth(*(Positives(part.captions, part.images) for part in reversed(truth)))
    ranks = retrieval_ranks(images, captions, truth, negatives=6, tile_shape=(5, 9))
    backward = retrieval_ranks(captions, images, swapped, negatives=6, tile_shape=(9, 5))
    for got, expected in zip(reversed(backward), ranks, strict=True):
        for name in ("queries", "rank", "right_answers", "positive_query", "positives", "negatives"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_perfect_model():
    image_of_caption = torch.arange(6).repeat_interleave(5)
    ranks = retrieval_ranks(torch.eye(6), torch.eye(6)[image_of_caption], image_of_caption)
    for direction in ranks:
        assert (direction.rank == 1).all()
        assert (direction.positive_similarity == 1).all()
        assert (direction.hardest_negative_similarity == 0).all()


def test_reversed_and_constant_models_have_the_worst_ranks():
    image_of_caption = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2])
    for image_embeddings in (-torch.eye(3), torch.zeros(3, 3), torch.ones(3, 3)):
        ranks = retrieval_ranks(image_embeddings, torch.eye(3)[image_of_caption], image_of_caption)
        # 18 captions, of which 5, 6 and 7 are the images' own and never count against them.
        assert ranks.image_to_text.rank.tolist() == [14, 13, 12]
        assert ranks.text_to_image.rank.tolist() == [3] * 18


def test_model_that_knows_one_caption_per_image():
    image_of_caption = torch.arange(10).repeat_interleave(5)
    caption_embeddings = torch.zeros(50, 10)
    caption_embeddings[::5] = torch.eye(10)
    ranks = retrieval_ranks(torch.eye(10), caption_embeddings, image_of_caption)
    assert (ranks.image_to_text.rank == 1).all()
    assert ranks.text_to_image.rank.tolist() == [1, 10, 10, 10, 10] * 10


def test_random_model_scores_chance():
    generator = torch.Generator().manual_seed(0)
    images, captions = 200, 1000
    ranks = retrieval_ranks(
        torch.randn(images, 16, generator=generator),
        torch.randn(captions, 16, generator=generator),
        torch.arange(captions) % images,
    )
    # Means of uniform ranks: of one among 200, and of the first of 5 among 1,000 with the other four left out.
    assert ranks.text_to_image.rank.double().mean().item() == pytest.approx(100.5, rel=0.1)
    assert ranks.image_to_text.rank.double().mean().item() == pytest.approx(1 + 995 / 6, rel=0.15)


def test_worked_example_of_ties():
    scores = torch.tensor([[0.8, 0.8, 0.3, 0.8, 0.5], [0.0, 0.0, 0.0, 1.0, 1.0]])
    image_of_caption = torch.tensor([0, 0, 0, 1, 1])
    for ranks in (
        retrieval_ranks(torch.eye(2), scores.T, image_of_caption),
        similarity_ranks(scores, image_of_caption),
    ):
        assert ranks.image_to_text.rank.tolist() == [2, 1]
        assert ranks.text_to_image.rank.tolist() == [1, 1, 1, 1, 1]


# Numbers of images and of captions: less than a tile, a tile, one more, and several with a crooked rest.
COUNTS = [(1, 7), (3, 5), (7, 7), (13, 1025), (256, 512), (257, 1009), (259, 1024), (300, 300)]


def constant_model(images, captions, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(images + captions + width)
    vector = torch.nn.functional.normalize(torch.randn(width, generator=generator, dtype=dtype), dim=0)
    image_of_caption = torch.arange(captions) % images
    return vector.expand(images, -1).contiguous(), vector.expand(captions, -1).contiguous(), image_of_caption


def are_worst(ranks, image_of_caption):
    own = image_of_caption.bincount()
    worst = torch.equal(ranks.image_to_text.rank, len(image_of_caption) - own + 1)
    return worst and (ranks.text_to_image.rank == len(own)).all().item()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("width", [3, 17, 512, 513, 768])
def test_constant_models_have_the_worst_ranks(width, counts):
    for dtype in (torch.float32, torch.float64):
        *inputs, image_of_caption = constant_model(*counts, width, dtype)
        assert are_worst(retrieval_ranks(*inputs, image_of_caption), image_of_caption), dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tile_shape", [(1, 1), (1, 9), (5, 1), (4, 6), (7, 13), (16, 16), (20, 33)])
@pytest.mark.parametrize("width", [17, 513, 768])
def test_constant_models_in_small_tiles_have_the_worst_ranks(width, tile_shape, dtype):
    *inputs, image_of_caption = constant_model(11, 23, width, dtype)
    assert are_worst(retrieval_ranks(*inputs, image_of_caption, tile_shape=tile_shape), image_of_caption)


class ProductsAsTheyCome:
    """Similarities of embeddings by products of whatever is in a tile, the last ones smaller."""

    def __init__(self, images, captions, tile_shape):
        self.images, self.captions, self.tile_shape = images, captions, tile_shape
        self.shape, self.device = (len(images), len(captions)), images.device

    def tile(self, image, caption):
        height, width = self.tile_shape
        return self.images[image : image + height] @ self.captions[caption : caption + width].T


def test_constant_models_need_products_of_one_shape():
    """The tests above can fail: products as they come separate equal embeddings."""
    separated = 0
    for counts in COUNTS:
        for width in (17, 512, 513, 768):
            *inputs, image_of_caption = constant_model(*counts, width)
            similarities = ProductsAsTheyCome(*inputs, tile_shape=(256, 1024))
            separated += not are_worst(similarity_ranks(similarities, image_of_caption), image_of_caption)
    if not separated:
        pytest.skip("matrix products of this machine round alike in all shapes")


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
    both = torch.cat([captions, captions.flip(0)])
    image_of_caption = torch.arange(557) % 300
    image_of_caption = torch.cat([image_of_caption, (image_of_caption.flip(0) + 1) % 300])
    ranks = retrieval_ranks(images, both, image_of_caption, negatives=1)
    # The copy of the best right caption is a wrong one, so no image finds its caption first.
    assert (ranks.image_to_text.rank >= 2).all()
    assert torch.equal(
        ranks.text_to_image.negative_similarity[:557, 0].maximum(ranks.text_to_image.positive_similarity[:557]),
        ranks.text_to_image.negative_similarity[557:, 0].maximum(ranks.text_to_image.positive_similarity[557:]).flip(0),
    )


def test_copy_of_the_positive_is_never_separated_from_it_by_rounding():
    # A positive computed on its own would differ from its copies, entries of a block, in the last bit.
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 512, generator=generator)
    captions = torch.randn(1, 512, generator=generator).expand(64, -1).contiguous()
    for tile_shape in ((16, 16), (64, 64), (5, 64), None):
        ranks = retrieval_ranks(images, captions, torch.arange(64), tile_shape=tile_shape)
        assert (ranks.image_to_text.rank == 64).all()
        assert torch.equal(ranks.image_to_text.positive_similarity, ranks.image_to_text.hardest_negative_similarity)


def test_similarities_of_right_answers_are_those_of_the_tiles():
    images, captions, image_of_caption = embeddings(images=300, width=513, dtype=torch.float32)
    similarities = EmbeddingSimilarities(images, captions)
    height, width = similarities.tile_shape
    whole = torch.cat(
        [
            torch.cat([similarities.tile(row, column) for column in range(0, len(captions), width)], dim=1)
            for row in range(0, 300, height)
        ]
    )
    ranks = similarity_ranks(similarities, image_of_caption)
    for direction, matrix in zip(ranks, (whole, whole.T), strict=True):
        queries = direction.queries[direction.positive_query]
        assert torch.equal(direction.positive_similarity, matrix[queries, direction.positives])
    assert_same(ranks, similarity_ranks(whole, image_of_caption))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    image_embeddings, caption_embeddings, image_of_caption = embeddings(images=23, dtype=torch.float32)
    halves = image_embeddings.to(dtype), caption_embeddings.to(dtype)
    expected = retrieval_ranks(*(half.float() for half in halves), image_of_caption, negatives=3)
    for got in (
        retrieval_ranks(*halves, image_of_caption, negatives=3),
        under_autocast(*halves, image_of_caption, negatives=3),
    ):
        assert got.image_to_text.positive_similarity.dtype == torch.float32
        assert_same(got, expected)


def under_autocast(*inputs, **options):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return retrieval_ranks(*inputs, **options)


def test_autocast_does_not_lower_float32():
    inputs = embeddings(images=23, dtype=torch.float32)
    assert_same(under_autocast(*inputs), retrieval_ranks(*inputs))


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


def test_inputs_stay_untouched_and_no_graph_is_kept():
    images, captions, image_of_caption = embeddings(images=9)
    matrix = images @ captions.T
    inputs = (images, captions, image_of_caption, matrix)
    copies = [tensor.clone() for tensor in inputs]
    images.requires_grad_()
    matrix.requires_grad_()
    for ranks in (retrieval_ranks(images, captions, image_of_caption), similarity_ranks(matrix, image_of_caption)):
        assert not ranks.image_to_text.positive_similarity.requires_grad
    for tensor, copy in zip(inputs, copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("similarity", [None, lambda images, captions: images @ captions.T])
def test_embeddings_from_inference_mode(similarity):
    image_embeddings, caption_embeddings, image_of_caption = embeddings(images=9)
    with torch.inference_mode():
        images, captions = image_embeddings * 1, caption_embeddings * 1
        inside = retrieval_ranks(images, captions, image_of_caption, similarity, tile_shape=(4, 9))
    expected = retrieval_ranks(image_embeddings, caption_embeddings, image_of_caption, tile_shape=(4, 9))
    outside = retrieval_ranks(images, captions, image_of_caption, similarity, tile_shape=(4, 9))
    for ranks in (inside, outside):
        assert torch.equal(ranks.image_to_text.rank, expected.image_to_text.rank)


def test_single_image_has_no_negative():
    ranks = retrieval_ranks(torch.ones(1, 2), torch.ones(3, 2), torch.zeros(3, dtype=torch.int64), negatives=2)
    assert ranks.image_to_text.rank.tolist() == [1]
    assert ranks.text_to_image.rank.tolist() == [1, 1, 1]
    assert ranks.image_to_text.hardest_negative_similarity.tolist() == [-torch.inf]
    assert ranks.image_to_text.negatives.tolist() == [[-1, -1]]
    assert ranks.image_to_text.negative_similarity.tolist() == [[-torch.inf, -torch.inf]]


def test_progress_reaches_its_end(capsys):
    inputs = embeddings(images=10)
    retrieval_ranks(*inputs, tile_shape=(4, 20))
    assert capsys.readouterr() == ("", "")
    retrieval_ranks(*inputs, tile_shape=(4, 20), progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "ranking: 100%" in captured.err


def test_a_mean_of_matrices_is_ranked():
    images, captions, _ = embeddings(images=13)
    matrices = [images @ captions.T, (images @ captions.T).flip(0)]
    by_image = random_answers(0, 13, len(captions), part=0.3, most=6)
    truth = general_truth(by_image, {3: [1, 2]}, 13, len(captions))
    mean = MeanSimilarities([MatrixSimilarities(matrix, tile_shape=(5, 9)) for matrix in matrices])
    ranks = similarity_ranks(mean, truth, negatives=6)
    scores = ((matrices[0] + matrices[1]) / 2).tolist()
    assert_equals_reference(ranks, scores, by_image, {3: [1, 2]}, 6)


@pytest.mark.parametrize("tile_shape", [(40, 200), (64, 512), (300, 3000), None])
@pytest.mark.parametrize("negatives", [0, 3])
def test_memory_is_that_of_a_tile(tile_shape, negatives):
    images, captions = 400, 2000
    inputs = embeddings(images, width=2, captions_per_image=(5,))
    with LargestTensor() as largest:
        retrieval_ranks(*inputs, tile_shape=tile_shape, negatives=negatives)
    height, width = tile_shape or EmbeddingSimilarities(*inputs[:2]).tile_shape
    tile = (height + -height % 16) * (width + -width % 48)
    # Besides a tile: embeddings, and what is found so far beside what a tile adds.
    assert largest.elements <= max(tile, 2 * captions * max(2, negatives), 2 * width * negatives)
    assert largest.elements < images * captions or tile > images * captions


def test_memory_beside_a_full_sort():
    images, captions, _ = embeddings(1000, width=512, captions_per_image=(5,), dtype=torch.float32)
    image_of_caption = torch.arange(1000).repeat_interleave(5)
    of_ours = extra_bytes(lambda: retrieval_ranks(images, captions, image_of_caption))
    of_a_sort = extra_bytes(lambda: reference.full_argsort(images, captions, 5))
    assert of_ours < 0.05 * of_a_sort, f"{of_ours / 1e6:.1f} MB, {of_a_sort / 1e6:.1f} MB"


def test_a_full_sort_finds_the_same_ranks():
    images, captions, _ = embeddings(40, captions_per_image=(5,))
    image_of_caption = torch.arange(40).repeat_interleave(5)
    ranks = retrieval_ranks(images, captions, image_of_caption)
    by_image, by_caption = reference.full_argsort(images, captions, 5)
    assert torch.equal(ranks.image_to_text.rank, by_image)
    assert torch.equal(ranks.text_to_image.rank, by_caption)


def bad(index, column, value):
    """Valid arguments of which one entry is replaced."""
    arguments = [torch.ones(4, 3), torch.ones(6, 3), torch.tensor([0, 1, 2, 3, 3, 0])]
    arguments[index][column] = value
    return arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(4), torch.ones(6, 3), torch.zeros(6)), r"image_embeddings must be .* \(rows, D\).* shape \(4,\)"),
        ((torch.ones(4, 3), torch.ones(6, 3, 1), torch.zeros(6)), r"caption_embeddings must be .* shape \(6, 3, 1\)"),
        ((torch.ones(4, 3), torch.ones(0, 3), torch.zeros(0)), r"caption_embeddings must be .* at least one row"),
        ((torch.ones(4, 3).int(), torch.ones(6, 3), torch.zeros(6)), r"image_embeddings must be .* got torch.int32"),
        ((torch.ones(4, 3), torch.ones(6, 2), torch.zeros(6)), r"same width D, got shapes \(4, 3\) and \(6, 2\)"),
        ((torch.ones(4, 3), torch.ones(6, 3), torch.zeros(5).long()), r"image_of_caption .* shape \(6,\).* \(5,\)"),
        ((torch.ones(4, 3), torch.ones(6, 3), torch.zeros(6)), r"image_of_caption must be an integer .*float32"),
        ((torch.ones(4, 3), torch.ones(6, 3), torch.zeros(6).bool()), r"image_of_caption must be an integer .*bool"),
        (bad(2, 4, 4), r"image_of_caption must lie in \[0, 4\).* 1 of 6 rows, first row 4: 4"),
        (bad(2, 1, -1), r"image_of_caption must lie in \[0, 4\).* 1 of 6 rows, first row 1: -1"),
        (
            bad(2, 2, 0),
            r"image_of_caption must give every image at least one caption; none for 1 of 4 rows, first row 2",
        ),
        (
            bad(0, slice(1, 3), torch.nan),
            r"image_embeddings must be finite; NaN or infinity in 2 of 4 rows, first row 1",
        ),
        (bad(1, 5, -torch.inf), r"caption_embeddings must be finite; NaN or infinity in 1 of 6 rows, first row 5"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        retrieval_ranks(*arguments)


@pytest.mark.parametrize("tile_shape", [(0, 4), (4, 0), (-1, 4), (4,), (4, 4, 4)])
def test_bad_tile_shape_is_named(tile_shape):
    with pytest.raises(ValueError, match=r"tile_shape must be two positive numbers, got \(.*\)"):
        retrieval_ranks(*bad(2, 0, 0), tile_shape=tile_shape)


def test_bad_number_of_negatives_is_named():
    with pytest.raises(ValueError, match="negatives must not be negative, got -1"):
        retrieval_ranks(*bad(2, 0, 0), negatives=-1)


def pairs(images, captions):
    return Positives(torch.tensor(images, dtype=torch.int64), torch.tensor(captions, dtype=torch.int64))


@pytest.mark.parametrize(
    ("image_to_text", "text_to_image", "message"),
    [
        (([4], [0]), ([0], [0]), r"image_to_text must .* with images in \[0, 4\), got 4 to 4"),
        (([0, 3], [0, 6]), ([0], [0]), r"image_to_text must .* with captions in \[-1, 6\), got 0 to 6"),
        (([-1, 2], [0, 0]), ([0], [0]), r"image_to_text must .* with images in \[0, 4\), got -1 to 2"),
        (([0], [0]), ([0], [-1]), r"text_to_image must .* with captions in \[0, 6\), got -1 to -1"),
        (([0], [0]), ([-2], [0]), r"text_to_image must .* with images in \[-1, 4\), got -2 to -2"),
        (([], []), ([0], [0]), r"image_to_text must hold at least one pair, .* got none"),
    ],
)
def test_bad_ground_truth_is_named(image_to_text, text_to_image, message):
    truth = GroundTruth(pairs(*image_to_text), pairs(*text_to_image))
    with pytest.raises(ValueError, match=message):
        similarity_ranks(torch.ones(4, 6), truth)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (3, 3), (0, 1), (2, 5)])
def test_similarities_that_are_not_finite_are_refused(place, value):
    """As the only right answer of a query, as one of several, and as a wrong one."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(4, 6, generator=generator)
    scores[place] = value
    message = rf"similarities must be finite; that of image {place[0]} and caption {place[1]} is {value}$"
    image_of_caption = torch.tensor([0, 1, 2, 3, 3, 0])
    for tile_shape in ((1, 1), (3, 4), None):
        matrix = MatrixSimilarities(scores, tile_shape=tile_shape)
        with pytest.raises(ValueError, match=message):
            similarity_ranks(matrix, image_of_caption)
        with pytest.raises(ValueError, match=message):
            similarity_ranks(MeanSimilarities([matrix, matrix]), image_of_caption)
        # Where queries are selected, the indices are still those of the whole.
        truth = GroundTruth(pairs([place[0]], [5 - place[1]]), pairs([3 - place[0]], [place[1]]))
        with pytest.raises(ValueError, match=message):
            similarity_ranks(matrix, truth)
        with pytest.raises(ValueError, match=message):
            similarity_ranks(matrix, truth._replace(image_to_text=pairs([1], [2])))
        with pytest.raises(ValueError, match=message):
            retrieval_ranks(torch.ones(4, 1), torch.ones(6, 1), image_of_caption, lambda i, c: scores)


@pytest.mark.parametrize("row", [[3e38, 3e38], [-3e38, -3e38], [3e38, -3e38]])
@pytest.mark.parametrize("huge_image", [0, 1])
def test_overflow_never_gives_good_ranks(row, huge_image):
    # inf, -inf, and inf - inf = NaN; as positives and as negatives.
    image_embeddings = torch.ones(2, 2)
    image_embeddings[huge_image] = torch.tensor(row)
    caption_embeddings = torch.tensor([[10.0, 10.0], [10.0, 10.0]])
    with pytest.raises(ValueError, match=rf"must be finite; that of image {huge_image} and caption 0 is "):
        retrieval_ranks(image_embeddings, caption_embeddings, torch.tensor([0, 1]))


@pytest.mark.parametrize("negative", [[10.0, 10.0], [10.0, -10.0]])
def test_overflow_of_negatives_alone(negative):
    # inf would push the positive down by right; NaN would not count at all.
    image_embeddings = torch.tensor([[3e38, 3e38], [1.0, 1.0]])
    caption_embeddings = torch.tensor([[0.0, 0.0], negative])
    with pytest.raises(ValueError, match="similarities must be finite; that of image 0 and caption 1"):
        retrieval_ranks(image_embeddings, caption_embeddings, torch.tensor([0, 1]))


def test_a_sum_that_overflows_is_no_error():
    ranks = similarity_ranks(torch.tensor([[3e38, 2e38], [2e38, 3e38]]), torch.tensor([0, 1]))
    assert ranks.image_to_text.rank.tolist() == ranks.text_to_image.rank.tolist() == [1, 1]
