import copy
import math

import pytest
import torch
from pytorch_metric_learning import losses, reducers
from pytorch_metric_learning.distances import CosineSimilarity, LpDistance

from tests.reference import goal as reference
from vl_plugins import create_loss
from vl_plugins.functional.goal import PAIR_WEIGHTS, TRIPLET_WEIGHTS
from vl_plugins.losses import TripletHNLoss, UnifiedLoss
from vl_plugins.plots import gradients
from vl_plugins.plots.gradients import _draw_gradient_sizes, gradient_sizes, plot_gradient_sizes
from vl_plugins.plots.plane import similarity_grid
from vl_plugins.utils.errors import UserError

# Of different numbers, so that swapped axes do not fit; no difference of two is a margin used here.
POSITIVES = [-0.83, -0.2, 0.31, 0.62, 0.9]
NEGATIVES = [-0.41, 0.05, 0.57, 0.88]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def distance(cosine):
    """Euclidean, of unit vectors; its derivative by the cosine is -1 / distance."""
    return math.sqrt(2 - 2 * cosine)


def same(value):
    return value, value


def step(violation, slope_p=1.0, slope_n=1.0):
    return (slope_p, slope_n) if violation > 0 else (0.0, 0.0)


def goal(kinds, s_p, s_n):
    """T times P+ and T times P-: without other pairs the relative similarities are 0."""
    triplet_kind, pair_kind = kinds
    options = reference.DEFAULTS
    weight, _ = reference.triplet_weight_and_violation(
        triplet_kind, s_p, s_n, options["margin"], options["tau"], options["offset"]
    )
    sides = reference.pair_weights(pair_kind, s_p, s_n, [], [], options["alpha"], options["beta"], options["lam"])
    return tuple(weight * abs(side) for side in sides)


