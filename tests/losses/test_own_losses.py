"""Losses that users derive: their hooks are called, or an error says why not."""

import pytest
import torch
from pytorch_metric_learning.losses import BaseMetricLossFunction

from vl_plugins import create_loss, engine
from vl_plugins.distances import MatchProbability
from vl_plugins.errors import InputWarning
from vl_plugins.losses import PairLoss, ScaledLoss, TripletSHLoss, UnifiedLoss, hardest, soft_maximum

IMAGES = torch.eye(4)
TEXTS = torch.eye(4).roll(1, dims=0)
PAIRS = {"ref_emb": TEXTS, "symmetric": False}


class MatrixOfSevens:
    def matrix_losses(self, similarities, positive_mask, negative_mask, **numbers):
        assert similarities.shape == (4, 4)
        return similarities[positive_mask] * 0 + 7


def test_a_matrix_loss_of_a_mixin():
    class Mixed(MatrixOfSevens, UnifiedLoss):
        pass

    assert not Mixed().by_row
    assert Mixed()(IMAGES, **PAIRS) == 7


def test_a_formula_of_pairs_that_nothing_would_call():
    with pytest.raises(TypeError, match="Own: of_pairs is never called, because a class above it defines"):

        class Own(TripletSHLoss):
            def of_pairs(self, positive, negative):
                return negative - positive

    class Both(TripletSHLoss):
        def matrix_losses(self, similarities, positive_mask, negative_mask):
            return self.of_pairs(similarities[positive_mask], 7)

        def of_pairs(self, positive, negative):
            return negative - positive

    assert Both()(IMAGES, **PAIRS) == 7


def test_negatives_of_an_instance():
    class Own(ScaledLoss):
        def __init__(self):
            super().__init__()
            self.of_negatives = hardest

        def of_pairs(self, positive, negative, scale):
            return negative - positive

    with pytest.raises(AttributeError, match="of_negatives belongs to the class: write it into the body of Own"):
        Own()


class OwnSoftMaximum(ScaledLoss):
    """As the packaged one, which says nothing of anchors without negatives."""

    def of_negatives(self, similarities, negative_mask, scale):
        return (scale * similarities).masked_fill(~negative_mask, -torch.inf).logsumexp(dim=1) / scale

    def of_pairs(self, positive, negative, scale):
        return (negative - positive + 0.2).exp()


class PackagedSoftMaximum(OwnSoftMaximum):
    of_negatives = soft_maximum


@pytest.mark.parametrize("tiled", [False, True])
def test_an_anchor_without_negatives_does_not_spoil_the_scale(tiled):
    found = []
    for kind in (OwnSoftMaximum, PackagedSoftMaximum):
        loss = kind(scale=3.0, learn_scale=True, tiled=tiled)
        x = torch.tensor([[1.0, 0.5], [0.2, 1.0], [1.0, 1.0]], requires_grad=True)
        # The first anchor has the positives 0 and 1, and the text 2 matches it, too.
        value = loss(x[:2], [0, 1], ref_emb=x, ref_labels=[0, 0, 1], ref_ids=[5, 6, 7], matching_ids=[[7], [-1]])
        found.append([value, *torch.autograd.grad(value, [x, loss.log_scale])])
    assert found[0][2] != 0
    torch.testing.assert_close(*found)


def test_random_numbers_of_a_loss_in_blocks_are_the_same_for_its_gradients(monkeypatch):
    """A block is computed again in the backward pass."""
    monkeypatch.setattr(engine, "CPU_BLOCK", 1)
    masks = []

    class Sampled(PairLoss):
        by_row = True

        def matrix_losses(self, similarities, positive_mask, negative_mask):
            is_sampled = negative_mask & (torch.rand_like(similarities) < 0.5)
            masks.append(is_sampled)
            return (similarities * is_sampled).sum(dim=1)[positive_mask.nonzero()[:, 0]]

    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    Sampled(tiled=True, symmetric=False)(x, ref_emb=x.detach().flip(0)).backward()
    blocks = len(masks) // 2
    assert blocks == 2
    for forward, backward in zip(masks[:blocks], masks[blocks:][::-1], strict=True):
        assert torch.equal(forward, backward)


def test_a_state_of_its_own():
    class Own(UnifiedLoss):
        calls = 0

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    loss, other = Own(), Own()
    loss.calls = 3
    other.load_state_dict(loss.state_dict())
    assert other.calls == 3


class NumbersOfPairs(PairLoss):
    of_negatives, numbers, scale = soft_maximum, ("scale",), 3.0

    def of_pairs(self, positive, negative, scale):
        return negative - positive


def test_a_scale_of_each_text_for_a_soft_maximum():
    with pytest.raises(ValueError, match=r"scale must be one number for a soft maximum, got the shape \(4,\)"):
        NumbersOfPairs()(IMAGES, **PAIRS, scale=torch.ones(4))


def wrong_class(base=PairLoss, **body):
    return lambda: type("Own", (base,), body)


def of_pairs(self, positive, negative):
    return negative - positive


def of_pairs_and_scale(self, positive, negative, scale):
    return scale * (negative - positive)


def test_a_soft_maximum_without_a_scale():
    with pytest.raises(TypeError, match=r"^Own: of_negatives = soft_maximum needs a scale; derive the class from"):
        wrong_class(ScaledLoss, numbers=("margin",), of_pairs=of_pairs)()


@pytest.mark.parametrize(
    ("make_class", "message"),
    [
        (wrong_class(ScaledLoss, of_pairs=of_pairs), "unexpected keyword argument 'scale'"),
        (wrong_class(of_pairs=of_pairs_and_scale), "missing 1 required positional argument: 'scale'"),
    ],
)
def test_a_hook_and_the_numbers_of_its_loss(make_class, message):
    """Python says which number a hook does not take, or lacks."""
    with pytest.raises(TypeError, match=message):
        make_class()()(IMAGES, **PAIRS)


