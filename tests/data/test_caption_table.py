import csv
import json
import re

import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip_train.data import CsvDataset

from vl_plugins.data.annotations import CaptionedImage, RejectedImage
from vl_plugins.data.caption_table import read_caption_table
from vl_plugins.utils.errors import UserError


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
    file = write("image,caption,split,id\nb.jpg,one,val,7\na/a.jpg,two,train,5\nb.jpg,three,val,7\n")
    assert read_caption_table(file) == [
        CaptionedImage(7, "b.jpg", ("one", "three"), (0, 2), "val", "birds", "b.jpg"),
        CaptionedImage(5, "a/a.jpg", ("two",), (1,), "train", "birds", "a/a.jpg"),
    ]


def test_a_column_may_be_the_group(write):
    table = "image,caption,object\na.jpg,one,7\nb.jpg,two,\na.jpg,three,7\nc.jpg,four,frog\n"
    assert [image.group for image in read_caption_table(write(table), group_column="object")] == ["7", None, "frog"]
    rows = [{"image": "a.jpg", "caption": "one", "object": 7}, {"image": "b.jpg", "caption": "two"}]
    assert [image.group for image in read_caption_table(write(rows, "a.jsonl"), group_column="object")] == [7, None]
    with pytest.raises(UserError, match=r"line 4 \(a\.jpg\): group '8', but '7' for the same image in line 2"):
        read_caption_table(write(table.replace("three,7", "three,8")), group_column="object")
    with pytest.raises(UserError, match="unknown column 'objekt'"):
        read_caption_table(write(table), group_column="objekt")


def test_paths_are_compared_without_what_means_nothing(write):
    images = read_caption_table(write("image,caption\n./a//b.jpg,one\na/b.jpg,two\n"))
    assert [(image.file, image.filename, image.captions) for image in images] == [
        ("a/b.jpg", "./a//b.jpg", ("one", "two"))
    ]


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


@pytest.mark.parametrize("first", range(6))
def test_the_first_image_column_counts(write, first):
    names = ["image", "filepath", "file_name", "filename", "path", "image_path"][first:]
    row = [f"{name}.jpg" for name in names]
    file = write(f"caption,{','.join(reversed(names))}\na cat,{','.join(reversed(row))}\n")
    assert [image.file for image in read_caption_table(file)] == row[:1]


def test_all_caption_columns_count_in_the_order_of_the_table(write):
    names = "text,caption 3,Caption,caption_12,caption1,title,captions,caption,caption_,captioned"
    file = write(f"{names},image\n{','.join(map(str, range(10)))},a.jpg\n")
    assert read_caption_table(file)[0].captions == ("0", "1", "3", "4", "5", "6", "7")


def test_columns_asked_for(write):
    file = write("image,caption,title,name,where,split,id,image_id\na.jpg,no,yes,b.jpg,test,val,1,2\n")
    images = read_caption_table(file, image_column="name", caption_columns=["title"], split_column="where")
    assert facts(images) == [(2, "b.jpg", ("yes",), (0,), "test")]
    images = read_caption_table(file, caption_columns=["where", "title"], id_column="id")
    assert facts(images) == [(1, "a.jpg", ("test", "yes"), (0, 1), "val")]
    # A column asked for as one thing is no other thing by default.
    images = read_caption_table(file, caption_columns=["split", "image_id"], split_column="caption")
    assert facts(images) == [(1, "a.jpg", ("val", "2"), (0, 1), "no")]
    (image,) = read_caption_table(file, image_column="caption", id_column="image")
    assert (image.image_id, image.file, image.captions) == ("a.jpg", "no", ("yes",))


def test_empty_cells_of_several_caption_columns_are_captions_that_are_not_there(write):
    file = write("image,caption_1,caption_2\na.jpg,one,\na.jpg, ,two\nb.jpg,three,four\n")
    assert [(image.captions, image.caption_ids) for image in read_caption_table(file)] == [
        (("one", "two"), (0, 1)),
        (("three", "four"), (2, 3)),
    ]


