"""Embeddings of images and captions with their ids, in memory and in files."""

from vl_plugins.retrieval.embeddings import (
    Features,
    OneSide,
    check_embeddings,
    describe_similarity,
    first_difference,
    recorded_similarity,
)
from vl_plugins.retrieval.feature_files import (
    SUFFIXES,
    check_features_file,
    is_folder_name,
    load_features,
    save_features,
)

__all__ = [
    "SUFFIXES",
    "Features",
    "OneSide",
    "check_embeddings",
    "check_features_file",
    "describe_similarity",
    "first_difference",
    "is_folder_name",
    "load_features",
    "recorded_similarity",
    "save_features",
]
