import copy
import pickle

import pytest
import torch
from pytorch_metric_learning import distances, losses, reducers, regularizers

from tests.helpers.loops import TOLERANCE, check
from tests.reference import regularizers as reference
from vl_plugins import create_loss
from vl_plugins.distances import MatchProbability, MILSimilarity, SmoothChamferSimilarity
from vl_plugins.losses import GOALLoss, SmoothChamferLoss, TripletHNLoss, UnifiedLoss
from vl_plugins.losses.wrappers import CrossBatchMemory, SelfSupervisedLoss
from vl_plugins.miners import HardestNegativeMiner
from vl_plugins.registry import create_component
from vl_plugins.utils.errors import UserError

LABELS = torch.tensor([0, 1, 2, 3, 1])
REF_LABELS = torch.tensor([2, 0, 3, 1, 1, 0, 2])
K, D = 3, 4
MMD, DIVERSITY = 0.3, 0.2
WEIGHTS = {"mmd_weight": MMD, "diversity_weight": DIVERSITY}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
BASES = {
    "triplet_hn": {"margin": 0.3},
    "unified": {"scale": 10, "margin": 0.1},
    "goal": {"triplet_weight": "cir", "pair_weight": "sig"},
    "vlc": {"scale": 10, "symmetric": False},
}


def sets_of(labels, dtype=torch.float64, seed=0, elements=K):
    generator = torch.Generator().manual_seed(seed)
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


def tensor(nested, like):
    return torch.tensor(nested, dtype=torch.float64).view_as(like)


def regularization(call):
    """The two terms by loops, and their gradients by the leaves."""
    leaves = leaves_of(call)
    gradients = {id(leaf): torch.zeros(leaf.shape, dtype=torch.float64) for leaf in leaves}
    images, texts = call["embeddings"], call.get("ref_emb")
    terms = {}
    if texts is not None:
        clouds = [sets.flatten(0, 1).tolist() for sets in (images, texts)]
        value, of_clouds = reference.mmd_of_directions(*clouds, gamma=0.5, squared=False)
        terms["mmd_loss"] = MMD * value
        for sets, gradient in zip((images, texts), of_clouds, strict=True):
            gradients[id(sets)] += MMD * tensor(gradient, sets)
    terms["diversity_loss"] = 0.0
    for sets, slots in ((images, call.get("slots")), (texts, call.get("ref_slots"))):
        sets = sets if slots is None else slots
        if sets is not None:
            value, gradient = reference.mean_diversity(sets.tolist(), 2.0)
            terms["diversity_loss"] += DIVERSITY * value
            gradients[id(sets)] += DIVERSITY * tensor(gradient, sets)
    return terms, [gradients[id(leaf)] for leaf in leaves]


def expected(base, call, least=1e-3):
    """Value and gradients of a loss of pairs plus the terms."""
    leaves = leaves_of(call)
    value = base(**{name: value for name, value in call.items() if "slots" not in name})
    of_base = torch.autograd.grad(value, leaves, allow_unused=True)
    terms, of_terms = regularization(call)
    assert min(terms.values()) > least, "the case shows nothing"
    gradients = [
        of_leaf if one is None else one.double() + of_leaf for one, of_leaf in zip(of_base, of_terms, strict=True)
    ]
    return value.item() + sum(terms.values()), gradients


def smooth_chamfer(**options):
    return SmoothChamferSimilarity(16.0, K, **options)


@DTYPES
@pytest.mark.parametrize("sets", [1, 2], ids=["one modality", "two"])
@pytest.mark.parametrize("base", BASES)
def test_loss_of_pairs_and_terms(base, sets, dtype):
    call = call_with(sets, dtype)
    options = BASES[base]
    wanted = expected(create_loss(base, distance=smooth_chamfer(), **options), call)
    loss = create_loss("smooth_chamfer", base=base, **options, **WEIGHTS)
    assert type(loss) is SmoothChamferLoss
    check(loss(**call), leaves_of(call), *wanted)
    loss = SmoothChamferLoss(base, set_size=K, **options, **WEIGHTS)
    check(loss(**packed(call)), leaves_of(call), *wanted)


