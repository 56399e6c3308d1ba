import csv
import json
import re

import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip_train.data import CsvDataset

from vl_plugins.data.annotations import CaptionedImage
from vl_plugins.data.caption_table import Columns, read_caption_table
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


def test_rows_of_one_image_are_joined_where_it_appears_first(write):
    file = write("image,caption,split,id\n./b.jpg,one,val,7\na/a.jpg,two,train,5\nb.jpg,three,val,7\n")
    assert read_caption_table(file) == [
        CaptionedImage(7, "b.jpg", ("one", "three"), (0, 1), "val", "birds", "./b.jpg"),
        CaptionedImage(5, "a/a.jpg", ("two",), (2,), "train", "birds", "a/a.jpg"),
    ]


def test_a_column_may_be_the_group(write):
    table = "image,caption,object\na.jpg,one,7\nb.jpg,two,\na.jpg,three,7\nc.jpg,four,frog\n"
    images = read_caption_table(write(table), Columns(group="object"))
    assert [image.group for image in images] == ["7", None, "frog"]
    rows = [{"image": "a.jpg", "caption": "one", "object": 7}, {"image": "b.jpg", "caption": "two"}]
    images = read_caption_table(write(rows, "a.jsonl"), Columns(group="object"))
    assert [image.group for image in images] == [7, None]


@pytest.mark.parametrize("separator", ["\t", ","])
def test_the_csv_of_open_clip_as_its_own_reader_reads_it(write, separator):
    captions = ['a cat, a "dog"', "two\nlines", "a\ttab"]
    table = pandas.DataFrame({"filepath": ["a/1.jpg", "a/1.jpg", "2.jpg"], "title": captions})
    file = write(table.to_csv(index=False, sep=separator), "train.csv")
    theirs = CsvDataset(file, None, "filepath", "title", sep=separator)
    images = read_caption_table(file, delimiter=separator)
    assert [image.file for image in images] == ["a/1.jpg", "2.jpg"]
    ours = [(image.file, caption) for image in images for caption in image.captions]
    assert ours == list(zip(theirs.images, theirs.captions, strict=True))


def test_columns_found_by_their_names(write):
    names = "text,caption 3,Caption,caption_12,caption1,title,image_path,filepath,image_id,id,split"
    file = write(f"{names}\n0,1,2,3,4,5,a.jpg,b.jpg,7,8,val\n1,,2, ,9,5,c.jpg,d.jpg,8,9,val\n")
    assert facts(read_caption_table(file)) == [
        (7, "b.jpg", ("0", "1", "3", "4"), (0, 1, 2, 3), "val"),
        # An empty one of several columns means that there are fewer captions.
        (8, "d.jpg", ("1", "9"), (4, 5), "val"),
    ]


def test_columns_asked_for(write):
    file = write("image,caption,title,name,where,split,id,image_id\na.jpg,no,yes,b.jpg,test,val,1,2\n")
    images = read_caption_table(file, Columns(image="name", captions=["title"], split="where"))
    assert facts(images) == [(2, "b.jpg", ("yes",), (0,), "test")]
    images = read_caption_table(file, Columns(captions=["where", "title"], id="id"))
    assert facts(images) == [(1, "a.jpg", ("test", "yes"), (0, 1), "val")]


def test_json_lines(write):
    rows = [
        {"image": "a.jpg", "caption": ["one", "two"], "id": 3},
        "",
        {"caption": None, "image": "b.jpg", "caption 1": "four", "id": "4"},
        {"image": "c.jpg", "caption": [{"raw": "five"}], "caption 1": {"text": ["six"]}, "id": 5},
    ]
    images = read_caption_table(write(rows, "käse brot.v2.JSONL"))
    assert facts(images) == [
        (3, "a.jpg", ("one", "two"), (0, 1), "train"),
        (4, "b.jpg", ("four",), (2,), "train"),
        (5, "c.jpg", ("five", "six"), (3, 4), "train"),
    ]
    assert images[0].dataset == "k_se_brot_v2"


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["0", "12", "-3"], [0, 12, -3]),
        (["1", "02"], ["1", "02"]),
        (["1", "-0"], ["1", "-0"]),
        (["1", " 2"], ["1", " 2"]),
        (["1", "1_0"], ["1", "1_0"]),
        (["1", "١"], ["1", "١"]),
        (["1", "9" * 18], [1, 10**18 - 1]),
        (["1", "9" * 19], ["1", "9" * 19]),
    ],
)
def test_ids_are_integers_when_all_are(write, ids, expected):
    rows = "".join(f"{index}.jpg,a cat,{value}\n" for index, value in enumerate(ids))
    assert [image.image_id for image in read_caption_table(write(f"image,caption,id\n{rows}"))] == expected


