import json
from copy import deepcopy

import pytest

from vl_plugins.data.annotations import CaptionedImage, RejectedImage, read_karpathy
from vl_plugins.utils.errors import UserError


def make_document(dataset="coco", splits=("train", "restval", "val", "test")):
    images = []
    for index, split in enumerate(splits):
        image = {
            "filename": f"{index}.jpg",
            "imgid": index,
            "split": split,
            "sentids": [10 * index, 10 * index + 1],
            "sentences": [
                {"raw": f"caption {index}-{number}", "tokens": [], "imgid": index, "sentid": 10 * index + number}
                for number in range(2)
            ],
        }
        if dataset == "coco":
            image |= {"filepath": "val2014", "cocoid": 1000 + index}
        images.append(image)
    return {"dataset": dataset, "images": images}


@pytest.fixture
def write(tmp_path):
    def write_document(document):
        file = tmp_path / "dataset.json"
        file.write_text(document if isinstance(document, str) else json.dumps(document))
        return file

    return write_document


def test_coco_entries_have_path_and_coco_id(write):
    images = read_karpathy(write(make_document()), "coco")
    assert len(images) == 4
    assert images[2] == CaptionedImage(
        image_id=1002,
        file="val2014/2.jpg",
        captions=("caption 2-0", "caption 2-1"),
        caption_ids=(20, 21),
        split="val",
        dataset="coco",
        filename="2.jpg",
    )


@pytest.mark.parametrize("dataset", ["coco", "flickr30k"])
def test_a_field_may_be_the_group(write, dataset):
    document = make_document(dataset)
    for image, group in zip(document["images"], ["frog", 7, None, " "], strict=True):
        image["object"] = group
    file = write(document)
    assert [image.group for image in read_karpathy(file, dataset, group_key="object")] == ["frog", 7, None, None]
    assert [image.group for image in read_karpathy(file, dataset)] == [None] * 4
    document["images"][2]["object"] = [1]
    with pytest.raises(
        UserError, match=r"image 2 \(2\.jpg\): group 'object': Expected `int \| str \| null`, got `array`"
    ):
        read_karpathy(write(document), dataset, group_key="object")


def test_flickr30k_entries_have_neither(write):
    image = read_karpathy(write(make_document("flickr30k")), "flickr30k")[3]
    assert (image.image_id, image.file, image.split, image.dataset) == (3, "3.jpg", "test", "flickr30k")


def test_restval_joins_train_in_source_order_unless_left(write):
    file = write(make_document(splits=("restval", "train", "restval")))
    assert [(image.image_id, image.split) for image in read_karpathy(file, "coco")] == [
        (1000, "train"),
        (1001, "train"),
        (1002, "train"),
    ]
    assert [image.split for image in read_karpathy(file, "coco", join_restval=False)] == ["restval", "train", "restval"]


