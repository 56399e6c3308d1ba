import csv
import gc
import math
from typing import NamedTuple

import pandas
import pytest
import torch

from vl_plugins.data import CaptionedImage, read_collection, write_shards
from vl_plugins.errors import UserError
from vl_plugins.retrieval import Ranks, similarity_ranks
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.per_query import PerQueryTable, check_confidence, check_table_file, write_suspects

parquet = pytest.importorskip("pyarrow.parquet")

COLUMNS = (
    "protocol model seed fold direction query image rank right_answers average_precision best_right "
    "best_right_similarity best_wrong best_wrong_similarity lead"
).split()
AWKWARD = [
    "=1+1",
    'a "quoted", text',
    "two\nlines",
    "a\r\nb",
    "\r",
    "ünï 犬 🐕",
    "'",
    " spaces ",
    ",",
    "007",
    "NULL",
    "nan",
]


class Fold(NamedTuple):
    ranks: Ranks
    images: torch.Tensor
    captions: torch.Tensor


def toy_features(images=12, captions=3, **ids):
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(images, 4, generator=generator)
    owners = torch.arange(images).repeat_interleave(captions)
    texts = embeddings[owners] + torch.randn(images * captions, 4, generator=generator)
    images, texts = (torch.nn.functional.normalize(side, dim=-1) for side in (embeddings, texts))
    return Features(images=images, captions=texts, image_of_caption=owners, **ids)


def fold_of(features, images):
    """The fold of some images, with its similarity matrix as nested lists."""
    captions = torch.isin(features.image_of_caption, images).nonzero().flatten()
    part = features.select(images, captions)
    matrix = part.images @ part.captions.T
    return Fold(similarity_ranks(matrix, part.image_of_caption), images, captions), matrix.tolist()


def loop_rows(features, images, matrix, image_names, caption_names):
    """The rows of both directions of a fold, each as a dictionary, from its similarity matrix."""
    owners = features.image_of_caption.tolist()
    captions = [caption for caption, owner in enumerate(owners) if owner in images]
    rows = []
    for row, image in enumerate(images):
        similarities = {caption: matrix[row][column] for column, caption in enumerate(captions)}
        right = {caption for caption in captions if owners[caption] == image}
        rows.append(
            loop_row("image_to_text", image_names[image], image_names[image], similarities, right, caption_names)
        )
    for column, caption in enumerate(captions):
        similarities = {image: matrix[row][column] for row, image in enumerate(images)}
        owner = owners[caption]
        rows.append(
            loop_row("text_to_image", caption_names[caption], image_names[owner], similarities, {owner}, image_names)
        )
    return rows


def loop_row(direction, query, image, similarities, right, names):
    best_right = max(right, key=similarities.get)
    wrong = [candidate for candidate in similarities if candidate not in right]
    best_wrong = max(wrong, key=similarities.get)
    ranking = sorted(similarities, key=similarities.get, reverse=True)
    precision, hits = 0.0, 0
    for place, candidate in enumerate(ranking[: len(right)], start=1):
        if candidate in right:
            hits += 1
            precision += hits / place
    return {
        "direction": direction,
        "query": query,
        "image": image,
        "rank": 1 + sum(similarities[candidate] >= similarities[best_right] for candidate in wrong),
        "right_answers": len(right),
        "average_precision": precision / len(right),
        "best_right": names[best_right],
        "best_right_similarity": similarities[best_right],
        "best_wrong": names[best_wrong],
        "best_wrong_similarity": similarities[best_wrong],
        "lead": similarities[best_right] - similarities[best_wrong],
    }


