"""Write a data set of pictures that people drew, from two packages of Debian. All of it is in the public domain.

    apt-get download openclipart-svg openclipart-png
    for package in openclipart-*.deb; do dpkg-deb -x $package openclipart; done
    python -m benchmarks.openclipart openclipart clipart

Each picture has five captions, from what its authors wrote into the drawing: its title, keywords and description, and
the name of its folder. A title that many pictures have is that of a collection; the name of the file takes its place.

The set is for retrieval, so a caption has to lead to its picture. Equal pictures are kept once, at most three of one
name, and no playing cards, nor stars and gradients that a program drew. A caption that would stand below two names is
left out for both. Validation and test take names that have a single picture.

The hash that is printed covers the annotations and the decoded pixels, not the files, because encoders differ.
"""

import argparse
import gzip
import hashlib
import json
import random
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import PIL
from PIL import Image, ImageOps

from vl_plugins.errors import UserError, exit_status

VERSION = "1:0.18+dfsg-19"
PACKAGES = ("openclipart-svg", "openclipart-png")
SIZE = 64  # of a picture, in pixels
LARGEST = 50_000_000  # pixels of a file; a few are larger, up to 2.5 GB in memory, and left out
PICTURES_OF_A_NAME = 3
SERIES = ("recreation/games/cards", "shapes/stars", "special/gradients")  # folders that are left out
CAPTIONS = 5
KEYWORDS = 5  # of a caption, at most
TEST, VALIDATION = 500, 300  # pictures

# Tags of metadata, and words in them that say nothing about a picture.
KEYWORD_TAG = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}li"
EMPTY_WORDS = {"hash", "icons", "unsorted", "theme", "clipart", "special", "svg"}
# What programs and collections left in titles and descriptions.
OF_AUTHOR = re.compile(r"^clip ?art by .* - ", re.IGNORECASE)
NO_SENTENCE = re.compile(r"HASH\(|@|http|www\.|^part of ", re.IGNORECASE)


class Drawing(NamedTuple):
    """A picture, and what its authors say about it; each may be empty."""

    path: Path  # of the .svg file, in its package
    title: str
    keywords: tuple[str, ...]
    sentence: str

    @property
    def folder(self) -> str:
        folder = words(self.path.parent.name)
        return "" if folder in EMPTY_WORDS else folder


def words(text: str) -> str:
    """Return the words of a text in small letters, without digits and signs: ``Barattolo_01`` is ``barattolo``."""
    return " ".join(re.findall(r"[^\W\d_]+", text.lower()))


def read_drawing(root: Path, path: Path) -> Drawing:
    """Read the metadata of an ``.svg`` file."""
    elements = ElementTree.parse(root / path).iter()
    work = next((element for element in elements if element.tag.endswith("}Work")), ElementTree.Element("none"))
    texts = {"title": "", "description": ""}
    for part in work:
        texts[part.tag.rpartition("}")[2]] = " ".join(" ".join(part.itertext()).split())
    keywords = []
    for entry in work.iter(KEYWORD_TAG):
        text = entry.text or ""
        keyword = words(text)
        if keyword and not text.startswith("0x") and not EMPTY_WORDS & set(keyword.split()):
            keywords.append(keyword)
    title = words(OF_AUTHOR.sub("", texts["title"]))
    description = texts["description"]
    sentence = "" if NO_SENTENCE.search(description) else words(description.partition(".")[0])
    return Drawing(path, title, tuple(dict.fromkeys(keywords)), sentence)


def picture_names(drawings: Sequence[Drawing]) -> dict[Drawing, str]:
    """Return the name of each picture; pictures without one are left out."""
    with_title = Counter(drawing.title for drawing in drawings)
    names = {}
    for drawing in drawings:
        file_name = words(drawing.path.stem)
        is_collection = with_title[drawing.title] > PICTURES_OF_A_NAME and not file_name.startswith(drawing.title)
        name = file_name if is_collection or not drawing.title else drawing.title
        if name:
            names[drawing] = name
    return names


def possible_captions(drawing: Drawing, name: str) -> list[str]:
    """Return what may stand below a picture, the best first."""
    keywords = ", ".join(drawing.keywords[:KEYWORDS])
    captions = [name]
    if keywords:
        captions.append(f"{name}: {keywords}")
    captions += [drawing.sentence, keywords]
    if drawing.folder and drawing.folder not in name.split():
        captions.append(f"{name}, {drawing.folder}")
    # Where something is missing.
    captions.append(f"a drawing of {name}")
    captions += [f"{name}, {keyword}" for keyword in drawing.keywords if keyword not in name.split()]
    captions.append(f"{name}, clip art")
    return list(dict.fromkeys(caption for caption in captions if caption))


