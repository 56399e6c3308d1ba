"""What is in shards: statistics, and whether it is what was written and can be decoded."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from vl_plugins.data.collection import Collection
from vl_plugins.data.engines import run_jobs
from vl_plugins.data.files import sha256
from vl_plugins.data.index import HASHES, IndexHead, find_index, read_head, scan_shard
from vl_plugins.data.limits import MAX_IMAGE_PIXELS, check_max_image_pixels
from vl_plugins.data.reading import rules_of_splits
from vl_plugins.data.records import CaptionRule, Record
from vl_plugins.data.samples import check_input
from vl_plugins.data.shard_names import split_of
from vl_plugins.errors import UserError
from vl_plugins.tables import printable

READ_TOGETHER = 100  # images


def inspect_shards(shards: Sequence[str], caption_lines: str | CaptionRule = "auto") -> dict[str, dict[str, Any]]:
    """Return statistics of each split, ready for JSON, from the indexes of its shards.

    Args:
        shards: paths or URLs.
        caption_lines: see :func:`~vl_plugins.data.reading.read_collection`.

    A split is what :func:`split_of` returns. Its statistics are numbers of ``shards``, ``images`` and ``captions``;
    numbers of images by ``captions_per_image``; and ``repeated_captions``, which several images have: their ``number``
    and ``share``, [0, 1], how many ``different`` ones, and how many images have the ``most_frequent``. Captions count
    once an image, and are compared by :func:`~vl_plugins.data.captions.normalize_caption`.

    Raises:
        UserError: a shard or its index cannot be read.
    """
    splits = defaultdict(list)
    for shard in shards:
        splits[split_of(shard)].append(shard)
    rules = rules_of_splits(shards, caption_lines)
    return {split: _describe(of_split, rules[of_split[0]]) for split, of_split in splits.items()}


def _describe(shards: Sequence[str], rule: CaptionRule) -> dict[str, Any]:
    images: Counter[int] = Counter()  # by number of captions
    captions_of_shards = []
    for head in run_jobs(partial(read_head, rule=rule), shards):
        images.update(head.counts)
        owners = np.repeat(np.arange(len(head.counts)), head.counts)
        captions = np.stack([owners, np.frombuffer(head.caption_hashes, HASHES)])
        captions_of_shards.append(np.unique(captions, axis=1)[1])  # each caption of an image once
    _, repeats = np.unique(np.concatenate(captions_of_shards), return_counts=True)
    repeated = repeats[repeats > 1]
    return {
        "shards": len(shards),
        "images": images.total(),
        "captions": sum(count * frequency for count, frequency in images.items()),
        "captions_per_image": dict(sorted(images.items())),
        "repeated_captions": {
            "number": int(repeated.sum()),
            "share": float(repeated.sum() / max(repeats.sum(), 1)),
            "different": len(repeated),
            "most_frequent": int(repeated.max(initial=0)),
        },
    }


def verify_shards(
    shards: Sequence[str],
    *,
    workers: int | None = None,
    executor: Any = None,
    caption_lines: str | CaptionRule = "auto",
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> tuple[int, int, list[str]]:
    """Compare shards with their indexes, and decode all pictures and arrays; without an index they are only decoded.

    Args:
        shards: paths or URLs.
        workers, executor: see :func:`~vl_plugins.data.engines.run_jobs`; a job is a shard.
        caption_lines: see :func:`~vl_plugins.data.reading.read_collection`.
        max_image_pixels: a picture with more pixels is a problem, and is not decoded; 0 sets no limit.

    Returns:
        Numbers of samples and of usable captions, and problems: ``<shard>: <problem>`` or ``<shard>: <key>: ...``.

    Raises:
        UserError: ``max_image_pixels`` is negative.
    """
    rules = rules_of_splits(shards, caption_lines)
    check_max_image_pixels(max_image_pixels)
    verify = partial(_verify_shard, rules=rules, max_image_pixels=max_image_pixels)
    results = run_jobs(verify, shards, workers, executor)
    samples, captions, problems = 0, 0, []
    bar = tqdm(results, "verify", len(shards), unit="shard", disable=None)
    for shard, (samples_of_shard, captions_of_shard, problems_of_shard) in zip(shards, bar, strict=True):
        samples += samples_of_shard
        captions += captions_of_shard
        for problem in problems_of_shard:
            problems.append(printable(f"{shard}: {problem}"))
    return samples, captions, problems


def _verify_shard(shard: str, rules: Mapping[str, CaptionRule], max_image_pixels: int) -> tuple[int, int, list[str]]:
    """Return the numbers of samples and usable captions of a shard, and its problems."""
    problems, captions = [], 0
    rule = rules[shard]
    try:
        index = find_index(shard, with_records=True)
        if index is not None:
            rule = index[0].rule
        scanned, records = scan_shard(shard, rule=rule)
        if index is not None:
            problems += _compare(index, (scanned, records), shard)
        if not records:
            problems.append("it has no samples")
    except (UserError, OSError) as error:
        return 0, 0, [str(error)]
    collection = Collection([shard], [scanned], rule=rule)
    for start in range(0, len(records), READ_TOGETHER):
        images = range(len(records))[start : start + READ_TOGETHER]
        for image, data in zip(images, collection.read(images), strict=True):
            try:
                record, members = collection.parse(image, data)
                check_input(members, max_image_pixels)
                captions += len(record.captions)
            except (UserError, OSError) as error:
                problems.append(f"{records[image].key}: {error}")
    return len(records), captions, problems


def _compare(index: tuple[IndexHead, list[Record]], scan: tuple[IndexHead, list[Record]], shard: str) -> list[str]:
    """Return what is wrong with the index of a shard."""
    head, records = index
    if head.sha256 and head.sha256 != sha256(shard):
        return ["it is not what was written: its index has another SHA-256"]
    head = msgspec.structs.replace(head, sha256="", fingerprint="", rejected=[])
    return [] if (head, records) == scan else ["its index is that of other images"]
