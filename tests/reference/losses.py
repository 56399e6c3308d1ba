"""The losses as the papers write them: loops over similarities, one number at a time, in float64.

The loss of one positive pair is a function ``(row, positive, negatives, **options) -> value``. ``row`` is a tensor of
the anchor's similarities; ``positive`` and ``negatives`` are indices into it. Gradients come by automatic
differentiation of the loops.
"""

import inspect

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


def siglip(row, positive, negatives, positives, scale, bias):
    """Zhai et al. 2023, Eq. 1: minus the logarithm of a sigmoid for each pair, each negative counted once."""
    of_positive = torch.log1p(torch.exp(-(scale * row[positive] + bias)))
    of_negatives = sum(torch.log1p(torch.exp(scale * row[n] + bias)) for n in negatives)
    return of_positive + of_negatives / len(positives)


def share_of_unpaired(pair_loss, similarities, positives, negatives, options):
    """What each pair gets of the rows without a positive: in the sigmoid loss, each of their negatives counts once."""
    total = similarities.new_zeros(())
    if pair_loss is siglip:
        paired = {r for r, _ in positives}
        for r, n in sorted(negatives):
            if r not in paired:
                total = total + torch.log1p(torch.exp(options["scale"] * similarities[r, n] + options["bias"]))
    return total / max(1, len(positives))


def triplet(row, positive, negative, margin):
    """[margin - s(a, p) + s(a, n)]_+"""
    return (margin - row[positive] + row[negative]).relu()


def pair_losses(pair_loss, similarities, positives, negatives, *, symmetric, **options):
    """Return ``{(i, p): value}`` in row-major order; ``positives`` and ``negatives`` are sets of (row, column).

    A loss with a parameter ``positives`` gets those of its anchor.
    """
    values, turned = {}, [{(c, r) for r, c in pairs} for pairs in (positives, negatives)]
    share = share_of_unpaired(pair_loss, similarities, positives, negatives, options)
    if symmetric:
        share = share + share_of_unpaired(pair_loss, similarities.T, *turned, options)
    for i, p in sorted(positives):
        values[i, p] = value_of_pair(pair_loss, similarities, positives, negatives, i, p, options) + share
        if symmetric:
            values[i, p] = values[i, p] + value_of_pair(pair_loss, similarities.T, *turned, p, i, options)
    return values


def value_of_pair(pair_loss, similarities, positives, negatives, anchor, positive, options):
    """Return the loss of one pair; a formula with a parameter ``positives`` gets those of its anchor."""
    others = [c for r, c in sorted(negatives) if r == anchor]
    if "positives" in inspect.signature(pair_loss).parameters:
        options = options | {"positives": [c for r, c in sorted(positives) if r == anchor]}
    return pair_loss(similarities[anchor], positive, others, **options)


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
