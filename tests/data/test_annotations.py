import json

import pytest

from vl_plugins.data.annotations import CaptionedImage, RejectedImage, gather_images, read_karpathy
from vl_plugins.errors import UserError


def make_document(dataset="coco", splits=("train", "restval", "val", "test")):
    """Image i has the captions 10 i and 10 i + 1."""
    images = []
    for index, split in enumerate(splits):
        sentences = [{"raw": f"caption {index}-{place}", "sentid": 10 * index + place} for place in range(2)]
        image = {"filename": f"{index}.jpg", "imgid": index, "split": split, "sentences": sentences}
        images.append(image | ({"filepath": "val2014", "cocoid": 1000 + index} if dataset == "coco" else {}))
    return {"dataset": dataset, "images": images}


@pytest.fixture
def write(tmp_path):
    def write_document(document):
        file = tmp_path / "dataset.json"
        file.write_text(document if isinstance(document, str) else json.dumps(document))
        return file

    return write_document


def test_coco(write):
    document = make_document()
    document["images"][2]["object"] = 7
    images = read_karpathy(write(document), "coco", group_key="object")
    assert [(image.image_id, image.split) for image in images] == [
        (1000, "train"),
        (1001, "train"),
        (1002, "val"),
        (1003, "test"),
    ]
    captions = ("caption 2-0", "caption 2-1")
    assert images[2] == CaptionedImage(1002, "val2014/2.jpg", captions, (20, 21), "val", "coco", "2.jpg", 7)
    images = read_karpathy(write(document), "coco", join_restval=False)
    assert [(image.split, image.group) for image in images[1:3]] == [("restval", None), ("val", None)]


def test_flickr30k(write):
    image = read_karpathy(write(make_document("flickr30k")), "flickr30k")[3]
    assert (image.image_id, image.file, image.split, image.dataset) == (3, "3.jpg", "test", "flickr30k")
    with pytest.raises(UserError, match=r"missing required field `filepath` - at `\$\.images\[0\]`"):
        read_karpathy(write(make_document("flickr30k")), "coco")
    with pytest.raises(UserError, match=r"unknown dataset 'coca' \(did you mean 'coco'\?\); known: coco, flickr30k"):
        read_karpathy(write(make_document()), "coca")


def test_name_of_the_data_set(write):
    document = make_document()
    assert read_karpathy(write(document | {"dataset": "stamps"}), "coco")[0].dataset == "stamps"
    assert read_karpathy(write(document), "coco", dataset_name="mine")[0].dataset == "mine"
    del document["dataset"]
    assert read_karpathy(write(document), "coco")[0].dataset == "coco"
    with pytest.raises(UserError, match=r"dataset.json: image 0 \(0.jpg\): 'a/b' cannot name a data set"):
        read_karpathy(write(document), "coco", dataset_name="a/b")


def sentence_with(**fields):
    document = make_document()
    document["images"][2]["sentences"][1].update(fields)
    return document


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "Expected `object`, got `array`; expected Karpathy's format"),
        ('{"annotations": []}', "Object missing required field `images`; expected Karpathy's format"),
        # COCO's own format.
        ('{"images": [{"id": 1}]}', "field `filename` .* `vl-plugins shards coco-captions` converts COCO's own"),
        (
            make_document(splits=("train", "trian")),
            r"Invalid enum value 'trian' - at `\$.images\[1\].split`; .*restval",
        ),
        (sentence_with(raw=None), r"Expected `str`, got `null` - at `\$.images\[2\].sentences\[1\].raw`"),
        (sentence_with(sentid=True), r"Expected `int`, got `bool` - at `\$.images\[2\].sentences\[1\].sentid`"),
    ],
)
def test_wrong_file_always_raises(write, content, message):
    file, rejected = write(content), []
    with pytest.raises(UserError, match=message) as raised:
        read_karpathy(file, "coco", rejected=rejected)
    assert str(raised.value).startswith(str(file))
    assert "\n" not in str(raised.value)
    assert not rejected


def test_file_that_cannot_be_read(tmp_path):
    (tmp_path / "latin.json").write_bytes('{"images": "é"}'.encode("latin-1"))
    for file, message in (
        ("/dev/zero", r"cannot read /dev/zero: it is not a regular file"),
        (tmp_path / "nowhere.json", r"cannot read .*nowhere.json: No such file"),
        (tmp_path / "latin.json", r"latin.json is not valid JSON: 'utf-8' codec can't decode"),
    ):
        with pytest.raises(UserError, match=message):
            read_karpathy(file, "coco")