def test_the_objective_of_the_paper_by_default():
    call = call_with()
    loss = SmoothChamferLoss()
    assert type(loss.base) is TripletHNLoss
    assert type(loss.distance) is SmoothChamferSimilarity
    assert (loss.base.margin, loss.distance.alpha, loss.distance.set_size) == (0.2, 16.0, 1)
    assert (loss.mmd_weight, loss.diversity_weight) == (0.01, 0.01)
    terms, _ = regularization(call)
    base = TripletHNLoss(margin=0.2, distance=SmoothChamferSimilarity(16.0))(**call).item()
    wanted = base + 0.01 * terms["mmd_loss"] / MMD + 0.01 * terms["diversity_loss"] / DIVERSITY
    torch.testing.assert_close(loss(**call).item(), wanted)


def test_options_of_the_similarity():
    call = call_with()
    loss = SmoothChamferLoss(alpha=4, set_size=K, mmd_weight=0, diversity_weight=0)
    wanted = TripletHNLoss(distance=SmoothChamferSimilarity(4.0))(**call)
    assert wanted != TripletHNLoss(distance=SmoothChamferSimilarity())(**call)
    torch.testing.assert_close(loss(**packed(call)), wanted)


@DTYPES
@pytest.mark.parametrize("given", ["slots", "ref_slots", "both"])
def test_slots_are_what_diversity_is_computed_of(given, dtype):
    call = call_with(2, dtype)
    if given != "ref_slots":
        call["slots"] = sets_of(LABELS, dtype, seed=2, elements=2)
    if given != "slots":
        call["ref_slots"] = sets_of(REF_LABELS, dtype, seed=3)
    wanted = expected(TripletHNLoss(distance=smooth_chamfer()), call)
    check(SmoothChamferLoss(**WEIGHTS)(**call), leaves_of(call), *wanted)
    one = {name: value for name, value in call.items() if not name.startswith("ref")}
    check(SmoothChamferLoss(**WEIGHTS)(**one), leaves_of(one), *expected(TripletHNLoss(distance=smooth_chamfer()), one))


def test_the_terms_alone():
    call = call_with()
    wanted, _ = regularization(call)
    terms = SmoothChamferLoss(**WEIGHTS).regularization(call["embeddings"], call["ref_emb"])
    assert list(terms) == ["mmd_loss", "diversity_loss"]
    for name, value in wanted.items():
        torch.testing.assert_close(terms[name].item(), value)
    assert list(SmoothChamferLoss(mmd_weight=0).regularization(call["embeddings"], call["ref_emb"])) == [
        "diversity_loss"
    ]
    assert list(SmoothChamferLoss(diversity_weight=0).regularization(call["embeddings"], call["ref_emb"])) == [
        "mmd_loss"
    ]
    assert SmoothChamferLoss(diversity_weight=0).regularization(call["embeddings"]) == {}
    assert list(SmoothChamferLoss().regularization(call["embeddings"], call["embeddings"])) == ["diversity_loss"]


def test_a_term_of_weight_zero_is_not_computed(monkeypatch):
    for option, name in (("mmd_weight", "mmd"), ("diversity_weight", "diversity")):
        loss = SmoothChamferLoss(**{option: 0})
        monkeypatch.setattr(getattr(loss, name), "compute_loss", None)
        assert loss(**call_with()) > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_the_embeddings_as_references_are_one_modality(dtype):
    call = call_with(1, dtype)
    loss = SmoothChamferLoss(diversity_weight=DIVERSITY, mmd_weight=1e6)
    value = loss(**call)
    assert torch.equal(loss(**call, ref_emb=call["embeddings"], ref_labels=LABELS), value)
    base = TripletHNLoss(distance=smooth_chamfer())
    torch.testing.assert_close(value.item(), expected(base, call)[0], atol=1e-5, rtol=0)


@DTYPES
def test_padding(dtype):
    call = call_with(2, dtype)
    wanted, gradients = expected(TripletHNLoss(distance=smooth_chamfer()), call)
    padded = {
        name: torch.cat([value, torch.zeros_like(value)[:, :2]], dim=1).detach().requires_grad_()
        if value.is_floating_point()
        else value
        for name, value in call.items()
    }
    gradients = [torch.cat([gradient, torch.zeros_like(gradient)[:, :2]], dim=1) for gradient in gradients]
    check(SmoothChamferLoss(**WEIGHTS)(**padded), leaves_of(padded), wanted, gradients)
    loss = SmoothChamferLoss(set_size=K + 2, **WEIGHTS)
    check(loss(**packed(padded)), leaves_of(padded), wanted, gradients)


