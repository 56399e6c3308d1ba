import math
from functools import partial

import pytest
import torch
from pytorch_metric_learning import losses, reducers

from tests.sets import references
from tests.sets.references import normal, units, value_and_gradients
from vl_plugins import create_loss
from vl_plugins.regularizers import (
    DiversityRegularizer,
    MMDRegularizer,
    UniformityRegularizer,
    circular_variance,
    diversity_loss,
    mmd_loss,
    uniformity_loss,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
SQUARED = pytest.mark.parametrize("squared", [False, True], ids=["distance", "squared distance"])
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
ELEMENTS = (3, 1, 2, 0, 3)


def padded(dtype=torch.float64, seed=0):
    """Sets of several sizes, (5, 3, 4), in two of which elements coincide."""
    sets = normal(5, 3, 4, seed=seed, dtype=dtype).detach()
    for item, number in zip(sets, ELEMENTS, strict=True):
        item[number:] = 0
    sets[0, 1], sets[2, 0] = sets[0, 0], sets[4, 0]
    return sets.requires_grad_()


def check(value, leaves, loops):
    """Compare a value and its gradients with loops over the same numbers in float64."""
    twins = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    wanted = value_and_gradients(loops(*twins), twins)
    dtype = leaves[0].dtype
    assert value.dtype == dtype
    assert all(part.abs().max() > 1e-4 for part in wanted), "the case shows nothing"
    for one, other in zip(value_and_gradients(value, leaves), wanted, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@DTYPES
@SQUARED
@pytest.mark.parametrize("gamma", [0.5, 0.2])
def test_mmd(gamma, squared, dtype):
    """Some vectors coincide, and some are zero: in a cloud of vectors these are vectors as others."""
    x, y = normal(7, 5, dtype=dtype).detach(), normal(4, 5, seed=1, dtype=dtype).detach()
    x[1], x[3], x[0], x[2], y[0] = x[4], y[2], 0, 0, 0
    loops = partial(references.mmd, gamma=gamma, squared=squared)
    leaves = x.requires_grad_(), y.requires_grad_()
    check(mmd_loss(*leaves, gamma, squared=squared), leaves, loops)


@DTYPES
@SQUARED
def test_mmd_of_the_same_vectors_is_zero(squared, dtype):
    x = (normal(9, 33, dtype=dtype) + 2.0).detach().requires_grad_()
    for y in (x.detach(), x.detach().flip(0), x.detach().repeat(3, 1)):
        value = mmd_loss(x, y.requires_grad_(), squared=squared)
        # A sum of 36 ** 2 weighted kernels of at most 1, whose weights add up to 4.
        assert 0 <= value < 40 * torch.finfo(dtype).eps
        for gradient in torch.autograd.grad(value, (x, y)):
            assert gradient.abs().max() < 40 * torch.finfo(dtype).eps


@SQUARED
@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("spread", [1e-2, 1e-4])
def test_mmd_of_close_vectors_in_single_precision(spread, offset, squared):
    """Clouds that are narrow and far from zero."""
    gamma = 0.5 / spread**2 if squared else 0.5 / spread
    x, y = ((offset + normal(12, 6, seed=seed).detach() * spread).float().requires_grad_() for seed in (0, 1))
    twins = [side.detach().double().requires_grad_() for side in (x, y)]
    wanted = value_and_gradients(references.mmd(*twins, gamma, squared), twins)
    value, *gradients = value_and_gradients(mmd_loss(x, y, gamma, squared=squared), (x, y))
    torch.testing.assert_close(value, wanted[0], atol=2e-6, rtol=0)
    for gradient, other in zip(gradients, wanted[1:], strict=True):
        torch.testing.assert_close(spread * gradient, spread * other, atol=1e-5, rtol=0)


@SQUARED
def test_mmd_is_not_lost_in_the_rounding_of_one(squared):
    x, y = (1e-4 * normal(12, 6, seed=seed).detach() for seed in (0, 1))
    wanted = references.mmd(x, y + 1e-4, 0.5, squared)
    assert 0 < wanted < 2e-4
    torch.testing.assert_close(
        mmd_loss(x.float(), (y + 1e-4).float(), squared=squared).double(), wanted, rtol=1e-4, atol=0
    )


@DTYPES
@pytest.mark.parametrize("options", [{}, {"gamma": 2.0}, {"squared": True}], ids=str)
def test_mmd_of_sets(options, dtype):
    """Of two sizes, with padding, as sets or packed."""
    x, y = padded(dtype), normal(4, 2, 4, seed=1, dtype=dtype)
    leaves = x, y

    def loops(x, y):
        return references.mmd(units(x), units(y), **options)

    check(MMDRegularizer(**options)(x, y), leaves, loops)
    check(MMDRegularizer(set_size=3, **options)(x.flatten(1), y.flatten(1)), leaves, loops)
    check(MMDRegularizer(**options)(y, x), (y, x), loops)
    assert MMDRegularizer()(torch.zeros_like(x), y) == 0


@DTYPES
@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_diversity(scale, dtype):
    sets = padded(dtype)
    values = diversity_loss(sets, scale)
    check(values, [sets], lambda sets: torch.stack([references.diversity(item, scale) for item in sets]))
    mean = partial(references.mean_diversity, scale=scale)
    check(DiversityRegularizer(scale)(sets), [sets], mean)
    check(DiversityRegularizer(scale, set_size=3)(sets.flatten(1)), [sets], mean)
    found = DiversityRegularizer(scale, reducer=reducers.DoNothingReducer())(sets)["loss"]
    assert (found["reduction_type"], found["indices"].tolist()) == ("element", [0, 2, 4])
    # The labels of a regularizer are the numbers of the items.
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0, 1.5], dtype=dtype)
    weighted = DiversityRegularizer(scale, reducer=reducers.ClassWeightedReducer(weights))(sets)
    torch.testing.assert_close(weighted, (weights * values).sum() / 3)


