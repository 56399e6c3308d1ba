"""The error of a loss that is NaN or infinite."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.batch_record import BatchRecord
from vl_plugins.negatives import block_rows

__all__ = ["NonFiniteLossError", "check_finite"]

logger = logging.getLogger(__name__)

MOST_KEYS = 16  # in the message; the log has all of them


class NonFiniteLossError(UserError):
    """The loss is NaN or infinite."""


def check_finite(terms: Mapping[str, Tensor], images: Tensor, texts: Tensor, record: BatchRecord | None) -> None:
    """Check the terms of a loss; this waits for the GPU once.

    Args:
        terms: by name, 0-D.
        images, texts: (B, D) and (k * B, D), or sets (B, K, D) and (k * B, K, D).
        record: of the batch.

    Raises:
        NonFiniteLossError: a term is not finite. The message has the step, the terms, the range of the similarities,
            and the keys of the images with features that are not finite.
    """
    if torch.stack([term.detach().isfinite().all() for term in terms.values()]).all():
        return
    values = ", ".join(f"{name} {term.item():g}" for name, term in terms.items())
    where = "" if record is None else f"step {record.step}: "
    parts = [f"{where}the loss is not finite ({values})"]
    bad_images: set[int] = set()
    for name, features, per_image in (("image", images, 1), ("text", texts, max(1, len(texts) // max(1, len(images))))):
        bad_rows = (~features.flatten(1).isfinite().all(dim=1)).nonzero().flatten().tolist()
        if bad_rows:
            parts.append(f"{len(bad_rows)} of {len(features)} {name} features are not finite")
            bad_images.update(row // per_image for row in bad_rows)
    parts.append(_similarity_range(images, texts))
    keys = [] if record is None else record.keys
    if keys:
        logger.error(f"keys of the batch: {' '.join(keys)}")
        named = [keys[row] for row in sorted(bad_images) if row < len(keys)] or keys
        more = f" and {len(named) - MOST_KEYS} more" if len(named) > MOST_KEYS else ""
        parts.append(f"keys of {'these' if bad_images else 'the batch'}: {', '.join(named[:MOST_KEYS])}{more}")
    raise NonFiniteLossError("; ".join(parts))


@torch.no_grad()
def _similarity_range(images: Tensor, texts: Tensor) -> str:
    images, texts = (side.flatten(0, -2).float() for side in (images, texts))
    images, texts = (side[side.isfinite().all(dim=1)] for side in (images, texts))
    if 0 in (len(images), len(texts)):
        return "no similarity is finite"
    blocks = images.split(block_rows(len(texts), images.device))
    extremes = [torch.aminmax(block @ texts.T) for block in blocks]
    least, most = min(low.item() for low, _ in extremes), max(high.item() for _, high in extremes)
    return f"similarities of finite features from {least:.4g} to {most:.4g}"
