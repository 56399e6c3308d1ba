"""Parts of a training from plain data."""

import inspect

import pytest
import torch
from pytorch_metric_learning import losses, miners, reducers

from vl_plugins.integrations.pytorch_metric_learning import build_loss, build_miner, build_reducer
from vl_plugins.registry import list_components
from vl_plugins.utils.errors import UserError

EMBEDDINGS = torch.eye(6)[:, :4]
LABELS = torch.tensor([0, 0, 1, 1, 2, 2])

# What the host's classes cannot do without.
OPTIONS = {
    "ClassWeightedReducer": {"weights": torch.ones(3)},
    "CrossBatchMemory": {"loss": "ContrastiveLoss", "embedding_size": 4},
    "ManifoldLoss": {"l": 4},
    "MultipleLosses": {"losses": ["ContrastiveLoss", {"name": "unified", "margin": 0.1}]},
    "MultipleReducers": {"reducers": {"loss": "MeanReducer"}},
    "RankedListLoss": {"margin": 0.5, "Tn": 10},
    "SelfSupervisedLoss": {"loss": "NTXentLoss"},
    "ThresholdReducer": {"low": 0.1},
}
OF_CLASSES = (
    *("ArcFaceLoss", "CosFaceLoss", "NormalizedSoftmaxLoss", "ProxyAnchorLoss", "ProxyNCALoss", "SoftTripleLoss"),
    *("SphereFaceLoss", "SubCenterArcFaceLoss", "LargeMarginSoftmaxLoss"),
)
OPTIONS |= {name: {"num_classes": 3, "embedding_size": 4} for name in OF_CLASSES}
OPTIONS["P2SGradLoss"] = {"descriptors_dim": 4, "num_classes": 3}
# Parents of others, which compute nothing.
ABSTRACT = {"BaseLossWrapper", "BaseMetricLossFunction", "EmbeddingRegularizerMixin", "GenericPairLoss"}
ABSTRACT |= {"WeightRegularizerMixin", "BaseMiner", "BaseTupleMiner", "BaseSubsetBatchMiner", "BaseReducer"}


def host_classes(package):
    found = {name: value for name, value in vars(package).items() if inspect.isclass(value) and name not in ABSTRACT}
    assert found
    return found


@pytest.mark.parametrize(
    ("build", "kind", "package"),
    [(build_loss, "loss", losses), (build_miner, "miner", miners), (build_reducer, "reducer", reducers)],
    ids=["losses", "miners", "reducers"],
)
def test_every_class_of_the_host_by_its_own_name(build, kind, package):
    for name, host_class in host_classes(package).items():
        options = OPTIONS.get(name, {})
        built = build({"name": name, **options} if options else name)
        assert isinstance(built, host_class), name
        assert name in list_components(kind)


def test_parts_of_parts():
    loss = build_loss(
        {
            "name": "CrossBatchMemory",
            "embedding_size": 4,
            "loss": {
                "name": "triplet_hn",
                "margin": 0.3,
                "distance": {"name": "LpDistance", "p": 1},
                "reducer": {"name": "ThresholdReducer", "low": 0.5},
            },
            "miner": {"name": "BatchHardMiner", "distance": "DotProductSimilarity"},
        }
    )
    assert loss.loss.margin == 0.3
    assert loss.loss.distance.p == 1
    assert loss.loss.reducer.low == 0.5
    regularized = build_loss({"name": "vlc", "embedding_regularizer": {"name": "LpRegularizer", "p": 1}})
    assert regularized.embedding_regularizer.p == 1
    assert type(loss.miner.distance).__name__ == "DotProductSimilarity"
    several = build_loss(
        {"name": "MultipleLosses", "losses": {"a": "vlc", "b": "CircleLoss"}, "weights": {"a": 1, "b": 2}}
    )
    assert [type(part).__name__ for part in several.losses.values()] == ["VLCLoss", "CircleLoss"]
    set_loss = build_loss({"name": "smooth_chamfer", "base": "unified", "scale": 9})
    assert set_loss.base.scale == 9
    assert build_loss({"name": "smooth_chamfer", "base": {"name": "unified", "scale": 9}}).base.scale == 9


def test_options_and_a_specification():
    reducer = build_reducer("SumReducer")
    assert type(build_loss("unified", reducer=reducer).reducer) is type(reducer)
    with pytest.raises(UserError, match="reducer of loss 'unified' is given twice"):
        build_loss({"name": "unified", "reducer": "MeanReducer"}, reducer=reducer)


@pytest.mark.parametrize(
    ("build", "specification", "message"),
    [
        (build_loss, "unifed", "unknown loss 'unifed' .did you mean 'unified'"),
        (build_loss, "TripletMarginLos", "did you mean 'TripletMarginLoss'"),
        (build_loss, "GenericPairLoss", "unknown loss"),
        (
            build_loss,
            {"name": "unified", "marign": 1},
            "unknown option 'marign' of loss 'unified' .did you mean 'margin'",
        ),
        (build_loss, {"margin": 1}, "loss must be a name or a mapping such as"),
        (build_loss, 3, "loss must be a name"),
        (build_loss, "ArcFaceLoss", "invalid arguments for .*: .*num_classes"),
        (build_loss, {"name": "unified", "distance": "LpDistanc"}, "unknown distance 'LpDistanc'"),
        (build_miner, "BatchHardMine", "unknown miner"),
        (build_reducer, {"name": "ThresholdReducer"}, "ThresholdReducer"),
    ],
)
def test_what_is_wrong_is_said(build, specification, message):
    with pytest.raises(UserError, match=message):
        build(specification)
