"""What this package imports of sentence-transformers, in one place.

``BaseEvaluator`` and ``MultiVectorEncoder``, which is new in 6.0, are documented. These names are not:

===================  ===================================================================================
``CachedLossMixin``  Gradient caching: embeds in mini-batches, and again in the backward pass.
``create_minibatch`` Some rows of a column. The mixin embeds vectors only; for sets, we embed ourselves.
``RandContext``      The random numbers of a mini-batch, so that dropout is the same the second time.
``embed_columns``    Embeds columns of one kind in one pass, which is faster.
``is_image_path``    Which texts a model reads as pictures.
``column_names``     A loss gets the columns without their names; the card of the model lists them.
===================  ===================================================================================

The tests pass with 6.0.0, 6.0.1, 6.1.0 and 6.2.0.
"""

from typing import Any

from torch import nn

from vl_plugins.errors import require

__all__ = [
    "BaseEvaluator",
    "CachedLossMixin",
    "MultiVectorEncoder",
    "RandContext",
    "column_names",
    "create_minibatch",
    "embed_columns",
    "is_image_path",
    "unwrapped",
]

CHECKED = "6.0.0 to 6.2.0"

host = require("sentence_transformers", "sentence-transformers")
try:
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.evaluation import BaseEvaluator
    from sentence_transformers.base.losses import CachedLossMixin, RandContext
    from sentence_transformers.base.losses.gradcache import _create_minibatch as create_minibatch
    from sentence_transformers.base.losses.merged_forward import embed_columns
    from sentence_transformers.base.modality import is_image_url_or_path as is_image_path
except ImportError as error:
    raise ImportError(
        f"sentence-transformers {host.__version__} lacks what vl_plugins needs of it ({error}); install a version that "
        f"was tested, {CHECKED}"
    ) from error


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without the wrappers of ``DistributedDataParallel`` and ``torch.compile``."""
    for attribute in ("module", "_orig_mod"):
        model = getattr(model, attribute, model)
    return model


def column_names(model: Any, count: int) -> list[str]:
    """Return the names of the columns that a loss gets, for messages.

    The trainer writes those of the training data to the model's card. If these are of several data sets, or if there is
    no trainer, the columns are numbered.
    """
    numbered = [f"column {number}" for number in range(1, count + 1)]
    card = getattr(unwrapped(model), "model_card_data", None)
    datasets = getattr(card, "train_datasets", [])
    if len(datasets) != 1:
        return numbered
    names = []
    for name in datasets[0].get("columns", []):
        name = name.removeprefix("<code>").removesuffix("</code>")
        if name not in ("label", "labels", "score", "scores"):
            names.append(name)
    return names if len(names) == count else numbered
