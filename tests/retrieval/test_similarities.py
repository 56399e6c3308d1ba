import numpy as np
import pytest
import torch

from tests.memory import LargestTensor, extra_bytes
from vl_plugins.functional.set_similarity import mil_similarity
from vl_plugins.retrieval import EmbeddingSimilarities, MatrixSimilarities, MeanSimilarities

TILES = [(1, 1), (3, 5), (7, 50), (11, 23), (100, 100), None]


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def together(similarities):
    """Put the tiles together."""
    (images, captions), (height, width) = similarities.shape, similarities.tile_shape
    whole = torch.full(similarities.shape, torch.nan, dtype=torch.float64)
    for image in range(0, images, height):
        for caption in range(0, captions, width):
            tile = similarities.tile(image, caption)
            assert tile.dtype in (torch.float32, torch.float64)
            assert tile.shape == (min(height, images - image), min(width, captions - caption))
            whole[image : image + height, caption : caption + width] = tile
            # The caller may write to it.
            tile.fill_(torch.nan)
            again = similarities.tile(image, caption)
            assert torch.equal(again.double(), whole[image : image + height, caption : caption + width])
    return whole


IMAGES, CAPTIONS = random(11, 8), random(23, 8, seed=1)
SETS = IMAGES.view(11, 2, 4), CAPTIONS.view(23, 2, 4)
PRODUCTS = (IMAGES.double() @ CAPTIONS.double().T).float()


def closest(images, captions):
    return torch.einsum("akd,cld->ackl", images.double(), captions.double()).amax(dim=(2, 3))


def similarities_of(kind, tile_shape):
    """Similarities and the matrix that they stand for."""
    if kind == "embeddings":
        return EmbeddingSimilarities(IMAGES, CAPTIONS, tile_shape=tile_shape), PRODUCTS
    if kind == "sets":

        def similarity(images, captions):
            return mil_similarity(images, captions, normalize=False)

        return EmbeddingSimilarities(*SETS, similarity, tile_shape=tile_shape), closest(*SETS)
    if kind == "matrix":
        return MatrixSimilarities(PRODUCTS, tile_shape=tile_shape), PRODUCTS
    members = [similarities_of(member, tile_shape) for member in ("embeddings", "sets", "matrix")]
    return MeanSimilarities([member for member, _ in members]), sum(matrix.double() for _, matrix in members) / 3


KINDS = ["embeddings", "sets", "matrix", "mean"]


@pytest.mark.parametrize("tile_shape", TILES)
@pytest.mark.parametrize("kind", KINDS)
class TestAllKinds:
    def test_tiles_make_up_the_whole(self, kind, tile_shape):
        similarities, expected = similarities_of(kind, tile_shape)
        assert similarities.shape == (11, 23)
        assert similarities.tile_shape == (tile_shape or (16, 32))
        assert similarities.device == torch.device("cpu")
        torch.testing.assert_close(together(similarities), expected.double(), rtol=1e-5, atol=1e-5)

    def test_select(self, kind, tile_shape):
        similarities, expected = similarities_of(kind, tile_shape)
        images, captions = torch.tensor([7, 0, 10, 3]), torch.tensor([22, 5, 6, 0, 1, 13, 13])
        for chosen in ((images, None), (None, captions), (images, captions), (None, None)):
            selected = similarities.select(*chosen)
            assert type(selected) is type(similarities)
            assert selected.tile_shape == similarities.tile_shape
            rows, columns = (
                torch.arange(size) if index is None else index for index, size in zip(chosen, (11, 23), strict=True)
            )
            assert selected.shape == (len(rows), len(columns))
            matrix = expected.double()[rows][:, columns]
            torch.testing.assert_close(together(selected), matrix, rtol=1e-5, atol=1e-5)
        nested = similarities.select(images).select(torch.tensor([2, 1]), captions)
        torch.testing.assert_close(together(nested), expected.double()[[10, 0]][:, captions], rtol=1e-5, atol=1e-5)


class TestEmbeddingSimilarities:
    def test_a_selection_rounds_like_the_whole(self):
        images, captions = random(300, 513), random(1500, 513, seed=1)
        whole = EmbeddingSimilarities(images, captions)
        chosen = torch.arange(0, 300, 7)
        selected = whole.select(chosen)
        assert torch.equal(together(selected), together(whole)[chosen])

    def test_wrong_results_of_a_similarity_are_named(self):
        for result, message in (
            (
                lambda i, c: torch.ones(4, 7),
                r"floating-point values of shape \(4, 6\), got torch.float32 of shape \(4, 7\)",
            ),
            (
                lambda i, c: torch.ones(6, 4),
                r"floating-point values of shape \(4, 6\), got torch.float32 of shape \(6, 4\)",
            ),
            (lambda i, c: torch.ones(4, 6).int(), r"floating-point values .* got torch.int32 of shape \(4, 6\)"),
            (lambda i, c: torch.ones(()), r"floating-point values of shape \(4, 6\), got torch.float32 of shape \(\)"),
        ):
            similarities = EmbeddingSimilarities(torch.ones(9, 2), torch.ones(8, 2), result, tile_shape=(4, 6))
            with pytest.raises(ValueError, match="similarity must return " + message):
                similarities.tile(0, 0)

    @pytest.mark.parametrize(
        ("images", "captions", "similarity", "message"),
        [
            (torch.ones(4), torch.ones(6, 3), mil_similarity, r"image_embeddings .* \(rows, \.\.\.\) .* shape \(4,\)"),
            (torch.ones(4, 2, 3), torch.ones(6, 3), None, r"image_embeddings .* \(rows, D\) .* shape \(4, 2, 3\)"),
            (torch.ones(4, 3), torch.ones(6, 3).long(), None, r"caption_embeddings .* got torch.int64 of shape \(6, 3"),
            (torch.ones(0, 3), torch.ones(6, 3), None, r"image_embeddings .* at least one row, .* \(0, 3\)"),
            (torch.ones(4, 3), torch.ones(6, 3, device="meta"), None, r"must be on one device, got cpu and meta"),
            (torch.full((4, 2, 3), torch.nan), torch.ones(6, 2, 3), mil_similarity, r"NaN or infinity in 4 of 4 rows"),
        ],
    )
    def test_bad_input_is_named(self, images, captions, similarity, message):
        with pytest.raises(ValueError, match=message):
            EmbeddingSimilarities(images, captions, similarity)

    def test_rows_that_are_not_finite_are_found_beyond_the_first_thousands(self):
        images = torch.ones(10_000, 2)
        images[9_999, 1] = torch.inf
        images[7_000] = torch.nan
        with pytest.raises(ValueError, match="NaN or infinity in 2 of 10000 rows, first row 7000"):
            EmbeddingSimilarities(images, torch.ones(1, 2))

    def test_no_copy_of_large_embeddings(self):
        images, captions = random(20_000, 64), random(30_000, 64)
        extra = extra_bytes(lambda: EmbeddingSimilarities(images, captions, tile_shape=(64, 96)).tile(19_990, 29_990))
        assert extra < 0.1 * images.nbytes


