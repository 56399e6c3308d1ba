"""The loss in open_clip's place; its gradients in several processes are in test_distributed.py."""

import pytest
import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss
from pytorch_metric_learning import losses as pml_losses
from torch._dynamo.utils import counters

from tests.helpers.open_clip_training import loss_options
from tests.helpers.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.distances import MatchProbability, SmoothChamferSimilarity
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.data import Steps
from vl_plugins.integrations.open_clip.loss import build_loss

B, D, K = 6, 16, 4
SETS = loss_options("smooth_chamfer", loss_kwargs={"mmd_weight": 0.3, "diversity_weight": 0.2}, head="set")


def labels(captions=1, images=B):
    return torch.arange(images).repeat_interleave(captions)


def outputs(captions=1, images=B, sets=False):
    """Return leaves by the names of open_clip's outputs, float64."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for tower, number in (("image", images), ("text", images * captions)):
        drawn = torch.randn(number, *((K, D) if sets else (D,)), generator=generator, dtype=torch.float64)
        found[f"{tower}_features"] = F.normalize(drawn, dim=-1).requires_grad_()
        if sets:
            found[f"{tower}_slots"] = drawn.requires_grad_()
    return {**found, "logit_scale": torch.tensor(14.0, dtype=torch.float64, requires_grad=True)}


def test_equals_the_metric_loss_with_images_as_labels():
    given = outputs(captions=5)
    losses = build_loss(loss_options("unified", {"margin": 0.1, "scale": 50}))(**given, output_dict=True)
    assert list(losses) == ["unified_loss"], "open_clip adds up every value of the dict"
    expected = create_loss("unified", margin=0.1)(
        given["image_features"], labels(), ref_emb=given["text_features"], ref_labels=labels(captions=5)
    )
    torch.testing.assert_close(losses["unified_loss"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"scale": "learned"}])
def test_vlc_with_the_learned_scale_is_twice_open_clips_loss(options):
    """The learned scale is the default."""
    leaves = outputs()
    given = {key: F.normalize(leaf, dim=1) if leaf.ndim else leaf for key, leaf in leaves.items()}
    learned = build_loss(loss_options("vlc", loss_kwargs=options))(**given)
    expected = 2 * ClipLoss()(**given)
    torch.testing.assert_close(learned, expected)
    gradients = torch.autograd.grad(learned, leaves.values(), retain_graph=True)
    assert all(gradient.any() for gradient in gradients)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves.values()))


def test_autocast_does_not_reach_losses_of_others():
    image, text, scale = (tensor.detach().bfloat16() for tensor in outputs(images=32).values())
    metric_loss, ids = pml_losses.NTXentLoss(temperature=0.01), labels(images=32)
    loss = build_loss(loss_options("NTXentLoss", loss_kwargs={"temperature": 0.01}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = loss(image, text, scale.float())
    sides = image.float(), text.float()
    expected = sum(metric_loss(one, ids, ref_emb=other, ref_labels=ids.clone()) for one, other in (sides, sides[::-1]))
    torch.testing.assert_close(actual, expected)


def steps_of(image_ids, number=0):
    steps, image_ids = Steps(), torch.tensor(image_ids)
    no_ids = image_ids.new_zeros(len(image_ids), 0)
    steps.batches.append({"labels": image_ids, "ref_ids": image_ids, "matching_ids": no_ids})
    steps.number = number
    return steps


@pytest.mark.parametrize("fields", [{}, {"miner": "MultiSimilarityMiner"}], ids=["one call", "miner"])
def test_warm_up_counts_training_steps(fields):
    """However often a step calls the loss, and wherever a resumed training begins."""
    mined = build_loss(loss_options("triplet_hn", **fields))
    for number in (3, 4, 5, 6, 0):
        steps = steps_of(range(B), number=number)
        loss = build_loss(loss_options("triplet_hn", {"warmup_steps": 5}, **fields), steps)
        for _ in range(2):
            assert torch.equal(loss(**outputs()), mined(**outputs())) == (number >= 5)


@pytest.mark.parametrize(
    ("fields", "expected"), [({}, SmoothChamferSimilarity), ({"distance": "match_probability"}, MatchProbability)]
)
def test_sets_are_compared_by_smooth_chamfer_unless_another_similarity_is_named(fields, expected):
    options = loss_options("vlc", head="set", miner="BatchHardMiner", **fields)
    loss = build_loss(options)
    assert type(loss.loss.distance) is expected
    assert loss.compare.loss.miner.distance is loss.loss.distance


def test_regularization_is_of_the_slots():
    given = outputs(captions=3, sets=True)
    expected = create_loss("smooth_chamfer", **SETS.loss_kwargs)(
        given["image_features"],
        labels(),
        ref_emb=given["text_features"],
        ref_labels=labels(captions=3),
        slots=given["image_slots"],
        ref_slots=given["text_slots"],
    )
    torch.testing.assert_close(build_loss(SETS)(**given), expected)


@pytest.mark.parametrize(
    "options",
    [
        loss_options("unified", {"scale": "learned"}),
        loss_options("vlc", {"scale": 20}, head="set", distance="match_probability"),
    ],
    ids=["scale", "similarity"],
)
def test_accumulation_gives_the_gradients_of_the_whole_batch(options):
    """open_clip computes the loss once for each part of the batch, with the graph of that part alone."""
    parts, size = 3, B // 3
    whole = outputs(sets=options.head == "set")
    expected_loss = build_loss(options)
    value = expected_loss(**whole)
    value.backward()
    leaves = outputs(sets=options.head == "set")
    steps = Steps(parts)
    loss = build_loss(options, steps)
    for step in range(2):  # as training goes on
        steps.number = step
        for leaf in (*leaves.values(), *loss.parameters()):
            leaf.grad = None
        for part in range(parts):
            inputs = {"logit_scale": leaves["logit_scale"]}
            for name, leaf in leaves.items():
                if leaf.ndim:
                    rows = list(leaf.detach().split(size))
                    rows[part] = leaf[part * size : (part + 1) * size]
                    inputs[name] = torch.cat(rows)
            result = loss(**inputs)
            torch.testing.assert_close(result, value)
            result.backward()
        compared = zip(loss.parameters(), expected_loss.parameters(), strict=True)
        for leaf, expected in (*zip(leaves.values(), whole.values(), strict=True), *compared):
            torch.testing.assert_close(leaf.grad, expected.grad)
        trained = [*expected_loss.parameters()] or [whole["logit_scale"]]
        assert all(parameter.grad.any() for parameter in trained)


def error_of_a_process(rank):
    """Return the error when an image feature of the second process is NaN."""
    image, text, scale = (tensor.detach() for tensor in outputs().values())
    loss = build_loss(loss_options("vlc", local_loss=True), steps_of(range(B * rank, B * rank + B), number=103))
    assert loss(image, text, scale).isfinite()
    image[2] += torch.nan if rank == 1 else 0
    with pytest.raises(UserError) as raised:
        loss(image, text, scale)
    return str(raised.value)


def test_all_processes_stop_when_the_loss_of_one_is_not_finite():
    assert in_processes(error_of_a_process, 2) == ["step 103: the loss is nan"] * 2


def test_compiled():
    """Nothing is compiled again when the logit scale changes."""
    torch._dynamo.reset()
    counters.clear()
    loss = build_loss(loss_options("unified", {"scale": "learned"}))
    compiled, numbers = torch.compile(loss, backend="eager"), []
    for step in range(4):
        given = outputs() | {"logit_scale": torch.tensor(2.0 + step, requires_grad=True)}
        values = [each(**given) for each in (compiled, loss)]
        gradients = [torch.autograd.grad(value, given.values()) for value in values]
        torch.testing.assert_close((values[0], gradients[0]), (values[1], gradients[1]))
        numbers.append(counters["frames"]["total"])
    assert numbers[1:] == [numbers[1]] * 3