def test_packed_sets_of_two_sizes():
    call = call_with()
    call["ref_emb"] = sets_of(REF_LABELS, seed=1, elements=6)
    wanted = expected(TripletHNLoss(distance=smooth_chamfer()), call)
    check(SmoothChamferLoss(set_size=K, **WEIGHTS)(**packed(call)), leaves_of(call), *wanted)
    call["embeddings"] = call["embeddings"].detach().requires_grad_()
    half_packed = call | {"ref_emb": call["ref_emb"].flatten(1)}
    check(SmoothChamferLoss(**WEIGHTS)(**half_packed), leaves_of(call), *wanted)


@DTYPES
def test_plain_embeddings_are_sets_of_one(dtype):
    call = {name: value[:, 0] if value.is_floating_point() else value for name, value in call_with(2, dtype).items()}
    leaves = leaves_of(call)
    clouds = [leaf.tolist() for leaf in leaves]
    term, of_term = reference.mmd_of_directions(*clouds, gamma=0.5, squared=False)
    plain = TripletHNLoss()(**call)
    gradients = [
        of_plain.double() + MMD * torch.tensor(of_leaf, dtype=torch.float64)
        for of_plain, of_leaf in zip(torch.autograd.grad(plain, leaves, retain_graph=True), of_term, strict=True)
    ]
    check(SmoothChamferLoss(**WEIGHTS)(**call), leaves, plain.item() + MMD * term, gradients)


@pytest.mark.parametrize(
    "make",
    [
        lambda: losses.ContrastiveLoss(pos_margin=1, neg_margin=0, distance=smooth_chamfer()),
        lambda: losses.NTXentLoss(distance=smooth_chamfer(), reducer=reducers.SumReducer()),
        lambda: UnifiedLoss(scale=7, distance=MILSimilarity(K)),
        lambda: GOALLoss("cir", "sig_ms", alpha=3, distance=smooth_chamfer(normalize_embeddings=False)),
        lambda: losses.TripletMarginLoss(distance=MatchProbability(learnable=False)),
    ],
    ids=["contrastive", "NT-Xent", "unified", "GOAL", "triplet margin"],
)
def test_a_loss_object_as_base(make):
    call = call_with()
    base = make()
    loss = SmoothChamferLoss(base, **WEIGHTS)
    assert loss.base is base
    assert loss.distance is base.distance
    assert loss.reducer is base.reducer
    check(loss(**call), leaves_of(call), *expected(make(), call))
    if base.distance.set_size == K:
        check(loss(**packed(call)), leaves_of(call), *expected(make(), call))


def test_a_loss_object_without_sets():
    call = {name: value[:, 0] if value.is_floating_point() else value for name, value in call_with().items()}
    base = losses.NTXentLoss(distance=distances.CosineSimilarity())
    value = SmoothChamferLoss(base, **WEIGHTS)(**call)
    clouds = [leaf.tolist() for leaf in leaves_of(call)]
    term, _ = reference.mmd_of_directions(*clouds, gamma=0.5, squared=False)
    torch.testing.assert_close(value.item(), base(**call).item() + MMD * term)


@pytest.mark.parametrize("distance", ["mil", "MatchProbability", MILSimilarity(), distances.LpDistance()])
def test_another_distance(distance):
    call = call_with()
    if isinstance(distance, distances.LpDistance):
        call = packed(call)
    loss = create_loss("smooth_chamfer", base="vlc", scale=5, distance=distance, mmd_weight=0, diversity_weight=0)
    made = create_component("distance", distance) if isinstance(distance, str) else distance
    assert type(loss.distance) is type(made)
    torch.testing.assert_close(loss(**call), create_loss("vlc", scale=5, distance=made)(**call))
    assert {id(parameter) for parameter in loss.parameters()} == {
        id(parameter) for parameter in loss.distance.parameters()
    }


