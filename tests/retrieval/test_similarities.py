import numpy as np
import pytest
import torch

from tests.helpers.memory import extra_bytes
from vl_plugins.distances import mil_similarity
from vl_plugins.retrieval import EmbeddingSimilarities, MatrixSimilarities, MeanSimilarities, similarities


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def together(tiles):
    """Put the tiles together."""
    (images, captions), (height, width) = tiles.shape, tiles.tile_shape
    whole = torch.full(tiles.shape, torch.nan, dtype=torch.float64)
    for image in range(0, images, height):
        for caption in range(0, captions, width):
            tile = tiles.tile(image, caption)
            assert tile.dtype in (torch.float32, torch.float64)
            assert tile.shape == (min(height, images - image), min(width, captions - caption))
            whole[image : image + height, caption : caption + width] = tile
            # The caller may write to it.
            tile.fill_(torch.nan)
            again = tiles.tile(image, caption)
            assert torch.equal(again.double(), whole[image : image + height, caption : caption + width])
    return whole


IMAGES, CAPTIONS = random(37, 8), random(101, 8, seed=1)
SETS = IMAGES.view(37, 2, 4), CAPTIONS.view(101, 2, 4)
PRODUCTS = (IMAGES.double() @ CAPTIONS.double().T).float()
KINDS = ["embeddings", "sets", "stored", "matrix", "mean"]


def closest(images, captions):
    return torch.einsum("akd,cld->ackl", images.double(), captions.double()).amax(dim=(2, 3))


def make(kind):
    """Similarities and the matrix that they stand for."""
    if kind == "embeddings":
        return EmbeddingSimilarities(IMAGES, CAPTIONS), PRODUCTS
    if kind == "sets":
        return EmbeddingSimilarities(*SETS, lambda i, c: mil_similarity(i, c, normalize=False)), closest(*SETS)
    if kind == "stored":
        # The similarity returns its own memory, and repeats elements.
        one = torch.ones(1, 1)
        return EmbeddingSimilarities(IMAGES, CAPTIONS, lambda i, c: one.expand(len(i), len(c))), one.expand(37, 101)
    if kind == "matrix":
        return MatrixSimilarities(PRODUCTS), PRODUCTS
    members = [make(member) for member in ("embeddings", "sets", "matrix")]
    return MeanSimilarities([member for member, _ in members]), sum(matrix.double() for _, matrix in members) / 3


@pytest.mark.parametrize("elements", [16 * 48, similarities.CPU_TILE])
@pytest.mark.parametrize("kind", KINDS)
class TestAllKinds:
    def test_tiles_make_up_the_whole(self, monkeypatch, kind, elements):
        monkeypatch.setattr(similarities, "CPU_TILE", elements)
        tiles, expected = make(kind)
        assert tiles.shape == (37, 101)
        assert tiles.tile_shape == ((16, 48) if elements == 16 * 48 else (48, 144))
        assert tiles.device == torch.device("cpu")
        torch.testing.assert_close(together(tiles), expected.double(), rtol=1e-5, atol=1e-5)

    def test_select(self, monkeypatch, kind, elements):
        monkeypatch.setattr(similarities, "CPU_TILE", elements)
        tiles, expected = make(kind)
        images, captions = torch.tensor([7, 0, 10, 3]), torch.tensor([22, 5, 6, 0, 1, 13, 13])
        for rows, columns in ((images, None), (None, captions), (images, captions), (None, None)):
            matrix = expected.double()[slice(None) if rows is None else rows]
            matrix = matrix[:, slice(None) if columns is None else columns]
            torch.testing.assert_close(together(tiles.select(rows, columns)), matrix, rtol=1e-5, atol=1e-5)
        nested = tiles.select(images).select(torch.tensor([2, 1]), captions)
        torch.testing.assert_close(together(nested), expected.double()[[10, 0]][:, captions], rtol=1e-5, atol=1e-5)


def test_an_accelerator_has_larger_tiles():
    height, width = similarities._tile_shape((10**6, 10**6), torch.device("cuda"))
    assert 2**23 < height * width <= 2**24


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (torch.ones(16, 47), r"torch.float32 of shape \(16, 47\)"),
        (torch.ones(16, 48).int(), r"torch.int32 of shape \(16, 48\)"),
        (torch.ones(()), r"torch.float32 of shape \(\)"),
    ],
)
def test_wrong_results_of_a_similarity_are_named(result, got):
    tiles = EmbeddingSimilarities(torch.ones(16, 2), torch.ones(48, 2), lambda i, c: result)
    with pytest.raises(ValueError, match=rf"must return floating-point values of shape \(16, 48\), got {got}"):
        tiles.tile(0, 0)


