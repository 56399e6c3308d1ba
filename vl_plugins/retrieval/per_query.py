"""Tables of single queries: a row for each query of a model, and pairs of an image and a caption that are suspect."""

import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from vl_plugins.errors import UserError
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.ranks import DirectionRanks, Ranks
from vl_plugins.retrieval.table_files import TableFile, check_table_file, encodable

if TYPE_CHECKING:
    from vl_plugins.data import Collection

__all__ = ["PerQueryTable", "check_confidence", "check_table_file", "write_suspects"]

# Column -> type of Parquet.
PER_QUERY = {
    "protocol": "string",
    "model": "string",
    "seed": "int64",
    "fold": "int64",
    "direction": "string",
    "query": "string",
    "image": "string",
    "rank": "int64",
    "right_answers": "int64",
    "average_precision": "float64",
    "best_right": "string",
    "best_right_similarity": "float64",
    "best_wrong": "string",
    "best_wrong_similarity": "float64",
    "lead": "float64",
}
SUSPECTS = {"image_id": "string", "caption": "string", "confidence": "float64"}

Columns = dict[str, list[Any]]


class Fold(Protocol):
    """The ranks of a fold: indices in the ranks count its images and captions, which are some of all.

    Attributes:
        ranks: both directions.
        images, captions: index of each image and caption of the fold among those of the features.
    """

    @property
    def ranks(self) -> Ranks: ...
    @property
    def images(self) -> Tensor: ...
    @property
    def captions(self) -> Tensor: ...


def check_confidence(confidence: float) -> None:
    """Raise ``UserError`` unless a confidence is between 0 and 1, both excluded."""
    if not 0 < confidence < 1:  # NaN is not
        raise UserError(f"--confidence must be above 0 and below 1, got {confidence:g}")


class PerQueryTable:
    """A file with a row for each query, written block by block, that appears complete or not at all.

    Use it to look for the queries on which a model fails, to group them by properties of your own, or to join the ranks
    of several models. A row has the columns

    - ``protocol``, ``model``, ``seed`` (from 1), ``fold`` (from 1);
    - ``direction``: ``image_to_text`` or ``text_to_image``;
    - ``query``: id of the query as text, or its index where the features have no ids;
    - ``image``: id of the query, or of the image that the query describes;
    - ``rank``: of the best right answer, from 1; ``right_answers``: their number, those outside the gallery included;
    - ``average_precision``: AP@R in [0, 1];
    - ``best_right``, ``best_right_similarity``: id and similarity of the best right answer;
    - ``best_wrong``, ``best_wrong_similarity``: those of the best wrong answer, empty where every answer is right;
    - ``lead``: ``best_right_similarity - best_wrong_similarity``. Sorted by it, the table starts with suspect pairs.

    Parquet has text, int64 and float64 columns, and null for what is empty. CSV is UTF-8 with a heading, commas, and
    double quotes around texts that need them (RFC 4180); numbers have all digits. Ids are data and stay as they are:
    a spreadsheet may take one that starts with ``=`` for a formula.

    Args:
        file: ``.csv`` or ``.parquet``, a path or a URL of fsspec; its folder is created.

    Raises:
        UserError: another suffix, or the file cannot be written.

    Example::

        with PerQueryTable("queries.parquet") as table:
            table.add("plain", "clip", 1, 1, fold, features)
    """

    def __init__(self, file: str | os.PathLike[str]):
        self.table = TableFile(file, PER_QUERY)

    def __enter__(self) -> "PerQueryTable":
        self.table.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.table.__exit__(kind, error, traceback)

    def add(self, protocol: str, model: str, seed: int, fold_number: int, fold: Fold, features: Features) -> None:
        """Write the queries of both directions of a fold.

        Args:
            protocol, model: names.
            seed, fold_number: numbers from 1.
            fold: its ranks need at least one wrong candidate of each query (``top``).
            features: of the model, whole, with the ids; ``fold`` has the indices of its part.

        Raises:
            UserError: the file cannot be written.
        """
        for direction, ranks in zip(Ranks._fields, fold.ranks, strict=True):
            columns = _query_columns(direction, ranks, fold, features)
            rows = len(columns["rank"])
            columns["protocol"] = [protocol] * rows
            columns["model"] = [model] * rows
            columns["seed"] = [seed] * rows
            columns["fold"] = [fold_number] * rows
            columns["direction"] = [direction] * rows
            self.table.write(columns)


