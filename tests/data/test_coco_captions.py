import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vl_plugins.data.annotations import CaptionedImage
from vl_plugins.data.coco_captions import read_coco_captions, with_annotation_ids
from vl_plugins.utils.errors import UserError


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
    images = read_coco_captions([write(make_document())])
    assert [image.image_id for image in images] == [100, 101, 102]
    assert images[1] == CaptionedImage(
        image_id=101,
        file="1.jpg",
        captions=("caption 1-1", "caption 1-0"),
        caption_ids=(3, 2),
        split="val2017",
        dataset="coco",
        filename="1.jpg",
    )


def test_a_field_may_be_the_group(write):
    document = make_document()
    document["images"][1]["object"] = "frog"
    file = write(document)
    assert [image.group for image in read_coco_captions([file], group_key="object")] == [None, "frog", None]
    (image,) = with_annotation_ids(read_coco_captions([file], group_key="object")[1:2], [file])
    assert image.group == "frog"


def test_each_file_is_a_split_with_its_name(write):
    files = [write(make_document(5), "captions_val2017.json"), write(make_document(), "mine.json")]
    images = read_coco_captions(files, dataset_name="birds")
    assert [(image.image_id, image.split) for image in images] == [
        *((105 + index, "val2017") for index in range(3)),
        *((100 + index, "mine") for index in range(3)),
    ]
    assert {image.dataset for image in images} == {"birds"}
    assert {image.split for image in read_coco_captions(files[:1], split_name="val")} == {"val"}


def test_folder_of_the_images(write, tmp_path):
    file, root = write(make_document()), tmp_path / "images"

    def path(**options):
        image = read_coco_captions([file], image_root=root, **options)[0]
        assert image.filename == "0.jpg"
        return image.file

    assert path() == "0.jpg"
    (root / "val").mkdir(parents=True)
    assert path() == "0.jpg"
    assert path(split_name="val") == "val/0.jpg"
    (root / "val2017").mkdir()
    assert path() == "val2017/0.jpg"
    # The name of a split changes nothing about where the images of the file are.
    assert path(split_name="val") == "val2017/0.jpg"
    assert path(split_name="test") == "val2017/0.jpg"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "has no captions; expected a file like captions_val2017.json"),
        ({"images": make_document()["images"]}, r"has no captions; .* \(files of the test images have none\)"),
        (make_document() | {"annotations": []}, "has no captions"),
        (make_document() | {"annotations": {}}, "has no captions"),
        ({"annotations": make_document()["annotations"]}, "has no images; expected a list under 'images'"),
        (make_document() | {"images": []}, "has no images"),
    ],
)
def test_wrong_file_always_raises(write, content, message):
    file = write(content)
    for rejected in (None, []):
        with pytest.raises(UserError, match=message) as raised:
            read_coco_captions([file], rejected=rejected)
        assert str(file) in str(raised.value)
        assert "\n" not in str(raised.value)
        assert not rejected


def test_files_and_names_that_do_not_go_together(write, tmp_path):
    file = write(make_document())
    (tmp_path / "other").mkdir()
    other = write(make_document(5), "other/captions_val2017.json")
    with pytest.raises(UserError, match="there is no annotation file"):
        read_coco_captions([])
    with pytest.raises(UserError, match=r"captions_val2017.json and .*other/captions_val2017.json .*split 'val2017'"):
        read_coco_captions([file, other])
    with pytest.raises(UserError, match="'val' cannot be that of 2 files"):
        read_coco_captions([file, other], split_name="val")
    for name in ("a.b", ""):
        with pytest.raises(UserError, match=f"captions_val2017.json: '{name}' cannot name a split"):
            read_coco_captions([file], split_name=name)
    with pytest.raises(UserError, match=r"captions_my.set.json: 'my.set' cannot name a split.* or give --split-name"):
        read_coco_captions([write(make_document(), "captions_my.set.json")])
    with pytest.raises(UserError, match=r"^'my set' cannot name a data set"):
        read_coco_captions([file], dataset_name="my set")
    with pytest.raises(UserError, match=r"cannot read .*nowhere.json: No such file"):
        read_coco_captions([tmp_path / "nowhere.json"])
    karpathy = write({"dataset": "coco", "images": [{"filename": "1.jpg", "sentences": []}]}, "dataset_coco.json")
    with pytest.raises(UserError, match=r"coco.json has no captions; .*`vl-plugins shards coco` converts Karpathy's"):
        read_coco_captions([karpathy])


