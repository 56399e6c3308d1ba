"""Similarities of two sets of vectors, one pair of elements at a time, and how torch code usually computes one of them.

A set is a tensor (K, D) or a list of vectors; its similarity to any is 0 if it has none.
"""

import torch
from torch.nn.functional import avg_pool2d, lp_pool2d

from tests.reference import distances

__all__ = [
    "EXP_AND_POOL",
    "chamfer",
    "cosine",
    "elements_that_are_not_zero",
    "match_probability",
    "matrix",
    "mil",
    "smooth_chamfer",
]


def cosine(x, y):
    if not x.any() or not y.any():  # NaN is not zero
        return x.new_zeros(())
    return distances.cosine(x, y)


def smooth_chamfer(xs, ys, alpha=16.0, element_similarity=cosine):
    """Eq. 6 of Kim et al."""
    if len(xs) == 0 or len(ys) == 0:
        return 0.0
    total = 0.0
    for x in xs:
        inner = 0.0
        for y in ys:
            inner = inner + torch.exp(alpha * element_similarity(x, y))
        total = total + torch.log(inner) / (2 * alpha * len(xs))
    for y in ys:
        inner = 0.0
        for x in xs:
            inner = inner + torch.exp(alpha * element_similarity(x, y))
        total = total + torch.log(inner) / (2 * alpha * len(ys))
    return total


def chamfer(xs, ys, element_similarity=cosine):
    if len(xs) == 0 or len(ys) == 0:
        return 0.0
    total = 0.0
    for x in xs:
        total = total + _largest([element_similarity(x, y) for y in ys]) / (2 * len(xs))
    for y in ys:
        total = total + _largest([element_similarity(x, y) for x in xs]) / (2 * len(ys))
    return total


def mil(xs, ys, element_similarity=cosine):
    if len(xs) == 0 or len(ys) == 0:
        return 0.0
    return _largest([element_similarity(x, y) for x in xs for y in ys])


def match_probability(xs, ys, scale=1.0, shift=0.0, element_similarity=cosine):
    if len(xs) == 0 or len(ys) == 0:
        return 0.0
    total = 0.0
    for x in xs:
        for y in ys:
            total = total + 1 / (1 + torch.exp(-(scale * element_similarity(x, y) + shift)))
    return total / (len(xs) * len(ys))


def matrix(similarity, xs, ys, x_mask=None, y_mask=None):
    """Return (A, C), connected to the sets (A, K1, D) and (C, K2, D); what is not in the masks is skipped."""
    connection = 0 * (xs.sum() + ys.sum())  # also where there is nothing to compare
    similarities = xs.new_zeros(len(xs), len(ys)) + connection
    for a in range(len(xs)):
        for c in range(len(ys)):
            similarities[a, c] = connection + similarity(_chosen(xs, x_mask, a), _chosen(ys, y_mask, c))
    return similarities


def elements_that_are_not_zero(similarity):
    """Return the similarity of what is left of two sets without their zero vectors."""
    return lambda xs, ys: similarity([x for x in xs if x.any()], [y for y in ys if y.any()])


def _chosen(sets, mask, index):
    return [element for k, element in enumerate(sets[index]) if mask is None or mask[index, k]]


def _largest(values):
    largest = values[0]
    for value in values[1:]:
        if value > largest:
            largest = value
    return largest


def _exp_and_lp_pool(x, y, alpha=16.0):
    """Smooth-Chamfer similarity of unit vectors as with ``torch.nn.LPPool2d(1, ...)`` and ``torch.nn.AvgPool2d``."""
    (_, k1, _), (_, k2, _) = x.shape, y.shape
    e = torch.exp(alpha * (x.flatten(0, 1) @ y.flatten(0, 1).T))[None]
    by_y = avg_pool2d(lp_pool2d(e, 1, (1, k2)).log(), (k1, 1))
    by_x = avg_pool2d(lp_pool2d(e, 1, (k1, 1)).log(), (1, k2))
    return (by_y + by_x)[0] / (2 * alpha)


def _exp_and_avg_pool(x, y, alpha=16.0):
    (_, k1, _), (_, k2, _) = x.shape, y.shape
    e = torch.exp(alpha * (x.flatten(0, 1) @ y.flatten(0, 1).T))[None]
    by_y = avg_pool2d((avg_pool2d(e, (1, k2)) * k2).log(), (k1, 1))
    by_x = avg_pool2d((avg_pool2d(e, (k1, 1)) * k1).log(), (1, k2))
    return (by_y + by_x)[0] / (2 * alpha)


def _exp_and_sum(x, y, alpha=16.0):
    (a, k1, _), (c, k2, _) = x.shape, y.shape
    e = torch.exp(alpha * (x.flatten(0, 1) @ y.flatten(0, 1).T)).view(a, k1, c, k2)
    return (e.sum(3).log().mean(1) + e.sum(1).log().mean(2)) / (2 * alpha)


EXP_AND_POOL = {"LP pooling": _exp_and_lp_pool, "average pooling": _exp_and_avg_pool, "reshape and sum": _exp_and_sum}
