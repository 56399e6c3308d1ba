"""WebDataset shards of captioned images: written from any source, read by index."""

from vl_plugins.data.captions import CaptionedImage, RejectedImage, normalize_caption
from vl_plugins.data.collection import Collection, expand_shards, first_captions, read_collection
from vl_plugins.data.dataset import Draw, EvaluationBatch, Item, ShardDataset, evaluation_loader
from vl_plugins.data.sampler import CaptionSampler, training_loader

__all__ = [
    "CaptionSampler",
    "CaptionedImage",
    "Collection",
    "Draw",
    "EvaluationBatch",
    "Item",
    "RejectedImage",
    "ShardDataset",
    "evaluation_loader",
    "expand_shards",
    "first_captions",
    "normalize_caption",
    "read_collection",
    "training_loader",
]
