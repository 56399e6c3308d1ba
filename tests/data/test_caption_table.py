"""Tables, and the order of images."""

import csv
import json
import random

import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip_train.data import CsvDataset

from vl_plugins.data import CaptionedImage, Columns, RejectedImage, read_table
from vl_plugins.data.captions import is_blank
from vl_plugins.data.grouping import shuffled
from vl_plugins.errors import UserError


@pytest.fixture
def write(tmp_path):
    def write_table(content, name="birds.csv"):
        file = tmp_path / name
        if isinstance(content, list):
            content = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in content)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return write_table


def facts(images):
    return [(image.image_id, image.file, image.captions, image.caption_ids, image.split) for image in images]


def joined(rows):
    """Return the captions of each image, images by their first rows."""
    captions = {}
    for name, caption in rows:
        captions.setdefault(name, []).append(caption)
    return list(captions.items())


def test_rows_of_one_image_are_joined_where_it_appears_first(write):
    table = "image,caption,split,id,object\nb.jpg,one,validation,7,f\na/a.jpg,two,train,5,\nb.jpg,x,validation,7,f\n"
    assert list(read_table(write(table), Columns(group="object"))) == [
        CaptionedImage(7, "b.jpg", ("one", "x"), (0, 1), "val", "birds", "b.jpg", "f"),
        CaptionedImage(5, "a/a.jpg", ("two",), (2,), "train", "birds", "a/a.jpg"),
    ]


def test_a_shuffled_table(write):
    rows = [(f"{number % 200}.jpg", f"caption {number}") for number in range(1000)]
    random.Random(0).shuffle(rows)
    images = read_table(write("image,caption\n" + "".join(f"{name},{caption}\n" for name, caption in rows)))
    assert [(image.file, list(image.captions)) for image in images] == joined(rows)


@pytest.mark.parametrize("separator", ["\t", ","])
def test_the_csv_of_open_clip_as_its_own_reader_reads_it(write, separator):
    captions = ['a cat, a "dog"', "two\nlines", "a\ttab"]
    table = pandas.DataFrame({"filepath": ["a/1.jpg", "a/1.jpg", "2.jpg"], "title": captions})
    file = write(table.to_csv(index=False, sep=separator), "train.csv")
    theirs = CsvDataset(file, None, "filepath", "title", sep=separator)
    ours = [(image.file, list(image.captions)) for image in read_table(file)]
    assert ours == joined(zip(theirs.images, theirs.captions, strict=True))


def test_the_tables_of_kaggles_flickr_data_sets(write):
    file = write('image,caption\na.jpg,"one , two ."\na.jpg,three .\n', "captions.txt")
    assert facts(read_table(file)) == [(0, "a.jpg", ("one , two .", "three ."), (0, 1), "train")]
    table = 'image_name| comment_number| comment\na.jpg| 0| "One" , two .\na.jpg| 1| three .\nb.jpg| 4   four .\n'
    file, columns = write(table, "results.csv"), Columns(image="image_name", captions=["comment"])
    image, rejected = read_table(file, columns)
    assert image.captions == ('"One" , two .', "three .")
    assert rejected == RejectedImage(f"{file}: line 4 (b.jpg)", "train", "2 fields, but 3 column names")


def test_absolute_paths_inside_the_root(write, tmp_path):
    root = tmp_path / "root"
    paths = f"{root}/a/1.jpg,one", "./a/1.jpg,two", "a//1.jpg,three", f"{root}/../1.jpg,x", f"{root}2/1.jpg,y"
    file = write("\n".join(["image,caption", *paths, ""]))
    for given_root in (root, f"{root}/"):
        image, *rejected = read_table(file, image_root=given_root)
        assert (image.file, image.filename, image.captions) == ("a/1.jpg", "a/1.jpg", ("one", "two", "three"))
        assert ["leads out of the image root" in item.reason for item in rejected] == [True, True]


