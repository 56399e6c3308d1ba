import copy
import pickle

import pytest
import torch
import yaml
from pytorch_metric_learning import miners
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.reducers import MeanReducer
from torch import nn

from tests.functional.test_unified import ALL_VARIANTS, gradient_of_loops, variant
from tests.reference import distances as reference_distances
from tests.reference import losses as reference
from vl_plugins import create_loss
from vl_plugins.functional import Polynomial, soft_margin, unified_loss
from vl_plugins.integrations.key_values import parse_key_values
from vl_plugins.losses import TripletHNLoss, UnifiedLoss

LABELS = torch.arange(6)
IMAGES = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TEXTS = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def call(loss):
    return loss(IMAGES, LABELS, ref_emb=TEXTS, ref_labels=LABELS)


def test_defaults():
    loss = UnifiedLoss()
    assert (loss.margin, loss.scale, loss.symmetric) == (0.2, 50.0, True)
    assert isinstance(loss.distance, CosineSimilarity)
    assert isinstance(loss.reducer, MeanReducer)
    positives = torch.eye(6, dtype=torch.bool)
    torch.testing.assert_close(call(loss), unified_loss(loss.distance(IMAGES, TEXTS), positives, ~positives, 0.2, 50))


@pytest.mark.parametrize("option", [{"margin": -0.1}, {"margin": float("nan")}, {"scale": 0}, {"scale": "50"}])
def test_wrong_hyper_parameters(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be a finite number"):
        UnifiedLoss(**option)


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-D", "1-D"])
def test_learned_scale(shape):
    scale = torch.full(shape, 20.0, requires_grad=True)
    loss = UnifiedLoss()
    loss.scale = scale
    value = call(loss)
    value.backward()
    assert scale.grad.isfinite()
    assert scale.grad != 0
    torch.testing.assert_close(value, call(UnifiedLoss(scale=20)))
    loss.scale = 50.0
    torch.testing.assert_close(call(loss), call(UnifiedLoss()))


def test_large_scale_is_triplet_hn():
    torch.testing.assert_close(call(UnifiedLoss(scale=1e4)), call(TripletHNLoss()), atol=1e-3, rtol=0)


SOME_LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
OTHER_LABELS = torch.tensor([2, 0, 3, 1, 1, 4, 2, 3])
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
MINERS = {
    "labels": None,
    "MultiSimilarityMiner": miners.MultiSimilarityMiner(epsilon=0.5),
    "TripletMarginMiner": miners.TripletMarginMiner(margin=0.3),
}


def call_with(sets, dtype):
    call = {"embeddings": IMAGES.to(dtype).requires_grad_(), "labels": SOME_LABELS}
    if sets == 2:
        texts = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        call |= {"ref_emb": texts.to(dtype).requires_grad_(), "ref_labels": OTHER_LABELS}
    return call


@ALL_VARIANTS
@pytest.mark.parametrize("miner", MINERS)
@pytest.mark.parametrize("sets", [1, 2], ids=["one set", "two sets"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_variants_equal_the_loops(name, miner, sets, dtype):
    call = call_with(sets, dtype)
    indices_tuple = None if MINERS[miner] is None else MINERS[miner](**call)
    if indices_tuple is None:
        positives, negatives = reference.pairs_of_labels(
            SOME_LABELS.tolist(), OTHER_LABELS.tolist() if sets == 2 else None
        )
    else:
        indices = [index.tolist() for index in indices_tuple]
        positives = set(zip(indices[0], indices[1], strict=True))
        negatives = set(zip(indices[-2] if len(indices) == 4 else indices[0], indices[-1], strict=True))
    masks = torch.zeros(2, 6, 6 if sets == 1 else 8, dtype=torch.bool)
    for mask, of_kind in zip(masks, (positives, negatives), strict=True):
        mask[tuple(zip(*of_kind, strict=True))] = True
    options, loops, leaves = variant(name, masks, dtype)

    loss = UnifiedLoss(scale=5.0)
    for key, option in options.items():
        setattr(loss, key, option)
    value = loss(**call, indices_tuple=indices_tuple)
    embeddings = [call[key] for key in ("embeddings", "ref_emb") if key in call]
    gradients = torch.autograd.grad(3 * value, [*embeddings, *(tensor for tensor, _ in leaves)])

    twins = [tensor.detach().double().requires_grad_() for tensor in embeddings]
    similarities = reference_distances.matrix(reference_distances.cosine, *twins)
    symmetric = sets == 2 and indices_tuple is None
    values, derivatives = reference.unified_variants(
        similarities.tolist(), positives, negatives, symmetric=symmetric, scale=5.0, **loops
    )
    upstream = dict.fromkeys(values, 3 / len(values))
    of_similarities = gradient_of_loops(derivatives, upstream, "similarity", similarities.shape)
    expected = list(torch.autograd.grad(similarities, twins, of_similarities))
    for tensor, names in leaves:
        of_pairs = gradient_of_loops(derivatives, upstream, names, similarities.shape)
        expected.append(of_pairs.reshape(*tensor.shape, -1).sum(dim=-1))
    assert value.dtype == dtype
    assert all(gradient.abs().max() > 0.01 for gradient in expected)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(value.item(), sum(values.values()) / len(values), **close)
    torch.testing.assert_close([gradient.double() for gradient in gradients], expected, **close)


def test_soft_margins_set_in_a_training_loop():
    images, texts = (tensor.clone().requires_grad_() for tensor in (IMAGES, TEXTS))
    loss = UnifiedLoss(scale=10)
    positives = torch.eye(6, dtype=torch.bool)
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        confidence = torch.rand(6, generator=generator)
        loss.margin = soft_margin(confidence)
        actual = loss(images, LABELS, ref_emb=texts, ref_labels=LABELS)
        per_pair = 0.2 * (10 ** confidence.double() - 1) / 9
        # Eq. 26 for one positive per row: the negatives are closer by the margin of the pair.
        similarities = loss.distance(images, texts)
        by_row = 10 * (similarities + per_pair[:, None] * ~positives)
        by_column = 10 * (similarities + per_pair * ~positives).T
        expected = sum(nn.functional.cross_entropy(logits, LABELS) for logits in (by_row, by_column)) / 10
        torch.testing.assert_close(actual, expected, atol=1e-7, rtol=1e-6)
        torch.testing.assert_close(
            torch.autograd.grad(actual, (images, texts)),
            torch.autograd.grad(expected, (images, texts)),
            atol=1e-6,
            rtol=1e-5,
        )


def test_soft_margins_of_one_set():
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    loss = UnifiedLoss(scale=1e4)
    loss.margin = soft_margin(torch.tensor([0.0, 1.0, 0.5, 0.2, 0.9, 0.3]))
    similarities = loss.distance(IMAGES, IMAGES)
    other = torch.tensor([1, 0, 3, 2, 5, 4])
    hardest = similarities.masked_fill(labels[:, None] == labels, -2).max(dim=1).values
    hinges = (hardest - similarities[torch.arange(6), other] + loss.margin).relu()
    torch.testing.assert_close(loss(IMAGES, labels), hinges.mean(), atol=1e-3, rtol=0)


def test_learned_margin():
    margin = nn.Parameter(torch.tensor(0.3))
    loss = UnifiedLoss(margin=margin)
    assert list(loss.parameters()) == [margin]
    call(loss).backward()
    assert margin.grad > 0
    torch.testing.assert_close(call(loss), call(UnifiedLoss(margin=0.3)), rtol=1e-6, atol=1e-7)


COEFFICIENTS = {
    "relative": ([0, 1, 0.5], Polynomial([0, 1, 0.5])),
    "one polynomial as weights": ((0.5, -0.7), Polynomial([0.5, -0.7])),
    "two polynomials as weights": ([[0.5, -0.7], (0.03, 0.9)], (Polynomial([0.5, -0.7]), Polynomial([0.03, 0.9]))),
    "one polynomial and a function": ((torch.sigmoid, [0.03, 0.9]), (torch.sigmoid, Polynomial([0.03, 0.9]))),
}


@pytest.mark.parametrize("case", COEFFICIENTS)
def test_sequences_of_numbers_are_polynomials(case):
    given, expected = COEFFICIENTS[case]
    option = "relative" if case == "relative" else "weights"
    assert getattr(UnifiedLoss(**{option: given}), option) == expected


def test_options_from_a_command_line_and_from_yaml():
    expected = call(UnifiedLoss(relative=[0, 1, 0.5], weights=(Polynomial([0.5, -0.7]), Polynomial([0.03, 0.9]))))
    assert abs(expected - call(UnifiedLoss())) > 0.01
    for options in (
        parse_key_values("relative=[0,1,0.5] weights=([0.5,-0.7],[0.03,0.9])".split(), "--loss-kwargs"),
        yaml.safe_load("{relative: [0, 1, 0.5], weights: [[0.5, -0.7], [0.03, 0.9]]}"),
    ):
        assert torch.equal(call(create_loss("unified", **options)), expected)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"margin": "0.2"}, "margin must be a number, a tensor or a function, got '0.2'"),
        ({"margin": [0.2, 0.3]}, r"margin must be a number, a tensor or a function, got \[0.2, 0.3\]"),
        ({"margin": torch.tensor([0.1, -0.2])}, "margin must be >= 0 everywhere, got a tensor with the minimum -0.2"),
        ({"margin": torch.tensor(float("inf"))}, "margin must be finite everywhere"),
        ({"weights": torch.full((2, 2), float("nan"))}, "weights must be finite everywhere"),
        ({"weights": torch.ones(2, 2, 2)}, r"weights must have the shape \(anchors,\) or .*, got \(2, 2, 2\)"),
        ({"weights": (torch.tensor(2.0), torch.exp)}, r"weights of the positives must have the shape .*, got \(\)"),
        (
            {"weights": (torch.sigmoid, "1")},
            "weights of the negatives must be a function or the coefficients of a poly",
        ),
        ({"weights": (0.5, torch.sigmoid)}, "weights must be a function or the coefficients of a polynomial: coeff"),
        ({"weights": 0.5}, "weights must be a function or .* finite numbers, got 0.5"),
        ({"weights": ([1], [1], [1])}, "weights must be a function or .* finite numbers, got"),
        ({"relative": []}, r"relative must be a function or the coefficients .* finite numbers, got \[\]"),
        ({"relative": ["1e-3"]}, r"relative must be a function or the coefficients .*, got \['1e-3'\]"),
    ],
)
def test_wrong_margins_weights_and_functions(option, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        UnifiedLoss(**option)


def rising_margin(similarities, positive_mask, negative_mask):
    return 0.1 + 0.3 * similarities


class LearnedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, similarities):
        return 1 + self.slope * similarities


