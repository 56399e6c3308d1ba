"""Encoders of images and texts, for losses that have no model of their own: a trunk, then an embedder.

A trunk is a module whose ``forward(inputs)`` returns :class:`vl_plugins.modules.TowerFeatures`, with the attributes
``local_width``, the width of its local features, and ``pooled_width``, that of its own embedding or None. A trunk of
images has ``image_transform(is_train)``, one of texts a ``tokenizer``. Importing them needs torch alone.
"""

from vl_plugins.encoders.chunks import encode_in_chunks
from vl_plugins.encoders.embedder import Embedder, ResidualMLP
from vl_plugins.encoders.gru import GRUTrunk
from vl_plugins.encoders.regions import FeatureTrunk, drop_positions
from vl_plugins.encoders.timm import TimmTrunk
from vl_plugins.encoders.transformers import HuggingFaceTrunk
from vl_plugins.encoders.vocabulary import Vocabulary, read_word_vectors

__all__ = [
    "Embedder",
    "FeatureTrunk",
    "GRUTrunk",
    "HuggingFaceTrunk",
    "ResidualMLP",
    "TimmTrunk",
    "Vocabulary",
    "drop_positions",
    "encode_in_chunks",
    "read_word_vectors",
]
