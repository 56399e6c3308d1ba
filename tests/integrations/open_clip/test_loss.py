"""The loss in open_clip's place; its gradients in several processes are in test_distributed.py."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss, SigLipLoss
from pytorch_metric_learning import losses as pml_losses
from torch._dynamo.utils import counters

from tests.helpers.open_clip_training import loss_options
from tests.helpers.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.distances import MatchProbability, SmoothChamferSimilarity
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.loss import build_loss
from vl_plugins.integrations.open_clip.steps import Steps

B, D, K = 6, 16, 4
SETS = loss_options("smooth_chamfer", loss_kwargs={"mmd_weight": 0.3, "diversity_weight": 0.2}, head="set")


def labels(captions=1, images=B):
    return torch.arange(images).repeat_interleave(captions)


def outputs(captions=1, images=B, sets=False, bias=None):
    """Return leaves by the names of open_clip's outputs, float64."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for tower, number in (("image", images), ("text", images * captions)):
        drawn = torch.randn(number, *((K, D) if sets else (D,)), generator=generator, dtype=torch.float64)
        found[f"{tower}_features"] = F.normalize(drawn, dim=-1).requires_grad_()
        if sets:
            found[f"{tower}_slots"] = drawn.requires_grad_()
    numbers = {"logit_scale": 14.0} if bias is None else {"logit_scale": 14.0, "logit_bias": bias}
    for name, number in numbers.items():
        found[name] = torch.tensor(number, dtype=torch.float64, requires_grad=True)
    return found


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


def test_siglip_is_open_clips_loss():
    """With the model's scale and bias, by default."""
    leaves = outputs(bias=-3.0)
    given = {key: F.normalize(leaf, dim=1) if leaf.ndim else leaf for key, leaf in leaves.items()}
    actual, expected = build_loss(loss_options("siglip"))(**given), SigLipLoss()(**given)
    torch.testing.assert_close(actual, expected)
    gradients = torch.autograd.grad(expected, leaves.values(), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(actual, leaves.values()), gradients)
    fixed = build_loss(loss_options("siglip", {"scale": 10, "bias": -10}))
    assert not fixed.model_numbers
    assert not torch.autograd.grad(fixed(**outputs(bias=-3.0) | leaves), leaves["logit_bias"])[0].any()


def test_a_logged_step_has_statistics_that_are_not_added_up():
    given, steps = outputs(captions=2), Steps()
    steps.batches.append({"ref_ids": torch.tensor([0, 1, 2, 0, *range(4, 12)])})
    loss = build_loss(loss_options("unified", {"margin": 0.1}), steps)
    losses = loss(**given, output_dict=True)
    assert list(losses) == ["unified_loss"]
    steps.is_logged = True
    logged = loss(**given, output_dict=True)
    assert sum(logged.values()) == losses["unified_loss"]
    similarities = given["image_features"] @ given["text_features"].T
    positive = similarities[labels(captions=2), torch.arange(2 * B)]
    torch.testing.assert_close(logged["mean_positive"], positive.mean())
    assert logged["scale_in_use"] == 14
    # The first image has a text that equals one of the second, and the other way around.
    torch.testing.assert_close(logged["known_positives_left_out"].item(), 2 / (B * 2 * B))
    assert 0 < logged["active_pairs"] <= 1
    assert not hasattr(loss.loss, "collect_stats") or not loss.loss.collect_stats
    assert list(build_loss(loss_options("NTXentLoss"), steps)(**given, output_dict=True)) == ["NTXentLoss_loss"]
    mined = build_loss(loss_options("unified", miner="MultiSimilarityMiner"), steps)
    assert list(mined(**given, output_dict=True)) == ["unified_loss"]


def test_a_grad_scaler_leaves_out_steps_without_a_finite_loss(caplog):
    """Up to nine in a row; the scaler is torch's own, on the CPU."""
    image, text, scale = (tensor.detach() for tensor in outputs().values())
    tower, steps = torch.nn.Linear(D, D, dtype=torch.float64), Steps(2)
    loss = build_loss(loss_options("vlc"), steps)
    loss.has_scaler = True
    weights, errors = [], []
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu") if hasattr(torch.amp, "GradScaler") else None
    for step in (*range(9), *range(10, 20)):
        steps.number = step
        try:
            for _ in range(2):  # two passes of a step
                value = loss(tower(image + (torch.nan if step != 4 else 0)), text, scale)
        except UserError as error:
            errors.append((step, str(error)))
            break
        if scaler is not None:
            optimizer.zero_grad()
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
        weights.append(tower.weight.detach().clone())
    assert errors == [(19, "step 19: the loss is nan, as in the 9 steps before")]
    assert loss.skipped_steps == [0, 1, 2, 3, 5, 6, 7, 8, *range(10, 20)]
    warnings = [record.message for record in caplog.records]
    assert warnings[4].endswith(
        "step 5: the loss is nan, so the GradScaler leaves the step out; 5 were left out so far"
    )
    if scaler is not None:
        changes = [not torch.equal(*pair) for pair in pairwise([tower.weight * torch.nan, *weights])]
        assert changes[1:] == [step == 4 for step in range(1, 9)] + [False] * 9


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
        loss_options("siglip"),
        loss_options("unified", {"learn_scale": True}),
        loss_options("MarginLoss", {"learn_beta": True, "beta": 0.5, "margin": 1.0}),
    ],
    ids=["scale", "similarity", "scale and bias", "own scale", "beta"],
)
def test_accumulation_gives_the_gradients_of_the_whole_batch(options):
    """open_clip computes the loss once for each part of the batch, with the graph of that part alone."""
    parts, size = 3, B // 3
    bias = -3.0 if options.loss == "siglip" else None
    whole = outputs(sets=options.head == "set", bias=bias)
    expected_loss = build_loss(options)
    value = expected_loss(**whole)
    value.backward()
    leaves = outputs(sets=options.head == "set", bias=bias)
    steps = Steps(parts)
    loss = build_loss(options, steps)
    for step in range(2):  # as training goes on
        steps.number = step
        for leaf in (*leaves.values(), *loss.parameters()):
            leaf.grad = None
        for part in range(parts):
            inputs = {name: leaf for name, leaf in leaves.items() if not leaf.ndim}
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
        if "bias" in expected_loss.model_numbers:
            trained.append(whole["logit_bias"])
        assert all(parameter.grad.any() for parameter in trained)


def error_of_a_process(rank):
    """Return the error when an image feature of the second process is NaN."""
    image, text, scale = (tensor.detach() for tensor in outputs().values())
    loss = build_loss(loss_options("vlc"), steps_of(range(B * rank, B * rank + B), number=103))
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
