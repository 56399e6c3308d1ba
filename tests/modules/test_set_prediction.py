import copy
from itertools import count

import pytest
import torch
from torch.nn.functional import normalize

from tests.helpers.capabilities import needs_float16_on_cpu
from tests.helpers.seeds import first_that, seed_torch, seeded
from tests.reference import set_prediction as reference
from vl_plugins.modules import SetPrediction, SetPredictionOutput
from vl_plugins.modules.set_prediction import slot_attention

ITEMS, INPUTS, SLOTS, DIM, LOCAL_DIM, HIDDEN_DIM, ITERATIONS = 2, 4, 3, 4, 5, 6, 3
PADDING = torch.tensor([[False, False, True, False], [True, False, False, True]])
VARIANTS = {
    "default": {},
    "random slots": {"slots": "random"},
    "gru": {"update": "gru"},
    "no global feature": {"global_feature": False},
    "attention over inputs": {"attention": "inputs"},
    "all": {"slots": "random", "update": "gru", "global_feature": False, "attention": "inputs"},
}
EACH_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


def build(variant="default", dtype=torch.float64, seed=0):
    """A module in which no parameter has a value that would hide it, such as the 1 of a layer norm."""
    seed_torch(seed)
    sizes = {"dim": DIM, "local_dim": LOCAL_DIM, "num_slots": SLOTS, "num_iters": ITERATIONS, "hidden_dim": HIDDEN_DIM}
    module = SetPrediction(**sizes, **VARIANTS[variant]).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return module.eval()


def inputs_of(module, items=ITEMS):
    """Local features, and the global feature that the module takes or None."""
    generator = seeded(1)
    dtype = next(module.parameters()).dtype
    local = torch.randn(items, INPUTS, module.local_dim, dtype=dtype, generator=generator)
    pooled = torch.randn(items, module.dim, dtype=dtype, generator=generator) if module.global_feature else None
    return local, pooled


def stacked(nested):
    return torch.stack([stacked(part) for part in nested]) if isinstance(nested, list) else nested


def weighted_sum(outputs):
    """A number with another weight for each element of the outputs."""
    total = 0
    for index, tensor in enumerate(outputs):
        weights = torch.randn(tensor.shape, dtype=tensor.dtype, generator=seeded(index))
        total = total + 3 * (weights * tensor).sum()
    return total


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


def expected_of(module, local, pooled, noise=None, **options):
    """The output by loops; attention is 0 at padded inputs."""
    if module.slots == "learned":
        initial_slots = module.initial_slots.expand(ITEMS, -1, -1)
    else:
        noise = module.noise.expand(ITEMS, -1, -1) if noise is None else noise
        initial_slots = module.slots_mean + module.slots_log_scale.exp() * noise
    options |= {"iterations": ITERATIONS, "over": module.attention, "gru": module.update == "gru"}
    parameters = dict(module.named_parameters())
    embeddings, slots, attention = reference.set_prediction(parameters, initial_slots, local, pooled, **options)
    maps = local.new_zeros(len(local), ITERATIONS, local.shape[1], SLOTS)
    for item, rows in enumerate(attention):
        kept = [n for n in range(local.shape[1]) if "padding" not in options or not options["padding"][item][n]]
        maps[item, :, kept] = stacked(rows)
    return SetPredictionOutput(stacked(embeddings), stacked(slots), maps)


@EACH_VARIANT
def test_sets_and_gradients_are_the_papers(variant):
    module = build(variant)
    local, pooled = inputs_of(module)
    leaves = [tensor.requires_grad_() for tensor in (local, pooled) if tensor is not None] + list(module.parameters())
    actual, expected = module(local, pooled), expected_of(module, local, pooled)
    assert isinstance(actual, SetPredictionOutput)
    assert_same(actual, expected)
    assert_same(torch.autograd.grad(weighted_sum(actual), leaves), torch.autograd.grad(weighted_sum(expected), leaves))


@pytest.mark.parametrize("per_item", [False, True])
@EACH_VARIANT
def test_padded_inputs_are_not_there_and_positions_are_of_keys(variant, per_item):
    module = build(variant)
    local, pooled = inputs_of(module)
    shape = (ITEMS, INPUTS, LOCAL_DIM) if per_item else (INPUTS, LOCAL_DIM)
    positions = torch.randn(shape, dtype=torch.float64, generator=seeded(2)).requires_grad_()
    options = {"padding": PADDING.tolist(), "positions": positions.expand(ITEMS, -1, -1)}
    expected = expected_of(module, local.requires_grad_(), pooled, **options)
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(weighted_sum(expected), [local, positions, *parameters])

    damaged = local.detach().clone()
    damaged[0, 2], damaged[1, 0], damaged[1, 3] = float("nan"), 1e300, float("inf")
    if per_item:
        positions = positions.detach().masked_fill(PADDING[:, :, None], float("nan")).requires_grad_()
    actual = module(damaged.requires_grad_(), pooled, padding_mask=PADDING, positions=positions)
    at_padding = actual.attention.transpose(1, 2)[PADDING]
    assert_same(at_padding, torch.full_like(at_padding, 1 / SLOTS if module.attention == "slots" else 0))
    actual = actual._replace(attention=actual.attention.masked_fill(PADDING[:, None, :, None], 0))
    assert_same(actual, expected)
    assert_same(torch.autograd.grad(weighted_sum(actual), [damaged, positions, *parameters]), gradients)


