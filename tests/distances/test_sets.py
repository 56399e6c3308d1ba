"""Similarities of sets as distances; those in losses and miners are in ``tests/pml``."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from torch.nn.functional import normalize

from tests.helpers.sets import normal, random_mask, value_and_gradients
from tests.reference import sets as reference
from vl_plugins import create_loss, distances
from vl_plugins.distances.sets import elements_present

# By class name: its options, and the loops.
SIMILARITIES = {
    "ChamferSimilarity": ({}, reference.chamfer),
    "MILSimilarity": ({}, reference.mil),
    "MatchProbability": ({"scale": 3.0, "shift": -0.5}, partial(reference.match_probability, scale=3.0, shift=-0.5)),
    "SmoothChamferSimilarity": ({"alpha": 9.0}, partial(reference.smooth_chamfer, alpha=9.0)),
}
NAMES = pytest.mark.parametrize("name", SIMILARITIES)


def make_distance(name, **options):
    return getattr(distances, name)(**(SIMILARITIES[name][0] | options))


def make_sides():
    return normal(4, 3, 6), normal(5, 2, 6, seed=1)


@NAMES
def test_sets_and_packed_sets(name):
    assert set(distances.__all__) == set(SIMILARITIES)
    x, y = make_sides()
    expected = value_and_gradients(reference.matrix(SIMILARITIES[name][1], x, y), (x, y))
    distance = make_distance(name, set_size=3)
    assert distance.is_inverted
    for query, other in ((x, y), (x.flatten(1), y.flatten(1)), (x, y.flatten(1)), (x.flatten(1), y)):
        torch.testing.assert_close(value_and_gradients(distance(query, other), (x, y)), expected, atol=1e-9, rtol=0)
    # If one side only is packed, the other one gives the dimension.
    for query, other in ((x, y.flatten(1)), (x.flatten(1), y)):
        torch.testing.assert_close(make_distance(name)(query, other), expected[0], atol=1e-10, rtol=0)
    expected = reference.matrix(SIMILARITIES[name][1], x, x)
    torch.testing.assert_close(distance(x.flatten(1)), expected, atol=1e-10, rtol=0)
    assert torch.equal(make_distance(name)(x[:, 0]), distance(x[:, :1]))  # vectors are sets of one


@pytest.mark.parametrize("packed", [False, True], ids=["sets", "packed"])
@NAMES
def test_zeros_are_padding(name, packed):
    sides = make_sides()
    masks = [random_mask(sets, seed) for seed, sets in enumerate(sides, 2)]
    x, y = (
        sets.detach().masked_fill(~mask[..., None], 0).requires_grad_() for sets, mask in zip(sides, masks, strict=True)
    )
    expected = value_and_gradients(reference.matrix(SIMILARITIES[name][1], x, y, *masks), (x, y))
    query, other = (x.flatten(1), y.flatten(1)) if packed else (x, y)
    actual = value_and_gradients(make_distance(name, set_size=3)(query, other), (x, y))
    empty = ~(masks[0].any(1)[:, None] & masks[1].any(1))
    assert torch.equal(actual[0] == 0, empty)
    assert 1 < empty.sum() < 20
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=0)


def test_elements_present():
    sets = normal(3, 4, 2).detach()
    assert elements_present(sets) is None
    assert elements_present(sets[:0]) is None
    sets[0, 1], sets[2, 3, 0], sets[1, 2] = 0, 0, torch.nan
    expected = torch.ones(3, 4, dtype=torch.bool)
    expected[0, 1] = False
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        assert torch.equal(elements_present(sets.to(dtype)), expected)


@NAMES
def test_pairs(name):
    x, y = normal(4, 3, 6), normal(4, 2, 6, seed=1)
    with torch.no_grad():
        x[1, 2] = y[3] = 0
    distance = make_distance(name, set_size=3)
    loops = reference.matrix(reference.elements_that_are_not_zero(SIMILARITIES[name][1]), x, y)
    expected = value_and_gradients(loops.diagonal(), (x, y))
    for query, other in ((x, y), (x.flatten(1), y.flatten(1)), (distance.normalize(x), distance.normalize(y))):
        actual = value_and_gradients(distance.pairwise_distance(query, other), (x, y))
        torch.testing.assert_close(actual, expected, atol=1e-9, rtol=0)


@NAMES
def test_dot_products_another_norm_and_power(name):
    x, y = (0.5 * side for side in make_sides())
    loops = partial(SIMILARITIES[name][1], element_similarity=lambda one, other: (one * other).sum())
    products = make_distance(name, normalize_embeddings=False)
    torch.testing.assert_close(products(x, y), reference.matrix(loops, x, y), atol=1e-10, rtol=0)
    expected = products(normalize(x, p=1, dim=2), normalize(y, p=1, dim=2)) ** 3
    torch.testing.assert_close(make_distance(name, p=1, power=3)(x, y), expected, atol=1e-10, rtol=0)


def test_statistics_and_records():
    x, y = (side.detach() for side in make_sides())
    distance = distances.SmoothChamferSimilarity(alpha=3, set_size=3, collect_stats=True)
    for query, other in ((x, y), (x.flatten(1), y.flatten(1))):
        distance(query, other)
        assert distance.initial_avg_query_norm == pytest.approx(x.norm(dim=2).mean().item())
        assert distance.initial_avg_ref_norm == pytest.approx(y.norm(dim=2).mean().item())
        assert distance.final_avg_query_norm == pytest.approx(1)
        assert distance.final_avg_ref_norm == pytest.approx(1)
    assert {"set_size", "alpha"} <= set(distance._record_these)
    assert distance.get_norm(x.flatten(1)).shape == (4, 3)


def test_normalize():
    x = normal(4, 3, 6)
    distance = distances.MILSimilarity(set_size=3)
    expected = x / x.norm(dim=2, keepdim=True)
    torch.testing.assert_close(distance.normalize(x), expected)
    torch.testing.assert_close(distance.maybe_normalize(x.flatten(1)), expected.flatten(1))
    assert distance.normalize(x.half()).dtype == torch.float32
    assert torch.equal(distances.MILSimilarity(normalize_embeddings=False).maybe_normalize(x), x)


@NAMES
def test_copies(name, tmp_path):
    x, y = make_sides()
    loss = create_loss("unified", distance=make_distance(name, set_size=3))
    expected = loss.distance(x.flatten(1), y)
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    restored = create_loss("unified", distance=make_distance(name, set_size=3))
    restored.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    for twin in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss), restored, copy.deepcopy(loss).half()):
        torch.testing.assert_close(twin.distance(x.flatten(1), y), expected)


def test_learnable_probabilities():
    """An optimizer of the loss's parameters raises the probability of what matches."""
    assert list(distances.MatchProbability(learnable=False).parameters()) == []
    distance = distances.MatchProbability(scale=2.0, shift=-1.0)
    loss = create_loss("triplet_sh", distance=distance)
    assert dict(loss.named_parameters()).keys() == {"distance.scale", "distance.shift"}
    x = normal(6, 3, 6, dtype=torch.float32).detach()
    y = x + 0.5 * normal(6, 3, 6, seed=1, dtype=torch.float32).detach()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.5)
    values = []
    for _ in range(3):
        value = loss(x, torch.arange(6), ref_emb=y, ref_labels=torch.arange(6))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[0] > values[1] > values[2]
    assert distance.scale > 2
    assert distance.shift != -1