# In the document, image 1 has the annotations 2 (id 3) and 3 (id 2).
WRONG_ENTRIES = {
    "no file name": (
        lambda image, one, two: image.pop("file_name"),
        "image 1: Object missing required field `file_name`",
    ),
    "file name is a number": (
        lambda image, one, two: image.update(file_name=1),
        r"Expected `str`, got `int`",
    ),
    "absolute path": (lambda image, one, two: image.update(file_name="/etc/x"), "'/etc/x' leads out of the image root"),
    "parent path": (lambda image, one, two: image.update(file_name="../x"), "leads out of the image root"),
    "windows path": (lambda image, one, two: image.update(file_name="..\\x"), "leads out of the image root"),
    "blank caption": (lambda image, one, two: two.update(caption=" "), r"image 1 \(1.jpg\): caption ' ' is blank"),
    "no caption": (
        lambda image, one, two: two.pop("caption"),
        r"image 1 \(1.jpg\): annotation 3: Object missing required field `caption`",
    ),
    "caption is null": (
        lambda image, one, two: one.update(caption=None),
        r"annotation 2: Expected `str`, got `null`",
    ),
    "half a character": (lambda image, one, two: one.update(caption="\ud800"), "is not valid Unicode"),
    "no annotation id": (lambda image, one, two: one.pop("id"), "annotation 2: Object missing required field `id`"),
    "annotation id is text": (lambda image, one, two: one.update(id="3"), r"Expected `int`, got `str`"),
    "annotation id is true": (lambda image, one, two: one.update(id=True), r"Expected `int`, got `bool`"),
    "annotation id twice": (lambda image, one, two: one.update(id=2), "caption id 2 occurs more than once"),
    "annotation id of another": (lambda image, one, two: one.update(id=1), "caption id 1 occurs more than once"),
}


@pytest.mark.parametrize("problem", WRONG_ENTRIES)
def test_wrong_entry_raises_or_its_image_is_rejected_once(write, problem):
    damage, message = WRONG_ENTRIES[problem]
    document = make_document()
    damage(document["images"][1], *document["annotations"][2:4])
    file = write(document)
    with pytest.raises(UserError, match=message) as raised:
        read_coco_captions([file])
    assert str(raised.value).startswith(f"{file}: image 1")
    assert "\n" not in str(raised.value)

    rejected = []
    images = read_coco_captions([file], rejected=rejected)
    assert [(image.image_id, len(image.captions)) for image in images] == [(100, 2), (102, 2)]
    assert [(item.split, item.image[:7]) for item in rejected] == [("val2017", "image 1")]


def test_an_image_without_captions(write):
    document = make_document()
    del document["annotations"][2:4]
    file = write(document)
    with pytest.raises(UserError, match=r"image 1 \(1.jpg\): it has no captions"):
        read_coco_captions([file])
    assert len(read_coco_captions([file], rejected=[])) == 2


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (3, "image 3: Expected `object`, got "),
        ({"file_name": "x.jpg"}, r"image 3 \(x.jpg\): Object missing required field `id`"),
        ({"file_name": "x.jpg", "id": "7"}, r"image 3 \(x.jpg\): Expected `int`, got `str`"),
        ({"file_name": "x.jpg", "id": 101}, r"image 3 \(x.jpg\): image id 101 occurs more than once"),
    ],
)
def test_an_image_without_an_id_of_its_own(write, item, message):
    document = make_document()
    document["images"].append(item)
    file, rejected = write(document), []
    with pytest.raises(UserError, match=message):
        read_coco_captions([file])
    # The annotations belong to the first image with the id.
    assert [len(image.captions) for image in read_coco_captions([file], rejected=rejected)] == [2, 2, 2]
    assert [item.image for item in rejected] == [message[: message.index(":")].replace("\\", "")]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (None, "annotation 6: Expected `object`, got "),
        ({"id": 9, "caption": "x"}, "annotation 6: Object missing required field `image_id`"),
        ({"id": 9, "caption": "x", "image_id": [100]}, r"Expected `int`, got `array`"),
        ({"id": 9, "caption": "x", "image_id": 7}, "its image id 7 is not among the images of the file"),
    ],
)
def test_an_annotation_of_no_image_is_rejected_once_for_each_image(write, item, message):
    document = make_document()
    document["annotations"] += [item, item]
    file, rejected = write(document), []
    with pytest.raises(UserError, match=f"^{file}: annotation 6: ") as raised:
        read_coco_captions([file])
    assert raised.match(message)
    assert len(read_coco_captions([file], rejected=rejected)) == 3
    unknown_image = "among the images" in message
    assert [item.image for item in rejected] == ["annotation 6", "annotation 7"][: 1 if unknown_image else 2]


def test_ids_are_unique_over_all_files(write):
    files = [write(make_document()), write(make_document(2), "captions_train2017.json")]
    with pytest.raises(UserError, match=r"captions_train2017.json: image 0 \(2.jpg\): image id 102 occurs more"):
        read_coco_captions(files)
    document = make_document(3)
    document["annotations"][0]["id"] = 0
    files[1] = write(document, "captions_train2017.json")
    with pytest.raises(UserError, match=r"captions_train2017.json: image 2 .*: caption id 0 occurs more than once"):
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
        (["A Cat", "a  cat"], ["a  cat", "A Cat"], (1, 0)),  # exactly equal ones first
        (["a cat", "A CAT"], ["A CAT\n", "a cat"], (1, 0)),  # then the rest
        (["a cat", "A cat"], [" a Cat", "a\tcat "], (0, 1)),
        (["STRASSE"], ["straße"], (0,)),
    ],
)
def test_captions_are_matched_exactly_and_then_by_their_words(write, captions, official, caption_ids):
    (image,) = with_annotation_ids(make_images([captions]), [write_annotations(write, [official])])
    assert image.caption_ids == caption_ids


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        (["a cat", "a bird"], r"image id 101 \(val2014/1.jpg\): caption 'a bird' is not, or not as often, among"),
        (["a cat", "a cat"], r"image id 101 \(val2014/1.jpg\): caption 'a cat' is not, or not as often, among"),
        (["a cat", "A cat"], r"image id 101 \(val2014/1.jpg\): caption 'A cat' is not, or not as often, among"),
    ],
)
def test_a_caption_without_an_annotation(write, captions, message):
    # The missing one belongs to another image.
    file = write_annotations(write, [["a bird"], ["a cat", "a dog"], ["a fish"]])
    images, rejected = make_images([["a bird"], captions, ["a fish"]]), []
    with pytest.raises(UserError, match=f"^{file}: {message}"):
        with_annotation_ids(images, [file])
    assert [image.image_id for image in with_annotation_ids(images, [file], rejected=rejected)] == [100, 102]
    assert [(item.image, item.split) for item in rejected] == [("image id 101 (val2014/1.jpg)", "test")]


