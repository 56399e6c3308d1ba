"""What single losses add to the contract: variants of Unified, weights of GOAL, the warm-up, known identities."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from pytorch_metric_learning import losses as host
from pytorch_metric_learning import miners
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.reducers import DoNothingReducer, MeanReducer, SumReducer
from torch import nn

from tests.helpers.loops import LABELS, OTHER_LABELS, call_with, calls, check, embeddings_of, leaves_of, make_loss
from tests.helpers.seeds import seeded
from tests.reference import goal as goal_reference
from tests.reference import losses as reference
from vl_plugins.losses import GOALLoss, Polynomial, TripletHNLoss, TripletSHLoss, UnifiedLoss, VLCLoss, soft_margin
from vl_plugins.losses.goal import PAIR_WEIGHTS, TRIPLET_WEIGHTS

SHAPE = len(LABELS), len(OTHER_LABELS)
POSITIVES = LABELS[:, None] == OTHER_LABELS


def similarities_like(mask, seed=7):
    return (2 * torch.rand(mask.shape, dtype=torch.float64, generator=seeded(seed)) - 1).requires_grad_()


def values(loss, similarities, masks, symmetric=True):
    """The losses of all positive pairs, (M,)."""
    loss.reducer = DoNothingReducer()
    return loss.from_similarities(similarities, *masks, symmetric=symmetric)["loss"]["losses"]


def gradients(values, leaves):
    upstream = 0.5 + 0.25 * torch.arange(values.numel(), dtype=torch.float64).reshape(values.shape)
    return torch.autograd.grad(values, leaves, upstream, retain_graph=True)


# Unified


def constant(tensor):
    table = torch.as_tensor(tensor, dtype=torch.float64).expand(SHAPE).tolist()
    return lambda row, column, similarity: (table[row][column], 0.0)


def elementwise(coefficients):
    function = reference.polynomial(coefficients)
    return lambda row, column, similarity: function(similarity)


def tensor(*shape, seed=3):
    return torch.rand(shape, dtype=torch.float64, generator=seeded(seed)).mul(0.5).requires_grad_()


SSP, RSP = ([0.5, -0.7, 0.2], [0.03, 0.9]), [0.1, 0.8, 0.5, -0.2]
VARIANTS = {
    "SSP": lambda: ({"weights": SSP}, {"weights": tuple(map(elementwise, SSP))}),
    "RSP": lambda: ({"relative": RSP}, {"relative": reference.polynomial(RSP)}),
    "0-D margin": lambda: ({"margin": (m := tensor())}, {"margin": constant(m)}),
    "margins of rows": lambda: ({"margin": (m := tensor(6))}, {"margin": constant(m[:, None])}),
    "margins of pairs": lambda: ({"margin": (m := tensor(*SHAPE))}, {"margin": constant(m)}),
    "everything": lambda: (
        {"margin": (m := tensor(6)), "weights": SSP, "relative": RSP},
        {
            "margin": constant(m[:, None]),
            "weights": tuple(map(elementwise, SSP)),
            "relative": reference.polynomial(RSP),
        },
    ),
}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_unified(name, symmetric):
    """From embeddings and from a matrix; the gradients of margins too."""
    options, loops = VARIANTS[name]()
    plain = {"margin": constant(0.2), "weights": (constant(1.0),) * 2, "relative": lambda x: (x, 1.0)}
    call = call_with(2)
    similarities = CosineSimilarity()(*leaves_of(call)).detach().requires_grad_()
    pairs, others = (set(map(tuple, mask.nonzero().tolist())) for mask in (POSITIVES, ~POSITIVES))
    expected, derivatives = reference.unified_variants(
        similarities.tolist(), pairs, others, symmetric=symmetric, scale=5.0, **(plain | loops)
    )
    gradient, margins = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE, dtype=torch.float64)
    for pair_derivatives in derivatives.values():
        for (kind, row, column), derivative in pair_derivatives.items():
            target = {"similarity": gradient, "margin": margins}.get(kind)
            if target is not None:
                target[row, column] += derivative / len(expected)
    value = sum(expected.values()) / len(expected)
    assert abs(value - make_loss("unified", scale=5.0, symmetric=symmetric)(**call).item()) > 1e-3

    loss = UnifiedLoss(**options, scale=5.0, symmetric=symmetric)
    found = loss.from_similarities(similarities, POSITIVES, ~POSITIVES)
    check(found, [similarities], value, [gradient])
    torch.testing.assert_close(loss(**call).item(), value)
    if isinstance(loss.margin, torch.Tensor):
        (margin_gradient,) = torch.autograd.grad(loss(**call), loss.margin)
        torch.testing.assert_close(
            margin_gradient,
            margins.sum_to_size(SHAPE if loss.margin.ndim == 2 else (6, 1)[: 2 * loss.margin.ndim]).reshape(
                loss.margin.shape
            ),
        )
    assert not loss.has_independent_pairs


def test_identities_of_unified():
    """Eq. 6 and 7: at a large scale it is the triplet loss; without a margin the contrastive loss by its scale."""
    similarities, masks = similarities_like(POSITIVES), (POSITIVES, ~POSITIVES)
    unified = values(UnifiedLoss(margin=0.2, scale=1e5), similarities, masks)
    triplet = values(TripletHNLoss(margin=0.2), similarities, masks)
    assert triplet.max() > 0.5
    torch.testing.assert_close(unified, triplet, atol=1e-4, rtol=0)
    vlc = values(VLCLoss(scale=7), similarities, masks)
    found = 7 * values(UnifiedLoss(margin=0, scale=7), similarities, masks)
    torch.testing.assert_close((found, *gradients(found, similarities)), (vlc, *gradients(vlc, similarities)))


class LearnedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, similarities):
        return 1 + self.slope * similarities


def test_learned_margins_and_weights_are_parameters_of_the_loss():
    margin, module = nn.Parameter(torch.tensor(0.3)), LearnedWeights()
    assert list(UnifiedLoss(margin=margin).parameters()) == [margin]
    loss = UnifiedLoss(weights=(torch.sigmoid, module))
    assert list(loss.parameters()) == [module.slope]
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(twin(**call_with(2)), loss(**call_with(2)))
        with torch.no_grad():
            next(twin.parameters()).fill_(0.0)
        assert abs(twin(**call_with(2)) - loss(**call_with(2))) > 1e-3


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (UnifiedLoss, {"margin": -0.1}),
        (UnifiedLoss, {"scale": "learned"}),
        (VLCLoss, {"scale": 0}),
        (TripletHNLoss, {"margin": -1}),
        (TripletHNLoss, {"warmup_steps": 1.5}),
        (TripletSHLoss, {"margin": -1}),
        *((GOALLoss, {name: -1}) for name in ("margin", "alpha", "beta", "eps")),
        (GOALLoss, {"tau": 0}),
        *((GOALLoss, {name: math.nan}) for name in ("offset", "lam")),
        (GOALLoss, {"triplet_weight": "cirr"}),
        (GOALLoss, {"pair_weight": "cir"}),
    ],
)
def test_options_out_of_range(make, option):
    with pytest.raises(ValueError, match=next(iter(option))):
        make(**option)


@pytest.mark.parametrize("shape", [(5,), (9,), (6, 8), (9, 6), (6, 1)])
def test_margins_of_another_batch(shape):
    with pytest.raises(ValueError, match="margin must have the shape"):
        UnifiedLoss(margin=torch.rand(shape))(**call_with(2))


def test_soft_margin():
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        confidence = torch.linspace(0, 1, 6, dtype=dtype).reshape(2, 3).requires_grad_()
        value = soft_margin(confidence, margin=0.4, base=5.0)
        (gradient,) = torch.autograd.grad(3 * value.sum(), confidence)
        expected = [[0.4 * (5**y - 1) / 4 for y in row] for row in confidence.tolist()]
        slopes = [[3 * 0.4 * 5**y * math.log(5) / 4 for y in row] for row in confidence.tolist()]
        torch.testing.assert_close(value, torch.tensor(expected, dtype=dtype), atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=dtype), atol=tolerance, rtol=tolerance)
    half = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float16)
    torch.testing.assert_close(soft_margin(half), torch.tensor([0.0, (math.sqrt(10) - 1) / 9 * 0.2, 0.2]))
    # (b^y - 1) / (b - 1) -> y as b -> 1, and log(b) / (b - 1) * y for small y
    small = torch.tensor([1e-12, 0.5], dtype=torch.float64)
    torch.testing.assert_close(soft_margin(small, margin=1.0, base=1 + 2**-40), small, atol=0, rtol=1e-11)
    with pytest.raises(ValueError, match="base must be a finite number > 1, got 1"):
        soft_margin(half, base=1)


def test_polynomial():
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    for coefficients in ([2], [0.5, -0.7], [0.25, -3, 0, 2, 1]):
        torch.testing.assert_close(Polynomial(coefficients)(x), sum(c * x**k for k, c in enumerate(coefficients)))
    with pytest.raises(ValueError, match="coefficients must be a finite number, got '1e-3'"):
        Polynomial(["1e-3"])


# GOAL


@pytest.mark.parametrize("pair_weight", ["sig_ms", "lin_ms"])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("steepness", [0.0, 2.0, 60.0])
def test_relative_weights_with_ties_and_steep_exponentials(pair_weight, warm, steepness):
    """Multiples of 1/4: equal positives, equal negatives, similarities at the threshold, which are not chosen."""
    options = {"triplet_weight": "nca", "pair_weight": pair_weight, "eps": 0.5, "alpha": steepness, "beta": steepness}
    formula = goal_reference.goal_all if warm else goal_reference.goal_hardest
    for seed in range(6):
        similarities = torch.randint(-4, 5, SHAPE, generator=seeded(seed)).double().div(4)
        if not warm:  # of equal hardest negatives, any may have the gradient
            similarities += torch.randperm(54, generator=seeded(seed)).reshape(SHAPE) * 1e-9
        leaf = similarities.float().requires_grad_() if seed % 2 and warm else similarities.requires_grad_()
        batch = leaf[POSITIVES].tolist()
        expected, derivatives = reference.pair_losses(
            partial(formula, batch_positives=batch, **(goal_reference.DEFAULTS | options)),
            leaf.tolist(),
            *(set(map(tuple, mask.nonzero().tolist())) for mask in (POSITIVES, ~POSITIVES)),
            symmetric=True,
        )
        loss = GOALLoss(**(goal_reference.DEFAULTS | options), warmup_steps=9 * warm)
        found = values(loss, leaf, (POSITIVES, ~POSITIVES))
        torch.testing.assert_close(found, found.new_tensor(list(expected.values())), atol=1e-5, rtol=1e-5)
        weights = dict(zip(expected, (0.5 + 0.25 * torch.arange(len(expected))).tolist(), strict=True))
        gradient = torch.tensor(reference.weighted_gradient(derivatives, weights, *SHAPE), dtype=leaf.dtype)
        (actual,) = torch.autograd.grad(found, leaf, found.new_tensor(list(weights.values())))
        torch.testing.assert_close(actual, gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pair_weight", PAIR_WEIGHTS)
@pytest.mark.parametrize("triplet_weight", TRIPLET_WEIGHTS)
def test_a_triplet_given_twice_counts_twice(triplet_weight, pair_weight):
    """But its pairs are no others of their own."""
    loss = GOALLoss(triplet_weight, pair_weight, reducer=SumReducer(), **goal_reference.DEFAULTS)
    call = call_with(2)
    triplets = miners.TripletMarginMiner(margin=0.3)(**call)
    once = loss(**call, indices_tuple=triplets)
    first = loss(**call, indices_tuple=tuple(torch.cat([index, index[:1]]) for index in triplets))
    loss.reducer = DoNothingReducer()
    extra = loss(**call, indices_tuple=triplets)["loss"]["losses"][0]
    torch.testing.assert_close(first, once + extra)
    torch.testing.assert_close(
        torch.autograd.grad(first, leaves_of(call)), torch.autograd.grad(once + extra, leaves_of(call))
    )


def test_objectives_that_are_known_losses():
    """Table 1: the triplet loss, NT-Xent of the hardest negative, circle loss; sig_ms with relative terms 1 is sig."""
    similarities, masks = similarities_like(POSITIVES), (POSITIVES, ~POSITIVES)

    def same(ours, theirs, leaves=(similarities,)):
        assert theirs.count_nonzero() >= 4
        torch.testing.assert_close((ours, *gradients(ours, leaves)), (theirs, *gradients(theirs, leaves)))

    same(
        values(GOALLoss("con", "con", margin=0.3), similarities, masks),
        values(TripletHNLoss(margin=0.3), similarities, masks),
    )
    hardest = similarities.detach().masked_fill(POSITIVES, -2).argmax(dim=1, keepdim=True)
    only_hardest = torch.zeros_like(POSITIVES).scatter(1, hardest, True)
    ours = values(GOALLoss("nca", "con", tau=7.0), similarities, masks, symmetric=False)
    same(ours, values(VLCLoss(scale=7), similarities, (POSITIVES, only_hardest), symmetric=False) / 7)
    leaf = embeddings_of(LABELS).detach().abs().requires_grad_()  # in one orthant: all similarities are positive
    triplets = torch.tensor([0, 1, 4]), torch.tensor([5, 4, 1]), torch.tensor([3, 2, 2])
    theirs = host.CircleLoss(m=0, gamma=8, reducer=SumReducer())(leaf, LABELS, triplets) / 8
    ours = GOALLoss("cir", "lin", tau=8, offset=1, reducer=SumReducer())(leaf, LABELS, triplets)
    check(ours, [leaf], theirs.item(), torch.autograd.grad(theirs, leaf))
    s_p, s_n = torch.rand(2, 50, dtype=torch.float64, generator=seeded(1)) * 2 - 1
    options = {"alpha": 3.0, "beta": 5.0, "lam": 0.4}
    relative = GOALLoss("nca", "sig_ms", **options).pair_weights(s_p, s_n, (1.0, 1.0))
    torch.testing.assert_close(relative, GOALLoss("nca", "sig", **options).pair_weights(s_p, s_n))


# Losses of the hosts


def test_losses_of_the_hosts():
    leaf = embeddings_of(LABELS)
    triplets = miners.BatchHardMiner()(leaf, LABELS)
    theirs = host.TripletMarginLoss(margin=0.2, distance=CosineSimilarity(), reducer=MeanReducer())
    options = {"margin": 0.2, "reducer": SumReducer()}
    every = host.TripletMarginLoss(distance=CosineSimilarity(), **options)
    clip_loss = pytest.importorskip("open_clip.loss").ClipLoss()
    labels, texts = torch.arange(6), embeddings_of(LABELS, seed=1)
    scale = torch.tensor(30.0, dtype=torch.float64, requires_grad=True)
    clip = 2 * clip_loss(*(nn.functional.normalize(side) for side in (leaf, texts)), scale)
    for ours, expected, leaves in (
        (TripletHNLoss(margin=0.2)(leaf, LABELS, triplets), theirs(leaf, LABELS, triplets), [leaf]),
        (TripletSHLoss(**options)(leaf, LABELS), every(leaf, LABELS), [leaf]),
        (VLCLoss()(leaf, labels, ref_emb=texts, ref_labels=labels, scale=scale), clip, [leaf, texts, scale]),
    ):
        check(ours, leaves, expected.item(), torch.autograd.grad(expected, leaves))


# The warm-up


@pytest.mark.parametrize("name", ["goal", "triplet_hn"])
def test_warm_up(name, tmp_path):
    """All negatives in the first steps of training; a trainer may set the step; copies and checkpoints go on."""
    loss, call = make_loss(name, warmup_steps=2), call_with(2)
    mined = make_loss(name)(**call)
    with torch.no_grad():
        assert loss(**call) == loss.eval()(**call) == mined
    assert loss.train().step == 0
    matrix = CosineSimilarity()(*leaves_of(call)), POSITIVES, ~POSITIVES
    twin = copy.deepcopy(loss)
    assert twin.from_similarities(*matrix) > mined + 0.1
    assert twin.step == 1
    warm = loss(**call)
    assert warm > mined + 0.1
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    fresh = make_loss(name, warmup_steps=2)
    fresh.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    older = make_loss(name, warmup_steps=2)
    older.load_state_dict({"training_calls": torch.tensor(1)})  # of version 0.2
    for twin in (fresh, older, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert [twin(**call).item() for _ in range(2)] == [warm.item(), mined.item()]
        assert twin.step == 3
        twin.step = 0
        assert twin(**call) == warm
    for what, given in calls():
        if "triplets" in what:
            torch.testing.assert_close(make_loss(name, warmup_steps=2)(**given), make_loss(name)(**given))
