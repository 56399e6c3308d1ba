"""The warm-up without mining, and the warning of a collapsed model."""

import copy
import pickle
import warnings

import pytest
import torch
from pytorch_metric_learning.distances import DotProductSimilarity, LpDistance

from vl_plugins.functional import goal_loss
from vl_plugins.losses import GOALLoss, TripletHNLoss, TripletSHLoss
from vl_plugins.losses.hardest_negative import COLLAPSED_STEPS

LABELS = torch.arange(6)
IMAGES = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
TEXTS = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
CLASSES = pytest.mark.parametrize("loss_class", [TripletHNLoss, GOALLoss])


def call(loss, images=IMAGES, texts=TEXTS):
    return loss(images, LABELS, ref_emb=texts, ref_labels=LABELS)


def warm_and_mined(loss_class):
    if loss_class is TripletHNLoss:
        return call(TripletSHLoss()), call(TripletHNLoss())
    similarities = torch.nn.functional.normalize(IMAGES) @ torch.nn.functional.normalize(TEXTS).T
    positive_mask = torch.eye(6, dtype=torch.bool)
    return [goal_loss(similarities, positive_mask, ~positive_mask, mining=mining) for mining in ("all", "hardest")]


@CLASSES
def test_all_negatives_count_during_the_warm_up(loss_class):
    warm, mined = warm_and_mined(loss_class)
    assert warm > 1.5 * mined
    loss = loss_class(warmup_steps=3)
    values = [call(loss) for _ in range(5)]
    torch.testing.assert_close(values, [warm] * 3 + [mined] * 2)
    expected = torch.autograd.grad(warm, IMAGES)
    torch.testing.assert_close(torch.autograd.grad(values[0], IMAGES), expected)
    torch.testing.assert_close(call(loss_class()), mined)  # which comes from all similarities


@CLASSES
def test_only_training_steps_count_and_are_warm(loss_class):
    warm, mined = warm_and_mined(loss_class)
    loss = loss_class(warmup_steps=1)
    with torch.no_grad():
        torch.testing.assert_close(call(loss), mined)
    torch.testing.assert_close(call(loss.eval()), mined)
    torch.testing.assert_close(call(loss.train()), warm)
    torch.testing.assert_close(call(loss), mined)


@CLASSES
def test_given_triplets_are_used_as_they_are(loss_class):
    triplets = (torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([2, 3]))
    values = [
        loss(IMAGES, LABELS, triplets, TEXTS, LABELS.clone()) for loss in (loss_class(), loss_class(warmup_steps=5))
    ]
    assert torch.equal(*values)


@CLASSES
def test_a_host_that_calls_several_times_per_step(loss_class):
    warm, mined = warm_and_mined(loss_class)
    loss = loss_class(warmup_steps=2)
    loss.calls_per_step = 2
    torch.testing.assert_close([call(loss) for _ in range(5)], [warm] * 4 + [mined])


@CLASSES
def test_copies_and_checkpoints_go_on_where_the_loss_was(loss_class, tmp_path):
    warm, mined = warm_and_mined(loss_class)
    loss = loss_class(warmup_steps=3)
    for _ in range(2):
        call(loss)
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    fresh = loss_class(warmup_steps=3)
    fresh.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    for twin in (fresh, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        torch.testing.assert_close([call(twin), call(twin)], [warm, mined])


@pytest.mark.slow
@CLASSES
def test_compiled_for_any_number_of_steps(loss_class):
    warm, mined = warm_and_mined(loss_class)
    torch.compiler.reset()
    compiled = torch.compile(loss_class(warmup_steps=12), backend="eager")
    # A number that is compiled in would make every step compile again, up to a limit.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        values = [call(compiled) for _ in range(30)]
    torch.testing.assert_close(values, [warm] * 12 + [mined] * 18)


def collapsed_step(loss, spread=0.0, **kwargs):
    generator = torch.Generator().manual_seed(loss.training_calls)
    images, texts = (1 + spread * torch.randn(6, 5, generator=generator) for _ in range(2))
    return loss(images.requires_grad_(), LABELS, **(kwargs or {"ref_emb": texts, "ref_labels": LABELS}))


VARIANTS = {
    "triplet_hn": TripletHNLoss,
    "euclidean triplet_hn": lambda **kwargs: TripletHNLoss(distance=LpDistance(), **kwargs),
    "image to text": lambda **kwargs: TripletHNLoss(symmetric=False, **kwargs),
    "goal con": lambda **kwargs: GOALLoss("con", "sig", **kwargs),
    "goal nca": lambda **kwargs: GOALLoss("nca", "lin_ms", **kwargs),
    "goal cir": lambda **kwargs: GOALLoss("cir", "sig_ms", **kwargs),
    "goal as circle loss": lambda **kwargs: GOALLoss("cir", "lin", offset=1.0, **kwargs),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_collapsed_model_is_reported_once(variant):
    loss = VARIANTS[variant]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(COLLAPSED_STEPS - 1):
            collapsed_step(loss)
        assert not caught
        value = collapsed_step(loss)
        assert len(caught) == 1
        for _ in range(3 * COLLAPSED_STEPS):
            collapsed_step(loss)
    assert len(caught) == 1
    assert caught[0].category is RuntimeWarning
    text = str(caught[0].message)
    assert f"{type(loss).__name__} has been {value.item():.4g} per pair for 100 steps" in text
    assert "warmup_steps" in text


@CLASSES
def test_one_set(loss_class):
    loss = loss_class()
    labels = torch.arange(6) // 2
    embeddings = torch.ones(6, 5, requires_grad=True)
    for _ in range(COLLAPSED_STEPS - 1):
        loss(embeddings, labels)
    with pytest.warns(RuntimeWarning, match="collapsed"):
        loss(embeddings, labels)


@pytest.mark.parametrize(
    "variant",
    [
        variant if variant in ("triplet_hn", "goal cir") else pytest.param(variant, marks=pytest.mark.slow)
        for variant in VARIANTS
    ],
)
def test_other_models_are_not_reported(variant):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = VARIANTS[variant]()
        for step in range(3 * COLLAPSED_STEPS):
            collapsed_step(loss, spread=1.0 if step % COLLAPSED_STEPS > 80 else 0.0)
        loss = VARIANTS[variant](warmup_steps=10**6)
        for _ in range(2 * COLLAPSED_STEPS):
            collapsed_step(loss)
        loss = VARIANTS[variant]().eval()
        for _ in range(2 * COLLAPSED_STEPS):
            collapsed_step(loss)


def test_without_a_margin_the_value_of_a_collapse_is_that_of_success():
    loss = TripletHNLoss(margin=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 * COLLAPSED_STEPS):
            assert call(loss, torch.eye(6, requires_grad=True), torch.eye(6)) == 0


def test_steps_of_several_calls():
    loss = TripletHNLoss()
    loss.calls_per_step = 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 * COLLAPSED_STEPS - 1):
            collapsed_step(loss)
    with pytest.warns(RuntimeWarning, match="for 100 steps"):
        collapsed_step(loss)


def test_a_mean_at_the_collapse_value_by_chance_is_no_collapse():
    loss = TripletHNLoss(symmetric=False, distance=DotProductSimilarity(normalize_embeddings=False))
    similarities = torch.tensor([[0.5, 0.6], [0.4, 0.5]])
    labels = torch.arange(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 * COLLAPSED_STEPS):
            value = loss(torch.eye(2, requires_grad=True), labels, ref_emb=similarities.T, ref_labels=labels)
    torch.testing.assert_close(value.item(), loss.margin)
