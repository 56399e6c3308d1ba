"""Write annotations of toy scenes in which every caption names all that is drawn, so it fits one picture only.

    python -m benchmarks.exact_captions toy/dataset_toy.json toy/exact.json

A toy scene has captions from vague to exact, and many scenes share a vague one: the share of captions in the test split
that another one of its pictures satisfies is printed. In what is written, the five captions of a scene are wordings of
the exact one, and since all scenes differ, none of them fits another.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from vl_plugins.data.toy import RELATIONS

BACK = dict(RELATIONS.values())  # by relation, that of the other direction
NEITHER = " on a "  # between the shapes and the background


def exact_captions(caption: str) -> list[str]:
    """Return wordings of an exact caption, such as ``a small red star above a large blue circle on a gray background``.

    They turn the order around, name the background first, and leave the articles out.
    """
    shapes, background = caption.split(NEITHER)
    relation = next(relation for relation in BACK if f" {relation} " in shapes)
    backward = f" {BACK[relation]} ".join(reversed(shapes.split(f" {relation} ")))
    without_articles = " ".join(word for word in shapes.split() if word != "a")
    return [
        caption,
        f"{backward}{NEITHER}{background}",
        f"on a {background}, {shapes}",
        f"on a {background}, {backward}",
        f"{without_articles}, {background}",
    ]


def meaning(caption: str) -> Hashable:
    """Return what a toy caption says: two captions with one meaning fit the same pictures.

    Captions joined by "and" name shapes in any order, and a relation may be told from either end.
    """
    shapes, _, background = caption.partition(NEITHER)
    for relation, back in BACK.items():
        if f" {back} " in shapes:
            return relation, *reversed(shapes.split(f" {back} ")), background
        if f" {relation} " in shapes:
            return relation, *shapes.split(f" {relation} "), background
    return tuple(sorted(shapes.split(" and ")))


def shared_share(images: Sequence[dict[str, Any]], split: str = "test") -> float:
    """Return the share of the captions of toy scenes in a split that another one of its pictures satisfies."""
    meanings = []
    for image in images:
        if image["split"] == split:
            meanings += [meaning(sentence["raw"]) for sentence in image["sentences"]]
    numbers = Counter(meanings)
    return sum(number for number in numbers.values() if number > 1) / len(meanings)


def make_exact(images: Sequence[dict[str, Any]]) -> None:
    """Replace the captions of toy scenes by wordings of their exact one, the last."""
    for image in images:
        captions = exact_captions(image["sentences"][-1]["raw"])
        for sentence, caption in zip(image["sentences"], captions, strict=True):
            sentence["raw"] = caption


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("annotations", type=Path, help="of `vl-plugins toy`")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args(argv)
    content = json.loads(arguments.annotations.read_text())
    print(f"{100 * shared_share(content['images']):.1f} % of the test captions fit another picture")
    make_exact(content["images"])
    arguments.out.write_text(json.dumps(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
