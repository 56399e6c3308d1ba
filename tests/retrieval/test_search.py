import hashlib
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import normalize

from tests.reference import sets as reference_sets
from vl_plugins.distances import SmoothChamferSimilarity
from vl_plugins.retrieval import search
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.search import ExactIndex, FaissIndex, StaleIndexError, build_index
from vl_plugins.utils.errors import MissingExtraError, UserError


def nearest_by_a_loop(similarities, top):
    """Return lists (Q, top) of similarities and of indices; equal ones in the order of their indices."""
    values, indices = [], []
    for row in similarities.tolist():
        order = sorted(range(len(row)), key=lambda index, row=row: (-row[index], index))[:top]
        values.append([row[index] for index in order])
        indices.append(order)
    return values, indices


def whole_numbers(rows, width, seed):
    """Return embeddings whose products are exact, with many ties."""
    return torch.randint(-2, 3, (rows, width), generator=torch.Generator().manual_seed(seed)).float()


def unit_vectors(*shape, seed=0):
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


@pytest.fixture
def small_parts(monkeypatch):
    """Several parts of items and of queries, the last ones smaller."""
    monkeypatch.setattr(search, "VECTORS_AT_A_TIME", 8)
    monkeypatch.setattr(search, "SETS_AT_A_TIME", 5)
    monkeypatch.setattr(search, "COLUMNS", 4)
    monkeypatch.setattr(search, "QUERIES_AT_A_TIME", 3)


@pytest.mark.parametrize("items", [1, 3, 7, 8, 9, 37])
@pytest.mark.parametrize("top", [1, 5, 11, 100])
def test_exact_search_equals_a_loop(items, top, small_parts):
    embeddings, queries = whole_numbers(items, 4, seed=items), whole_numbers(7, 4, seed=top)
    hits = ExactIndex(embeddings).search(queries, top)
    values, indices = nearest_by_a_loop(queries.double() @ embeddings.double().T, top)
    assert hits.indices.tolist() == indices
    assert hits.similarities.tolist() == values
    assert hits.indices.dtype == torch.int64
    if items == 37 and top == 11:
        assert any(len(set(row)) < len(row) for row in values), "the test is of ties too"


def test_exact_search_in_its_own_parts_equals_topk():
    embeddings, queries = unit_vectors(40_003, 16), unit_vectors(300, 16, seed=1)
    hits = ExactIndex(embeddings).search(queries, 12)
    expected = (queries @ embeddings.T).topk(12, dim=1)
    torch.testing.assert_close(hits.similarities, expected.values, rtol=0, atol=1e-6)
    # Where two are nearer to each other than rounding, either may come first.
    assert (hits.indices == expected.indices).float().mean() > 0.999


@pytest.mark.parametrize("items", [5, 33, 1003, 16_385])
@pytest.mark.parametrize("queries", [1, 3])
def test_equal_embeddings_have_equal_similarities_wherever_they_are(items, queries):
    """A matrix product of crooked shape rounds its last columns differently."""
    embeddings = unit_vectors(1, 500).expand(items, -1)
    hits = ExactIndex(embeddings).search(unit_vectors(queries, 500, seed=1), 10)
    assert hits.indices.tolist() == [list(range(min(items, 10)))] * queries
    assert (hits.similarities == hits.similarities[:, :1]).all()


def test_half_precision_is_compared_in_float32():
    embeddings, query = unit_vectors(50, 8).bfloat16(), unit_vectors(1, 8, seed=1)
    hits = ExactIndex(embeddings).search(query, 50)
    values, indices = nearest_by_a_loop(query.double() @ embeddings.double().T, 50)
    assert hits.indices.tolist() == indices
    torch.testing.assert_close(hits.similarities, torch.tensor(values), rtol=0, atol=1e-6)


def test_sets_are_compared_by_their_similarity(small_parts):
    embeddings, queries = unit_vectors(13, 3, 6), unit_vectors(4, 2, 6, seed=1)
    hits = ExactIndex(embeddings, SmoothChamferSimilarity(alpha=9.0).compute_mat).search(queries, 4)
    expected = torch.tensor([[float(reference_sets.smooth_chamfer(x, y, 9.0)) for y in embeddings] for x in queries])
    values, indices = nearest_by_a_loop(expected, 4)
    assert hits.indices.tolist() == indices
    torch.testing.assert_close(hits.similarities, torch.tensor(values), rtol=0, atol=1e-5)


def features(images, captions, **description):
    count = len(captions)
    return Features(images=images, captions=captions, image_of_caption=torch.arange(count), description=description)


