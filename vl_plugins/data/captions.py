"""Images with their captions, as every source yields them, and the comparison of captions."""

import hashlib
import html
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PureWindowsPath

from vl_plugins.errors import UserError

LARGEST_ID = 2**63 - 1
NAME = re.compile("[A-Za-z0-9_-]{1,40}")
UNUSUAL_PATH = re.compile(r"\.\.|[\\:\0]|^/")  # all others are relative on any system
LISTED = 5  # of what is left out
INVISIBLE = ("Cf", "Zs", "Zl", "Zp")  # Unicode's categories of format marks and spaces


@dataclass(frozen=True)
class CaptionedImage:
    """One image with its captions.

    Args:
        image_id: unique in the source.
        file: POSIX path relative to the image root; never absolute and without ``..``.
        captions: at least one, none blank, in source order.
        caption_ids: one id per caption, unique in the source.
        split, dataset: names such as ``"train"``; up to 40 letters, digits, ``_`` and ``-``.
        filename: name of the image file in the source.
        group: id shared by images that belong together, such as frames of a video. Blank text means no group.

    Raises:
        UserError: a value is not as above.
    """

    image_id: int | str
    file: str
    captions: tuple[str, ...]
    caption_ids: tuple[int | str, ...]
    split: str
    dataset: str
    filename: str
    group: int | str | None = None

    def __post_init__(self) -> None:
        for name in (self.split, self.dataset):  # parts of keys and shard names, where dots and slashes separate
            if not NAME.fullmatch(name):
                raise UserError(f"{name!r} cannot name a split or data set; use up to 40 letters, digits, '_' and '-'")
        if UNUSUAL_PATH.search(self.file) and leads_out(self.file):
            raise UserError(f"path {self.file!r} leads out of the image root; paths must be relative, without '..'")
        if isinstance(self.group, str) and not self.group.strip():
            object.__setattr__(self, "group", None)
        if not self.captions or any(map(is_blank, self.captions)):
            raise UserError("it has no captions, or a blank one; every image needs at least one")
        if len(self.caption_ids) != len(self.captions):
            raise UserError(f"it has {len(self.caption_ids)} caption ids for {len(self.captions)} captions")


def leads_out(path: str) -> bool:
    """Return whether a path may lead out of the folder that it is relative to, on any system."""
    windows_path = PureWindowsPath(path)  # which knows both separators and drive letters
    return bool(windows_path.anchor) or ".." in windows_path.parts or "\0" in path


@dataclass(frozen=True)
class RejectedImage:
    """An image that cannot be used: its file, or its row in the source; its split; and the reason."""

    image: str
    split: str
    reason: str


def describe_rejected(rejected: Sequence[RejectedImage]) -> str:
    """Return how many images or rows were left out for each reason, with the first of them; "" for none."""
    by_reason: dict[str, list[str]] = {}
    for item in rejected:
        by_reason.setdefault(item.reason, []).append(item.image)
    reasons = []
    for reason, images in by_reason.items():
        reasons.append(f"{len(images):,}, because {reason}: {', '.join(images[:LISTED])}")
    return "; ".join(reasons[:LISTED])


def normalize_caption(text: str) -> str:
    r"""Return a caption without differences of case and white space, which tokenizers such as CLIP's drop.

    Captions that become equal have one embedding; as captions of different images they are false negatives.

    >>> normalize_caption(" A Dog\n runs. ") == normalize_caption("a dog runs.")
    True
    """
    return " ".join(text.split()).casefold()


def is_blank(text: str) -> bool:
    r"""Return whether a caption shows nothing: white space, and marks such as zero-width spaces.

    >>> is_blank(" \u200b\n"), is_blank("\u200ba dog")
    (True, False)
    """
    text = text.strip()
    return not text or (not text.isascii() and all(unicodedata.category(mark) in INVISIBLE for mark in text))


def caption_hash(text: str) -> int:
    """Hash the normalized caption to a signed 64-bit integer, which is what the index of a shard has."""
    return hash64(normalize_caption(text).encode())


def content_id(text: str) -> int:
    """Return the id of a caption, see :func:`content_ids`."""
    if "&" in text:
        text = html.unescape(text)
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return caption_hash(text) & LARGEST_ID


def content_ids(captions: Iterable[str]) -> list[int]:
    """Return ids of captions for the ``ref_ids`` of a loss, which are equal for equal captions in every process.

    Differences of case and white space do not count, and HTML entities are what they stand for. Python's own ``hash``
    differs from process to process.

    Raises:
        ValueError: ``captions`` are not strings.

    >>> dog, cat, same_dog = content_ids(["A dog.", "A cat.", "a dog."])
    >>> dog == same_dog, dog == cat
    (True, False)
    """
    if isinstance(captions, (str, Mapping)):
        raise ValueError(f"captions must be a list of strings, got {type(captions).__name__}")
    ids = []
    for place, caption in enumerate(captions):
        if not isinstance(caption, str):
            advice = "; join the captions of all images in one list" if isinstance(caption, (list, tuple)) else ""
            raise ValueError(f"captions must be strings, got {type(caption).__name__} at place {place}{advice}")
        ids.append(content_id(caption))
    return ids


def hash64(data: bytes) -> int:
    """Hash bytes to a signed 64-bit integer, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
