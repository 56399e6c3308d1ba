from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss
from pytorch_metric_learning import losses as pml_losses
from pytorch_metric_learning import miners

from tests.processes import in_processes
from vl_plugins import create_loss, list_losses
from vl_plugins.distances import ChamferSimilarity, MatchProbability, MILSimilarity, SmoothChamferSimilarity
from vl_plugins.integrations.open_clip.batch_record import BatchRecord
from vl_plugins.integrations.open_clip.loss import TwoTowerLoss, build_loss, create_pair_loss, describe
from vl_plugins.integrations.open_clip.non_finite import NonFiniteLossError
from vl_plugins.integrations.open_clip.options import PluginOptions
from vl_plugins.registry import loss_options
from vl_plugins.utils.errors import UserError

B, D = 6, 16
OPTIONS = {
    "unified": {"margin": 0.2, "scale": 20},
    "vlc": {"scale": 20},
    "triplet_hn": {"margin": 0.3},
    "triplet_sh": {"margin": 0.3},
    "goal": {"triplet_weight": "cir", "pair_weight": "sig"},
}


class Towers(torch.nn.Module):
    """The smallest thing with open_clip's output: two linear towers and a logit scale, float64."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.image = torch.nn.Parameter(torch.randn(D, D, generator=generator, dtype=torch.float64))
        self.text = torch.nn.Parameter(torch.randn(D, D, generator=generator, dtype=torch.float64))
        self.logit_scale = torch.nn.Parameter(torch.tensor(14.0, dtype=torch.float64))

    def forward(self, images, texts):
        return {
            "image_features": F.normalize(images @ self.image, dim=1),
            "text_features": F.normalize(texts @ self.text, dim=1),
            "logit_scale": self.logit_scale,
        }

    def gradients(self):
        return {name: parameter.grad.clone() for name, parameter in self.named_parameters()}


def batch(images=B, captions=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    return torch.randn(images, D, **draw), torch.randn(images * captions, D, **draw)


class SetTowers(Towers):
    """Likewise with sets of 4, slots, and a similarity whose parameters are trained with the towers."""

    def __init__(self, similarity):
        super().__init__()
        self.similarity = similarity.double()

    def forward(self, images, texts):
        slots = {"image": (images @ self.image).view(-1, 4, D // 4), "text": (texts @ self.text).view(-1, 4, D // 4)}
        output = {f"{tower}_slots": tensor for tower, tensor in slots.items()}
        output |= {
            f"{tower}_features": F.normalize(tensor + tensor.mean(1, True), dim=-1) for tower, tensor in slots.items()
        }
        unused = sum(0 * parameter.sum() for parameter in self.similarity.parameters())
        return {**output, "logit_scale": self.logit_scale + unused}


def train_step(loss, images, texts, towers=None):
    """Return value and gradients of one of open_clip's training steps."""
    towers = towers or Towers()
    losses = loss(**towers(images, texts), output_dict=True)
    total = sum(losses.values())
    total.backward()
    return total.detach(), towers.gradients()


def assert_same_step(actual, expected, factor=1.0, **tolerance):
    torch.testing.assert_close(actual[0], factor * expected[0], **tolerance)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(actual[1][name], factor * gradient, **tolerance)


def plugin(name, **fields):
    return PluginOptions(loss=name, loss_kwargs=OPTIONS[name], **fields)


@pytest.mark.parametrize("captions", [1, 5])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_metric_loss_with_images_as_labels(name, captions):
    outputs = Towers()(*batch(captions=captions))
    losses = build_loss(plugin(name))(**outputs, output_dict=True)
    assert list(losses) == [f"{name}_loss"], "open_clip adds up every value of the dict"
    expected = create_loss(name, **OPTIONS[name])(
        outputs["image_features"],
        torch.arange(B),
        ref_emb=outputs["text_features"],
        ref_labels=torch.tensor([image for image in range(B) for _ in range(captions)]),
    )
    torch.testing.assert_close(losses[f"{name}_loss"], expected, rtol=0, atol=1e-12)


def test_vlc_with_the_learned_scale_is_twice_open_clips_loss():
    learned = build_loss(PluginOptions(loss="vlc", loss_kwargs={"scale": "learned"}))
    expected = train_step(ClipLoss(), *batch())
    assert expected[1]["logit_scale"] != 0
    assert_same_step(train_step(learned, *batch()), expected, factor=2.0)


