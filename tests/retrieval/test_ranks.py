from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory import LargestTensor
from tests.reference import retrieval as reference
from vl_plugins.functional.set_similarity import mil_similarity
from vl_plugins.retrieval import Ranks, retrieval_ranks

RANK_FIELDS = ("image_to_text", "text_to_image")


def embeddings(images, width=8, seed=0, captions_per_image=(5, 6, 7), dtype=torch.float64):
    """Random embeddings of images with cycling numbers of captions, the captions shuffled."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor([captions_per_image[i % len(captions_per_image)] for i in range(images)])
    image_of_caption = torch.arange(images).repeat_interleave(counts)
    image_of_caption = image_of_caption[torch.randperm(len(image_of_caption), generator=generator)]
    image_embeddings = torch.randn(images, width, generator=generator, dtype=dtype)
    caption_embeddings = torch.randn(len(image_of_caption), width, generator=generator, dtype=dtype)
    return image_embeddings, caption_embeddings + 0.5 * image_embeddings[image_of_caption], image_of_caption


def assert_equals_reference(
    ranks, image_embeddings, caption_embeddings, image_of_caption, similarity=reference.dot, **tolerance
):
    expected = reference.retrieval(
        image_embeddings.tolist(), caption_embeddings.tolist(), image_of_caption.tolist(), similarity
    )
    assert set(expected) == set(Ranks._fields)
    for name, values in expected.items():
        got = getattr(ranks, name)
        torch.testing.assert_close(got, torch.tensor(values, dtype=got.dtype), **tolerance)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 1000])
@pytest.mark.parametrize("captions_per_image", [(1,), (5,), (5, 6, 7)])
def test_equals_plain_loops(captions_per_image, chunk_size):
    inputs = embeddings(images=23, captions_per_image=captions_per_image)
    ranks = retrieval_ranks(*inputs, chunk_size=chunk_size)
    assert ranks.image_to_text.dtype == ranks.text_to_image.dtype == torch.int64
    assert ranks.positive_similarity.dtype == torch.float64
    assert_equals_reference(ranks, *inputs)


def closest_pair(left, right):
    """The similarity of two sets that is easiest to write down: the largest product of an element of each."""
    return max(reference.dot(x, y) for x in left for y in right)


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_sets_equal_plain_loops(chunk_size):
    images, captions, image_of_caption = embeddings(images=13, width=12)
    images, captions = images.view(-1, 3, 4), captions.view(-1, 3, 4)[:, :2]
    ranks = retrieval_ranks(images, captions, image_of_caption, chunk_size, partial(mil_similarity, normalize=False))
    assert_equals_reference(ranks, images, captions, image_of_caption, closest_pair)


def test_a_similarity_sees_chunks_of_queries_in_full_precision():
    images, captions, image_of_caption = embeddings(images=5, dtype=torch.float16)
    seen = []

    def similarity(queries, candidates):
        assert not torch.is_autocast_enabled("cpu")
        seen.append((tuple(queries.shape), tuple(candidates.shape), queries.dtype))
        return queries @ candidates.T

    with torch.autocast("cpu", torch.bfloat16):
        ranks = retrieval_ranks(images, captions, image_of_caption, 3, similarity)
    count = len(captions)
    directions = [((3, 8), (count, 8)), ((2, 8), (count, 8))]
    directions += [((min(3, count - start), 8), (5, 8)) for start in range(0, count, 3)]
    assert seen == [(*shapes, torch.float32) for shapes in directions]
    for got, expected in zip(ranks, retrieval_ranks(images, captions, image_of_caption), strict=True):
        torch.testing.assert_close(got, expected)


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


@settings(deadline=None)
@given(inputs=integer_embeddings(), chunk_size=st.integers(1, 20))
def test_equals_plain_loops_with_ties(inputs, chunk_size):
    assert_equals_reference(retrieval_ranks(*inputs, chunk_size=chunk_size), *inputs, rtol=0, atol=0)


@settings(deadline=None)
@given(inputs=integer_embeddings(), seed=st.integers(0, 1000))
def test_permuting_captions_permutes_their_ranks(inputs, seed):
    image_embeddings, caption_embeddings, image_of_caption = inputs
    order = torch.randperm(len(image_of_caption), generator=torch.Generator().manual_seed(seed))
    ranks = retrieval_ranks(*inputs)
    permuted = retrieval_ranks(image_embeddings, caption_embeddings[order], image_of_caption[order])
    for name in ("image_to_text", "image_to_text_hardest_negative"):
        assert torch.equal(getattr(permuted, name), getattr(ranks, name))
    for name in ("text_to_image", "text_to_image_hardest_negative", "positive_similarity"):
        assert torch.equal(getattr(permuted, name), getattr(ranks, name)[order])


@settings(deadline=None)
@given(inputs=integer_embeddings(), seed=st.integers(0, 1000))
def test_permuting_images_permutes_their_ranks(inputs, seed):
    image_embeddings, caption_embeddings, image_of_caption = inputs
    order = torch.randperm(len(image_embeddings), generator=torch.Generator().manual_seed(seed))
    ranks = retrieval_ranks(*inputs)
    permuted = retrieval_ranks(image_embeddings[order], caption_embeddings, order.argsort()[image_of_caption])
    assert torch.equal(permuted.image_to_text, ranks.image_to_text[order])
    assert torch.equal(permuted.text_to_image, ranks.text_to_image)


def test_perfect_model():
    image_of_caption = torch.arange(6).repeat_interleave(5)
    ranks = retrieval_ranks(torch.eye(6), torch.eye(6)[image_of_caption], image_of_caption)
    for name in RANK_FIELDS:
        assert (getattr(ranks, name) == 1).all()
    assert (ranks.positive_similarity == 1).all()
    assert (ranks.image_to_text_hardest_negative == 0).all()
    assert (ranks.text_to_image_hardest_negative == 0).all()


def test_reversed_and_constant_models_have_the_worst_ranks():
    image_of_caption = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2])
    for image_embeddings in (-torch.eye(3), torch.zeros(3, 3), torch.ones(3, 3)):
        ranks = retrieval_ranks(image_embeddings, torch.eye(3)[image_of_caption], image_of_caption)
        # 18 captions, of which 5, 6 and 7 are the images' own and never count against them.
        assert ranks.image_to_text.tolist() == [14, 13, 12]
        assert ranks.text_to_image.tolist() == [3] * 18


def test_model_that_knows_one_caption_per_image():
    image_of_caption = torch.arange(10).repeat_interleave(5)
    caption_embeddings = torch.zeros(50, 10)
    caption_embeddings[::5] = torch.eye(10)
    ranks = retrieval_ranks(torch.eye(10), caption_embeddings, image_of_caption)
    assert (ranks.image_to_text == 1).all()
    assert ranks.text_to_image.tolist() == [1, 10, 10, 10, 10] * 10


def test_random_model_scores_chance():
    generator = torch.Generator().manual_seed(0)
    images, captions = 200, 1000
    ranks = retrieval_ranks(
        torch.randn(images, 16, generator=generator),
        torch.randn(captions, 16, generator=generator),
        torch.arange(captions) % images,
    )
    # Means of uniform ranks: of one among 200, and of the first of 5 among 1,000 with the other four left out.
    assert ranks.text_to_image.double().mean().item() == pytest.approx(100.5, rel=0.1)
    assert ranks.image_to_text.double().mean().item() == pytest.approx(1 + 995 / 6, rel=0.15)


def test_worked_example_of_ties():
    scores = torch.tensor([[0.8, 0.8, 0.3, 0.8, 0.5], [0.0, 0.0, 0.0, 1.0, 1.0]])
    image_of_caption = torch.tensor([0, 0, 0, 1, 1])
    ranks = retrieval_ranks(torch.eye(2), scores.T, image_of_caption)
    assert ranks.image_to_text.tolist() == [2, 1]
    assert ranks.text_to_image.tolist() == [1, 1, 1, 1, 1]


def test_copy_of_the_positive_is_never_separated_from_it_by_rounding():
    # A positive computed on its own would differ from its copies, entries of a block, in the last bit.
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 512, generator=generator)
    captions = torch.randn(1, 512, generator=generator).expand(64, -1).contiguous()
    for chunk_size in (16, 64):
        ranks = retrieval_ranks(images, captions, torch.arange(64), chunk_size=chunk_size)
        assert (ranks.image_to_text == 64).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    image_embeddings, caption_embeddings, image_of_caption = embeddings(images=23, dtype=torch.float32)
    halves = image_embeddings.to(dtype), caption_embeddings.to(dtype)
    expected = retrieval_ranks(*(half.float() for half in halves), image_of_caption)
    for got in (retrieval_ranks(*halves, image_of_caption), under_autocast(*halves, image_of_caption)):
        assert got.positive_similarity.dtype == torch.float32
        for got_values, expected_values in zip(got, expected, strict=True):
            assert torch.equal(got_values, expected_values)


def under_autocast(*inputs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return retrieval_ranks(*inputs)


def test_autocast_does_not_lower_float32():
    inputs = embeddings(images=23, dtype=torch.float32)
    for got, expected in zip(under_autocast(*inputs), retrieval_ranks(*inputs), strict=True):
        assert torch.equal(got, expected)


def test_mixed_types_non_contiguous_and_small_integers():
    image_embeddings, caption_embeddings, image_of_caption = embeddings(images=9)
    expected = retrieval_ranks(image_embeddings, caption_embeddings, image_of_caption)
    strided = torch.stack([caption_embeddings, caption_embeddings], dim=2)[:, :, 0]
    assert not strided.is_contiguous()
    # As an index, uint8 would be taken for a mask.
    for dtype in (torch.int32, torch.uint8):
        got = retrieval_ranks(image_embeddings, strided, image_of_caption.to(dtype))
        assert torch.equal(got.image_to_text, expected.image_to_text)
        assert torch.equal(got.text_to_image, expected.text_to_image)
    mixed = retrieval_ranks(image_embeddings.float(), caption_embeddings, image_of_caption)
    assert mixed.positive_similarity.dtype == torch.float64


def test_inputs_stay_untouched_and_no_graph_is_kept():
    inputs = embeddings(images=9)
    copies = [tensor.clone() for tensor in inputs]
    inputs[0].requires_grad_()
    ranks = retrieval_ranks(*inputs)
    assert not ranks.positive_similarity.requires_grad
    for tensor, copy in zip(inputs, copies, strict=True):
        assert torch.equal(tensor, copy)


def test_embeddings_from_inference_mode():
    image_embeddings, caption_embeddings, image_of_caption = embeddings(images=9)
    with torch.inference_mode():
        images, captions = image_embeddings * 1, caption_embeddings * 1
    expected = retrieval_ranks(image_embeddings, caption_embeddings, image_of_caption)
    assert torch.equal(retrieval_ranks(images, captions, image_of_caption).image_to_text, expected.image_to_text)


def test_single_image_has_no_negative():
    ranks = retrieval_ranks(torch.ones(1, 2), torch.ones(3, 2), torch.zeros(3, dtype=torch.int64))
    assert ranks.image_to_text.tolist() == [1]
    assert ranks.text_to_image.tolist() == [1, 1, 1]
    assert ranks.image_to_text_hardest_negative.tolist() == [-torch.inf]


@pytest.mark.parametrize("chunk_size", [1, 4, 16])
def test_memory_is_that_of_a_chunk(chunk_size):
    images, captions = 100, 500
    inputs = embeddings(images, width=2, captions_per_image=(5,))
    with LargestTensor() as largest:
        retrieval_ranks(*inputs, chunk_size=chunk_size)
    embedding_elements = captions * 2
    assert largest.elements == max(chunk_size * captions, embedding_elements)


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


def test_bad_chunk_size_is_named():
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        retrieval_ranks(*bad(2, 0, 0), chunk_size=0)


@pytest.mark.parametrize("row", [[3e38, 3e38], [-3e38, -3e38], [3e38, -3e38]])
@pytest.mark.parametrize("huge_image", [0, 1])
def test_overflow_never_gives_good_ranks(row, huge_image):
    # inf, -inf, and inf - inf = NaN; as positives and as negatives.
    image_embeddings = torch.ones(2, 2)
    image_embeddings[huge_image] = torch.tensor(row)
    caption_embeddings = torch.tensor([[10.0, 10.0], [10.0, 10.0]])
    with pytest.raises(
        ValueError, match=r"finite similarities; image-to-text .* overflow torch.float32 for 1 of 2 rows"
    ):
        retrieval_ranks(image_embeddings, caption_embeddings, torch.tensor([0, 1]))


@pytest.mark.parametrize("negative", [[10.0, 10.0], [10.0, -10.0]])
def test_overflow_of_negatives_alone(negative):
    # inf would push the positive down by right; NaN would not count at all.
    image_embeddings = torch.tensor([[3e38, 3e38], [1.0, 1.0]])
    caption_embeddings = torch.tensor([[0.0, 0.0], negative])
    with pytest.raises(ValueError, match="image-to-text similarities overflow"):
        retrieval_ranks(image_embeddings, caption_embeddings, torch.tensor([0, 1]))
