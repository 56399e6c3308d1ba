"""Differences as tables and sentences."""

from dataclasses import replace

import pytest

from vl_plugins.retrieval import Difference
from vl_plugins.retrieval.comparison_table import comparison_notes, comparison_tables, format_comparison

DIRECTIONS = ("image_to_text", "text_to_image")
METRICS = [f"{way}_R@{k}" for way in DIRECTIONS for k in (1, 5, 10)]
JUDGED = [f"{way}_{metric}" for way in DIRECTIONS for metric in ("mean_average_precision_at_r", "r_precision", "R@1")]


def difference(metric="rsum", low=1.0, high=7.0, seed_error=None, seeds=(1, 1)):
    return Difference(
        metric=metric,
        value=430.0,
        baseline=430.0 - (low + high) / 2,
        low=low,
        high=high,
        image_error=1.5,
        seed_error=seed_error,
        freedom=299.0,
        images=300,
        seeds=seeds,
        fixed_gallery="precision" in metric,
    )


def of_model(**options):
    metrics = {name: difference(name) for name in (*METRICS, *JUDGED)}
    for name in ("rsum", "mean_average_precision_at_r"):
        metrics[name] = difference(name, **options)
    return metrics


def test_tables_by_hand():
    models = {
        "unified": of_model(seed_error=0.5, seeds=(3, 5)),
        "worse": of_model(low=-9.0, high=-1.0),
        "same": of_model(low=-1.0, high=2.0),
    }
    text = format_comparison(models, "clip")
    assert text.splitlines()[:4] == [
        "          seeds   RSUM  − clip  95 % interval              verdict",
        "unified  3 vs 5  430.0    +4.0   [+1.0, +7.0]               better",
        "worse    1 vs 1  430.0    -5.0   [-9.0, -1.0]  worse (checkpoints)",
        "same     1 vs 1  430.0    +0.5   [-1.0, +2.0]         not resolved",
    ]
    assert text.splitlines()[4].split() == [
        "i2t",
        "R@1",
        "i2t",
        "R@5",
        "i2t",
        "R@10",
        "t2i",
        "R@1",
        "t2i",
        "R@5",
        "t2i",
        "R@10",
    ]
    assert text.splitlines()[5].split("  ")[0] == "unified"
    assert text.splitlines()[5].count("+4.0 ± 3.0") == 6
    verdicts, details = comparison_tables(models, "clip", judged=True)
    assert verdicts[0] == ["", "seeds", "mAP@R", "− clip", "95 % interval", "verdict"]
    assert details[0] == ["", "i2t mAP@R", "i2t R-P", "i2t R@1", "t2i mAP@R", "t2i R-P", "t2i R@1"]


@pytest.mark.parametrize(
    ("models", "notes"),
    [
        (
            {"a": of_model()},
            [
                "The verdict is about RSUM. In 95 of 100 repetitions "
                "with another test set of this kind, the interval holds the "
                "true difference.",
                "With fewer than three seeds on a side, it is about these checkpoints and not about the methods: "
                "another training may differ by more.",
            ],
        ),
        (
            {"a": of_model(seed_error=0.1, seeds=(3, 3)), "b": of_model()},
            [
                "The verdict is about RSUM. In 95 of 100 repetitions "
                "with another test set of this kind, the intervals hold the "
                "true differences of all rows.",
                "b: with fewer than three seeds on a side, it is about these checkpoints and not about the methods: "
                "another training may differ by more.",
            ],
        ),
        (
            {"a": of_model(seed_error=0.1, seeds=(3, 3))},
            [
                "The verdict is about RSUM. In 95 of 100 repetitions "
                "with another test set of this kind and other seeds, the "
                "interval holds the true difference."
            ],
        ),
    ],
)
def test_notes_say_what_the_interval_is_about(models, notes):
    assert comparison_notes(models)[:-1] == notes


def test_what_the_images_resolve():
    """The largest of all rows; one half as large takes four times the images, or more seeds."""
    close = difference()
    assert close.smallest() == pytest.approx(3 + 1.5 * 0.8428, abs=1e-3)
    models = {"a": of_model(), "b": of_model(low=-0.5, high=0.5)}
    expected = (
        "A true difference of 4.3 in RSUM would be resolved by these 300 images in 4 of 5 cases. One half as large "
        "takes about 1,200 images."
    )
    assert comparison_notes(models)[-1] == expected
    noisy = {"a": {**of_model(), "rsum": replace(close, seed_error=5.0, seeds=(3, 3), low=-9.0)}}
    assert comparison_notes(noisy)[-1] == (
        "A true difference of 12.4 in RSUM would be resolved by these 300 images and these seeds in 4 of 5 cases. "
        "One half as large takes more seeds."
    )


def test_judged_answers_hold_the_gallery_fixed():
    first, *_ = comparison_notes({"a": of_model()}, judged=True)
    assert first == (
        "The verdict is about mAP@R. In 95 of 100 repetitions "
        "with other queries to the same candidates, the interval holds the "
        "true difference."
    )