OTHERS = r"set_size, margin, distance cannot be given beside a TripletHNLoss as base, which has its own: give the name"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": TripletHNLoss(), "set_size": 2, "distance": MILSimilarity(), "margin": 1}, OTHERS),
        ({"base": TripletHNLoss(), "alpha": 2}, "alpha cannot be given beside a TripletHNLoss as base"),
        ({"base": "smooth_chamfer"}, "base must be another loss, got 'smooth_chamfer'"),
        ({"base": SmoothChamferLoss()}, "base must be another loss of .* or a name, got SmoothChamferLoss"),
        ({"base": torch.nn.CrossEntropyLoss()}, "base must be another loss of .* or a name, got CrossEntropyLoss"),
        ({"base": "unifed"}, r"unknown loss 'unifed' \(did you mean 'unified'\?\)"),
        ({"scale": 3}, "unknown option 'scale' of loss 'triplet_hn'.*; options: margin=0.2, "),
        ({"distance": MILSimilarity(), "alpha": 2}, "alpha cannot be given beside a MILSimilarity as distance: of Smo"),
        ({"distance": MILSimilarity(), "set_size": 2}, "set_size cannot be given beside a MILSimilarity as distance"),
        ({"alpha": 0}, "alpha must be a finite number > 0, got 0"),
        ({"set_size": 0}, "set_size must be an integer >= 1, got 0"),
        ({"margin": -1}, "margin must be a finite number >= 0, got -1"),
        ({"mmd_weight": -1}, "mmd_weight must be a finite number >= 0, got -1"),
        ({"diversity_weight": float("inf")}, "diversity_weight must be a finite number >= 0, got inf"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        SmoothChamferLoss(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"base": "vlc", "scael": 3},
            "unknown option 'scael' of loss 'smooth_chamfer' (did you mean 'scale'?); options: base='triplet_hn', "
            "alpha=16.0, set_size=1, mmd_weight=0.01, diversity_weight=0.01, distance=None, backend=None, scale=50.0, ",
        ),
        ({"mmd_wieght": 3}, "unknown option 'mmd_wieght' of loss 'smooth_chamfer' (did you mean 'mmd_weight'?); opti"),
        ({"scale": 3}, "unknown option 'scale' of loss 'smooth_chamfer'; options: base='triplet_hn', "),
        ({"base": "vcl"}, "unknown loss 'vcl' (did you mean 'vlc'?); known: goal, "),
        ({"base": "smooth_chamfer", "scale": 3}, "unknown option 'scale' of loss 'smooth_chamfer'; options: "),
        ({"distance": "ml"}, "unknown distance 'ml' (did you mean 'mil'?)"),
        ({"reducer": "SumRedcer"}, "unknown reducer 'SumRedcer' (did you mean 'SumReducer'?)"),
    ],
)
def test_wrong_names_of_options(options, message):
    with pytest.raises(UserError) as raised:
        create_loss("smooth_chamfer", **options)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("name", ["slots", "ref_slots"])
def test_wrong_slots(name):
    with pytest.raises(ValueError, match=rf"{name} must have the shape \(items, elements, dimension\), got \(5, 12\)"):
        SmoothChamferLoss()(**call_with(), **{name: torch.ones(5, 12)})


def test_options_of_the_base_by_name():
    loss = create_loss(
        "smooth_chamfer", reducer="SumReducer", warmup_steps=3, symmetric=False, embedding_regularizer="LpRegularizer"
    )
    assert type(loss.reducer.reducers["loss"]) is reducers.SumReducer  # one for each term
    assert (loss.base.warmup_steps, loss.base.symmetric) == (3, False)
    assert type(loss.base.embedding_regularizer) is regularizers.LpRegularizer


def test_symmetric_is_that_of_the_base():
    loss = SmoothChamferLoss(symmetric=False)
    assert loss.symmetric is False
    loss.symmetric = True
    assert loss.base.symmetric is True
    one_direction = SmoothChamferLoss(losses.ContrastiveLoss(distance=smooth_chamfer()))
    assert not hasattr(one_direction, "symmetric")
    with pytest.raises(AttributeError, match="ContrastiveLoss has no attribute 'symmetric'"):
        one_direction.symmetric = True


def test_warm_up_is_that_of_the_base(tmp_path):
    call = call_with()
    loss = SmoothChamferLoss(warmup_steps=2, **WEIGHTS)
    terms = sum(regularization(call)[0].values())
    all_negatives = create_loss("triplet_sh", distance=smooth_chamfer())(**call).item()
    hardest = TripletHNLoss(distance=smooth_chamfer())(**call).item()
    values = [loss(**call).item() for _ in range(2)]
    assert values == pytest.approx([all_negatives + terms] * 2)
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    again = SmoothChamferLoss(warmup_steps=2, **WEIGHTS)
    again.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    assert again.base.training_calls == 2
    assert [loss(**call).item(), again(**call).item()] == pytest.approx([hardest + terms] * 2)
    assert hardest < all_negatives - 0.1