def test_a_loss_without_a_formula():
    class Own(PairLoss):
        def of_pair(self, positive, negative):
            return negative - positive

    with pytest.raises(TypeError, match="Own defines neither of_pairs nor matrix_losses"):
        Own()


def test_a_margin_in_the_place_of_an_option():
    class Own(PairLoss):
        def __init__(self, margin=0.2):
            super().__init__(margin)

    with pytest.raises(TypeError, match="takes 1 positional argument"):
        Own()


@pytest.mark.parametrize("keepdim", [False, True])
def test_negatives_of_the_whole_batch(keepdim):
    class Own(PairLoss):
        def of_negatives(self, similarities, negative_mask):
            return similarities.amax(dim=1, keepdim=True) if keepdim else similarities.max()

        def of_pairs(self, positive, negative):
            return negative - positive

    with pytest.raises(ValueError, match=r"of_negatives of Own must return one number for each anchor, \(4,\), got \("):
        Own()(IMAGES, **PAIRS)


def test_a_number_of_each_caption_for_negatives_of_an_anchor():
    class Own(PairLoss):
        numbers, margin = ("margin",), 0.2

        def of_negatives(self, similarities, negative_mask, margin):
            return (similarities + margin).masked_fill(~negative_mask, -9).amax(dim=1)

        def of_pairs(self, positive, negative, margin):
            return negative - positive

    assert Own()(IMAGES, **PAIRS, margin=0.5) > Own()(IMAGES, **PAIRS)
    with pytest.raises(TypeError, match=r"of_negatives\(\) missing 1 required positional argument: 'margin'"):
        Own()(IMAGES, **PAIRS, margin=torch.ones(4))


def test_a_number_without_a_value():
    class Own(PairLoss):
        numbers = ("margin",)

        def of_pairs(self, positive, negative, margin):
            return margin + negative - positive

    assert Own()(IMAGES, **PAIRS, margin=0.5) == Own()(IMAGES, **PAIRS, margin=0) + 0.5
    with pytest.raises(
        ValueError, match=r"Own has no margin, one of its numbers: set self.margin .* loss\(..., margin="
    ):
        Own()(IMAGES, **PAIRS)


def test_losses_that_are_true_or_false():
    class Own(PairLoss):
        def of_pairs(self, positive, negative):
            return negative > positive

    with pytest.raises(ValueError, match=r"of_pairs of Own must return one loss .*, \(4,\), got \(4,\) of torch\.bool"):
        Own()(IMAGES, **PAIRS)


def test_a_mean_of_triplets():
    class Own(PairLoss):
        def triplet_losses(self, similarities, anchors, positives, negatives):
            return super().triplet_losses(similarities, anchors, positives, negatives).mean()

        def of_pairs(self, positive, negative):
            return negative - positive

    triplets = tuple(torch.tensor([place, place]) for place in (0, 0, 1))
    with pytest.raises(ValueError, match=r"triplet_losses of Own must return one loss of each .*, \(2,\), got \(\)"):
        Own()(IMAGES, None, triplets, TEXTS)


def test_a_class_is_a_loss_to_create():
    assert create_loss(UnifiedLoss, margin=0.3).margin == 0.3
    assert isinstance(create_loss(UnifiedLoss), BaseMetricLossFunction)


def test_statistics_of_an_anchor_without_negatives():
    class Own(PairLoss):
        def of_negatives(self, similarities, negative_mask):
            return (similarities * negative_mask).sum(dim=1) / negative_mask.sum(dim=1).clamp(min=1)

        def of_pairs(self, positive, negative):
            return (negative - positive + 0.2).relu()

    loss = Own(collect_stats=True)
    with pytest.warns(InputWarning, match="every pair"):
        assert loss(-IMAGES, [0] * 4, ref_emb=TEXTS, ref_labels=[0] * 4) == 0
    assert loss.active_pairs == 0


@pytest.mark.parametrize(
    "make_options", [lambda: {"distance": MatchProbability()}, lambda: {"relative": torch.nn.PReLU()}]
)
def test_parameters_have_gradients_without_pairs(make_options):
    """DistributedDataParallel waits for those of all parameters."""
    loss = UnifiedLoss(**make_options())
    with pytest.warns(InputWarning, match="no pair"):
        loss(IMAGES, [0, 1, 2, 3], ref_emb=TEXTS, ref_labels=[4, 5, 6, 7]).backward()
    assert all((parameter.grad == 0).all() for parameter in loss.parameters())
    assert len(list(loss.parameters())) > 0


def test_a_margin_that_goal_does_not_use_is_no_part_of_its_statistics():
    for weight, active in (("con", 1), ("nca", 0)):
        loss = create_loss("goal", triplet_weight=weight, margin=3.0, collect_stats=True)
        loss(IMAGES, ref_emb=IMAGES.clone())
        assert loss.active_pairs == active


def test_statistics_are_those_of_the_last_call():
    loss = create_loss("triplet_hn", warmup_steps=1, collect_stats=True)
    loss(IMAGES, ref_emb=TEXTS)
    assert loss.first.mean_positive == 0
    assert loss.then.mean_positive.isnan()
    loss(IMAGES, ref_emb=TEXTS)
    assert loss.first.mean_positive.isnan()
    assert loss.then.mean_positive == 0
    pairs = tuple(torch.arange(4).roll(shift) for shift in (0, 0, 1))
    loss(IMAGES, None, pairs, TEXTS)
    assert loss.then.mean_positive.isnan()