def test_delimiter_byte_order_mark_line_ends_and_empty_lines(write):
    content = '\ufeffimage;caption\r\na.jpg; one, two\r\n\r\n"b.jpg";"three\r\n""four"""\r\n'
    images = read_caption_table(write(content), delimiter=";", dataset_name="mine", split_name="test-1")
    assert [(image.file, image.captions, image.dataset, image.split) for image in images] == [
        ("a.jpg", (" one, two",), "mine", "test-1"),
        ("b.jpg", ('three\r\n"four"',), "mine", "test-1"),
    ]


CSV = "image,caption\na.jpg,one\n"


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", "", {}, r"a.txt is no table .* must end in .csv, .tsv, .jsonl"),
        ("a.csv", "", {}, "a.csv has no rows"),
        ("a.csv", "image,caption\n", {}, "a.csv has no rows"),
        ("a.jsonl", "\n", {}, "a.jsonl has no rows"),
        (
            "a.csv",
            CSV,
            {"columns": Columns(captions=["captain"])},
            "unknown column 'captain' .*; known: caption, image",
        ),
        ("a.csv", CSV, {"columns": Columns(id="id")}, "unknown column 'id'"),
        (
            "a.csv",
            CSV.replace("image", "file"),
            {},
            "which column has the images.* --image-column; columns: 'file', 'c",
        ),
        (
            "a.csv",
            CSV.replace("caption", "words"),
            {},
            "has the captions.* --caption-column; columns: 'image', 'words'",
        ),
        ("a.csv", "image,caption,image\na.jpg,one,b.jpg\n", {}, "two columns have the same name: 'image', 'caption', "),
        ("a.csv", CSV, {"delimiter": "::"}, "line 1: .*delimiter.* must be a .*character"),
        ("a.csv", CSV, {"split_name": "a/b"}, "'a/b' cannot name a split"),
        ("a.csv", f"{CSV}a.jpg,{'x' * 131073}\n", {}, "line 3: field larger than field limit"),
        ("a.csv", f'{CSV}\na.jpg,"one\ntwo', {}, "line 4: unexpected end of data; is a quote missing"),
        ("a.csv", 'image,caption\n"a\n.jpg",x\nb.jpg,"one" two\n', {}, "line 4: ',' expected after '\"'"),
        ("a.csv", f"{CSV}b.jpg,one, two\n", {}, "line 3: 3 fields, but 2 column names"),
        ("a.csv", f"{CSV}b.jpg\n", {}, "line 3: 1 fields, but 2 column names"),
        ("a.jsonl", f"\n{CSV}", {}, "line 2: it is not valid JSON"),
        ("a.jsonl", '["a.jpg", "one"]', {}, "line 1: Expected `object`, got `array`"),
        ("a.jsonl", b'{"image": "a", "caption": "caf\xe9"}\n', {}, "line 1: .*'\\\\udce9' .*surrogates not allowed"),
    ],
)
def test_wrong_file_always_raises(write, name, content, options, message):
    file, rejected = write(content, name), []
    with pytest.raises(UserError, match=message) as raised:
        read_caption_table(file, **options, rejected=rejected)
    assert "\n" not in str(raised.value)
    assert str(file) in str(raised.value)


def test_file_that_cannot_be_read(tmp_path):
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"^cannot read .*zero.csv: it is not a regular file"):
        read_caption_table(tmp_path / "zero.csv")
    with pytest.raises(UserError, match=r"^cannot read .*nowhere.jsonl: No such file"):
        read_caption_table(tmp_path / "nowhere.jsonl")


# The row in line 3 of a table with good rows in lines 2 and 4.
WRONG_ROWS = {
    "blank caption": ("b.jpg, ,5", "line 3 (b.jpg)", "caption ' ' is blank"),
    "blank path": (" ,one,5", "line 3 ( )", "its path is blank"),
    "id of another": ("b.jpg,one,2", "line 3 (b.jpg)", "image id 2 occurs more than once"),
    "not UTF-8": (b"b.jpg,caf\xe9,5", "line 3 (b.jpg)", r"caption 'caf\\udce9' is not valid Unicode"),
}
WRONG_OBJECTS = {
    "no path": ({"image": None}, "line 3", r"Expected `str`, got `null` - at `\$.file`"),
    "caption is null": ({"caption": None}, "line 3 (b.jpg)", "it has no captions"),
    "caption is a number": ({"caption": 3}, "line 3 (b.jpg)", r"Expected `str`, got `int` - at `\$.captions\[0\]`"),
    "blank in a list": ({"caption": ["a", " "]}, "line 3 (b.jpg)", "caption ' ' is blank"),
    "id is null": ({"id": None}, "line 3 (b.jpg)", "its image id is blank"),
    "id is true": ({"id": True}, "line 3 (b.jpg)", r"Expected `int \| str`, got `bool` - at `\$.image_id`"),
    "same id as text": ({"id": "2"}, "line 3 (b.jpg)", "image id 2 occurs more than once"),
    "path of two lines": ({"image": "b\n\ud800.jpg"}, r"line 3 (b\n\ud800.jpg)", "is not valid Unicode"),
    "nested": ({"caption": json.loads("[" * 900 + "]" * 900)}, "line 3 (b.jpg)", "Expected `str`, got `array`"),
}