@DTYPES
@pytest.mark.parametrize("t", [2.0, 0.5])
def test_uniformity(t, dtype):
    sets, vectors = padded(dtype), normal(5, 4, seed=2, dtype=dtype)
    loops = partial(references.uniformity, t=t)
    check(uniformity_loss(sets, t), [sets], loops)
    check(UniformityRegularizer(t, set_size=3)(sets.flatten(1)), [sets], loops)
    check(UniformityRegularizer(t)(vectors), [vectors], lambda vectors: loops(vectors[:, None]))
    alone = uniformity_loss(vectors[:1])
    assert alone == 0
    assert not torch.autograd.grad(alone, vectors)[0].any()
    bad = vectors.detach().clone()
    bad[0, 0] = torch.nan
    assert uniformity_loss(bad).isnan()
    assert uniformity_loss(bad[:1]).isnan()


def test_circular_variance():
    sets = padded()
    values = circular_variance(sets)
    assert values[3] == 0
    assert not torch.autograd.grad(values[:1].sum() + values[3], sets, retain_graph=True)[0][~sets.any(2)].any()
    assert torch.equal(circular_variance(sets.detach().half()), circular_variance(sets.detach().half().float()))
    assert ((values >= 0) & (values <= 1)).all()
    check(values, [sets], lambda sets: torch.stack([references.circular_variance(item) for item in sets]))


@DTYPES
def test_identical_and_opposite_elements(dtype):
    element = normal(50, 1, 7, dtype=dtype).detach()
    same, opposite = torch.cat([element, 2 * element, element / 3], dim=1), torch.cat([element, -3 * element], dim=1)
    for sets, diversity, variance in ((same, 1.0, 0.0), (opposite, math.exp(-8), 1.0)):
        values = diversity_loss(sets.requires_grad_())
        torch.testing.assert_close(values, torch.full_like(values, diversity), atol=2e-6, rtol=0)
        assert torch.autograd.grad(values.sum(), sets)[0].abs().max() < 1e-5
        torch.testing.assert_close(circular_variance(sets), torch.full_like(values, variance), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["triplet_sh", "unified"])
@pytest.mark.parametrize("make", [DiversityRegularizer, MMDRegularizer, UniformityRegularizer])
def test_regularizers_of_losses(make, name):
    x, y, labels = normal(5, 12), normal(6, 12, seed=1), torch.arange(6) % 2
    call = {"labels": labels[:5], "ref_emb": y, "ref_labels": labels}
    regularizer = make(set_size=3)
    loss = create_loss(name, embedding_regularizer=regularizer, embedding_reg_weight=0.25)
    term = regularizer(x, y) if make is MMDRegularizer else regularizer(x)
    wanted = value_and_gradients(create_loss(name)(x, **call) + 0.25 * term, (x, y))
    assert abs(term) > 1e-3
    torch.testing.assert_close(value_and_gradients(loss(x, **call), (x, y)), wanted)


def test_mmd_needs_two_modalities():
    x, labels = normal(5, 3, 4), torch.arange(5) % 2
    for make in (losses.ContrastiveLoss, type(create_loss("unified"))):  # the host's losses do not pass ref_emb
        with pytest.raises(ValueError, match=r"^MMDRegularizer compares two modalities: call the loss with ref_emb"):
            make(embedding_regularizer=MMDRegularizer())(x[:, 0], labels)


@pytest.mark.parametrize("make", [DiversityRegularizer, MMDRegularizer])
def test_options(make):
    option = "scale" if make is DiversityRegularizer else "gamma"
    for wrong in (option, "set_size"):
        with pytest.raises(ValueError, match=f"^{wrong} must be"):
            make(**{wrong: 0})
    with pytest.raises(ValueError, match=r"^embeddings must be sets \(B, K, D\) .*\(B, 2 \* D\).*, got \(5, 7\)"):
        make(set_size=2)(torch.ones(5, 7), *([torch.ones(5, 6)] if option == "gamma" else []))
    with pytest.raises(ValueError, match=r"^gamma must be a finite number > 0, got -1"):
        mmd_loss(torch.ones(2, 3), torch.ones(2, 3), -1)
    for function in (diversity_loss, circular_variance):
        with pytest.raises(ValueError, match=r"^sets must have the shape \(B, K, D\), got \(3, 4\)"):
            function(torch.ones(3, 4))
