"""What every function of sets promises: the formula of its paper, also with padding, and in half precision."""

import math
from functools import partial

import pytest
import torch
from pytorch_metric_learning import losses

from tests.sets import references
from tests.sets.references import TOLERANCE, check, normal, value_and_gradients
from vl_plugins import create_loss, distances, engine
from vl_plugins.distances import MatchProbability
from vl_plugins.regularizers import DiversityRegularizer, MMDRegularizer, UniformityRegularizer

LABELS = torch.tensor([0, 1, 2, 0])


def loss_of(**options):
    if "base" not in options:
        options["products"] = "float32"
    loss = create_loss("smooth_chamfer", mmd_weight=0.3, diversity_weight=0.2, **options)
    return lambda x, y: loss(
        x, LABELS[: len(x)].to(x.device), ref_emb=y, ref_labels=LABELS.flip(0)[: len(y)].to(x.device)
    )


def of_each_side(function):
    return lambda *sides: torch.stack([function(side) for side in sides])


OPTIONS = {"SmoothChamferSimilarity": {"alpha": 9.0}, "MatchProbability": {"scale": 3.0, "shift": -0.5}}
DISTANCES = {
    f"{name} {way}": (
        getattr(distances, name)(tiled=way == "tiled", **OPTIONS.get(name, {})),
        partial(references.matrix, loops, **OPTIONS.get(name, {})),
    )
    for name, loops in references.SIMILARITIES.items()
    for way in ("dense", "tiled")
}
CASES = DISTANCES | {
    "MMD": (MMDRegularizer(gamma=2.0), lambda *sides: references.mmd(*map(references.units, sides), gamma=2.0)),
    "diversity": tuple(map(of_each_side, (DiversityRegularizer(0.5), partial(references.mean_diversity, scale=0.5)))),
    "uniformity": tuple(map(of_each_side, (UniformityRegularizer(0.5), partial(references.uniformity, t=0.5)))),
}
FUNCTIONS = {name: function for name, (function, _) in CASES.items()}
LOSSES = {
    "loss": loss_of(),
    "loss that skips zeros": loss_of(reducer="AvgNonZeroReducer"),
    "loss of PML": loss_of(base=losses.NTXentLoss(distance=MatchProbability(learnable=False))),
}
ALL = pytest.mark.parametrize("name", FUNCTIONS | LOSSES)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of two sets, the last one smaller."""
    monkeypatch.setattr(engine, "CPU_BLOCK", 2 * 3 * 4 * 3)


def make_sides(padded=True, **options):
    """Sets (4, 3, 8) and (4, 2, 8); one has an element that is padding, one is a single element, one is empty."""
    sides = normal(4, 3, 8, **options).detach(), normal(4, 2, 8, seed=1, **options).detach()
    for side in sides if padded else ():
        side[1, 0] = side[2, 1:] = side[3] = 0
    return [side.requires_grad_() for side in sides]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_formula(name, padded, dtype):
    """Those of the papers."""
    sides = make_sides(padded, dtype=dtype)
    function, loops = CASES[name]
    check(function(*sides), sides, loops)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@ALL
def test_half_precision_and_autocast_compute_in_single(name, dtype):
    function, half = (FUNCTIONS | LOSSES)[name], make_sides(dtype=dtype)
    single = [side.detach().float().requires_grad_() for side in half]
    wanted = value_and_gradients(function(*single), single)
    assert max(part.abs().max() for part in wanted[1:]) > 1e-4
    for sides in (half, single):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = function(*sides)
        assert value.dtype == torch.float32
        actual = value_and_gradients(value, sides)
        assert torch.equal(actual[0], wanted[0])
        for one, other in zip(actual[1:], wanted[1:], strict=True):
            assert torch.equal(one, other.to(sides[0].dtype).double())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@ALL
def test_nan_is_never_hidden(name, bad):
    """Not in a set of one element, nor by an empty set on the other side, nor by a reducer."""
    for side, item in ((0, 0), (1, 2)):
        sides = [tensor.detach() for tensor in make_sides()]
        sides[side][item, 0, 3] = bad
        values = (FUNCTIONS | LOSSES)[name](*(tensor.requires_grad_() for tensor in sides))
        wanted = torch.ones_like(values, dtype=torch.bool)
        if name in DISTANCES:
            wanted[:] = False
            wanted[(slice(None), item) if side else item] = True
        elif values.ndim:
            wanted = torch.arange(2) == side
        assert torch.equal(values.isnan(), wanted)
        assert torch.autograd.grad(values.sum(), sides[side])[0][item].isnan().any()


@ALL
def test_padding_has_no_gradient(name):
    sides = make_sides()
    for side, gradient in zip(sides, value_and_gradients((FUNCTIONS | LOSSES)[name](*sides), sides)[1:], strict=True):
        assert gradient.isfinite().all()
        assert not gradient[~side.any(2)].any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives(name):
    x, y = normal(3, 2, 3), normal(3, 2, 3, seed=1)
    assert torch.autograd.gradgradcheck(FUNCTIONS[name], (x, y))
    sides = make_sides()
    gradients = torch.autograd.grad(FUNCTIONS[name](*sides).sum(), sides, create_graph=True)
    second = torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), sides)
    assert all(part.isfinite().all() for part in second)


@pytest.mark.parametrize("shapes", [((0, 3, 4), (0, 3, 4)), ((3, 0, 4), (3, 2, 4)), ((3, 1, 4), (0, 1, 4))], ids=str)
@ALL
def test_nothing_to_compare_is_zero_in_the_graph(name, shapes):
    for x, y in ([normal(*shape) for shape in shapes], [normal(*shape) for shape in shapes[::-1]]):
        if name == "loss of PML" and 0 in shapes[0]:
            continue  # the host's loss of no pairs is NaN, or an error
        values = (FUNCTIONS | LOSSES)[name](x, y)
        gradients = value_and_gradients(values, (x, y))[1:]
        assert all(gradient.isfinite().all() for gradient in gradients)
        if name not in LOSSES and name not in ("diversity", "uniformity"):  # which do not compare the sides
            assert not values.any()
            assert not any(gradient.any() for gradient in gradients)


@pytest.mark.gpu
@ALL
def test_on_a_gpu(name):
    """The same numbers as on the CPU, and no wait but for the pairs of a loss and the items of a reducer."""
    function, cpu = (FUNCTIONS | LOSSES)[name], make_sides()
    cuda = [side.detach().cuda().requires_grad_() for side in cpu]
    actual, wanted = (value_and_gradients(function(*sides), sides) for sides in (cuda, cpu))
    torch.testing.assert_close(actual, wanted, atol=1e-10, rtol=1e-10)
    if name in FUNCTIONS:
        values, weights = function(*cuda), torch.ones_like(function(*cuda))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad(values, cuda, weights, retain_graph=True, allow_unused=True)
            function(*cuda)
        finally:
            torch.cuda.set_sync_debug_mode("default")
