"""Karpathy's files, COCO's caption files, and what all sources check."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vl_plugins.data.sources import (
    CaptionedImage,
    RejectedImage,
    read_coco_captions,
    read_karpathy,
    with_annotation_ids,
)
from vl_plugins.errors import UserError

SPLITS = ("train", "restval", "val", "test")


def karpathy(dataset="coco", splits=SPLITS):
    """Image i has the captions 10 i and 10 i + 1."""
    images = []
    for index, split in enumerate(splits):
        sentences = [{"raw": f"caption {index}-{place}", "sentid": 10 * index + place} for place in range(2)]
        image = {"filename": f"{index}.jpg", "imgid": index, "split": split, "sentences": sentences}
        images.append(image | ({"filepath": "val2014", "cocoid": 1000 + index} if dataset == "coco" else {}))
    return {"dataset": dataset, "images": images}


def official(first=0, images=3):
    """Image i has the id 100 + i and the annotations 2i and 2i + 1; annotations are listed last image first."""
    numbers = range(first, first + images)
    return {
        "images": [{"id": 100 + number, "file_name": f"{number}.jpg", "height": 1} for number in numbers],
        "annotations": [
            {"id": 2 * number + which, "image_id": 100 + number, "caption": f"caption {number}-{which}"}
            for number in reversed(numbers)
            for which in (1, 0)
        ],
    }


@pytest.fixture
def write(tmp_path):
    def write_document(document, name="captions_val2017.json"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
        return file

    return write_document


def test_karpathy_coco(write):
    document = karpathy()
    document["images"][2]["object"] = 7
    images = read_karpathy(write(document), "coco", group_key="object")
    ids_and_splits = [(image.image_id, image.split) for image in images]
    assert ids_and_splits == [(1000, "train"), (1001, "train"), (1002, "val"), (1003, "test")]
    captions = ("caption 2-0", "caption 2-1")
    assert images[2] == CaptionedImage(1002, "val2014/2.jpg", captions, (20, 21), "val", "coco", "2.jpg", 7)
    images = read_karpathy(write(document), "coco", join_restval=False, dataset_name="mine")
    assert [(image.split, image.group, image.dataset) for image in images[1:3]] == [
        ("restval", None, "mine"),
        ("val", None, "mine"),
    ]


def test_karpathy_flickr30k(write):
    """With the folders and ids of COCO, which are not for it."""
    image = read_karpathy(write(karpathy() | {"dataset": "stamps"}), "flickr30k")[3]
    assert (image.image_id, image.file, image.split, image.dataset) == (3, "3.jpg", "test", "stamps")
    with pytest.raises(UserError, match=r"unknown dataset 'coca' \(did you mean 'coco'\?\); known: coco, flickr30k"):
        read_karpathy(write(karpathy()), "coca")


@pytest.mark.parametrize("dataset", ["coco", "flickr30k"])
def test_a_file_of_ones_own_needs_no_ids_and_folders(write, dataset):
    images = [
        {"filename": "a/1.jpg", "split": "validation", "sentences": [{"raw": "one"}, {"raw": "two"}]},
        {"filename": "a/2.jpg", "split": "train", "sentences": [{"raw": "three"}]},
    ]
    assert read_karpathy(write({"images": images}), dataset) == [
        CaptionedImage(0, "a/1.jpg", ("one", "two"), (0, 1), "val", dataset, "a/1.jpg"),
        CaptionedImage(1, "a/2.jpg", ("three",), (2,), "train", dataset, "a/2.jpg"),
    ]
    images[0]["imgid"], images[1]["imgid"] = 7, 5
    images[0]["sentences"][0]["sentid"] = 9  # one of three
    found = read_karpathy(write({"images": images}), dataset)
    assert [(image.image_id, image.caption_ids) for image in found] == [(7, (0, 1)), (5, (2,))]


def with_field(document, part, **fields):
    document[part][1].update(fields)
    return document


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        ("karpathy", "{", "is not valid JSON"),
        ("karpathy", "[]", "Expected `object`, got `array`; expected Karpathy's format"),
        ("karpathy", official(), "field `filename` .* `vl-plugins shards coco-captions` converts COCO's own"),
        ("karpathy", karpathy(splits=("val", "trian")), r"Invalid enum value 'trian' - at `\$.images\[1\].split`; "),
        ("karpathy", with_field(karpathy(), "images", cocoid="3"), r"got `str` - at `\$.images\[1\].cocoid`"),
        ("official", {"images": []}, "missing required field `annotations`; expected a file like captions_"),
        ("official", karpathy() | {"annotations": []}, "`vl-plugins shards coco` converts Karpathy's"),
        ("official", with_field(official(), "annotations", id=True), r"got `bool` - at `\$.annotations\[1\].id`"),
    ],
)
def test_a_file_of_another_format_always_raises(write, read, content, message):
    file, rejected = write(content), []
    arguments = (read_karpathy, file, "coco") if read == "karpathy" else (read_coco_captions, [file])
    with pytest.raises(UserError, match=message) as raised:
        arguments[0](*arguments[1:], rejected=rejected)
    assert str(raised.value).startswith(str(file))
    assert "\n" not in str(raised.value)
    assert not rejected


def test_a_file_that_cannot_be_read(tmp_path):
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
    "caption id twice": ({"sentences": [{"raw": "a", "sentid": 9}] * 2}, "caption id 9 occurs more than once"),
    "caption id of another type": ({"sentences": [{"raw": "a", "sentid": True}]}, "Expected `int | str`, got `bool`"),
    "no captions": ({"sentences": []}, "it has no captions; every image needs at least one"),
    "blank caption": ({"sentences": [{"raw": " \n", "sentid": 9}]}, r"caption ' \n' is blank"),
    "half a character": ({"sentences": [{"raw": "\ud800", "sentid": 9}]}, r"'\ud800' is not valid Unicode"),
    "half a character in the name": ({"filename": "\ud800.jpg"}, r"'val2014/\ud800' is not valid Unicode"),
    "absolute name": ({"filename": "/etc/passwd"}, "'/etc/passwd' leads out of the image root"),
    "parent path": ({"filepath": "a/../.."}, "'a/../../2.jpg' leads out of the image root"),
    "drive": ({"filepath": "C:/"}, "leads out of the image root"),
    "Windows parent": ({"filepath": "..\\b"}, "leads out of the image root"),
    "group": ({"object": [1]}, "Expected `int | str | null`, got `array` - at `$.group`"),
}


@pytest.mark.parametrize("problem", WRONG_IMAGES)
def test_a_wrong_image_raises_or_is_rejected(write, problem):
    changes, message = WRONG_IMAGES[problem]
    document = karpathy()
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


def test_the_ids_of_a_rejected_image_stay_free(write):
    document = karpathy()
    document["images"][1]["filename"] = "../1.jpg"
    document["images"][2]["cocoid"] = 1001
    images = read_karpathy(write(document), "coco", rejected=[])
    assert [image.image_id for image in images] == [1000, 1001, 1003]


VALID = {"image_id": "a", "file": "a/b.jpg", "captions": ("a cat", "a dog"), "caption_ids": ("1", "2")}
VALID |= {"split": "train_2017", "dataset": "my-set", "filename": "b.jpg"}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("caption_ids", (1,), "it has 1 caption ids for 2 captions"),
        ("split", "val/2017", "'val/2017' cannot name a split; use letters, digits, '_' and '-'"),
        ("dataset", "val\n", r"'val\\n' cannot name a data set"),
        ("image_id", "\ud800", r"'\\ud800' is not valid Unicode"),
    ],
)
def test_an_image_that_shards_cannot_hold_cannot_be_made(field, value, message):
    assert CaptionedImage(**VALID, group=" ").group is None
    with pytest.raises(UserError, match=f"^{message}"):
        CaptionedImage(**{**VALID, field: value})


def test_official_files_in_their_order(write):
    document = official()
    document["images"][1]["object"] = "frog"
    file = write(document)
    images = read_coco_captions([file], group_key="object")
    assert [(image.image_id, image.group) for image in images] == [(100, None), (101, "frog"), (102, None)]
    captions = ("caption 1-1", "caption 1-0")
    assert images[1] == CaptionedImage(101, "1.jpg", captions, (3, 2), "val2017", "coco", "1.jpg", "frog")
    assert with_annotation_ids(images, [file]) == images


def test_each_official_file_is_a_split_and_perhaps_a_folder(write, tmp_path):
    files = [write(official(5), "captions_val2017.json"), write(official(), "captions_validation.json")]
    (tmp_path / "images" / "val2017").mkdir(parents=True)
    images = read_coco_captions(files, image_root=tmp_path / "images", dataset_name="birds")
    assert [(image.image_id, image.split, image.file, image.dataset) for image in images] == [
        *((105 + index, "val2017", f"val2017/{5 + index}.jpg", "birds") for index in range(3)),
        *((100 + index, "val", f"{index}.jpg", "birds") for index in range(3)),
    ]


def test_official_files_that_do_not_go_together(write):
    file, again = write(official()), write(official(5), "other/captions_val2017.json")
    with pytest.raises(UserError, match=r"two files of one split, among .*captions_val2017.json, .*other/captions_val"):
        read_coco_captions([file, again])
    with pytest.raises(UserError, match=r"captions_my.set.json: image 0 \(0.jpg\): 'my.set' cannot name a split"):
        read_coco_captions([write(official(), "captions_my.set.json")], rejected=[])
    other = json.dumps(official(2)).replace('"2.jpg"', '"other.jpg"')
    with pytest.raises(UserError, match=r"captions_a.json: image 0 \(other.jpg\): image id 102 occurs more"):
        read_coco_captions([file, write(other, "captions_a.json")])


def test_images_without_annotations_and_annotations_without_an_image(write):
    document = official()
    document["images"] += [{"id": 103, "file_name": "3.jpg"}]
    document["annotations"] += [{"id": 9, "image_id": 7, "caption": "x"}]
    file, rejected = write(document), []
    assert [image.image_id for image in read_coco_captions([file], rejected=rejected)] == [100, 101, 102]
    assert [(item.image, item.split, item.reason.partition(";")[0]) for item in rejected] == [
        (f"{file}: image 3 (3.jpg)", "val2017", "it has no captions"),
        (f"{file}: image id 7", "val2017", "it has annotations, but is not among the images of the file"),
    ]


def make_images(captions_of_images):
    """Return images with the ids 100, 101, ... and running caption ids that are none of the annotations'."""
    images = []
    for index, captions in enumerate(captions_of_images):
        caption_ids = tuple(1000 + 10 * index + number for number in range(len(captions)))
        name = f"{index}.jpg"
        image = CaptionedImage(100 + index, f"val2014/{name}", tuple(captions), caption_ids, "test", "coco", name)
        images.append(image)
    return images


