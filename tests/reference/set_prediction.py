"""Set prediction module as its paper writes it: loops over items, inputs and slots, one vector at a time.

Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Eq. 1-5. The GRU is that of Cho et al.
2014 with the reset gate inside, as in Locatello et al. 2020. Vectors are tensors, so that gradients come by automatic
differentiation of these loops.
"""

import math

import torch


def set_prediction(
    weights,
    initial_slots,
    local_features,
    global_features=None,
    *,
    iterations,
    padding=None,
    positions=None,
    over="slots",
    gru=False,
):
    """Return S, E^T and A of every iteration as nested lists: [item][slot], [item][slot], [item][t][input][slot].

    ``weights`` is a dictionary of the module's parameters by name, ``initial_slots`` [item][slot] and ``padding``
    [item][input] are nested lists, ``positions`` [item][input] too. Padded inputs are not there at all.
    """
    embeddings, slots_of_items, maps_of_items = [], [], []
    for item, features in enumerate(local_features):
        kept = [n for n in range(len(features)) if padding is None or not padding[item][n]]
        normalised = [layer_norm(features[n], weights, "norm_inputs") for n in kept]
        shifts = [0 if positions is None else positions[item][n] for n in kept]
        keys = [weights["to_keys.weight"] @ (x + shift) for x, shift in zip(normalised, shifts, strict=True)]
        values = [weights["to_values.weight"] @ x for x in normalised]
        slots, maps = list(initial_slots[item]), []
        for _ in range(iterations):
            slots, attention = aggregation_block(weights, slots, keys, values, over, gru)
            maps.append(attention)
        slots_of_items.append(slots)
        maps_of_items.append(maps)
        elements = [layer_norm(slot, weights, "norm_output") for slot in slots]
        if global_features is not None:
            elements = [element + layer_norm(global_features[item], weights, "norm_global") for element in elements]
        embeddings.append(elements)
    return embeddings, slots_of_items, maps_of_items


def aggregation_block(weights, slots, keys, values, over, gru):
    """Eq. 2-4: return the new slots and A[input][slot]."""
    queries = [weights["to_queries.weight"] @ layer_norm(slot, weights, "norm_slots") for slot in slots]
    size = math.sqrt(len(queries[0]))
    exponentials = [[torch.exp(torch.dot(key, query) / size) for query in queries] for key in keys]
    columns = range(len(slots))
    if over == "slots":
        attention = [[row[k] / sum(row) for k in columns] for row in exponentials]
    else:
        attention = [[row[k] / sum(other[k] for other in exponentials) for k in columns] for row in exponentials]
    updated = []
    for k, slot in enumerate(slots):
        attended = torch.zeros_like(weights["to_slots.weight"][0])
        for n, value in enumerate(values):
            attended = attended + attention[n][k] / sum(row[k] for row in attention) * value
        update = weights["to_slots.weight"] @ attended
        slot = gru_cell(update, slot, weights) if gru else update + slot
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


def gru_cell(x, state, weights):
    input_gates = weights["gru.weight_ih"] @ x + weights["gru.bias_ih"]
    state_gates = weights["gru.weight_hh"] @ state + weights["gru.bias_hh"]
    width = len(state)
    reset = 1 / (1 + torch.exp(-input_gates[:width] - state_gates[:width]))
    keep = 1 / (1 + torch.exp(-input_gates[width : 2 * width] - state_gates[width : 2 * width]))
    candidate = torch.tanh(input_gates[2 * width :] + reset * state_gates[2 * width :])
    return (1 - keep) * candidate + keep * state
