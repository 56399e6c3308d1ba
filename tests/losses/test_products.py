"""Matrix products in half precision: what is rounded and what is not, and that every wrapper passes the type on."""

import functools
import shutil

import pytest
import torch
from pytorch_metric_learning import distances, losses

from tests.helpers.seeds import seeded
from vl_plugins import create_loss, engine
from vl_plugins.distances import OrderSimilarity
from vl_plugins.distributed import DistributedLoss
from vl_plugins.losses import CrossBatchMemory, CrossModalLoss, GOALLoss, SmoothChamferLoss, UnifiedLoss, Warmup
from vl_plugins.regularizers import UniformityRegularizer

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
NAMES = ["unified", "vlc", "triplet_hn", "triplet_sh", "siglip", "goal"]
WAYS = {
    "chosen": {},
    "tiled": {"tiled": True},
    "dot product": {"distance": distances.DotProductSimilarity(normalize_embeddings=False)},
}
EACH_WAY = pytest.mark.parametrize(("name", "way"), [(name, way) for name in NAMES for way in WAYS])


def sides_of(dtype=torch.float32, rows=24, width=32):
    """Images and texts that are similar to each other."""
    generator = seeded(0)
    images = torch.randn(rows, width, generator=generator)
    texts = images + 1.5 * torch.randn(rows, width, generator=generator)
    return [(side / 6).to(dtype).requires_grad_() for side in (images, texts)]


def value_and_gradients(loss, sides, upstream=1.0, **options):
    value = loss(sides[0], ref_emb=sides[1], **options)
    return value, torch.autograd.grad(upstream * value, sides)


def relative_error(gradients, expected):
    errors = []
    for gradient, exact in zip(gradients, expected, strict=True):
        errors.append(((gradient.double() - exact).norm() / exact.norm()).item())
    return max(errors)


@HALF
@EACH_WAY
def test_similarities_are_exact_and_gradients_are_rounded(name, way, dtype, monkeypatch):
    """In float64, of the rounded features; only what is multiplied for the gradients has 8 or 11 bits."""
    monkeypatch.setattr(engine, "block_rows", lambda *_, **__: 7)
    sides = sides_of(dtype)
    doubled = [side.detach().double().requires_grad_() for side in sides]
    exact, expected = value_and_gradients(create_loss(name, **WAYS[way]), doubled)
    full = [side.detach().float().requires_grad_() for side in sides]
    precision = 2**-8 if dtype == torch.bfloat16 else 2**-11
    with torch.autocast("cpu", dtype=dtype):
        value, gradients = value_and_gradients(create_loss(name, **WAYS[way]), full)
        _, of_float32 = value_and_gradients(create_loss(name, products="float32", **WAYS[way]), full)
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
    assert relative_error(of_float32, expected) < 1e-5
    error = relative_error(gradients, expected)
    assert error < 2 * precision
    if name not in ("triplet_hn", "goal"):  # whose gradients come from pairs, without a product
        assert error > precision / 50
    # Without autocast, features in half precision are multiplied in their type.
    own, own_gradients = value_and_gradients(create_loss(name, **WAYS[way]), sides)
    assert own == value
    for gradient, of_full in zip(own_gradients, gradients, strict=True):
        assert torch.equal(gradient, of_full.to(dtype))


@pytest.mark.parametrize("name", NAMES)
def test_small_gradients_do_not_vanish_in_float16(name):
    """Which has no numbers below 6e-8."""
    sides = [(100 * side.detach()).requires_grad_() for side in sides_of()]
    loss = create_loss(name)
    with torch.autocast("cpu", dtype=torch.float16):
        _, gradients = value_and_gradients(loss, sides, upstream=1e-6)
        _, expected = value_and_gradients(loss, sides)
    assert relative_error([1e6 * gradient for gradient in gradients], [side.double() for side in expected]) < 1e-3


