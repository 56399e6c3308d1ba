"""Encoders of images and texts, for losses that have no model of their own: a trunk, then an embedder.

A trunk is a module whose ``forward(inputs)`` gives :class:`vl_plugins.modules.TowerFeatures`, with the attributes
``local_width``, the width of its local features, and ``pooled_width``, that of its own embedding or None. One of images
has ``image_transform(is_train)`` and ``example_inputs(batch_size)``. An :class:`Embedder` makes the embeddings.
Importing them needs torch alone.
"""

from vl_plugins.encoders.embedder import Embedder
from vl_plugins.encoders.feature_trunk import FeatureTrunk
from vl_plugins.encoders.gru_trunk import GRUTrunk
from vl_plugins.encoders.hugging_face_trunk import HuggingFaceTrunk
from vl_plugins.encoders.timm_trunk import TimmTrunk

__all__ = ["Embedder", "FeatureTrunk", "GRUTrunk", "HuggingFaceTrunk", "TimmTrunk"]
