import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers

import vl_plugins
from vl_plugins.distances import SetDistance, SmoothChamferSimilarity
from vl_plugins.errors import UserError
from vl_plugins.losses import CrossBatchMemory, TripletHNLoss, UnifiedLoss, VLCLoss
from vl_plugins.registry import (
    check_registered,
    create,
    create_loss,
    list_losses,
    names,
)
from vl_plugins.regularizers import SetRegularizer

TEMPERATURE = "unknown option temperature; scale = 1 / temperature"
OURS = ("goal", "siglip", "smooth_chamfer", "triplet_hn", "triplet_sh", "unified", "vlc")


# Losses of other distributions

LOSS = """
from pytorch_metric_learning.losses import ContrastiveLoss

class MyLoss(ContrastiveLoss):
    '''A loss of another package.'''
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that makes a distribution with one loss importable, as an installer would."""

    def install(distribution, name, source=LOSS):
        module = distribution.replace("-", "_")
        root = tmp_path / distribution
        metadata = root / f"{module}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[vl_plugins.losses]\n{name} = {module}:MyLoss\n")
        (root / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(root)

    return install


def test_loss_of_another_distribution(install):
    install("other-losses", "mine")
    assert list_losses() == vl_plugins.list_losses() == tuple(sorted({"mine", *OURS}))
    assert create_loss("mine", pos_margin=0.7).pos_margin == 0.7
    held = create_loss("smooth_chamfer", base="mine", pos_margin=0.7, set_size=2, reducer="SumReducer")
    assert (type(held.base).__name__, held.base.pos_margin, held.base.distance.set_size) == ("MyLoss", 0.7, 2)
    images, texts, labels = torch.randn(4, 2, 3), torch.randn(5, 2, 3), torch.arange(5)
    call = {"labels": labels[:4], "ref_emb": texts, "ref_labels": labels}
    plain = create_loss("mine", pos_margin=0.7, distance=SmoothChamferSimilarity(), reducer="SumReducer")
    expected = plain(images, **call) + sum(held.regularization(images, texts).values())
    torch.testing.assert_close(held(images, **call), expected)


def test_a_name_claimed_twice(install):
    install("second-losses", "mine")
    install("first-losses", "mine")
    with pytest.raises(
        UserError, match=r"^loss 'mine' is provided by first-losses \(.*\) and second-losses \(.*; unin"
    ):
        create_loss("mine")
    assert type(create_loss("vlc")) is VLCLoss


def test_a_loss_by_its_module_and_class(tmp_path, monkeypatch):
    (tmp_path / "own_loss.py").write_text(LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    loss = create_loss("own_loss:MyLoss", pos_margin=0.7, distance="LpDistance")
    assert (type(loss).__name__, loss.pos_margin, type(loss.distance)) == ("MyLoss", 0.7, distances.LpDistance)
    for name in ("own_loss:Missing", "no_such_module:Loss"):
        with pytest.raises(UserError, match=f"^loss '{name}': .*{name.split(':')[name[0] == 'o']}"):
            create_loss(name)
    with pytest.raises(UserError, match="files name registered losses only"):
        check_registered({"name": "own_loss:MyLoss"})
    with pytest.raises(UserError, match="unknown loss"):
        create("loss", "own_loss:MyLoss")


# Components by class name


def subclasses(cls):
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


@pytest.mark.parametrize("package", [distances, miners, reducers, regularizers])
def test_all_components_are_listed(package):
    kind = package.__name__.rpartition(".")[2].removesuffix("s")
    base, listed = getattr(package, f"Base{kind.capitalize()}"), names(kind)
    found = {
        cls.__name__
        for cls in subclasses(base) - {base, SetDistance, SetRegularizer}
        if cls.__module__.startswith((package.__name__, f"vl_plugins.{kind}s"))
    }
    assert len(found) > 3
    short = {"chamfer", "match_probability", "mil", "smooth_chamfer"} if kind == "distance" else set()
    assert listed == tuple(sorted(found | short))


def test_losses_by_class_name():
    """Ours and those of pytorch-metric-learning; ours replace those of one name."""
    assert {*OURS, "ProxyAnchorLoss", "TripletMarginLoss", "UnifiedLoss"} < set(names("loss"))
    assert not {"BaseMetricLossFunction", "GenericPairLoss", "PairLoss", "EmbeddingRegularizerMixin"} & {*names("loss")}
    assert type(create_loss("ProxyAnchorLoss", num_classes=3, embedding_size=4)) is losses.ProxyAnchorLoss
    assert type(create_loss("CrossBatchMemory", loss="vlc", embedding_size=4)) is CrossBatchMemory


def test_specifications():
    """Names, mappings and components, also in the options of components."""
    specification = {"name": "unified", "scale": 60, "distance": {"name": "LpDistance", "p": 1}}
    loss = create("loss", specification, embedding_regularizer="LpRegularizer", reducer=None)
    assert (type(loss), loss.scale, loss.distance.p) == (UnifiedLoss, 60, 1)
    assert type(loss.embedding_regularizer) is regularizers.LpRegularizer
    assert specification["name"] == "unified", "what is given stays as it is"
    miner = miners.BatchHardMiner()
    assert create("miner", miner) is miner
    distance = create("distance", "smooth_chamfer", alpha=8.0, set_size=4)
    assert (type(distance), distance.alpha, distance.set_size) == (SmoothChamferSimilarity, 8, 4)
    with pytest.raises(TypeError, match="scale"):
        create("loss", specification, scale=4)


@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        ("loss", "vlc", {"scael": 1}, "loss 'vlc': unknown option 'scael' (did you mean 'scale'?); known: "),
        ("loss", "vlc", {"temperature": 0.07}, f"loss 'vlc': {TEMPERATURE} = 14.3"),
        (
            "loss",
            "unified",
            {"scale": "learned"},
            "scale=learned is an option of the launcher; in Python, call the loss",
        ),
        ("loss", "unified", {"temperature": "x"}, f"loss 'unified': {TEMPERATURE}"),
        ("loss", "triplet_hn", {"temperature": 0.07}, "loss 'triplet_hn': unknown option 'temperature'"),
        (
            "loss",
            "smooth_chamfer",
            {"base": "vlc", "temperature": 0.1},
            f"loss 'smooth_chamfer', base 'vlc': {TEMPERATURE} = 10",
        ),
        ("loss", "goal", {"scale": 5}, "loss 'goal': it has no scale; losses that have one: siglip, unified, vlc"),
        ("loss", "triplet_sh", {"scale": "learned"}, "loss 'triplet_sh': it has no scale; losses that have one: "),
        (
            "loss",
            "NTXentLoss",
            {"scale": 5},
            "loss 'NTXentLoss': it has no scale; losses that have one: siglip, unified, vlc",
        ),
        ("loss", "unified", {"reducer": "MeanRedcer"}, "unknown reducer 'MeanRedcer' (did you mean 'MeanReducer'?)"),
        ("loss", "unified", {"reducer": 3}, "reducer must be a name or a mapping with name: NAME, got 3"),
        ("loss", {"margin": 3}, {}, "loss must be a name or a mapping with name: NAME, got {'margin': 3}"),
        ("miners", "BatchHardMiner", {}, "unknown kind of component 'miners' (did you mean 'miner'?); known: "),
        ("miner", miners.BatchHardMiner(), {"epsilon": 3}, "miner must be a name or a mapping"),
        ("distance", "SetDistance", {}, "unknown distance 'SetDistance'"),
        ("reducer", "ClassWeightedReducer", {}, "reducer 'ClassWeightedReducer': "),
    ],
)
def test_wrong_names_and_options(kind, name, options, message):
    with pytest.raises(UserError) as raised:
        create(kind, name, **options)
    assert str(raised.value).startswith(message)


def test_classes_answer_a_temperature_and_a_scale_too():
    with pytest.raises(TypeError, match=f"^UnifiedLoss: {TEMPERATURE} = 20$"):
        UnifiedLoss(temperature=0.05)
    with pytest.raises(
        TypeError, match=r"^TripletHNLoss: it has no scale; losses that have one: siglip, unified, vlc$"
    ):
        TripletHNLoss(scale=10)