def chosen_captions(names: dict[Drawing, str]) -> dict[Drawing, list[str]]:
    """Return the captions of each picture: the first five that no picture of another name may have."""
    names_of_caption = defaultdict(set)
    for drawing, name in names.items():
        for caption in possible_captions(drawing, name):
            names_of_caption[caption].add(name)
    chosen = {}
    for drawing, name in names.items():
        captions = [caption for caption in possible_captions(drawing, name) if len(names_of_caption[caption]) == 1]
        chosen[drawing] = captions[:CAPTIONS]
    return chosen


def read_picture(path: Path) -> Image.Image | None:
    """Read a picture, on white and in a square; None if its file is too large."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            picture = Image.open(path)
        except Image.DecompressionBombError:
            return None
    with picture:
        if picture.width * picture.height > LARGEST:
            return None
        drawn = picture.convert("RGBA")
    paper = Image.new("RGBA", drawn.size, "white")
    paper.alpha_composite(drawn)
    return ImageOps.pad(paper.convert("RGB"), (SIZE, SIZE), Image.Resampling.BICUBIC, color="white")


def different_pictures(pictures: Path, names: dict[Drawing, str]) -> dict[Drawing, Image.Image]:
    """Read pictures: equal ones once, and few of one name."""
    number_of_name: Counter[str] = Counter()
    seen = set()
    different = {}
    for drawing, name in names.items():
        if number_of_name[name] == PICTURES_OF_A_NAME:
            continue
        picture = read_picture(pictures / drawing.path.with_suffix(".png"))
        if picture is None:
            continue
        pixels = picture.tobytes()
        if pixels not in seen:
            seen.add(pixels)
            number_of_name[name] += 1
            different[drawing] = picture
    return different


def choose_splits(names: Iterable[str], test: int, validation: int) -> dict[str, str]:
    """Return the split of each name that is not trained on: drawn at random from names with one picture."""
    number_of_name = Counter(names)
    single = sorted(name for name, number in number_of_name.items() if number == 1)
    random.Random(0).shuffle(single)
    splits = dict.fromkeys(single[:test], "test")
    return splits | dict.fromkeys(single[test : test + validation], "val")


def check_version(tree: Path) -> None:
    """Check that a tree has both packages, and in the version whose hash is known."""
    for package in PACKAGES:
        changes = tree / "usr/share/doc" / package / "changelog.Debian.gz"
        if not changes.is_file():
            raise UserError(f"{tree} has no {package}: unpack its .deb file with dpkg-deb -x")
        with gzip.open(changes, "rt") as file:
            version = file.readline().partition("(")[2].partition(")")[0]
        if version != VERSION:
            raise UserError(f"{tree} has {package} {version}, not {VERSION}: other versions have other pictures")


def write_data_set(tree: Path, out: Path, test: int = TEST, validation: int = VALIDATION) -> tuple[int, str]:
    """Write the pictures of a tree and their annotations in Karpathy's format.

    Returns:
        The number of pictures, and the SHA-256 of annotations and decoded pixels.

    Raises:
        UserError: the tree lacks a package or has another version, or the folder is not empty.
    """
    check_version(tree)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: give a new folder")
    drawn, pictures = tree / "usr/share/openclipart/svg", tree / "usr/share/openclipart/png"
    paths = sorted(path.relative_to(drawn) for path in drawn.rglob("*.svg"))
    names = picture_names([read_drawing(drawn, path) for path in paths if not path.as_posix().startswith(SERIES)])
    captions = chosen_captions(names)
    kept = {drawing: name for drawing, name in names.items() if len(captions[drawing]) == CAPTIONS}
    different = different_pictures(pictures, kept)
    splits = choose_splits([names[drawing] for drawing in different], test, validation)

    content_hash = hashlib.sha256()
    images = []
    for number, (drawing, picture) in enumerate(different.items()):
        file_name = drawing.path.with_suffix(".png")
        (out / file_name).parent.mkdir(parents=True, exist_ok=True)
        picture.save(out / file_name)
        content_hash.update(picture.tobytes())
        images.append(
            {
                "imgid": number,
                "filepath": file_name.parent.as_posix(),
                "filename": file_name.name,
                "split": splits.get(names[drawing], "train"),
                "sentences": [{"raw": caption} for caption in captions[drawing]],
            }
        )
    annotations = json.dumps({"dataset": "clipart", "images": images}, ensure_ascii=False, indent=1)
    (out / "dataset_clipart.json").write_text(annotations, encoding="utf-8")
    content_hash.update(annotations.encode())
    return len(images), content_hash.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="folder in which both packages are unpacked")
    parser.add_argument("out", type=Path, help="new folder of the data set")
    arguments = parser.parse_args(argv)

    def run() -> None:
        number, content_hash = write_data_set(arguments.tree, arguments.out)
        print(f"wrote {number:,} pictures to {arguments.out}")
        print(f"SHA-256 {content_hash} with Pillow {PIL.__version__}")

    return exit_status("benchmarks.openclipart", run)


if __name__ == "__main__":
    sys.exit(main())
