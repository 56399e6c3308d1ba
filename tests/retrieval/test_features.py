import pytest
import torch

from tests.helpers.features import features, unit
from vl_plugins.errors import UserError


def with_rows(rows, value):
    return unit(8, 6).index_fill(0, torch.tensor(rows), value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"captions": with_rows([3, 5], torch.nan)}, r"2 of 8 captions .* row 3 \(id 104\) of norm nan"),
        ({"captions": with_rows([7], torch.inf)}, r"1 of 8 captions .* row 7 \(id 108\) of norm inf"),
        ({"captions": with_rows([0, 1], 0)}, r"2 of 8 captions .* row 0 \(id 101\) of norm 0$"),
        ({"images": 1.02 * unit(4, 6), "image_ids": None}, "4 of 4 images .* the first is row 0 of norm 1.02"),
        ({"images": unit(4, 2, 6) * torch.tensor([[1.0], [2.0]]), "captions": unit(8, 2, 6)}, "4 of 4 images"),
        ({"images": 0 * unit(4, 2, 6), "captions": unit(8, 2, 6)}, "4 of 4 images"),
        ({"captions": unit(8, 1, 6)}, r"vectors or sets, got \(4, 6\) and \(8, 1, 6\)"),
        ({"images": torch.ones(4, 6, dtype=torch.int64)}, "floating-point images, got torch.int64"),
        (
            {"image_of_caption": torch.arange(8, dtype=torch.int32) // 2},
            "an int64 image of each caption, got torch.int32",
        ),
        ({"image_of_caption": torch.arange(7) % 4}, r"an image of each of the 8 captions, got \(7,\) images$"),
        ({"image_of_caption": torch.arange(4)}, r"got \(4,\) images: are images and captions swapped\?"),
        ({"image_of_caption": 1 + torch.arange(8) // 2}, "got 1 to 4: does it count from 1\\? subtract 1"),
        *(({"image_of_caption": torch.arange(8) % 5 - k}, r"image_of_caption in \[0, 4\)") for k in (0, 1)),
        ({"image_of_caption": torch.arange(8) % 3}, "a caption of every image"),
        ({"images": unit(0, 6), "captions": unit(0, 6), "image_of_caption": torch.arange(0)}, r"in \[0, 0\)"),
        ({"caption_ids": [1.0] * 8}, "caption ids that are integers or strings"),
        ({"image_ids": [7, 8, 9, 8]}, "different image ids; rows 1 and 3 have the id 8: .* keep one row for each id"),
        ({"caption_ids": [""] * 8}, "different caption ids; rows 0 and 1 have the id ''"),
        ({"description": ["vit"]}, "a description that is a dictionary"),
        ({"description": {"alpha": [torch.nan]}}, "without NaN and infinity"),
        ({"description": {"model": unit}}, "JSON values .* function"),
    ],
)
def test_features_that_cannot_be_compared(changes, message):
    with pytest.raises(UserError, match=message):
        features(**changes)


def test_select():
    found = features().select(torch.tensor([0, 2, 3]), torch.tensor([1, 3, 5, 7]))
    assert (found.image_ids, found.caption_ids) == ([11, 9, 7], [102, 104, 106, 108])
    assert found.image_of_caption.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_ids": [5, 11, 9, 7]}, "image_ids: number 0 of 4 is 11, expected 5"),
        ({"caption_ids": [*range(101, 108), 1]}, "caption_ids: number 7 of 8 is 108, expected 1"),
        ({"image_of_caption": torch.arange(7) % 4, "captions": unit(7, 6)}, "there are 8, expected 7"),
    ],
)
def test_features_of_something_else(changes, message):
    features().check_same_items(features(image_ids=(11, 5, 9, 7), caption_ids=None), "one.npz", "all")
    other = features(**{"image_ids": None, "caption_ids": None} | changes)
    with pytest.raises(UserError, match=f"one.npz and all do not belong together: .*{message}"):
        features().check_same_items(other, "one.npz", "all")


@pytest.mark.parametrize(("name", "message"), [(None, "distance must be a name"), ("os.system", "unknown distance")])
def test_sets_of_an_unknown_similarity(name, message):
    sets = features(images=unit(4, 3, 6), captions=unit(8, 2, 6), description={"similarity": name})
    with pytest.raises(UserError, match=message):
        sets.similarities()
