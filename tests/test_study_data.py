"""The data sets of the studies: clip art, swapped and exact captions, negatives of pictures."""

import gzip
import json

import numpy as np
import pytest
from PIL import Image

from benchmarks.exact_captions import exact_captions, make_exact, meaning, shared_share
from benchmarks.inverted_pictures import write_inverted
from benchmarks.openclipart import PACKAGES, VERSION, main, read_picture, write_data_set
from benchmarks.swapped_captions import swap_captions
from vl_plugins.data.toy import write_toy_scenes
from vl_plugins.errors import UserError

DRAWING = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:dc="http://purl.org/dc/elements/1.1/"
  xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns:cc="http://web.resource.org/cc/">
<metadata><rdf:RDF><cc:Work><dc:title>{title}</dc:title><dc:description>{description}</dc:description>
<dc:subject><rdf:Bag>{keywords}</rdf:Bag></dc:subject>
<dc:creator><cc:Agent><dc:title>Nobody</dc:title></cc:Agent></dc:creator></cc:Work></rdf:RDF></metadata></svg>"""


@pytest.fixture
def tree(tmp_path):
    """Both packages, unpacked, without a picture."""
    tree = tmp_path / "tree"
    for package in PACKAGES:
        folder = tree / "usr/share/doc" / package
        folder.mkdir(parents=True)
        with gzip.open(folder / "changelog.Debian.gz", "wt") as file:
            file.write(f"openclipart ({VERSION}) unstable; urgency=medium\n")
    return tree


def draw(tree, name, title, color, keywords=(), description="", size=(10, 10)):
    """Write a drawing and its picture."""
    for kind in ("svg", "png"):
        (tree / "usr/share/openclipart" / kind / name).parent.mkdir(parents=True, exist_ok=True)
    entries = "".join(f"<rdf:li>{keyword}</rdf:li>" for keyword in keywords)
    text = DRAWING.format(title=title, description=description, keywords=entries)
    (tree / "usr/share/openclipart/svg" / f"{name}.svg").write_text(text)
    Image.new("RGBA", size, color).save(tree / "usr/share/openclipart/png" / f"{name}.png")


def data_set(tree, out, test=0, validation=0):
    """Return the annotations by file, as the script writes them."""
    write_data_set(tree, out, test, validation)
    images = json.loads((out / "dataset_clipart.json").read_text())["images"]
    return {f"{image['filepath']}/{image['filename']}": image for image in images}


def captions_of(image):
    return [sentence["raw"] for sentence in image["sentences"]]


def test_captions_are_title_keywords_description_and_folder(tree, tmp_path):
    draw(tree, "animals/dogs/a_dog_01", "A Dog", "red", ("animal", "pet", "HASH", "0x12"), "It barks. It sleeps.")
    draw(tree, "animals/birds/b", "Clip art by Nobody - Blue bird_02", "blue", ("animal", "sky"))
    images = data_set(tree, tmp_path / "out")
    expected = ["a dog", "a dog: animal, pet", "it barks", "animal, pet", "a dog, dogs"]
    assert captions_of(images["animals/dogs/a_dog_01.png"]) == expected
    expected = ["blue bird", "blue bird: animal, sky", "animal, sky", "blue bird, birds", "a drawing of blue bird"]
    assert captions_of(images["animals/birds/b.png"]) == expected


def test_a_caption_of_two_names_belongs_to_neither(tree, tmp_path):
    draw(tree, "pets/one", "cat", "red", ("pet",), "Sits on a mat")
    draw(tree, "pets/two", "dog", "blue", ("pet",), "Sits on a mat.")
    images = data_set(tree, tmp_path / "out")
    assert captions_of(images["pets/two.png"]) == ["dog", "dog: pet", "dog, pets", "a drawing of dog", "dog, pet"]
    captions = captions_of(images["pets/one.png"]) + captions_of(images["pets/two.png"])
    assert len(captions) == len(set(captions)) == 10


def test_a_title_of_many_pictures_is_that_of_a_collection(tree, tmp_path):
    """The file's name is better, but for one that begins with the title: the rest is its author."""
    colors = ("red", "green", "blue", "yellow")
    for name, color in zip(("bell", "disk", "lamp", "icons_by_nobody"), colors, strict=True):
        draw(tree, f"computer/{name}", "Icons", color, ("tool",))
    images = data_set(tree, tmp_path / "out")
    names = [captions_of(image)[0] for image in images.values()]
    assert names == ["bell", "disk", "icons", "lamp"]


def test_pictures_are_different(tree, tmp_path):
    """Equal ones once, three of one name, no series that a program drew."""
    for number, color in enumerate(("red", "red", "green", "blue", "yellow")):
        draw(tree, f"animals/cat_0{number}", "cat", color, ("pet",))
    draw(tree, "shapes/stars/star_5pt", "star", "white", ("shape",))
    images = data_set(tree, tmp_path / "out")
    assert list(images) == ["animals/cat_00.png", "animals/cat_02.png", "animals/cat_03.png"]