@pytest.mark.parametrize(
    ("captions", "annotations", "reason"),
    [
        # The missing one belongs to another image.
        (["a cat", "a bird"], ["a cat", "a dog"], "caption 'a bird' is not, or not as often, among the annotations"),
        (["a cat", "A cat"], ["a cat", "a dog"], "caption 'A cat' is not, or not as often, among the annotations"),
        (["a cat"], [], "it has no annotations there; Karpathy's splits need those of train2014 and val2014"),
    ],
)
def test_a_caption_or_an_image_without_annotations(write, captions, annotations, reason):
    pairs = [(100, "a bird"), *((101, caption) for caption in annotations), (102, "a fish")]
    items = [{"id": number, "image_id": image, "caption": text} for number, (image, text) in enumerate(pairs)]
    file = write({"annotations": items})
    images, rejected = make_images([["a bird"], captions, ["a fish"]]), []
    with pytest.raises(UserError) as raised:
        with_annotation_ids(images, [file])
    assert str(raised.value).startswith(f"{file}: image id 101 (1.jpg): {reason}")
    assert [image.image_id for image in with_annotation_ids(images, [file], rejected=rejected)] == [100, 102]
    assert [(f"{item.image}: {item.reason}", item.split) for item in rejected] == [(str(raised.value), "test")]
    items[-1]["id"] = 0
    with pytest.raises(UserError, match=r"image id 102 .*: caption id 0 occurs more than once"):
        with_annotation_ids([images[0], images[2]], [write({"annotations": items})])


