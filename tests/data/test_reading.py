"""Data as people have them, under the name that they type: read without shards."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.archives import encode_archive, encode_picture
from vl_plugins.data import CaptionRule, CaptionSampler, ShardDataset, read_collection, training_loader
from vl_plugins.data.index import cache_folder, index_file, read_head
from vl_plugins.errors import UserError

CAPTIONS = {
    f"{number}.png": tuple(f"{number} {word}" for word in ("one", "two")[: 1 + number % 2]) for number in range(5)
}


def picture(name):
    """A picture that is as wide as its number says."""
    return encode_picture((int(name[:-4]) + 1, 5), mode="RGB")


def to_tensor(image):
    return torch.tensor([[[float(image.width)]]])


def to_tokens(captions):
    return torch.tensor([[sum(map(ord, caption))] for caption in captions])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with the pictures."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    for name in CAPTIONS:
        (tmp_path / "pictures" / name).write_bytes(picture(name))
    return tmp_path


def rows(prefix="pictures/"):
    return [(f"{prefix}{name}", caption) for name, captions in CAPTIONS.items() for caption in captions]


def write_csv(folder):
    lines = [f"{path},{caption}" for path, caption in rows()]
    lines.sort(key=lambda line: line.endswith("two"))  # so that the rows of an image are apart
    (folder / "birds.csv").write_text("\n".join(["filepath,title", *lines]))
    return "birds.csv"


def write_absolute_tsv(folder):
    lines = [f"{path}\t{caption}" for path, caption in rows(f"{folder}/pictures/")]
    (folder / "birds.tsv").write_text("\n".join(["image\tcaption", *lines]))
    return "birds.tsv"


def write_json_lines(folder):
    lines = [{"image": f"pictures/{name}", "captions": captions} for name, captions in CAPTIONS.items()]
    (folder / "birds.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return "birds.jsonl"


def write_text_files(folder):
    for name, captions in CAPTIONS.items():
        (folder / "pictures" / name).with_suffix(".txt").write_text("\n".join(captions))
    return "pictures"


def data_set():
    datasets = pytest.importorskip("datasets")
    columns = {"image": [], "caption": []}
    for name, captions in CAPTIONS.items():
        for caption in captions:
            columns["image"].append({"bytes": picture(name), "path": name})
            columns["caption"].append(caption)
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())


def write_parquet(folder):
    data_set().to_parquet(folder / "birds.parquet")
    return "birds.parquet"


def write_parquet_folder(folder):
    (folder / "birds").mkdir()
    data_set().to_parquet(folder / "birds/train-00000-of-00001.parquet")
    return "birds"


def write_parquet_pattern(folder):
    return f"{write_parquet_folder(folder)}/train-*.parquet"


def write_parquet_of_paths(folder):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    paths, captions = zip(*rows(), strict=True)
    parquet.write_table(arrow.table({"path": paths, "text": captions}), folder / "paths.parquet")
    return "paths.parquet"


def write_data_set_of_paths(folder):
    """Parquet whose pictures are paths of files, as ``to_parquet`` may write them."""
    datasets = pytest.importorskip("datasets")
    paths, captions = zip(*rows(f"{folder}/pictures/"), strict=True)
    columns = {"image": [{"bytes": None, "path": path} for path in paths], "caption": captions}
    datasets.Dataset.from_dict(columns).to_parquet(folder / "files.parquet")
    return "files.parquet"


def write_saved(folder):
    data_set().save_to_disk(folder / "saved")
    return "saved"


WRITERS = (
    write_csv,
    write_absolute_tsv,
    write_json_lines,
    write_text_files,
    write_parquet,
    write_parquet_folder,
    write_parquet_pattern,
    write_parquet_of_paths,
    write_data_set_of_paths,
    write_saved,
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A folder for what is cached."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VL_PLUGINS_CACHE", str(folder))
    if "datasets" in sys.modules:
        monkeypatch.setattr(sys.modules["datasets"].config, "HF_DATASETS_CACHE", folder)
    return folder


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_every_kind_gives_the_pictures_with_all_their_captions(folder, write):
    rule = "yes" if write is write_text_files else "auto"
    collection = read_collection(write(folder), caption_lines=rule)
    dataset = ShardDataset(collection, to_tensor, to_tokens)
    found = [(int(dataset[number].image), tuple(dataset[number].captions)) for number in range(len(dataset))]
    assert found == [(int(name[0]) + 1, captions) for name, captions in CAPTIONS.items()]
    assert collection.captions == [caption for captions in CAPTIONS.values() for caption in captions]
    assert [len(data) for data in collection.pictures(range(5)).values()] == [len(picture(name)) for name in CAPTIONS]
    assert len(set(collection.image_ids)) == 5


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("write", [write_csv, write_saved])
def test_workers_read_the_same_however_they_are_started(folder, write, method):
    dataset = ShardDataset(read_collection(write(folder)), to_tensor, to_tokens)
    sampler = CaptionSampler(dataset.collection, 2, captions_per_image="all")
    expected = [batch for _ in range(2) for batch in training_loader(dataset, sampler)]
    sampler.set_epoch(0)
    loader = DataLoader(
        dataset,
        batch_sampler=training_loader(dataset, sampler).batch_sampler,
        collate_fn=dataset.collate,
        num_workers=2,
        multiprocessing_context=method,
    )
    found = [batch for _ in range(2) for batch in loader]
    assert len(found) == len(expected) == 4
    for batch, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, batch, other))


def add_one(collection):
    collection.starts += 1


def test_processes_share_one_copy(folder):
    """What another process writes into the arrays is here, too."""
    collection = read_collection(write_csv(folder))
    process = torch.multiprocessing.get_context("spawn").Process(target=add_one, args=(collection,))
    process.start()
    process.join()
    assert collection.starts.tolist() == [1] * 5


def test_a_row_that_cannot_be_used_is_left_out_or_an_error(folder):
    with open(write_csv(folder), "a") as stream:
        stream.write("\npictures/1.png, \npictures/7.png,\n")
    with pytest.raises(UserError, match=r"birds\.csv: line 9 \(pictures/1\.png\): it has no captions"):
        read_collection("birds.csv")
    collection = read_collection("birds.csv", on_error="skip")
    assert collection.captions_per_image.tolist() == [1, 2, 1, 2, 1]
    assert collection.describe() == (
        "9 rows, 5 images with 1 to 2 captions; left out: 2, because it has no captions, or a blank one; every image "
        "needs at least one: birds.csv: line 9 (pictures/1.png), birds.csv: line 10 (pictures/7.png)"
    )


def test_paths_start_from_the_working_directory(folder, monkeypatch):
    (folder / "tables").mkdir()
    monkeypatch.chdir(folder / "tables")
    (folder / "tables/birds.csv").write_text("image,caption\n../pictures/0.png,one\n.././pictures/0.png,two\n")
    collection = read_collection("birds.csv")
    assert collection.captions_per_image.tolist() == [2]
    assert collection.pictures([0])[0] == picture("0.png")


def test_a_picture_that_is_not_there_is_a_bad_sample(folder):
    (folder / "pictures/1.png").unlink()
    dataset = ShardDataset(read_collection(write_csv(folder)), to_tensor, to_tokens)
    with pytest.raises(
        UserError,
        match=r"cannot read image 1, in birds\.csv \(.*/1\.png\): cannot read .*/1\.png: No such",
    ):
        dataset[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Path("x.csv").write_text("image,caption,split\na.jpg,one,train\nb.jpg,two,val\n"),
            "make a table of each",
        ),
        (lambda: Path("x.foo").touch(), "x.foo: it cannot be read; what can be: shards"),
        (lambda: Path("x").mkdir(), "x: it cannot be read; what can be: shards"),
        (lambda: Path("x.json").write_text('{"images": []}'), "`vl-plugins shards coco` reads Karpathy's splits"),
        (lambda: Path("x.csv").write_text("image,caption\n"), "x.csv: there is no image with a caption"),
        (lambda: None, "x.parquet does not exist"),
    ],
)
def test_what_cannot_be_read_says_what_can_be(folder, make, message):
    make()
    name = next((path.name for path in folder.iterdir() if path.name.startswith("x")), "x.parquet")
    with pytest.raises(UserError, match=message):
        read_collection(name)


def test_a_saved_data_set_of_several_splits_names_them(folder):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict(train=data_set(), test=data_set()).save_to_disk(folder / "birds")
    with pytest.raises(
        UserError, match=r"several splits, train \(5 images\), test \(5 images\): choose one, such as b"
    ):
        read_collection("birds")
    assert len(read_collection("birds/test")) == 5


# -- shards of other programs ---------------------------------------------------------------------


def recaptioned(folder, name="00000.tar"):
    """Samples with captions of two models in their json, as recaptioned sets have them."""
    members = []
    for number in range(3):
        fields = {
            "short": f"short {number}",
            "long": ["", f" long {number}", f"longer {number}"][number],
            "list": [f"listed {number}", "\u200b"],
            "captions": None,
        }
        members += [
            (f"{number}.jpeg", encode_picture((number + 1, 5), "JPEG")),
            (f"{number}.thumb", encode_picture((9, 9), "JPEG")),
            (f"{number}.json", json.dumps(fields)),
            (f"{number}.txt", f"alt {number}"),
            (f"{number}.caption", f"own {number}"),
        ]
    (folder / name).write_bytes(encode_archive(members))
    return folder / name


RULES = {
    "default": (CaptionRule(), [("alt 0",), ("alt 1",), ("alt 2",)]),
    "each field": (
        CaptionRule(fields=("long", "short")),
        [("short 0",), ("long 1", "short 1"), ("longer 2", "short 2")],
    ),
    "first field": (
        CaptionRule(fields=("long", "short"), first_field=True),
        [("short 0",), ("long 1",), ("longer 2",)],
    ),
    "lists": (CaptionRule(fields=("list", "short")), [(f"listed {n}", f"short {n}") for n in range(3)]),
    "first text": (CaptionRule(fields=("list", "short"), first_field=True), [(f"short {n}",) for n in range(3)]),
    "other text": (CaptionRule(texts=("none", "caption", "txt")), [("own 0",), ("own 1",), ("own 2",)]),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("indexed_by", [None, *RULES])
def test_captions_in_other_files_and_fields(tmp_path, rule, indexed_by):
    """Whatever an index beside the shard was made by."""
    shard = str(recaptioned(tmp_path))
    if indexed_by is not None:
        read_collection(shard, caption_lines=RULES[indexed_by][0], keep_index=True)
    rule, expected = RULES[rule]
    dataset = ShardDataset(read_collection(shard, caption_lines=rule), to_tensor, to_tokens)
    assert [tuple(dataset[number].captions) for number in range(3)] == expected
    assert [record.captions for record in dataset.collection.records] == expected


def test_ids_belong_to_the_captions_that_they_were_given_with(tmp_path):
    metadata = {"captions": ["one", "two"], "caption_ids": [7, 8], "image_id": 3, "long": "a", "short": "b"}
    (tmp_path / "x.tar").write_bytes(encode_archive([("a.jpg", b""), ("a.json", json.dumps(metadata))]))
    for fields, ids in (((), [7, 8]), (("long", "short"), ["3#0", "3#1"])):
        collection = read_collection(str(tmp_path / "x.tar"), caption_lines=CaptionRule(fields=fields))
        assert (collection.image_ids, collection.caption_ids) == ([3], ids)


def test_what_a_training_has_left_out_is_an_error_elsewhere(tmp_path):
    """Also with the index that it has kept."""
    (tmp_path / "x.tar").write_bytes(encode_archive([("a.txt", "one"), ("b.jpg", b"")]))
    for _ in range(2):
        assert len(read_collection(tmp_path / "x.tar", on_error="skip", keep_index=True)) == 1
        with pytest.raises(UserError, match="b: it has no captions"):
            read_collection(tmp_path / "x.tar")


def test_a_picture_under_another_name(tmp_path):
    shard = str(recaptioned(tmp_path))
    for pictures, widths in (((), [1, 2, 3]), (("png", "thumb"), [9, 9, 9])):
        collection = read_collection(shard, caption_lines=CaptionRule(pictures=pictures))
        dataset = ShardDataset(collection, to_tensor, to_tokens)
        assert [int(dataset[number].image) for number in range(3)] == widths
    collection = read_collection(shard, caption_lines=CaptionRule(pictures=("gif",)))
    with pytest.raises(UserError, match="it has no images"):
        ShardDataset(collection, to_tensor, to_tokens)[0]


def test_fields_that_are_not_there_are_named(tmp_path):
    with pytest.raises(
        UserError, match="expected a text in the fields 'longest', 'new' of json; it has caption, jpeg, js"
    ):
        read_collection(str(recaptioned(tmp_path)), caption_lines=CaptionRule(fields=("longest", "new")))


def test_a_name_ends_at_its_first_dot(tmp_path):
    (tmp_path / "x.tar").write_bytes(encode_archive([("photo 2.0.jpg", b""), ("photo 2.0.txt", "a cat")]))
    with pytest.raises(UserError, match=r"it has 0\.jpg, 0\.txt; the name of a sample ends at the first dot"):
        read_collection(str(tmp_path / "x.tar"))
    rule = CaptionRule(texts=("0.txt",))
    assert read_collection(str(tmp_path / "x.tar"), caption_lines=rule).captions == ["a cat"]


def test_an_index_is_kept_beside_the_shard_or_in_the_cache(tmp_path, cache, caplog):
    caplog.set_level(logging.INFO)
    shard = str(recaptioned(tmp_path))
    assert read_collection(shard).captions == ["alt 0", "alt 1", "alt 2"]
    assert not os.path.exists(index_file(shard)), "without being asked for"
    expected = read_head(shard)
    read_collection(shard, keep_index=True)
    assert "shards without an index were scanned: 3 images; it is in" in caplog.text
    assert os.path.exists(index_file(shard))
    assert read_head(shard) == expected
    caplog.clear()
    read_collection(shard, keep_index=True)
    assert caplog.text == ""


def test_a_folder_that_cannot_be_written_to(tmp_path):
    shard = str(recaptioned(tmp_path))
    (tmp_path / "__index__").touch()  # a file, which stops root, too
    read_collection(shard, keep_index=True)
    assert [path.suffix for path in Path(cache_folder()).glob("*.jsonl")] == [".jsonl"]


def test_behind_a_url_the_index_is_in_the_cache_until_the_shard_changes(tmp_path, cache):
    import fsspec

    memory = fsspec.filesystem("memory")
    for number, count in ((1, 2), (2, 3)):
        members = [(f"{place}.txt", f"{number} {place}") for place in range(count)]
        memory.pipe("/test_reading/x.tar", encode_archive(members))
        collection = read_collection("memory://test_reading/x.tar", keep_index=True)
        assert len(collection) == count
        assert len(list(Path(cache_folder()).glob("*.jsonl"))) == number
    assert memory.glob("/test_reading/*") == ["/test_reading/x.tar"]


SCAN = """
import sys
from vl_plugins.data import index, read_collection
scan, scans = index.scan_shard, []
index.scan_shard = lambda *arguments: scans.append(arguments) or scan(*arguments)
print(len(read_collection(sys.argv[1], keep_index=True)), len(scans))
"""


def test_each_shard_is_scanned_by_one_process(tmp_path):
    for number in range(20):
        recaptioned(tmp_path, f"{number:05d}.tar")
    command = [sys.executable, "-c", SCAN, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    numbers = [list(map(int, process.communicate()[0].split())) for process in processes]
    assert [images for images, _ in numbers] == [60, 60, 60]
    assert sum(scans for _, scans in numbers) == 20
    assert not list(Path(cache_folder()).glob("*.lock"))


# -- images with equal captions ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("captions", "share"),
    [
        ([["a"], ["b"], ["c"]], 0),
        ([["a"], ["A "], ["c"]], 1 / 3),
        ([["a", "a"], ["b"], ["c"]], 0),
        ([["a", "x"], ["b", "a"], ["a"], ["x", "y"]], 4 / 6),
        ([["a", "b"], ["b", "a"]], 1),
    ],
)
def test_the_share_of_pairs_with_an_equal_caption(tmp_path, captions, share):
    lines = [json.dumps({"image": f"{number}.jpg", "caption": texts}) for number, texts in enumerate(captions)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    collection = read_collection(tmp_path / "x.jsonl")
    assert np.isclose(collection.share_of_equal_captions(), share)
    line = collection.describe_equal_captions(are_negatives=False)
    assert line == (
        f"; {100 * share:.2g} % of the pairs of images have an equal caption, and are no negatives" if share else ""
    )
