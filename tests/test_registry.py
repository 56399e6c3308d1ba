import pytest
import torch
from pytorch_metric_learning import distances, miners, reducers, regularizers

import vl_plugins
from vl_plugins.distances import SmoothChamferSimilarity
from vl_plugins.distances.sets import SetDistance
from vl_plugins.errors import UserError
from vl_plugins.losses import GOALLoss, SmoothChamferLoss, TripletHNLoss, TripletSHLoss, UnifiedLoss, VLCLoss
from vl_plugins.losses.wrappers import CrossBatchMemory
from vl_plugins.registry import (
    REQUIRED,
    construct,
    constructor_options,
    create_component,
    create_loss,
    format_options,
    list_components,
    list_losses,
    load_loss,
    loss_options,
    resolve_components,
)
from vl_plugins.regularizers.sets import SetRegularizer

OURS = {
    "goal": GOALLoss,
    "smooth_chamfer": SmoothChamferLoss,
    "triplet_hn": TripletHNLoss,
    "triplet_sh": TripletSHLoss,
    "unified": UnifiedLoss,
    "vlc": VLCLoss,
}
SHARED = dict.fromkeys(("embedding_regularizer", "reducer", "distance", "collect_stats")) | {"embedding_reg_weight": 1}


# Losses by name


def test_our_losses():
    assert list_losses() == tuple(sorted(OURS))
    assert {name: load_loss(name) for name in OURS} == OURS
    assert {name: type(create_loss(name)) for name in OURS} == OURS
    assert (vl_plugins.list_losses, vl_plugins.create_loss) == (list_losses, create_loss)


def test_options_of_a_loss():
    own = {"margin": 0.2, "scale": 50.0, "weights": None, "relative": None, "symmetric": True, "backend": None}
    assert loss_options("unified") == own | SHARED


def test_a_loss_that_holds_another_has_its_options_too():
    own = ["base", "alpha", "set_size", "mmd_weight", "diversity_weight", "distance", "backend"]
    for base in ("triplet_hn", "unified"):
        options = loss_options("smooth_chamfer", base=base)
        assert list(options)[: len(own)] == own
        assert options == loss_options(base) | {name: options[name] for name in own}
    assert loss_options("smooth_chamfer") == loss_options("smooth_chamfer", base="triplet_hn")
    assert set(loss_options("smooth_chamfer", base=TripletHNLoss())) == {*own, *SHARED}


def test_options_reach_the_loss():
    loss = create_loss("unified", margin=0.1, distance="LpDistance", reducer=reducers.ThresholdReducer(low=0.3))
    assert (loss.margin, loss.reducer.low, type(loss.distance)) == (0.1, 0.3, distances.LpDistance)
    regularizer = create_loss("vlc", embedding_regularizer="LpRegularizer").embedding_regularizer
    assert type(regularizer) is regularizers.LpRegularizer


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
    assert list_losses() == tuple(sorted(["mine", *OURS]))
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
    install("impostor", "unified")
    with pytest.raises(
        UserError, match=r"^loss 'mine' is provided by first-losses \(.*\) and second-losses \(.*; unin"
    ):
        create_loss("mine")
    with pytest.raises(UserError, match=r"'unified' is provided by impostor \(impostor:MyLoss\) and vl_plugins \("):
        loss_options("unified")
    assert type(create_loss("vlc")) is VLCLoss


