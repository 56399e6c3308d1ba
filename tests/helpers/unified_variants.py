"""Variants of the Unified loss, and what they are for the loops."""

import torch

from tests.helpers.seeds import seeded
from tests.reference import losses as reference
from vl_plugins.functional import Polynomial

__all__ = ["VARIANTS", "gradient_of_loops", "leaf", "variant"]

SSP = ([0.5, -0.7, 0.2], [0.03, 0.9])
RSP = [0.1, 0.8, 0.5, -0.2]


def leaf(shape, dtype, low, high, seed):
    generator = seeded(seed)
    values = low + (high - low) * torch.rand(shape, dtype=torch.float64, generator=generator)
    return values.to(dtype).requires_grad_()


def variant(name, masks, dtype):
    """Return the options of ``unified_loss``, those of the loops, and the names of the derivatives by each leaf."""
    shape = masks[0].shape
    weights, other_weights = leaf(shape, dtype, 0.5, 1.5, seed=1), leaf(shape, dtype, -0.5, 2.0, seed=2)
    row_weights = leaf(shape[:1], dtype, 0.5, 1.5, seed=4)
    margins, row_margins = leaf(shape, dtype, 0.0, 0.5, seed=3), leaf(shape[:1], dtype, 0.0, 0.5, seed=4)
    margin = leaf((), dtype, 0.1, 0.4, seed=5)
    both = ("positive weight", "negative weight")
    options, loops, leaves = {
        "weights of rows": (
            {"weights": row_weights},
            {"weights": (_constant(row_weights[:, None].expand(shape)),) * 2},
            [(row_weights, both)],
        ),
        "two weights": (
            {"weights": (weights, other_weights)},
            {"weights": (_constant(weights), _constant(other_weights))},
            [(weights, both[:1]), (other_weights, both[1:])],
        ),
        "SSP": (
            {"weights": [Polynomial(coefficients) for coefficients in SSP]},
            {"weights": [_polynomial(coefficients) for coefficients in SSP]},
            [],
        ),
        "0-D margin": ({"margin": margin}, {"margin": _number(margin.item())}, [(margin, "margin")]),
        "margin of rows": (
            {"margin": row_margins},
            {"margin": _constant(row_margins[:, None].expand(shape))},
            [(row_margins, "margin")],
        ),
        "margin of pairs": ({"margin": margins}, {"margin": _constant(margins)}, [(margins, "margin")]),
        "function as margin": (
            {"margin": lambda similarities, *masks: 0.1 + 0.3 * similarities},
            {"margin": _polynomial([0.1, 0.3])},
            [],
        ),
        "everything": (
            {"weights": (weights, Polynomial(SSP[1])), "margin": row_margins, "relative": Polynomial(RSP)},
            {
                "weights": (_constant(weights), _polynomial(SSP[1])),
                "margin": _constant(row_margins[:, None].expand(shape)),
                "relative": reference.polynomial(RSP),
            },
            [(weights, both[:1]), (row_margins, "margin")],
        ),
    }[name]
    plain = {"margin": _number(0.2), "weights": (_number(1.0),) * 2, "relative": lambda x: (x, 1.0)}
    return options, plain | loops, leaves


VARIANTS = (
    "weights of rows",
    "two weights",
    "SSP",
    "0-D margin",
    "margin of rows",
    "margin of pairs",
    "function as margin",
    "everything",
)


def gradient_of_loops(derivatives, upstream, names, shape):
    """Return (A, C), the sum over the losses of upstream * derivative for the derivatives with one of the names."""
    gradient = torch.zeros(shape, dtype=torch.float64)
    for pair, pair_derivatives in derivatives.items():
        for (name, row, column), derivative in pair_derivatives.items():
            if name in names:
                gradient[row, column] += upstream[pair] * derivative
    return gradient


def _number(value):
    return lambda row, column, similarity: (value, 0.0)


def _constant(tensor):
    table = tensor.tolist()
    return lambda row, column, similarity: (table[row][column], 0.0)


def _polynomial(coefficients):
    function = reference.polynomial(coefficients)
    return lambda row, column, similarity: function(similarity)
