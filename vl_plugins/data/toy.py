"""Toy data set: pictures of colored shapes with captions from vague to exact, made from a seed."""

import json
import random
from math import cos, pi, sin
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw

from vl_plugins.errors import UserError

TOY_ANNOTATIONS = "dataset_toy.json"

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 165, 70),
    "blue": (50, 90, 230),
    "yellow": (245, 205, 40),
    "purple": (150, 60, 190),
    "cyan": (60, 205, 215),
}
BACKGROUNDS = {"white": (255, 255, 255), "black": (0, 0, 0), "gray": (125, 125, 125)}
KINDS = ("circle", "square", "triangle", "star")
# Radius as part of the picture's side; three large ones fit in a row.
SIZES = {"large": 0.155, "small": 0.09}
# How far a shape may be off its row or column, so small that "left of" is never "above" as well.
OFFSET = 0.05
# An axis, the relation of each shape to the next one along it, and that of the next one back.
RELATIONS = {"horizontal": ("left of", "right of"), "vertical": ("above", "below")}
PAINT_SCALE = 4  # painted larger and scaled down for smooth edges

# Far below the number of different scenes, so that drawing until one is new does not take long.
MAX_SCENES = 100_000


class Shape(NamedTuple):
    size: str
    color: str
    kind: str


class Scene(NamedTuple):
    shapes: tuple[Shape, ...]
    axis: str
    background: str


def write_toy_scenes(
    out: str | Path, seed: int = 0, train: int = 1600, val: int = 200, test: int = 200, image_size: int = 64
) -> Path:
    """Write pictures of colored shapes, with five captions each, in the format of Karpathy's COCO splits.

    A scene has two or three shapes in a row or a column. Its captions give the colors; the kinds; colors and kinds;
    those with the relation of neighbors; and everything. The last one fits no other image; the first ones fit several.

    Args:
        out: folder for ``train/``, ``val/``, ``test/`` and ``dataset_toy.json``; made when missing.
        seed: the same one gives the same files.
        train, val, test: number of images of each split.
        image_size: height and width in pixels.

    Returns:
        The annotation file, to be read with ``read_karpathy(file, "coco")`` and ``out`` as the image root.

    Raises:
        UserError: a split has no images, or there are more than different scenes.
    """
    counts = {"train": train, "val": val, "test": test}
    if min(counts.values()) < 1 or sum(counts.values()) > MAX_SCENES:
        raise UserError(f"toy splits need at least 1 image each and {MAX_SCENES:,} in all, got {counts}")
    rng = random.Random(seed)
    scenes: set[Scene] = set()
    items: list[dict[str, Any]] = []
    annotation_file = Path(out) / TOY_ANNOTATIONS
    for split, count in counts.items():
        (Path(out) / split).mkdir(parents=True, exist_ok=True)
        for _ in range(count):
            while (scene := _draw(rng)) in scenes:
                pass
            scenes.add(scene)
            captions = _describe(scene, rng)
            numbered = enumerate(captions, len(items) * len(captions))
            sentences = [{"raw": caption, "sentid": number} for number, caption in numbered]
            name = f"toy_{split}_{len(items) + 1:06d}.png"
            item = {"filepath": split, "filename": name, "split": split, "imgid": len(items), "cocoid": len(items) + 1}
            items.append({**item, "sentences": sentences})
            _paint(scene, image_size, rng).save(Path(out, split, name), format="PNG")
    annotation_file.write_text(json.dumps({"dataset": "toy", "images": items}, indent=1), encoding="utf-8")
    return annotation_file


def _draw(rng: random.Random) -> Scene:
    number = rng.choice((2, 3))
    shapes = []
    for _ in range(number):
        shapes.append(Shape(rng.choice(list(SIZES)), rng.choice(list(COLORS)), rng.choice(KINDS)))
    return Scene(tuple(shapes), rng.choice(list(RELATIONS)), rng.choice(list(BACKGROUNDS)))


def _describe(scene: Scene, rng: random.Random) -> list[str]:
    """Return five captions, from vague to exact."""
    forward, backward = RELATIONS[scene.axis]
    # The same relation in either wording: only the order of the words tells them apart.
    relation, ordered = rng.choice(((forward, scene.shapes), (backward, scene.shapes[::-1])))
    # In any order, so that the captions without a relation do not give it away.
    colors, kinds, both = (rng.sample(scene.shapes, len(scene.shapes)) for _ in range(3))
    return [
        " and ".join(f"a {shape.color} shape" for shape in colors),
        " and ".join(f"a {shape.kind}" for shape in kinds),
        " and ".join(f"a {shape.color} {shape.kind}" for shape in both),
        f" {relation} ".join(f"a {shape.color} {shape.kind}" for shape in ordered),
        f" {forward} ".join(f"a {' '.join(shape)}" for shape in scene.shapes) + f" on a {scene.background} background",
    ]


def _paint(scene: Scene, image_size: int, rng: random.Random) -> Image.Image:
    """Return the picture of a scene, with positions at random."""
    side = image_size * PAINT_SCALE
    image = Image.new("RGB", (side, side), BACKGROUNDS[scene.background])
    draw = ImageDraw.Draw(image)
    cell = 1 / len(scene.shapes)
    margin = SIZES["large"] + OFFSET
    line = rng.uniform(margin, 1 - margin)
    for index, shape in enumerate(scene.shapes):
        radius = SIZES[shape.size]
        along = index * cell + rng.uniform(radius, cell - radius)
        across = line + rng.uniform(-OFFSET, OFFSET)
        x, y = (along, across) if scene.axis == "horizontal" else (across, along)
        points = []
        for right, down in _outline(shape.kind):
            points.append(((x + radius * right) * side, (y + radius * down) * side))
        paint = draw.ellipse if shape.kind == "circle" else draw.polygon
        paint(points, fill=COLORS[shape.color])
    return image.reduce(PAINT_SCALE)


def _outline(kind: str) -> list[tuple[float, float]]:
    """Return the corners of a shape in the unit circle around its center, or of the square around the circle itself."""
    if kind == "circle":
        return [(-1.0, -1.0), (1.0, 1.0)]
    # Number of corners, distance of every other one from the center, and turn of the first one from the top.
    number, inner, turn = {"square": (4, 1.0, pi / 4), "triangle": (3, 1.0, 0.0), "star": (10, 0.4, 0.0)}[kind]
    points = []
    for corner in range(number):
        angle = turn + 2 * pi * corner / number
        distance = inner if corner % 2 else 1.0
        points.append((distance * sin(angle), -distance * cos(angle)))
    return points
