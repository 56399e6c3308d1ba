"""Losses and an evaluator for the trainers of ``SentenceTransformer`` and ``MultiVectorEncoder``."""

from vl_plugins.integrations.sentence_transformers.evaluation import CrossModalRetrievalEvaluator
from vl_plugins.integrations.sentence_transformers.losses import CachedRetrievalLoss, RetrievalLoss
from vl_plugins.integrations.sentence_transformers.scoring import smooth_chamfer_scores

__all__ = ["CachedRetrievalLoss", "CrossModalRetrievalEvaluator", "RetrievalLoss", "smooth_chamfer_scores"]