@EACH_VARIANT
def test_an_item_of_nothing_but_padding_has_a_finite_set(variant):
    module = build(variant)
    local, pooled = inputs_of(module)
    padding = PADDING.clone()
    local[0], padding[0] = float("nan"), True
    actual = module(local.requires_grad_(), pooled, padding_mask=padding)
    without_inputs = module(local[:, :0], pooled)
    assert without_inputs.attention.shape == (ITEMS, ITERATIONS, 0, SLOTS)
    assert_same(actual.embeddings[0], without_inputs.embeddings[0])
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        gradients = torch.autograd.grad(weighted_sum(actual), [local, *module.parameters()])
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert bool((gradients[0][0] == 0).all())


def test_nan_in_an_input_is_not_hidden():
    module = build()
    local, pooled = inputs_of(module)
    local[0, 1, 2] = float("nan")
    output = module(local, pooled, padding_mask=PADDING)
    assert output.embeddings.isnan().flatten(1).all(dim=1).tolist() == [True, False]
    assert bool(output.embeddings[1].isfinite().all())


@EACH_VARIANT
def test_order_of_inputs_and_other_items_do_not_matter(variant):
    module = build(variant)
    local, pooled = inputs_of(module)
    order = torch.tensor([2, 0, 3, 1])
    whole = module(local, pooled, padding_mask=PADDING)
    alone = module(local[1:, order], None if pooled is None else pooled[1:], padding_mask=PADDING[1:, order])
    assert_same(alone.embeddings, whole.embeddings[1:])
    assert_same(alone.attention, whole.attention[1:, :, order])


def test_new_noise_for_each_item_in_training():
    module = build("random slots").train()
    local, pooled = inputs_of(module)
    seed_torch(5)
    actual = module(local, pooled)
    seed_torch(5)
    noise = torch.randn(ITEMS, SLOTS, DIM, dtype=torch.float64)
    expected = expected_of(module, local, pooled, noise)
    assert_same(actual, expected)
    leaves = [module.slots_mean, module.slots_log_scale]
    assert_same(torch.autograd.grad(weighted_sum(actual), leaves), torch.autograd.grad(weighted_sum(expected), leaves))


@EACH_VARIANT
def test_sets_of_no_items(variant):
    module = build(variant)
    local, pooled = inputs_of(module, items=0)
    for training in (True, False):
        empty = module.train(training)(local, pooled, padding_mask=torch.zeros(0, INPUTS, dtype=torch.bool))
        assert [len(part) for part in empty] == [0, 0, 0]
        empty.embeddings.sum().backward()
    assert all(bool((parameter.grad == 0).all()) for parameter in module.parameters())


def test_a_slot_that_no_input_prefers_takes_a_mean_all_the_same():
    """Where A underflows in float32, Eq. 3 to the letter is 0 / 0."""
    scale = 200.0
    queries = torch.tensor([[[0.0], [-scale], [1.0]]])
    keys = torch.tensor([[[1.0], [1.01], [1.02]]])
    values = torch.tensor([[[1.0], [2.0], [4.0]]])
    actual, attention = slot_attention(queries.requires_grad_(), keys, values)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(slot_attention(queries, keys, values)[1], attention)
    assert bool((attention[0, :, 1] == 0).all())

    exact = torch.exp(keys.double() @ queries.detach().double().transpose(1, 2))
    exact = exact / exact.sum(dim=2, keepdim=True)
    weights = exact / exact.sum(dim=1, keepdim=True)
    torch.testing.assert_close(actual, (weights.transpose(1, 2) @ values.double()).float(), atol=1e-4, rtol=1e-4)
    (gradient,) = torch.autograd.grad(actual.sum(), queries)
    assert bool(gradient.isfinite().all())


@EACH_VARIANT
def test_finite_at_extremes(variant):
    module = build(variant, dtype=torch.float32)
    local, pooled = inputs_of(module)
    module.to_keys.weight.data.mul_(1e4)
    module.to_queries.weight.data.mul_(1e4)
    local.mul_(1e4).requires_grad_()
    output = module(local, None if pooled is None else 1e4 * pooled, padding_mask=PADDING)
    gradients = torch.autograd.grad(weighted_sum(output), [local, *module.parameters()])
    assert all(bool(part.isfinite().all()) for part in (*output, *gradients))


def is_well_conditioned(module):
    """Whether rounding the parameters alone, without what is computed of them, changes little."""
    rounded = copy.deepcopy(module).bfloat16().float()
    outputs = (each(*inputs_of(module), padding_mask=PADDING).embeddings for each in (module, rounded))
    return torch.dist(*outputs, p=torch.inf) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["default", "all"])
