"""Image-caption data by the name that people type: shards or a table, with all captions of an image."""

import hashlib
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import msgspec
from tqdm import tqdm

from vl_plugins.data.caption_table import Columns
from vl_plugins.data.captions import have_lines
from vl_plugins.data.collection import Collection
from vl_plugins.data.files import join, lock, names
from vl_plugins.data.index import cache_folder, has_index, read_head
from vl_plugins.data.index import keep_index as scan_and_keep
from vl_plugins.data.records import CaptionRule, as_rule
from vl_plugins.data.shard_names import AT_A_TIME, expand_shards
from vl_plugins.data.table_collection import TableCollection, is_table
from vl_plugins.errors import UserError, user_errors

logger = logging.getLogger(__name__)


def read_collection(
    shards: str | os.PathLike | Sequence[str | os.PathLike],
    on_error: str = "raise",
    caption_lines: str | CaptionRule = "auto",
    *,
    columns: Columns | None = None,
    delimiter: str | None = None,
    keep_index: bool = False,
) -> Collection:
    """Read where the images of a data set are, and their captions.

    Of shards, the indexes beside them are read, or else the shards. Of a table all captions are read and held.

    Args:
        shards: as for :func:`expand_shards`; or a table, or a folder, see
            :func:`~vl_plugins.data.table_collection.read_local`.
        on_error: ``"skip"`` leaves out samples and rows without captions, except in shards of ours.
        caption_lines: whether each line of a ``.txt`` is a caption, ``"yes"`` or ``"no"``; ``"auto"``: yes, if each
            ``.txt`` of the shards has at least two lines that are not blank, as CLIP_benchmark writes them. Samples
            with a list of captions in their ``.json`` need none. Or a
            :class:`~vl_plugins.data.records.CaptionRule`, for shards with other names.
        columns, delimiter: of a table; by default they are found.
        keep_index: write the indexes of shards that have none beside them, or into the user's cache.

    Raises:
        UserError: the data do not exist or cannot be read, an image has no captions, or there are no images.
    """
    rule = as_rule(caption_lines)
    if is_table(shards):
        return TableCollection(os.fspath(shards), on_error, rule, columns, delimiter)  # type: ignore[arg-type]
    shards = expand_shards(shards)
    if keep_index:
        _keep_indexes(shards, on_error, rule)
    collection = _read_shards(shards, on_error, rule)
    if rule.lines is None:
        rule = msgspec.structs.replace(rule, lines=have_lines(collection.text_lines, collection.single_texts))
        if collection.lines_of_heads - {rule.lines}:
            collection = _read_shards(shards, on_error, rule)
        collection.rule = rule
        if rule.lines:
            logger.info(
                f"each line of a .txt is a caption, {len(collection.caption_hashes):,} of {len(collection):,} images; "
                "--caption-lines no takes each text for one"
            )
    if len(collection) == 0:
        raise UserError(f"the shards hold no images: {shards[0]}, ...")
    return collection


def check_data(shards: str | os.PathLike) -> None:
    """Raise :class:`UserError` if data do not exist, without reading them."""
    if not is_table(shards):
        expand_shards(shards)
    elif not os.path.isdir(shards) and not names(os.path.dirname(shards) or ".", os.path.basename(shards)):
        raise UserError(f"{os.fspath(shards)} does not exist")


def _read_shards(shards: list[str], on_error: str, rule: CaptionRule) -> Collection:
    read = partial(read_head, on_error=on_error, rule=rule)
    with user_errors(f"indexes of {shards[0]}, ..."), ThreadPoolExecutor(AT_A_TIME) as pool:
        return Collection(shards, pool.map(read, shards), on_error, rule)


def _keep_indexes(shards: Sequence[str], on_error: str, rule: CaptionRule) -> None:
    """Write the indexes of shards that have none. Of the processes of a machine, one does it and the others wait."""
    if all(map(has_index, shards)):
        return
    name = hashlib.sha256("\n".join(shards).encode()).hexdigest()
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(join(cache_folder(), f".{name}.lock"), "indexes", wait=True))
        except OSError as error:
            logger.warning(f"shards without an index are scanned at each start: {error}")
            return
        unindexed = [shard for shard in shards if not has_index(shard)]
        if not unindexed:
            return
        folders: dict[str, int] = {}
        with user_errors(f"shards {unindexed[0]}, ..."), ThreadPoolExecutor(AT_A_TIME) as pool:
            scans = pool.map(partial(scan_and_keep, on_error=on_error, rule=rule), unindexed)
            for head, folder in tqdm(scans, "scan", len(unindexed), unit="shard", disable=None):
                folders[folder] = folders.get(folder, 0) + len(head.counts)
        for folder, images in folders.items():
            logger.info(f"shards without an index were scanned: {images:,} images; it is in {folder} now")


def settled(shards: Sequence[str], caption_lines: str | CaptionRule = "auto") -> CaptionRule:
    """Return the rule of :func:`read_collection` for shards, of which some may be damaged."""
    rule = as_rule(caption_lines)
    if rule.lines is not None:
        return rule
    text_lines = single_texts = 0
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for lines, singles in pool.map(partial(_count_texts, rule=rule), shards):
            text_lines += lines
            single_texts += singles
    return msgspec.structs.replace(rule, lines=have_lines(text_lines, single_texts))


def _count_texts(shard: str, rule: CaptionRule) -> tuple[int, int]:
    """Return the number of texts with several lines, and with one; none of a shard that cannot be read."""
    try:
        head = read_head(shard, "skip", rule)
    except (UserError, OSError):
        return 0, 0
    return head.text_lines or 0, head.single_texts
