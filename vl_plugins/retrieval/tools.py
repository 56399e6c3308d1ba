"""The rules by which other tools compute recall, a sentence each, and a table of the numbers that they give.

They were read in the source of open_clip 3.3.0 (``open_clip_train.train.get_clip_metrics``), clip_benchmark 1.6.2,
sentence-transformers 6.2.0 (``InformationRetrievalEvaluator``), mteb 2.26.24 with pytrec-eval-terrier 0.5.11,
torchmetrics 1.9.0, eccv-caption 0.1.0, and of VSE++'s ``evaluation.py`` at commit abe382f.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vl_plugins.retrieval.metrics import DIRECTIONS, RECALL_AT
from vl_plugins.tables import align_columns

__all__ = ["RULES", "Rule", "ToolNumbers", "format_rules", "rules_notes", "rules_table"]


class Rule(NamedTuple):
    """A tool, the name of its rule, and the rule in a sentence."""

    tool: str
    name: str
    sentence: str


OURS = Rule(
    "vl_plugins",
    "best right answer",
    "A query counts if its best right answer is among the first K, and ties count against the model.",
)
OPEN_CLIP_ROWS = Rule(
    "open_clip",
    "a row for each caption",
    "Each pair of an image and a caption is a row, so an image with five captions occurs five times, and only the "
    "query's own row is right.",
)
OPEN_CLIP_FIRST = Rule(
    "open_clip",
    "first captions",
    "The same function, called with the first caption of each image only.",
)
CLIP_BENCHMARK = Rule(
    "CLIP_benchmark",
    "any right answer",
    "A query counts if any right answer is among the first K, and `torch.topk` decides ties without an order.",
)
ST_ACCURACY = Rule(
    "sentence-transformers",
    "accuracy@K",
    "A query counts if any right answer is among the first K, and among ties the lowest id as text comes first.",
)
ST_RECALL = Rule(
    "sentence-transformers",
    "recall@K",
    "A query scores the share of its right answers that are among the first K, with ties as for accuracy@K.",
)
ST_PRECISION = Rule(
    "sentence-transformers",
    "precision@K",
    "A query scores the share of the first K that are right, with ties as for accuracy@K.",
)
MTEB_RECALL = Rule(
    "mteb",
    "recall@K",
    "A query scores the share of its right answers that are among the first K, and among ties the highest id as text "
    "comes first.",
)
MTEB_HIT_RATE = Rule(
    "mteb",
    "hit_rate@K",
    "A query counts if any right answer is among the first K, with ties as for recall@K.",
)
TORCHMETRICS_RECALL = Rule(
    "torchmetrics",
    "RetrievalRecall",
    "A query scores the share of its right answers that are among the first K and have a similarity above 0, and ties "
    "have no order.",
)
TORCHMETRICS_HIT_RATE = Rule(
    "torchmetrics",
    "RetrievalHitRate",
    "A query counts if any right answer is among the first K, whatever its similarity, and ties have no order.",
)
TORCHMETRICS_PRECISION = Rule(
    "torchmetrics",
    "RetrievalPrecision",
    "A query scores the share of the first K that are right and have a similarity above 0, and ties have no order.",
)
ECCV_CAPTION = Rule(
    "eccv_caption",
    "compute_r_at_k",
    "A query counts if any right answer is among the first K of a list that the user sorts, who decides ties.",
)
ECCV_CAPTION_FOLDS = Rule(
    "eccv_caption",
    "coco_1k_recalls",
    "The same, as the mean over five folds of 1,000 consecutive images, each with its captions as its own gallery.",
)
VSEPP = Rule(
    "VSE++",
    "i2t, t2i",
    "Each image has five captions in consecutive rows, a query counts if any right answer is among the first K, and "
    "`numpy.argsort` leaves ties without an order.",
)
VSEPP_FOLDS = Rule(
    "VSE++",
    "fold5",
    "The same, as the mean over five folds of 1,000 consecutive images, each with its captions as its own gallery.",
)
RULES = (
    OURS,
    OPEN_CLIP_ROWS,
    OPEN_CLIP_FIRST,
    CLIP_BENCHMARK,
    ST_ACCURACY,
    ST_RECALL,
    ST_PRECISION,
    MTEB_RECALL,
    MTEB_HIT_RATE,
    TORCHMETRICS_RECALL,
    TORCHMETRICS_HIT_RATE,
    TORCHMETRICS_PRECISION,
    ECCV_CAPTION,
    ECCV_CAPTION_FOLDS,
    VSEPP,
    VSEPP_FOLDS,
)


@dataclass(frozen=True)
class ToolNumbers:
    """The numbers of one rule.

    Attributes:
        tool, rule: names, as in :data:`RULES`.
        low, high: fractions [0, 1] by metric, such as ``image_to_text_R@1``: where ties count against the model, and
            where they count in its favor. They are equal where no tie decides, or where the tool has an order among
            ties. Empty where the rule does not apply.
        note: why the rule does not apply, or a remark on its numbers; empty if there is nothing to say.
    """

    tool: str
    rule: str
    low: dict[str, float]
    high: dict[str, float]
    note: str = ""


def rules_table(numbers: Sequence[ToolNumbers]) -> list[list[str]]:
    """Return a heading and a row for each rule, in percent, for :func:`vl_plugins.tables.align_columns`.

    A cell is ``58.2-58.4`` where ties decide a printed digit, and ``-`` where the rule does not apply.
    """
    heading = [""]
    for label in DIRECTIONS.values():
        for k in RECALL_AT:
            heading.append(f"{label} R@{k}" if k == RECALL_AT[0] else f"R@{k}")
    rows = [heading]
    for one in numbers:
        row = [f"{one.tool}: {one.rule}"]
        for direction in DIRECTIONS:
            for k in RECALL_AT:
                metric = f"{direction}_R@{k}"
                row.append(_cell(one.low.get(metric), one.high.get(metric)))
        rows.append(row)
    return rows


def _cell(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "-"
    ends = [f"{100 * low:.1f}", f"{100 * high:.1f}"]
    return ends[0] if ends[0] == ends[1] else "-".join(ends)


def rules_notes(numbers: Sequence[ToolNumbers]) -> list[str]:
    """Return the lines under the table: what a range means if there is one, then the notes, each with its rules."""
    lines = []
    cells = [cell for row in rules_table(numbers)[1:] for cell in row[1:]]
    if any("-" in cell[1:] for cell in cells):
        lines.append("A range has ties against the model at its low end and in its favor at its high end.")
    rules_of_note: dict[str, list[str]] = {}
    for one in numbers:
        if one.note:
            rules_of_note.setdefault(one.note, []).append(f"{one.tool}: {one.rule}")
    for note, rules in rules_of_note.items():
        lines.append(f"{', '.join(rules)}: {note}.")
    return lines


def format_rules(numbers: Sequence[ToolNumbers]) -> str:
    """Return the table and its notes as text."""
    lines = ["  ".join(row) for row in align_columns(rules_table(numbers))]
    return "\n".join([*lines, *rules_notes(numbers)])
