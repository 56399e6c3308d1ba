import copy
import pickle

import pytest
import torch
from pytorch_metric_learning import distances, losses, reducers, regularizers

from tests.helpers.loops import TOLERANCE, check
from tests.helpers.seeds import seeded
from tests.reference import regularizers as reference
from vl_plugins import create_loss
from vl_plugins.distances import MatchProbability, MILSimilarity, SmoothChamferSimilarity
from vl_plugins.losses import GOALLoss, SmoothChamferLoss, TripletHNLoss
from vl_plugins.utils.errors import UserError

LABELS = torch.tensor([0, 1, 2, 3, 1])
REF_LABELS = torch.tensor([2, 0, 3, 1, 1, 0, 2])
K, D = 3, 4
MMD, DIVERSITY = 0.3, 0.2
WEIGHTS = {"mmd_weight": MMD, "diversity_weight": DIVERSITY}


def sets_of(labels, dtype=torch.float64, seed=0, elements=K):
    generator = seeded(seed)
    return torch.randn(len(labels), elements, D, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def call_with(sets=2, dtype=torch.float64):
    call = {"embeddings": sets_of(LABELS, dtype), "labels": LABELS}
    if sets == 2:
        call |= {"ref_emb": sets_of(REF_LABELS, dtype, seed=1), "ref_labels": REF_LABELS}
    return call


def packed(call):
    return {name: value.flatten(1) if value.is_floating_point() else value for name, value in call.items()}


def leaves_of(call):
    return [call[name] for name in ("embeddings", "ref_emb", "slots", "ref_slots") if name in call]


def regularization(call):
    """The two terms by loops, and their gradients by the leaves."""
    gradients = {id(leaf): torch.zeros_like(leaf, dtype=torch.float64) for leaf in leaves_of(call)}
    terms = {}

    def add(sets, factor, gradient):
        gradients[id(sets)] += factor * torch.tensor(gradient, dtype=torch.float64).view_as(sets)

    sides = [call[name] for name in ("embeddings", "ref_emb") if name in call]
    if len(sides) == 2:
        clouds = [sets.flatten(0, 1).tolist() for sets in sides]
        value, both = reference.mmd_of_directions(*clouds, gamma=0.5, squared=False)
        terms["mmd_loss"] = MMD * value
        for sets, gradient in zip(sides, both, strict=True):
            add(sets, MMD, gradient)
    terms["diversity_loss"] = 0.0
    for sets, slots in zip(sides, ("slots", "ref_slots"), strict=False):
        value, gradient = reference.mean_diversity(call.get(slots, sets).tolist(), 2.0)
        terms["diversity_loss"] += DIVERSITY * value
        add(call.get(slots, sets), DIVERSITY, gradient)
    assert min(terms.values()) > 1e-3, "the case shows nothing"
    return terms, list(gradients.values())


def expected(base, call):
    """Value and gradients of a loss of pairs plus the terms."""
    value = base(**{name: value for name, value in call.items() if "slots" not in name})
    gradients = torch.autograd.grad(value, leaves_of(call), allow_unused=True)
    terms, term_gradients = regularization(call)
    both = zip(gradients, term_gradients, strict=True)
    return value.item() + sum(terms.values()), [term if one is None else one.double() + term for one, term in both]


def smooth_chamfer(**options):
    return SmoothChamferSimilarity(set_size=K, **options)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sets", [1, 2], ids=["one modality", "two"])
@pytest.mark.parametrize(("base", "options"), [("goal", {"tau": 5}), ("vlc", {"scale": 10, "symmetric": False})])
def test_base_by_name_and_terms(base, options, sets, dtype):
    call = call_with(sets, dtype)
    wanted = expected(create_loss(base, distance=smooth_chamfer(), **options), call)
    check(create_loss("smooth_chamfer", base=base, **options, **WEIGHTS)(**call), leaves_of(call), *wanted)
    loss = SmoothChamferLoss(base, set_size=K, **options, **WEIGHTS)
    check(loss(**packed(call)), leaves_of(call), *wanted)


@pytest.mark.parametrize(
    "base",
    [
        losses.NTXentLoss(distance=smooth_chamfer(), reducer=reducers.SumReducer()),
        GOALLoss(triplet_weight="cir", pair_weight="sig_ms", distance=smooth_chamfer(normalize_embeddings=False)),
        losses.TripletMarginLoss(distance=MatchProbability(learnable=False)),
    ],
)
def test_base_that_is_an_object(base):
    call, loss = call_with(), SmoothChamferLoss(base, **WEIGHTS)
    assert (loss.base, loss.distance, loss.reducer) == (base, base.distance, base.reducer)
    check(loss(**call), leaves_of(call), *expected(base, call))


def test_the_objective_of_the_paper_by_default():
    loss = SmoothChamferLoss()
    assert (type(loss.base), type(loss.distance)) == (TripletHNLoss, SmoothChamferSimilarity)
    assert (loss.base.margin, loss.distance.alpha, loss.distance.set_size) == (0.2, 16.0, 1)
    assert (loss.mmd_weight, loss.diversity_weight) == (0.01, 0.01)
    assert loss._record_these == ["mmd_weight", "diversity_weight"]
    assert SmoothChamferLoss(alpha=4).distance.alpha == 4


@pytest.mark.parametrize("given", [["slots"], ["ref_slots"], ["slots", "ref_slots"]])
def test_slots_are_what_diversity_is_computed_of(given):
    slots = {"slots": sets_of(LABELS, seed=2, elements=2), "ref_slots": sets_of(REF_LABELS, seed=3)}
    call = call_with() | {name: slots[name] for name in given}
    wanted = expected(TripletHNLoss(distance=smooth_chamfer()), call)
    check(SmoothChamferLoss(**WEIGHTS)(**call), leaves_of(call), *wanted)


def test_wrong_slots():
    with pytest.raises(ValueError, match=r"ref_slots must have the shape \(items, .*, dimension\), got \(5, 12\)"):
        SmoothChamferLoss()(**call_with(), ref_slots=torch.ones(5, 12))


def test_the_terms_alone(monkeypatch):
    images, texts = leaves_of(call_with())
    wanted, _ = regularization(call_with())
    terms = SmoothChamferLoss(**WEIGHTS).regularization(images, texts)
    assert {name: term.item() for name, term in terms.items()} == pytest.approx(wanted)
    assert list(SmoothChamferLoss().regularization(images, images)) == ["diversity_loss"]
    for option, name in (("mmd_weight", "mmd"), ("diversity_weight", "diversity")):
        loss = SmoothChamferLoss(**{option: 0})
        monkeypatch.setattr(getattr(loss, name), "compute_loss", None)  # not called
        assert list(loss.regularization(images, texts)) == [term for term in wanted if not term.startswith(name)]


def test_the_embeddings_as_references_are_one_modality():
    call, loss = call_with(1, torch.float16), SmoothChamferLoss(mmd_weight=1e6)
    assert torch.equal(loss(**call, ref_emb=call["embeddings"], ref_labels=LABELS), loss(**call))


def test_padding_and_packed_sets_of_two_sizes():
    call = call_with()
    value, gradients = expected(TripletHNLoss(distance=smooth_chamfer()), call)
    for side, name, count in ((0, "embeddings", 2), (1, "ref_emb", 3)):
        padding = torch.zeros(len(call[name]), count, D, dtype=torch.float64)
        call[name] = torch.cat([call[name].detach(), padding], dim=1).requires_grad_()
        gradients[side] = torch.cat([gradients[side], padding], dim=1)
    check(SmoothChamferLoss(**WEIGHTS)(**call), leaves_of(call), value, gradients)
    check(SmoothChamferLoss(set_size=K + 2, **WEIGHTS)(**packed(call)), leaves_of(call), value, gradients)


@pytest.mark.parametrize("base", [TripletHNLoss(), losses.NTXentLoss(distance=distances.CosineSimilarity())])
def test_plain_embeddings_are_sets_of_one(base):
    call = {name: value[:, 0] if value.is_floating_point() else value for name, value in call_with().items()}
    term, _ = reference.mmd_of_directions(*(leaf.tolist() for leaf in leaves_of(call)), gamma=0.5, squared=False)
    loss = SmoothChamferLoss("triplet_hn" if isinstance(base, TripletHNLoss) else base, **WEIGHTS)
    assert loss(**call).item() == pytest.approx(base(**call).item() + MMD * term)


def test_another_distance():
    call, base = call_with(), create_loss("vlc", distance="MatchProbability")
    loss = create_loss("smooth_chamfer", base="vlc", distance="MatchProbability", **WEIGHTS)
    assert len([*loss.parameters()]) == 2
    check(loss(**call), leaves_of(call), *expected(base, call))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"base": TripletHNLoss(), "set_size": 2, "distance": MILSimilarity(), "margin": 1},
            "set_size, margin, distance cannot be given with a TripletHNLoss as base, which has its own options",
        ),
        ({"distance": MILSimilarity(), "alpha": 2}, "alpha cannot be given with a MILSimilarity as distance, which"),
        ({"base": "smooth_chamfer"}, "base must be another loss .*, got 'smooth_chamfer'"),
        ({"base": SmoothChamferLoss()}, r"base must be another loss of .* or the name of one, got SmoothChamferLoss\("),
        ({"scale": 3}, "unknown option 'scale' of loss 'triplet_hn'; options: warmup_steps=0, "),
        ({"alpha": 0}, "alpha must be a finite number > 0, got 0"),
        ({"mmd_weight": -1}, "mmd_weight must be a finite number >= 0, got -1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        SmoothChamferLoss(**options)


def test_an_unknown_option_lists_those_of_the_base_too():
    message = (
        r"unknown option 'scael' of loss 'smooth_chamfer' \(did you mean 'scale'\?\); .* alpha=16.0, .* scale=50.0,"
    )
    with pytest.raises(UserError, match=message):
        create_loss("smooth_chamfer", base="vlc", scael=3)


def test_options_of_the_base_by_name():
    loss = create_loss("smooth_chamfer", warmup_steps=3, symmetric=False, embedding_regularizer="LpRegularizer")
    assert (loss.base.warmup_steps, loss.symmetric) == (3, False)
    assert create_loss("smooth_chamfer", collect_stats=True).collect_stats
    assert type(loss.embedding_regularizer) is regularizers.LpRegularizer
    assert loss.sub_loss_names() == ["loss", "embedding_reg_loss"]
    assert not hasattr(SmoothChamferLoss(losses.ContrastiveLoss()), "symmetric")


def test_scale_and_direction_of_a_call():
    call, loss = call_with(), SmoothChamferLoss("unified", **WEIGHTS)
    wanted = SmoothChamferLoss("unified", scale=5, symmetric=False, **WEIGHTS)(**call)
    torch.testing.assert_close(loss(**call, scale=5, symmetric=False), wanted)


@pytest.mark.parametrize("base", ["triplet_hn", losses.NTXentLoss(distance=smooth_chamfer())])
def test_copies(base):
    call, loss = call_with(), SmoothChamferLoss(base, **WEIGHTS)
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(twin(**call), loss(**call))
        assert twin.base is not loss.base


def test_a_reducer_for_each_term():
    call = call_with()
    loss_dict = SmoothChamferLoss(reducer=reducers.DoNothingReducer(), **WEIGHTS)(**call)
    wanted, _ = regularization(call)
    assert list(loss_dict) == ["loss", *wanted]
    assert [loss_dict[name]["losses"].item() for name in wanted] == pytest.approx([*wanted.values()])
    reduced = reducers.MultipleReducers({})(loss_dict, call["embeddings"], LABELS)
    torch.testing.assert_close(reduced, SmoothChamferLoss(**WEIGHTS)(**call))


@pytest.mark.parametrize("base", ["unified", losses.NTXentLoss(distance=distances.CosineSimilarity())])
def test_autocast_computes_in_single_precision(base):
    call = packed(call_with(2, torch.bfloat16))
    single = {name: value.detach().float() if value.is_floating_point() else value for name, value in call.items()}
    loss, leaves = SmoothChamferLoss(base, **WEIGHTS), [leaf.requires_grad_() for leaf in leaves_of(single)]
    wanted = loss(**single)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = loss(**call)
    assert torch.equal(actual, wanted)
    gradients = torch.autograd.grad(wanted, leaves)
    for half, gradient in zip(torch.autograd.grad(actual, leaves_of(call)), gradients, strict=True):
        assert torch.equal(half, gradient.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["embeddings", "ref_emb", "slots", "ref_slots"])
def test_not_a_number_is_never_hidden(name):
    call = call_with() | {"slots": sets_of(LABELS, seed=2), "ref_slots": sets_of(REF_LABELS, seed=3)}
    call[name].data[4, 2, 3] = float("nan")
    value = SmoothChamferLoss(**WEIGHTS)(**call)
    assert value.isnan()
    assert torch.autograd.grad(value, call[name])[0].isnan().any()


@pytest.mark.parametrize("count", [0, 1, 4])
def test_nothing_to_compare(count):
    images, texts, labels = sets_of(range(count)), sets_of(range(count), seed=1), torch.arange(count)
    loss = SmoothChamferLoss(diversity_weight=0)
    assert loss(images, labels) == 0
    value = loss(images, labels, ref_emb=texts, ref_labels=labels + 10)
    assert value == sum(loss.regularization(images, texts).values())
    assert all(gradient.any() == (count > 0) for gradient in torch.autograd.grad(value, (images, texts)))