def test_index_of_features():
    images, captions, query = unit_vectors(9, 4), unit_vectors(9, 4, seed=1), unit_vectors(1, 4, seed=2)
    for target, embeddings in (("images", images), ("captions", captions)):
        for faiss in (None, "Flat"):
            index = build_index(features(images, captions), target, faiss=faiss)
            assert len(index) == 9
            assert index.search(query, 9).indices.tolist() == nearest_by_a_loop(query @ embeddings.T, 9)[1]
    with pytest.raises(UserError, match="unknown target 'image'"):
        build_index(features(images, captions), "image")


def test_index_of_features_that_are_sets():
    images, captions, query = unit_vectors(9, 2, 4), unit_vectors(9, 2, 4, seed=1), unit_vectors(1, 2, 4, seed=2)
    by_name = features(images, captions, similarity="SmoothChamferSimilarity", similarity_kwargs={"alpha": 3.0})
    given = build_index(features(images, captions), similarity=SmoothChamferSimilarity(alpha=3.0).compute_mat)
    expected = [[float(reference_sets.smooth_chamfer(query[0], y, 3.0)) for y in images]]
    for index in (build_index(by_name), given):
        hits = index.search(query, 9)
        torch.testing.assert_close(
            hits.similarities[0], torch.tensor(sorted(expected[0], reverse=True)), rtol=0, atol=1e-5
        )
    with pytest.raises(UserError, match="names no similarity"):
        build_index(features(images, captions))
    with pytest.raises(UserError, match="FAISS compares single vectors and cannot search sets"):
        build_index(by_name, faiss="Flat")


@pytest.mark.parametrize(
    ("embeddings", "queries", "top", "message"),
    [
        (torch.ones(3), torch.ones(1, 2), 1, r"embeddings must be .* \(rows, D\), got torch.float32 of shape \(3,\)"),
        (torch.ones(3, 2, dtype=torch.int64), torch.ones(1, 2), 1, "embeddings must be a floating-point tensor"),
        (torch.ones(0, 2), torch.ones(1, 2), 1, "embeddings must have at least one row"),
        (torch.tensor([[1.0], [float("nan")]]), torch.ones(1, 1), 1, "embeddings must be finite; .* first row 1"),
        (torch.ones(3, 2), torch.ones(2), 1, r"queries must be .* got torch.float32 of shape \(2,\)"),
        (torch.ones(3, 2), torch.ones(0, 2), 1, r"at least one embedding of width 2 on cpu, got shape \(0, 2\)"),
        (torch.ones(3, 2), torch.ones(1, 3), 1, r"of width 2 on cpu, got shape \(1, 3\)"),
        (torch.ones(3, 2), torch.tensor([[1.0, float("inf")]]), 1, "queries must be finite"),
        (torch.ones(3, 2), torch.ones(1, 2), 0, "top must be at least 1, got 0"),
    ],
)
def test_wrong_input(embeddings, queries, top, message):
    for kind in (ExactIndex, lambda embeddings: FaissIndex(embeddings, "Flat")):
        with pytest.raises(ValueError, match=message):
            kind(embeddings).search(queries, top)


def test_a_similarity_that_returns_something_else():
    wrong = {
        "shape": lambda x, y: torch.ones(len(y), len(x)),
        "floating-point": lambda x, y: torch.ones(len(x), len(y), dtype=torch.int64),
        "must be finite; they are not for 2 of 2 rows": lambda x, y: torch.full((len(x), len(y)), float("nan")),
    }
    for message, similarity in wrong.items():
        with pytest.raises(ValueError, match=message):
            ExactIndex(torch.ones(3, 2, 4), similarity).search(torch.ones(2, 2, 4), 1)


# FAISS


@pytest.fixture(scope="module")
def faiss():
    return pytest.importorskip("faiss")


def test_flat_index_equals_the_exact_search(faiss, small_parts):
    embeddings, queries = unit_vectors(50, 5), unit_vectors(7, 5, seed=1)
    for top in (1, 20, 60):
        found = FaissIndex(embeddings, "Flat").search(queries, top)
        expected = ExactIndex(embeddings).search(queries, top)
        assert torch.equal(found.indices, expected.indices)
        torch.testing.assert_close(found.similarities, expected.similarities, rtol=0, atol=1e-6)


def test_equal_ones_that_faiss_finds_are_in_the_order_of_their_indices(faiss, small_parts):
    embeddings, queries = whole_numbers(50, 5, seed=0), whole_numbers(7, 5, seed=1)
    found = FaissIndex(embeddings, "Flat").search(queries, 20)
    similarities = queries @ embeddings.T
    values, indices = nearest_by_a_loop(similarities, 20)
    assert found.similarities.tolist() == values
    for row, (ours, expected) in enumerate(zip(found.indices.tolist(), indices, strict=True)):
        last = values[row][-1]
        # Which of those that are as near as the last one are found is up to FAISS.
        before = [index for index in expected if similarities[row, index] > last]
        assert ours[: len(before)] == before
        assert ours[len(before) :] == sorted(ours[len(before) :])
        assert (similarities[row, ours[len(before) :]] == last).all()
    assert any(len(set(row)) < len(row) for row in values)


