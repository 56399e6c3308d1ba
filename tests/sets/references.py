"""Sets of vectors as the papers write them: loops over tensors, one pair of vectors at a time, in float64.

A set is a tensor (K, D) or a list of vectors. Gradients come by automatic differentiation of the loops.
"""

import math

import torch

from tests.helpers.seeds import seeded
from tests.reference.distances import cosine

TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5}


def normal(*shape, seed=0, dtype=torch.float64, device="cpu"):
    """Return a leaf of normally distributed numbers, the same for all types and devices."""
    values = torch.randn(shape, dtype=torch.float64, generator=seeded(seed))
    return values.to(device, dtype).requires_grad_()


def value_and_gradients(values, leaves):
    """Return values and the gradients of their sum with random weights, in float64 on the CPU."""
    weights = torch.randn(values.shape, dtype=torch.float64, generator=seeded(7)).to(values)
    results = values.detach(), *torch.autograd.grad(values, leaves, weights, retain_graph=True, materialize_grads=True)
    return [result.cpu().double() for result in results]


def check(values, leaves, loops):
    """Compare values and gradients with those of ``loops``, called with the same numbers in float64."""
    twins = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    wanted, tolerance = value_and_gradients(loops(*twins), twins), TOLERANCE[leaves[0].dtype]
    assert values.dtype == leaves[0].dtype
    assert all(part.abs().max() > 1e-5 for part in wanted), "the case shows nothing"
    torch.testing.assert_close(value_and_gradients(values, leaves), wanted, atol=tolerance, rtol=tolerance)


def unit(x):
    return x / x.square().sum().sqrt()


def units(sets):
    """Return the unit vectors of all elements that are not zero, as a list."""
    return [unit(x) for x in sets.flatten(0, -2) if x.any()]


def smooth_chamfer(xs, ys, similarity=cosine, alpha=16.0):
    """Eq. 6 of Kim et al. 2023."""
    total = 0.0
    for firsts, seconds in ((xs, ys), (ys, xs)):
        for x in firsts:
            inner = sum(torch.exp(alpha * similarity(x, y)) for y in seconds)
            total = total + torch.log(inner) / (2 * alpha * len(firsts))
    return total


def chamfer(xs, ys, similarity=cosine):
    total = 0.0
    for firsts, seconds in ((xs, ys), (ys, xs)):
        for x in firsts:
            total = total + max(similarity(x, y) for y in seconds) / (2 * len(firsts))
    return total


def mil(xs, ys, similarity=cosine):
    return max(similarity(x, y) for x in xs for y in ys)


def match_probability(xs, ys, similarity=cosine, scale=1.0, shift=0.0):
    terms = [1 / (1 + torch.exp(-(scale * similarity(x, y) + shift))) for x in xs for y in ys]
    return sum(terms) / len(terms)


SIMILARITIES = {
    "SmoothChamferSimilarity": smooth_chamfer,
    "ChamferSimilarity": chamfer,
    "MILSimilarity": mil,
    "MatchProbability": match_probability,
}


def matrix(function, xs, ys, **options):
    """Return (A, C), connected to the sets (A, K1, D) and (C, K2, D), without their zero vectors; 0 for empty sets."""
    rows, columns = ([[element for element in item if element.any()] for item in sets] for sets in (xs, ys))
    nothing = 0 * (xs.sum() + ys.sum())
    return torch.stack(
        [torch.stack([function(x, y, **options) if x and y else nothing for y in columns]) for x in rows]
    )


def mmd(x, y, gamma=0.5):
    """Eq. 5 of Gretton et al. 2012, biased, of two lists of vectors; coinciding ones have the kernel 1."""
    total = torch.zeros((), dtype=torch.float64)
    for first, first_weight in ((x, 1 / len(x)), (y, -1 / len(y))):
        for second, second_weight in ((x, 1 / len(x)), (y, -1 / len(y))):
            for a in first:
                for b in second:
                    squares = (a - b).square().sum()
                    # Unit vectors of one direction may differ by rounding.
                    length = squares if squares < 1e-30 else squares.sqrt()
                    total = total + first_weight * second_weight * torch.exp(-gamma * length)
    return total


