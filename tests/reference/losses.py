"""The losses as the papers write them: loops over Python floats, derivatives by hand.

The loss of one positive pair is a function ``(row, positive, negatives, **options) -> (value, derivatives)``. ``row``
holds the anchor's similarities; ``positive`` and ``negatives`` are indices into it, and so are the keys of
``derivatives``.
"""

import math


def unified(row, positive, negatives, margin, scale):
    """Li et al. 2022, Eq. 5: one of its two logarithms, divided by the scale."""
    terms = {n: math.exp(scale * (row[n] - row[positive] + margin)) for n in negatives}
    total = 1 + math.fsum(terms.values())
    derivatives = {n: term / total for n, term in terms.items()}
    derivatives[positive] = -math.fsum(terms.values()) / total
    return math.log1p(math.fsum(terms.values())) / scale, derivatives


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
        hinge, of_hinge = triplet(row, positive, n, margin)
        value += hinge
        derivatives[n] = of_hinge.get(n, 0.0)
        derivatives[positive] += of_hinge.get(positive, 0.0)
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
        value, of_row = pair_loss(similarities[i], p, [c for r, c in sorted(negatives) if r == i], **options)
        values[i, p] = value
        derivatives[i, p] = {(i, c): derivative for c, derivative in of_row.items()}
        if symmetric:
            value, of_column = pair_loss(columns[p], i, [r for r, c in sorted(negatives) if c == p], **options)
            values[i, p] += value
            for r, derivative in of_column.items():
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
    for pair, of_pair in derivatives.items():
        for (r, c), derivative in of_pair.items():
            gradient[r][c] += weights[pair] * derivative
    return gradient
