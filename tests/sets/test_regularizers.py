"""Regularizers and the spread of sets against the loops of the papers."""

import pytest
import torch
from pytorch_metric_learning import losses

from tests.sets import references
from tests.sets.references import TOLERANCE, check, normal, units, value_and_gradients
from vl_plugins import create_loss
from vl_plugins.regularizers import (
    DiversityRegularizer,
    MMDRegularizer,
    UniformityRegularizer,
    circular_variance,
)

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
ELEMENTS = (3, 1, 2, 0, 3)


def padded(dtype=torch.float64, seed=0):
    """Sets of several sizes, (5, 3, 4), in two of which elements coincide."""
    sets = normal(5, 3, 4, seed=seed, dtype=dtype).detach()
    for item, number in zip(sets, ELEMENTS, strict=True):
        item[number:] = 0
    sets[0, 1], sets[2, 0] = sets[0, 0], sets[4, 0]
    return sets.requires_grad_()


@DTYPES
def test_mmd_of_the_same_vectors_is_zero(dtype):
    x = (normal(9, 33, dtype=dtype) + 2.0).detach().requires_grad_()
    for y in (x.detach(), x.detach().flip(0), x.detach().repeat(3, 1)):
        value = MMDRegularizer()(x, y.requires_grad_())
        # A sum of 36 ** 2 weighted kernels of at most 1, whose weights add up to 4.
        assert 0 <= value < 40 * torch.finfo(dtype).eps
        for gradient in torch.autograd.grad(value, (x, y)):
            assert gradient.abs().max() < 40 * torch.finfo(dtype).eps


@pytest.mark.parametrize("spread", [1e-2, 1e-4])
def test_mmd_of_close_vectors_in_single_precision(spread):
    """A narrow cloud is not lost in the rounding of vectors, nor a small value in that of 1."""
    for gamma in (0.5 / spread, 0.5):
        sides = [(torch.ones(6) + spread * normal(12, 6, seed=seed).detach()).float() for seed in (0, 1)]
        twins = [side.double().requires_grad_() for side in sides]
        wanted = value_and_gradients(references.mmd(*map(units, twins), gamma), twins)
        sides = [side.requires_grad_() for side in sides]
        value, *gradients = value_and_gradients(MMDRegularizer(gamma)(*sides), sides)
        torch.testing.assert_close(value, wanted[0], atol=1e-9, rtol=0.02)
        for gradient, other in zip(gradients, wanted[1:], strict=True):
            torch.testing.assert_close(gradient, other, atol=0.01 * other.abs().max().item(), rtol=0)


def test_mmd_of_many_vectors():
    """Each vector 300 times gives the same means; so many are compared in blocks."""
    sides = normal(5, 4), normal(3, 4, seed=1)
    many = [side.repeat(300, 1) for side in sides]
    actual, wanted = (value_and_gradients(MMDRegularizer()(*those), sides) for those in (many, sides))
    torch.testing.assert_close(actual, wanted, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("make", [DiversityRegularizer, MMDRegularizer, UniformityRegularizer])
def test_packed_sets(make):
    """Of two sizes; vectors are sets of one."""
    sides = (padded(), normal(4, 2, 4, seed=1))[: 2 if make is MMDRegularizer else 1]
    assert abs(make()(*sides)) > 1e-3
    torch.testing.assert_close(make(set_size=3)(*(side.flatten(1) for side in sides)), make()(*sides))
    torch.testing.assert_close(make()(*(side[:, 0] for side in sides)), make()(*(side[:, :1] for side in sides)))


def test_circular_variance():
    sets = padded()
    values = circular_variance(sets)
    assert values[3] == 0
    assert ((values >= 0) & (values <= 1)).all()
    assert torch.equal(circular_variance(sets.detach().half()), circular_variance(sets.detach().half().float()))
    check(values, [sets], lambda sets: torch.stack([references.circular_variance(item) for item in sets]))


@pytest.mark.parametrize("make", [DiversityRegularizer, MMDRegularizer, UniformityRegularizer])
def test_regularizers_of_losses(make):
    x, y, labels = normal(5, 12), normal(6, 12, seed=1), torch.arange(6) % 2
    call = {"labels": labels[:5], "ref_emb": y, "ref_labels": labels}
    regularizer = make(set_size=3)
    loss = create_loss("unified", embedding_regularizer=regularizer, embedding_reg_weight=0.25)
    term = regularizer(x, y) if make is MMDRegularizer else regularizer(x)
    wanted = value_and_gradients(create_loss("unified")(x, **call) + 0.25 * term, (x, y))
    assert abs(term) > 1e-3
    torch.testing.assert_close(value_and_gradients(loss(x, **call), (x, y)), wanted)
    if make is MMDRegularizer:
        for one_set in (losses.ContrastiveLoss, type(loss)):  # the host's losses do not pass ref_emb
            with pytest.raises(ValueError, match=r"^MMDRegularizer compares two modalities"):
                one_set(embedding_regularizer=regularizer)(x, labels[:5])
