"""Similarities of sets: functions, distances, and distances in losses and miners."""

import copy
import math
import pickle

import pytest
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch.nn.functional import normalize

from tests.helpers.memory import extra_bytes
from tests.sets import references
from tests.sets.references import SIMILARITIES, normal, value_and_gradients
from vl_plugins import create_loss, distances, negatives
from vl_plugins.distances import match_probability

NAMES = pytest.mark.parametrize("name", SIMILARITIES)
TILED = pytest.mark.parametrize("tiled", [False, True], ids=["dense", "tiled"])
OPTIONS = {"SmoothChamferSimilarity": {"alpha": 9.0}, "MatchProbability": {"scale": 3.0, "shift": -0.5}}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of two sets, the last one smaller."""
    monkeypatch.setattr(negatives, "CPU_BLOCK", 2 * 3 * 5 * 2)


def make(name, **options):
    return getattr(distances, name)(**(OPTIONS.get(name, {}) | options))


def make_sides(padded=True, **options):
    """Sets (7, 3, 6) and (5, 2, 6); of those padded, one is full, one starts with padding, one is empty."""
    sides = normal(7, 3, 6, **options).detach(), normal(5, 2, 6, seed=1, **options).detach()
    if padded:
        for side in sides:
            side[1, 0] = side[2, -1] = side[-1] = 0
    return [side.requires_grad_() for side in sides]


def expected(name, x, y, **options):
    leaves = [side.detach().cpu().double().requires_grad_() for side in (x, y)]
    values = references.matrix(SIMILARITIES[name], *leaves, **OPTIONS.get(name, {}), **options)
    return value_and_gradients(values, leaves)


def check(actual, wanted, dtype=torch.float64):
    for one, other in zip(actual, wanted, strict=True):
        assert other.abs().max() > 1e-5, "the case shows nothing"
        torch.testing.assert_close(one, other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@TILED
@NAMES
def test_formula(small_blocks, name, tiled, padded, dtype):
    x, y = make_sides(padded, dtype=dtype)
    similarities = make(name, tiled=tiled)(x, y)
    assert similarities.dtype == dtype
    assert (similarities == 0).sum() == (11 if padded else 0)  # those of empty sets
    check(value_and_gradients(similarities, (x, y)), expected(name, x, y), dtype)


@NAMES
def test_packed_sets(name):
    x, y = make_sides()
    distance, wanted = make(name, set_size=3), expected(name, x, y)
    assert distance.is_inverted
    for query, other in ((x.flatten(1), y.flatten(1)), (x, y.flatten(1)), (x.flatten(1), y)):
        check(value_and_gradients(distance(query, other), (x, y)), wanted)
    # If one side only is packed, the other one gives the dimension.
    check(value_and_gradients(make(name)(x, y.flatten(1)), (x, y)), wanted)
    torch.testing.assert_close(distance(x.flatten(1)), make(name)(x, x))
    assert torch.equal(make(name)(x[:, 0]), distance(x[:, :1]))  # vectors are sets of one


@NAMES
def test_paired(name):
    x, y = make_sides()
    distance, wanted = make(name, set_size=3), references.matrix(SIMILARITIES[name], x, y, **OPTIONS.get(name, {}))
    wanted = value_and_gradients(wanted.diagonal(), (x, y))
    for query, other in ((x[:5], y), (x[:5].flatten(1), y.flatten(1))):
        check(value_and_gradients(distance.pairwise_distance(query, other), (x, y)), wanted)
    with pytest.raises(ValueError, match="paired sets must be equally many, got 7 and 5"):
        distance.pairwise_distance(x, y)


@NAMES
def test_dot_products(name):
    x, y = make_sides(padded=False)
    wanted = expected(name, x, y, similarity=references.dot_product)
    check(value_and_gradients(make(name, normalize_embeddings=False)(x, y), (x, y)), wanted)
    units = normalize(x, dim=2), normalize(y, dim=2)  # with torch's gradient
    check(value_and_gradients(make(name, normalize_embeddings=False)(*units), (x, y)), expected(name, x, y))


def test_ties_share_the_gradient():
    """Of two identical elements of x, and two of y."""
    for name, wanted in (
        ("ChamferSimilarity", [1 / 8 + 1 / 12, 1 / 8 + 1 / 12, 1 / 12]),
        ("MILSimilarity", [1 / 4, 1 / 4, 0]),
    ):
        # Of orthonormal y the gradient by x is that by the cosines.
        x = torch.tensor([[[0.5, 0.5, -0.2, 0]] * 2], dtype=torch.float64, requires_grad=True)
        y = torch.eye(4, dtype=torch.float64)[None, :3]
        (gradient,) = torch.autograd.grad(make(name, normalize_embeddings=False)(x, y).sum(), x)
        torch.testing.assert_close(gradient[0, :, :3], torch.tensor([wanted] * 2, dtype=torch.float64))


def test_a_large_alpha_is_chamfer_and_does_not_overflow():
    x, y = make_sides(padded=False, dtype=torch.float32)
    wanted = value_and_gradients(distances.chamfer_similarity(x, y), (x, y))
    for alpha, tolerance in ((100.0, math.log(3) / 100), (1e6, 1e-4)):
        actual = value_and_gradients(distances.smooth_chamfer_similarity(x, y, alpha), (x, y))
        torch.testing.assert_close(actual[0], wanted[0], atol=tolerance, rtol=0)
        assert all(part.isfinite().all() for part in actual)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@NAMES
def test_extreme_elements_have_finite_derivatives(name, dtype):
    ones = torch.ones(2, 3, 4)
    for x, y in ((ones, ones), (ones, -ones), (0 * ones, ones), (0 * ones, 0 * ones), (1e-7 * ones, 6e4 * ones)):
        sets = x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()
        similarities = make(name)(*sets)
        gradients = torch.autograd.grad(similarities.sum(), sets, create_graph=True)
        second = torch.autograd.grad(sum(gradient.float().sum() for gradient in gradients), sets)
        assert all(tensor.isfinite().all() for tensor in (similarities, *gradients, *second))
        assert all(side.any() or not gradient.any() for side, gradient in zip(sets, gradients, strict=True))


def test_given_numbers_are_not_rounded():
    """Neither scale and shift of a function, nor those of a distance that does not learn them."""
    x, y = make_sides()
    wanted = references.matrix(references.match_probability, x, y, scale=0.1, shift=0.7)
    torch.testing.assert_close(match_probability(x, y, 0.1, 0.7), wanted, atol=1e-14, rtol=0)
    fixed = distances.MatchProbability(scale=0.1, shift=0.7, learnable=False)
    assert list(fixed.parameters()) == []
    torch.testing.assert_close(fixed(x, y), wanted, atol=1e-14, rtol=0)
    assert {parameter.dtype for parameter in make("MatchProbability").parameters()} == {torch.float32}


def test_learned_scale_and_shift():
    x, y = make_sides()
    numbers = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (3.0, -0.5)]
    wanted = references.matrix(references.match_probability, x, y, scale=numbers[0], shift=numbers[1])
    actual = value_and_gradients(match_probability(x, y, *numbers), numbers)
    check(actual, value_and_gradients(wanted, numbers))
    scale = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)  # of another type than the sets
    value = match_probability(x.float(), y.float(), scale)
    (gradient,) = torch.autograd.grad(value.sum(), scale)
    assert (value.dtype, gradient.dtype, gradient.shape) == (torch.float32, torch.float64, (1,))
    for option in ("scale", "shift"):
        with pytest.raises(ValueError, match=rf"^{option} must have one element, got shape \(5,\)"):
            match_probability(x, y, **{option: torch.ones(5)})
    loss = create_loss("triplet_sh", distance="match_probability")
    assert dict(loss.named_parameters()).keys() == {"distance.scale", "distance.shift"}


def test_statistics_norms_and_records():
    x, y = (side.detach() for side in make_sides(padded=False))
    distance = distances.SmoothChamferSimilarity(alpha=3, set_size=3, collect_stats=True)
    distance(x.flatten(1), y.flatten(1))
    assert distance.initial_avg_query_norm == pytest.approx(x.norm(dim=2).mean().item())
    assert distance.final_avg_ref_norm == pytest.approx(1)
    assert {"set_size", "alpha"} <= set(distance._record_these)
    assert distance.get_norm(x.flatten(1)).shape == (7, 3)
    torch.testing.assert_close(distance.maybe_normalize(x.flatten(1)), normalize(x, dim=2).flatten(1))
    assert distance.normalize(x.half()).dtype == torch.float32


@NAMES
def test_copies(name):
    x, y = make_sides()
    loss, other = (create_loss("unified", distance=make(name, set_size=3)) for _ in range(2))
    other.load_state_dict(loss.state_dict())
    for twin in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss), other, copy.deepcopy(loss).half()):
        torch.testing.assert_close(twin.distance(x.flatten(1), y), loss.distance(x.flatten(1), y))


@pytest.mark.parametrize(
    ("query", "other", "set_size"),
    [
        ((4, 3, 6), (5, 2, 7), 1),
        ((4, 8), (5, 6), 3),  # 8 is no multiple of 3, though of 8 // 3
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
    for function in (distance, distance.pairwise_distance):
        with pytest.raises(ValueError, match=rf"^embeddings must be sets .* \(B, {set_size} \* D\).*{shapes}"):
            function(torch.ones(query), torch.ones(other))
    with pytest.raises(ValueError, match=r"must have the shapes .*, got \(4, 6\) and \(5, 6\)"):
        distances.mil_similarity(torch.ones(4, 6), torch.ones(5, 6))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("MILSimilarity", {"set_size": 0}, "set_size must be an integer >= 1"),
        ("MILSimilarity", {"p": 1}, "MILSimilarity takes p=2 and power=1 only"),
        ("SmoothChamferSimilarity", {"alpha": 0}, "alpha must be a finite number > 0, got 0"),
        ("MatchProbability", {"scale": math.nan}, "scale must be a finite number, got nan"),
    ],
)
def test_wrong_options(name, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        getattr(distances, name)(**options)


@NAMES
def test_accuracy_of_sets(name):
    (x, y), labels, ref_labels = make_sides(padded=False), torch.arange(7) % 3, torch.arange(5) % 3
    y = torch.cat([y, normal(5, 1, 6, seed=2)], dim=1)
    knn = CustomKNN(make(name, set_size=3), batch_size=4)
    calculator = AccuracyCalculator(include=("precision_at_1",), k=1, knn_func=knn)
    with torch.no_grad():
        found = calculator.get_accuracy(x.flatten(1), labels, y.flatten(1), ref_labels)
        nearest = references.matrix(SIMILARITIES[name], x, y, **OPTIONS.get(name, {})).argmax(1)
    assert found["precision_at_1"] == pytest.approx((ref_labels[nearest] == labels).double().mean().item())


def test_memory(monkeypatch):
    """Without the similarities and the gradients."""
    monkeypatch.setattr(negatives, "CPU_BLOCK", 2**14)
    sets = [normalize(normal(n, 4, 64, dtype=torch.float32), dim=2).detach().requires_grad_() for n in (300, 400)]
    upstream = torch.ones(300, 400)
    kept = upstream.nbytes + sum(side.nbytes for side in sets)

    def extra(similarity):
        return extra_bytes(lambda: torch.autograd.grad(similarity(*sets), sets, upstream), kept=kept)

    peer = extra(references.EXP_AND_POOL["LP pooling"])
    dense, tiled = (extra(distances.SmoothChamferSimilarity(tiled=tiled)) for tiled in (False, True))
    assert dense < 0.8 * peer
    assert tiled < 0.1 * peer
    for least, default in ((4 * 300 * 4 * 400 * 4, dense), (4 * 300 * 4 * 400 * 4 - 1, tiled)):
        monkeypatch.setattr(distances, "MATRIX_BYTES", least)
        assert extra(distances.SmoothChamferSimilarity()) == default


@NAMES
def test_losses_of_sets(name):
    x, y = normal(6, 3, 4), normal(8, 3, 4, seed=1)
    labels, ref_labels = torch.arange(6) % 3, torch.arange(8) % 3
    loss = create_loss("vlc", scale=5.0, distance=make(name, set_size=3))
    similarities, same = (
        references.matrix(SIMILARITIES[name], x, y, **OPTIONS.get(name, {})),
        labels[:, None] == ref_labels,
    )
    wanted = value_and_gradients(loss.from_similarities(similarities, same, ~same), (x, y))
    for sides in ((x, y), (x.flatten(1), y.flatten(1))):
        check(value_and_gradients(loss(sides[0], labels, ref_emb=sides[1], ref_labels=ref_labels), (x, y)), wanted)
