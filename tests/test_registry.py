import subprocess
import sys
import textwrap

import pytest
import torch
from pytorch_metric_learning import distances, reducers, regularizers
from pytorch_metric_learning.losses import BaseMetricLossFunction

import vl_plugins
from vl_plugins.distances import SmoothChamferSimilarity
from vl_plugins.losses import GOALLoss, SmoothChamferLoss, TripletHNLoss, TripletSHLoss, UnifiedLoss, VLCLoss
from vl_plugins.registry import create_loss, list_losses, load_loss, loss_options
from vl_plugins.utils.errors import UserError

OURS = {
    "goal": GOALLoss,
    "smooth_chamfer": SmoothChamferLoss,
    "triplet_hn": TripletHNLoss,
    "triplet_sh": TripletSHLoss,
    "unified": UnifiedLoss,
    "vlc": VLCLoss,
}

THIRD_PARTY_LOSS = """
from pytorch_metric_learning.losses import ContrastiveLoss

class MyLoss(ContrastiveLoss):
    '''A loss of another package.'''
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that makes a distribution with one loss importable, the way an installer would."""

    def install(distribution, name, source=THIRD_PARTY_LOSS, attribute="MyLoss"):
        module = distribution.replace("-", "_")
        root = tmp_path / distribution
        metadata = root / f"{module}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[vl_plugins.losses]\n{name} = {module}:{attribute}\n")
        (root / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(root)

    return install


@pytest.mark.parametrize("name", OURS)
def test_our_losses(name):
    assert type(create_loss(name)) is OURS[name]
    assert load_loss(name) is OURS[name]
    assert OURS[name].equation
    assert OURS[name].paper


def test_names_are_sorted():
    assert list_losses() == tuple(sorted(OURS))
    assert vl_plugins.list_losses is list_losses
    assert vl_plugins.create_loss is create_loss


def test_options():
    assert dict(loss_options("unified")) == {
        "margin": 0.2,
        "scale": 50.0,
        "weights": None,
        "relative": None,
        "symmetric": True,
        "backend": None,
        "embedding_regularizer": None,
        "embedding_reg_weight": 1,
        "reducer": None,
        "distance": None,
        "collect_stats": None,
    }
    with pytest.raises(TypeError):
        loss_options("unified")["margin"] = 1


def test_options_of_a_loss_that_holds_another_are_also_those_of_that():
    own = {
        "base": "triplet_hn",
        "alpha": 16.0,
        "set_size": 1,
        "mmd_weight": 0.01,
        "diversity_weight": 0.01,
        "distance": None,
        "backend": None,
    }
    for given in ({}, {"base": "triplet_hn"}, {"base": "unified"}, {"base": "goal", "margin": 0.1}):
        of_base = dict(loss_options(given.get("base", "triplet_hn")))
        assert loss_options("smooth_chamfer", **given) == of_base | own
        assert list(loss_options("smooth_chamfer", **given))[: len(own)] == list(own)
    assert loss_options("smooth_chamfer", base=TripletHNLoss()) == own
    assert loss_options("vlc", base="unified") == loss_options("vlc")
    with pytest.raises(UserError, match="unknown loss 'unifed'"):
        loss_options("smooth_chamfer", base="unifed")


def test_options_reach_the_loss():
    loss = create_loss(
        "unified",
        margin=0.1,
        scale=60,
        symmetric=False,
        distance="LpDistance",
        reducer=reducers.ThresholdReducer(low=0.3),
        collect_stats=True,
    )
    assert (loss.margin, loss.scale, loss.symmetric, loss.collect_stats) == (0.1, 60, False, True)
    assert type(loss.distance) is distances.LpDistance
    assert loss.reducer.low == 0.3
    regularized = create_loss("vlc", embedding_regularizer="LpRegularizer", embedding_reg_weight=0.5)
    assert type(regularized.embedding_regularizer) is regularizers.LpRegularizer
    assert regularized.embedding_reg_weight == 0.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("unifed", {}, "unknown loss 'unifed' (did you mean 'unified'?); known: " + ", ".join(OURS)),
        ("vlc", {"scael": 1}, "unknown option 'scael' of loss 'vlc' (did you mean 'scale'?); options: scale=50.0, "),
        ("unified", {"reducer": "MeanRedcer"}, "unknown reducer 'MeanRedcer' (did you mean 'MeanReducer'?); known: "),
    ],
)
def test_wrong_names_and_options(name, options, message):
    with pytest.raises(UserError) as raised:
        create_loss(name, **options)
    assert str(raised.value).startswith(message)


