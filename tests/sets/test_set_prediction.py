import copy

import pytest
import torch
from torch.nn.functional import normalize

from tests.helpers.seeds import seed_torch
from tests.sets import references
from tests.sets.references import normal
from vl_plugins.modules import SetHead, SetPrediction, TowerFeatures, sinusoidal_positions_2d

ITEMS, INPUTS, SLOTS, DIM, LOCAL_DIM, ITERATIONS = 2, 4, 3, 4, 5, 3
PADDING = torch.tensor([[False, False, True, False], [True, False, False, True]])


def build(dtype=torch.float64, seed=0):
    """A module in which no parameter has a value that would hide it, such as the 1 of a layer norm."""
    seed_torch(seed)
    module = SetPrediction(DIM, local_dim=LOCAL_DIM, num_slots=SLOTS, num_iters=ITERATIONS, hidden_dim=6).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return module.eval()


def make_inputs(items=ITEMS, dtype=torch.float64):
    return normal(items, INPUTS, LOCAL_DIM, seed=1, dtype=dtype), normal(items, DIM, seed=2, dtype=dtype)


def weighted_sum(outputs):
    """A number with another weight for each element of the outputs."""
    return sum((3 * normal(*part.shape, seed=n).detach().to(part) * part).sum() for n, part in enumerate(outputs, 10))


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("padded", [False, True])
def test_sets_and_gradients_are_the_papers(padded):
    """Padded inputs do not exist, and positions belong to the keys."""
    module, (local, pooled), positions = build(), make_inputs(), normal(INPUTS, LOCAL_DIM, seed=3)
    options = {"padding": PADDING.tolist(), "positions": positions.expand(ITEMS, -1, -1)} if padded else {}
    parameters = dict(module.named_parameters())
    expected = references.set_prediction(parameters, local, pooled, iterations=ITERATIONS, **options)
    leaves = [pooled, *parameters.values(), *([positions] if padded else [])]
    gradients = torch.autograd.grad(weighted_sum(expected), [local, *leaves])
    if padded:
        local = local.detach().clone()
        local[0, 2], local[1, 0], local[1, 3] = float("nan"), 1e300, float("inf")
        actual = module(local.requires_grad_(), pooled, padding_mask=PADDING, positions=positions)
        at_padding = actual.attention.transpose(1, 2)[PADDING]
        torch.testing.assert_close(at_padding, torch.full_like(at_padding, 1 / SLOTS))
        actual = actual._replace(attention=actual.attention.masked_fill(PADDING[:, None, :, None], 0))
    else:
        actual = module(local, pooled)
    assert_same(actual, expected)
    assert_same(torch.autograd.grad(weighted_sum(actual), [local, *leaves]), gradients)


def test_an_item_of_nothing_but_padding_has_a_finite_set():
    module, (local, pooled) = build(), make_inputs()
    local, padding = local.detach(), PADDING.clone()
    local[0], padding[0] = float("nan"), True
    actual = module(local.requires_grad_(), pooled, padding_mask=padding)
    torch.testing.assert_close(actual.embeddings[0], module(local[:, :0], pooled).embeddings[0])
    gradients = torch.autograd.grad(weighted_sum(actual), [local, *module.parameters()])
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert bool((gradients[0][0] == 0).all())


def test_nan_in_an_input_is_not_hidden():
    module, (local, pooled) = build(), make_inputs()
    local.data[0, 1, 2] = float("nan")
    embeddings = module(local, pooled, padding_mask=PADDING).embeddings
    assert embeddings.isnan().flatten(1).all(dim=1).tolist() == [True, False]
    assert bool(embeddings[1].isfinite().all())


def test_a_slot_that_no_input_prefers_takes_a_mean_all_the_same():
    """Where A underflows in float32, Eq. 3 to the letter is 0 / 0."""
    exact, (local, pooled) = build(), make_inputs()
    with torch.no_grad():
        exact.to_queries.weight.mul_(60)
    single, half = copy.deepcopy(exact).float(), (local.detach().float().requires_grad_(), pooled.detach().float())
    wanted, found = exact(local, pooled), single(*half)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert single(*half).attention.dtype == torch.float32
    assert (found.attention == 0).any()
    torch.testing.assert_close(found.embeddings.double(), wanted.embeddings, atol=1e-2, rtol=1e-2)
    assert torch.autograd.grad(found.embeddings.sum(), half[0])[0].isfinite().all()


def test_half_precision():
    dtype = torch.bfloat16
    module, inputs = build(torch.float32), make_inputs(dtype=torch.float32)
    expected = module(*inputs, padding_mask=PADDING).embeddings
    halves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    for arguments in (inputs, halves):
        with torch.autocast("cpu", dtype=dtype):
            output = module(*arguments, padding_mask=PADDING)
        assert {part.dtype for part in output} == {torch.float32}
        torch.testing.assert_close(output.embeddings, expected, atol=0.1, rtol=0.1)
    assert torch.autograd.grad(output.embeddings.square().sum(), halves[0])[0].dtype == dtype
    output = copy.deepcopy(module).to(dtype)(*halves, padding_mask=PADDING)
    assert [part.dtype for part in output] == [dtype, dtype, torch.float32]
    torch.testing.assert_close(output.embeddings.float(), expected, atol=0.2, rtol=0.2)


def test_slots_start_apart():
    """Also after all iterations, and for inputs that have much in common."""
    seed_torch(0)
    module = SetPrediction(128, hidden_dim=256).eval()
    local = torch.randn(8, 1, 128) + 0.5 * torch.randn(8, 30, 128)
    with torch.no_grad():
        slots = normalize(module(local, torch.randn(8, 128)).slots, dim=-1)
    between_slots = (slots @ slots.transpose(1, 2))[:, ~torch.eye(4, dtype=torch.bool)]
    between_items = (slots[:, 0] @ slots[:, 0].T)[~torch.eye(8, dtype=torch.bool)]
    assert between_slots.mean() < 0.75
    assert between_items.mean() < 0.75, "slots depend on their item"


def test_head_adds_positions_to_a_grid_without_them():
    module, (local, pooled) = build(), make_inputs()
    positions = sinusoidal_positions_2d(2, 2, LOCAL_DIM)
    for grid, has_positions, options in (
        ((2, 2), False, {"positions": positions}),
        ((2, 2), True, {}),
        (None, False, {"padding_mask": PADDING}),
    ):
        features = TowerFeatures(local, pooled, options.get("padding_mask"), grid, has_positions)
        output, expected = SetHead(module)(features), module(local, pooled, **options)
        assert_same((output["features"], output["slots"]), expected[:2])


@pytest.mark.parametrize("name", ["global_feature", "padding_mask", "positions"])
def test_what_would_be_broadcast(name):
    local = torch.zeros(2, 4, LOCAL_DIM)
    given = {"global_feature": torch.zeros(2, DIM), "padding_mask": PADDING, "positions": local[0]}
    with pytest.raises(ValueError, match=f"^{name} must have the shape"):
        build(torch.float32)(local, **(given | {name: given[name][:1]}))


@pytest.mark.parametrize("iterations", [1, 4])
def test_first_weights(iterations):
    """Xavier's; of what each iteration adds to the slots, divided by the number of iterations."""
    module = SetPrediction(64, num_iters=iterations, hidden_dim=64)
    bound = (6 / 128) ** 0.5
    for weight, scale in ((module.to_keys.weight, 1), (module.to_slots.weight, iterations)):
        assert 0.9 * bound < scale * weight.abs().max() <= bound
