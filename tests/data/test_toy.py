from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from vl_plugins.data.sources import read_karpathy
from vl_plugins.data.toy import COLORS, write_toy_scenes
from vl_plugins.errors import UserError


def read_folder(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_seed_alone_decides_every_byte(tmp_path):
    counts = {"train": 6, "val": 2, "test": 2}
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        write_toy_scenes(tmp_path / name, seed=seed, **counts)
    one, again, other = (read_folder(tmp_path / name) for name in ("one", "again", "other"))
    assert len(one) == 11
    assert one == again
    assert one.keys() == other.keys()
    assert not set(one.values()) & set(other.values())


def test_pictures_show_what_the_exact_caption_says(toy_scenes):
    images = list(read_karpathy(toy_scenes / "dataset_toy.json", "coco"))
    checked = Counter()
    for image in images:
        words = image.captions[4].split()
        colors = [word for word in words if word in COLORS]
        if len(set(colors)) < len(colors):
            continue
        pixels = np.asarray(Image.open(toy_scenes / image.file))
        masks = [(pixels == COLORS[color]).all(axis=-1) for color in colors]
        assert all(mask.any() for mask in masks), image.captions
        axis, relation = (1, "left") if "left" in words else (0, "above")
        centers = [np.argwhere(mask).mean(axis=0) for mask in masks]
        for first, second in pairwise(centers):
            assert first[axis] < second[axis], image.captions
            assert abs(first[1 - axis] - second[1 - axis]) < second[axis] - first[axis], image.captions
            checked[relation] += 1
    assert min(checked["left"], checked["above"]) > 20


@pytest.mark.parametrize("options", [{"train": 0}, {"test": -1}, {"train": 10**6}])
def test_numbers_out_of_range(tmp_path, options):
    with pytest.raises(UserError, match=r"at least"):
        write_toy_scenes(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