def _query_columns(direction: str, ranks: DirectionRanks, fold: Fold, features: Features) -> Columns:
    """Return the columns that are different for each query of a direction."""
    images = fold.images.cpu()
    captions = fold.captions.cpu()
    queries = ranks.queries.cpu()
    image_ids = _texts(features.image_ids, len(features.images))
    caption_ids = _texts(features.caption_ids, len(features.captions))
    if direction == "image_to_text":
        query_index = images[queries]
        image_index = query_index
        answer_index = captions
        query_ids, answer_ids = image_ids, caption_ids
    else:
        query_index = captions[queries]
        image_index = features.image_of_caption.cpu()[query_index]
        answer_index = images
        query_ids, answer_ids = caption_ids, image_ids
    best_right, right_similarity = _best_right_answers(ranks)
    best_wrong = ranks.negatives[:, 0].cpu()
    wrong_similarity = ranks.negative_similarity[:, 0].double().cpu()
    columns: Columns = {
        "query": _select(query_ids, query_index),
        "image": _select(image_ids, image_index),
        "rank": ranks.rank.tolist(),
        "right_answers": ranks.relevant.tolist(),
        "average_precision": ranks.average_precision.tolist(),
        "best_right": _select(answer_ids, answer_index[best_right]),
        "best_right_similarity": right_similarity.tolist(),
        "best_wrong": _select(answer_ids, answer_index[best_wrong]),
        "best_wrong_similarity": wrong_similarity.tolist(),
        "lead": (right_similarity - wrong_similarity).tolist(),
    }
    for row in (best_wrong < 0).nonzero().flatten().tolist():
        for name in ("best_wrong", "best_wrong_similarity", "lead"):
            columns[name][row] = None
    return columns


def _best_right_answers(ranks: DirectionRanks) -> tuple[Tensor, Tensor]:
    """Return the best right answer of each query, (Q,) int64, and its similarity, (Q,) float64."""
    first = ranks.first_positives()
    return ranks.positives[first].cpu(), ranks.positive_similarity[first].double().cpu()


def _texts(ids: Sequence[int | str] | None, number: int) -> list[str]:
    """Return ids, or else indices, as text; half a surrogate pair, which UTF-8 cannot hold, becomes a question mark."""
    if ids is None:
        ids = range(number)
    return [encodable(str(name)) for name in ids]


def _select(names: Sequence[str], indices: Tensor) -> list[Any]:
    return [names[index] for index in indices.tolist()]


def write_suspects(
    file: str | os.PathLike[str], folds: Sequence[Fold], collection: "Collection", confidence: float = 0.5
) -> int:
    """Write the captions whose best wrong image is at least as similar as their own, the most suspicious first.

    Use it to look through the pairs that are probably wrong, in a sheet or by hand, and to train with less weight on
    those that stay in the list. A caption may also be in it because it is vague, or the model weak.

    The file has a row for each suspect pair of an image and a caption, and exactly three columns, in this order:

    - ``image_id``: text, the id of the image in the shards (``image_id``; the key where they have none). Integers are
      written in decimal digits: 42 and "42" are one id.
    - ``caption``: text, the caption exactly as in the shards.
    - ``confidence``: a number above 0 and below 1, the weight of the pair: 1 would be a pair that is surely right.
      Pairs that are not in the file have confidence 1.

    CSV is UTF-8 without a byte order mark, with this heading, commas, and double quotes around texts that need them
    (RFC 4180). Parquet has two string columns and one of float64. A pair occurs once. The rows are in ascending order
    of ``best_right_similarity - best_wrong_similarity``.

    Args:
        file: ``.csv`` or ``.parquet``; appears complete or not at all.
        folds: of one model and one protocol.
        collection: images and captions of the whole features.
        confidence: written to each row, for a person or another program to change.

    Returns:
        The number of rows.

    Raises:
        UserError: another suffix, a confidence outside (0, 1), or the file cannot be written.
    """
    check_table_file(file)
    check_confidence(confidence)
    suspects: list[tuple[float, int]] = []
    for fold in folds:
        suspects += _suspect_captions(fold)
    suspects.sort()
    image_of_caption = collection.image_of_caption.tolist()
    pairs: dict[tuple[str, str], None] = {}
    for _, caption in suspects:
        image_id = collection.image_ids[image_of_caption[caption]]
        pairs[encodable(str(image_id)), encodable(collection.captions[caption])] = None
    columns: Columns = {"image_id": [], "caption": [], "confidence": [confidence] * len(pairs)}
    for image_id, text in pairs:
        columns["image_id"].append(image_id)
        columns["caption"].append(text)
    with TableFile(file, SUSPECTS) as table:
        table.write(columns)
    return len(pairs)


def _suspect_captions(fold: Fold) -> list[tuple[float, int]]:
    """Return lead and index of the captions of a fold that do not find their own image first."""
    ranks = fold.ranks.text_to_image
    _, right_similarity = _best_right_answers(ranks)
    lead = right_similarity - ranks.negative_similarity[:, 0].double().cpu()
    rows = (ranks.rank > 1).nonzero().flatten().cpu()  # ties count against the model
    captions = fold.captions.cpu()[ranks.queries.cpu()[rows]]
    return list(zip(lead[rows].tolist(), captions.tolist(), strict=True))
