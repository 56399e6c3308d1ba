"""Parts of a training from plain data."""

import pytest

from vl_plugins.errors import UserError
from vl_plugins.integrations.pytorch_metric_learning import build_loss, build_reducer


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
        (build_loss, {"margin": 1}, "loss must be a name or a mapping such as"),
        (build_loss, "ArcFaceLoss", "invalid arguments for .*: .*num_classes"),
        (build_reducer, {"name": "ThresholdReducer"}, "ThresholdReducer"),
    ],
)
def test_what_is_wrong_is_said(build, specification, message):
    with pytest.raises(UserError, match=message):
        build(specification)