def test_json_lines(write):
    rows = [
        {"image": "a.jpg", "captions": ["one", "two"], "id": 3},
        "",
        {"title": "four", "image": "b.jpg", "captions": None, "id": "4"},
        {"image": "c.jpg", "captions": "five", "title": ["six"], "id": 5},
    ]
    assert facts(read_caption_table(write(rows, "a.b c.JSONL"))) == [
        (3, "a.jpg", ("one", "two"), (0, 1), "train"),
        (4, "b.jpg", ("four",), (2,), "train"),
        (5, "c.jpg", ("five", "six"), (3, 4), "train"),
    ]
    assert read_caption_table(write(rows, "a.b c.JSONL"))[0].dataset == "a_b_c"


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["0", "12", "-3"], [0, 12, -3]),
        (["1", "02"], ["1", "02"]),
        (["1", "-0"], ["1", "-0"]),
        (["1", " 2"], ["1", " 2"]),
        (["1", "²"], ["1", "²"]),
        (["1", "1_0"], ["1", "1_0"]),
        (["1", "١"], ["1", "١"]),
        (["1", "1١"], ["1", "1١"]),
        (["1", "9" * 18], [1, 10**18 - 1]),
        (["1", "9" * 19], ["1", "9" * 19]),
    ],
)
def test_ids_are_integers_when_all_are(write, ids, expected):
    rows = "".join(f"{index}.jpg,a cat,{value}\n" for index, value in enumerate(ids))
    assert [image.image_id for image in read_caption_table(write(f"image,caption,id\n{rows}"))] == expected


def test_names(write):
    file = write("image,caption\na.jpg,one\n", "käse brot.v2.csv")
    (image,) = read_caption_table(file)
    assert (image.dataset, image.split) == ("k_se_brot_v2", "train")
    (image,) = read_caption_table(file, dataset_name="mine", split_name="test-1")
    assert (image.dataset, image.split) == ("mine", "test-1")
    with pytest.raises(UserError, match=r"^'my set' cannot name a data set"):
        read_caption_table(file, dataset_name="my set")
    with pytest.raises(UserError, match=r"^'a/b' cannot name a split"):
        read_caption_table(file, split_name="a/b")


