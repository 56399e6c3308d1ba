"""Pictures without captions, or captions without pictures, as data sets of torch for an evaluation loader."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from vl_plugins.data.dataset import Item, unreadable
from vl_plugins.data.encodable import CaptionFile, PictureFolder
from vl_plugins.data.files import read_bytes
from vl_plugins.data.limits import MAX_IMAGE_PIXELS
from vl_plugins.data.samples import decode

__all__ = ["CaptionDataset", "PictureDataset"]


class PictureDataset(Dataset):
    """The pictures of a folder, without captions.

    Args:
        folder: with the pictures.
        transform: from an RGB ``PIL.Image`` to a tensor.
        max_image_pixels: see :class:`~vl_plugins.data.dataset.ShardDataset`.

    Raises:
        UserError: while reading, a picture is damaged, too large, or not in JPEG, PNG or WebP format.
    """

    tokenizer = None

    def __init__(
        self, folder: PictureFolder, transform: Callable[[Any], Tensor], max_image_pixels: int = MAX_IMAGE_PIXELS
    ):
        self.folder, self.transform, self.max_image_pixels = folder, transform, max_image_pixels

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> Item:
        file = self.folder.folder / str(self.folder.image_ids[index])
        try:
            image = decode({"jpg": read_bytes(file)}, max_image_pixels=self.max_image_pixels)
        except Exception as error:  # decoders of damaged files raise nearly anything
            raise unreadable(str(file), error) from error
        return Item(self.transform(image), [], index, index, [], [])


class CaptionDataset(Dataset):
    """The captions of a file, without images.

    Args:
        file: with the captions.
        tokenizer: from n captions to a tensor (n, L).
    """

    def __init__(self, file: CaptionFile, tokenizer: Callable[[list[str]], Tensor]):
        self.file, self.tokenizer = file, tokenizer

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, index: int) -> Item:
        return Item(None, [self.file.captions[index]], index, index, [], [])
