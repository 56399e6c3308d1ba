"""The loader of every image with all its captions, against the annotations that shards were written from."""

import pytest
import torch

from tests.helpers.archives import encode_picture
from tests.helpers.numbered_shards import numbers_of, replace_member, tokenizer, transform, write_numbered
from vl_plugins.data import ShardDataset, evaluation_loader
from vl_plugins.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNTS = [1 + index % 4 for index in range(10)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Ten images with one to four captions in three shards."""
    return ShardDataset(write_numbered(tmp_path_factory.mktemp("shards"), COUNTS), transform, tokenizer)


def test_captions_of_an_image_in_any_number(dataset):
    loader = evaluation_loader(dataset, 4)
    assert len(loader) == 3
    for batch in loader:
        assert numbers_of(batch.images) == list(range(batch.start, min(batch.start + 4, 10)))
        owners = [(index, number) for index in numbers_of(batch.images) for number in range(COUNTS[index])]
        assert list(map(tuple, batch.texts.tolist())) == owners
        assert (batch.start + batch.image_of_caption).tolist() == [index for index, _ in owners]


@pytest.mark.parametrize(("processes", "workers"), [(1, 2), (2, 0), (2, 2), (3, 1), (5, 0)])
def test_batches_are_the_same_for_any_split(dataset, processes, workers):
    before = torch.get_rng_state()
    expected = list(evaluation_loader(dataset, 3))
    found = []
    for rank in range(processes):
        found += evaluation_loader(dataset, 3, workers=workers, rank=rank, world_size=processes)
    found.sort(key=lambda batch: batch.start)
    assert [batch.start for batch in found] == [batch.start for batch in expected] == [0, 3, 6, 9]
    for batch, same in zip(found, expected, strict=True):
        assert all(torch.equal(tensor, other) for tensor, other in zip(batch[:3], same[:3], strict=True))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_an_error_even_where_training_skips_it(tmp_path, workers):
    shards = write_numbered(tmp_path, [1] * 8)
    replace_member(shards[1], "numbered-005.png", encode_picture()[:50])
    dataset = ShardDataset(shards, transform, tokenizer, on_error="skip")
    with pytest.raises(UserError, match=rf"cannot read image 5, in {shards[1]}"):
        list(evaluation_loader(dataset, 3, workers=workers))
    assert len(dataset.__getitems__([4, 5])) == 2, "the data set itself goes on"