@pytest.mark.parametrize(
    ("number", "source", "message"),  # imported modules stay in sys.modules, so each has another name
    [
        (1, "import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (2, "", "AttributeError: .* has no attribute 'MyLoss'"),
        (3, "def", "SyntaxError: "),
        (4, "MyLoss = 3", "a int is not a class"),
    ],
)
def test_a_broken_entry_point(install, number, source, message):
    install(f"broken-{number}", "mine", source)
    with pytest.raises(UserError, match=rf"^loss 'mine' of the installed distribution broken-{number} .*{message}"):
        create_loss("mine")
    assert "mine" in list_losses()


# Components by class name


def subclasses(cls):
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


@pytest.mark.parametrize("package", [distances, miners, reducers, regularizers])
def test_all_components_are_listed(package):
    kind = package.__name__.rpartition(".")[2].removesuffix("s")
    base = getattr(package, f"Base{kind.capitalize()}")
    names = list_components(kind)
    modules = (package.__name__, f"vl_plugins.{kind}s")
    found = {
        cls.__name__
        for cls in subclasses(base) - {base, SetDistance, SetRegularizer}
        if cls.__module__.startswith(modules)
    }
    assert len(found) > 3
    assert names == tuple(sorted(found))


def test_losses_by_class_name():
    names = list_components("loss")
    assert {"MultipleLosses", "SelfSupervisedLoss", "TripletMarginLoss", "UnifiedLoss"} < set(names)
    assert not {"BaseMetricLossFunction", "GenericPairLoss", "PairLoss", "EmbeddingRegularizerMixin"} & set(names)
    memory = create_component("loss", "CrossBatchMemory", loss=VLCLoss(), embedding_size=4)
    assert type(memory) is CrossBatchMemory, "ours, not the one of pytorch-metric-learning"


@pytest.mark.parametrize("name", ["smooth_chamfer", "SmoothChamferSimilarity"])
def test_create_component(name):
    distance = create_component("distance", name, alpha=8.0, set_size=4)
    assert type(distance) is SmoothChamferSimilarity
    assert (distance.alpha, distance.set_size) == (8, 4)


@pytest.mark.parametrize("name", ["chamfer", "match_probability", "mil", "smooth_chamfer"])
def test_short_names(name):
    assert isinstance(resolve_components({"distance": name})["distance"], SetDistance)


def test_class_names_among_options_are_created():
    regularizer = regularizers.LpRegularizer()
    given = {"distance": "SNRDistance", "reducer": "SumReducer", "embedding_regularizer": regularizer, "margin": "0.1"}
    resolved = resolve_components(given)
    assert list(resolved) == list(given)
    assert (type(resolved["distance"]), type(resolved["reducer"])) == (distances.SNRDistance, reducers.SumReducer)
    assert (resolved["embedding_regularizer"], resolved["margin"]) == (regularizer, "0.1")


@pytest.mark.parametrize(
    ("make", "name", "options", "message"),
    [
        ("loss", "unifed", {}, "unknown loss 'unifed' (did you mean 'unified'?); known: " + ", ".join(OURS)),
        ("loss", "vlc", {"scael": 1}, "unknown option 'scael' of loss 'vlc' (did you mean 'scale'?); options: scale="),
        ("loss", "smooth_chamfer", {"base": "unifed"}, "unknown loss 'unifed'"),
        ("loss", "unified", {"reducer": "MeanRedcer"}, "unknown reducer 'MeanRedcer' (did you mean 'MeanReducer'?)"),
        ("miners", "BatchHardMiner", {}, "unknown kind of component 'miners' (did you mean 'miner'?); known: "),
        ("miner", "BatchHardMinr", {}, "unknown miner 'BatchHardMinr' (did you mean 'BatchHardMiner'?); known: Angul"),
        ("miner", "BaseMiner", {}, "unknown miner 'BaseMiner'"),
        ("distance", "SetDistance", {}, "unknown distance 'SetDistance'"),
        ("distance", "smooth_chamfr", {}, "unknown distance 'smooth_chamfr' (did you mean 'smooth_chamfer'?); known: "),
        ("miner", "BatchHardMiner", {"distance": "Cosne"}, "unknown distance 'Cosne'"),
        ("reducer", "ClassWeightedReducer", {}, "invalid arguments for reducer 'ClassWeightedReducer': "),
        ("reducer", "ThresholdReducer", {}, "invalid arguments for reducer 'ThresholdReducer': At least one of low or"),
    ],
)
def test_wrong_names_and_options(make, name, options, message):
    with pytest.raises(UserError) as raised:
        create_loss(name, **options) if make == "loss" else create_component(make, name, **options)
    assert str(raised.value).startswith(message)


# Options of constructors


class Base:
    def __init__(self, reducer=None):
        self.reducer = reducer


class Middle(Base):
    """Has no constructor of its own."""


class Mixin:
    def __init__(self, weight=1, *, power=2, **kwargs):
        super().__init__(**kwargs)


class Loss(Mixin, Middle):
    def __init__(self, size, margin=0.2, weight=3, **kwargs):
        super().__init__(weight=weight, **kwargs)
        if margin < 0:
            raise ValueError("margin must be >= 0")


class Closed(Loss):
    def __init__(self, margin=0.2):
        super().__init__(size=1, margin=margin)


class Holder(Base):
    """Passes some options to what it holds, and the others to its base class."""

    def __init__(self, held="closed", **kwargs):
        super().__init__(kwargs.pop("reducer", None))
        self.held = {"closed": Closed, "middle": Middle}[held](**kwargs)

    @classmethod
    def forwarded_options(cls, given):
        return constructor_options({"closed": Closed, "middle": Middle}[given.get("held", "closed")])


class ClosedHolder(Holder):
    def __init__(self, size=1):
        super().__init__()


class Assertive:
    def __init__(self, size=None):
        if size == 0:
            raise AssertionError


def test_constructor_options():
    assert constructor_options(Loss) == {"size": REQUIRED, "margin": 0.2, "weight": 3, "power": 2, "reducer": None}
    assert constructor_options(Middle) == {"reducer": None}
    assert constructor_options(Closed) == {"margin": 0.2}
    assert constructor_options(lambda margin=0.2, *, scale=50: None) == {"margin": 0.2, "scale": 50}
    assert constructor_options(object) == {}


def test_forwarded_options_depend_on_the_given_ones():
    assert list(constructor_options(Holder).items()) == [("held", "closed"), ("margin", 0.2), ("reducer", None)]
    assert constructor_options(Holder, {"held": "middle"}) == {"held": "closed", "reducer": None}
    assert constructor_options(ClosedHolder) == {"size": 1}
    derived = type("Derived", (Holder,), {"__init__": lambda self, size, **kwargs: None})
    assert list(constructor_options(derived)) == ["size", "held", "margin", "reducer"]


def test_construct():
    assert construct("loss", "mine", Loss, {"size": 1, "reducer": "mean"}).reducer == "mean"
    with pytest.raises(ValueError, match="margin must be >= 0") as raised:
        construct("loss", "mine", Loss, {"size": 1, "margin": -1})
    assert not isinstance(raised.value, UserError)


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (Base, {"zzz": 1}, "unknown option 'zzz' of loss 'mine'; options: reducer=None"),
        (
            Loss,
            {"margin": 0.1},
            "invalid arguments for loss 'mine': Loss.__init__() missing 1 required positional argument: 'size'; "
            "options: size, margin=0.2, weight=3, power=2, reducer=None",
        ),
        (Assertive, {"size": 0}, "invalid arguments for loss 'mine': AssertionError; options: size=None"),
    ],
)
def test_wrong_options(factory, options, message):
    with pytest.raises(UserError) as raised:
        construct("loss", "mine", factory, options)
    assert str(raised.value) == message


def test_format_options():
    assert format_options({"weights": REQUIRED, "name": "a"}) == "weights, name='a'"


@pytest.mark.parametrize("option", [{"epsilon": "abc"}, {"epsilon": [0.1]}], ids=str)
def test_options_of_components_that_are_no_numbers(option):
    with pytest.raises(UserError, match=r"^epsilon of miner 'MultiSimilarityMiner' must be a number, got "):
        create_component("miner", "MultiSimilarityMiner", **option)
