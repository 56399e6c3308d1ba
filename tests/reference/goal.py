"""GOAL as its paper writes it: loops over Python floats, with the objective itself as the gradient.

Xuan and Chen 2023, Dissecting Deep Metric Learning Losses for Image-Text Retrieval, Eq. 5-13.
"""

import math

# Of the paper; GOALLoss has another offset.
DEFAULTS = {
    "margin": 0.2,
    "tau": 10.0,
    "offset": 0.0,
    "alpha": 2.0,
    "beta": 10.0,
    "lam": 0.5,
    "eps": 0.1,
}


def triplet_weight_and_violation(kind, s_p, s_n, margin, tau, offset):
    if kind == "con":
        return (1.0, margin + s_n - s_p) if margin + s_n - s_p > 0 else (0.0, 0.0)
    exponent = {"nca": s_p - s_n, "cir": s_p * (2 - s_p) - s_n**2 - offset}[kind]
    return 1 / (1 + math.exp(tau * exponent)), math.log1p(math.exp(-tau * exponent)) / tau


def pair_weights(kind, s_p, s_n, other_positives, other_negatives, alpha, beta, lam):
    """``other_positives`` is the set P of the paper and ``other_negatives`` its N, as lists of similarities."""
    if kind == "con":
        return 1.0, 1.0
    if kind == "lin":
        return 1 - s_p, s_n
    if kind == "sig":
        return 1 / (1 + math.exp(alpha * (s_p - lam))), 1 / (1 + math.exp(-beta * (s_n - lam)))
    if kind == "lin_ms":
        m_pos = mean([s_p - r for r in other_positives])
        m_neg = mean([s_n - r for r in other_negatives])
        return (1 - m_pos) * (1 - s_p), (1 + m_neg) * s_n
    assert kind == "sig_ms"
    m_pos = mean([math.exp(alpha * (s_p - r)) for r in other_positives])
    m_neg = mean([math.exp(-beta * (s_n - r)) for r in other_negatives])
    return 1 / (m_pos + math.exp(alpha * (s_p - lam))), 1 / (m_neg + math.exp(-beta * (s_n - lam)))


def mean(values):
    return math.fsum(values) / len(values) if values else 0.0


def goal_triplet(row, positive, negative, negatives, batch_positives, triplet_weight, pair_weight, **options):
    """Return V of one triplet, with its objective as gradient.

    ``row`` is a tensor of the anchor's similarities, ``negatives`` are the indices of all its negatives,
    ``batch_positives`` the similarities of all positive pairs of the batch.
    """
    options, leaves, row = DEFAULTS | options, row, row.tolist()
    s_p, s_n = row[positive], row[negative]
    weight, violation = triplet_weight_and_violation(
        triplet_weight, s_p, s_n, options["margin"], options["tau"], options["offset"]
    )
    others = list(batch_positives)
    others.remove(s_p)
    hardest = max(row[n] for n in negatives)
    other_positives = [r for r in others if r < hardest + options["eps"]]
    floor = min(batch_positives) - options["eps"]
    other_negatives = [row[n] for n in negatives if n != negative and row[n] > floor]
    positive_weight, negative_weight = pair_weights(
        pair_weight, s_p, s_n, other_positives, other_negatives, options["alpha"], options["beta"], options["lam"]
    )
    objective = weight * (negative_weight * leaves[negative] - positive_weight * leaves[positive])
    return violation + (objective - objective.detach())


def goal_hardest(row, positive, negatives, batch_positives, **options):
    """One pair with the hardest negative of its anchor."""
    if not negatives:
        return 0 * row[positive]
    hardest = max(negatives, key=lambda n: row[n])
    return goal_triplet(row, positive, hardest, negatives, batch_positives, **options)


def goal_all(row, positive, negatives, batch_positives, **options):
    """One pair with all negatives of its anchor."""
    triplets = (goal_triplet(row, positive, n, negatives, batch_positives, **options) for n in negatives)
    return sum(triplets, start=0 * row[positive])
