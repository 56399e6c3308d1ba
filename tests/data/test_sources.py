"""Karpathy's files, COCO's caption files, and what all sources check."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vl_plugins.data import (
    CaptionedImage,
    RejectedImage,
    normalize_caption,
    read_coco_captions,
    read_karpathy,
    with_annotation_ids,
)
from vl_plugins.errors import InputWarning, UserError


def karpathy(dataset="coco", splits=("train", "restval", "val", "test")):
    """Image i has the captions 10 i and 10 i + 1."""
    images = []
    for index, split in enumerate(splits):
        sentences = [{"raw": f"caption {index}-{place}", "sentid": 10 * index + place} for place in range(2)]
        image = {"filename": f"{index}.jpg", "imgid": index, "split": split, "sentences": sentences}
        images.append(image | {"filepath": "val2014", "cocoid": 1000 + index})
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
        file.write_bytes((document if isinstance(document, str) else json.dumps(document)).encode("latin-1"))
        return file

    return write_document


def test_karpathy(write):
    document = karpathy()
    document["images"][2]["group"] = 7
    images = list(read_karpathy(write(document)))
    ids_and_splits = [(image.image_id, image.split) for image in images]
    assert ids_and_splits == [(1000, "train"), (1001, "train"), (1002, "val"), (1003, "test")]
    captions = ("caption 2-0", "caption 2-1")
    assert images[2] == CaptionedImage(1002, "val2014/2.jpg", captions, (20, 21), "val", "coco", "2.jpg", 7)
    assert next(iter(read_karpathy(write(document), dataset_name="mine"))).dataset == "mine"


@pytest.mark.parametrize("dataset", ["coco", "flickr30k"])
def test_a_file_of_ones_own_needs_no_ids_and_folders(write, dataset):
    images = [
        {"filename": "a/1.jpg", "split": "validation", "sentences": [{"raw": "one"}]},
        {"filename": "a/2.jpg", "split": "train", "sentences": [{"raw": "three"}]},
        {"filename": "a/1.jpg", "split": "validation", "sentences": [{"raw": "two"}]},
    ]
    assert list(read_karpathy(write({"images": images}), dataset)) == [
        CaptionedImage(0, "a/1.jpg", ("one", "two"), (0, 1), "val", dataset, "a/1.jpg"),
        CaptionedImage(1, "a/2.jpg", ("three",), (2,), "train", dataset, "a/2.jpg"),
    ]
    for item, number in zip(images, (7, 5, 7), strict=True):
        item["imgid"] = number
    images[0]["sentences"][0]["sentid"] = 9  # one of three
    found = read_karpathy(write({"images": images}), dataset)
    assert [(image.image_id, image.caption_ids) for image in found] == [(7, (0, 1)), (5, (2,))]


def with_field(document, part, **fields):
    document[part][1].update(fields)
    return document


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_karpathy, "{", "{file}: Input data was truncated"),
        (read_karpathy, "é", "{file}: JSON is malformed: "),
        (read_karpathy, karpathy("\ud800"), "{file}: JSON is malformed: "),
        (read_karpathy, "[]", "{file}: Expected `object`, got `array`"),
        (read_karpathy, official(), "missing required field `filename` - at `$.images[0]`"),
        (read_karpathy, karpathy(splits=("val", "trian")), "Invalid enum value 'trian' - at `$.images[1].split`"),
        (read_karpathy, with_field(karpathy(), "images", cocoid="3"), "got `str` - at `$.images[1].cocoid`"),
        (read_coco_captions, karpathy() | {"annotations": []}, "missing required field `id` - at `$.images[0]`"),
        (read_coco_captions, with_field(official(), "annotations", id=True), "`bool` - at `$.annotations[1].id`"),
    ],
)
def test_a_file_of_another_format_always_raises(write, read, content, message):
    file = write(content)
    with pytest.raises(UserError) as raised:
        list(read(*((file, "coco") if read is read_karpathy else ([file],))))
    assert message.format(file=file) in str(raised.value)


# Of four images, what is wrong with the one with the number 2.
WRONG_IMAGES = {
    "repeated id": ({"cocoid": 1000}, "image id 1000 occurs more than once"),
    "caption ids of the next image and of an earlier one": (
        {"sentences": [{"raw": "a", "sentid": 30}, {"raw": "b", "sentid": 0}]},
        "caption id 0 occurs more than once",
    ),
    "caption id twice": ({"sentences": [{"raw": "a", "sentid": 9}] * 2}, "caption id 9 occurs more than once"),
    "blank caption": (
        {"sentences": [{"raw": " \n", "sentid": 9}]},
        "it has no captions, or a blank one",
    ),
    "parent path": ({"filepath": "a/../.."}, "'a/../../2.jpg' leads out of the image root"),
    "Windows parent": ({"filepath": "..\\b"}, "leads out of the image root"),
    "group": ({"group": [1]}, "Expected `int | str | null`, got `array` - at `$.group`"),
}


@pytest.mark.parametrize("problem", WRONG_IMAGES)
def test_a_wrong_image_is_rejected(write, problem):
    changes, reason = WRONG_IMAGES[problem]
    document = karpathy()
    document["images"][2] |= changes
    file = write(document)
    first, second, rejected, last = read_karpathy(file, "coco")
    assert [image.file for image in (first, second, last)] == [f"val2014/{number}.jpg" for number in (0, 1, 3)]
    assert rejected.image == f"{file}: image 2 ({document['images'][2]['filename']})"
    assert rejected.split == "val"
    assert reason in rejected.reason


def test_official_files_in_their_order(write):
    file = write(with_field(official(), "images", group="frog"))
    images = list(read_coco_captions([file]))
    assert [(image.image_id, image.group) for image in images] == [(100, None), (101, "frog"), (102, None)]
    captions = ("caption 1-1", "caption 1-0")
    assert images[1] == CaptionedImage(101, "1.jpg", captions, (3, 2), "val2017", "coco", "1.jpg", "frog")


def test_each_official_file_is_a_split_and_perhaps_a_folder(write, tmp_path):
    files = [write(official(5), "captions_val2017.json"), write(official(), "captions_validation.json")]
    (tmp_path / "images" / "val2017").mkdir(parents=True)
    images = list(read_coco_captions(files, image_root=tmp_path / "images", dataset_name="birds"))
    assert [(image.image_id, image.split, image.file, image.dataset) for image in images] == [
        *((105 + index, "val2017", f"val2017/{5 + index}.jpg", "birds") for index in range(3)),
        *((100 + index, "val", f"{index}.jpg", "birds") for index in range(3)),
    ]


def test_official_files_that_do_not_go_together(write):
    other = json.dumps(official(2)).replace('"2.jpg"', '"other.jpg"')
    files = [write(official()), write(other, "captions_a.json"), write(official(9), "captions_my.set.json")]
    *_, repeated, _, _, unnamed, _, _ = read_coco_captions(files)
    reason = (
        f"image id 102 is in {files[0]}, too; ids must be unique in all files that are given: write each file by its "
        "own command, with another --dataset-name"
    )
    assert repeated == RejectedImage(f"{files[1]}: image 0 (other.jpg)", "a", reason)
    assert unnamed.reason.startswith("'my.set' cannot name a split")


@pytest.mark.parametrize("name", ["3.jpg", "1.jpg"], ids=["two files", "one file"])
def test_images_with_one_id_get_no_captions(write, name):
    """Nobody knows whose captions these are; and an entry may be in the file twice."""
    document = official()
    document["images"].append({"id": 101, "file_name": name})
    file = write(document)
    images = list(read_coco_captions([file]))
    assert [image.image_id for image in images if isinstance(image, CaptionedImage)] == [100, 102]
    rejected = [image for image in images if isinstance(image, RejectedImage)]
    assert len(rejected) == 2
    for image in rejected:
        assert image.reason == "image id 101 occurs in the entries 1, 3 of 'images'; ids must be unique"


def test_an_image_without_annotations(write):
    document = official()
    document["images"].insert(1, {"id": 103, "file_name": "3.jpg"})
    file = write(document)
    images = list(read_coco_captions([file]))
    assert [getattr(image, "image_id", None) for image in images] == [100, None, 101, 102]
    reason = "it has no captions, or a blank one; every image needs at least one"
    assert images[1] == RejectedImage(f"{file}: image 1 (3.jpg)", "val2017", reason)


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
    ("captions", "annotations"),
    [
        (["a cat", "a bird"], ["a cat", "a dog"]),  # the missing one belongs to another image
        (["a cat", "A cat"], ["a cat", "a dog"]),
        (["a cat"], []),
    ],
)
def test_a_caption_or_an_image_without_annotations(write, captions, annotations):
    pairs = [(100, "a bird"), *((101, caption) for caption in annotations), (102, "a fish")]
    items = [{"id": number, "image_id": image, "caption": text} for number, (image, text) in enumerate(pairs)]
    file = write({"annotations": items})
    before = RejectedImage("3.jpg", "test", "cut")
    first, rejected, third, last = with_annotation_ids(
        [*make_images([["a bird"], captions, ["a fish"]]), before], [file]
    )
    assert (first.caption_ids, third.caption_ids, last) == ((0,), (len(items) - 1,), before)
    reason = f"not all of its captions are in {file}"
    assert rejected == RejectedImage("image id 101 (1.jpg)", "test", reason)


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
    images = [
        replace(image, captions=tuple(f" {caption.upper()}" for caption in captions))
        for image in make_images(captions_of_images)
        for captions in [random_order.sample(image.captions, len(image.captions))]
    ]
    found = list(with_annotation_ids(images, files))
    assert [image.captions for image in found] == [image.captions for image in images]
    for image in found:
        unused = [item for item in annotations if item["image_id"] == image.image_id]
        for caption, caption_id in zip(image.captions, image.caption_ids, strict=True):
            # Of equal ones, the first in the official file.
            same = (item for item in unused if normalize_caption(item["caption"]) == normalize_caption(caption))
            unused.remove(expected := next(same))
            assert caption_id == expected["id"]


def test_an_image_without_an_id_does_not_take_that_of_another(write):
    """Ids of images without one are running numbers."""
    document = karpathy()
    for index, image in enumerate(document["images"]):
        del image["cocoid"]
        image["imgid"] = None if index == 0 else index - 1
    first, rejected, *rest = read_karpathy(write(document))
    assert (first.image_id, rejected.reason) == (0, "image id 0 occurs more than once; ids must be unique")
    assert [image.image_id for image in rest] == [1, 2]


def test_annotations_of_images_that_are_not_there_are_counted(write):
    document = official()
    del document["images"][0]
    file = write(document)
    with pytest.warns(
        InputWarning, match=r"captions_val2017\.json: 2 annotations are left out, of images that are not in"
    ):
        assert [image.image_id for image in read_coco_captions([file])] == [101, 102]
    del document["images"]
    with pytest.raises(UserError, match=r"captions_val2017\.json: it has no 'images', a list with the id and"):
        list(read_coco_captions([write(document)]))
