import io
import math

import pytest
import torch

from tests.reference import goal as reference
from vl_plugins.functional.goal import PAIR_WEIGHTS, TRIPLET_WEIGHTS, Objective
from vl_plugins.plots import weights
from vl_plugins.plots.figures import COLOURS
from vl_plugins.plots.plane import similarity_grid
from vl_plugins.plots.weights import PAPER, pair_weight_curves, plot_weights, triplet_weight_diagrams
from vl_plugins.utils.errors import UserError

TRIPLET_OPTIONS = {"margin": 0.3, "tau": 4.0, "offset": 0.5}
PAIR_OPTIONS = {"alpha": 3.0, "beta": 6.0, "lam": 0.3}
OBJECTIVE = Objective(**TRIPLET_OPTIONS, **PAIR_OPTIONS)
SIMILARITIES = [-0.9, -0.25, 0.1, 0.55, 0.8]


def in_formulas(kind, s, m, alpha, beta, lam):
    """P+ and P- of a pair of similarity s, Eq. 9-13."""
    if kind == "con":
        return 1.0, 1.0
    if kind == "lin":
        return 1 - s, s
    if kind == "lin_ms":
        return (1 - m) * (1 - s), (1 + m) * s
    m = 1 if kind == "sig" else m
    return 1 / (m + math.exp(alpha * (s - lam))), 1 / (m + math.exp(-beta * (s - lam)))


def test_diagrams_are_the_papers_weights():
    similarities = torch.tensor(SIMILARITIES, dtype=torch.float64)
    diagrams = triplet_weight_diagrams(TRIPLET_WEIGHTS, similarities, OBJECTIVE)
    assert list(diagrams) == ["con", "nca", "cir"]
    for kind, diagram in diagrams.items():
        expected = [
            [reference.triplet_weight_and_violation(kind, s_p, s_n, **TRIPLET_OPTIONS)[0] for s_p in SIMILARITIES]
            for s_n in SIMILARITIES
        ]
        torch.testing.assert_close(diagram, torch.tensor(expected, dtype=torch.float64))


def test_curves_are_the_papers_weights():
    similarities = torch.tensor(SIMILARITIES, dtype=torch.float64)
    curves = pair_weight_curves(PAIR_WEIGHTS, similarities, OBJECTIVE, relative=[0.1, 2])
    assert list(curves) == [
        ("con", None),
        ("lin", None),
        ("sig", None),
        ("sig_ms", 0.1),
        ("sig_ms", 2),
        ("lin_ms", 0.1),
        ("lin_ms", 2),
    ]
    for (kind, m), curve in curves.items():
        expected = zip(*(in_formulas(kind, s, m, **PAIR_OPTIONS) for s in SIMILARITIES), strict=True)
        for side, values in zip(curve, expected, strict=True):
            torch.testing.assert_close(side, torch.tensor(values, dtype=torch.float64))


@pytest.fixture
def figure(tmp_path, monkeypatch):
    """The figure that ``plot_weights`` draws with the arguments given."""
    pytest.importorskip("matplotlib")

    def draw(*kinds, **options):
        figures = []
        monkeypatch.setattr(weights, "write_figure", lambda figure, out: figures.append(figure))
        plot_weights(tmp_path / "weights.png", *kinds, **options)
        (figure,) = figures
        return figure

    return draw


def diagrams_and_curves(figure):
    return [axes for axes in figure.axes if axes.images], [
        axes for axes in figure.axes if axes.lines and not axes.images
    ]


def test_defaults_are_the_papers_figures(figure):
    diagrams, curves = diagrams_and_curves(figure())
    assert [axes.get_title() for axes in diagrams] == ["con  (m = 0.2)", "nca  (τ = 10)", "cir  (τ = 10, offset = 0)"]
    assert [axes.get_title() for axes in curves] == ["positive pair", "negative pair"]
    labels = ["con", "lin", "sig", "sig_ms, $m_+ = m_- = 0.1$", "lin_ms, $m_+ = m_- = 0.1$"]
    assert [[line.get_label() for line in axes.lines] for axes in curves] == [labels, labels]
    assert [text.get_text() for text in curves[0].get_legend().get_texts()] == labels
    assert [text.get_text() for text in diagrams[0].get_legend().get_texts()] == ["$s_p = s_n$"]
    assert Objective(**reference.DEFAULTS) == PAPER


def points_of_contours(axes):
    return [point for lines in axes.collections for path in lines.get_paths() for point in path.vertices.tolist()]


def test_contours_of_equal_triplet_weight(figure):
    """Eq. 5 is a step, Eq. 7 constant on parallels of the diagonal, Eq. 8 on circles around (1, 0)."""
    (con, nca, cir), _ = diagrams_and_curves(figure())
    levels = {level: math.log(level / (1 - level)) / 10 for level in (0.1, 0.3, 0.5, 0.7, 0.9)}
    for axes, invariant in (
        (con, lambda s_p, s_n: s_n - s_p),
        (nca, lambda s_p, s_n: s_n - s_p),
        (cir, lambda s_p, s_n: math.hypot(s_p - 1, s_n) ** 2 - 1),
    ):
        found = [invariant(*point) for point in points_of_contours(axes)]
        expected = [-0.2] if axes is con else list(levels.values())
        tolerance = 2 / weights.POINTS if axes is con else 5e-4
        assert len(found) > 100
        for value in expected:
            assert any(abs(value - other) <= tolerance for other in found)
        for value in found:
            assert any(abs(value - other) <= tolerance for other in expected)
    assert [text.get_text() for text in con.texts] == ["$s_n = s_p - m$"]
    assert {text.get_text() for text in nca.texts} == {text.get_text() for text in cir.texts} == set(map(str, levels))


