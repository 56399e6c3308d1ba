import logging
import math
from functools import partial

import pytest
import torch
from torch.nn.functional import normalize as unit

from tests.helpers.memory import extra_bytes
from tests.helpers.sets import normal, random_mask, value_and_gradients
from tests.reference import sets as reference
from vl_plugins.functional import smooth_chamfer_similarity
from vl_plugins.kernels import comparison, pairwise_smooth_chamfer

BACKENDS = pytest.mark.parametrize("backend", ["dense", "tiled"])
# The last two by the formula.
SETTINGS = pytest.mark.parametrize(("alpha", "normalize"), [(16.0, True), (40.0, True), (100.0, True), (2.0, False)])


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of two sets, the last one smaller."""
    monkeypatch.setattr(comparison, "CPU_BLOCK", 2 * 3 * 5 * 2)
    monkeypatch.setattr(comparison, "LEAST_ROWS", 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("masked", [[], ["mask"], ["ref_mask"], ["mask", "ref_mask"]], ids=str)
@SETTINGS
@BACKENDS
def test_formula(small_blocks, backend, alpha, normalize, masked, dtype):
    sets = normal(7, 3, 6, dtype=dtype), normal(5, 2, 6, seed=1, dtype=dtype)
    both = {"mask": random_mask(sets[0], 2), "ref_mask": random_mask(sets[1], 3)}
    masks = {name: both[name] for name in masked}
    actual = pairwise_smooth_chamfer(*sets, alpha, normalize=normalize, backend=backend, **masks)
    expected = smooth_chamfer_similarity(*(side.double() for side in sets), alpha, normalize=normalize, **masks)
    assert actual.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    actual, expected = value_and_gradients(actual, sets), value_and_gradients(expected, sets)
    torch.testing.assert_close(actual[0].double(), expected[0], atol=tolerance, rtol=0)
    torch.testing.assert_close(actual[1:], expected[1:], atol=10 * tolerance, rtol=10 * tolerance)


@BACKENDS
def test_inputs_of_any_layout_stay_as_they_are(small_blocks, backend):
    x = normal(6, 7, 3).permute(1, 2, 0)
    others = normal(5, 1, 6, seed=1), normal(2, 5, 6, seed=1).transpose(0, 1), normal(1, 2, 6, seed=1).expand(5, 2, 6)
    for y in others:
        for sets in ((x, y), (y, x), (x, x)):
            before = [side.detach().clone() for side in sets]
            actual = value_and_gradients(pairwise_smooth_chamfer(*sets, backend=backend), sets)
            torch.testing.assert_close(actual, value_and_gradients(smooth_chamfer_similarity(*sets), sets))
            assert all(map(torch.equal, sets, before))
            assert all(gradient.is_contiguous() for gradient in actual[1:])  # collectives take this for granted


@pytest.mark.parametrize("needed", [0, 1])
@BACKENDS
def test_gradient_of_one_side_twice(small_blocks, backend, needed):
    sets = [normal(7, 3, 6).detach(), normal(5, 2, 6, seed=1).detach()]
    leaf = sets[needed].requires_grad_()
    total = pairwise_smooth_chamfer(*sets, backend=backend).square().sum()
    first, second = (torch.autograd.grad(total, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, torch.autograd.grad(smooth_chamfer_similarity(*sets).square().sum(), leaf)[0])


@SETTINGS
@BACKENDS
def test_second_derivatives(small_blocks, backend, alpha, normalize):
    sets = normal(3, 2, 4), normal(3, 3, 4, seed=1)
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    options = {"alpha": alpha, "normalize": normalize, "ref_mask": mask, "backend": backend}
    assert torch.autograd.gradgradcheck(partial(pairwise_smooth_chamfer, **options), sets)


@BACKENDS
def test_not_a_number_is_hidden_by_masks_only(small_blocks, backend):
    sets = [normal(7, 3, 6).detach(), normal(5, 2, 6, seed=1).detach()]
    sets[0][2, 1, 3], sets[1][4, 0, 0] = math.nan, math.inf
    sets = [side.requires_grad_() for side in sets]
    expected = torch.zeros(7, 5, dtype=torch.bool)
    expected[2] = expected[:, 4] = True
    similarities = pairwise_smooth_chamfer(*sets, backend=backend)
    assert torch.equal(similarities.isnan(), expected)
    assert all(gradient.isnan().any() for gradient in torch.autograd.grad(similarities.sum(), sets))
    masks = {"mask": sets[0].isfinite().all(2), "ref_mask": sets[1].isfinite().all(2)}
    masked = value_and_gradients(pairwise_smooth_chamfer(*sets, **masks, backend=backend), sets)
    torch.testing.assert_close(masked, value_and_gradients(smooth_chamfer_similarity(*sets, **masks), sets))
    assert all(tensor.isfinite().all() for tensor in masked)


@BACKENDS
def test_half_precision_and_autocast_compute_in_single(backend):
    half = [normal(6, k, 32, seed=k, dtype=torch.bfloat16) for k in (3, 4)]
    single = [side.detach().float().requires_grad_() for side in half]
    expected, *gradients = value_and_gradients(pairwise_smooth_chamfer(*single, backend=backend), single)
    for sets in (half, single):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = value_and_gradients(pairwise_smooth_chamfer(*sets, backend=backend), sets)
        assert torch.equal(actual[0], expected)
        for actual_gradient, gradient in zip(actual[1:], gradients, strict=True):
            assert torch.equal(actual_gradient, gradient.to(sets[0].dtype))


def test_zero_vectors_and_nothing_to_compare():
    x, y = torch.zeros(2, 3, 4, requires_grad=True), normal(3, 2, 4, dtype=torch.float32)
    similarities, *gradients = value_and_gradients(pairwise_smooth_chamfer(x, y), (x, y))
    torch.testing.assert_close(similarities, torch.full((2, 3), (math.log(2) + math.log(3)) / 32))
    assert not any(gradient.any() for gradient in gradients)
    for shapes in ((0, 3), (2, 3)), ((4, 0), (2, 3)):
        x, y = (normal(*shape, 6) for shape in shapes)
        assert torch.equal(pairwise_smooth_chamfer(x, y), smooth_chamfer_similarity(x, y))


@pytest.mark.slow
def test_compiled():
    torch.compiler.reset()
    sets = normal(4, 3, 6), normal(4, 2, 6, seed=1)

    def caller(x, y):
        return pairwise_smooth_chamfer(2 * x, y).cos()

    actual = value_and_gradients(torch.compile(caller, backend="aot_eager")(*sets), sets)
    torch.testing.assert_close(actual, value_and_gradients(caller(*sets), sets))


def test_memory(monkeypatch):
    """Without the similarities and the gradients; the goals are a fifth and a twentieth at 1,024 x 1,024 sets."""
    monkeypatch.setattr(comparison, "CPU_BLOCK", 2**14)
    sets = [unit(normal(count, 4, 64, dtype=torch.float32), dim=2).detach().requires_grad_() for count in (300, 400)]
    upstream = torch.ones(300, 400)
    kept = upstream.nbytes + sum(side.nbytes for side in sets)

    def extra(similarity):
        return extra_bytes(lambda: torch.autograd.grad(similarity(*sets), sets, upstream), kept=kept)

    theirs = extra(reference.EXP_AND_POOL["LP pooling"])
    dense, tiled = (extra(partial(pairwise_smooth_chamfer, backend=name)) for name in ("dense", "tiled"))
    exponentials = 4 * 300 * 400 * 16
    assert exponentials < dense < 0.2 * theirs
    assert tiled < 0.05 * theirs
    with torch.no_grad():
        assert extra_bytes(lambda: pairwise_smooth_chamfer(*sets, backend="dense"), kept=upstream.nbytes) <= tiled
    assert extra(partial(pairwise_smooth_chamfer, normalize=False)) < 0.1 * theirs


def test_choice(monkeypatch, caplog):
    comparison.log_choice.cache_clear()
    caplog.set_level(logging.INFO)
    x, y = torch.ones(5, 3, 4), torch.ones(7, 2, 4)
    for size, chosen in ((4 * 5 * 3 * 7 * 2, "dense"), (4 * 5 * 3 * 7 * 2 - 1, "tiled")):
        monkeypatch.setattr(comparison, "DENSE_BYTES", size)
        pairwise_smooth_chamfer(x, y)
        pairwise_smooth_chamfer(x, y)
        assert [f"smooth-Chamfer similarity: backend {chosen}" in line for line in caplog.messages].count(True) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "functional"}, "unknown backend 'functional'"),
        ({"alpha": 0}, "alpha must be a finite number > 0, got 0"),
        ({"mask": torch.ones(2, 3)}, "mask must be torch.bool"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        pairwise_smooth_chamfer(torch.ones(2, 3, 4), torch.ones(5, 2, 4), **options)
