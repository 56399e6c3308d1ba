"""WebDataset shards of captioned images: written from any source, read by index."""

from vl_plugins.data.captions import CaptionedImage, RejectedImage, normalize_caption
from vl_plugins.data.collection import Collection, expand_shards, first_captions, read_collection
from vl_plugins.data.dataset import Draw, EvaluationBatch, Item, ShardDataset, evaluation_loader
from vl_plugins.data.sampler import CaptionSampler, training_loader
from vl_plugins.data.sources import Columns, read_coco_captions, read_karpathy, read_table, with_annotation_ids
from vl_plugins.data.verification import verify_shards
from vl_plugins.data.writer import write_shards

__all__ = [
    "CaptionSampler",
    "CaptionedImage",
    "Collection",
    "Columns",
    "Draw",
    "EvaluationBatch",
    "Item",
    "RejectedImage",
    "ShardDataset",
    "evaluation_loader",
    "expand_shards",
    "first_captions",
    "normalize_caption",
    "read_coco_captions",
    "read_collection",
    "read_karpathy",
    "read_table",
    "training_loader",
    "verify_shards",
    "with_annotation_ids",
    "write_shards",
]
