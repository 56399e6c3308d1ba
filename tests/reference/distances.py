"""Similarities of two embeddings, one pair at a time, with the formulas of pytorch-metric-learning's documentation."""

import torch


def cosine(query, reference):
    return (query * reference).sum() / (query.square().sum().sqrt() * reference.square().sum().sqrt())


def dot_product(query, reference):
    return (query * reference).sum()


def negative_euclidean(query, reference):
    """Of unit vectors."""
    difference = query / query.square().sum().sqrt() - reference / reference.square().sum().sqrt()
    return -difference.square().sum().sqrt()


def negative_signal_to_noise(query, reference):
    """Noise variance by signal variance, of unit vectors."""
    query, reference = query / query.square().sum().sqrt(), reference / reference.square().sum().sqrt()
    noise = query - reference
    return -(noise - noise.mean()).square().sum() / (query - query.mean()).square().sum()


def matrix(similarity, queries, references=None):
    """Return (A, C) similarities; of one set, an item and itself is 0, because a distance of 0 has no derivative."""
    rows = [
        [
            query.new_zeros(()) if references is None and i == j else similarity(query, reference)
            for j, reference in enumerate(queries if references is None else references)
        ]
        for i, query in enumerate(queries)
    ]
    return torch.stack([torch.stack(row) for row in rows])