@pytest.mark.parametrize(
    ("query", "other", "set_size"),
    [
        ((4, 3, 6), (5, 2, 7), 1),
        ((4, 7), (5, 6), 3),
        ((4, 6), (5, 7), 3),
        ((4, 3, 6), (5, 8), 1),
        ((4, 6), (6,), 1),
        ((4, 2, 3, 6), (5, 2, 6), 1),
        ((4, 0), (5, 6), 1),
    ],
    ids=str,
)
def test_shapes_that_do_not_match(query, other, set_size):
    distance = distances.MILSimilarity(set_size=set_size)
    shapes = rf"{query} and {other}".replace("(", r"\(").replace(")", r"\)")
    message = rf"^embeddings must be sets .* or packed: \(B, {set_size} \* D\).*{shapes}"
    for function in (distance, distance.compute_mat, distance.pairwise_distance, distance.check_shapes):
        with pytest.raises(ValueError, match=message):
            function(torch.ones(query), torch.ones(other))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("MILSimilarity", {"set_size": 0}, "set_size must be an integer >= 1"),
        ("SmoothChamferSimilarity", {"alpha": 0}, "alpha must be a finite number > 0, got 0"),
        ("SmoothChamferSimilarity", {"backend": "functional"}, "unknown backend 'functional'"),
        ("MatchProbability", {"scale": math.nan}, "scale must be a finite number, got nan"),
        ("MatchProbability", {"shift": math.inf}, "shift must be a finite number, got inf"),
    ],
)
def test_wrong_hyper_parameters(name, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        getattr(distances, name)(**options)
