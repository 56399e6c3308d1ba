import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vl_plugins.data.annotations import CaptionedImage
from vl_plugins.data.coco_captions import read_coco_captions, with_annotation_ids
from vl_plugins.errors import UserError


def make_document(first=0, images=3):
    """Image i has the id 100 + i and the annotations 2i and 2i + 1; annotations are listed last image first."""
    numbers = range(first, first + images)
    return {
        "info": {},
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
        file.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
        return file

    return write_document


def test_images_and_captions_are_in_the_order_of_the_file(write):
    document = make_document()
    document["images"][1]["object"] = "frog"
    file = write(document)
    images = read_coco_captions([file], group_key="object")
    assert [(image.image_id, image.group) for image in images] == [(100, None), (101, "frog"), (102, None)]
    captions = ("caption 1-1", "caption 1-0")
    assert images[1] == CaptionedImage(101, "1.jpg", captions, (3, 2), "val2017", "coco", "1.jpg", "frog")
    assert with_annotation_ids(images, [file]) == images


def test_each_file_is_a_split_with_its_name_and_perhaps_a_folder(write, tmp_path):
    files = [write(make_document(5), "captions_val2017.json"), write(make_document(), "mine.json")]
    (tmp_path / "images" / "val2017").mkdir(parents=True)
    images = read_coco_captions(files, image_root=tmp_path / "images", dataset_name="birds")
    assert [(image.image_id, image.split, image.file) for image in images] == [
        *((105 + index, "val2017", f"val2017/{5 + index}.jpg") for index in range(3)),
        *((100 + index, "mine", f"{index}.jpg") for index in range(3)),
    ]
    assert {image.dataset for image in images} == {"birds"}


def test_files_and_names_that_do_not_go_together(write, tmp_path):
    file = write(make_document())
    (tmp_path / "other").mkdir()
    other = write(make_document(5), "other/captions_val2017.json")
    with pytest.raises(UserError, match=r"two files of one split, among .*captions_val2017.json, .*other/captions_val"):
        read_coco_captions([file, other])
    with pytest.raises(UserError, match=r"captions_my.set.json: image 0 \(0.jpg\): 'my.set' cannot name a split"):
        read_coco_captions([write(make_document(), "captions_my.set.json")], rejected=[])
    with pytest.raises(UserError, match=r"cannot read .*nowhere.json: No such file"):
        read_coco_captions([tmp_path / "nowhere.json"])


def document_with(part, **fields):
    document = make_document()
    document[part][1].update(fields)
    return document


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        # Files of the test images.
        ({"images": make_document()["images"]}, "missing required field `annotations`; expected a file like captions_"),
        # Karpathy's.
        ({"images": [{"filename": "1.jpg"}], "annotations": []}, r"`vl-plugins shards coco` converts Karpathy's"),
        (document_with("images", file_name=1), r"Expected `str`, got `int` - at `\$.images\[1\].file_name`"),
        (document_with("annotations", id=True), r"Expected `int`, got `bool` - at `\$.annotations\[1\].id`"),
        (document_with("annotations", image_id="7"), r"got `str` - at `\$.annotations\[1\].image_id`"),
        (make_document() | {"annotations": [None]}, r"Expected `object`, got `null` - at `\$.annotations\[0\]`"),
    ],
)
def test_wrong_file_always_raises(write, content, message):
    file, rejected = write(content), []
    with pytest.raises(UserError, match=message) as raised:
        read_coco_captions([file], rejected=rejected)
    assert str(raised.value).startswith(str(file))
    assert "\n" not in str(raised.value)
    assert not rejected


def test_wrong_images_and_annotations_without_an_image(write):
    document = make_document()
    document["annotations"][3]["caption"] = " "
    document["images"] += [{"id": 103, "file_name": "3.jpg"}, {"id": 102, "file_name": "4.jpg"}]
    document["annotations"] += [{"id": 9, "image_id": 7, "caption": "x"}, {"id": 10, "image_id": 7, "caption": "y"}]
    file, rejected = write(document), []
    # The annotations belong to the first image with the id.
    images = read_coco_captions([file], rejected=rejected)
    assert [(image.image_id, len(image.captions)) for image in images] == [(100, 2), (102, 2)]
    assert {item.split for item in rejected} == {"val2017"}
    assert [(item.image, item.reason.partition(";")[0]) for item in rejected] == [
        (f"{file}: image 1 (1.jpg)", "caption ' ' is blank"),
        (f"{file}: image 3 (3.jpg)", "it has no captions"),
        (f"{file}: image 4 (4.jpg)", "image id 102 occurs more than once"),
        (f"{file}: image id 7", "it has annotations, but is not among the images of the file"),
    ]


