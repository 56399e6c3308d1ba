"""The losses of embeddings and labels by the kernels, and the same by the formulas on all similarities."""

from functools import partial

import torch

from tests.helpers.pairs import value_and_gradients
from tests.helpers.seeds import seeded
from vl_plugins.functional import goal_loss, unified_loss
from vl_plugins.functional.goal import Objective, objective_losses
from vl_plugins.functional.precision import unit_vectors
from vl_plugins.kernels import equal_label_pairs, mine_hardest_negatives, unified_losses_from_embeddings

__all__ = ["KERNELS", "formula_and_gradients", "is_clear", "kernel_and_gradients", "random_embeddings"]

CON_CON, CIR_SIG_MS = Objective("con", "con"), Objective("cir", "sig_ms")


def random_embeddings(rows, columns, dimension, seed=0, *, labels=12):
    """Return embeddings, reference embeddings, float64, and the labels of both."""
    generator = seeded(seed)
    sides = [torch.randn(count, dimension, dtype=torch.float64, generator=generator) + 0.3 for count in (rows, columns)]
    return *sides, *(torch.randint(labels, (count,), generator=generator) for count in (rows, columns))


def is_clear(embeddings, ref_emb, labels, ref_labels, *, gap=4e-6):
    """Whether float32 finds the same hardest negatives, and the same similarities beyond the thresholds of KERNELS."""
    similarities = unit_vectors(embeddings.double()) @ unit_vectors(ref_emb.double()).T
    equal = labels[:, None] == ref_labels
    sides = (similarities, equal), (similarities.T, equal.T)
    largest = torch.cat([side.masked_fill(mask, -2).topk(2, dim=1).values for side, mask in sides])
    positives, hardest = similarities[equal], largest[:, 0]
    differences = [hardest - largest[:, 1], similarities - (positives.min() - CIR_SIG_MS.eps)]
    for slack in (CON_CON.margin, CIR_SIG_MS.eps):
        differences.append(positives[:, None] - (hardest + slack))
    return all(difference.abs().min() > gap for difference in differences)


def unified_losses(*sides_and_labels, same_set=False, **options):
    pairs = equal_label_pairs(*sides_and_labels[2:], same_set=same_set)
    return unified_losses_from_embeddings(*sides_and_labels, pairs, same_set=same_set, **options)


def hardest_negative_losses(*sides_and_labels, objective=CON_CON, same_set=False, **options):
    pairs = equal_label_pairs(*sides_and_labels[2:], same_set=same_set)
    options |= {"objective": objective, "same_set": same_set}
    s_p, s_n, exists, terms, zero = mine_hardest_negatives(*sides_and_labels, pairs, **options)
    return objective_losses(objective, s_p, s_n, exists, terms).sum(dim=0) + zero


KERNELS = {
    "unified": (unified_losses, unified_loss),
    "triplet_hn": (hardest_negative_losses, partial(goal_loss, objective=CON_CON)),
    "goal": (partial(hardest_negative_losses, objective=CIR_SIG_MS), partial(goal_loss, objective=CIR_SIG_MS)),
}
"""By name: the loss of each positive pair, (M,), from embeddings and labels; and the formula of similarities."""


def kernel_and_gradients(kernel, *sides_and_labels, dtype=torch.float64, leaves=(), create_graph=False, **options):
    """Return the losses, and the gradients of their weighted sum by both sides and the leaves."""
    *sides, labels, ref_labels = sides_and_labels
    sides = [side.to(dtype) if side.requires_grad else side.to(dtype, copy=True).requires_grad_() for side in sides]
    values = kernel(*sides, labels, ref_labels, **options)
    if len(values) == 0:
        values = values + 0 * sides[0].sum()  # as losses connect what has no pairs
    return value_and_gradients(values, [*sides, *leaves], create_graph=create_graph)


def formula_and_gradients(
    formula, *sides_and_labels, leaves=(), create_graph=False, normalize=True, same_set=False, **options
):
    *sides, labels, ref_labels = sides_and_labels
    sides = [side if side.requires_grad else side.to(torch.float64, copy=True).requires_grad_() for side in sides]
    left, right = (unit_vectors(side) if normalize else side for side in sides)
    equal = labels[:, None] == ref_labels
    positive_mask = equal.clone().fill_diagonal_(False) if same_set else equal
    values = formula(left @ right.T, positive_mask, ~equal, reduction="none", **options)
    return value_and_gradients(values, [*sides, *leaves], create_graph=create_graph)
