"""What regularizers of sets have in common."""

from torch import Tensor

from vl_plugins.distances.base import SetDistance, elements_present
from vl_plugins.functional.precision import full_precision

__all__ = ["unpack"]


def unpack(set_size: int, embeddings: Tensor, ref_emb: Tensor | None = None) -> list[tuple[Tensor, Tensor | None]]:
    """Return the sets of each side, (B, K, D), in float32 at least, and which of their elements are no padding, (B, K).

    The masks are None where there is no padding. Both sides are unpacked as
    :class:`~vl_plugins.distances.base.SetDistance` does; without ``ref_emb`` there is one.

    Raises:
        ValueError: shapes that do not fit each other or ``set_size``.
    """
    embeddings, ref_emb = full_precision(embeddings, ref_emb)
    sides = SetDistance(set_size).unpack(embeddings, embeddings if ref_emb is None else ref_emb)
    return [(sets, elements_present(sets)) for sets in (sides[:1] if ref_emb is None else sides)]