@pytest.mark.parametrize("base", ["triplet_hn", "object"])
def test_copies(base):
    if base == "object":
        base = losses.NTXentLoss(distance=smooth_chamfer())
    loss = SmoothChamferLoss(base, **WEIGHTS)
    call = call_with()
    value = loss(**call)
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(twin(**call), value)
        assert repr(twin) == repr(loss)
        assert twin.base is not loss.base


def test_a_reducer_for_each_term():
    call = call_with()
    loss = SmoothChamferLoss(reducer=reducers.DoNothingReducer(), **WEIGHTS)
    loss_dict = loss(**call)
    assert list(loss_dict) == ["loss", "mmd_loss", "diversity_loss"]
    wanted, _ = regularization(call)
    for name, value in wanted.items():
        assert loss_dict[name]["reduction_type"] == "already_reduced"
        torch.testing.assert_close(loss_dict[name]["losses"].item(), value)
    reduced = reducers.MultipleReducers({})(loss_dict, call["embeddings"], LABELS)
    torch.testing.assert_close(reduced, SmoothChamferLoss(**WEIGHTS)(**call))


def test_self_supervised():
    images, texts = sets_of(LABELS), sets_of(LABELS, seed=1)
    labels = torch.arange(len(LABELS))
    loss = SmoothChamferLoss(set_size=K, **WEIGHTS)
    call = {"embeddings": images, "labels": labels, "ref_emb": texts, "ref_labels": labels}
    wanted = expected(TripletHNLoss(distance=smooth_chamfer()), call)
    two_modalities = SelfSupervisedLoss(loss, symmetric=False)
    check(two_modalities(images.flatten(1), texts.flatten(1)), [images, texts], *wanted)
    check(two_modalities(images, texts), [images, texts], *wanted)
    together = torch.cat([images, texts]).detach().requires_grad_()
    value, (gradient,) = expected(
        TripletHNLoss(distance=smooth_chamfer()), {"embeddings": together, "labels": labels.repeat(2)}
    )
    one = SelfSupervisedLoss(loss, symmetric=True)
    check(one(images.flatten(1), texts.flatten(1)), [images, texts], value, gradient.split(len(labels)))


def test_memory():
    loss = SmoothChamferLoss(set_size=K, **WEIGHTS)
    memory = CrossBatchMemory(loss, embedding_size=K * D, memory_size=8)
    queue, queue_labels = [], []
    for step in range(3):
        images = sets_of(LABELS, seed=step)
        labels = (LABELS + step) % 4
        actual = memory(images.flatten(1), labels)
        queue, queue_labels = [*queue, images.detach()], [*queue_labels, labels]
        kept, kept_labels = torch.cat(queue)[-8:], torch.cat(queue_labels)[-8:]
        same = labels[:, None] == kept_labels
        itself = torch.zeros_like(same)
        itself[:, len(kept) - len(LABELS) :] = torch.eye(len(LABELS), dtype=torch.bool)
        pairs = (*torch.where(same & ~itself), *torch.where(~same))
        call = {"embeddings": images, "labels": labels, "ref_emb": kept.requires_grad_(), "ref_labels": kept_labels}
        # At first the queue is the batch: no discrepancy.
        least = 1e-3 if step > 0 else -1
        value, gradients = expected(TripletHNLoss(distance=smooth_chamfer()), call | {"indices_tuple": pairs}, least)
        check(actual, [images], value, gradients[:1])


