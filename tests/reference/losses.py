"""The losses as the papers write them: loops over Python floats, derivatives by hand.

The loss of one positive pair is a function ``(row, positive, negatives, **options) -> (value, derivatives)``. ``row``
holds the anchor's similarities; ``positive`` and ``negatives`` are indices into it, and so are the keys of
``derivatives``.
"""

import math
from collections import Counter


def unified(row, positive, negatives, margin, scale):
    """Li et al. 2022, Eq. 5: one of its two logarithms, divided by the scale."""
    terms = {n: math.exp(scale * (row[n] - row[positive] + margin)) for n in negatives}
    total = 1 + math.fsum(terms.values())
    derivatives = {n: term / total for n, term in terms.items()}
    derivatives[positive] = -math.fsum(terms.values()) / total
    return math.log1p(math.fsum(terms.values())) / scale, derivatives


def unified_variants(similarities, positives, negatives, *, symmetric, scale, margin, weights, relative):
    """Li et al. 2022, Eq. 24-26 in one: with weights, a function of the relative similarity, and a margin per pair.

    Returns what :func:`pair_losses` does, but a derivative has the key ("similarity", i, c), ("margin", i, p),
    ("positive weight", i, p) or ("negative weight", i, n).

    ``margin`` is a function of the pair (i, p) and its similarity that returns (value, derivative by the similarity);
    ``weights`` are two such functions, of a positive and of a negative pair; ``relative`` is one of a number.
    """
    positive_weight, negative_weight = weights
    values, derivatives = {}, {}
    for i, p in sorted(positives):
        s_p = similarities[i][p]
        m, slope_m = margin(i, p, s_p)
        w_p, slope_w_p = positive_weight(i, p, s_p)
        value, derivative = 0.0, Counter()
        directions = [[(r, c) for r, c in sorted(negatives) if r == i]]
        if symmetric:
            directions.append([(r, c) for r, c in sorted(negatives) if c == p])
        for candidates in directions:
            weighted, slopes, terms = {}, {}, {}
            for r, c in candidates:
                s_n = similarities[r][c]
                weighted[r, c] = negative_weight(r, c, s_n)
                g, slopes[r, c] = relative(weighted[r, c][0] * s_n - w_p * s_p)
                terms[r, c] = math.exp(scale * (g + m))
            total = 1 + math.fsum(terms.values())
            value += math.log(total) / scale
            for (r, c), term in terms.items():
                s_n, (w_n, slope_w_n), share = similarities[r][c], weighted[r, c], term / total
                derivative["margin", i, p] += share
                derivative["similarity", i, p] += share * slope_m
                derivative["negative weight", r, c] += share * slopes[r, c] * s_n
                derivative["similarity", r, c] += share * slopes[r, c] * (w_n + slope_w_n * s_n)
                derivative["positive weight", i, p] -= share * slopes[r, c] * s_p
                derivative["similarity", i, p] -= share * slopes[r, c] * (w_p + slope_w_p * s_p)
        values[i, p], derivatives[i, p] = value, derivative
    return values, derivatives


def polynomial(coefficients):
    """Return the function of a number that returns the polynomial's value and its derivative."""

    def value_and_derivative(x):
        value = math.fsum(c * x**k for k, c in enumerate(coefficients))
        return value, math.fsum(k * c * x ** (k - 1) for k, c in enumerate(coefficients) if k > 0)

    return value_and_derivative


def vlc(row, positive, negatives, scale):
    """Li et al. 2022, Eq. 3: minus the log of a softmax over the positive and the negatives."""
    exponentials = {c: math.exp(scale * row[c]) for c in [positive, *negatives]}
    total = math.fsum(exponentials.values())
    derivatives = {c: scale * exponential / total for c, exponential in exponentials.items()}
    derivatives[positive] -= scale
    return -math.log(exponentials[positive] / total), derivatives


def triplet_hn(row, positive, negatives, margin):
    """Li et al. 2022, Eq. 1-2."""
    if not negatives:
        return 0.0, {}
    hardest = max(negatives, key=lambda n: row[n])
    return triplet(row, positive, hardest, margin)


def triplet_sh(row, positive, negatives, margin):
    """Faghri et al. 2018, sum of hinges."""
    value, derivatives = 0.0, {positive: 0.0}
    for n in negatives:
        hinge, hinge_derivatives = triplet(row, positive, n, margin)
        value += hinge
        derivatives[n] = hinge_derivatives.get(n, 0.0)
        derivatives[positive] += hinge_derivatives.get(positive, 0.0)
    return value, derivatives


def triplet(row, positive, negative, margin):
    """[margin - s(a, p) + s(a, n)]_+"""
    violation = margin - row[positive] + row[negative]
    return (violation, {positive: -1.0, negative: 1.0}) if violation > 0 else (0.0, {})


def pair_losses(pair_loss, similarities, positives, negatives, *, symmetric, **options):
    """Return ``{(i, p): value}`` in row-major order and ``{(i, p): {(a, c): derivative}}``.

    ``similarities`` is a list of rows, ``positives`` and ``negatives`` are sets of (row, column).
    """
    columns = [list(column) for column in zip(*similarities, strict=True)]
    values, derivatives = {}, {}
    for i, p in sorted(positives):
        value, row_derivatives = pair_loss(similarities[i], p, [c for r, c in sorted(negatives) if r == i], **options)
        values[i, p] = value
        derivatives[i, p] = {(i, c): derivative for c, derivative in row_derivatives.items()}
        if symmetric:
            value, column_derivatives = pair_loss(columns[p], i, [r for r, c in sorted(negatives) if c == p], **options)
            values[i, p] += value
            for r, derivative in column_derivatives.items():
                derivatives[i, p][r, p] = derivatives[i, p].get((r, p), 0.0) + derivative
    return values, derivatives


def pairs_of_labels(labels, other_labels=None):
    """Return the sets of positive and negative pairs; of one set, an item and itself is neither."""
    one_set = other_labels is None
    positives, negatives = set(), set()
    for i, label in enumerate(labels):
        for j, other in enumerate(labels if one_set else other_labels):
            if label != other:
                negatives.add((i, j))
            elif not (one_set and i == j):
                positives.add((i, j))
    return positives, negatives


def weighted_gradient(derivatives, weights, rows, columns):
    """Return, as a list of rows, the gradient of sum over k of weights[k] * loss k."""
    gradient = [[0.0] * columns for _ in range(rows)]
    for pair, pair_derivatives in derivatives.items():
        for (r, c), derivative in pair_derivatives.items():
            gradient[r][c] += weights[pair] * derivative
    return gradient