def read(file):
    """Rows as dictionaries; the fields of CSV are converted by the types of the columns."""
    if file.suffix == ".parquet":
        return parquet.read_table(file).to_pylist()
    with open(file, newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        for name in ("seed", "fold", "rank", "right_answers"):
            row[name] = int(row[name])
        for name in ("average_precision", "best_right_similarity", "best_wrong_similarity", "lead"):
            row[name] = float(row[name]) if row[name] else None
    return rows


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("with_ids", [True, False])
def test_each_query_has_the_row_of_a_loop_over_the_similarities(suffix, with_ids, tmp_path):
    image_names, caption_names = [str(index) for index in range(12)], [str(index) for index in range(36)]
    ids = {}
    if with_ids:
        image_names = AWKWARD
        caption_names = [str(1000 + index) for index in range(35)] + ["=SUM(A1)"]
        ids = {"image_ids": AWKWARD, "caption_ids": [*range(1000, 1035), "=SUM(A1)"]}
    features = toy_features(**ids)
    expected = []
    file = tmp_path / "new folder" / f"queries{suffix}"
    with PerQueryTable(file) as table:
        for number, images in enumerate(torch.arange(12).split(6)):
            fold, matrix = fold_of(features, images)
            table.add("coco-1k", "clip, large", 2, number, fold, features)
            common = {"protocol": "coco-1k", "model": "clip, large", "seed": 2, "fold": number}
            for row in loop_rows(features, images.tolist(), matrix, image_names, caption_names):
                expected.append(common | row)
    rows = read(file)
    assert [*rows[0]] == COLUMNS
    assert len(rows) == len(expected) == 48
    for row, expected_row in zip(rows, expected, strict=True):
        assert row.pop("average_precision") == pytest.approx(expected_row.pop("average_precision"), rel=1e-12)
        assert row == expected_row
    assert len({row["rank"] for row in rows}) > 3  # so that the rows could differ


def test_csv_and_parquet_are_read_as_equal_tables(tmp_path):
    features = toy_features(image_ids=AWKWARD)
    fold, _ = fold_of(features, torch.arange(12))
    files = tmp_path / "queries.csv", tmp_path / "queries.parquet"
    for file in files:
        with PerQueryTable(file) as table:
            table.add("plain", "clip", 0, 0, fold, features)
            table.add("plain", "other", 0, 0, fold, features)
    table = pandas.read_csv(files[0], dtype=str, keep_default_na=False)
    expected = pandas.read_parquet(files[1])
    for name, column in expected.items():
        convert = str if pandas.api.types.is_string_dtype(column) else column.dtype.type
        assert table[name].map(convert).tolist() == column.tolist()
    assert len(table) == 2 * (12 + 36)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_query_without_wrong_answers_has_none(suffix, tmp_path):
    """The first image is right for no caption but two, and every caption is right for it."""
    features = toy_features(images=2, captions=2)
    answers = {0: [0, 1, 2, 3], 1: [2, 3]}, {0: [0], 2: [0, 1]}
    fold = Fold(similarity_ranks(features.images @ features.captions.T, answers), torch.arange(2), torch.arange(4))
    file = tmp_path / f"queries{suffix}"
    with PerQueryTable(file) as table:
        table.add("cxc", "clip", 0, 0, fold, features)
    empty = None if suffix == ".parquet" else ""
    first, second, third, fourth = read(file)
    for row in (first, fourth):
        assert (row["best_wrong"], row["best_wrong_similarity"], row["lead"]) == (empty, None, None)
    assert (second["best_wrong_similarity"] is None, third["best_wrong"]) == (False, "1")
    assert [row["right_answers"] for row in (first, second, third, fourth)] == [4, 2, 1, 2]
    assert [row["query"] for row in (first, second, third, fourth)] == ["0", "1", "0", "2"]


def test_rows_are_written_as_they_come(tmp_path):
    """Each direction of each block is a row group of its own, so that memory has one at a time."""
    features = toy_features()
    fold, _ = fold_of(features, torch.arange(12))
    file = tmp_path / "queries.parquet"
    with PerQueryTable(file) as table:
        for seed in range(3):
            table.add("plain", "clip", seed, 0, fold, features)
    metadata = parquet.read_metadata(file)
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [12, 36] * 3


@pytest.mark.filterwarnings("error")  # of a writer that writes once more when it is garbage
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("error", [OSError("of another file"), KeyboardInterrupt(), ZeroDivisionError()])
def test_after_an_error_nothing_is_left_behind_and_the_error_stays_as_it_is(suffix, error, tmp_path):
    features = toy_features()
    fold, _ = fold_of(features, torch.arange(12))

    def write_and_fail():
        with PerQueryTable(tmp_path / f"queries{suffix}") as table:
            table.add("plain", "clip", 0, 0, fold, features)
            raise error

    with pytest.raises(type(error)) as caught:
        write_and_fail()
    assert caught.value is error
    error.with_traceback(None)  # which holds the table
    del caught
    gc.collect()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("limit", [0, 100, 10_000])
def test_a_disk_that_becomes_full_is_an_error_that_names_the_file(suffix, limit, tmp_path):
    """The largest size of a file that the system allows stands for the size of the disk."""
    resource = pytest.importorskip("resource")
    features = toy_features()
    fold, _ = fold_of(features, torch.arange(12))
    file = tmp_path / f"queries{suffix}"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write_on_small_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with PerQueryTable(file) as table:
                for seed in range(20):
                    table.add("plain", "clip", seed, 0, fold, features)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with pytest.raises(UserError) as caught:
        write_on_small_disk()
    assert str(caught.value) == f"cannot write {file}: File too large"
    assert [*tmp_path.iterdir()] == []


def test_a_table_is_written_in_its_block_only(tmp_path):
    features = toy_features()
    fold, _ = fold_of(features, torch.arange(12))
    table = PerQueryTable(tmp_path / "queries.csv")
    with pytest.raises(ValueError, match="`with` block"):
        table.add("plain", "clip", 0, 0, fold, features)
    with table:
        pass
    with pytest.raises(ValueError, match="`with` block"):
        table.add("plain", "clip", 0, 0, fold, features)
    assert read(tmp_path / "queries.csv") == []


def test_an_unfinished_table_leaves_the_former_one(tmp_path):
    file = tmp_path / "queries.csv"
    file.write_text("former")
    with pytest.raises(ZeroDivisionError), PerQueryTable(file):
        raise ZeroDivisionError
    assert file.read_text() == "former"


def test_ids_with_half_a_character_are_written(tmp_path):
    features = toy_features(image_ids=[f"a\ud83d{index}" for index in range(12)])
    fold, _ = fold_of(features, torch.arange(12))
    for suffix in (".csv", ".parquet"):
        with PerQueryTable(tmp_path / f"queries{suffix}") as table:
            table.add("plain", "clip", 0, 0, fold, features)
        assert read(tmp_path / f"queries{suffix}")[3]["image"] == "a?3"


@pytest.mark.parametrize("file", ["queries.xlsx", "queries", "queries.csv.gz", "queries.PARQUET"])
def test_other_suffixes_are_refused(file, tmp_path):
    for refuse in (check_table_file, PerQueryTable):
        with pytest.raises(UserError, match=rf"{file}: a table must end in .csv or .parquet"):
            refuse(tmp_path / file)
    check_table_file(tmp_path / "queries.csv")
    check_table_file(tmp_path / "queries.parquet")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("confidence", [0.0, 1.0, -0.5, 1.5, math.nan, math.inf])
def test_confidences_outside_of_zero_to_one_are_refused(confidence):
    with pytest.raises(UserError, match="--confidence must be above 0 and below 1"):
        check_confidence(confidence)


@pytest.fixture(scope="module")
def collection(toy_scenes, tmp_path_factory):
    """12 images with three captions each, one of them twice."""
    folder = tmp_path_factory.mktemp("awkward")
    files = sorted(path.relative_to(toy_scenes).as_posix() for path in toy_scenes.rglob("*.png"))
    images = []
    for number, text in enumerate(AWKWARD):
        captions = (f"{text} {number}", f"={number}", f"{text} {number}")
        ids = (3 * number, 3 * number + 1, 3 * number + 2)
        images.append(CaptionedImage(100 + number, files[number], captions, ids, "test", "toy", files[number]))
    write_shards(images, toy_scenes, folder, samples_per_shard=5)
    return read_collection(sorted(map(str, folder.glob("*.tar"))))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_suspects_are_the_captions_that_a_wrong_image_suits_at_least_as_well(suffix, collection, tmp_path):
    features = toy_features()
    folds, expected = [], []
    for images in torch.arange(12).split(6):
        fold, matrix = fold_of(features, images)
        folds.append(fold)
        for column, caption in enumerate(fold.captions.tolist()):
            own = collection.image_of_caption[caption] - images[0]
            right = matrix[own][column]
            wrong = max(matrix[row][column] for row in range(6) if row != own)
            if wrong >= right:
                expected.append((right - wrong, str(100 + caption // 3), collection.captions[caption]))
    pairs = list(dict.fromkeys((image, caption) for _, image, caption in sorted(expected)))
    file = tmp_path / f"suspects{suffix}"
    assert write_suspects(file, folds, collection, confidence=0.25) == len(pairs) > 10
    if suffix == ".csv":
        with open(file, newline="", encoding="utf-8") as stream:
            heading, *rows = csv.reader(stream)
        rows = [(image, caption, float(confidence)) for image, caption, confidence in rows]
    else:
        table = parquet.read_table(file)
        heading, rows = table.column_names, [tuple(row.values()) for row in table.to_pylist()]
    assert heading == ["image_id", "caption", "confidence"]
    assert rows == [(*pair, 0.25) for pair in pairs]


def test_ties_are_suspect_and_duplicates_are_one_row(collection, tmp_path):
    features = toy_features()
    equal = Fold(
        similarity_ranks(torch.full((12, 36), 0.5), features.image_of_caption), torch.arange(12), torch.arange(36)
    )
    assert write_suspects(tmp_path / "suspects.csv", [equal], collection) == 24
    perfect = Fold(similarity_ranks(torch.eye(12).repeat_interleave(3, dim=1), features.image_of_caption), *equal[1:])
    assert write_suspects(tmp_path / "none.csv", [perfect], collection) == 0
    assert (tmp_path / "none.csv").read_text() == "image_id,caption,confidence\n"


def test_suspects_of_a_wrong_name_or_confidence_write_nothing(collection, tmp_path):
    with pytest.raises(UserError, match=r"must end in \.csv or \.parquet"):
        write_suspects(tmp_path / "suspects.txt", [], collection)
    with pytest.raises(UserError, match="--confidence must be above 0 and below 1, got 1"):
        write_suspects(tmp_path / "suspects.csv", [], collection, confidence=1.0)
    assert [*tmp_path.iterdir()] == []