def test_approximate_indices_find_most(faiss):
    embeddings = unit_vectors(1000, 32)
    queries = normalize(
        embeddings[:200] + 0.1 * torch.randn(200, 32, generator=torch.Generator().manual_seed(1)), dim=1
    )
    exact = ExactIndex(embeddings).search(queries, 10)

    def recall(index):
        found = index.search(queries, 10)
        # Right are also the similarities, whatever the index keeps of a vector.
        present = found.indices >= 0
        expected = (queries @ embeddings.T).gather(1, found.indices.clamp(min=0))
        torch.testing.assert_close(found.similarities[present], expected[present], rtol=0, atol=1e-6)
        assert (found.similarities[~present] == -torch.inf).all()
        assert (found.similarities.diff(dim=1)[present[:, 1:]] <= 0).all()
        return (found.indices[:, :, None] == exact.indices[:, None]).any(dim=2).float().mean()

    assert recall(FaissIndex(embeddings, "HNSW32")) > 0.9
    assert 0.3 < recall(FaissIndex(embeddings, "PQ8x4")) < 0.95
    clustered = FaissIndex(embeddings, "IVF16,Flat")
    before = recall(clustered)
    clustered.set_parameters("nprobe=16")
    assert before < 0.9
    assert recall(clustered) == 1


def test_an_index_that_finds_fewer_says_so(faiss):
    embeddings = unit_vectors(40, 8)
    found = FaissIndex(embeddings, "IVF8,Flat").search(embeddings[:2], 40)
    assert found.indices.shape == (2, 40)
    missing = found.indices < 0
    assert missing.any(dim=1).all()
    assert (found.indices[missing] == -1).all()
    assert (found.similarities[missing] == -torch.inf).all()
    assert not missing[:, 0].any()
    # Behind all that was found.
    assert (missing.int().diff(dim=1) >= 0).all()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            "Nonsense",
            r"'Nonsense' is no index of FAISS for vectors of 8 numbers: could not parse index string Nonsense$",
        ),
        ("", "'' is no index of FAISS for vectors of 8 numbers: could not parse index string"),
        ("PQ3", r"'PQ3' is no index of FAISS for .*: The dimension of the vector \(d\) should be a multiple"),
        ("LSH", "'LSH' is no index of FAISS for vectors of 8 numbers: 'metric == METRIC_L2' failed$"),
        ("HNSW32,PQ4", "FAISS has the index 'HNSW32,PQ4' for Euclidean distances only"),
        ("HNSW1", "'HNSW1' is no index of FAISS: a graph needs more neighbours, such as HNSW32 or NSG32$"),
        ("IVF4_HNSW0,Flat", "a graph needs more neighbours"),
        ("NSG4", "a graph needs more neighbours"),
        (
            "IVF256,Flat",
            r"cannot build the index 'IVF256,Flat' of 24 vectors: Number of training points \(24\) should be at least "
            r"as large as number of clusters \(256\)$",
        ),
        ("IDMap,Flat", "cannot build the index 'IDMap,Flat' of 24 vectors: add does not make sense"),
    ],
)
def test_indices_that_faiss_cannot_build(faiss, factory, message):
    with pytest.raises(UserError, match=message) as raised:
        FaissIndex(unit_vectors(24, 8), factory)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("efSearch=3", "cannot set 'efSearch=3' for the index 'IVF4,Flat': .*could not set parameter efSearch$"),
        ("nprobe", "cannot set 'nprobe' .*: could not interpret parameters nprobe$"),
        ("nprobe=0", "parameters of the index 'IVF4,Flat' must be whole numbers from 1 on, got 'nprobe=0'"),
        ("nprobe=x", "must be whole numbers"),
        ("nprobe=1.5", "must be whole numbers"),
        (" ", "must be whole numbers"),
    ],
)
def test_wrong_parameters(faiss, text, message):
    index = FaissIndex(unit_vectors(200, 8), "IVF4,Flat")
    with pytest.raises(UserError, match=message):
        index.set_parameters(text)


def test_faiss_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'vl_plugins\[faiss\]'"):
        FaissIndex(unit_vectors(3, 2), "Flat")


@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "IVF4,Flat", "PCA4,SQ8"])
def test_a_written_index_is_read_and_not_built(faiss, tmp_path, monkeypatch, factory):
    embeddings, queries = unit_vectors(200, 8), unit_vectors(5, 8, seed=1)
    index = FaissIndex(embeddings, factory)
    index.write(tmp_path / "new" / "i.faiss")
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == ["i.faiss", "i.faiss.json"]
    monkeypatch.setattr(faiss, "index_factory", None)
    again = FaissIndex.read(tmp_path / "new" / "i.faiss", embeddings, factory)
    assert again.factory == factory
    for found, expected in zip(again.search(queries, 9), index.search(queries, 9), strict=True):
        assert torch.equal(found, expected)


