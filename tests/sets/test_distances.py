"""Similarities of sets against the loops of the papers, and in losses of the package and of the host."""

import math
from functools import partial

import pytest
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN

from benchmarks.measurement import extra_bytes
from tests.reference.distances import dot_product
from tests.sets import references
from tests.sets.references import SIMILARITIES, check, normal, value_and_gradients
from vl_plugins import create_loss, distances, engine
from vl_plugins.distances import MatchProbability, SmoothChamferSimilarity

NAMES = pytest.mark.parametrize("name", SIMILARITIES)
OPTIONS = {"SmoothChamferSimilarity": {"alpha": 9.0}, "MatchProbability": {"scale": 3.0, "shift": -0.5}}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of two sets, the last one smaller."""
    monkeypatch.setattr(engine, "CPU_BLOCK", 2 * 3 * 5 * 2)


def make(name, **options):
    return getattr(distances, name)(**(OPTIONS.get(name, {}) | options))


def make_sides(padded=True, **options):
    """Sets (7, 3, 6) and (5, 2, 6); of those padded, one is full, one starts with padding, one is empty."""
    sides = normal(7, 3, 6, **options).detach(), normal(5, 2, 6, seed=1, **options).detach()
    if padded:
        for side in sides:
            side[1, 0] = side[2, -1] = side[-1] = 0
    return [side.requires_grad_() for side in sides]


def by_loops(name, **options):
    """A function of two sides."""
    return partial(references.matrix, SIMILARITIES[name], **OPTIONS.get(name, {}), **options)


@NAMES
def test_packed_sets_and_dot_products(name):
    (x, y), distance = make_sides(), make(name, set_size=3)
    assert distance.is_inverted
    for query, other in ((x.flatten(1), y.flatten(1)), (x, y.flatten(1)), (x.flatten(1), y)):
        check(distance(query, other), (x, y), by_loops(name))
    # If one side only is packed, the other one gives the dimension.
    check(make(name)(x, y.flatten(1)), (x, y), by_loops(name))
    torch.testing.assert_close(distance(x.flatten(1)), make(name)(x, x))
    assert torch.equal(make(name)(x[:, 0]), distance(x[:, :1]))  # vectors are sets of one
    sides = make_sides(padded=False)
    dots = by_loops(name, similarity=dot_product)
    check(make(name, normalize_embeddings=False)(*sides), sides, dots)


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
    wanted = make("ChamferSimilarity")(x, y)
    for alpha, tolerance in ((100.0, math.log(3) / 100), (1e6, 1e-4)):
        actual = value_and_gradients(SmoothChamferSimilarity(alpha)(x, y), (x, y))
        torch.testing.assert_close(actual[0], wanted.double(), atol=tolerance, rtol=0)
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


def test_numbers_of_the_match_probability():
    """Fixed ones are not rounded to float32; learned ones are parameters of the loss, with gradients."""
    x, y = make_sides()
    by_loops = partial(references.matrix, references.match_probability, x, y)
    fixed = MatchProbability(scale=0.1, shift=0.7, learnable=False)
    assert list(fixed.parameters()) == []
    torch.testing.assert_close(fixed(x, y), by_loops(scale=0.1, shift=0.7), atol=1e-14, rtol=0)
    loss = create_loss("triplet_sh", distance={"name": "match_probability", "scale": 3.0, "shift": -0.5})
    assert {name for name, _ in loss.named_parameters()} == {"distance.scale", "distance.shift"}
    numbers = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (3.0, -0.5)]
    wanted = value_and_gradients(by_loops(scale=numbers[0], shift=numbers[1]), numbers)
    found = value_and_gradients(loss.distance(x, y), list(loss.parameters()))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("query", "other", "set_size"),
    [
        ((4, 3, 6), (5, 2, 7), 1),
        ((4, 8), (5, 6), 3),  # 8 is no multiple of 3, though of 8 // 3
        ((4, 6), (5, 7), 3),
        ((4, 3, 6), (5, 8), 1),
        ((4, 2, 3, 6), (5, 2, 6), 1),
        ((4, 0), (5, 6), 1),
    ],
)
def test_shapes_that_do_not_match(query, other, set_size):
    with pytest.raises(ValueError, match="embeddings and ref_emb must be sets"):
        distances.MILSimilarity(set_size=set_size)(torch.ones(query), torch.ones(other))


@NAMES
def test_accuracy_and_losses_of_sets(name):
    """Packed, as the host's calculator takes them, and in a loss."""
    (x, y), labels, ref_labels = make_sides(padded=False), torch.arange(7) % 3, torch.arange(5) % 3
    y = torch.cat([y, normal(5, 1, 6, seed=2)], dim=1).detach().requires_grad_()
    distance, same = make(name, set_size=3), labels[:, None] == ref_labels
    calculator = AccuracyCalculator(include=("precision_at_1",), k=1, knn_func=CustomKNN(distance, batch_size=4))
    with torch.no_grad():
        found = calculator.get_accuracy(x.flatten(1), labels, y.flatten(1), ref_labels)
    right = ref_labels[by_loops(name)(x, y).argmax(1)] == labels
    assert found["precision_at_1"] == pytest.approx(right.double().mean().item())

    loss = create_loss("vlc", scale=5.0, distance=distance)
    for sides in ((x, y), (x.flatten(1), y.flatten(1))):
        value = loss(sides[0], labels, ref_emb=sides[1], ref_labels=ref_labels)
        check(value, (x, y), lambda *twins: loss.from_similarities(by_loops(name)(*twins), same, ~same))


def test_memory(monkeypatch):
    """Beyond the similarities and the gradients, in matrices of all cosines."""
    monkeypatch.setattr(engine, "CPU_BLOCK", 2**14)
    sets, upstream = [normal(n, 4, 64, dtype=torch.float32) for n in (300, 400)], torch.ones(300, 400)
    kept, matrix = upstream.nbytes + sum(side.nbytes for side in sets), 16 * upstream.nbytes

    def extra(similarity):
        return (extra_bytes(lambda: torch.autograd.grad(similarity(*sets), sets, upstream)) - kept) / matrix

    dense, tiled = (extra(SmoothChamferSimilarity(tiled=tiled)) for tiled in (False, True))
    assert dense < 2
    assert tiled < 0.3
    for least, default in ((matrix, dense), (matrix - 1, tiled)):
        monkeypatch.setattr(distances, "MATRIX_BYTES", least)
        assert extra(SmoothChamferSimilarity()) == pytest.approx(default, rel=0.05)  # the allocator rounds