def test_name_of_the_data_set(write):
    document = make_document()
    assert read_karpathy(write(document | {"dataset": "stamps"}), "coco")[0].dataset == "stamps"
    assert read_karpathy(write(document), "coco", dataset_name="mine")[0].dataset == "mine"
    del document["dataset"]
    assert read_karpathy(write(document), "coco")[0].dataset == "coco"
    for name in ("a/b", ""):
        with pytest.raises(UserError, match=rf"dataset.json: '{name}' cannot name a data set"):
            read_karpathy(write(document), "coco", dataset_name=name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "has no images"),
        ('{"images": []}', "has no images"),
        ('{"annotations": []}', "has no images; expected Karpathy's format"),
        (
            '{"info": {}, "images": [{"id": 1, "file_name": "1.jpg"}], "annotations": [{"id": 1}]}',
            "has COCO's own format, with 'annotations'; convert it with `vl-plugins shards coco-captions`",
        ),
    ],
)
def test_wrong_file(write, content, message):
    file = write(content)
    with pytest.raises(UserError, match=message) as raised:
        read_karpathy(file, "coco")
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_file_and_wrong_encoding(tmp_path):
    with pytest.raises(UserError, match=r"cannot read /dev/zero: it is not a regular file"):
        read_karpathy("/dev/zero", "coco")
    with pytest.raises(UserError, match=r"cannot read .*nowhere.json: No such file"):
        read_karpathy(tmp_path / "nowhere.json", "coco")
    (tmp_path / "latin.json").write_bytes('{"images": "é"}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.json is not UTF-8 text"):
        read_karpathy(tmp_path / "latin.json", "coco")


def test_unknown_dataset(write):
    with pytest.raises(UserError, match=r"unknown dataset 'coca' \(did you mean 'coco'\?\); known: coco, flickr30k"):
        read_karpathy(write(make_document()), "coca")


WRONG_ENTRIES = {
    "no filename": (lambda image: image.pop("filename"), r"image 2: Object missing required field `filename`"),
    "no path": (lambda image: image.pop("filepath"), r"image 2 \(2.jpg\): Object missing required field `filepath`"),
    "no id": (lambda image: image.pop("cocoid"), r"required field `cocoid`"),
    "id is text": (lambda image: image.update(cocoid="7"), r"Expected `int`, got `str`"),
    "id is true": (lambda image: image.update(cocoid=True), r"Expected `int`, got `bool`"),
    "repeated id": (lambda image: image.update(cocoid=1000), r"image id 1000 occurs more than once"),
    "repeated caption id": (
        lambda image: image["sentences"][1].update(sentid=0),
        r"caption id 0 occurs more than once",
    ),
    "same caption id twice": (lambda image: image["sentences"][1].update(sentid=20), r"caption id 20 occurs more than"),
    "no captions": (lambda image: image["sentences"].clear(), r"it has no captions"),
    "blank caption": (lambda image: image["sentences"][1].update(raw=" \n"), r"caption ' \\n' is blank"),
    "caption is null": (
        lambda image: image["sentences"][1].update(raw=None),
        r"Expected `str`, got `null`",
    ),
    "half a character in a name": (
        lambda image: image.update(filename="\ud800.jpg"),
        r"path 'val2014/\\ud800.jpg' is not valid Unicode",
    ),
    "half a character": (lambda image: image["sentences"][1].update(raw="\ud800"), r"is not valid Unicode"),
    "captions are text": (
        lambda image: image.update(sentences=["a cat"]),
        r"Expected `object`, got `str`",
    ),
    "absolute path": (lambda image: image.update(filepath="/etc", filename="passwd"), r"'/etc/passwd' leads out"),
    "absolute name": (lambda image: image.update(filename="/etc/passwd"), r"'/etc/passwd' leads out"),
    "parent path": (lambda image: image.update(filepath="a/../.."), r"'a/../../2.jpg' leads out of the image root"),
    "windows path": (lambda image: image.update(filename="..\\2.jpg"), r"leads out of the image root"),
    "drive": (lambda image: image.update(filepath="C:/"), r"leads out of the image root"),
}


@pytest.mark.parametrize("problem", WRONG_ENTRIES)
def test_wrong_entry_raises_or_is_rejected(write, problem):
    damage, message = WRONG_ENTRIES[problem]
    document = make_document()
    damage(document["images"][2])
    file = write(document)
    with pytest.raises(UserError, match=message) as raised:
        read_karpathy(file, "coco")
    assert str(raised.value).startswith(f"{file}: image 2")

    rejected = []
    images = read_karpathy(file, "coco", rejected=rejected)
    assert [image.image_id for image in images] == [1000, 1001, 1003]
    assert [(item.split, item.image[:7]) for item in rejected] == [("val", "image 2")]


def test_ids_of_a_rejected_image_stay_free(write):
    document = make_document()
    document["images"][2] = deepcopy(document["images"][1])
    document["images"][1]["sentences"][0]["raw"] = ""
    rejected = []
    images = read_karpathy(write(document), "coco", rejected=rejected)
    assert [image.image_id for image in images] == [1000, 1001, 1003]
    assert rejected == [RejectedImage("image 1 (1.jpg)", "train", "caption '' is blank")]


@pytest.mark.parametrize("item", [3, {"filename": "x.jpg"}, {"filename": "x.jpg", "split": "trian"}])
def test_an_entry_without_a_known_split_cannot_be_counted_and_always_raises(write, item):
    document = make_document()
    document["images"][1] = item
    with pytest.raises(UserError, match="image 1"):
        read_karpathy(write(document), "coco", rejected=[])


def test_unknown_split_names_the_known_ones(write):
    document = make_document(splits=("train", "trian"))
    with pytest.raises(UserError, match=r"image 1 \(1.jpg\): unknown split 'trian' \(did you mean 'train'\?\)"):
        read_karpathy(write(document), "coco")


def test_an_image_outside_the_root_cannot_be_made_in_any_way():
    with pytest.raises(UserError, match="leads out of the image root"):
        CaptionedImage(1, "../secret.png", ("a",), (1,), "train", "coco", "secret.png")


VALID = {
    "image_id": "a",
    "file": "a/b.jpg",
    "captions": ("a cat", "a dog"),
    "caption_ids": ("1", "2"),
    "split": "train_2017",
    "dataset": "my-set",
    "filename": "b.jpg",
}


def test_an_image_may_have_strings_as_ids():
    assert (CaptionedImage(**VALID).image_id, CaptionedImage(**VALID).caption_ids) == ("a", ("1", "2"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("caption_ids", (1,), "it has 1 caption ids for 2 captions"),
        ("caption_ids", (1, 2, 3), "it has 3 caption ids for 2 captions"),
        ("captions", ("a cat", " \t"), r"caption ' \\t' is blank"),
        ("split", "val.2017", "'val.2017' cannot name a split; use letters, digits, '_' and '-'"),
        ("split", "val/2017", "'val/2017' cannot name a split"),
        ("split", "val\n", r"'val\\n' cannot name a split"),
        ("split", "", "'' cannot name a split"),
        ("dataset", "my set", "'my set' cannot name a data set"),
        ("filename", "\ud800.jpg", r"file name '\\ud800.jpg' is not valid Unicode: surrogates not allowed"),
        ("image_id", "\ud800", r"image id '\\ud800' is not valid Unicode"),
    ],
)
def test_an_image_that_shards_cannot_hold_cannot_be_made(field, value, message):
    with pytest.raises(UserError, match=f"^{message}"):
        CaptionedImage(**{**VALID, field: value})


def test_a_name_that_is_not_printable_is_escaped_in_its_place(write):
    document = make_document()
    document["images"][2] |= {"filename": "a\nb\ud800\u2028.jpg", "sentences": []}
    rejected = []
    read_karpathy(write(document), "coco", rejected=rejected)
    assert [item.image for item in rejected] == [r"image 2 (a\nb\ud800\u2028.jpg)"]
