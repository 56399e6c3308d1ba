import json

import pytest

from vl_plugins.errors import UserError
from vl_plugins.plots import curves
from vl_plugins.plots.curves import plot_training_curves, read_results


def row(epoch, rsum=300.0, positive=0.6, negative=0.4):
    return {"epoch": epoch, "rsum": rsum, "positive_similarity": positive, "hardest_negative_similarity": negative}


def write_rows(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return path


@pytest.mark.parametrize("place", ["checkpoints/results.jsonl", "results.jsonl"])
def test_one_row_an_epoch_of_a_run_folder_or_its_file(tmp_path, place):
    """The later row of an epoch counts; blank lines and rows of zero-shot classification do not."""
    rows = [row(1), row(2, rsum=10), row(3, rsum=10), row(2), row(3), row(0), {"imagenet-zeroshot-val-top1": 0.5}]
    file = write_rows(tmp_path / "run" / place, *rows)
    file.write_text(file.read_text() + "\n")
    assert read_results(tmp_path / "run") == read_results(str(file)) == [row(0), row(1), row(2), row(3)]


def test_rows_of_others_have_an_rsum_in_percent(tmp_path):
    """Those of open_clip's own validation, whose recalls are fractions, and of version 0.2."""
    host_row = {f"{way}_R@{k}": 0.25 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)} | {"epoch": 1}
    file = write_rows(tmp_path / "results.jsonl", host_row, {"epoch": 2, "rsum_percent": 300.0})
    assert [item["rsum"] for item in read_results(file)] == [150.0, 300.0]


@pytest.mark.parametrize("content", [b'{"epoch": 1, "rsum"', b'{"epoch": 1, "image_to_text_R@1": 1}', b"\xff"])
def test_bad_results_are_named(tmp_path, content):
    file = write_rows(tmp_path / "results.jsonl")
    with pytest.raises(UserError, match="holds no validation results"):
        read_results(file)
    file.write_bytes(json.dumps(row(1)).encode() + b"\n" + content)
    with pytest.raises(UserError, match="line 2 is no validation result: "):
        read_results(file)


def test_lines_hold_the_rows(monkeypatch):
    figures = []
    monkeypatch.setattr(curves, "write_figure", lambda figure, out: figures.append(figure))
    stock = [{"epoch": 1, "rsum": 150.0}, {"epoch": 2, "rsum": 300.0}]
    runs = {"stock": stock, "clip": [row(1, 100, 0.3, 0.2), row(3, 200, 0.5, 0.4)], "unified": [row(1)]}
    plot_training_curves(runs, "curves.png")
    plot_training_curves({"stock": stock}, "curves.png")
    (rsum_axes, similarity_axes), (only,) = (figure.axes for figure in figures)
    assert [line.get_label() for line in rsum_axes.lines] == ["stock", "clip", "unified"]
    assert only.lines[0].get_xydata().tolist() == rsum_axes.lines[0].get_xydata().tolist() == [[1, 150], [2, 300]]
    assert rsum_axes.lines[1].get_xydata().tolist() == [[1, 100], [3, 200]]
    positive, negative, other, *_ = similarity_axes.lines
    assert positive.get_xydata().tolist() == [[1, 0.3], [3, 0.5]]
    assert negative.get_xydata().tolist() == [[1, 0.2], [3, 0.4]]
    assert (positive.get_linestyle(), negative.get_linestyle()) == ("-", "--")
    # On a single epoch there is no line, only the markers tell them apart.
    assert positive.get_markerfacecolor() != negative.get_markerfacecolor()
    assert positive.get_color() == negative.get_color() == rsum_axes.lines[1].get_color() != other.get_color()
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (rsum_axes, similarity_axes)]
    assert legends == [["stock", "clip", "unified"], ["positives", "hardest negatives"]]
