import math

import pytest
import torch

from tests.reference import goal as reference
from vl_plugins.functional.goal import PAIR_WEIGHTS, TRIPLET_WEIGHTS, Objective
from vl_plugins.plots import weights
from vl_plugins.plots.plane import similarity_grid
from vl_plugins.plots.weights import PAPER, pair_weight_curves, plot_weights, triplet_weight_diagrams

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
    diagrams = triplet_weight_diagrams(similarities, OBJECTIVE)
    assert tuple(diagrams) == TRIPLET_WEIGHTS
    for kind, diagram in diagrams.items():
        expected = [
            [reference.triplet_weight_and_violation(kind, s_p, s_n, **TRIPLET_OPTIONS)[0] for s_p in SIMILARITIES]
            for s_n in SIMILARITIES
        ]
        torch.testing.assert_close(diagram, torch.tensor(expected, dtype=torch.float64))


def test_curves_are_the_papers_weights():
    curves = pair_weight_curves(torch.tensor(SIMILARITIES, dtype=torch.float64), OBJECTIVE)
    assert tuple(curves) == PAIR_WEIGHTS
    for kind, curve in curves.items():
        expected = zip(*(in_formulas(kind, s, weights.RELATIVE, **PAIR_OPTIONS) for s in SIMILARITIES), strict=True)
        for side, values in zip(curve, expected, strict=True):
            torch.testing.assert_close(side, torch.tensor(values, dtype=torch.float64))


def test_the_picture_shows_them(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(weights, "write_figure", lambda figure, out: figures.append(figure))
    plot_weights(tmp_path / "weights.png", OBJECTIVE)
    plot_weights(tmp_path / "weights.png")
    drawn, paper = figures
    diagrams = [axes for axes in drawn.axes if axes.images]
    assert [axes.get_title() for axes in diagrams] == ["con  (m = 0.3)", "nca  (τ = 4)", "cir  (τ = 4, offset = 0.5)"]
    expected = triplet_weight_diagrams(similarity_grid(weights.POINTS), OBJECTIVE)
    for axes, diagram in zip(diagrams, expected.values(), strict=True):
        assert torch.equal(torch.as_tensor(axes.images[0].get_array()), diagram)
        assert axes.images[0].get_clim() == (0, 1)
    similarities = torch.linspace(-1, 1, weights.POINTS)
    curves = [axes for axes in drawn.axes if axes.lines and not axes.images]
    for side, axes in enumerate(curves):
        for line, curve in zip(axes.lines, pair_weight_curves(similarities, OBJECTIVE).values(), strict=True):
            assert line.get_ydata().tolist() == curve[side].tolist()
        assert len({line.get_color() for line in axes.lines}) == 5
    labels = ["con", "lin", "sig", "sig_ms, $m_+ = m_- = 0.1$", "lin_ms, $m_+ = m_- = 0.1$"]
    assert [text.get_text() for text in curves[0].get_legend().get_texts()] == labels
    titles = ["Triplet weight T", "Pair weights P  (α = 3, β = 6, λ = 0.3)"]
    assert [part.texts[0].get_text() for part in drawn.subfigs] == titles
    assert [axes.get_title() for axes in paper.axes][2] == "cir  (τ = 10, offset = 0)"
    assert Objective(**reference.DEFAULTS) == PAPER