# Of ours and of PML's: loss, |dL/ds_p| and |dL/ds_n|.
CLOSED_FORMS = {
    "triplet_hn": (create_loss("triplet_hn", margin=0.2), lambda p, n: step(0.2 + n - p)),
    "triplet_sh": (create_loss("triplet_sh", margin=0.5), lambda p, n: step(0.5 + n - p)),
    "unified": (
        create_loss("unified", margin=0.1, scale=7),
        lambda p, n: same(sigmoid(7 * (0.1 + n - p))),
    ),
    "vlc": (create_loss("vlc", scale=7), lambda p, n: same(7 * sigmoid(7 * (n - p)))),
    "symmetric=False": (
        create_loss("vlc", scale=3, symmetric=False),
        lambda p, n: same(3 * sigmoid(3 * (n - p))),
    ),
    "a distance": (
        TripletHNLoss(margin=0.2, distance=LpDistance()),
        lambda p, n: step(0.2 + distance(p) - distance(n), 1 / distance(p), 1 / distance(n)),
    ),
    "a sum": (
        UnifiedLoss(margin=0, scale=2, reducer=reducers.SumReducer()),
        lambda p, n: same(sigmoid(2 * (n - p))),
    ),
    "TripletMarginLoss": (
        losses.TripletMarginLoss(margin=0.1, distance=CosineSimilarity(), smooth_loss=True),
        lambda p, n: same(sigmoid(0.1 + n - p)),
    ),
    "NTXentLoss": (losses.NTXentLoss(temperature=0.2), lambda p, n: same(5 * sigmoid(5 * (n - p)))),
    "ContrastiveLoss": (
        losses.ContrastiveLoss(pos_margin=0, neg_margin=1),
        lambda p, n: (1 / distance(p), 1 / distance(n) if distance(n) < 1 else 0.0),
    ),
    "MultiSimilarityLoss": (
        losses.MultiSimilarityLoss(alpha=2, beta=5, base=0.5),
        lambda p, n: (sigmoid(2 * (0.5 - p)), sigmoid(5 * (n - 0.5))),
    ),
    "CircleLoss": (
        losses.CircleLoss(m=0, gamma=3),
        # The weights 1 - s_p and s_n are constants to it.
        lambda p, n: tuple(
            3 * weight * sigmoid(3 * (max(n, 0) * n + (1 - p) * (1 - p))) for weight in (1 - p, max(n, 0))
        ),
    ),
} | {
    f"goal {triplet_kind} {pair_kind}": (
        create_loss("goal", triplet_weight=triplet_kind, pair_weight=pair_kind, **reference.DEFAULTS),
        lambda p, n, kinds=(triplet_kind, pair_kind): goal(kinds, p, n),
    )
    for triplet_kind in TRIPLET_WEIGHTS
    for pair_kind in PAIR_WEIGHTS
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name, dtype):
    loss, closed_form = CLOSED_FORMS[name]
    sizes = gradient_sizes(loss, torch.tensor(POSITIVES, dtype=dtype), torch.tensor(NEGATIVES, dtype=dtype))
    assert len(sizes) == 2
    for side, size in enumerate(sizes):
        expected = [[closed_form(s_p, s_n)[side] for s_p in POSITIVES] for s_n in NEGATIVES]
        assert any(value > 0 for row in expected for value in row)
        expected = torch.tensor(expected, dtype=dtype)
        torch.testing.assert_close(size, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_there_are_closed_forms_of_all_combinations():
    assert len([name for name in CLOSED_FORMS if name.startswith("goal ")]) == 15


class OfSimilarities(CosineSimilarity):
    """Whatever the embeddings are, one row of similarities."""

    def __init__(self, similarities):
        super().__init__()
        self.similarities = similarities

    def forward(self, query_emb, ref_emb=None):
        return self.similarities


@pytest.mark.parametrize("name", ["goal", "unified", "vlc", "triplet_hn", "triplet_sh"])
def test_same_as_differentiating_by_a_matrix_of_similarities(name):
    sizes = gradient_sizes(
        create_loss(name), torch.tensor(POSITIVES).double(), torch.tensor(NEGATIVES, dtype=torch.float64)
    )
    index = torch.tensor([0])
    for row, s_n in enumerate(NEGATIVES):
        for column, s_p in enumerate(torch.tensor(POSITIVES).double()):
            similarities = torch.tensor([[s_p, s_n]], dtype=torch.float64, requires_grad=True)
            loss = create_loss(name, distance=OfSimilarities(similarities))
            embeddings = torch.ones(2, 3, dtype=torch.float64)
            loss(embeddings[:1], index, (index, index, index, index + 1), embeddings, torch.arange(2)).backward()
            drawn = torch.stack([size[row, column] for size in sizes])
            torch.testing.assert_close(drawn, similarities.grad[0].abs(), rtol=1e-9, atol=1e-12)


def test_the_loss_is_left_as_it_is():
    loss = create_loss("goal", warmup_steps=5)
    before = copy.deepcopy(loss.state_dict())
    gradient_sizes(loss, torch.tensor(POSITIVES), torch.tensor(NEGATIVES))
    assert loss.training
    assert loss.state_dict() == before


@pytest.mark.filterwarnings("error")
def test_no_warning_of_a_collapsed_model():
    loss = create_loss("triplet_hn", margin=100)
    grid = similarity_grid(15)
    positive, negative = gradient_sizes(loss, grid, grid)
    torch.testing.assert_close(positive, torch.ones(15, 15))
    torch.testing.assert_close(negative, torch.ones(15, 15))


class HalfOfSquares(torch.nn.Module):
    def forward(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        assert (len(embeddings), len(ref_emb)) == (1, 2), "the triplet is not alone"
        assert (labels.tolist(), ref_labels.tolist()) == ([0], [0, 1])
        assert [index.tolist() for index in indices_tuple] == [[0], [0], [0], [1]]
        return (embeddings @ ref_emb.T).square().sum() / 2


def test_any_module_that_is_called_like_a_loss():
    positive, negative = gradient_sizes(HalfOfSquares(), torch.tensor(POSITIVES), torch.tensor(NEGATIVES))
    torch.testing.assert_close(positive, torch.tensor(POSITIVES).abs().expand(4, 5))
    torch.testing.assert_close(negative, torch.tensor(NEGATIVES)[:, None].abs().expand(4, 5))


class PositiveWithNegative(torch.nn.Module):
    """Their similarity, which that of neither with the anchor determines."""

    def forward(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        return ref_emb[0] @ ref_emb[1]


def test_positive_and_negative_lie_in_perpendicular_directions():
    positive, negative = gradient_sizes(PositiveWithNegative(), torch.tensor(POSITIVES), torch.tensor(NEGATIVES))
    torch.testing.assert_close(positive, torch.tensor(NEGATIVES)[:, None].abs().expand(4, 5))
    torch.testing.assert_close(negative, torch.tensor(POSITIVES).abs().expand(4, 5))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (losses.FastAPLoss(), "FastAPLoss has no gradient for one anchor with .*ref_emb is not supported for this"),
        (losses.NCALoss(), "NCALoss has no gradient for one anchor with one positive and one negative: RuntimeError"),
        (losses.ProxyNCALoss(num_classes=2, embedding_size=3), "ProxyNCALoss has no gradient"),
        (create_loss("vlc", reducer="DoNothingReducer"), "VLCLoss has no gradient for one anchor.*TypeError"),
        (print, "builtin_function_or_method has no gradient"),
    ],
)
def test_a_loss_that_cannot_be_drawn_is_named(tmp_path, loss, message):
    grid = similarity_grid(3)
    with pytest.raises(UserError, match=message) as raised:
        gradient_sizes(loss, grid, grid)
    assert "\n" not in str(raised.value)
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match=f"^mine: {message}"):
        plot_gradient_sizes({"mine": loss}, tmp_path / "gradients.png")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong", [torch.tensor([0.0, 1.0]), torch.tensor([-1.0]), torch.tensor([math.nan]), torch.tensor(0.5)]
)
def test_cosines_that_have_no_direction_are_refused(wrong):
    right = torch.tensor([0.5])
    with pytest.raises(ValueError, match=r"positive_similarities must be a vector of cosines inside \(-1, 1\)"):
        gradient_sizes(create_loss("vlc"), wrong, right)
    with pytest.raises(ValueError, match=r"negative_similarities must be a vector of cosines inside \(-1, 1\)"):
        gradient_sizes(create_loss("vlc"), right, wrong)


