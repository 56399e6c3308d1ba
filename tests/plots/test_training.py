import json
import subprocess
import sys

import pytest

from vl_plugins.errors import UserError
from vl_plugins.plots.training import _draw_training_curves, plot_training_curves, read_results


def row(epoch, rsum=300.0, positive=0.6, negative=0.4):
    return {
        "epoch": epoch,
        "rsum_percent": rsum,
        "positive_similarity": positive,
        "hardest_negative_similarity": negative,
        "image_to_text_R@1_percent": 40.0,
    }


def host_row(epoch, recall):
    """What open_clip's own validation writes, the same recall six times."""
    recalls = {f"{way}_R@{k}": recall for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    return {"image_to_text_mean_rank": 2.5, **recalls, "clip_val_loss": 0.7, "epoch": epoch, "num_samples": 24}


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return path


@pytest.mark.parametrize("place", ["checkpoints/results.jsonl", "results.jsonl"])
def test_reads_a_run_folder_or_its_file(tmp_path, place):
    file = write_rows(tmp_path / "run" / place, [row(1), row(2)])
    assert read_results(tmp_path / "run") == read_results(str(file)) == [row(1), row(2)]


def test_later_row_of_an_epoch_counts_and_epochs_are_in_order(tmp_path):
    file = write_rows(tmp_path / "results.jsonl", [row(1), row(2, rsum=10), row(3, rsum=10), row(2), row(3), row(0)])
    assert read_results(file) == [row(0), row(1), row(2), row(3)]


def test_blank_lines_and_rows_of_zero_shot_classification_are_left_out(tmp_path):
    file = write_rows(tmp_path / "results.jsonl", [{"imagenet-zeroshot-val-top1": 0.5}, row(1)])
    file.write_text(file.read_text() + "\n")
    assert read_results(file) == [row(1)]


def test_recalls_of_open_clips_own_validation_are_fractions(tmp_path):
    file = write_rows(tmp_path / "results.jsonl", [host_row(1, 0.25), host_row(2, 0.5)])
    assert [item["rsum_percent"] for item in read_results(file)] == [150.0, 300.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"epoch": 1, "rsum_percent"', r"results.jsonl, line 2 is not JSON"),
        ("[1, 2]", r"results.jsonl, line 2 is not a JSON object: \[1, 2\]"),
        (
            '{"epoch": 1, "image_to_text_R@1": 0.5}',
            r"line 2 has no number for rsum_percent, positive_similarity, hardest_negative_similarity, which",
        ),
        (json.dumps({**row(1), "rsum_percent": "300"}), r"line 2 has no number for rsum_percent,"),
        (b"\xff\xfe", r"line 2 is not JSON"),
    ],
)
def test_bad_line_is_named(tmp_path, content, message):
    file = write_rows(tmp_path / "results.jsonl", [row(1)])
    file.write_bytes(file.read_bytes() + (content if isinstance(content, bytes) else content.encode()))
    with pytest.raises(UserError, match=message):
        read_results(file)


def test_missing_results_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no such results file or run folder: .*absent"):
        read_results(tmp_path / "absent")
    with pytest.raises(UserError, match=r"no results.jsonl in .*--val-data"):
        read_results(tmp_path)
    empty = write_rows(tmp_path / "results.jsonl", [])
    with pytest.raises(UserError, match="holds no validation results"):
        read_results(empty)


def test_lines_hold_the_rows():
    pytest.importorskip("matplotlib")
    runs = {"clip": [row(1, 100, 0.3, 0.2), row(3, 200, 0.5, 0.4)], "unified": [row(1)]}
    rsum_axes, similarity_axes = _draw_training_curves(runs).axes
    assert [line.get_label() for line in rsum_axes.lines] == ["clip", "unified"]
    assert rsum_axes.lines[0].get_xydata().tolist() == [[1, 100], [3, 200]]
    positive, negative, *_ = similarity_axes.lines
    assert positive.get_xydata().tolist() == [[1, 0.3], [3, 0.5]]
    assert negative.get_xydata().tolist() == [[1, 0.2], [3, 0.4]]
    assert (positive.get_linestyle(), negative.get_linestyle()) == ("-", "--")
    # On a single epoch there is no line, only the markers tell them apart.
    assert positive.get_markerfacecolor() != negative.get_markerfacecolor()
    assert positive.get_color() == negative.get_color() == rsum_axes.lines[0].get_color()
    assert positive.get_color() != similarity_axes.lines[2].get_color()
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (rsum_axes, similarity_axes)]
    assert legends == [["clip", "unified"], ["positives", "hardest negatives"]]


def test_runs_without_similarities(tmp_path):
    pytest.importorskip("matplotlib")
    stock = read_results(write_rows(tmp_path / "results.jsonl", [host_row(1, 0.25), host_row(2, 0.5)]))
    rsum_axes, similarity_axes = _draw_training_curves({"stock": stock, "unified": [row(1)]}).axes
    assert rsum_axes.lines[0].get_xydata().tolist() == [[1, 150], [2, 300]]
    assert similarity_axes.lines[0].get_color() == rsum_axes.lines[1].get_color()
    (rsum_axes,) = _draw_training_curves({"stock": stock}).axes
    assert [line.get_label() for line in rsum_axes.lines] == ["stock"]


def test_no_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match="at least one named run"):
        plot_training_curves({}, tmp_path / "curves.png")
    assert not any(tmp_path.iterdir())


def test_importing_it_needs_neither_torch_nor_an_extra():
    code = (
        "import sys; import vl_plugins.plots.training; "
        "print([m for m in ('torch', 'matplotlib', 'open_clip', 'webdataset', 'PIL') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