def test_delimiter_byte_order_mark_line_ends_and_empty_lines(write):
    content = '\ufeffimage; caption\r\na.jpg; one, two\r\n\r\n"b.jpg";"three\r\n""four"""\r\n'.encode()
    assert [(image.file, image.captions) for image in read_caption_table(write(content), delimiter=";")] == [
        ("a.jpg", (" one, two",)),
        ("b.jpg", ('three\r\n"four"',)),
    ]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", "", {}, r"a.txt is no table .* must end in .csv, .tsv or .jsonl"),
        ("a.csv", "", {}, "a.csv has no rows"),
        ("a.csv", "image,caption\n", {}, "a.csv has no rows"),
        ("a.csv", "\n\n", {}, "a.csv has no rows"),
        ("a.jsonl", "", {}, "a.jsonl has no rows"),
        ("a.jsonl", "\n", {}, "a.jsonl has no rows"),
        ("a.jsonl", "{}\n", {}, "line 1: the object is empty"),
        ("a.jsonl", "\nimage,caption\n", {}, "line 2: the line is not valid JSON"),
        ("a.csv", "image,caption\na.jpg,one\n", {"caption_columns": ["captain"]}, r"a.csv: unknown column 'captain' "),
        (
            "a.csv",
            "image,caption\na.jpg,x\n",
            {"image_column": "imag"},
            r"'imag' \(did you mean 'image'\?\); known: ca",
        ),
        ("a.csv", "image,caption\na.jpg,one\n", {"split_column": "set"}, "unknown column 'set'"),
        ("a.csv", "image,caption\na.jpg,one\n", {"id_column": "id"}, "unknown column 'id'"),
        ("a.csv", "image,caption\na,x\n", {"id_column": "image", "image_column": "image"}, "'image' is asked for more"),
        ("a.csv", "file,caption\na.jpg,x\n", {}, "which column has the images.* --image-column; columns: 'file', 'ca"),
        ("a.csv", "image,words\na.jpg,one\n", {}, "the captions.* --caption-column; columns: 'image', 'words'"),
        ("a.csv", "image,caption,image\na.jpg,one,b.jpg\n", {}, "column 'image' is there 2 times"),
        ("a.csv", "image,caption\na.jpg,one\n", {"delimiter": "::"}, "the delimiter must be one character, .*got '::'"),
        ("a.csv", "image,caption\na.jpg,one\n", {"delimiter": ""}, "the delimiter must be one character"),
        ("a.csv", "image,caption\na.jpg,one\n", {"delimiter": '"'}, "the delimiter must be one character"),
        ("a.csv", "image,caption\na.jpg,one\n", {"delimiter": "\n"}, "the delimiter must be one character"),
        ("a.jsonl", '{"image": "a", "caption": "b"}\n', {"delimiter": ","}, "a.jsonl has no delimiter"),
        ("a.csv", b"image,caption\na.jpg,one\nb.jpg,caf\xe9\n", {}, "line 3: not UTF-8 text: .* at byte 9"),
        ("a.jsonl", b'{"image": "a", "caption": "caf\xe9"}\n', {}, "line 1: not UTF-8 text"),
        ("a.csv", "image,caption\na.jpg,one\n".encode("utf-16"), {}, "line 1: a NUL byte; expected UTF-8 text"),
        ("a.csv", "image,caption\na.jpg,o\0ne\n", {}, "line 2: a NUL byte; expected UTF-8 text"),
        ("a.jsonl", '{"image": "a", "caption": "a\0b"}\n', {}, "line 1: a NUL byte"),
        ("a.csv", f"image,caption\na.jpg,one\na.jpg,{'x' * 131073}\n", {}, "line 3: field larger than field limit"),
        ("a.csv", 'image,caption\na.jpg,"one\ntwo', {}, "line 2: unexpected end of data; is a quote missing"),
        ("a.csv", 'image,caption\n"a\n.jpg",x\nb.jpg,"one" two\n', {}, "line 4: ',' expected after '\"'"),
        ("a.csv", "image,caption\ra.jpg,one\r", {}, "line 1: a carriage return within a field"),
    ],
)
def test_wrong_file_always_raises(write, name, content, options, message):
    file = write(content, name)
    for rejected in (None, []):
        with pytest.raises(UserError, match=message) as raised:
            read_caption_table(file, **options, rejected=rejected)
        assert "\n" not in str(raised.value)
        assert not rejected
        assert str(file) in str(raised.value) or message.startswith("the delimiter must")


def test_missing_file(tmp_path):
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"^cannot read .*zero.csv: it is not a regular file"):
        read_caption_table(tmp_path / "zero.csv")
    for name in ("nowhere.csv", "nowhere.jsonl"):
        with pytest.raises(UserError, match=rf"^cannot read .*{name}: No such file"):
            read_caption_table(tmp_path / name)