# Of four images, what is wrong with the one with the number 2.
WRONG_IMAGES = {
    "repeated id": ({"cocoid": 1000}, "image id 1000 occurs more than once"),
    "repeated caption id": ({"sentences": [{"raw": "a", "sentid": 0}]}, "caption id 0 occurs more than once"),
    "no captions": ({"sentences": []}, "it has no captions; every image needs at least one"),
    "blank caption": ({"sentences": [{"raw": " \n", "sentid": 9}]}, r"caption ' \n' is blank"),
    "half a character": ({"sentences": [{"raw": "\ud800", "sentid": 9}]}, "is not valid Unicode"),
    "half a character in the name": ({"filename": "\ud800.jpg"}, r"path 'val2014/\ud800.jpg' is not valid Unicode"),
    "absolute name": ({"filename": "/etc/passwd"}, "'/etc/passwd' leads out of the image root"),
    "parent path": ({"filepath": "a/../.."}, "'a/../../2.jpg' leads out of the image root"),
    "drive": ({"filepath": "C:/"}, "leads out of the image root"),
    "group": ({"object": [1]}, "Expected `int | str | null`, got `array` - at `$.group`"),
}


@pytest.mark.parametrize("problem", WRONG_IMAGES)
def test_wrong_image_raises_or_is_rejected(write, problem):
    changes, message = WRONG_IMAGES[problem]
    document = make_document()
    document["images"][2] |= changes
    file, rejected = write(document), []
    with pytest.raises(UserError) as raised:
        read_karpathy(file, "coco", group_key="object")
    assert str(raised.value).startswith(f"{file}: image 2 (")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    images = read_karpathy(file, "coco", group_key="object", rejected=rejected)
    assert [image.image_id for image in images] == [1000, 1001, 1003]
    place, _, reason = str(raised.value).partition("): ")
    assert rejected == [RejectedImage(f"{place})", "val", reason)]


VALID = {
    "image_id": "a",
    "file": "a/b.jpg",
    "captions": ("a cat", "a dog"),
    "caption_ids": ("1", "2"),
    "split": "train_2017",
    "dataset": "my-set",
    "filename": "b.jpg",
}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("caption_ids", (1,), "it has 1 caption ids for 2 captions"),
        ("split", "val/2017", "'val/2017' cannot name a split; use letters, digits, '_' and '-'"),
        ("split", "val\n", r"'val\\n' cannot name a split"),
        ("filename", "\ud800.jpg", r"file name '\\ud800.jpg' is not valid Unicode: surrogates not allowed"),
        ("image_id", "\ud800", r"image id '\\ud800' is not valid Unicode"),
    ],
)
def test_an_image_that_shards_cannot_hold_cannot_be_made(field, value, message):
    assert CaptionedImage(**VALID, group=" ").group is None
    with pytest.raises(UserError, match=f"^{message}"):
        CaptionedImage(**{**VALID, field: value})


def gather(*rows, rejected=None):
    complete = [{**VALID, "image_id": None, "group": None, **row} for row in rows]
    for row, given in zip(complete, rows, strict=True):
        if "caption_ids" not in given:
            del row["caption_ids"]
    return gather_images(((f"row {number}", row) for number, row in enumerate(complete)), rejected)


def test_ids_are_joined_with_the_captions_of_an_image():
    (image,) = gather({"caption_ids": [5, 3]}, {"file": "./a//b.jpg", "caption_ids": [4, 9]})
    assert (image.image_id, image.captions, image.caption_ids) == (0, ("a cat", "a dog") * 2, (5, 3, 4, 9))
    with pytest.raises(UserError, match="row 1: image_id 7, but None in row 0; rows of one image must agree"):
        gather({}, {"image_id": 7})
    others = {"file": "c.jpg", "image_id": 5}
    with pytest.raises(UserError, match="row 1: image id 5 occurs more than once"):
        gather({"image_id": 5}, others, others)


@pytest.mark.parametrize("split", [None, 3, "a b"])
def test_an_image_without_a_usable_split_cannot_be_counted_and_always_raises(split):
    with pytest.raises(UserError, match=r"^row 0: "):
        gather({"split": split}, rejected=[])