@pytest.mark.parametrize(
    ("images", "captions", "similarity", "message"),
    [
        (torch.ones(4), torch.ones(6, 3), mil_similarity, r"image_embeddings .* \(rows, \.\.\.\) .* shape \(4,\)"),
        (torch.ones(4, 2, 3), torch.ones(6, 2, 3), None, r"image_embeddings .* \(rows, D\) .* shape \(4, 2, 3\)"),
        (torch.ones(4, 3), torch.ones(6, 3).long(), None, r"caption_embeddings .* got torch.int64 of shape \(6, 3"),
        (torch.ones(0, 3), torch.ones(6, 3), None, r"image_embeddings .* at least one row, .* \(0, 3\)"),
        (torch.ones(4, 3), torch.ones(6, 2), None, r"same width D, got shapes \(4, 3\) and \(6, 2\)"),
        (torch.ones(4, 3), torch.ones(6, 3, device="meta"), None, r"must be on one device .* on cpu and meta"),
        (torch.full((4, 2, 3), torch.nan), torch.ones(6, 2, 3), mil_similarity, r"NaN or infinity in 4 of 4 rows"),
    ],
)
def test_bad_embeddings_are_named(images, captions, similarity, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingSimilarities(images, captions, similarity)


def test_rows_that_are_not_finite_are_found_beyond_the_first_thousands():
    images = torch.ones(10_000, 2)
    images[9_999, 1] = torch.inf
    images[7_000] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity in 2 of 10000 rows, first row 7000"):
        EmbeddingSimilarities(images, torch.ones(1, 2))


def test_no_copy_of_large_embeddings():
    images, captions = random(20_000, 64), random(30_000, 64)
    extra = extra_bytes(lambda: EmbeddingSimilarities(images, captions).tile(19_990, 29_990))
    assert extra < 0.3 * images.nbytes


def test_a_memory_mapped_matrix(tmp_path):
    values = random(400, 900)
    np.save(tmp_path / "similarities.npy", values.numpy())
    mapped = MatrixSimilarities(torch.from_numpy(np.load(tmp_path / "similarities.npy", mmap_mode="r+")))
    assert extra_bytes(lambda: mapped.tile(0, 0)) <= 4 * mapped.tile_shape[0] * mapped.tile_shape[1] < values.nbytes
    assert torch.equal(together(mapped), values.double())
    assert np.array_equal(np.load(tmp_path / "similarities.npy"), values.numpy())


@pytest.mark.parametrize(
    ("matrix", "got"),
    [
        (torch.ones(4), r"torch.float32 of shape \(4,\)"),
        (torch.ones(4, 6).int(), r"torch.int32 of shape \(4, 6\)"),
        (torch.ones(4, 0), r"torch.float32 of shape \(4, 0\)"),
    ],
)
def test_a_bad_matrix_is_named(matrix, got):
    with pytest.raises(ValueError, match=rf"similarities must be a floating-point tensor .* got {got}"):
        MatrixSimilarities(matrix)


def test_a_mean_of_other_widths_and_types():
    narrow = EmbeddingSimilarities(random(5, 3, dtype=torch.float64), random(7, 3, seed=4, dtype=torch.float64))
    half = MatrixSimilarities(random(5, 7, seed=5).half())
    mean = MeanSimilarities([narrow, half])
    assert (half.tile(0, 0).dtype, mean.tile(0, 0).dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(together(mean), (together(narrow) + together(half)) / 2)


def test_members_that_differ_are_named():
    first = MatrixSimilarities(torch.ones(4, 6))
    for other, got in (
        (MatrixSimilarities(torch.ones(4, 7)), r"number 3 \(4, 7\), cpu, \(16, 48\)"),
        (MatrixSimilarities(torch.ones(4, 6, device="meta")), r"number 3 \(4, 6\), meta"),
    ):
        with pytest.raises(ValueError, match=rf"the first have \(4, 6\), cpu, \(16, 48\), {got}"):
            MeanSimilarities([first, first, other])
    with pytest.raises(ValueError, match="at least one model's similarities, got none"):
        MeanSimilarities([])