def test_fractions_of_images_whose_split_stays_when_rows_are_added(write):
    def splits(numbers, val=0.2, **options):
        rows = "".join(f"{number}.jpg,a cat,{number // 2}\n" for number in numbers)
        images = read_table(write(f"image,caption,film\n{rows}"), val_fraction=val, test_fraction=0.1, **options)
        return {image.file: image.split for image in images}

    some, more = splits(range(0, 1000, 2)), splits(range(1000))
    assert {file: more[file] for file in some} == some
    for split, mean in (("train", 700), ("val", 200), ("test", 100)):
        # Four standard deviations, sqrt(1000 p (1 - p)).
        assert abs(list(more.values()).count(split) - mean) < 4 * (mean * (1 - mean / 1000)) ** 0.5
    assert splits(range(1000), val=0) == {file: split.replace("val", "train") for file, split in more.items()}
    grouped = splits(range(100), split_name="mine", columns=Columns(group="film"))
    assert all(grouped[f"{number}.jpg"] == grouped[f"{number + 1}.jpg"] for number in range(0, 100, 2))
    assert set(grouped.values()) == {"mine", "val", "test"}
    with pytest.raises(UserError, match=r"has splits in column 'split'; leave out val_fraction and test_fraction"):
        list(read_table(write("image,caption,split\na.jpg,one,val\n"), val_fraction=0.1))
    for fraction in (-0.1, 1, float("nan")):
        with pytest.raises(UserError, match="must be at least 0, and below 1 together"):
            splits([1], fraction)


def test_columns_by_name_and_by_choice(write):
    names = "text,caption 3,Caption,caption_12,caption1,title,image_path,filepath,image_id,id,split"
    file = write(f"{names}\n0,1,2,3,4,5,a.jpg,b.jpg,7,8,val\n1,,2, ,9,5,c.jpg,d.jpg,8,9,val\n")
    assert facts(read_table(file)) == [
        (7, "b.jpg", ("0", "1", "3", "4"), (0, 1, 2, 3), "val"),
        # An empty one of several columns means that there are fewer captions.
        (8, "d.jpg", ("1", "9"), (4, 5), "val"),
    ]
    columns = Columns(image="image_path", captions=["title", "text"], split="caption1", id="id")
    assert facts(read_table(file, columns))[0] == (8, "a.jpg", ("5", "0"), (0, 1), "4")


def test_json_lines(write):
    rows = [
        {"image": "a.jpg", "caption": ["one", "two"], "id": 3},
        "",
        {"caption": None, "image": "b.jpg", "caption 1": "four", "id": "4"},
        {"image": "c.jpg", "caption": [{"raw": "five"}], "caption 1": {"text": ["six"]}, "id": 5},
        {"image": "d.jpg", "caption": " ", "caption 1": "seven", "id": 6},
    ]
    images = list(read_table(write(rows, "käse brot.v2.JSONL")))
    assert facts(images) == [
        (3, "a.jpg", ("one", "two"), (0, 1), "train"),
        (4, "b.jpg", ("four",), (2,), "train"),
        (5, "c.jpg", ("five", "six"), (3, 4), "train"),
        (6, "d.jpg", ("seven",), (5,), "train"),
    ]
    assert images[0].dataset == "k_se_brot_v2"


@pytest.mark.parametrize("text", ["02", "-0", " 2", "1_0", "١", "9" * 19])
def test_ids_are_integers_when_all_are(write, text):
    def ids(*values):
        rows = "".join(f"{index}.jpg,a cat,{value}\n" for index, value in enumerate(values))
        return [image.image_id for image in read_table(write(f"image,caption,id\n{rows}"))]

    assert ids("0", "-3", "9" * 18) == [0, -3, 10**18 - 1]
    assert ids("1", text) == ["1", text]
    rows = [{"image": f"{value}.jpg", "caption": "a cat", "id": value} for value in (1, text)]
    assert [image.image_id for image in read_table(write(rows, "a.jsonl"))] == ["1", text]


CSV = "image,caption\na.jpg,one\n"


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.csv", CSV, {"columns": Columns(id="capton")}, "unknown column 'capton' .*; known: caption, image"),
        ("a.csv", "file,caption\na,b\n", {}, "name --image-column and --caption-column; columns: 'file', 'caption'"),
        ("a.csv", "image,words\na,b\n", {}, "name --image-column and --caption-column; columns: 'image', 'words'"),
        ("a.csv", "image,caption,image\na.jpg,one,b.jpg\n", {}, "two columns have the same name: 'image', 'caption', "),
        (
            "a.csv",
            b'image,caption\n"a\n.jpg",x\n\xe9.jpg,b\n',
            {"val_fraction": 0.1},
            "line 4 is not text in UTF-8: sa",
        ),
        ("a.csv", "", {}, "a.csv is empty"),
        ("a.csv", " \n\n", {}, "a.csv is empty"),
        (
            "a.json",
            '{"images": []}',
            {},
            "it is no list of rows: `vl-plugins shards coco` reads Karpathy's splits, and",
        ),
        ("a.json", "[1]", {}, "Expected `object`, got `int`"),
        ("a.parquet", "PAR1", {}, "a.parquet: "),
        ("a.jsonl", f"\n{CSV}", {}, "line 2: it is not a JSON object: JSON is malformed"),
        ("a.jsonl", '["a.jpg", "one"]', {}, "line 1: it is not a JSON object: Expected `object`, got `array`"),
    ],
)
def test_a_wrong_file_raises(write, name, content, options, message):
    file = write(content, name)
    with pytest.raises(UserError, match=message):
        list(read_table(file, **options))