def test_wrong_hyper_parameters_pass_through():
    with pytest.raises(ValueError, match="margin must be a finite number >= 0, got -1") as raised:
        create_loss("unified", margin=-1)
    assert not isinstance(raised.value, UserError)


def test_loss_of_another_distribution(install):
    install("other-losses", "mine")
    assert list_losses() == tuple(sorted(["mine", *OURS]))
    loss = create_loss("mine", pos_margin=0.7)
    assert isinstance(loss, BaseMetricLossFunction)
    assert loss.pos_margin == 0.7
    assert loss_options("mine")["neg_margin"] == 1


def test_loss_of_another_distribution_held_by_one_of_ours(install):
    install("held-losses", "mine")
    loss = create_loss("smooth_chamfer", base="mine", pos_margin=0.7, set_size=2, reducer="SumReducer")
    assert type(loss.base).__name__ == "MyLoss"
    assert (loss.base.pos_margin, loss.base.distance.set_size) == (0.7, 2)
    assert type(loss.reducer.reducers["pos_loss"]) is reducers.SumReducer
    assert "neg_margin" in loss_options("smooth_chamfer", base="mine")
    images, texts, labels = torch.randn(4, 2, 3), torch.randn(5, 2, 3), torch.arange(5)
    call = {"labels": labels[:4], "ref_emb": texts, "ref_labels": labels}
    distance = SmoothChamferSimilarity()
    plain = create_loss("mine", pos_margin=0.7, distance=distance, reducer="SumReducer")(images, **call)
    torch.testing.assert_close(loss(images, **call), plain + sum(loss.regularization(images, texts).values()))
    with pytest.raises(
        UserError, match=r"unknown option 'pos_magin' .* \(did you mean 'pos_margin'\?\); options: base="
    ):
        create_loss("smooth_chamfer", base="mine", pos_magin=1)


WITHOUT_DISTANCE = """
from pytorch_metric_learning.losses import BaseMetricLossFunction

class MyLoss(BaseMetricLossFunction):
    def __init__(self, power=2):
        super().__init__()
"""


def test_loss_of_another_distribution_that_takes_no_distance_cannot_be_held(install):
    install("stubborn-losses", "mine", WITHOUT_DISTANCE)
    with pytest.raises(UserError, match="unknown option 'distance' of loss 'mine'; options: power=2"):
        create_loss("smooth_chamfer", base="mine")


def test_a_name_claimed_twice(install):
    install("first-losses", "mine")
    install("second-losses", "mine")
    install("impostor", "unified")
    assert list_losses() == tuple(sorted(["mine", *OURS]))
    with pytest.raises(UserError, match=r"loss 'mine' is provided by .*\bfirst-losses\b.*; uninstall") as raised:
        create_loss("mine")
    assert "second-losses" in str(raised.value)
    with pytest.raises(UserError, match=r"'unified' is provided by vl_plugins \(.*\) and impostor \(impostor:MyLoss\)"):
        loss_options("unified")
    assert type(create_loss("vlc")) is VLCLoss


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "AttributeError: .* has no attribute 'MyLoss'"),
        ("def", "SyntaxError: "),
        ("MyLoss = 3", "a int is not a class"),
    ],
)
def test_broken_distribution(install, source, message):
    distribution = f"broken-{abs(hash(source))}"  # imported modules stay in sys.modules
    install(distribution, "mine", source)
    with pytest.raises(UserError, match=rf"loss 'mine' of the installed distribution {distribution} .*{message}"):
        create_loss("mine")
    assert "mine" in list_losses()
    assert type(create_loss("unified")) is UnifiedLoss


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_names_need_neither_torch_nor_pytorch_metric_learning():
    loaded = run_python("""
        import sys
        from vl_plugins import create_loss, list_losses
        assert "unified" in list_losses()
        print({"torch", "pytorch_metric_learning", "numpy"} & set(sys.modules))
    """)
    assert loaded == "set()"


@pytest.mark.slow
def test_losses_need_no_optional_dependency():
    created = run_python("""
        import sys
        for name in ("open_clip", "open_clip_train", "webdataset", "PIL", "matplotlib", "timm", "yaml"):
            sys.modules[name] = None
        from vl_plugins import create_loss, list_losses
        print([type(create_loss(name)).__name__ for name in list_losses()])
    """)
    assert created == "['GOALLoss', 'SmoothChamferLoss', 'TripletHNLoss', 'TripletSHLoss', 'UnifiedLoss', 'VLCLoss']"