def test_an_image_without_annotations(write):
    files = [write_annotations(write, [["a cat"]]), write_annotations(write, [], "captions_train2014.json")]
    files[1].write_text('{"annotations": [{"id": 99, "image_id": 99, "caption": "x"}]}')
    images, rejected = make_images([["a cat"], ["a dog"]]), []
    with pytest.raises(UserError, match="it has no annotations there; Karpathy's splits need those of train2014") as e:
        with_annotation_ids(images, files)
    assert str(e.value).startswith(f"{files[0]}, {files[1]}: image id 101 (val2014/1.jpg): ")
    assert [image.caption_ids for image in with_annotation_ids(images, files, rejected=rejected)] == [(0,)]
    assert len(rejected) == 1


def test_an_image_given_twice_would_have_the_ids_of_the_first(write):
    images = make_images([["a cat"]])
    with pytest.raises(UserError, match="image id 100 occurs more than once"):
        with_annotation_ids(images * 2, [write_annotations(write, [["a cat"]])])


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        ({"id": 0, "image_id": 100, "caption": "x"}, "annotation 0: annotation id 0 occurs more than once"),
        ({"id": 9, "image_id": 100}, "annotation 0: Object missing required field `caption`"),
        ({"id": 9, "image_id": "100", "caption": "x"}, r"Expected `int`, got `str`"),
        (None, "annotation 0: Expected `object`, got "),
    ],
)
def test_wrong_official_file_always_raises(write, annotation, message):
    files = [write_annotations(write, [["a cat"]]), write({"annotations": [annotation]}, "captions_train2014.json")]
    with pytest.raises(UserError, match=message) as raised:
        with_annotation_ids(make_images([["a cat"]]), files, rejected=[])
    assert str(raised.value).startswith(f"{files[1]}: annotation 0: ")
    with pytest.raises(UserError, match=r"captions_val2014.json has no captions"):
        with_annotation_ids(make_images([["a cat"]]), [write({"images": []}, "captions_val2014.json")], rejected=[])


# Few words, so that equal captions, and captions equal but for case and space, are frequent.
WORDS = st.sampled_from(["a", "A", "cat", "CAT", " ", "\n", "İ"])
CAPTIONS = st.lists(WORDS, min_size=1, max_size=4).map(" ".join).filter(str.strip)


@settings(deadline=None, max_examples=60)
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
    for stranger_id, file, part in zip((-1, -2), files, (annotations[:half], annotations[half:]), strict=True):
        # An annotation of another image, because a file without any is an error.
        stranger = {"id": stranger_id, "image_id": -1, "caption": "x"}
        file.write_text(json.dumps({"annotations": [stranger, *part]}))

    # Karpathy's order is not the official one, and white space and case may differ.
    images, texts = make_images(captions_of_images), {item["id"]: item["caption"] for item in annotations}
    images = [
        replace(image, captions=tuple(random_order.sample(image.captions, len(image.captions)))) for image in images
    ]
    changed = [replace(image, captions=tuple(f" {text.upper()}" for text in image.captions)) for image in images]
    for given_images, exact in ((images, True), (changed, False)):
        found = with_annotation_ids(given_images, files)
        assert [image.captions for image in found] == [image.captions for image in given_images]
        caption_ids = [caption_id for image in found for caption_id in image.caption_ids]
        assert sorted(caption_ids) == sorted(texts)
        for image in found:
            for caption, caption_id in zip(image.captions, image.caption_ids, strict=True):
                official = texts[caption_id]
                assert caption == official if exact else caption.split() == official.upper().split()
                assert caption_id // 100 == image.image_id - 100


def test_many_captions_of_one_image_take_no_longer(write):
    """20,000 equal captions: seconds or minutes if each looked through all others."""
    captions = ["a cat"] * 10_000 + [f"cat {number}" for number in range(10_000)]
    shuffled = random.Random(0).sample(captions, len(captions))
    (image,) = with_annotation_ids(make_images([captions]), [write_annotations(write, [shuffled])])
    assert sorted(image.caption_ids) == list(range(20_000))
