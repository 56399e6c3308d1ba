"""What all similarities of sets have in common; those in losses and miners are in ``tests/pml``."""

import copy
import pickle
from functools import partial

import pytest
import torch
from pytorch_metric_learning.distances import BatchedDistance
from torch.nn.functional import cosine_similarity, normalize

from tests.functional.test_set_similarity import random_mask, random_sets
from tests.memory import LargestTensor
from tests.reference import sets as reference
from vl_plugins import create_loss, distances
from vl_plugins.distances.base import SetDistance, elements_present
from vl_plugins.losses import wrappers

# By class name: how it is made, and the loops.
SIMILARITIES = {
    "ChamferSimilarity": ({}, reference.chamfer),
    "MILSimilarity": ({}, reference.mil),
    "MatchProbability": (
        {"scale": 3.0, "shift": -0.5},
        partial(reference.match_probability, scale=3.0, shift=-0.5),
    ),
    "SmoothChamferSimilarity": ({"alpha": 9.0}, partial(reference.smooth_chamfer, alpha=9.0)),
}
NAMES = pytest.mark.parametrize("name", SIMILARITIES)


def distance_of(name, **options):
    return getattr(distances, name)(**(SIMILARITIES[name][0] | options))


def test_all_have_loops():
    assert set(distances.__all__) == set(SIMILARITIES)
    for name in SIMILARITIES:
        distance = distance_of(name)
        assert isinstance(distance, SetDistance)
        assert distance.is_inverted


def value_and_gradients(similarities, leaves):
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(similarities.shape, dtype=torch.float64, generator=generator)
    return similarities.detach(), *torch.autograd.grad(similarities, leaves, upstream)


@NAMES
def test_sets_and_packed_sets(name):
    x, y = random_sets(4, 3, 6), random_sets(5, 2, 6, seed=1)
    expected = value_and_gradients(reference.matrix(SIMILARITIES[name][1], x, y), (x, y))
    distance = distance_of(name, set_size=3)
    for query, other in ((x, y), (x.flatten(1), y.flatten(1)), (x, y.flatten(1)), (x.flatten(1), y)):
        actual = value_and_gradients(distance(query, other), (x, y))
        torch.testing.assert_close(actual, expected, atol=1e-9, rtol=0)
    # One packed side alone tells nothing of the size: the other one tells the dimension.
    for query, other in ((x, y.flatten(1)), (x.flatten(1), y)):
        torch.testing.assert_close(distance_of(name)(query, other), expected[0], atol=1e-10, rtol=0)


@NAMES
def test_one_side(name):
    x = random_sets(4, 3, 6)
    expected = value_and_gradients(reference.matrix(SIMILARITIES[name][1], x, x), x)
    for query in (x, x.flatten(1)):
        actual = value_and_gradients(distance_of(name, set_size=3)(query), x)
        torch.testing.assert_close(actual, expected, atol=1e-9, rtol=0)


@NAMES
def test_vectors_are_sets_of_one(name):
    x, y = random_sets(4, 6), random_sets(5, 6, seed=1)
    expected = cosine_similarity(x[:, None], y, dim=2)
    if name == "MatchProbability":
        expected = (3 * expected - 0.5).sigmoid()
    torch.testing.assert_close(distance_of(name)(x, y), expected, atol=1e-12, rtol=0)
    sets = torch.stack([y, y.flip(0)], dim=1)
    torch.testing.assert_close(distance_of(name)(x, sets.flatten(1)), distance_of(name)(x[:, None], sets))


@pytest.mark.parametrize("packed", [False, True], ids=["sets", "packed"])
@NAMES
def test_zeros_are_padding(name, packed):
    sides = [random_sets(4, 3, 6), random_sets(5, 2, 6, seed=1)]
    masks = [random_mask(sets, seed) for seed, sets in enumerate(sides, 2)]
    x, y = (
        sets.detach().masked_fill(~mask[..., None], 0).requires_grad_() for sets, mask in zip(sides, masks, strict=True)
    )
    expected = reference.matrix(SIMILARITIES[name][1], x, y, *masks)
    expected = value_and_gradients(expected, (x, y))
    leaves = [sets.detach().flatten(1) if packed else sets.detach() for sets in (x, y)]
    for leaf in leaves:
        leaf.requires_grad_()
    similarities, *gradients = value_and_gradients(distance_of(name, set_size=3)(*leaves), leaves)
    empty = ~(masks[0].any(1)[:, None] & masks[1].any(1))
    assert torch.equal(similarities == 0, empty)
    assert 1 < empty.sum() < 20
    torch.testing.assert_close(similarities, expected[0], atol=1e-10, rtol=0)
    for gradient, of_loops, mask in zip(gradients, expected[1:], masks, strict=True):
        torch.testing.assert_close(gradient.view_as(of_loops), of_loops, atol=1e-9, rtol=0)
        assert torch.equal(gradient.view_as(of_loops)[~mask], torch.zeros_like(of_loops[~mask]))