# The object in line 3 of JSON Lines with good ones in lines 1 and 4.
WRONG_OBJECTS = {
    "no path": ({"image": None}, "its path or image id is blank"),
    "caption is null": ({"caption": None}, "it has no captions, or a blank one"),
    "caption is a number": ({"caption": 3}, "it has no captions, or a blank one"),
    "one caption is null": ({"caption": ["a dog", None]}, "it has no captions, or a blank one"),
    "id is null": ({"id": None}, "its path or image id is blank"),
    "same id as text": ({"id": "2"}, "image id 2 occurs more than once"),
    "group": ({"film": [1]}, "Expected `int | str | null`, got `array` - at `$.group`"),
}


@pytest.mark.parametrize("problem", WRONG_OBJECTS)
def test_a_wrong_row_is_rejected(write, problem):
    changes, reason = WRONG_OBJECTS[problem]
    rows = [
        {"image": f"{name}.jpg", "caption": "one", "id": ord(name) % 16 + 1, "film": 1, "split": "train"}
        for name in "abc"
    ]
    rows[1] |= changes
    file = write([rows[0], "", *rows[1:]], "birds.jsonl")
    first, rejected, last = read_table(file, Columns(group="film"))
    assert (first.file, last.file) == ("a.jpg", "c.jpg")
    assert rejected.image.startswith(f"{file}: line 3 (")
    assert "\n" not in rejected.image
    assert reason in rejected.reason


@pytest.mark.parametrize("row", ["a.jpg,b,test,1", "a.jpg,b,val,3"])
def test_an_image_whose_rows_disagree_is_rejected_and_its_id_stays_free(write, row):
    file = write(f"image,caption,split,image_id\na.jpg,a,val,1\nb.jpg,x,val,1\n{row}\na.jpg,c,val,1\n")
    rejected, image = read_table(file)
    assert (rejected.image, rejected.split, image.file) == (f"{file}: line 4 (a.jpg)", row.split(",")[2], "b.jpg")
    assert rejected.reason.startswith("its split, image id or group is not that of line 2, but")


@pytest.mark.parametrize(
    ("row", "place", "reason"),
    [
        ("a.jpg,", "line 3 (a.jpg)", "it has no captions, or a blank one"),
        ("a.jpg,a cat, outside", "line 3 (a.jpg)", "3 fields, but 2 column names"),
        ("a.jpg", "line 3 (a.jpg)", "1 fields, but 2 column names"),
        ('a.jpg,"a ""cat", outside', "line 3 (a.jpg)", "3 fields, but 2 column names"),
        ('a.jpg,"a\ncat" b', "lines 3 to 4 (None)", "is a quote missing, or one too many?"),
    ],
)
def test_a_row_that_cannot_be_read_goes_alone(write, row, place, reason):
    file = write(f"image,caption\na.jpg,one\n{row}\nb.jpg,two\na.jpg,three\n")
    images = list(read_table(file))
    (rejected,) = (image for image in images if isinstance(image, RejectedImage))
    assert rejected.image == f"{file}: {place}"
    assert reason in rejected.reason
    assert [image.captions for image in images if image is not rejected] == [("one", "three"), ("two",)]


def test_a_quote_that_never_ends_is_named_with_all_that_it_hides(write):
    image, rejected = read_table(write('image,caption\na.jpg,one\nb.jpg,"two\nc.jpg,three\nd.jpg,four\n'))
    assert image.file == "a.jpg"
    assert "lines 3 to 5" in rejected.image


