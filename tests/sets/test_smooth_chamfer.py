"""The objective of DivE: a base loss on smooth-Chamfer similarity, MMD and diversity."""

import copy
import pickle

import pytest
import torch
from pytorch_metric_learning import distances, losses, reducers, regularizers

from tests.sets import references
from tests.sets.references import TOLERANCE, normal, units, value_and_gradients
from vl_plugins import create_loss
from vl_plugins.distances import MatchProbability, MILSimilarity, SmoothChamferSimilarity
from vl_plugins.losses import GOALLoss, SmoothChamferLoss, TripletHNLoss

LABELS = torch.tensor([0, 1, 2, 3, 1])
REF_LABELS = torch.tensor([2, 0, 3, 1, 1, 0, 2])
K, D = 3, 4
WEIGHTS = {"mmd_weight": 0.3, "diversity_weight": 0.2}


def make_call(sides=2, dtype=torch.float64):
    call = {"embeddings": normal(5, K, D, dtype=dtype), "labels": LABELS}
    if sides == 2:
        call |= {"ref_emb": normal(7, K, D, seed=1, dtype=dtype), "ref_labels": REF_LABELS}
    return call


def packed(call):
    return {name: value.flatten(1) if value.is_floating_point() else value for name, value in call.items()}


def leaves_of(call):
    return [call[name] for name in ("embeddings", "ref_emb", "slots", "ref_slots") if name in call]


def terms_by_loops(call):
    """The two terms of a call in float64."""
    terms, sides = {}, [call[name] for name in ("embeddings", "ref_emb") if name in call]
    if len(sides) == 2:
        terms["mmd_loss"] = WEIGHTS["mmd_weight"] * references.mmd(*map(units, sides))
    slots = [call.get(name, side) for name, side in zip(("slots", "ref_slots"), sides, strict=False)]
    terms["diversity_loss"] = WEIGHTS["diversity_weight"] * sum(map(references.mean_diversity, slots))
    return terms


def check(loss, base, call, arguments=None):
    """Compare value and gradients with those of the base loss plus the terms, both in float64."""
    names = [name for name in call if "labels" not in name]

    def by_loops(*leaves):
        twin = call | dict(zip(names, leaves, strict=True))
        plain = base(**{name: value for name, value in twin.items() if "slots" not in name})
        return plain + sum(terms_by_loops(twin).values())

    references.check(loss(**(arguments or call)), [call[name] for name in names], by_loops)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sides", [1, 2], ids=["one modality", "two"])
@pytest.mark.parametrize(("base", "options"), [("goal", {"tau": 5}), ("vlc", {"scale": 10, "symmetric": False})])
def test_base_by_name_and_terms(base, options, sides, dtype):
    call, wanted = make_call(sides, dtype), create_loss(base, distance=SmoothChamferSimilarity(), **options)
    check(create_loss("smooth_chamfer", base=base, **options, **WEIGHTS), wanted, call)
    check(create_loss("smooth_chamfer", base={"name": base, **options}, **WEIGHTS), wanted, call)
    check(SmoothChamferLoss(base, set_size=K, **options, **WEIGHTS), wanted, call, packed(call))


@pytest.mark.parametrize(
    "base",
    [
        losses.NTXentLoss(distance=SmoothChamferSimilarity(set_size=K), reducer=reducers.SumReducer()),
        GOALLoss(triplet_weight="cir", distance=SmoothChamferSimilarity(normalize_embeddings=False, set_size=K)),
        losses.TripletMarginLoss(distance=MatchProbability(learnable=False)),
    ],
    ids=lambda base: type(base).__name__,
)
def test_base_that_is_an_object(base):
    loss = SmoothChamferLoss(base, **WEIGHTS)
    assert (loss.base, loss.distance, loss.reducer) == (base, base.distance, base.reducer)
    check(loss, base, make_call())


@pytest.mark.parametrize("given", [["slots"], ["ref_slots"], ["slots", "ref_slots"]])
def test_diversity_of_slots(given):
    slots = {"slots": normal(5, 2, D, seed=2), "ref_slots": normal(7, K, D, seed=3)}
    call = make_call() | {name: slots[name] for name in given}
    check(SmoothChamferLoss(**WEIGHTS), TripletHNLoss(distance=SmoothChamferSimilarity()), call)


