"""Similarities of sets of embeddings, from the cosines of all pairs of elements of two sets.

All functions share these arguments:

- ``embeddings`` (A, K1, D) and ``ref_emb`` (C, K2, D): sets of K1 and of K2 elements.
- ``mask`` (A, K1) and ``ref_mask`` (C, K2), bool: which elements are in the set; all of them if left out. The others
  have no influence and no gradient.
- ``normalize``: elements are L2-normalized first; False for unit vectors. A zero vector has the cosine 0 to any other,
  and no gradient.
- ``paired``: compare each set with the one at its place in ``ref_emb`` only; A and C must be equal.

They return the similarities (A, C), or (A,) if ``paired``, in float32 or float64, also under autocast. A set without
elements has the similarity 0, and no gradient. NaN in an element of a set gives NaN; so does infinity, if elements are
normalized. A wrong shape, type or device raises ``ValueError``. Memory is several numbers per pair of elements; see
:func:`vl_plugins.kernels.pairwise_smooth_chamfer` for less.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vl_plugins.functional.precision import full_precision, unit_vectors
from vl_plugins.functional.sets import check_sets, element_weights, masked_sets
from vl_plugins.utils.checks import positive

__all__ = ["chamfer_similarity", "match_probability", "mil_similarity", "smooth_chamfer_similarity"]

ABSENT = -1e30  # in place of a cosine; finite, because infinity times a weight of 0 is NaN


def smooth_chamfer_similarity(
    embeddings: Tensor,
    ref_emb: Tensor,
    alpha: float = 16.0,
    *,
    mask: Tensor | None = None,
    ref_mask: Tensor | None = None,
    normalize: bool = True,
    paired: bool = False,
) -> Tensor:
    r"""Smooth-Chamfer similarity of sets (Eq. 6-7): each element and a soft maximum over the other set.

    .. math:: s = \frac{1}{2 \alpha |X|} \sum_{x \in X} \log \sum_{y \in Y} e^{\alpha c(x, y)}
              + \frac{1}{2 \alpha |Y|} \sum_{y \in Y} \log \sum_{x \in X} e^{\alpha c(x, y)}

    with the cosines :math:`c(x, y)` and an inverse temperature :math:`\alpha > 0`. Every pair of elements gets a
    gradient, the closest ones the most (Eq. 8). Sets of one element have their cosine as similarity. The limit of a
    large alpha is :func:`chamfer_similarity`, which is less by at most :math:`\log(\max(K_1, K_2)) / \alpha`.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings.

    >>> images = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> texts = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[1.0, 0.0], [1.0, 0.0]]])
    >>> smooth_chamfer_similarity(images, texts)
    tensor([[1.0000, 0.7717]])
    """
    alpha = positive("alpha", alpha)
    pairs = _compare(embeddings, ref_emb, mask, ref_mask, normalize, paired)
    return _mean_of_directions(lambda cosines, dim: (alpha * cosines).logsumexp(dim) / alpha, *pairs)


def chamfer_similarity(
    embeddings: Tensor,
    ref_emb: Tensor,
    *,
    mask: Tensor | None = None,
    ref_mask: Tensor | None = None,
    normalize: bool = True,
    paired: bool = False,
) -> Tensor:
    r"""Chamfer similarity of sets: each element and the closest of the other set. Ties share the gradient.

    .. math:: s = \frac{1}{2 |X|} \sum_{x \in X} \max_{y \in Y} c(x, y)
              + \frac{1}{2 |Y|} \sum_{y \in Y} \max_{x \in X} c(x, y)

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, section 3.3.

    >>> chamfer_similarity(torch.eye(2)[None], torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]))
    tensor([[0.7500]])
    """
    return _mean_of_directions(torch.amax, *_compare(embeddings, ref_emb, mask, ref_mask, normalize, paired))


def mil_similarity(
    embeddings: Tensor,
    ref_emb: Tensor,
    *,
    mask: Tensor | None = None,
    ref_mask: Tensor | None = None,
    normalize: bool = True,
    paired: bool = False,
) -> Tensor:
    r"""Similarity of multiple-instance learning: that of the closest pair of elements. Ties share the gradient.

    .. math:: s = \max_{x \in X, y \in Y} c(x, y)

    Reference:
        Song and Soleymani 2019, Polysemous Visual-Semantic Embedding for Cross-Modal Retrieval (PVSE).

    >>> mil_similarity(torch.eye(2)[None], torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]))
    tensor([[1.]])
    """
    cosines, *weights = _compare(embeddings, ref_emb, mask, ref_mask, normalize, paired)
    return _zero_empty(cosines.amax((-2, -1)), *weights)


def match_probability(
    embeddings: Tensor,
    ref_emb: Tensor,
    scale: float | Tensor = 1.0,
    shift: float | Tensor = 0.0,
    *,
    mask: Tensor | None = None,
    ref_mask: Tensor | None = None,
    normalize: bool = True,
    paired: bool = False,
) -> Tensor:
    r"""Match probability of sets: the mean probability that two of their elements match, [0, 1].

    .. math:: s = \frac{1}{|X| |Y|} \sum_{x \in X, y \in Y} \sigma(a c(x, y) + b)

    ``scale`` a and ``shift`` b are numbers, or tensors of one element, which receive gradients.

    Reference:
        Chun et al. 2021, Probabilistic Embeddings for Cross-Modal Retrieval (PCME).

    >>> match_probability(torch.eye(2)[None], torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]), scale=2.0)
    tensor([[0.6904]])
    """
    cosines, weights, ref_weights = _compare(embeddings, ref_emb, mask, ref_mask, normalize, paired)
    scale, shift = (torch.as_tensor(number).to(cosines) for number in (scale, shift))
    if scale.numel() != 1 or shift.numel() != 1:
        raise ValueError(f"scale and shift must have one element, got {tuple(scale.shape)} and {tuple(shift.shape)}")
    probabilities = (scale * cosines + shift).sigmoid()
    return (probabilities * weights[..., :, None] * ref_weights[..., None, :]).sum((-2, -1))


def _compare(
    embeddings: Tensor, ref_emb: Tensor, mask: Tensor | None, ref_mask: Tensor | None, normalize: bool, paired: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cosines (..., K1, K2), and the weights of elements (..., K1) and (..., K2).

    A weight is 1 / number of elements of the set, or 0 if the element is not in it; then its cosines are ``ABSENT``.
    """
    check_sets(embeddings, ref_emb, mask, ref_mask)
    if paired and len(embeddings) != len(ref_emb):
        raise ValueError(f"paired sets must be equally many, got {len(embeddings)} embeddings, {len(ref_emb)} ref_emb")
    embeddings, ref_emb = full_precision(embeddings, ref_emb)
    embeddings, weights = _prepare(embeddings, mask, normalize)
    ref_emb, ref_weights = _prepare(ref_emb, ref_mask, normalize)
    with torch.autocast(embeddings.device.type, enabled=False):
        cosines = torch.einsum("akd,ald->akl" if paired else "akd,cld->ackl", embeddings, ref_emb)
    weights = weights if paired else weights[:, None]
    absent = (weights[..., :, None] == 0) | (ref_weights[..., None, :] == 0)
    return cosines.masked_fill(absent, ABSENT), weights, ref_weights


def _prepare(sets: Tensor, mask: Tensor | None, normalize: bool) -> tuple[Tensor, Tensor]:
    sets, mask = masked_sets(sets, mask)
    if sets.shape[1] == 0:  # torch has no maximum of nothing
        sets, mask = torch.nn.functional.pad(sets, (0, 0, 0, 1)), mask.new_zeros(len(sets), 1)
    return unit_vectors(sets) if normalize else sets, element_weights(sets, mask)


def _mean_of_directions(
    maximum: Callable[[Tensor, int], Tensor], cosines: Tensor, weights: Tensor, ref_weights: Tensor
) -> Tensor:
    values = (maximum(cosines, -1) * weights).sum(-1) + (maximum(cosines, -2) * ref_weights).sum(-1)
    return _zero_empty(values / 2, weights, ref_weights)


def _zero_empty(similarities: Tensor, weights: Tensor, ref_weights: Tensor) -> Tensor:
    return similarities.masked_fill((weights == 0).all(-1) | (ref_weights == 0).all(-1), 0)