def diversity(elements, scale=2.0):
    """Section 3.4 of Kim et al. 2023, as a mean over the pairs of an item's elements."""
    directions = [unit(x) for x in elements if x.any()]
    pairs = [(a, b) for i, a in enumerate(directions) for b in directions[:i]]
    total = 0 * elements.sum()
    for a, b in pairs:
        total = total + torch.exp(-scale * (a - b).square().sum()) / len(pairs)
    return total


def mean_diversity(sets, scale=2.0):
    """Of the items with two elements or more."""
    counted = [diversity(item, scale) for item in sets if sum(bool(x.any()) for x in item) > 1]
    return sum(counted) / len(counted)


def uniformity(sets, t=2.0):
    """Wang and Isola 2020, section 4.1.2, over the pairs of elements of different items that are not padding."""
    kernels = [
        torch.exp(-t * (unit(x) - unit(y)).square().sum())
        for i, item in enumerate(sets)
        for other in sets[:i]
        for x in item
        for y in other
        if x.any() and y.any()
    ]
    return torch.log(sum(kernels) / len(kernels))


def circular_variance(elements):
    directions = [unit(x) for x in elements if x.any()]
    if not directions:
        return 0 * elements.sum()
    return 1 - (sum(directions) / len(directions)).square().sum().sqrt()


def set_prediction(weights, local_features, global_features, *, iterations, padding=None, positions=None):
    """Eq. 1-5 of Kim et al. 2023, one vector at a time: return S, E and A of every iteration, 0 at padded inputs.

    ``weights`` is a dictionary of the module's parameters by name, ``padding`` [item][input] a nested list.
    """
    embeddings, slots_of_items, maps = [], [], []
    for item, features in enumerate(local_features):
        kept = [n for n in range(len(features)) if padding is None or not padding[item][n]]
        inputs = [layer_norm(features[n], weights, "norm_inputs") for n in kept]
        shifts = [0 if positions is None else positions[item][n] for n in kept]
        keys = [weights["to_keys.weight"] @ (x + shift) for x, shift in zip(inputs, shifts, strict=True)]
        values = [weights["to_values.weight"] @ x for x in inputs]
        slots, maps_of_item = list(weights["initial_slots"]), []
        for _ in range(iterations):
            slots, attention = aggregation_block(weights, slots, keys, values)
            rows = dict(zip(kept, attention, strict=True))
            nothing = [features.new_zeros(())] * len(slots)
            maps_of_item.append(torch.stack([torch.stack(rows.get(n, nothing)) for n in range(len(features))]))
        shared = layer_norm(global_features[item], weights, "norm_global")
        embeddings.append(torch.stack([layer_norm(slot, weights, "norm_output") + shared for slot in slots]))
        slots_of_items.append(torch.stack(slots))
        maps.append(torch.stack(maps_of_item))
    return torch.stack(embeddings), torch.stack(slots_of_items), torch.stack(maps)


def aggregation_block(weights, slots, keys, values):
    """Eq. 2-4: return the new slots and A[input][slot]."""
    queries = [weights["to_queries.weight"] @ layer_norm(slot, weights, "norm_slots") for slot in slots]
    size = math.sqrt(len(queries[0]))
    exponentials = [[torch.exp(torch.dot(key, query) / size) for query in queries] for key in keys]
    attention = [[value / sum(row) for value in row] for row in exponentials]
    updated = []
    for k, slot in enumerate(slots):
        attended = torch.zeros_like(weights["to_slots.weight"][0])
        for n, value in enumerate(values):
            attended = attended + attention[n][k] / sum(row[k] for row in attention) * value
        slot = weights["to_slots.weight"] @ attended + slot
        updated.append(mlp(layer_norm(slot, weights, "norm_mlp"), weights) + slot)
    return updated, attention


def layer_norm(x, weights, name):
    mean = sum(x) / len(x)
    variance = sum((element - mean) ** 2 for element in x) / len(x)
    return (x - mean) / torch.sqrt(variance + 1e-5) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def mlp(x, weights):
    hidden = weights["mlp.0.weight"] @ x + weights["mlp.0.bias"]
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2  # GELU
    return weights["mlp.2.weight"] @ hidden + weights["mlp.2.bias"]
