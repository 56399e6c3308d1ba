import pytest
import torch

from tests.helpers.seeds import seed_torch, seeded
from vl_plugins.modules import POOLINGS, GeneralizedPooling, average_pooling, max_pooling, sinusoidal_positions

DIM, LENGTH = 3, 5
PADDING = torch.tensor([[False, True, False, False, True], [True] * 5, [False] * 5, [True, True, True, False, True]])
EACH_POOLING = pytest.mark.parametrize("name", POOLINGS)


def make(name, dtype=torch.float64):
    seed_torch(0)
    pool = POOLINGS[name]
    return pool(position_dim=6, hidden_dim=4).to(dtype) if name == "gpo" else pool


def features_of(dtype=torch.float64):
    return torch.randn(len(PADDING), LENGTH, DIM, dtype=dtype, generator=seeded(1))


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
    forwards = gru_states(cells[0], positions)
    backwards = gru_states(cells[1], positions.flip(0))[::-1]
    states = zip(forwards, backwards, strict=True)
    scores = [(pool.to_score.weight[0] * (first + second) / 2).sum() for first, second in states]
    weights = [(score / 0.1).exp() for score in scores]
    return [(weight / sum(weights)).item() for weight in weights]


def pooled_by_loops(name, pool, rows):
    """Of one item, (n, D) without padding."""
    result = []
    for column in rows.T.tolist():
        if not column:
            result.append(0.0)
        elif name == "avg":
            result.append(sum(column) / len(column))
        elif name == "max":
            result.append(max(column))
        else:
            ranked = sorted(column, reverse=True)
            result.append(sum(weight * value for weight, value in zip(theta(pool, len(column)), ranked, strict=True)))
    return torch.tensor(result, dtype=torch.float64)


@EACH_POOLING
def test_items_of_any_size_are_pooled_as_if_alone(name):
    pool, features = make(name), features_of()
    features[PADDING] = float("nan")
    pooled = pool(features.requires_grad_(), PADDING)
    for item, (rows, padding) in enumerate(zip(features, PADDING, strict=True)):
        expected = pooled_by_loops(name, pool, rows[~padding].detach())
        torch.testing.assert_close(pooled[item], expected)
        torch.testing.assert_close(pool(rows[~padding][None])[0], expected)
    parameters = list(pool.parameters()) if name == "gpo" else []
    gradient, *others = torch.autograd.grad(pooled.square().sum(), [features, *parameters])
    assert (gradient[PADDING] == 0).all()
    assert all(bool((part.isfinite() & (part != 0)).any()) for part in (gradient[~PADDING], *others))


@EACH_POOLING
def test_gradients(name):
    pool, features = make(name), features_of().requires_grad_()
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
def test_nan_in_an_input_is_not_hidden(name):
    features = features_of()
    features[0, 2, 1] = float("nan")
    assert make(name)(features, PADDING).isnan().nonzero().tolist() == [[0, 1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EACH_POOLING
def test_half_precision_and_autocast(name, dtype):
    pool, features = make(name, torch.float32), features_of().to(dtype).requires_grad_()
    expected = pool(features.float(), PADDING)
    with torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(pool(features.float(), PADDING), expected, atol=0, rtol=0)
        pooled = pool(features, PADDING)
    torch.testing.assert_close(pooled, expected.to(dtype), atol=0, rtol=0)
    assert torch.autograd.grad(pooled.sum(), features)[0].dtype == dtype


def test_an_average_of_many_halves_does_not_overflow():
    features = torch.full((1, 50, 1), 60000.0, dtype=torch.float16)
    assert average_pooling(features).item() == 60000


def test_generalized_pooling_goes_from_average_to_max():
    pool, features = make("gpo"), features_of()
    with torch.no_grad():
        pool.to_score.weight.zero_()
    torch.testing.assert_close(pool(features, PADDING), average_pooling(features, PADDING))
    pool.coefficients = lambda sizes: torch.eye(1, LENGTH, dtype=torch.float64).expand(len(sizes), -1)
    torch.testing.assert_close(pool(features, PADDING), max_pooling(features, PADDING))


def test_options():
    pool = GeneralizedPooling()
    assert (pool.position_dim, pool.gru.hidden_size, pool.gru.bidirectional) == (32, 32, True), "as in the paper"
    for option in ("position_dim", "hidden_dim"):
        with pytest.raises(ValueError, match=f"^{option} must be an integer >= 1, got 0$"):
            GeneralizedPooling(**{option: 0})
