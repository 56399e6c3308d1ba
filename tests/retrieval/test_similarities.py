import numpy as np
import pytest
import torch

from benchmarks.measurement import extra_bytes
from vl_plugins.distances import MILSimilarity
from vl_plugins.retrieval import EmbeddingSimilarities, MatrixSimilarities, MeanSimilarities, similarities

IMAGES, CAPTIONS = torch.randn(67 + 131, 8, generator=torch.Generator().manual_seed(0)).split([67, 131])
SETS = IMAGES.view(67, 2, 4), CAPTIONS.view(131, 2, 4)
PRODUCTS = (IMAGES.double() @ CAPTIONS.double().T).float()


def closest(images, captions):
    return torch.einsum("akd,cld->ackl", images.double(), captions.double()).amax(dim=(2, 3)).float()


def make(kind):
    """Similarities and the matrix that they stand for."""
    if kind == "embeddings":
        return EmbeddingSimilarities(IMAGES, CAPTIONS), PRODUCTS
    if kind == "sets":
        return EmbeddingSimilarities(*SETS, MILSimilarity(normalize_embeddings=False)), closest(*SETS)
    if kind == "matrix":
        return MatrixSimilarities(PRODUCTS.half()), PRODUCTS.half().float()
    members = [make(member) for member in ("embeddings", "sets", "matrix")]
    return MeanSimilarities([member for member, _ in members]), sum(matrix for _, matrix in members) / 3


@pytest.mark.parametrize("kept", [0, similarities.KEPT])
@pytest.mark.parametrize("block", [1, similarities.SET_BLOCK])
@pytest.mark.parametrize("kind", ["embeddings", "sets", "matrix", "mean"])
def test_rows_of_both_directions(monkeypatch, kind, block, kept):
    """Rows in any order; the caller may write to them."""
    monkeypatch.setattr(similarities, "SET_BLOCK", block)
    monkeypatch.setattr(similarities, "KEPT", kept)
    found, expected = make(kind)
    assert (found.shape, found.device) == ((67, 131), torch.device("cpu"))
    for of_queries, matrix, queries in (
        (found.of_images, expected, torch.tensor([7, 0, 66, 3])),
        (found.of_captions, expected.T, torch.tensor([130, 5, 6, 0, 1])),
    ):
        for _ in range(2):
            rows = of_queries(queries)
            assert rows.dtype == torch.float32
            torch.testing.assert_close(rows, matrix[queries], rtol=1e-5, atol=1e-5)
            rows.fill_(torch.nan)


def test_a_memory_mapped_matrix_stays_on_disk(tmp_path):
    values = torch.randn(400, 900)
    np.save(tmp_path / "similarities.npy", values.numpy())
    mapped = MatrixSimilarities(torch.from_numpy(np.load(tmp_path / "similarities.npy", mmap_mode="c")))
    assert extra_bytes(lambda: mapped.of_images(torch.arange(40))) < 0.2 * values.nbytes
    assert torch.equal(mapped.of_captions(torch.arange(900)), values.T)


@pytest.mark.parametrize(("kept", "times"), [(67 * 131, 1), (67 * 131 - 1, 2)])
def test_a_similarity_sees_each_pair_once_if_all_fit(monkeypatch, kept, times):
    monkeypatch.setattr(similarities, "KEPT", kept)
    products = []

    def similarity(images, captions):
        products.append(images @ captions.T)
        return products[-1]

    found = EmbeddingSimilarities(IMAGES.clone().requires_grad_(), CAPTIONS, similarity)
    found.of_images(torch.arange(67)), found.of_captions(torch.arange(131))
    assert sum(product.numel() for product in products) == times * 96 * 144  # padded
    assert not any(product.requires_grad for product in products)
