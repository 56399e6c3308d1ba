"""Regularizers as the papers write them: loops over Python floats, gradients by hand.

A vector is a list of floats, a cloud a list of vectors, an item's set a list of its elements. Each function returns the
value and its gradient, in the form of its argument.
"""

import math


def dot(x, y):
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def distance(x, y):
    return math.dist(x, y)


def mmd(x, y, gamma, squared):
    """Biased estimator with the kernel exp(-gamma * ||x - y||), or of the squared distance; two gradients."""
    clouds = (x, y)
    weights = (1 / len(x), -1 / len(y))
    gradients = tuple([[0.0] * len(vector) for vector in cloud] for cloud in clouds)
    terms = []
    for first, first_weight, gradient in zip(clouds, weights, gradients, strict=True):
        for second, second_weight in zip(clouds, weights, strict=True):
            weight = first_weight * second_weight
            for i, a in enumerate(first):
                for b in second:
                    length = distance(a, b)
                    kernel = math.exp(-gamma * (length**2 if squared else length))
                    terms.append(weight * kernel)
                    if length == 0:
                        continue
                    slope = -gamma * kernel * (2 if squared else 1 / length)
                    for k, (a_k, b_k) in enumerate(zip(a, b, strict=True)):
                        # The pair is met again with a as the second vector.
                        gradient[i][k] += 2 * weight * slope * (a_k - b_k)
    return math.fsum(terms), gradients


def unit(x):
    length = math.sqrt(dot(x, x))
    return [value / length for value in x]


def through_unit(x, gradient):
    """The gradient by x from that by the unit vector of x."""
    length, direction = math.sqrt(dot(x, x)), unit(x)
    along = dot(direction, gradient)
    return [(g - along * u) / length for g, u in zip(gradient, direction, strict=True)]


def kernels_of_pairs(vectors, pairs, scale):
    """Return ``{(i, j): exp(-scale * ||u_i - u_j||^2)}`` of the unit vectors, and a function of weights of the pairs.

    That returns the gradient of the weighted sum by the vectors as they are.
    """
    units = [unit(vector) for vector in vectors]
    kernels = {(i, j): math.exp(-scale * distance(units[i], units[j]) ** 2) for i, j in pairs}

    def gradient(weights):
        unit_gradients = [[0.0] * len(vector) for vector in vectors]
        for (i, j), weight in weights.items():
            slope = -2 * scale * kernels[i, j] * weight
            for k, (a, b) in enumerate(zip(units[i], units[j], strict=True)):
                unit_gradients[i][k] += slope * (a - b)
                unit_gradients[j][k] -= slope * (a - b)
        return list(map(through_unit, vectors, unit_gradients))

    return kernels, gradient


def diversity(sets, scale):
    """Kim et al. 2023, section 3.4, as a mean over the pairs of each item; one value for each item."""
    values, gradients = [], []
    for elements in sets:
        pairs = [(i, j) for i in range(len(elements)) for j in range(i)]
        kernels, gradient = kernels_of_pairs(elements, pairs, scale)
        values.append(math.fsum(kernels.values()) / max(len(pairs), 1))
        gradients.append(gradient(dict.fromkeys(pairs, 1 / max(len(pairs), 1))))
    return values, gradients


def mean_diversity(sets, scale):
    """The mean of the items with two elements or more."""
    values, gradients = diversity(sets, scale)
    counted = [value for value, elements in zip(values, sets, strict=True) if len(elements) > 1]
    number = max(len(counted), 1)
    return math.fsum(counted) / number, [
        [[component / number for component in vector] for vector in item_gradient] for item_gradient in gradients
    ]


def uniformity(sets, t):
    """Wang and Isola 2020, section 4.1.2, over the pairs of elements of different items."""
    places = [(item, element) for item, elements in enumerate(sets) for element in range(len(elements))]
    vectors = [sets[item][element] for item, element in places]
    pairs = [(i, j) for i in range(len(places)) for j in range(i) if places[i][0] != places[j][0]]
    kernels, gradient = kernels_of_pairs(vectors, pairs, t)
    total = math.fsum(kernels.values())
    flat = iter(gradient(dict.fromkeys(pairs, 1 / total)))
    return math.log(total / len(pairs)), [[next(flat) for _ in elements] for elements in sets]


def circular_variance(elements):
    directions = [unit(element) for element in elements]
    mean = [math.fsum(components) / len(elements) for components in zip(*directions, strict=True)]
    return 1 - math.sqrt(dot(mean, mean))


def mmd_of_directions(x, y, gamma, squared):
    """:func:`mmd` of the unit vectors, and its gradients by the vectors as they are."""
    value, gradients = mmd([unit(vector) for vector in x], [unit(vector) for vector in y], gamma, squared)
    return value, tuple(
        [through_unit(vector, slopes) for vector, slopes in zip(cloud, gradient, strict=True)]
        for cloud, gradient in zip((x, y), gradients, strict=True)
    )