@pytest.mark.parametrize("delimiter", ["\t", ","])
@pytest.mark.parametrize("caption", ['"Stop" sign', '5" pipe', 'a "sign"', '""a""', '"" sign'])
def test_quotes_that_mean_nothing_to_a_spreadsheet_are_text(write, delimiter, caption):
    """Tab-separated tables of the web are often not quoted."""
    rows = [["image", "caption"], ["a.jpg", caption], ["b.jpg", "a dog"]]
    images = list(read_table(write("".join(f"{delimiter.join(row)}\n" for row in rows))))
    assert [(image.file, image.captions) for image in images] == [("a.jpg", (caption,)), ("b.jpg", ("a dog",))]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("top", ["", "\r\n \r\n"])
def test_the_encodings_of_spreadsheets_and_blank_lines_at_the_top(write, encoding, top):
    file = write(f"{top}image\tcaption\r\na.jpg\tun café\r\n\r\nb.jpg\t\r\n".encode(encoding))
    image, rejected = read_table(file)
    assert image.captions == ("un café",)
    assert f"line {top.count(chr(10)) + 4} (b.jpg)" in rejected.image


def test_token_files(write):
    content = "\n1.jpg#0\tA dog , #1 .\n1.jpg#1\tTwo\ttabs .\n2.jpg#0\tA cat .\nbroken\n"
    *images, rejected = read_table(write(content, "results_20130124.token"))
    assert [(image.file, image.captions) for image in images] == [
        ("1.jpg", ("A dog , #1 .", "Two\ttabs .")),
        ("2.jpg", ("A cat .",)),
    ]
    assert "line 5" in rejected.image


def test_lists_of_objects(write):
    """As BLIP, ALBEF and LAVIS have them."""
    rows = [
        {"image": "a.jpg", "caption": "one", "image_id": "coco_0"},
        {"image": "a.jpg", "caption": "two", "image_id": "coco_0"},
        {"image": "b.jpg", "caption": ["three"], "image_id": "coco_1"},
        {"image": "c.jpg", "caption": None, "image_id": "coco_2"},
    ]
    file = write("\ufeff" + json.dumps(rows), "coco_karpathy_train.json")
    *images, rejected = read_table(file)
    assert facts(images) == [
        ("coco_0", "a.jpg", ("one", "two"), (0, 1), "train"),
        ("coco_1", "b.jpg", ("three",), (2,), "train"),
    ]
    assert rejected.image == f"{file}: row 3 (c.jpg)"


def test_parquet_with_paths(tmp_path):
    table = pandas.DataFrame(
        {"file_name": ["a.jpg", "a.jpg", "b.jpg"], "captions": [["one", "two"], ["three"], ["NA"]]}
    )
    table.to_parquet(tmp_path / "t.parquet")
    assert [(image.file, image.captions) for image in read_table(tmp_path / "t.parquet")] == [
        ("a.jpg", ("one", "two", "three")),
        ("b.jpg", ("NA",)),
    ]


@pytest.mark.parametrize("rule", [None, True, False])
@pytest.mark.parametrize("last", ["x\n", "x\n\ny"])
def test_a_folder_of_pictures(tmp_path, rule, last):
    (tmp_path / "more").mkdir()
    texts = {"a.jpg": "one\ntwo", "more/b.PNG": last, "c.webp": None}
    for name, text in texts.items():
        (tmp_path / name).touch()
        if text is not None:
            (tmp_path / name).with_suffix(".txt").write_text(text, encoding="utf-8-sig")
    first, rejected, second = read_table(tmp_path, has_lines=rule)
    have_lines = "y" in last if rule is None else rule
    assert first.captions == (("one", "two") if have_lines else ("one\ntwo",))
    assert second.captions == (tuple(last.split()) if have_lines else (last,))
    assert [first.file, second.file] == ["a.jpg", "more/b.PNG"]
    assert rejected == RejectedImage(f"{tmp_path}: c.webp (c.webp)", "train", "there is no c.txt")


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
# What has a meaning in tables, more often than by chance.
SIGNS = st.lists(st.sampled_from(['"', "'", "\n", "\r", "\r\n", "\t", ",", ";", "\\", "é", "\u2028", "\ufeff", "a"]))
CAPTIONS = (TEXTS | SIGNS.map("".join)).filter(lambda text: not is_blank(text))


