import math

import pytest
import torch

from tests.helpers.seeds import seed_torch
from tests.sets.references import normal
from vl_plugins.modules import (
    POOLINGS,
    sinusoidal_positions,
    sinusoidal_positions_2d,
)
from vl_plugins.modules.positions import kept_positions

DIM, LENGTH = 3, 5
PADDING = torch.tensor([[False, True, False, False, True], [True] * 5, [False] * 5, [True, True, True, False, True]])
EACH_POOLING = pytest.mark.parametrize("name", POOLINGS)


def make(name, dtype=torch.float64):
    seed_torch(0)
    pool = POOLINGS[name]
    return pool(position_dim=6, hidden_dim=4).to(dtype) if name == "gpo" else pool


def make_features(dtype=torch.float64):
    return normal(len(PADDING), LENGTH, DIM, seed=1, dtype=dtype)


def gru_states(cell, inputs):
    state, states = inputs.new_zeros(1, cell.hidden_size), []
    for row in inputs:
        state = cell(row[None], state)
        states.append(state[0])
    return states


def theta(pool, size):
    """The coefficients of a set, with a cell for each direction."""
    cells = [torch.nn.GRUCell(pool.gru.input_size, pool.gru.hidden_size, dtype=torch.float64) for _ in range(2)]
    for cell, suffix in zip(cells, ("", "_reverse"), strict=True):
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(cell, name).data = getattr(pool.gru, f"{name}_l0{suffix}").data
    positions = sinusoidal_positions(size, pool.position_dim).double()
    states = zip(gru_states(cells[0], positions), gru_states(cells[1], positions.flip(0))[::-1], strict=True)
    weights = [((pool.to_score.weight[0] * (first + second) / 2).sum() / 0.1).exp() for first, second in states]
    return [(weight / sum(weights)).item() for weight in weights]


def pooled_by_loops(name, pool, rows):
    """Of one item, (n, D) without padding."""
    result = []
    for column in rows.T.tolist():
        if not column:
            result.append(0.0)
        elif name == "gpo":
            ranked = sorted(column, reverse=True)
            result.append(sum(weight * value for weight, value in zip(theta(pool, len(column)), ranked, strict=True)))
        else:
            result.append(sum(column) / len(column) if name == "avg" else max(column))
    return torch.tensor(result, dtype=torch.float64)


@EACH_POOLING
def test_items_of_any_size_are_pooled_as_if_alone(name):
    pool, features = make(name), make_features().detach()
    features[PADDING] = float("nan")
    pooled = pool(features.requires_grad_(), PADDING)
    for item, (rows, padding) in enumerate(zip(features, PADDING, strict=True)):
        expected = pooled_by_loops(name, pool, rows[~padding].detach())
        torch.testing.assert_close(pooled[item], expected)
        torch.testing.assert_close(pool(rows[~padding][None])[0], expected)
    (gradient,) = torch.autograd.grad(pooled.square().sum(), features)
    assert (gradient[PADDING] == 0).all()


@EACH_POOLING
def test_gradients(name):
    pool, features = make(name), make_features()
    inputs = (features, *pool.parameters()) if name == "gpo" else (features,)
    for padding in (None, PADDING):
        assert torch.autograd.gradcheck(lambda features, *_, padding=padding: pool(features, padding), inputs)


@EACH_POOLING
def test_nothing_to_pool_is_zero(name):
    pool = make(name)
    for items, length in ((2, 0), (0, 2), (0, 0)):
        features = torch.ones(items, length, DIM, dtype=torch.float64, requires_grad=True)
        for padding in (None, torch.zeros(items, length, dtype=torch.bool)):
            pooled = pool(features, padding)
            assert torch.equal(pooled, torch.zeros(items, DIM, dtype=torch.float64))
            pooled.sum().backward()


@EACH_POOLING
def test_nan_is_not_hidden(name):
    features = make_features().detach()
    features[0, 2, 1] = float("nan")
    assert make(name)(features, PADDING).isnan().nonzero().tolist() == [[0, 1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EACH_POOLING
def test_half_precision_and_autocast(name, dtype):
    pool, features = make(name, torch.float32), make_features(dtype)
    expected = pool(features.float(), PADDING)
    with torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(pool(features.float(), PADDING), expected, atol=0, rtol=0)
        pooled = pool(features, PADDING)
    torch.testing.assert_close(pooled, expected.to(dtype), atol=0, rtol=0)
    assert torch.autograd.grad(pooled.sum(), features)[0].dtype == dtype


@EACH_POOLING
def test_a_mask_of_another_shape(name):
    for mask in (PADDING[:1], PADDING[:, :1]):  # would be broadcast
        with pytest.raises(ValueError, match=r"^padding_mask must have the shape \(4, 5\), got \("):
            make(name)(make_features(), mask)


def position(index, channel, dim):
    """Section 3.5 of Vaswani et al. 2017."""
    phase = index / 10000 ** (2 * (channel // 2) / dim)
    return math.sin(phase) if channel % 2 == 0 else math.cos(phase)


@pytest.mark.parametrize("dim", [1, 6, 7])
def test_positions_are_the_formula(dim):
    actual = sinusoidal_positions(20001, dim)
    for index in (0, 1, 8, 20000):
        expected = torch.tensor([position(index, channel, dim) for channel in range(dim)])
        torch.testing.assert_close(actual[index], expected, atol=1e-7, rtol=0)


def test_positions_are_kept_and_of_use_in_training():
    with torch.inference_mode():
        kept = kept_positions(torch.device("cpu"), 5, 7)
    assert kept_positions(torch.device("cpu"), 5, 7) is kept
    assert not kept.is_inference()
    torch.testing.assert_close(kept, sinusoidal_positions(5, 7))
    torch.testing.assert_close(kept_positions(torch.device("cpu"), 3, 4, 8), sinusoidal_positions_2d(3, 4, 8))


@pytest.mark.parametrize("dim", [2, 3, 8, 11])
def test_half_of_the_channels_is_for_each_axis(dim):
    feature_map, half = sinusoidal_positions_2d(3, 4, dim).T.reshape(1, dim, 3, 4), math.ceil(dim / 2)
    for row in range(3):
        for column in range(4):
            expected = [position(row, channel, half) for channel in range(half)]
            expected += [position(column, channel, dim - half) for channel in range(dim - half)]
            torch.testing.assert_close(feature_map[0, :, row, column], torch.tensor(expected), atol=1e-7, rtol=0)