def test_half_precision(variant, dtype):
    module = first_that(is_well_conditioned, (build(variant, dtype=torch.float32, seed=seed) for seed in count()))
    inputs = inputs_of(module)
    expected = module(*inputs, padding_mask=PADDING)
    halves = [None if tensor is None else tensor.to(dtype) for tensor in inputs]
    halves[0].requires_grad_()
    for arguments in (inputs, halves):
        with torch.autocast("cpu", dtype=dtype):
            output = module(*arguments, padding_mask=PADDING)
        assert {part.dtype for part in output} == {torch.float32}
        torch.testing.assert_close(output.embeddings, expected.embeddings, atol=0.1, rtol=0.1)
    (gradient,) = torch.autograd.grad(output.embeddings.square().sum(), halves[0])
    assert gradient.dtype == dtype
    if dtype == torch.float16:
        needs_float16_on_cpu()
    output = copy.deepcopy(module).to(dtype)(*halves, padding_mask=PADDING)
    assert [part.dtype for part in output] == [dtype, dtype, torch.float32]
    torch.testing.assert_close(output.embeddings.float(), expected.embeddings, atol=0.2, rtol=0.2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("variant", ["default", "gru"])
def test_autocast_on_cuda(variant):
    module = build(variant, dtype=torch.float32)
    arguments = inputs_of(module)
    expected = module(*arguments, padding_mask=PADDING)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = module.cuda()(*(tensor.cuda() for tensor in arguments), padding_mask=PADDING.cuda())
    assert {part.dtype for part in output} == {torch.float32}
    torch.testing.assert_close(output.embeddings.cpu(), expected.embeddings, atol=0.1, rtol=0.1)
    output.embeddings.square().sum().backward()


@pytest.mark.parametrize("variant", ["default", "random slots", "gru", "attention over inputs"])
def test_slots_start_apart(variant):
    """Also after all iterations, and for inputs that have much in common."""
    seed_torch(0)
    module = SetPrediction(128, hidden_dim=256, **VARIANTS[variant]).eval()
    local = torch.randn(8, 1, 128) + 0.5 * torch.randn(8, 30, 128)
    with torch.no_grad():
        slots = normalize(module(local, torch.randn(8, 128)).slots, dim=-1)
    between_slots = (slots @ slots.transpose(1, 2))[:, ~torch.eye(4, dtype=torch.bool)]
    between_items = (slots[:, 0] @ slots[:, 0].T)[~torch.eye(8, dtype=torch.bool)]
    assert between_slots.mean() < 0.75
    assert between_items.mean() < 0.75, "slots depend on their item"


@pytest.mark.parametrize("variant", ["default", "random slots"])
def test_state_dict_and_copies(variant):
    module, loaded = build(variant), build(variant, seed=1)
    arguments = inputs_of(module)
    expected = module(*arguments)
    assert_same(build(variant)(*arguments), expected)
    assert not torch.equal(loaded(*arguments).embeddings, expected.embeddings)
    loaded.load_state_dict(module.state_dict())
    for other in (loaded, copy.deepcopy(module)):
        torch.testing.assert_close(other(*arguments), expected, atol=0, rtol=0)


def test_compiled_module_has_the_same_sets():
    torch._dynamo.reset()
    module = build()
    local, pooled = inputs_of(module)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    outputs = [run(local.requires_grad_(), pooled, padding_mask=PADDING) for run in (compiled, module)]
    torch.testing.assert_close(*outputs)
    leaves = [local, *module.parameters()]
    assert_same(*(torch.autograd.grad(weighted_sum(output), leaves) for output in outputs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 0}, "num_slots must be an integer >= 1, got 0"),
        ({"slots": "fixed"}, "slots must be 'learned' or 'random', got 'fixed'"),
        ({"attention": ["slots"]}, r"attention must be 'slots' or 'inputs', got \['slots'\]"),
        ({"global_feature": 1}, "global_feature must be True or False, got 1"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        SetPrediction(4, **options)


LOCAL, GLOBAL = torch.zeros(2, 4, LOCAL_DIM), torch.zeros(2, DIM)


@pytest.mark.parametrize(
    ("variant", "arguments", "options", "message"),
    [
        ("default", (LOCAL[0], GLOBAL), {}, r"local_features must have the shape \(B, N, 5\), got \(4, 5\)"),
        ("default", (LOCAL,), {}, "global_feature must be a tensor for a module with global_feature=True, got None"),
        ("no global feature", (LOCAL, GLOBAL), {}, "global_feature must be None for a .*, got a tensor"),
        ("default", (LOCAL, GLOBAL[:1]), {}, r"global_feature must have the shape \(2, 4\), got \(1, 4\)"),
        ("default", (LOCAL, GLOBAL), {"padding_mask": PADDING[:1]}, r"padding_mask .* \(2, 4\), got \(1, 4\)"),
        ("default", (LOCAL, GLOBAL), {"positions": LOCAL[:1]}, r"positions .* \(4, 5\) or \(2, 4, 5\), got .*"),
    ],
)
def test_wrong_inputs(variant, arguments, options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        build(variant, dtype=torch.float32)(*arguments, **options)