def test_logit_scale_and_bias_are_kept_in_the_graph():
    outputs = Towers()(*batch())
    for shape in ((), (1,)):
        scale = torch.full(shape, 14.0, requires_grad=True)
        bias = torch.full(shape, -10.0, requires_grad=True)
        loss = build_loss(plugin("unified"))(outputs["image_features"], outputs["text_features"], scale, bias)
        assert loss.ndim == 0
        gradients = torch.autograd.grad(loss, [scale, bias])
        assert all(gradient.shape == shape and gradient.item() == 0 for gradient in gradients)


@pytest.mark.parametrize("name", [name for name in list_losses() if "scale" in loss_options(name)])
def test_a_one_dimensional_learned_scale(name):
    outputs = Towers()(*batch())
    loss = build_loss(PluginOptions(loss=name, loss_kwargs={"scale": "learned"}))
    values = [
        loss(outputs["image_features"], outputs["text_features"], torch.full(shape, 14.0, dtype=torch.float64))
        for shape in ((), (1,))
    ]
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=0)
    assert values[1].ndim == 0
    expected = build_loss(PluginOptions(loss=name, loss_kwargs={"scale": 14.0}))(**outputs)
    torch.testing.assert_close(values[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", list_losses())
def test_every_term_ends_in_loss(name):
    """open_clip 4.x trains on no other."""
    options, outputs = PluginOptions(loss=name), Towers()(*batch())
    terms = build_loss(options)(**outputs, output_dict=True)
    assert f"{name}_loss" in terms
    assert all(term.endswith("_loss") for term in terms)
    torch.testing.assert_close(sum(terms.values()), build_loss(options)(**outputs))


def test_a_miner_mines_both_directions():
    outputs = Towers()(*batch(captions=2))
    image, text = outputs["image_features"], outputs["text_features"]
    labels, text_labels = torch.arange(B), torch.arange(B).repeat_interleave(2)
    metric_loss, miner = create_loss("unified", **OPTIONS["unified"]), miners.MultiSimilarityMiner(epsilon=-0.3)
    expected = sum(
        metric_loss(query, query_labels, miner(query, query_labels, other, other_labels), other, other_labels)
        for query, query_labels, other, other_labels in (
            (image, labels, text, text_labels),
            (text, text_labels, image, labels),
        )
    )
    options = plugin("unified", miner="MultiSimilarityMiner", miner_kwargs={"epsilon": -0.3})
    actual = build_loss(options)(**outputs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert not torch.isclose(actual, build_loss(plugin("unified"))(**outputs)), "the miner must matter"


def test_a_loss_that_knows_one_direction_only_is_called_for_both():
    outputs = Towers()(*batch())
    image, text = outputs["image_features"], outputs["text_features"]
    labels = torch.arange(B)
    metric_loss = pml_losses.NTXentLoss(temperature=0.1)
    expected = metric_loss(image, labels, ref_emb=text, ref_labels=labels.clone()) + metric_loss(
        text, labels, ref_emb=image, ref_labels=labels.clone()
    )
    torch.testing.assert_close(TwoTowerLoss("nt_xent", metric_loss)(**outputs), expected)


@pytest.mark.parametrize("miner", [None, "BatchHardMiner"])
def test_symmetric_false_is_image_to_text_only(miner):
    outputs = Towers()(*batch(captions=2))
    options = PluginOptions(loss="unified", loss_kwargs={**OPTIONS["unified"], "symmetric": False}, miner=miner)
    image, text = outputs["image_features"], outputs["text_features"]
    labels, text_labels = torch.arange(B), torch.arange(B).repeat_interleave(2)
    pairs = miner and miners.BatchHardMiner()(image, labels, text, text_labels)
    metric_loss = create_loss("unified", **OPTIONS["unified"], symmetric=False)
    expected = metric_loss(image, labels, pairs, text, text_labels)
    torch.testing.assert_close(build_loss(options)(**outputs), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("miner", [None, "BatchHardMiner"])
def test_autocast_computes_in_float32(miner):
    image, text = (tensor.bfloat16() for tensor in batch(images=32))
    loss = build_loss(plugin("unified", miner=miner))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = loss(image.requires_grad_(), text, torch.tensor(14.0))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, loss(image.float(), text.float(), torch.tensor(14.0)), rtol=0, atol=0)
    assert torch.autograd.grad(actual, image)[0].dtype == torch.bfloat16


def test_autocast_does_not_reach_losses_of_others():
    image, text = (tensor.bfloat16() for tensor in batch(images=32))
    metric_loss, labels = pml_losses.NTXentLoss(temperature=0.01), torch.arange(32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = TwoTowerLoss("nt_xent", metric_loss)(image, text, torch.tensor(14.0))
    expected = sum(
        metric_loss(query.float(), labels, ref_emb=other.float(), ref_labels=labels.clone())
        for query, other in ((image, text), (text, image))
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PluginOptions(loss="unifed"), "unknown loss 'unifed' (did you mean 'unified'?)"),
        (PluginOptions(loss="unified", loss_kwargs={"marge": 1}), "unknown option 'marge' of loss 'unified'"),
        (PluginOptions(loss="triplet_hn", loss_kwargs={"scale": "learned"}), "loss 'triplet_hn' has no scale"),
        (
            PluginOptions(loss="unified", miner="BatchHard"),
            "unknown miner 'BatchHard' (did you mean 'BatchHardMiner'?)",
        ),
        (PluginOptions(loss="unified", reducer="AvgReducer"), "unknown reducer 'AvgReducer'"),
        (
            PluginOptions(loss="unified", loss_kwargs={"reducer": "MeanReducer"}, reducer="SumReducer"),
            "both name a reducer",
        ),
        (PluginOptions(loss="unified", loss_kwargs={"distance": "mil"}, distance="mil"), "both name a distance"),
        (
            PluginOptions(loss="unified", distance="LpDistance", head="set"),
            "LpDistance does not compare sets",
        ),
        (PluginOptions(loss="unified", distance="match_probability"), "trainable parameters of its own"),
        (
            PluginOptions(loss="smooth_chamfer", loss_kwargs={"base": "unified", "scal": 3}, head="set"),
            "unknown option 'scal' of loss 'smooth_chamfer' (did you mean 'scale'?)",
        ),
        (
            PluginOptions(loss="unified", loss_kwargs={"backend": "tield"}),
            "unknown backend 'tield' (did you mean 'tiled'?)",
        ),
        (
            PluginOptions(loss="unified", loss_kwargs={"backend": "tiled"}, miner="BatchHardMiner"),
            "--loss-kwargs backend=tiled cannot be used, because BatchHardMiner chooses the pairs: leave it out",
        ),
        (
            PluginOptions(loss="unified", loss_kwargs={"backend": "tiled"}, distance="LpDistance"),
            "backend=tiled cannot be used, because LpDistance is neither CosineSimilarity nor DotProductSimilarity",
        ),
        (
            PluginOptions(loss="triplet_sh", loss_kwargs={"backend": "dense"}),
            "backend=dense cannot be used, because TripletSHLoss needs all similarities",
        ),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UserError) as raised:
        build_loss(options)
    assert message in str(raised.value)


def test_a_loss_with_parameters_is_refused(monkeypatch):
    def create(name, **kwargs):
        return pml_losses.ArcFaceLoss(num_classes=3, embedding_size=D)

    monkeypatch.setattr("vl_plugins.integrations.open_clip.loss.create_loss", create)
    with pytest.raises(UserError, match="trainable parameters of its own"):
        build_loss(plugin("unified"))


@pytest.mark.parametrize("fields", [{}, {"miner": "MultiSimilarityMiner"}], ids=["one call", "miner"])
def test_warm_up_counts_training_steps(fields):
    """However often a step calls the loss, and wherever a resumed training begins."""
    record = BatchRecord(batches_per_step=2)
    loss = build_loss(PluginOptions(loss="triplet_hn", loss_kwargs={"warmup_steps": 5}, **fields), record=record)
    mined = build_loss(PluginOptions(loss="triplet_hn", **fields))
    outputs = Towers()(*batch())
    for step in (3, 4, 5, 6, 0):
        record.first_step = step
        for index, image_ids in enumerate(torch.arange(B).split(B // 2)):
            record.add(index, image_ids, None)
        for _ in range(2):
            is_mined = torch.equal(loss(**outputs), mined(**outputs))
            assert is_mined == (step >= 5)


def test_describe():
    options = plugin("unified", miner="BatchHardMiner", reducer="ThresholdReducer", reducer_kwargs={"low": 0.1})
    text = describe(options)
    assert text.startswith("unified(margin=0.2, scale=20")
    assert text.endswith("BatchHardMiner(), ThresholdReducer(low=0.1)")


SETS = {
    "sets": PluginOptions(loss="smooth_chamfer", loss_kwargs={"mmd_weight": 0.3, "diversity_weight": 0.2}, head="set"),
    "learned similarity": PluginOptions(
        loss="smooth_chamfer",
        loss_kwargs={"base": "unified", "mmd_weight": 0.3, "diversity_weight": 0.2},
        distance="match_probability",
        head="set",
    ),
    "learned scale of sets": PluginOptions(
        loss="smooth_chamfer", loss_kwargs={"base": "unified", "scale": "learned"}, head="set"
    ),
    "mined sets": PluginOptions(loss="unified", miner="BatchHardMiner", head="set"),
}


def test_sets_are_compared_by_smooth_chamfer_unless_another_similarity_is_named():
    assert type(create_pair_loss(SETS["sets"]).distance) is SmoothChamferSimilarity
    assert create_pair_loss(SETS["mined sets"]).distance.alpha == 16
    assert type(create_pair_loss(SETS["learned similarity"]).base.distance) is MatchProbability
    other = PluginOptions(loss="vlc", distance="smooth_chamfer", distance_kwargs={"alpha": 9}, head="set")
    assert create_pair_loss(other).distance.alpha == 9
    of_loss = PluginOptions(loss="vlc", loss_kwargs={"distance": "mil"}, head="set")
    assert type(create_pair_loss(of_loss).distance) is MILSimilarity
    mined = build_loss(SETS["mined sets"])
    assert mined.miner.distance is mined.loss.distance
    own = build_loss(
        PluginOptions(loss="vlc", miner="BatchHardMiner", miner_kwargs={"distance": "chamfer"}, head="set")
    )
    assert type(own.miner.distance) is ChamferSimilarity


@pytest.mark.parametrize("captions", [1, 3])
def test_terms_of_a_loss_with_regularization_are_logged_apart(captions):
    """Against the loss's own sum of them."""
    images, texts = batch(captions=captions)
    loss = build_loss(SETS["sets"])
    output = SetTowers(loss.loss.distance)(images, texts)
    terms = loss(**output, output_dict=True)
    assert list(terms) == ["smooth_chamfer_loss", "mmd_loss", "diversity_loss"]
    assert all(term > 0 for term in terms.values())
    labels = torch.arange(B)
    expected = create_loss("smooth_chamfer", **SETS["sets"].loss_kwargs)(
        output["image_features"],
        labels,
        ref_emb=output["text_features"],
        ref_labels=labels.repeat_interleave(captions),
        slots=output["image_slots"],
        ref_slots=output["text_slots"],
    )
    torch.testing.assert_close(sum(terms.values()), expected)
    torch.testing.assert_close(loss(**output), expected)
    output["image_slots"] = output["image_slots"].flip(2) * 2 + 1
    changed = loss(**output, output_dict=True)
    assert changed["diversity_loss"] != terms["diversity_loss"]
    assert changed["mmd_loss"] == terms["mmd_loss"]


def test_a_miner_does_not_regularize_twice():
    options = replace(SETS["sets"], miner="BatchHardMiner")
    output = SetTowers(SmoothChamferSimilarity())(*batch())
    once, mined = (build_loss(which)(**output, output_dict=True) for which in (SETS["sets"], options))
    for name in ("mmd_loss", "diversity_loss"):
        assert mined[name] == once[name]


def test_gradients_of_sets_accumulate_as_open_clip_accumulates_them():
    """Features of other batches of the step are cached without a gradient, slots too."""
    images, texts = batch()
    loss = build_loss(SETS["sets"])
    expected = train_step(loss, images, texts, SetTowers(loss.loss.distance))
    towers = SetTowers(loss.loss.distance)
    halves = [slice(0, B // 2), slice(B // 2, B)]
    with torch.no_grad():
        cached = [towers(images[half], texts[half]) for half in halves]
    for index, half in enumerate(halves):
        outputs = list(cached)
        outputs[index] = towers(images[half], texts[half])
        scale = outputs[index].pop("logit_scale")
        inputs = {name: torch.cat([output[name] for output in outputs]) for name in outputs[index]}
        sum(loss(**inputs, logit_scale=scale, output_dict=True).values()).backward()
    for name, gradient in towers.gradients().items():
        if name != "logit_scale":
            torch.testing.assert_close(gradient, expected[1][name])


def error_of_a_process(rank):
    """Return the error when an image feature of the second process is NaN."""
    images, texts = batch()
    if rank == 1:
        images[2] = torch.nan
    errors = []
    for local_loss in (False, True):
        loss = build_loss(plugin("vlc"), rank=rank, world_size=2, local_loss=local_loss)
        with pytest.raises(NonFiniteLossError) as raised:
            loss(images, texts, torch.tensor(14.0))
        errors.append(str(raised.value))
    return errors


def test_all_processes_stop_when_the_loss_of_one_is_not_finite():
    """The gradients of several processes are in test_distributed.py."""
    first, second = in_processes(error_of_a_process, 2)
    for found, other in zip(first, second, strict=True):
        assert found.startswith("the loss is not finite (vlc_loss nan); similarities of finite features from ")
        assert other.startswith("the loss is not finite (vlc_loss nan); 1 of 6 image features are not finite; ")
