import copy
import io

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint

from tests.capabilities import needs_float16_on_cpu
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


def build(variant="default", dtype=torch.float64, **options):
    """A module in which no parameter has a value that would hide it, such as the 1 of a layer norm."""
    torch.manual_seed(0)
    sizes = {"dim": DIM, "local_dim": LOCAL_DIM, "num_slots": SLOTS, "num_iters": ITERATIONS, "hidden_dim": HIDDEN_DIM}
    module = SetPrediction(**{**sizes, **VARIANTS[variant], **options}).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return module.eval()


def inputs_of(module, items=ITEMS, inputs=INPUTS, seed=1):
    """Local features, and the global feature that the module takes or None."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(module.parameters()).dtype
    local = torch.randn(items, inputs, module.local_dim, dtype=dtype, generator=generator)
    pooled = torch.randn(items, module.dim, dtype=dtype, generator=generator) if module.global_feature else None
    return local, pooled


def initial_slots_of(module, items=ITEMS):
    if module.slots == "learned":
        return module.initial_slots.expand(items, -1, -1)
    return (module.slots_mean + module.slots_log_scale.exp() * module.noise).expand(items, -1, -1)


def stacked(nested):
    return torch.stack([stacked(part) for part in nested]) if isinstance(nested, list) else nested


def weighted_sum(outputs, padding=None):
    """A number with another weight for each element of the outputs, and none for the attention of padded inputs."""
    total = 0
    for index, tensor in enumerate(outputs):
        weights = torch.randn(tensor.shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(index))
        if padding is not None and tensor.ndim == 4:
            weights = weights.masked_fill(padding[:, None, :, None], 0)
        total = total + 3 * (weights * tensor).sum()
    return total


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


@EACH_VARIANT
def test_sets_and_gradients_are_the_papers(variant):
    module = build(variant)
    local, pooled = inputs_of(module)
    leaves = [tensor.requires_grad_() for tensor in (local, pooled) if tensor is not None] + list(module.parameters())
    actual = module(local, pooled)
    assert isinstance(actual, SetPredictionOutput)
    expected = reference.set_prediction(
        dict(module.named_parameters()),
        initial_slots_of(module),
        local,
        pooled,
        iterations=ITERATIONS,
        over=module.attention,
        gru=module.update == "gru",
    )
    expected = [stacked(part) for part in expected]
    assert [tuple(part.shape) for part in actual] == [
        (ITEMS, SLOTS, DIM),
        (ITEMS, SLOTS, DIM),
        (ITEMS, ITERATIONS, INPUTS, SLOTS),
    ]
    for part, of_reference in zip(actual, expected, strict=True):
        assert_same(part, of_reference)
    assert_same(torch.autograd.grad(weighted_sum(actual), leaves), torch.autograd.grad(weighted_sum(expected), leaves))


@pytest.mark.parametrize("per_item", [False, True])
@EACH_VARIANT
def test_padded_inputs_are_not_there_and_positions_are_of_keys(variant, per_item):
    module = build(variant)
    local, pooled = inputs_of(module)
    generator = torch.Generator().manual_seed(2)
    positions = torch.randn(ITEMS, INPUTS, LOCAL_DIM, dtype=torch.float64, generator=generator)
    positions = positions if per_item else positions[0]
    expected = reference.set_prediction(
        dict(module.named_parameters()),
        initial_slots_of(module),
        local.requires_grad_(),
        pooled,
        iterations=ITERATIONS,
        padding=PADDING.tolist(),
        positions=positions.requires_grad_().expand(ITEMS, -1, -1),
        over=module.attention,
        gru=module.update == "gru",
    )
    whole = [stacked(part) for part in expected[:2]]
    maps = torch.zeros(ITEMS, ITERATIONS, INPUTS, SLOTS, dtype=torch.float64)
    for item in range(ITEMS):
        maps[item, :, ~PADDING[item]] = stacked(expected[2][item])
    parameters = list(module.parameters())
    of_inputs, of_positions, *of_parameters = torch.autograd.grad(
        weighted_sum([*whole, maps], PADDING), [local, positions, *parameters]
    )

    damaged = local.detach().clone()
    damaged[0, 2], damaged[1, 0], damaged[1, 3] = float("nan"), 1e300, float("inf")
    damaged.requires_grad_()
    if per_item:
        positions = positions.detach().masked_fill(PADDING[:, :, None], float("nan")).requires_grad_()
    actual = module(damaged, pooled, padding_mask=PADDING, positions=positions)
    for part, of_reference in zip(actual[:2], whole, strict=True):
        assert_same(part, of_reference)
    assert_same(actual.attention.masked_fill(PADDING[:, None, :, None], 0), maps)
    gradients = torch.autograd.grad(weighted_sum(actual, PADDING), [damaged, positions, *parameters])
    assert_same(gradients, (of_inputs, of_positions, *of_parameters))
    assert bool((gradients[0][PADDING] == 0).all())


@EACH_VARIANT
def test_padding_of_any_length_changes_nothing(variant):
    module = build(variant)
    local, pooled = inputs_of(module, inputs=7)
    padding = torch.zeros(ITEMS, 7, dtype=torch.bool)
    padding[:, 5:] = True
    longer, shorter = module(local, pooled, padding_mask=padding), module(local[:, :5], pooled)
    assert_same(longer.embeddings, shorter.embeddings)
    assert_same(longer.attention[:, :, :5], shorter.attention)


@EACH_VARIANT
def test_attention_sums_to_one(variant):
    module = build(variant)
    local, pooled = inputs_of(module)
    for padding in (None, PADDING):
        attention = module(local, pooled, padding_mask=padding).attention
        assert bool((attention >= 0).all())
        total = attention.sum(dim=3 if module.attention == "slots" else 2)
        assert_same(total, torch.ones_like(total))
    assert ((attention[0, 0, 2] == 0).all()) == (module.attention == "inputs"), "of a padded input"


@EACH_VARIANT
def test_an_item_of_nothing_but_padding_has_a_finite_set(variant):
    module = build(variant)
    local, pooled = inputs_of(module)
    local[0] = float("nan")
    local.requires_grad_()
    padding = PADDING.clone()
    padding[0] = True
    actual = module(local, pooled, padding_mask=padding)
    assert all(bool(part.isfinite().all()) for part in actual)
    without_inputs = module(local[:, :0], pooled)
    assert without_inputs.attention.shape == (ITEMS, ITERATIONS, 0, SLOTS)
    assert_same(actual.embeddings[0], without_inputs.embeddings[0])
    gradients = torch.autograd.grad(weighted_sum(actual), [local, *module.parameters()])
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert bool((gradients[0][0] == 0).all())
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        # Not even on the way is anything NaN.
        weighted_sum(module(local, pooled, padding_mask=padding)).backward()
    alone = module(local[1:], pooled if pooled is None else pooled[1:], padding_mask=padding[1:])
    assert_same(actual.embeddings[1:], alone.embeddings)


def test_nan_in_an_input_is_not_hidden():
    module = build()
    local, pooled = inputs_of(module)
    local[0, 1, 2] = float("nan")
    output = module(local, pooled, padding_mask=PADDING)
    assert bool(output.embeddings[0].isnan().all())
    assert bool(output.embeddings[1].isfinite().all())


@EACH_VARIANT
def test_order_of_inputs_does_not_matter(variant):
    module = build(variant)
    local, pooled = inputs_of(module)
    order = torch.tensor([2, 0, 3, 1])
    whole = module(local, pooled, padding_mask=PADDING)
    permuted = module(local[:, order], pooled, padding_mask=PADDING[:, order])
    assert_same(permuted.embeddings, whole.embeddings)
    assert_same(permuted.attention, whole.attention[:, :, order])


@pytest.mark.parametrize("variant", ["default", "gru", "no global feature", "attention over inputs"])
def test_order_of_learned_slots_is_that_of_the_set(variant):
    module = build(variant)
    local, pooled = inputs_of(module)
    order = torch.tensor([2, 0, 1])
    expected = module(local, pooled)
    with torch.no_grad():
        module.initial_slots.copy_(module.initial_slots[order])
    permuted = module(local, pooled)
    assert_same(permuted.embeddings, expected.embeddings[:, order])
    assert_same(permuted.slots, expected.slots[:, order])
    assert_same(permuted.attention, expected.attention[:, :, :, order])


def test_positions_do_not_reach_the_values():
    # Of a single slot the attention is 1, whatever the keys are, so only values could change it.
    for slots in (1, SLOTS):
        module = build(num_slots=slots)
        local, pooled = inputs_of(module)
        positions = torch.arange(INPUTS * LOCAL_DIM, dtype=torch.float64).view(INPUTS, LOCAL_DIM)
        with_positions, without = module(local, pooled, positions=positions), module(local, pooled)
        assert torch.equal(with_positions.embeddings, without.embeddings) == (slots == 1)


def test_keys_and_values_are_computed_once():
    module = build(num_iters=5)
    calls = []
    for name in ("norm_inputs", "to_keys", "to_values", "to_queries"):
        module.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    module(*inputs_of(module))
    assert sorted(calls) == ["norm_inputs", "to_keys", *["to_queries"] * 5, "to_values"]


def test_fresh_noise_for_each_item_in_training():
    module = build("random slots").train()
    local, pooled = inputs_of(module)
    same, same_global = local[:1].expand_as(local), pooled[:1].expand_as(pooled)
    first, second = module(same, same_global).embeddings
    assert (first - second).abs().max() > 1e-3

    torch.manual_seed(5)
    actual = module(local, pooled)
    torch.manual_seed(5)
    noise = torch.randn(ITEMS, SLOTS, DIM, dtype=torch.float64)
    leaves = [module.slots_mean, module.slots_log_scale]
    initial_slots = module.slots_mean + module.slots_log_scale.exp() * noise
    expected = reference.set_prediction(
        dict(module.named_parameters()), initial_slots, local, pooled, iterations=ITERATIONS
    )
    assert_same(actual.embeddings, stacked(expected[0]))
    assert_same(
        torch.autograd.grad(weighted_sum(actual[:1]), leaves),
        torch.autograd.grad(weighted_sum([stacked(expected[0])]), leaves),
    )


@EACH_VARIANT
def test_sets_in_evaluation_depend_on_the_item_alone(variant):
    module = build(variant)
    local, pooled = inputs_of(module, items=5)
    torch.manual_seed(3)
    whole = module(local, pooled).embeddings
    torch.manual_seed(4)
    for item in range(5):
        alone = module(local[item : item + 1], pooled if pooled is None else pooled[item : item + 1])
        assert_same(alone.embeddings[0], whole[item])
    if module.slots == "learned":
        assert torch.equal(module.train()(local, pooled).embeddings, whole)


def test_a_single_slot_takes_the_mean_of_all_values():
    module = build(num_slots=1, num_iters=1)
    local, pooled = inputs_of(module)
    output = module(local, pooled)
    mean = module.to_values(module.norm_inputs(local)).mean(dim=1, keepdim=True)
    residual = module.to_slots(mean) + module.initial_slots
    assert_same(output.slots, module.mlp(module.norm_mlp(residual)) + residual)
    assert bool((output.attention == 1).all())


@EACH_VARIANT
def test_sets_of_a_single_input_and_of_no_items(variant):
    module = build(variant)
    local, pooled = inputs_of(module, inputs=1)
    assert bool(module(local, pooled).embeddings.isfinite().all())
    local, pooled = inputs_of(module, items=0)
    for training in (True, False):
        empty = module.train(training)(local, pooled, padding_mask=torch.zeros(0, INPUTS, dtype=torch.bool))
        assert [tuple(part.shape) for part in empty] == [
            (0, SLOTS, DIM),
            (0, SLOTS, DIM),
            (0, ITERATIONS, INPUTS, SLOTS),
        ]
        empty.embeddings.sum().backward()
    assert all(bool((parameter.grad == 0).all()) for parameter in module.parameters())


def test_defaults_are_the_papers():
    module = SetPrediction(8)
    local, pooled = inputs_of(module)
    assert module(local, pooled).embeddings.shape == (ITEMS, 4, 8)
    assert repr(module).splitlines()[1].strip() == (
        "dim=8, local_dim=8, num_slots=4, num_iters=4, hidden_dim=1024, slots='learned', update='residual', "
        "attention='slots', global_feature=True"
    )


def test_a_slot_that_no_input_prefers_takes_a_mean_all_the_same():
    """Where A underflows in float32, Eq. 3 to the letter is 0 / 0."""
    scale = 200.0
    queries = torch.tensor([[[0.0], [-scale], [1.0]]])
    keys = torch.tensor([[[1.0], [1.01], [1.02]]])
    values = torch.tensor([[[1.0], [2.0], [4.0]]])
    actual, attention = slot_attention(queries.requires_grad_(), keys, values)
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
    with torch.no_grad():
        for name in ("to_keys", "to_queries"):
            module.get_submodule(name).weight.mul_(1e4)
    local.mul_(1e4).requires_grad_()
    output = module(local, None if pooled is None else 1e4 * pooled, padding_mask=PADDING)
    assert all(bool(part.isfinite().all()) for part in output)
    gradients = torch.autograd.grad(weighted_sum(output), [local, *module.parameters()])
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EACH_VARIANT
def test_half_precision(variant, dtype):
    module = build(variant, dtype=torch.float32)
    local, pooled = inputs_of(module)
    expected = module(local, pooled, padding_mask=PADDING)
    tolerance = {"atol": 0.1, "rtol": 0.1}
    halves = [None if tensor is None else tensor.to(dtype) for tensor in (local, pooled)]
    halves[0].requires_grad_()

    of_half_inputs = module(*halves, padding_mask=PADDING)
    rounded = [None if tensor is None else tensor.detach().float() for tensor in halves]
    torch.testing.assert_close(of_half_inputs, module(*rounded, padding_mask=PADDING), atol=0, rtol=0)
    (gradient,) = torch.autograd.grad(of_half_inputs.embeddings.square().sum(), halves[0])
    assert gradient.dtype == dtype

    for arguments in ((local, pooled), halves):
        with torch.autocast("cpu", dtype=dtype):
            output = module(*arguments, padding_mask=PADDING)
        assert {part.dtype for part in output} == {torch.float32}
        torch.testing.assert_close(output.embeddings, expected.embeddings, **tolerance)
        total = output.attention.sum(dim=3 if module.attention == "slots" else 2)
        torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0)
        output.embeddings.square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EACH_VARIANT
def test_half_precision_of_the_module(variant, dtype):
    if dtype == torch.float16:
        needs_float16_on_cpu()
    module = build(variant, dtype=torch.float32)
    local, pooled = inputs_of(module)
    expected = module(local, pooled, padding_mask=PADDING)
    halves = [None if tensor is None else tensor.to(dtype) for tensor in (local, pooled)]
    output = copy.deepcopy(module).to(dtype)(*halves, padding_mask=PADDING)
    assert [part.dtype for part in output] == [dtype, dtype, torch.float32]
    torch.testing.assert_close(output.embeddings.float(), expected.embeddings, atol=0.2, rtol=0.2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EACH_VARIANT
def test_autocast_on_cuda(variant, dtype):
    module = build(variant, dtype=torch.float32)
    arguments = inputs_of(module)
    expected = module(*arguments, padding_mask=PADDING)
    arguments = [None if tensor is None else tensor.cuda() for tensor in arguments]
    with torch.autocast("cuda", dtype=dtype):
        output = module.cuda()(*arguments, padding_mask=PADDING.cuda())
    assert {part.dtype for part in output} == {torch.float32}
    torch.testing.assert_close(output.embeddings.cpu(), expected.embeddings, atol=0.1, rtol=0.1)
    output.embeddings.square().sum().backward()


def test_attention_under_autocast_is_of_full_precision():
    """With logits near 1000, bfloat16 would round the differences between slots away."""
    module = build(dtype=torch.float32, num_iters=1)
    generator = torch.Generator().manual_seed(3)
    keys = 1000 + torch.rand(1, 5, 1, generator=generator)
    queries = torch.tensor([[[1.0], [1.001], [1.002]]])
    values = torch.rand(1, 5, 2, generator=generator)
    expected = slot_attention(queries, keys, values)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = slot_attention(queries, keys, values)
        assert module(*inputs_of(module)).attention.dtype == torch.float32
    torch.testing.assert_close(actual[1], expected[1])


@EACH_VARIANT
def test_the_same_seed_makes_the_same_module(variant):
    def make(seed):
        torch.manual_seed(seed)
        return SetPrediction(DIM, hidden_dim=HIDDEN_DIM, **VARIANTS[variant]).state_dict()

    first, second, other = make(0), make(0), make(1)
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    different = [name for name in first if not torch.equal(first[name], other[name])]
    assert {"to_keys.weight", "to_values.weight", "to_queries.weight", "to_slots.weight"} <= set(different)
    assert ("noise" if module_has_noise(variant) else "initial_slots") in different


def module_has_noise(variant):
    return VARIANTS[variant].get("slots") == "random"


@pytest.mark.parametrize("variant", ["default", "random slots", "gru", "attention over inputs"])
def test_slots_start_apart(variant):
    """Also after all iterations, and for inputs that have much in common."""
    torch.manual_seed(0)
    module = SetPrediction(128, hidden_dim=256, **VARIANTS[variant]).eval()
    local = torch.randn(8, 1, 128) + 0.5 * torch.randn(8, 30, 128)
    with torch.no_grad():
        slots = normalize(module(local, torch.randn(8, 128)).slots, dim=-1)
    between_slots = (slots @ slots.transpose(1, 2))[:, ~torch.eye(4, dtype=torch.bool)]
    between_items = (slots[:, 0] @ slots[:, 0].T)[~torch.eye(8, dtype=torch.bool)]
    assert between_slots.mean() < 0.75
    assert between_items.mean() < 0.75, "they tell of their item"


@EACH_VARIANT
def test_state_dict_and_copies(variant):
    module = build(variant)
    local, pooled = inputs_of(module)
    expected = module(local, pooled)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = build(variant)
    loaded.reset_parameters()
    assert not torch.equal(loaded(local, pooled).embeddings, expected.embeddings)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    for other in (loaded, copied):
        torch.testing.assert_close(other(local, pooled), expected, atol=0, rtol=0)


@EACH_VARIANT
def test_gradient_checkpointing_and_inputs_left_as_they_are(variant):
    module = build(variant).train()
    local, pooled = inputs_of(module)
    local.requires_grad_()
    before = local.detach().clone()
    gradients = []
    for run in (lambda *inputs: checkpoint(module, *inputs, use_reentrant=False), module):
        torch.manual_seed(0)
        output = run(local, pooled)
        gradients.append(torch.autograd.grad(weighted_sum(output), [local, *module.parameters()]))
    assert_same(*gradients)
    module(local.detach(), pooled, padding_mask=PADDING)
    assert torch.equal(local, before)


SLOW_VARIANTS = [pytest.param(name, marks=pytest.mark.slow) for name in [*VARIANTS][1:]]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", ["default", *SLOW_VARIANTS])
def test_compiled_module_has_the_same_sets(variant, backend):
    torch._dynamo.reset()
    module = build(variant)
    local, pooled = inputs_of(module)
    local.requires_grad_()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    outputs = [run(local, pooled, padding_mask=PADDING) for run in (compiled, module)]
    torch.testing.assert_close(*outputs)
    leaves = [local, *module.parameters()]
    assert_same(*(torch.autograd.grad(weighted_sum(output), leaves) for output in outputs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim must be an integer >= 1, got 0"),
        ({"local_dim": 0}, "local_dim must be an integer >= 1, got 0"),
        ({"num_slots": 0}, "num_slots must be an integer >= 1, got 0"),
        ({"num_iters": 0}, "num_iters must be an integer >= 1, got 0"),
        ({"num_iters": True}, "num_iters must be an integer >= 1, got True"),
        ({"hidden_dim": 1.5}, r"hidden_dim must be an integer >= 1, got 1\.5"),
        ({"slots": "fixed"}, "slots must be 'learned' or 'random', got 'fixed'"),
        ({"update": "lstm"}, "update must be 'residual' or 'gru', got 'lstm'"),
        ({"attention": "keys"}, "attention must be 'slots' or 'inputs', got 'keys'"),
        ({"attention": ["slots"]}, r"attention must be 'slots' or 'inputs', got \['slots'\]"),
        ({"global_feature": "yes"}, "global_feature must be True or False, got 'yes'"),
        ({"global_feature": 1}, "global_feature must be True or False, got 1"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        SetPrediction(**{"dim": 4, **options})


LOCAL, GLOBAL = torch.zeros(2, 4, LOCAL_DIM), torch.zeros(2, DIM)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((LOCAL[0], GLOBAL), {}, r"local_features must have the shape \(B, N, 5\), got \(4, 5\)"),
        ((LOCAL[..., :4], GLOBAL), {}, r"local_features must have the shape \(B, N, 5\), got \(2, 4, 4\)"),
        ((LOCAL,), {}, "global_feature must be given, got None; or build the module with global_feature=False"),
        ((LOCAL, GLOBAL[:1]), {}, r"global_feature must have the shape \(2, 4\), got \(1, 4\)"),
        ((LOCAL, GLOBAL[:, None]), {}, r"global_feature must have the shape \(2, 4\), got \(2, 1, 4\)"),
        ((LOCAL, GLOBAL.to("meta")), {}, "global_feature must have the device of local_features, cpu, got meta"),
        (
            (LOCAL, GLOBAL),
            {"padding_mask": PADDING[:1]},
            r"padding_mask must have the shape \(2, 4\), got \(1, 4\)",
        ),
        (
            (LOCAL, GLOBAL),
            {"padding_mask": PADDING.int()},
            r"padding_mask must have the type torch.bool, got torch.int32",
        ),
        (
            (LOCAL, GLOBAL),
            {"positions": LOCAL[0, :3]},
            r"positions must have the shape \(4, 5\) or \(2, 4, 5\), got \(3, 5\)",
        ),
        (
            (LOCAL, GLOBAL),
            {"positions": LOCAL[:1]},
            r"positions must have the shape \(4, 5\) or \(2, 4, 5\), got \(1, 4, 5\)",
        ),
    ],
)
def test_wrong_inputs_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        build(dtype=torch.float32)(*arguments, **options)


def test_a_global_feature_that_is_not_wanted_is_named():
    with pytest.raises(
        ValueError, match=r"^global_feature must be None for a module .* got a tensor of the shape \(2, 4\)$"
    ):
        build("no global feature", dtype=torch.float32)(LOCAL, GLOBAL)