def test_validation_and_test_have_names_of_one_picture(tree, tmp_path):
    for number in range(6):
        draw(tree, f"a/single{number}", "abcdef"[number] * 3, (number, 0, 0), ("pet",))
    for number in range(4):
        draw(tree, f"a/pair{number}", "xxyy"[number] * 3, (0, 1, number), ("pet",))
    images = data_set(tree, tmp_path / "out", test=3, validation=2)
    splits = {path: image["split"] for path, image in images.items()}
    assert sorted(splits.values()) == ["test"] * 3 + ["train"] * 5 + ["val"] * 2
    assert {splits[f"a/pair{number}.png"] for number in range(4)} == {"train"}


def test_pictures_lie_in_a_white_square(tmp_path):
    Image.new("RGBA", (20, 10), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("RGB", (20, 10), "red").save(tmp_path / "red.png")
    assert np.asarray(read_picture(tmp_path / "clear.png")).min() == 255
    pixels = np.asarray(read_picture(tmp_path / "red.png"))
    assert pixels.shape == (64, 64, 3)
    assert pixels[0, 32].tolist() == [255, 255, 255]
    assert pixels[32, 32].tolist() == [255, 0, 0]


def test_huge_pictures_are_left_out(tmp_path, monkeypatch):
    Image.new("1", (100, 60)).save(tmp_path / "huge.png")
    monkeypatch.setattr("benchmarks.openclipart.LARGEST", 5_999)
    assert read_picture(tmp_path / "huge.png") is None


def test_the_hash_is_that_of_annotations_and_pixels(tree, tmp_path, capsys):
    draw(tree, "a/cat", "cat", "red", ("pet",))
    assert main([str(tree), str(tmp_path / "one")]) == 0
    assert main([str(tree), str(tmp_path / "two")]) == 0
    draw(tree, "a/cat", "cat", "green", ("pet",))
    assert main([str(tree), str(tmp_path / "three")]) == 0
    hashes = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("SHA-256")]
    assert hashes[0] == hashes[1] != hashes[2]


def test_another_version_is_an_error(tree, tmp_path):
    draw(tree, "a/cat", "cat", "red")
    changes = tree / "usr/share/doc/openclipart-png/changelog.Debian.gz"
    with gzip.open(changes, "wt") as file:
        file.write("openclipart (1:0.19-1) unstable; urgency=medium\n")
    with pytest.raises(UserError, match=r"openclipart-png 1:0\.19-1, not 1:0\.18"):
        write_data_set(tree, tmp_path / "out")
    changes.unlink()
    with pytest.raises(UserError, match="no openclipart-png: unpack"):
        write_data_set(tree, tmp_path / "out")


def test_exact_captions_say_all_that_is_drawn():
    wordings = exact_captions("a small red star above a large blue circle on a gray background")
    assert wordings == [
        "a small red star above a large blue circle on a gray background",
        "a large blue circle below a small red star on a gray background",
        "on a gray background, a small red star above a large blue circle",
        "on a gray background, a large blue circle below a small red star",
        "small red star above large blue circle, gray background",
    ]


def test_captions_that_fit_the_same_pictures_have_one_meaning():
    same = [
        ("a red shape and a blue shape", "a blue shape and a red shape"),
        ("a red star left of a blue star", "a blue star right of a red star"),
    ]
    others = [
        ("a red shape and a blue shape", "a red shape and a red shape and a blue shape"),
        ("a red star left of a blue star", "a blue star left of a red star"),
        ("a red star left of a blue star", "a red star above a blue star"),
        ("a red star left of a blue star", "a red star and a blue star"),
        ("a star above a circle on a white background", "a star above a circle on a black background"),
    ]
    assert all(meaning(one) == meaning(other) for one, other in same)
    assert all(meaning(one) != meaning(other) for one, other in others)


def test_exact_captions_fit_one_picture(tmp_path):
    images = json.loads(write_toy_scenes(tmp_path, train=1, val=1, test=60).read_text())["images"]
    assert 0.2 < shared_share(images) < 0.8
    make_exact(images)
    captions = [caption for image in images for caption in captions_of(image)]
    assert len(set(captions)) == len(captions) == 5 * 62


def test_swapped_captions():
    """A fifth of the training images have those of another image; no caption is lost, other splits stay."""
    splits = ["train"] * 50 + ["val"] * 5
    images = [{"split": split, "sentences": [number]} for number, split in enumerate(splits)]
    assert swap_captions(images, 0.2) == 10
    captions = [image["sentences"][0] for image in images]
    assert sorted(captions) == list(range(55))
    assert sum(caption != number for number, caption in enumerate(captions)) == 10
    assert captions[50:] == list(range(50, 55))


def test_inverted_pictures(tmp_path):
    (tmp_path / "toy" / "train").mkdir(parents=True)
    Image.fromarray(np.full((2, 2, 3), (0, 100, 255), np.uint8)).save(tmp_path / "toy" / "train" / "a.png")
    (tmp_path / "toy" / "data.json").write_text(json.dumps({}))
    assert write_inverted(tmp_path / "toy", tmp_path / "out") == 1
    assert np.asarray(Image.open(tmp_path / "out" / "train" / "a.png"))[0, 0].tolist() == [255, 155, 0]
    assert (tmp_path / "out" / "data.json").exists()
