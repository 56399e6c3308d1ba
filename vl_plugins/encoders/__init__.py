"""Encoders of images and texts, for losses that have no model of their own: a trunk, then an embedder.

A trunk is a module whose ``forward(inputs)`` gives :class:`vl_plugins.modules.TowerFeatures`, with the attributes
``local_width``, the width of its local features, and ``pooled_width``, that of its own embedding or None.
``example_inputs(batch_size, generator=None)`` makes up inputs to try it with. An :class:`Embedder` makes the embedding
of it. Importing them needs torch alone.
"""

from vl_plugins.encoders.embedder import Embedder
from vl_plugins.encoders.feature_trunk import FeatureTrunk
from vl_plugins.encoders.gru_trunk import GRUTrunk
from vl_plugins.encoders.hugging_face_trunk import HuggingFaceTrunk
from vl_plugins.encoders.timm_trunk import TimmTrunk

__all__ = ["Embedder", "FeatureTrunk", "GRUTrunk", "HuggingFaceTrunk", "TimmTrunk"]