def test_the_terms_alone():
    """A term without a weight is not computed; a reducer may have each of them."""
    call, wanted = make_call(), terms_by_loops(make_call())
    images, texts = leaves_of(call)
    kept = SmoothChamferLoss(reducer=reducers.DoNothingReducer(), **WEIGHTS)(**call)
    reduced = {name: kept[name]["losses"] for name in kept if name != "loss"}
    for terms in (SmoothChamferLoss(**WEIGHTS).regularization(images, texts), reduced):
        torch.testing.assert_close(terms, wanted)
    assert list(SmoothChamferLoss().regularization(images, images)) == ["diversity_loss"]  # one modality
    one = make_call(1, torch.float16)
    same = SmoothChamferLoss()(**one, ref_emb=one["embeddings"], ref_labels=LABELS)
    assert torch.equal(same, SmoothChamferLoss()(**one))
    for option, name in (("mmd_weight", "diversity_loss"), ("diversity_weight", "mmd_loss")):
        assert list(SmoothChamferLoss(**{option: 0}).regularization(images, texts)) == [name]


def test_padding_and_packed_sets_of_two_sizes():
    call = make_call()
    call["embeddings"].data[1, 1:] = 0  # a set of one element has no diversity
    padded = {"embeddings": torch.zeros(5, 2, D), "ref_emb": torch.zeros(7, 3, D)}
    longer = call | {name: torch.cat([call[name], zeros], dim=1) for name, zeros in padded.items()}
    base = TripletHNLoss(distance=SmoothChamferSimilarity())
    check(SmoothChamferLoss(**WEIGHTS), base, call, longer)
    check(SmoothChamferLoss(set_size=K + 2, **WEIGHTS), base, call, packed(longer))


@pytest.mark.parametrize("base", [TripletHNLoss(), losses.NTXentLoss(distance=distances.CosineSimilarity())])
def test_plain_embeddings_are_sets_of_one(base):
    """Their diversity is 0, that of their slots is not."""
    call = {name: value[:, 0] if value.is_floating_point() else value for name, value in make_call().items()}
    wanted = base(**call) + WEIGHTS["mmd_weight"] * references.mmd(*map(units, leaves_of(call)))
    loss = SmoothChamferLoss("triplet_hn" if isinstance(base, TripletHNLoss) else base, **WEIGHTS)
    torch.testing.assert_close(loss(**call), wanted)
    assert loss(**call, slots=normal(5, 2, D)) > wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": TripletHNLoss(), "set_size": 2, "margin": 1}, "TripletHNLoss as base has its own options and"),
        ({"base": TripletHNLoss(), "distance": MILSimilarity()}, "TripletHNLoss as base has its own options and"),
        ({"distance": MILSimilarity(), "alpha": 8}, "MILSimilarity as distance has its own alpha"),
        ({"scale": 3}, "loss 'smooth_chamfer', base 'triplet_hn': it has no scale"),
        (
            {"margn": 3},
            r"loss 'smooth_chamfer', base 'triplet_hn': unknown option 'margn' \(did you mean 'margin'\?\); known: ",
        ),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        SmoothChamferLoss(**options)


def test_options_of_the_base():
    """GOAL has an alpha too: that of the similarity stands alone, GOAL's in a mapping."""
    loss = create_loss("smooth_chamfer", base={"name": "goal", "alpha": 3.0}, alpha=8)
    assert (loss.base.alpha, loss.distance.alpha) == (3.0, 8.0)
    loss = create_loss("smooth_chamfer", warmup_steps=3, symmetric=False, embedding_regularizer="LpRegularizer")
    assert (loss.base.steps, loss.symmetric) == (3, False)
    assert type(loss.embedding_regularizer) is regularizers.LpRegularizer
    assert loss.sub_loss_names() == ["loss", "embedding_reg_loss"]
    assert not hasattr(SmoothChamferLoss(losses.ContrastiveLoss()), "symmetric")


@pytest.mark.parametrize("base", ["triplet_hn", losses.NTXentLoss(distance=SmoothChamferSimilarity(set_size=K))])
def test_copies_and_compilation(base):
    call, loss = make_call(), SmoothChamferLoss(base, **WEIGHTS)
    wanted = value_and_gradients(loss(**call), leaves_of(call))
    torch.compiler.reset()
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), torch.compile(loss, backend="aot_eager")):
        torch.testing.assert_close(value_and_gradients(twin(**call), leaves_of(call)), wanted, atol=0, rtol=0)
    assert copy.deepcopy(loss).base is not loss.base