STATES = {
    "functions": {"margin": rising_margin, "weights": ([0.5, -0.7], [0.03, 0.9]), "relative": [0, 1, 0.5]},
    "tensors": {"margin": torch.linspace(0, 0.5, 6), "weights": torch.linspace(0.5, 1.5, 36).reshape(6, 6)},
    "modules": {"weights": (nn.Tanh(), LearnedWeights())},
}


@pytest.mark.parametrize("options", STATES.values(), ids=STATES.keys())
def test_copies_give_the_same_value(options):
    loss = UnifiedLoss(**options).double()
    expected = call(loss)
    assert abs(expected - call(UnifiedLoss())) > 0.01
    for twin in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        assert torch.equal(call(twin), expected)
        twin.load_state_dict(loss.state_dict())
    torch.testing.assert_close(call(loss.to(torch.float64)), expected)


def test_parameters_of_modules_as_weights_are_those_of_the_loss():
    module = LearnedWeights()
    for weights in (module, (torch.sigmoid, module), (module, module)):
        loss = UnifiedLoss(weights=weights)
        assert list(loss.parameters()) == [module.slope]
        module.slope.grad = None
        call(loss).backward()
        assert abs(module.slope.grad) > 1e-3
        twin = copy.deepcopy(loss)
        with torch.no_grad():
            next(twin.parameters()).fill_(0.0)
        assert abs(call(twin) - call(loss)) > 1e-3
    assert "weight_modules" not in dict(UnifiedLoss(weights=([1], [1])).named_children())


def test_only_numbers_and_tensors_are_recorded():
    assert UnifiedLoss(margin=torch.ones(2))._record_these == ["margin", "scale"]
    loss = UnifiedLoss(margin=rising_margin, collect_stats=True)
    assert loss._record_these == ["scale"]
    assert call(loss).isfinite()
    assert loss.margin is rising_margin


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "state", ["functions", *(pytest.param(s, marks=pytest.mark.slow) for s in ("tensors", "modules"))]
)
def test_compiled_loss_has_the_same_value(state, backend):
    torch._dynamo.reset()
    loss = UnifiedLoss(**STATES[state]).double()
    torch.testing.assert_close(call(torch.compile(loss, backend=backend)), call(loss))


def test_options_of_the_class_and_of_the_function_are_the_same():
    masks = torch.eye(6, dtype=torch.bool), ~torch.eye(6, dtype=torch.bool)
    options = STATES["functions"] | {"relative": Polynomial([0, 1, 0.5])}
    loss = UnifiedLoss(**options)
    options["weights"] = tuple(map(Polynomial, options["weights"]))
    torch.testing.assert_close(call(loss), unified_loss(loss.distance(IMAGES, TEXTS), *masks, **options))