@pytest.mark.parametrize(
    ("rows", "image_ids", "caption_ids"),
    [
        (["7,a.jpg,x", "8,a.jpg,y", "9,b.jpg,z"], [0, 1], [(7, 8), (9,)]),
        (["p,a.jpg,x", "q,a.jpg,y", "9,b.jpg,z"], [0, 1], [("p", "q"), ("9",)]),
        (["7,a.jpg,x", "7,a.jpg,y", "9,b.jpg,z"], [7, 9], [(0, 1), (2,)]),
        (["7,a.jpg,x", "9,b.jpg,z"], [7, 9], [(0,), (1,)]),
    ],
    ids=["captions", "captions, texts", "images", "one caption each"],
)
def test_an_id_is_that_of_the_caption_if_rows_of_an_image_differ_in_it(tmp_path, rows, image_ids, caption_ids):
    (tmp_path / "t.csv").write_text("\n".join(["id,image,caption", *rows]))
    images = list(read_table(tmp_path / "t.csv"))
    assert [image.image_id for image in images] == image_ids
    assert [image.caption_ids for image in images] == caption_ids


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"image": "https://x.org/a.jpg", "caption": "x"}, "its path is the URL https://x.org/a.jpg, which is not dow"),
        ({"image": "a.jpg", "caption": {"en": "x", "de": "y"}}, "its caption is an object with the keys 'en', 'de'"),
        ({"image": "a.jpg", "caption": "\u200b"}, "it has no captions, or a blank one"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, row, reason):
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    (rejected,) = read_table(tmp_path / "t.jsonl")
    assert rejected.reason.startswith(reason)


def test_an_id_column_that_is_named_is_that_of_images(tmp_path):
    (tmp_path / "t.csv").write_text("id,image,caption\n7,a.jpg,x\n8,a.jpg,y")
    (rejected,) = read_table(tmp_path / "t.csv", Columns(id="id"))
    assert "its split, image id or group is not that of" in rejected.reason


def test_parquet_is_named(tmp_path):
    file = tmp_path / "captions.csv"
    file.write_bytes(b"PAR1\x15\x04\x15\x80")
    with pytest.raises(UserError, match=r"captions\.csv is Parquet, not text: name it \.parquet"):
        list(read_table(file))


@settings(max_examples=25)
@given(st.lists(st.lists(CAPTIONS, min_size=1, max_size=3), min_size=1, max_size=4), st.randoms())
def test_captions_come_back_as_they_were(tmp_path_factory, captions_of_images, random_order):
    """Also when the rows of an image are apart."""
    folder = tmp_path_factory.mktemp("tables")
    rows = [(f"{index}.jpg", caption) for index, captions in enumerate(captions_of_images) for caption in captions]
    random_order.shuffle(rows)
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t"), ("b.csv", ";")):
        with (folder / name).open("w", encoding="utf-8-sig", newline="") as stream:
            csv.writer(stream, delimiter=delimiter).writerows([("image", "caption"), *rows])
    for name, ascii_only in (("a.jsonl", True), ("b.jsonl", False)):
        lines = [json.dumps({"image": name, "caption": caption}, ensure_ascii=ascii_only) for name, caption in rows]
        (folder / name).write_text("\n".join(lines), encoding="utf-8-sig", newline="")
    for file in folder.iterdir():
        assert [(image.file, list(image.captions)) for image in read_table(file)] == joined(rows), file
    assert len(list(folder.iterdir())) == 5


def test_training_splits_are_shuffled_by_seed_and_ids_alone():
    splits = ("train", "val", "train2017", "training", "test")
    images = [
        CaptionedImage(number, f"{number}.jpg", ("a cat", "\0é"), (number, "x"), splits[number % 5], "birds", "a", 7)
        for number in range(25_000)
    ]
    images.insert(7, RejectedImage("8.jpg", "train", "cut"))
    orders = {}
    for name, source, seed in (("3", images, 3), ("3, turned", images[::-1], 3), ("4", images, 4)):
        found = list(shuffled(source, seed))
        assert sorted(found, key=str) == sorted(images, key=str)
        orders[name] = {split: [image for image in found if image.split == split] for split in splits}
    for split in splits:
        as_given = [image for image in images if image.split == split]
        assert (orders["3"][split] == as_given) is (orders["4"][split] == as_given) is (split in ("val", "test"))
    assert orders["3"]["train2017"] == orders["3, turned"]["train2017"] != orders["4"]["train2017"]