def test_options_reach_the_picture(figure):
    drawn = figure(objective=OBJECTIVE, relative=[0.5, 2])
    diagrams, (positive, negative) = diagrams_and_curves(drawn)
    grid = similarity_grid(weights.POINTS).tolist()
    assert [axes.images[0].get_array().shape for axes in diagrams] == [(weights.POINTS, weights.POINTS)] * 3
    for kind, axes in zip(("con", "nca", "cir"), diagrams, strict=True):
        for row, column in ((50, 380), (200, 150), (300, 260)):
            expected, _ = reference.triplet_weight_and_violation(kind, grid[column], grid[row], **TRIPLET_OPTIONS)
            assert axes.images[0].get_array()[row, column] == pytest.approx(expected, rel=1e-4)
        assert axes.images[0].get_clim() == (0, 1)
    kinds = [("con", None), ("lin", None), ("sig", None)] + [(k, m) for k in ("sig_ms", "lin_ms") for m in (0.5, 2)]
    assert len(positive.lines) == len(negative.lines) == len(kinds)
    for (kind, m), *lines in zip(kinds, positive.lines, negative.lines, strict=True):
        for side, line in enumerate(lines):
            similarities, values = line.get_data()
            assert (similarities[0], similarities[-1], len(similarities)) == (-1, 1, weights.POINTS)
            for index in (0, 130, 400):
                expected = in_formulas(kind, float(similarities[index]), m, **PAIR_OPTIONS)[side]
                assert values[index] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert [axes.get_title() for axes in diagrams] == [
        "con  (m = 0.3)",
        "nca  (τ = 4)",
        "cir  (τ = 4, offset = 0.5)",
    ]
    assert [part.texts[0].get_text() for part in drawn.subfigs] == [
        "Triplet weight T",
        "Pair weights P  (α = 3, β = 6, λ = 0.3)",
    ]


def test_curves_can_be_told_apart(figure):
    _, (positive, negative) = diagrams_and_curves(figure((), PAIR_WEIGHTS, relative=[0.1, 0.2, 0.5, 1]))
    styles = [(line.get_color(), str(line.get_linestyle()), line._dash_pattern) for line in positive.lines]
    assert len(styles) == 11
    assert len({(colour, str(pattern)) for colour, _, pattern in styles}) == 11
    assert {colour for colour, *_ in styles} == set(COLOURS[:5])
    assert [line.get_color() for line in negative.lines] == [colour for colour, *_ in styles]


def test_only_what_is_named_is_drawn(figure):
    diagrams, curves = diagrams_and_curves(figure(["cir"], ()))
    assert [axes.get_title().split()[0] for axes in diagrams] == ["cir"]
    assert not curves
    diagrams, curves = diagrams_and_curves(figure((), ["lin", "lin"]))
    assert not diagrams
    assert [[line.get_label() for line in axes.lines] for axes in curves] == [["lin"], ["lin"]]
    diagrams, curves = diagrams_and_curves(figure(["nca", "con"], ["con"]))
    assert [axes.get_title().split()[0] for axes in diagrams] == ["nca", "con"]
    assert len(curves) == 2


def test_everything_fits_into_the_picture(figure):
    for kinds in ((), (["con"], ()), (["con"], ["con"])):
        drawn = figure(*kinds)
        drawn.savefig(io.BytesIO())
        width, height = drawn.bbox.size
        for axes in drawn.axes:
            box = axes.get_tightbbox()
            assert min(box.x0, box.y0) >= -1
            assert box.x1 <= width + 1
            assert box.y1 <= height + 1
        for first in drawn.axes:
            for second in drawn.axes:
                assert first is second or not first.bbox.overlaps(second.bbox)
        diagrams, _ = diagrams_and_curves(drawn)
        (colour_bar,) = [axes for axes in drawn.axes if axes.get_ylabel() == "T"]
        assert diagrams[0].bbox.x0 < 150, "a gap to its left"
        assert 0 < colour_bar.bbox.x0 - diagrams[-1].bbox.x1 < 120


@pytest.mark.parametrize(
    ("kinds", "options", "message"),
    [
        (((), ()), {}, "there is no weight to draw"),
        ((["circle"], ()), {}, "unknown triplet_weight 'circle' .*known: cir, con, nca"),
        (((), ["sigms"]), {}, r"unknown pair_weight 'sigms' \(did you mean 'sig_ms'\?\)"),
        ((), {"relative": [0.1, -0.1]}, "relative must be a finite number >= 0, got -0.1"),
        (((), ["lin_ms"]), {"relative": [math.inf]}, "relative must be a finite number, got inf"),
        ((), {"relative": ()}, "relative must hold at least one number for pair weight sig_ms"),
    ],
)
def test_bad_arguments_are_named(tmp_path, kinds, options, message):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=message):
        plot_weights(tmp_path / "weights.png", *kinds, **options)
    assert not any(tmp_path.iterdir())


def test_lin_ms_takes_negative_relative_similarities():
    ((positive, negative),) = pair_weight_curves(["lin_ms"], torch.tensor([0.5]), relative=[-0.2]).values()
    assert (positive.item(), negative.item()) == pytest.approx((0.6, 0.4))


def test_the_suffix_is_checked_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "triplet_weight_diagrams", None)
    with pytest.raises(UserError, match=r"must end in .png, .pdf or .svg, got .*weights.jpg"):
        plot_weights(tmp_path / "weights.jpg")
