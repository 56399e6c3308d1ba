"""Losses, an evaluator and a callback for the trainers of ``SentenceTransformer`` and ``MultiVectorEncoder``."""

from vl_plugins.integrations.sentence_transformers.evaluation import CrossModalRetrievalEvaluator
from vl_plugins.integrations.sentence_transformers.loss_state import LossStateCallback
from vl_plugins.integrations.sentence_transformers.losses import CachedRetrievalLoss, RetrievalLoss
from vl_plugins.integrations.sentence_transformers.scoring import smooth_chamfer_scores

__all__ = [
    "CachedRetrievalLoss",
    "CrossModalRetrievalEvaluator",
    "LossStateCallback",
    "RetrievalLoss",
    "smooth_chamfer_scores",
]
