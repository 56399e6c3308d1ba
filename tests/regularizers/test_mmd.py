import contextlib

import pytest
import torch
from pytorch_metric_learning import losses, reducers

from tests.helpers.loops import LOSSES, call_with, check, expected, leaves_of, make_loss
from tests.reference import regularizers as reference
from vl_plugins.components import create_component
from vl_plugins.regularizers import MMDRegularizer

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def sets_of(items, elements=3, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(items, elements, 4, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def of_loops(images, texts, gamma=0.5, squared=False):
    clouds = [sets.flatten(0, 1).tolist() for sets in (images, texts)]
    value, gradients = reference.mmd_of_directions(*clouds, gamma, squared)
    return value, [
        torch.tensor(gradient, dtype=torch.float64).view_as(sets)
        for gradient, sets in zip(gradients, (images, texts), strict=True)
    ]


@DTYPES
@pytest.mark.parametrize("options", [{}, {"gamma": 2.0}, {"squared": True}], ids=str)
def test_all_elements_of_both_modalities(options, dtype):
    images, texts = sets_of(5, dtype=dtype), sets_of(3, 2, dtype, seed=1)
    check(MMDRegularizer(**options)(images, texts), [images, texts], *of_loops(images, texts, **options))


def test_packed_sets_and_plain_embeddings():
    images, texts = sets_of(5), sets_of(4, seed=1)
    packed = MMDRegularizer(set_size=3)(images.flatten(1), texts.flatten(1))
    check(packed, [images, texts], *of_loops(images, texts))
    assert torch.equal(MMDRegularizer(set_size=3)(images, texts), packed)
    of_two = MMDRegularizer(set_size=3)(images.flatten(1), texts[:, :2].flatten(1))
    torch.testing.assert_close(of_two.item(), of_loops(images, texts[:, :2])[0])
    plain = MMDRegularizer()(images[:, 0], texts[:, 0])
    torch.testing.assert_close(plain.item(), of_loops(images[:, :1], texts[:, :1])[0])


@DTYPES
def test_padding_is_left_out(dtype):
    images, texts = sets_of(5, dtype=dtype), sets_of(3, dtype=dtype, seed=1)
    padded = torch.cat([images, torch.zeros_like(images)], dim=1).detach().requires_grad_()
    actual = MMDRegularizer()(padded, texts)
    torch.testing.assert_close(actual, MMDRegularizer()(images, texts))
    (gradient,) = torch.autograd.grad(actual, padded)
    assert gradient[:, :3].any()
    assert not gradient[:, 3:].any()
    assert MMDRegularizer()(torch.zeros(2, 3, 4, dtype=dtype), texts) == 0


@DTYPES
@LOSSES
def test_losses_of_this_package_hand_on_their_references(name, dtype):
    for miner in (None, "pairs"):
        for reducer in (None, reducers.SumReducer()):
            call = call_with(2, dtype)
            if miner is not None:
                index = torch.tensor([0, 1, 5])
                call["indices_tuple"] = (index, torch.tensor([1, 4, 5]), index, torch.tensor([2, 3, 6]))
            loss = make_loss(name, embedding_regularizer=MMDRegularizer(), embedding_reg_weight=0.25, reducer=reducer)
            value, gradients = expected(name, call, reducer=reducer)
            term, of_term = of_loops(*(leaf[:, None] for leaf in leaves_of(call)))
            assert term > 0.01
            gradients = [one + 0.25 * other[:, 0] for one, other in zip(gradients, of_term, strict=True)]
            check(loss(**call), leaves_of(call), value + 0.25 * term, gradients)


@LOSSES
def test_one_modality_has_none(name):
    """Not even that of the call before, whether it failed or not."""
    loss = make_loss(name, embedding_regularizer=MMDRegularizer())
    message = "^MMDRegularizer compares the embeddings of two modalities, got embeddings without ref_emb: .* vl_plugins"
    two, one = call_with(2), call_with(1)
    loss(**two)
    with pytest.raises(ValueError, match=message):
        loss(**one)
    with pytest.raises(IndexError):
        loss(**two | {"indices_tuple": (torch.tensor([7]),) * 4})
    with pytest.raises(ValueError, match=message):
        loss(**one | {"ref_emb": one["embeddings"], "ref_labels": one["labels"]})


@pytest.mark.parametrize("change", [{}, {"indices_tuple": (torch.tensor([7]),) * 4}], ids=["", "failed"])
def test_references_are_not_kept_after_a_call(change):
    loss = make_loss("unified", embedding_regularizer=MMDRegularizer())
    with contextlib.suppress(IndexError):
        loss(**call_with(2) | change)
    assert not any(isinstance(value, torch.Tensor) for module in loss.modules() for value in vars(module).values())


def test_losses_of_the_host_do_not():
    with pytest.raises(ValueError, match="got embeddings without ref_emb"):
        losses.ContrastiveLoss(embedding_regularizer=MMDRegularizer())(**call_with(2))


@pytest.mark.slow
def test_compiled_in_a_loss():
    torch.compiler.reset()
    call = call_with(2)
    loss = make_loss("unified", embedding_regularizer=MMDRegularizer())
    value = loss(**call)
    compiled = torch.compile(loss, backend="aot_eager")(**call)
    check(compiled, leaves_of(call), value.item(), torch.autograd.grad(value, leaves_of(call)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_single_under_autocast_too(dtype):
    images, texts = sets_of(5, dtype=dtype), sets_of(4, dtype=dtype, seed=1)
    expected_value = MMDRegularizer()(images.detach().float(), texts.detach().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = MMDRegularizer()(images, texts)
    assert torch.equal(actual, expected_value)
    assert torch.autograd.grad(actual, images)[0].dtype == dtype


def test_not_a_number_is_not_hidden():
    for place in ((0, 0, 0), (4, 2, 3)):
        images, texts = sets_of(5).detach(), sets_of(5, seed=1).detach()
        images[place] = float("nan")
        assert MMDRegularizer()(images, texts).isnan()
        assert MMDRegularizer()(texts, images).isnan()


def test_by_name_and_recorded():
    regularizer = create_component("regularizer", "MMDRegularizer", gamma=2, squared=True, set_size=3)
    assert (regularizer.gamma, regularizer.squared, regularizer.set_size) == (2.0, True, 3)
    assert regularizer._record_these == ["gamma", "set_size"]
    reducer = reducers.DoNothingReducer()
    images, texts = sets_of(5), sets_of(4, seed=1)
    loss_dict = MMDRegularizer(reducer=reducer)(images, texts)
    assert loss_dict["loss"]["reduction_type"] == "already_reduced"
    assert torch.equal(loss_dict["loss"]["losses"], MMDRegularizer()(images, texts))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0}, "gamma must be a finite number > 0, got 0"),
        ({"set_size": 0}, "set_size must be an integer >= 1, got 0"),
    ],
)
def test_wrong_hyper_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        MMDRegularizer(**options)


def test_wrong_shapes():
    images = torch.ones(5, 7)
    for regularizer, ref_emb in ((MMDRegularizer(set_size=2), images + 1), (MMDRegularizer(), torch.ones(5, 6))):
        with pytest.raises(ValueError, match=r"embeddings must be sets \(B, K, D\) .*, got \(5, 7\) and \(5, "):
            regularizer(images, ref_emb)
