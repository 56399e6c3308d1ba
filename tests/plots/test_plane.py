import io

import pytest
import torch

from vl_plugins.plots.figures import new_figure
from vl_plugins.plots.plane import draw_plane, similarity_grid

pytest.importorskip("matplotlib")


@pytest.fixture
def axes():
    return new_figure(4, 4).subplots()


def test_each_value_is_over_its_similarities(axes):
    """Columns, to the right, are positive similarities; rows, upwards, are negative ones."""
    positive_similarities, negative_similarities = similarity_grid(4), similarity_grid(5)
    values = 3 + positive_similarities[None, :] + 10 * negative_similarities[:, None].abs()
    image = draw_plane(axes, values)
    assert image is axes.images[0]
    assert image.get_array().tolist() == values.tolist()
    assert image.get_extent() == [-1, 1, -1, 1]
    assert image.origin == "lower"
    assert image.get_clim() == (0, values.max())
    assert "positive $s_p$" in axes.get_xlabel()
    assert "negative $s_n$" in axes.get_ylabel()
    (diagonal,) = axes.lines
    assert diagonal.get_xydata().tolist() == [[-1, -1], [1, 1]]
    assert (axes.get_xlim(), axes.get_ylim(), axes.get_aspect()) == ((-1, 1), (-1, 1), 1)


def contour_points(axes):
    return [point for lines in axes.collections for path in lines.get_paths() for point in path.vertices.tolist()]


def test_contours_lie_where_the_value_is_their_level(axes):
    positive_similarities, negative_similarities = similarity_grid(20), similarity_grid(30)
    values = 4 + positive_similarities[None, :] + 2 * negative_similarities[:, None]
    draw_plane(axes, values, largest=8, contours={2.0: "two", 5.5: "more"})
    found = {round(4 + s_p + 2 * s_n, 4) for s_p, s_n in contour_points(axes)}
    assert found == {2.0, 5.5}
    assert {text.get_text() for text in axes.texts} == {"two", "more"}
    assert axes.images[0].get_clim() == (0, 8)
    # White on the dark half of the colors, black on the other.
    colors = [tuple(color[:3]) for lines in axes.collections for color in lines.get_edgecolor()]
    assert colors == [(1, 1, 1), (0, 0, 0)]


@pytest.mark.filterwarnings("error")
def test_levels_that_no_value_reaches_are_left_out(axes):
    draw_plane(axes, torch.full((3, 3), 0.25), contours={0.1: "low", 0.25: "same", 0.9: "high"})
    assert not axes.texts
    assert not axes.collections


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("other", "largest"), [(0.0, 1.0), (0.5, 0.5), (float("inf"), 1.0)])
def test_colors_begin_at_zero_whatever_the_values(axes, other, largest):
    values = torch.zeros(3, 3)
    values[0, 1], values[2, 2] = float("nan"), other
    draw_plane(axes, values)
    assert axes.images[0].get_clim() == (0, largest)
    axes.figure.savefig(io.BytesIO())