def test_margins_in_use_part_the_points_of_the_picture():
    """Where a difference of two similarities equals a margin, rounding would decide between 0 and 1."""
    grid = similarity_grid(gradients.POINTS).double()
    differences = grid[:, None] - grid[None, :]
    for margin in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5):
        assert (differences - margin).abs().min() > 1e-3


def test_each_panel_holds_the_sizes_of_its_pair(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(gradients, "write_figure", lambda figure, out: figures.append(figure))
    monkeypatch.setattr(gradients, "POINTS", 6)
    chosen = {"a loss": create_loss("goal"), "another": create_loss("unified", scale=3)}
    plot_gradient_sizes(chosen, tmp_path / "gradients.png")
    (figure,) = figures
    grid = similarity_grid(6)
    expected = [size for loss in chosen.values() for size in gradient_sizes(loss, grid, grid)]
    assert not torch.equal(expected[0], expected[1])
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.images[0].get_array().tolist() for axes in panels] == [size.tolist() for size in expected]
    assert [axes.get_title() for axes in panels] == [
        "gradient at the positive pair",
        "gradient at the negative pair",
    ] * 2
    assert [part.texts[0].get_text() for part in figure.subfigs] == list(chosen)
    bars = [axes.get_ylabel() for axes in figure.axes if not axes.images]
    assert bars == [r"$|\partial L / \partial s_p|$", r"$|\partial L / \partial s_n|$"] * 2
    assert panels[0].get_legend().get_texts()[0].get_text() == "$s_p = s_n$"


def test_a_picture(tmp_path):
    pil_image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "gradients.png"
    sizes = torch.rand(2, 4, 4)
    gradients.write_figure(_draw_gradient_sizes({"a": sizes, "b": sizes}), out)
    with pil_image.open(out) as picture:
        assert picture.size == (1080, 912)


def test_nothing_is_computed_for_a_picture_that_cannot_be(tmp_path, monkeypatch):
    monkeypatch.setattr(gradients, "gradient_sizes", None)
    with pytest.raises(UserError, match=r"must end in .png, .pdf or .svg, got .*gradients.jpg"):
        plot_gradient_sizes({"vlc": create_loss("vlc")}, tmp_path / "gradients.jpg")
    with pytest.raises(UserError, match="there is no loss to draw"):
        plot_gradient_sizes({}, tmp_path / "gradients.png")
