import pytest
from pytorch_metric_learning import distances, miners, reducers, regularizers

from vl_plugins import create_loss
from vl_plugins import distances as own_distances
from vl_plugins import miners as own_miners
from vl_plugins import regularizers as own_regularizers
from vl_plugins.components import SHORT_NAMES, create_component, list_components, resolve_components
from vl_plugins.distances.base import SetDistance
from vl_plugins.regularizers.sets import SetRegularizer
from vl_plugins.utils.errors import UserError


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("distance", "LpDistance", {"p": 1}),
        ("distance", "SmoothChamferSimilarity", {"alpha": 8.0, "set_size": 4}),
        ("distance", "MatchProbability", {"scale": 2.0, "learnable": False, "power": 2}),
        ("miner", "MultiSimilarityMiner", {"epsilon": 0.3}),
        ("miner", "HardestNegativeMiner", {"k": 3}),
        ("reducer", "ThresholdReducer", {"low": 0.1}),
        ("regularizer", "LpRegularizer", {"power": 2}),
    ],
)
def test_create_component(kind, name, options):
    component = create_component(kind, name, **options)
    package = {"distance": distances, "miner": miners, "reducer": reducers, "regularizer": regularizers}[kind]
    own_package = {"distance": own_distances, "miner": own_miners}.get(kind)
    assert type(component) is getattr(package, name, None) or getattr(own_package, name)
    for option, value in options.items():
        assert getattr(component, option) == value


def test_every_component_of_the_installed_version_is_listed():
    for kind, package, base in (
        ("distance", distances, distances.BaseDistance),
        ("miner", miners, miners.BaseMiner),
        ("reducer", reducers, reducers.BaseReducer),
        ("regularizer", regularizers, regularizers.BaseRegularizer),
    ):
        names = list_components(kind)
        assert len(names) > 3
        assert list(names) == sorted(names)
        modules = (package.__name__, f"vl_plugins.{kind}s")
        found = {cls for cls in subclasses(base) if cls.__module__.startswith(modules)}
        assert set(names) == {cls.__name__ for cls in found - {SetDistance, SetRegularizer}}
    for kind, package in (("distance", own_distances), ("miner", own_miners), ("regularizer", own_regularizers)):
        assert set(package.__all__) < set(list_components(kind))


def subclasses(cls):
    direct = set(cls.__subclasses__())
    return direct.union(*(subclasses(subclass) for subclass in direct))


def test_short_names():
    short_names = SHORT_NAMES["distance"]
    assert set(short_names.values()) == set(own_distances.__all__)
    for short_name, name in short_names.items():
        distance = create_component("distance", short_name, set_size=3)
        assert type(distance) is getattr(own_distances, name)
        assert distance.set_size == 3
        assert type(create_loss("unified", distance=short_name).distance) is getattr(own_distances, name)
    assert resolve_components({"distance": "smooth_chamfer"})["distance"].alpha == 16


def test_names_among_the_options_are_created():
    regularizer = regularizers.LpRegularizer()
    resolved = resolve_components(
        {"distance": "SNRDistance", "reducer": "SumReducer", "embedding_regularizer": regularizer, "margin": "0.1"}
    )
    assert type(resolved["distance"]) is distances.SNRDistance
    assert type(resolved["reducer"]) is reducers.SumReducer
    assert resolved["embedding_regularizer"] is regularizer
    assert resolved["margin"] == "0.1"
    assert type(create_component("reducer", "PerAnchorReducer", reducer="SumReducer").reducer) is reducers.SumReducer


@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        ("miners", "BatchHardMiner", {}, r"unknown kind of component 'miners' \(did you mean 'miner'\?\)"),
        (
            "miner",
            "BatchHardMinr",
            {},
            r"unknown miner 'BatchHardMinr' \(did you mean 'BatchHardMiner'\?\); known: Angul",
        ),
        ("miner", "BaseMiner", {}, "unknown miner 'BaseMiner'"),
        ("miner", "HardestNegative", {}, r"unknown miner .* \(did you mean 'HardestNegativeMiner'\?\)"),
        ("miner", "MultiSimilarityMiner", {"epsilom": 1}, r"option 'epsilom' .* \(did you mean 'epsilon'\?\)"),
        ("miner", "BatchHardMiner", {"distance": "Cosine"}, r"unknown distance 'Cosine'.*CosineSimilarity"),
        (
            "miner",
            "MultiSimilarityMiner",
            {"epsilon": "abc"},
            "epsilon of miner 'MultiSimilarityMiner' must be a number",
        ),
        ("miner", "TripletMarginMiner", {"margin": [1]}, r"must be a number, got \[1\] .default: 0.2"),
        (
            "miner",
            "BatchHardMiner",
            {"distance": 5},
            "distance of miner 'BatchHardMiner' must be the name of a distance",
        ),
        ("distance", "LpDistance", {"p": "abc"}, "p of distance 'LpDistance' must be a number, got 'abc'"),
        ("loss", "TripletMarginLoss", {"swap": "no"}, "swap of loss 'TripletMarginLoss' must be true or false"),
        ("reducer", "ClassWeightedReducer", {}, "refuses to be made without options: .*'weights'; options: weights"),
        (
            "reducer",
            "ThresholdReducer",
            {"low": "abc"},
            "low of reducer .* must be a number, got 'abc'",
        ),
        ("reducer", "ThresholdReducer", {}, "At least one of low or high must be specified"),
        ("distance", "CosineSimilarity", {"is_inverted": False}, "refuses is_inverted=False: .* multiple values"),
        ("distance", "SetDistance", {}, "unknown distance 'SetDistance'"),
        ("distance", "smooth_chamfr", {}, r"unknown distance .* \(did you mean 'smooth_chamfer'\?\); known: .*chamfer"),
    ],
)
def test_wrong_names_and_options(kind, name, options, message):
    with pytest.raises(UserError, match=message):
        create_component(kind, name, **options)