def test_float64_is_not_rounded():
    sides = [side.detach().double().requires_grad_() for side in sides_of()]
    value = create_loss("unified")(sides[0], ref_emb=sides[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert create_loss("unified")(sides[0], ref_emb=sides[1]) == value


WRAPPERS = {
    "processes": DistributedLoss,
    "both ways": CrossModalLoss,
    "processes of both ways": lambda loss: DistributedLoss(CrossModalLoss(loss)),
    "a warm-up": lambda loss: Warmup(loss, loss, 3),
    "a base of sets": lambda loss: SmoothChamferLoss(loss, mmd_weight=0, diversity_weight=0),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("products", ["autocast", "float32"])
def test_the_type_of_the_caller_reaches_a_loss_within_others(wrap, products):
    """Though each of them turns autocast off."""
    sides, found = sides_of(), []
    for loss in (UnifiedLoss(products=products), wrap(UnifiedLoss(products=products))):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(value_and_gradients(loss, sides))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    full = value_and_gradients(UnifiedLoss(), sides)
    assert torch.equal(found[0][1][0], full[1][0]) == (products == "float32")


def test_sets_are_multiplied_in_the_type_too():
    sets = [torch.randn(6, 3, 16, generator=seeded(seed)) for seed in range(2)]
    values = {}
    for products in ("autocast", "float32"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values[products] = SmoothChamferLoss("unified", products=products)(sets[0], ref_emb=sets[1])
    full = SmoothChamferLoss("unified")(sets[0], ref_emb=sets[1])
    assert values["float32"] == full != values["autocast"]
    torch.testing.assert_close(values["autocast"], full, rtol=0.05, atol=0)


def test_a_loss_of_the_host_in_a_wrapper_is_computed_in_full_precision():
    sides = sides_of()
    for wrap in (DistributedLoss, CrossModalLoss):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = wrap(losses.NTXentLoss())(sides[0], ref_emb=sides[1])
        expected = value_and_gradients(wrap(losses.NTXentLoss()), sides)
        torch.testing.assert_close((value, torch.autograd.grad(value, sides)), expected, rtol=0, atol=0)


def test_an_unknown_kind_of_products():
    with pytest.raises(ValueError, match="unknown products 'bf16'; known: autocast, float32"):
        UnifiedLoss(products="bf16")


class PlainCosine(distances.CosineSimilarity):
    """For which all similarities are computed."""


DISTANCES = {
    "cosine": distances.CosineSimilarity(),
    "a cosine of one's own": PlainCosine(),
    "squared dot product": distances.DotProductSimilarity(power=2),
    "Euclidean": distances.LpDistance(),
    "signal to noise": distances.SNRDistance(),
    "order": OrderSimilarity(),
}
OF_DISTANCES = {
    name: lambda distance=distance: create_loss("triplet_sh", distance=distance) for name, distance in DISTANCES.items()
}
CALLS = OF_DISTANCES | {
    "siglip": lambda: create_loss("siglip"),
    "tiled": lambda: create_loss("triplet_sh", tiled=True),
    "of pairs": lambda: GOALLoss(pair_weight="sig_ms"),
    "relative": lambda: UnifiedLoss(relative=[0, 1, 0.5]),
    "engine": lambda: create_loss("unified"),
    "sets and their terms": lambda: SmoothChamferLoss(mmd_weight=0.5, diversity_weight=0.5),
    "spread out": lambda: create_loss("unified", embedding_regularizer=UniformityRegularizer()),
}


@pytest.mark.parametrize("make_loss", CALLS.values(), ids=CALLS)
def test_a_backward_pass_under_autocast_is_not_rounded(make_loss):
    loss, sides = make_loss(), sides_of(rows=40)
    _, expected = value_and_gradients(loss, sides)
    value = loss(sides[0], ref_emb=sides[1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gradients = torch.autograd.grad(value, sides)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


def test_nor_are_a_queue_and_a_miners_pairs():
    labels, sides = torch.arange(24) // 2, sides_of()
    indices = (*torch.where(labels[:, None] == labels), *torch.where(labels[:, None] != labels))
    for call in (
        lambda: create_loss("triplet_sh")(sides[0], labels, indices, sides[1], labels.clone()),
        lambda: CrossBatchMemory(create_loss("triplet_sh"), 32)(sides[0], labels),
    ):
        (expected,) = torch.autograd.grad(call(), sides[0])
        value = call()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (gradient,) = torch.autograd.grad(value, sides[0])
        assert torch.equal(gradient, expected)


@pytest.fixture
def compiles_at_once(monkeypatch):
    """As on a GPU, where blocks are large, after many of them."""
    monkeypatch.setattr(engine, "block_rows", lambda *_, **__: 10)
    monkeypatch.setattr(engine, "COMPILE_ON", ("cpu",))
    monkeypatch.setattr(engine, "COMPILE_FROM", 0)
    monkeypatch.setattr(engine, "COMPILE_AFTER", 0)
    engine._compiled.cache_clear()
    yield
    engine._compiled.cache_clear()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="compiling for a CPU needs a C compiler")
@pytest.mark.parametrize("name", ["unified", "vlc"])
def test_compiled_blocks_are_those_of_eager_code(name, compiles_at_once, monkeypatch):
    found = [value_and_gradients(create_loss(name, tiled=tiled), sides_of()) for tiled in (False, True)]
    assert engine._compiled.cache_info().currsize == 2
    monkeypatch.setattr(engine, "COMPILE_ON", ())
    expected = value_and_gradients(create_loss(name), sides_of())
    for compiled in found:
        torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-6)


def cannot_compile(*_):
    raise RuntimeError("no C compiler")


def test_a_machine_that_cannot_compile(compiles_at_once, monkeypatch):
    """Eager code takes over, with a warning and the same numbers."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=cannot_compile))
    with pytest.warns(UserWarning, match="the losses are not compiled: .*no C compiler"):
        found = value_and_gradients(create_loss("unified"), sides_of())
    monkeypatch.setattr(engine, "COMPILE_ON", ())
    torch.testing.assert_close(found, value_and_gradients(create_loss("unified"), sides_of()), rtol=0, atol=0)