def write_sidecar(file, **changes):
    sidecar = file.with_name("i.faiss.json")
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), **changes}))


def replace_index(file, embeddings, factory="Flat", metric=0):
    """Put another index in its place, and the right hash beside it."""
    import faiss

    index = faiss.index_factory(embeddings.shape[1], factory, metric)
    if factory == "Flat":
        index.add(embeddings.numpy())
    data = faiss.serialize_index(index).tobytes()
    file.write_bytes(data)
    write_sidecar(file, file_sha256=hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: write_sidecar(file, factory="HNSW8"), "is of other kind"),
        (lambda file: write_sidecar(file, vectors=[20, 9]), "is of other embeddings"),
        (lambda file: write_sidecar(file, vectors_sha256="0" * 64), "is of other embeddings"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "has changed since it was written"),
        (lambda file: file.write_bytes(b""), "has changed since it was written"),
        (lambda file: file.unlink(), "cannot read index .*: No such file"),
    ],
)
def test_faiss_does_not_see_an_index_of_something_else(faiss, tmp_path, monkeypatch, damage, message):
    embeddings, file = unit_vectors(20, 8), tmp_path / "i.faiss"
    FaissIndex(embeddings, "Flat").write(file)
    damage(file)
    monkeypatch.setattr(faiss, "deserialize_index", None)
    with pytest.raises(StaleIndexError, match=message):
        FaissIndex.read(file, embeddings, "Flat")


@pytest.mark.parametrize(
    "arguments",
    [
        {"embeddings": unit_vectors(19, 8)},
        {"embeddings": unit_vectors(20, 4)},
        {"embeddings": unit_vectors(20, 8), "metric": 1},
        {"embeddings": unit_vectors(20, 8), "factory": "IVF4,Flat"},
    ],
)
def test_an_index_that_is_not_what_is_said_of_it(faiss, tmp_path, arguments):
    embeddings, file = unit_vectors(20, 8), tmp_path / "i.faiss"
    FaissIndex(embeddings, "Flat").write(file)
    replace_index(file, **arguments)
    with pytest.raises(StaleIndexError, match=r"does not hold what i\.faiss\.json says"):
        FaissIndex.read(file, embeddings, "Flat")


def test_an_index_that_faiss_cannot_read(faiss, tmp_path):
    embeddings, file = unit_vectors(20, 8), tmp_path / "i.faiss"
    FaissIndex(embeddings, "Flat").write(file)
    file.write_bytes(b"nonsense")
    write_sidecar(file, file_sha256=hashlib.sha256(b"nonsense").hexdigest())
    with pytest.raises(StaleIndexError, match=r"cannot read index .*i\.faiss: .*not recognized") as raised:
        FaissIndex.read(file, embeddings, "Flat")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("sidecar", [None, b"", b"\xff", b"[" * 100_000, b"[]", b"{}", b'{"format": 3}'])
def test_an_index_of_somebody_else_stays(faiss, tmp_path, sidecar):
    file = tmp_path / "i.faiss"
    file.write_bytes(b"theirs")
    if sidecar is not None:
        (tmp_path / "i.faiss.json").write_bytes(sidecar)
    with pytest.raises(UserError, match=r"i\.faiss is not one that vl-plugins wrote: i\.faiss\.json") as raised:
        FaissIndex.read(file, unit_vectors(3, 2), "Flat")
    assert not isinstance(raised.value, StaleIndexError)


KILLED = """
import os, signal, sys
import torch
import vl_plugins.commands.search
from vl_plugins.retrieval.search import FaissIndex

assert "faiss" not in sys.modules
replace = os.replace

def killed(unfinished, file):
    if not file.endswith(".json"):
        os.truncate(unfinished, 10)
        os.kill(os.getpid(), signal.SIGKILL)
    replace(unfinished, file)

index = FaissIndex(torch.eye(4), "Flat")
os.replace = killed
index.write(sys.argv[1])
"""


def test_killed_while_it_is_written(faiss, tmp_path):
    """The index that was there before is then seen to be of something else. No import needs faiss."""
    file = tmp_path / "i.faiss"
    FaissIndex(torch.eye(5), "Flat").write(file)
    before = file.read_bytes()
    result = subprocess.run(
        [sys.executable, "-c", KILLED, str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert file.read_bytes() == before
    with pytest.raises(StaleIndexError, match="has changed since it was written"):
        FaissIndex.read(file, torch.eye(4), "Flat")