class TestMatrixSimilarities:
    def test_a_memory_mapped_matrix(self, tmp_path):
        path = tmp_path / "similarities.npy"
        values = random(40, 90)
        np.save(path, values.numpy())
        before = path.read_bytes()
        for mode in ("r+", "c"):
            mapped = torch.from_numpy(np.load(path, mmap_mode=mode))
            similarities = MatrixSimilarities(mapped, tile_shape=(16, 32))
            assert torch.equal(together(similarities), values.double())
            with LargestTensor() as largest:
                similarities.tile(0, 32).zero_()
            assert largest.elements <= 40 * 90
        assert path.read_bytes() == before

    def test_a_tile_at_a_time_is_copied(self):
        matrix = random(400, 900, dtype=torch.float64)

        class Copies(LargestTensor):
            """Largest tensor that is no view."""

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if function is torch.ops.aten._to_copy.default:
                    self.elements = max(self.elements, args[0].numel())
                return function(*args, **(kwargs or {}))

        with Copies() as copies:
            MatrixSimilarities(matrix, tile_shape=(16, 32)).tile(384, 864)
        assert copies.elements == 16 * 32

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_comes_in_float32(self, dtype):
        matrix = random(5, 7).to(dtype)
        tile = MatrixSimilarities(matrix, tile_shape=(5, 7)).tile(0, 0)
        assert tile.dtype == torch.float32
        assert torch.equal(tile, matrix.float())

    @pytest.mark.parametrize(
        ("matrix", "got"),
        [
            (torch.ones(4), r"torch.float32 of shape \(4,\)"),
            (torch.ones(4, 6, 1), r"torch.float32 of shape \(4, 6, 1\)"),
            (torch.ones(4, 6).int(), r"torch.int32 of shape \(4, 6\)"),
            (torch.ones(0, 6), r"torch.float32 of shape \(0, 6\)"),
            (torch.ones(4, 0), r"torch.float32 of shape \(4, 0\)"),
        ],
    )
    def test_bad_input_is_named(self, matrix, got):
        with pytest.raises(ValueError, match=rf"similarities must be a floating-point tensor .* got {got}"):
            MatrixSimilarities(matrix)
        with pytest.raises(ValueError, match=r"tile_shape must be two positive numbers, got \(0, 3\)"):
            MatrixSimilarities(torch.ones(4, 6), tile_shape=(0, 3))


class TestMeanSimilarities:
    def test_of_one_and_of_several(self):
        matrices = [random(5, 7, seed=seed) for seed in range(4)]
        for number in range(1, 5):
            mean = MeanSimilarities([MatrixSimilarities(matrix, tile_shape=(2, 3)) for matrix in matrices[:number]])
            expected = torch.stack(matrices[:number]).double().mean(dim=0)
            torch.testing.assert_close(together(mean), expected, rtol=1e-6, atol=1e-6)

    def test_of_other_widths_and_types(self):
        images, captions = random(5, 3, seed=3, dtype=torch.float64), random(7, 3, seed=4, dtype=torch.float64)
        narrow = EmbeddingSimilarities(images, captions)
        wide = EmbeddingSimilarities(random(5, 16, seed=5), random(7, 16, seed=6))
        mean = MeanSimilarities([narrow, wide])
        assert mean.tile(0, 0).dtype == torch.float64
        torch.testing.assert_close(together(mean), (together(narrow) + together(wide)) / 2)

    def test_members_that_differ_are_named(self):
        first = MatrixSimilarities(torch.ones(4, 6))
        for other, message in (
            (MatrixSimilarities(torch.ones(4, 7)), r"are \(4, 6\) on cpu, number 3 \(4, 7\) on cpu"),
            (MatrixSimilarities(torch.ones(4, 6, device="meta")), r"are \(4, 6\) on cpu, number 3 \(4, 6\) on meta"),
            (MatrixSimilarities(torch.ones(4, 6), tile_shape=(2, 2)), r"same tile_shape, got \(16, 16\) and \(2, 2"),
        ):
            with pytest.raises(ValueError, match=message):
                MeanSimilarities([first, first, other])
        with pytest.raises(ValueError, match="at least one model's similarities, got none"):
            MeanSimilarities([])
