"""The losses as the papers write them: loops over similarities, one number at a time, in float64.

The loss of one positive pair is a function ``(row, positive, negatives, **options) -> value``. ``row`` is a tensor of
the anchor's similarities; ``positive`` and ``negatives`` are indices into it. Gradients come by automatic
differentiation of the loops.
"""

import torch


def unified(row, positive, negatives, margin, scale, weights=None, relative=None):
    """Li et al. 2022, Eq. 5: one of its two logarithms, divided by the scale; Eq. 24-26 with functions of a number."""
    of_positive, of_negative = weights or (torch.ones_like, torch.ones_like)
    total = row.new_ones(())
    for n in negatives:
        difference = of_negative(row[n]) * row[n] - of_positive(row[positive]) * row[positive]
        total = total + torch.exp(scale * ((relative(difference) if relative else difference) + margin))
    return torch.log(total) / scale


def polynomial(coefficients):
    return lambda x: sum(c * x**k for k, c in enumerate(coefficients))


def vlc(row, positive, negatives, scale):
    """Li et al. 2022, Eq. 3: minus the log of a softmax over the positive and the negatives."""
    exponentials = {c: torch.exp(scale * row[c]) for c in [positive, *negatives]}
    return -torch.log(exponentials[positive] / sum(exponentials.values()))


def triplet_hn(row, positive, negatives, margin):
    """Li et al. 2022, Eq. 1-2."""
    return triplet(row, positive, max(negatives, key=lambda n: row[n]), margin) if negatives else 0 * row[positive]


def triplet_sh(row, positive, negatives, margin):
    """Faghri et al. 2018, sum of hinges."""
    return sum((triplet(row, positive, n, margin) for n in negatives), start=0 * row[positive])


def squared_hinge(row, positive, negatives, margin, scale):
    """A squared hinge of the soft maximum of the negatives."""
    if not negatives:
        return 0 * row[positive]
    soft_maximum = torch.log(sum(torch.exp(scale * row[n]) for n in negatives)) / scale
    return (margin + soft_maximum - row[positive]).relu() ** 2


def sigmoid(row, positive, negatives, scale, bias):
    """Zhai et al. 2023, Eq. 1: minus the logarithm of a sigmoid for each pair."""
    signs = {positive: 1} | dict.fromkeys(negatives, -1)
    return sum(torch.log1p(torch.exp(-sign * (scale * row[column] + bias))) for column, sign in signs.items())


def triplet(row, positive, negative, margin):
    """[margin - s(a, p) + s(a, n)]_+"""
    return (margin - row[positive] + row[negative]).relu()


def pair_losses(pair_loss, similarities, positives, negatives, *, symmetric, **options):
    """Return ``{(i, p): value}`` in row-major order; ``positives`` and ``negatives`` are sets of (row, column)."""
    values = {}
    for i, p in sorted(positives):
        values[i, p] = pair_loss(similarities[i], p, [c for r, c in sorted(negatives) if r == i], **options)
        if symmetric:
            others = [r for r, c in sorted(negatives) if c == p]
            values[i, p] = values[i, p] + pair_loss(similarities[:, p], i, others, **options)
    return values


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