def test_elements_present():
    sets = random_sets(3, 4, 2).detach()
    assert elements_present(sets) is None
    assert elements_present(sets[:0]) is None
    sets[0, 1], sets[2, 3, 0], sets[1, 2] = 0, 0, torch.nan
    expected = torch.ones(3, 4, dtype=torch.bool)
    expected[0, 1] = False
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        assert torch.equal(elements_present(sets.to(dtype)), expected)


@NAMES
def test_pairs(name):
    x, y = random_sets(4, 3, 6), random_sets(4, 2, 6, seed=1)
    with torch.no_grad():
        x[1, 2] = y[3] = 0
    distance = distance_of(name, set_size=3)
    of_loops = reference.matrix(reference.elements_that_are_not_zero(SIMILARITIES[name][1]), x, y)
    expected = value_and_gradients(of_loops.diagonal(), (x, y))
    for query, other in ((x, y), (x.flatten(1), y.flatten(1)), (distance.normalize(x), distance.normalize(y))):
        actual = value_and_gradients(distance.pairwise_distance(query, other), (x, y))
        torch.testing.assert_close(actual, expected, atol=1e-9, rtol=0)


@NAMES
def test_dot_products(name):
    x, y = 0.5 * random_sets(4, 3, 6), 0.5 * random_sets(5, 2, 6, seed=1)
    of_sets = partial(SIMILARITIES[name][1], element_similarity=lambda one, other: (one * other).sum())
    expected = reference.matrix(of_sets, x, y)
    distance = distance_of(name, normalize_embeddings=False)
    torch.testing.assert_close(distance(x, y), expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(distance.pairwise_distance(x, y[:4]), expected.diagonal(), atol=1e-10, rtol=0)


@NAMES
def test_another_norm_and_power(name):
    x, y = random_sets(4, 3, 6), random_sets(5, 2, 6, seed=1)
    expected = distance_of(name, normalize_embeddings=False)(normalize(x, p=1, dim=2), normalize(y, p=1, dim=2))
    torch.testing.assert_close(distance_of(name, p=1, power=3)(x, y), expected**3, atol=1e-10, rtol=0)


@pytest.mark.parametrize("packed", [False, True], ids=["sets", "packed"])
@NAMES
def test_statistics(name, packed):
    x, y = random_sets(4, 3, 6).detach(), random_sets(5, 2, 6, seed=1).detach()
    distance = distance_of(name, set_size=3, collect_stats=True)
    distance(*((sets.flatten(1) for sets in (x, y)) if packed else (x, y)))
    assert distance.initial_avg_query_norm == pytest.approx(x.square().sum(2).sqrt().mean().item())
    assert distance.initial_avg_ref_norm == pytest.approx(y.square().sum(2).sqrt().mean().item())
    assert distance.final_avg_query_norm == pytest.approx(1)
    assert distance.final_avg_ref_norm == pytest.approx(1)
    assert "set_size" in distance._record_these
    assert distance.get_norm(x.flatten(1)).shape == (4, 3)


@NAMES
def test_normalize(name):
    x = random_sets(4, 3, 6)
    distance = distance_of(name, set_size=3)
    expected = x / x.square().sum(2, keepdim=True).sqrt()
    torch.testing.assert_close(distance.normalize(x), expected)
    torch.testing.assert_close(distance.maybe_normalize(x.flatten(1)), expected.flatten(1))
    assert distance.normalize(x.half()).dtype == torch.float32
    assert torch.equal(distance_of(name, normalize_embeddings=False).maybe_normalize(x), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@NAMES
def test_half_precision_and_autocast(name, dtype):
    x, y = (random_sets(4, size, 6, seed=size).to(dtype) for size in (3, 2))
    distance = distance_of(name)
    expected = distance(x.double(), y.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = distance(x, y), distance(x.float(), y.float())
    for similarities in actual:
        assert similarities.dtype == torch.float32
        torch.testing.assert_close(similarities.double(), expected, atol=1e-5, rtol=0)


@NAMES
def test_copies(name, tmp_path):
    x, y = random_sets(4, 3, 6), random_sets(5, 2, 6, seed=1)
    loss = create_loss("unified", distance=distance_of(name, set_size=3))
    expected = loss.distance(x.flatten(1), y)
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    restored = create_loss("unified", distance=getattr(distances, name)(**(SIMILARITIES[name][0] | {"set_size": 3})))
    restored.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    for twin in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss), restored, copy.deepcopy(loss).half()):
        torch.testing.assert_close(twin.distance(x.flatten(1), y), expected)


@NAMES
def test_batched_distance(name):
    x, y = random_sets(5, 3, 6).detach(), random_sets(4, 2, 6, seed=1).detach()
    found = []
    batched = BatchedDistance(
        distance_of(name, set_size=3), iter_fn=lambda part, start, end: found.append(part), batch_size=2
    )
    batched(x.flatten(1), y.flatten(1))
    assert [len(part) for part in found] == [2, 2, 1]
    torch.testing.assert_close(torch.cat(found), distance_of(name)(x, y))


@NAMES
def test_memory_of_sets_of_unequal_size(name):
    """Packed padding stays padding in a queue."""
    x, y = random_sets(4, 3, 6).detach(), random_sets(4, 3, 6, seed=1).detach()
    x[0, 2], y[1, 1:], y[2] = 0, 0, 0
    labels = torch.tensor([0, 1, 0, 1])
    distance = distance_of(name, set_size=3)
    memory = wrappers.CrossBatchMemory(create_loss("triplet_sh", distance=distance), embedding_size=18, memory_size=8)
    memory(x.flatten(1), labels)
    value = memory(y.flatten(1), labels)
    similarities = reference.matrix(reference.elements_that_are_not_zero(SIMILARITIES[name][1]), y, torch.cat([x, y]))
    terms = []
    for a in range(4):
        columns = [(similarities[a, c].item(), labels[c % 4] == labels[a]) for c in range(8) if c != a + 4]
        for positive in (s for s, same in columns if same):
            terms.append(sum(max(0.0, 0.2 + s - positive) for s, same in columns if not same))
    assert len(terms) == 12
    assert value.item() == pytest.approx(sum(terms) / len(terms))


@NAMES
def test_no_copy_is_normalised(name):
    """What the base class would do, at the size of the inputs."""
    x, y = (random_sets(count, 4, 64, dtype=torch.float32).detach() for count in (40, 3))
    with LargestTensor() as largest, torch.no_grad():
        distance_of(name)(x, y)
    assert largest.elements == x.numel()
    written = BytesWritten()
    with written, torch.no_grad():
        distance_of(name)(x, y)
    assert written.bytes < x.nbytes


class BytesWritten(LargestTensor):
    """Bytes of all tensors with memory of their own."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        result = super().__torch_dispatch__(function, types, args, kwargs)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in before:
                self.seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return result

    @property
    def bytes(self):
        return sum(self.seen.values())


@pytest.mark.parametrize(
    ("query", "other", "set_size"),
    [
        ((4, 3, 6), (5, 2, 7), 1),
        ((4, 7), (5, 6), 3),
        ((4, 8), (5, 6), 3),
        ((4, 6), (5, 7), 3),
        ((4, 3, 6), (5, 8), 1),
        ((4, 8), (5, 2, 6), 4),
        ((4, 6), (6,), 1),
        ((4, 2, 3, 6), (5, 2, 6), 1),
        ((4, 0), (5, 6), 1),
    ],
    ids=str,
)
@NAMES
def test_shapes_that_do_not_fit(name, query, other, set_size):
    distance = distance_of(name, set_size=set_size)
    shapes = rf"{query} and {other}".replace("(", r"\(").replace(")", r"\)")
    for function in (
        distance,
        distance.compute_mat,
        distance.pairwise_distance,
        distance.check_shapes,
        distance.unpack,
    ):
        with pytest.raises(
            ValueError, match=rf"^embeddings must be sets .* or packed: \(B, {set_size} \* D\).*{shapes}"
        ):
            function(torch.ones(query), torch.ones(other))
    if len(other) > 1:
        labels, ref_labels = torch.arange(query[0]), torch.arange(other[0])
        with pytest.raises(ValueError, match=f"^embeddings must be sets .*{shapes}"):
            create_loss("unified", distance=distance)(
                torch.ones(query), labels, ref_emb=torch.ones(other), ref_labels=ref_labels
            )


@pytest.mark.parametrize("set_size", [0, -1, 1.5, True])
def test_wrong_set_size(set_size):
    with pytest.raises(ValueError, match=r"^set_size must be an integer >= 1"):
        distances.MILSimilarity(set_size=set_size)