def test_ids_are_unique_over_all_files(write):
    document = json.dumps(make_document(2)).replace('"2.jpg"', '"other.jpg"')
    files = [write(make_document()), write(document, "captions_train2017.json")]
    with pytest.raises(UserError, match=r"captions_train2017.json: image 0 \(other.jpg\): image id 102 occurs more"):
        read_coco_captions(files)


def make_images(captions_of_images):
    """Return images with the ids 100, 101, ... and running caption ids that are none of the annotations'."""
    return [
        CaptionedImage(
            100 + index,
            f"val2014/{index}.jpg",
            tuple(captions),
            tuple(1000 + 10 * index + number for number in range(len(captions))),
            "test",
            "coco",
            f"{index}.jpg",
        )
        for index, captions in enumerate(captions_of_images)
    ]


def write_annotations(write, captions_of_images, name="captions_val2014.json"):
    """Write annotations of the images 100, 101, ... with the running numbers of all captions as ids."""
    pairs = [(100 + index, caption) for index, captions in enumerate(captions_of_images) for caption in captions]
    annotations = [
        {"id": number, "image_id": image_id, "caption": caption} for number, (image_id, caption) in enumerate(pairs)
    ]
    return write({"annotations": annotations}, name)


def test_annotation_ids_replace_the_others_and_nothing_else(write):
    images = make_images([["a cat", "a dog"], ["a cat"]])
    file = write_annotations(write, [["not this one", "a dog", "a cat"], ["a cat"]])
    expected = [replace(images[0], caption_ids=(2, 1)), replace(images[1], caption_ids=(3,))]
    assert with_annotation_ids(images, [file]) == expected


@pytest.mark.parametrize(
    ("captions", "official", "caption_ids"),
    [
        (["a", "b", "a"], ["a", "a", "b"], (0, 2, 1)),  # equal ones in order
        (["a dog", "A Cat"], ["a\tcat\n", "a dog"], (1, 0)),
        (["STRASSE"], ["straße"], (0,)),
    ],
)
def test_captions_are_matched_but_for_case_and_white_space(write, captions, official, caption_ids):
    (image,) = with_annotation_ids(make_images([captions]), [write_annotations(write, [official])])
    assert image.caption_ids == caption_ids


@pytest.mark.parametrize(
    ("captions", "official", "reason"),
    [
        # The missing one belongs to another image.
        (["a cat", "a bird"], ["a cat", "a dog"], "caption 'a bird' is not, or not as often, among the annotations"),
        (["a cat", "A cat"], ["a cat", "a dog"], "caption 'A cat' is not, or not as often, among the annotations"),
        (["a cat"], [], "it has no annotations there; Karpathy's splits need those of train2014 and val2014"),
    ],
)
def test_a_caption_or_an_image_without_annotations(write, captions, official, reason):
    file = write_annotations(write, [["a bird"], official, ["a fish"]])
    images, rejected = make_images([["a bird"], captions, ["a fish"]]), []
    with pytest.raises(UserError) as raised:
        with_annotation_ids(images, [file])
    assert str(raised.value).startswith(f"{file}: image id 101 (val2014/1.jpg): {reason}")
    assert [image.image_id for image in with_annotation_ids(images, [file], rejected=rejected)] == [100, 102]
    assert [(f"{item.image}: {item.reason}", item.split) for item in rejected] == [(str(raised.value), "test")]


def test_annotation_ids_that_are_there_twice(write):
    files = [
        write_annotations(write, [["a cat"]]),
        write_annotations(write, [[], ["a dog"]], "captions_train2014.json"),
    ]
    with pytest.raises(UserError, match=r"image id 101 .*: caption id 0 occurs more than once"):
        with_annotation_ids(make_images([["a cat"], ["a dog"]]), files)


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
    for change in (str, lambda text: f" {text.upper()}"):
        images = [
            replace(image, captions=tuple(map(change, random_order.sample(image.captions, len(image.captions)))))
            for image in make_images(captions_of_images)
        ]
        found = with_annotation_ids(images, files)
        assert [image.captions for image in found] == [image.captions for image in images]
        assert sorted(caption_id for image in found for caption_id in image.caption_ids) == sorted(texts)
        for image in found:
            for caption, caption_id in zip(image.captions, image.caption_ids, strict=True):
                assert caption.upper().split() == texts[caption_id].upper().split()
                assert caption_id // 100 == image.image_id - 100
