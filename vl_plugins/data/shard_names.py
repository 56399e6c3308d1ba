"""Names of shards: patterns, folders and splits."""

import itertools
import os
import posixpath
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
from braceexpand import braceexpand

from vl_plugins.data.files import exists, is_folder, join, names
from vl_plugins.errors import UserError, user_errors

# Files that are looked for or read at a time, which behind URLs takes as long as one.
AT_A_TIME = 16
SHARDS = "[!.]*.tar"
MOST_SHARDS = 500_000  # in a pattern
GROUP = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)")


def expand_braces(pattern: str) -> list[str]:
    """Return what a pattern with braces stands for; raise ``ValueError`` if that is more than any data set has."""
    most = 1
    for group in GROUP.findall(pattern):  # each range is made as a whole
        ends = RANGE.match(group)
        if ends is None:
            most *= group.count(",") + 1
        else:
            most *= abs(int(ends[2]) - int(ends[1])) + 1
    if most <= MOST_SHARDS:
        shards = list(itertools.islice(braceexpand(pattern), MOST_SHARDS + 1))
        if len(shards) <= MOST_SHARDS:
            return shards
    raise ValueError(f"it names more than {MOST_SHARDS:,} shards")


def split_of(shard: str) -> str:
    """Return the name of a shard without its number, or ``shards`` for names such as img2dataset's.

    >>> split_of("s3://bucket/coco-train-000000.tar"), split_of("00000.tar")
    ('coco-train', 'shards')
    """
    return re.sub(r"[-_.]?[0-9]*\.tar$", "", posixpath.basename(shard)) or "shards"


def shards_in(folder: str, pattern: str = SHARDS, *, of_one_split: bool = True) -> list[str]:
    """Return the shards in a folder, sorted.

    Raises:
        UserError: there are none; or they are of several splits, if they must not be.
    """
    shards = [join(folder, name) for name in names(folder, pattern)]
    if not shards:
        raise UserError(f"{join(folder, pattern)}: there are no such shards")
    patterns: dict[str, str] = {}
    for shard in shards:
        split = split_of(shard)
        patterns[split] = _pattern_of(shard) if split in patterns else shard
    if of_one_split and len(patterns) > 1:
        choices = ", ".join(map(repr, patterns.values()))
        raise UserError(f"{join(folder, pattern)} are shards of several splits: choose {choices}")
    return shards


def _pattern_of(shard: str) -> str:
    """Return a pattern for all shards of the split of one."""
    folder, name = posixpath.split(shard)
    split = split_of(shard)
    if not name.startswith(split):  # img2dataset's are numbers
        return join(folder, "[0-9]*.tar")
    number = name[len(split) :].removesuffix(".tar")
    separator = number[0] if number[:1] in ("-", "_", ".") else ""
    return join(folder, f"{split}{separator}*.tar")


def expand_shards(pattern: str | os.PathLike | Sequence[str | os.PathLike], *, of_one_split: bool = True) -> list[str]:
    """Return the shards that a pattern stands for.

    Args:
        pattern: a path or URL of fsspec (``s3://``, ``https://``): a folder of the shards of one split; a name with
            ``*``, such as ``shards/coco-train-*.tar``, or with ranges, such as ``coco-train-{000000..000113}.tar``;
            several of them joined by ``::``; or a list of single shards.
        of_one_split: whether a folder, or a name with ``*``, must not have shards of several splits.

    Raises:
        UserError: the pattern is malformed or names no shard, or a folder has shards of several splits; a shard does
            not exist or is named twice; or they are in different file systems.
    """
    shards: list[str] = []
    with user_errors(f"the shard pattern {pattern!r}"):
        if isinstance(pattern, (str, os.PathLike)):
            for place in os.fspath(pattern).split("::"):
                shards += _shards_of(place, of_one_split)
        else:
            shards += [os.fspath(shard) for shard in pattern]
    if not shards or len(set(map(_identity, shards))) < len(shards):
        raise UserError(f"the shard pattern {pattern!r} names no shard, or one more than once")
    if len(set(map(fsspec.utils.get_protocol, shards))) > 1:
        raise UserError(f"shards must be in one file system, such as all local or all s3://; got {pattern!r}")
    missing = []
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for shard, is_there in zip(shards, pool.map(exists, shards), strict=True):
            if not is_there:
                missing.append(shard)
    if missing:
        raise UserError(f"{len(missing)} of {len(shards)} shards do not exist: {missing[0]}")
    return shards


def _shards_of(place: str, of_one_split: bool) -> list[str]:
    """Return the shards of a folder, of a name with ``*``, or of a name with braces."""
    folder, name = posixpath.split(place)
    if "*" in name or "?" in name:
        return shards_in(folder, name, of_one_split=of_one_split)
    if place and not place.endswith(".tar") and is_folder(place):
        return shards_in(place, of_one_split=of_one_split)
    return list(filter(None, expand_braces(place)))


def _identity(shard: str) -> Any:
    """Return what is equal for two names of one shard: links to a local file have its device and inode."""
    if os.path.isfile(shard):
        status = os.stat(shard)
        return status.st_dev, status.st_ino
    return shard