def test_beside_another_loss_with_miners():
    call = packed(call_with(1))
    miner = HardestNegativeMiner(distance=smooth_chamfer())
    loss = SmoothChamferLoss(set_size=K, **WEIGHTS)
    other = losses.ContrastiveLoss()
    both = losses.MultipleLosses([loss, other], miners=[miner, None], weights=[0.5, 2.0])
    mined = miner(call["embeddings"], LABELS)
    wanted = 0.5 * TripletHNLoss(distance=smooth_chamfer())(**call, indices_tuple=mined) + 2 * other(**call)
    terms, _ = regularization({"embeddings": call["embeddings"].unflatten(1, (K, D))})
    actual = both(call["embeddings"], LABELS)
    torch.testing.assert_close(actual.item(), wanted.item() + 0.5 * sum(terms.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("base", ["triplet_hn", "unified"])
def test_autocast_computes_in_single_precision(base, dtype):
    call = call_with(2, dtype) | {"slots": sets_of(LABELS, dtype, seed=2)}
    single = {name: value.detach().float() if value.is_floating_point() else value for name, value in call.items()}
    for leaf in leaves_of(single):
        leaf.requires_grad_()
    loss = SmoothChamferLoss(base, **WEIGHTS)
    wanted = loss(**single)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = loss(**call)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, wanted)
    of_single = torch.autograd.grad(wanted, leaves_of(single))
    for half, gradient in zip(torch.autograd.grad(actual, leaves_of(call)), of_single, strict=True):
        assert torch.equal(half, gradient.to(dtype))


def test_autocast_computes_losses_of_the_host_in_single_precision_too():
    images, texts = (sets_of(labels, torch.float32, seed)[:, 0] for seed, labels in enumerate((LABELS, REF_LABELS)))
    loss = SmoothChamferLoss(losses.NTXentLoss(distance=distances.CosineSimilarity()))
    wanted = loss(images, LABELS, ref_emb=texts, ref_labels=REF_LABELS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(images, LABELS, ref_emb=texts, ref_labels=REF_LABELS), wanted)


def test_not_a_number_is_never_hidden():
    call = call_with() | {"slots": sets_of(LABELS, seed=2), "ref_slots": sets_of(REF_LABELS, seed=3)}
    for name in ("embeddings", "ref_emb", "slots", "ref_slots"):
        for place in ((0, 0, 0), (4, 2, 3)):
            bad = call[name].detach().clone()
            bad[place] = float("nan")
            bad.requires_grad_()
            value = SmoothChamferLoss(**WEIGHTS)(**call | {name: bad})
            assert value.isnan()
            assert torch.autograd.grad(value, bad)[0].isnan().any()


def test_nothing_to_compare():
    for count in (0, 1, 4):
        images, texts = (sets_of(range(count), seed=seed) for seed in (0, 1))
        labels = torch.arange(count)
        loss = SmoothChamferLoss(diversity_weight=0)
        assert loss(images, labels) == 0
        value = loss(images, labels, ref_emb=texts, ref_labels=labels + 10)
        assert value == sum(loss.regularization(images, texts).values())
        gradients = torch.autograd.grad(value, (images, texts))
        assert all(gradient.any() == (count > 0) for gradient in gradients)


def test_identical_sets_have_finite_gradients():
    images, texts = (torch.ones(5, K, D, requires_grad=True) for _ in range(2))
    value = SmoothChamferLoss(**WEIGHTS)(images, LABELS, ref_emb=texts, ref_labels=LABELS.clone())
    assert value > 0.1
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(value, (images, texts)))


def test_description():
    assert SmoothChamferLoss.equation
    assert SmoothChamferLoss.paper.startswith("Kim et al. 2023")
    assert SmoothChamferLoss()._record_these == ["mmd_weight", "diversity_weight"]


class WithStatistic(SmoothChamferLoss):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_to_recordable_attributes(name="statistic", is_stat=True)


def test_it_collects_statistics_where_its_base_does():
    assert create_loss("smooth_chamfer", collect_stats=True).collect_stats
    assert SmoothChamferLoss(UnifiedLoss(collect_stats=True)).collect_stats
    assert not SmoothChamferLoss(collect_stats=False).collect_stats
    assert not hasattr(WithStatistic(), "statistic")
    loss = WithStatistic(collect_stats=True)
    loss.statistic = 5
    loss(**call_with())
    assert loss.statistic == 0, "each call of a loss of pytorch-metric-learning begins with reset_stats"


def test_names_of_its_parts_are_those_of_its_base():
    assert SmoothChamferLoss().sub_loss_names() == ["loss"]
    loss = SmoothChamferLoss(embedding_regularizer=regularizers.LpRegularizer())
    assert loss.sub_loss_names() == ["loss", "embedding_reg_loss"]
