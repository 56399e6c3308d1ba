"""WebDataset shards of captioned images: written from any source, read by index.

Names are imported when they are first used: what writes and checks shards needs no torch, which takes half a gigabyte.
"""

import importlib
from typing import Any

from vl_plugins.errors import missing_extra

_MODULES = {
    "caption_table": ("Columns", "read_table"),
    "captions": ("CaptionedImage", "RejectedImage", "content_ids", "normalize_caption"),
    "collection": ("Collection",),
    "reading": ("read_collection",),
    "records": ("CaptionRule",),
    "shard_names": ("expand_shards",),
    "dataset": ("Draw", "EvaluationBatch", "Item", "ShardDataset", "evaluation_loader", "read_batches"),
    "hub": ("read_hugging_face",),
    "inspection": ("inspect_shards", "verify_shards"),
    "sampler": ("CaptionSampler", "training_loader"),
    "sources": ("read_coco_captions", "read_karpathy", "with_annotation_ids"),
    "writer": ("write_shards",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    except ModuleNotFoundError as error:
        raise missing_extra(str(error.name), "data") from error