def check_wrong_row(file, place, message, kept):
    rejected = []
    with pytest.raises(UserError, match=message) as raised:
        read_caption_table(file, split_name="val")
    assert str(raised.value).startswith(f"{file}: {place}: ")
    assert "\n" not in str(raised.value)
    assert [image.file for image in read_caption_table(file, split_name="val", rejected=rejected)] == kept
    assert [(item.image, item.split) for item in rejected] == [(f"{file}: {place}", "val")]
    assert re.search(message, rejected[0].reason)


@pytest.mark.parametrize("problem", WRONG_ROWS)
def test_wrong_row_raises_or_is_rejected(write, problem):
    row, place, message = WRONG_ROWS[problem]
    row = row if isinstance(row, bytes) else row.encode()
    file = write(b"image,caption,id\na.jpg,one,2\n%s\nc.jpg,one,3\n" % row)
    check_wrong_row(file, place, message, ["a.jpg", "c.jpg"])


@pytest.mark.parametrize("problem", WRONG_OBJECTS)
def test_wrong_object_raises_or_is_rejected(write, problem):
    changes, place, message = WRONG_OBJECTS[problem]
    first, wrong, last = ({"image": f"{name}.jpg", "caption": "one", "id": ord(name) % 16 + 1} for name in "abc")
    file = write([first, "", {**wrong, **changes}, last], "birds.jsonl")
    check_wrong_row(file, place, message, ["a.jpg", "c.jpg"])


@pytest.mark.parametrize(
    ("rows", "line", "reason"),
    [
        (
            "a.jpg,one,val,1\nb.jpg,x,val,2\na.jpg,two,test,1\na.jpg,,val,1\n",
            4,
            "split 'test', but 'val' in .*: line 2",
        ),
        ("a.jpg,one,val,1\nb.jpg,x,val,2\na.jpg,two,val,3\na.jpg,,val,1\n", 4, "image_id '3', but '1' in .*: line 2"),
        ("a.jpg,one,val,1\nb.jpg,x,val,2\na.jpg,,val,1\na.jpg,two,test,1\n", 4, "caption '' is blank"),
        ("a.jpg,one,val,\nb.jpg,x,val,2\na.jpg,two,val,1\n", 2, "its image id is blank"),
    ],
)
def test_an_image_is_rejected_with_all_rows_and_the_first_that_is_wrong(write, rows, line, reason):
    check_wrong_row(write(f"image,caption,split,id\n{rows}"), f"line {line} (a.jpg)", reason, ["b.jpg"])


@pytest.mark.parametrize("split", ["", "a.b"])
def test_a_row_without_a_usable_split_cannot_be_counted_and_always_raises(write, split):
    with pytest.raises(UserError, match=rf"line 2 \(a.jpg\): '{split}' cannot name a split"):
        read_caption_table(write(f"image,caption,split\na.jpg,one,{split}\n"), rejected=[])


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
# What has a meaning in tables, more often than by chance.
SIGNS = st.lists(st.sampled_from(['"', "'", "\n", "\r", "\r\n", "\t", ",", ";", "\\", "é", "\u2028", "\ufeff", "a"]))
CAPTIONS = (TEXTS | SIGNS.map("".join)).filter(str.strip)


@settings(max_examples=60)
@given(st.lists(st.lists(CAPTIONS, min_size=1, max_size=3), min_size=1, max_size=4))
def test_captions_come_back_as_they_were(tmp_path_factory, captions_of_images):
    folder = tmp_path_factory.mktemp("tables")
    rows = [(f"{index}.jpg", caption) for index, captions in enumerate(captions_of_images) for caption in captions]
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        with (folder / f"a{suffix}").open("w", encoding="utf-8", newline="") as stream:
            csv.writer(stream, delimiter=delimiter).writerows([("image", "caption"), *rows])
    for ensure_ascii in (True, False):
        lines = [
            json.dumps({"image": f"{index}.jpg", "captions": captions}, ensure_ascii=ensure_ascii)
            for index, captions in enumerate(captions_of_images)
        ]
        (folder / f"{ensure_ascii}.jsonl").write_text("\n".join(lines), encoding="utf-8", newline="")
    for name in ("a.csv", "a.tsv", "True.jsonl", "False.jsonl"):
        images = read_caption_table(folder / name)
        assert [list(image.captions) for image in images] == captions_of_images, name
        assert [image.file for image in images] == [f"{index}.jpg" for index in range(len(images))], name
