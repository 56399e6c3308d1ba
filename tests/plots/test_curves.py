import json

import pytest

from vl_plugins.errors import UserError
from vl_plugins.plots.curves import read_results


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


@pytest.mark.parametrize("name", ["Unified_loss: 3.5 (3.1) Mean_positive: 0.2 (0.2)", "Contrastive_loss: 3.5 (3.1)"])
def test_losses_are_those_of_open_clips_log(tmp_path, name):
    """The mean of the last line of each epoch, which open_clip counts from 0."""
    file = write_rows(tmp_path / "run/checkpoints/results.jsonl", row(0), row(1), row(2))
    begin = "2026-01-01,10:00:00 | INFO | Train Epoch:"
    lines = ["Start epoch 0"]
    for epoch, loss in ((0, 9.0), (0, 8.5), (1, 7.0), (0, 8.0)):
        lines.append(f"{begin} {epoch} [4/8 (50%)] LR: 0.1 Logit Scale: 14.3 {name} Loss: 1.0 ({loss})")
    (tmp_path / "run/out.log").write_text("\n".join(lines))
    assert [item.get("train_loss") for item in read_results(tmp_path / "run")] == [None, 8.0, 7.0]
    assert read_results(file) == read_results(tmp_path / "run")


@pytest.mark.parametrize("content", [b'{"epoch": 1, "rsum"', b'{"epoch": 1, "image_to_text_R@1": 1}', b"\xff"])
def test_bad_results_are_named(tmp_path, content):
    file = write_rows(tmp_path / "results.jsonl")
    with pytest.raises(UserError, match="holds no validation results"):
        read_results(file)
    file.write_bytes(json.dumps(row(1)).encode() + b"\n" + content)
    with pytest.raises(UserError, match="line 2 is no validation result: "):
        read_results(file)