# Of a table with good rows in lines 2 and 4, the row in line 3.
WRONG_ROWS = {
    "too many fields": ("b.jpg,one, two,5", "line 3", "the number of fields is 4, of column names 3; .*quoted"),
    "too few fields": ("b.jpg,one", "line 3", "the number of fields is 2, of column names 3"),
    "blank caption": ("b.jpg, ,5", "line 3 (b.jpg)", "caption ' ' is blank"),
    "empty caption": ("b.jpg,,5", "line 3 (b.jpg)", "caption '' is blank"),
    "blank path": (" ,one,5", "line 3", "'image' must be text, got '"),
    "blank id": ("b.jpg,one,", "line 3 (b.jpg)", "'id' must be text, got '"),
    "id of another": ("b.jpg,one,2", "line 3 (b.jpg)", "image id 2 occurs more than once"),
    "absolute path": ("/b.jpg,one,5", "line 3 (/b.jpg)", "'/b.jpg' leads out of the image root"),
    "parent path": ("a/../b.jpg,one,5", "line 3 (a/../b.jpg)", "'a/../b.jpg' leads out of the image root"),
    "windows path": ("C:\\b.jpg,one,5", "line 3 (C:\\b.jpg)", "leads out of the image root"),
}
WRONG_OBJECTS = {
    "malformed": ('{"image": "b.jpg"', "line 3", r"the line is not valid JSON: Expecting ',' delimiter"),
    "not an object": ('["b.jpg", "one"]', "line 3", r"Expected `object`, got `array`"),
    "no path": ('{"caption": "one", "id": 5}', "line 3", "'image' must be text, got None"),
    "path is a number": ('{"image": 7, "caption": "x", "id": 5}', "line 3", "'image' must be text, got 7"),
    "no caption": (
        '{"image": "b.jpg", "id": 5}',
        "line 3 (b.jpg)",
        "Expected `str`, got `",
    ),
    "caption is null": (
        '{"image": "b.jpg", "id": 5, "caption": null}',
        "line 3 (b.jpg)",
        "Expected `str`, got `",
    ),
    "caption is a number": (
        '{"image": "b.jpg", "id": 5, "caption": 3}',
        "line 3 (b.jpg)",
        "Expected `str`, got `",
    ),
    "no captions": ('{"image": "b.jpg", "id": 5, "caption": []}', "line 3 (b.jpg)", "it has no caption in 'caption'"),
    "blank in a list": ('{"image": "b.jpg", "id": 5, "caption": ["a", " "]}', "line 3 (b.jpg)", "caption ' ' is blank"),
    "null in a list": (
        '{"image": "b.jpg", "id": 5, "caption": ["a", null]}',
        "line 3 (b.jpg)",
        r"Expected `str`, got `null`",
    ),
    "half a character": (
        r'{"image": "b.jpg", "id": 5, "caption": "\ud800"}',
        "line 3 (b.jpg)",
        r"caption '\\ud800' is not valid Unicode",
    ),
    "no id": ('{"image": "b.jpg", "caption": "one"}', "line 3 (b.jpg)", "'id' must be text, got None"),
    "id is true": ('{"image": "b.jpg", "caption": "one", "id": true}', "line 3 (b.jpg)", "'id' must be text, got True"),
    "same id as text": ('{"image": "b.jpg", "caption": "one", "id": "2"}', "line 3 (b.jpg)", "image id 2 occurs more"),
    "path of two lines": (r'{"image": "b\n.jpg", "id": 5, "caption": ""}', r"line 3 (b\n.jpg)", "caption '' is blank"),
}


def check_wrong_row(file, place, message, kept, **options):
    rejected = []
    with pytest.raises(UserError, match=message) as raised:
        read_caption_table(file, **options)
    assert str(raised.value).startswith(f"{file}: {place}: ")
    assert "\n" not in str(raised.value)
    assert [image.file for image in read_caption_table(file, rejected=rejected, **options)] == kept
    assert [(item.image, item.split) for item in rejected] == [(place, options.get("split_name", "train"))]
    assert re.search(message, rejected[0].reason)


@pytest.mark.parametrize("problem", WRONG_ROWS)
@pytest.mark.parametrize("name", ["birds.csv", "birds.tsv"])
def test_wrong_row_raises_or_is_rejected(write, problem, name):
    row, place, message = WRONG_ROWS[problem]
    rows = ["image,caption,id", "a.jpg,one,2", row, "c.jpg,one,3"]
    if name == "birds.tsv":
        rows = [row.replace(",", "\t") for row in rows]
    check_wrong_row(write(rows, name), place, message, ["a.jpg", "c.jpg"], split_name="val")


@pytest.mark.parametrize("problem", WRONG_OBJECTS)
def test_wrong_object_raises_or_is_rejected(write, problem):
    row, place, message = WRONG_OBJECTS[problem]
    rows = [{"image": "a.jpg", "caption": "one", "id": 2}, "", row, {"image": "c.jpg", "caption": "one", "id": 3}]
    check_wrong_row(write(rows, "birds.jsonl"), place, message, ["a.jpg", "c.jpg"])


