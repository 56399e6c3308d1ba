import pytest
import torch

from vl_plugins.utils.errors import UserError, message, unknown_name


class Failing(torch.utils.data.IterableDataset):
    def __iter__(self):
        try:
            raise FileNotFoundError("no such file")
        except FileNotFoundError as error:
            raise UserError("shard 3 is not there") from error


@pytest.mark.parametrize("workers", [0, 1])
def test_message_of_a_loader_is_that_of_its_worker(workers):
    with pytest.raises(UserError) as raised:
        list(torch.utils.data.DataLoader(Failing(), num_workers=workers))
    assert message(raised.value) == "shard 3 is not there"


def test_several_lines_of_our_own_are_kept():
    assert message(UserError("training failed:\nTraceback\nKeyError")) == "training failed:\nTraceback\nKeyError"


def test_of_many_names_the_nearest_are_listed():
    text = str(unknown_name("model", "ViT-L-33", [f"ViT-{size}-{patch}" for size in "BL" for patch in range(50)]))
    assert text.startswith("unknown model 'ViT-L-33' (did you mean 'ViT-L-3")
    assert "the nearest of 100: " in text
    assert text.count(",") == 4


def test_nothing_is_suggested_when_nothing_is_near():
    assert str(unknown_name("loss", "xyz", ["unified", "vlc"])) == "unknown loss 'xyz'; known: unified, vlc"