# Few words, so that captions that are equal, and equal but for case and space, are frequent.
WORDS = st.sampled_from(["a", "A", "cat", "CAT", " ", "\n", "İ"])
CAPTIONS = st.lists(WORDS, min_size=1, max_size=4).map(" ".join).filter(str.strip)


@settings(max_examples=60)
@given(st.lists(st.lists(CAPTIONS, min_size=1, max_size=6), min_size=1, max_size=5), st.randoms())
def test_annotation_ids_of_a_shuffled_file(tmp_path_factory, captions_of_images, random_order):
    folder = tmp_path_factory.mktemp("shuffled")
    annotations = [
        {"id": 100 * index + number, "image_id": 100 + index, "caption": caption}
        for index, captions in enumerate(captions_of_images)
        for number, caption in enumerate(captions)
    ]
    random_order.shuffle(annotations)
    half = len(annotations) // 2
    files = [folder / "captions_train2014.json", folder / "captions_val2014.json"]
    for file, part in zip(files, (annotations[:half], annotations[half:]), strict=True):
        file.write_text(json.dumps({"annotations": part}))

    # Karpathy's order is not the official one, and white space and case may differ.
    texts = {item["id"]: item["caption"] for item in annotations}
    order = {item["id"]: number for number, item in enumerate(annotations)}
    for change in (str, lambda text: f" {text.upper()}"):
        images = [
            replace(image, captions=tuple(map(change, random_order.sample(image.captions, len(image.captions)))))
            for image in make_images(captions_of_images)
        ]
        found = with_annotation_ids(images, files)
        assert [image.captions for image in found] == [image.captions for image in images]
        assert sorted(caption_id for image in found for caption_id in image.caption_ids) == sorted(texts)
        for image in found:
            by_text = {}
            for caption, caption_id in zip(image.captions, image.caption_ids, strict=True):
                assert caption.upper().split() == texts[caption_id].upper().split()
                assert caption_id // 100 == image.image_id - 100
                by_text.setdefault(caption, []).append(order[caption_id])
            assert all(numbers == sorted(numbers) for numbers in by_text.values())  # equal ones in the file's order
