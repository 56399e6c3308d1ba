"""Image-caption data by the name that people type: shards or a table, with all captions of an image."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
from tqdm import tqdm

from vl_plugins.data.caption_table import Columns
from vl_plugins.data.collection import Collection
from vl_plugins.data.index import IndexHead, read_head, read_or_keep
from vl_plugins.data.records import CaptionRule, as_rule, have_lines
from vl_plugins.data.shard_names import AT_A_TIME, expand_shards, split_of
from vl_plugins.data.table_collection import TableCollection, check_exists, is_table
from vl_plugins.errors import UserError, user_errors

logger = logging.getLogger(__name__)

BAR_AFTER = 3  # seconds


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
    collection = _read_shards(shards, on_error, rule, keep_index)
    if rule.lines is None:
        # The indexes take their lines for captions or not, and only together they tell what is right.
        rule = _settled(rule, collection.texts, collection.texts_of_lines)
        if collection.line_rules - {rule.lines}:
            collection = _read_shards(shards, on_error, rule, keep_index)
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
    if is_table(shards):
        check_exists(os.fspath(shards))
    else:
        expand_shards(shards)


def _read_shards(shards: list[str], on_error: str, rule: CaptionRule, keep_index: bool) -> Collection:
    read: Callable[[str], tuple[IndexHead, str | None]] = partial(read_or_keep, on_error=on_error, rule=rule)
    if not keep_index:
        read = partial(_read_head, on_error=on_error, rule=rule)
    images_of_folder = Counter[str]()  # where an index has been written

    def heads() -> Iterator[IndexHead]:
        is_first_process = os.environ.get("LOCAL_RANK", "0") == "0"
        results = pool.map(read, shards)
        bar = tqdm(results, "indexes", len(shards), delay=BAR_AFTER, disable=None if is_first_process else True)
        for head, folder in bar:
            if folder is not None:
                images_of_folder[folder] += len(head.counts)
            yield head

    with user_errors(f"indexes of {shards[0]}, ..."), ThreadPoolExecutor(AT_A_TIME) as pool:
        collection = Collection(shards, heads(), on_error, rule)
    for folder, images in images_of_folder.items():
        logger.info(f"shards without an index were scanned: {images:,} images; it is in {folder} now")
    return collection


def _read_head(shard: str, on_error: str, rule: CaptionRule) -> tuple[IndexHead, None]:
    return read_head(shard, on_error, rule), None


def _settled(rule: CaptionRule, texts: int, texts_of_lines: int) -> CaptionRule:
    return msgspec.structs.replace(rule, lines=have_lines(texts, texts_of_lines))


def rules_of_splits(shards: Sequence[str], caption_lines: str | CaptionRule = "auto") -> dict[str, CaptionRule]:
    """Return for each of some shards the rule by which :func:`read_collection` reads its split.

    Some of the shards may be damaged.
    """
    rule = as_rule(caption_lines)
    if rule.lines is not None:
        return dict.fromkeys(shards, rule)
    texts, texts_of_lines = Counter[str](), Counter[str]()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for shard, counts in zip(shards, pool.map(partial(_count_texts, rule=rule), shards), strict=True):
            texts[split_of(shard)] += counts[0]
            texts_of_lines[split_of(shard)] += counts[1]
    rules = {}
    for shard in shards:
        split = split_of(shard)
        rules[shard] = _settled(rule, texts[split], texts_of_lines[split])
    return rules


def _count_texts(shard: str, rule: CaptionRule) -> tuple[int, int]:
    """Return the number of texts, and of those with several lines; none of a shard that cannot be read."""
    try:
        head = read_head(shard, "skip", rule)
    except (UserError, OSError):
        return 0, 0
    return head.texts, head.texts_of_lines or 0