def test_several_caption_columns_without_any(write):
    file = write("image,caption1,caption2\na.jpg,one,\nb.jpg,, \n")
    check_wrong_row(file, "line 3 (b.jpg)", "it has no caption in 'caption1', 'caption2'", ["a.jpg"])
    file = write([{"image": "a.jpg", "caption": "one", "title": "two"}, {"image": "b.jpg", "title": None}], "b.jsonl")
    check_wrong_row(file, "line 2 (b.jpg)", "it has no caption in 'caption', 'title'", ["a.jpg"])


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("a.jpg,one,train,1\nb.jpg,x,train,2\na.jpg,two,val,1\na.jpg,,train,1\n", "split 'val', but 'train' for"),
        ("a.jpg,one,train,1\nb.jpg,x,train,2\na.jpg,two,train,3\na.jpg,,train,1\n", "id '3', but '1' for"),
        ("a.jpg,one,train,1\nb.jpg,x,train,2\na.jpg,,train,1\na.jpg,two,val,1\n", "caption '' is blank"),
    ],
)
def test_an_image_is_rejected_with_all_rows_and_the_first_that_is_wrong(write, rows, reason):
    file, rejected = write(f"image,caption,split,id\n{rows}"), []
    with pytest.raises(UserError, match=rf"birds.csv: line 4 \(a.jpg\): {reason}"):
        read_caption_table(file)
    assert facts(read_caption_table(file, rejected=rejected)) == [(2, "b.jpg", ("x",), (1,), "train")]
    assert [(item.image, item.split) for item in rejected] == [("line 4 (a.jpg)", "train")]
    assert rejected[0].reason.startswith(reason)


def test_a_disagreement_names_the_first_line(write):
    with pytest.raises(
        UserError, match="split 'val', but 'train' for the same image in line 3; rows of one image must"
    ):
        read_caption_table(write("image,caption,split\n\na.jpg,one,train\na.jpg,two,val\n"))


def test_a_first_row_that_is_wrong_takes_the_others_along(write):
    file, rejected = write("image,caption,id\na.jpg,one,\nb.jpg,two,2\na.jpg,three,1\n"), []
    assert [image.file for image in read_caption_table(file, rejected=rejected)] == ["b.jpg"]
    assert rejected == [RejectedImage("line 2 (a.jpg)", "train", "'id' must be text, got ''")]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("b.csv", ["image,caption,split", "a.jpg,one"], "line 2: the number of fields is 2, of column names 3"),
        ("b.csv", ["image,caption,split", ",one,train"], "line 2: 'image' must be text, got '"),
        ("b.csv", ["image,caption,split", "a.jpg,one,"], r"line 2 \(a.jpg\): 'split' must be text, got '"),
        ("b.csv", ["image,caption,split", "a.jpg,one,a.b"], r"line 2 \(a.jpg\): 'a.b' cannot name a split"),
        (
            "b.jsonl",
            [{"image": "a", "caption": "b", "split": "val"}, {"image": "b", "caption": "c"}],
            "'split' must be text, got None",
        ),
        ("b.jsonl", [{"image": "a", "caption": "b", "split": 3}], "'split' must be text, got 3"),
        ("b.jsonl", [{"image": "a", "caption": "b", "split": "val"}, "{"], "line 2: the line is not valid JSON"),
    ],
)
def test_a_row_without_a_known_split_cannot_be_counted_and_always_raises(write, name, rows, message):
    with pytest.raises(UserError, match=message):
        read_caption_table(write(rows, name), rejected=[])


def test_numbers_do_not_depend_on_what_is_rejected(write):
    file = write("image,caption\na.jpg,one\nb.jpg,\nc.jpg,two\n")
    assert [(image.image_id, image.file) for image in read_caption_table(file, rejected=[])] == [
        (0, "a.jpg"),
        (2, "c.jpg"),
    ]


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
# What has a meaning in tables, more often than by chance.
SIGNS = st.lists(st.sampled_from(['"', "'", "\n", "\r", "\r\n", "\t", ",", ";", "\\", "é", "\u2028", "\ufeff", "a"]))
CAPTIONS = (TEXTS | SIGNS.map("".join)).filter(str.strip)


@settings(deadline=None, max_examples=60)
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
