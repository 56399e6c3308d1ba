"""The kernel of hardest negatives; test_comparison.py has what it shares with the contrastive one."""

from functools import partial

import pytest
import torch

from tests.helpers.embeddings import KERNELS, formula_and_gradients, kernel_and_gradients, random_embeddings
from tests.helpers.pairs import assert_near, loops
from tests.helpers.seeds import seeded
from tests.reference import goal as reference
from vl_plugins.functional import goal_loss
from vl_plugins.functional.goal import PAIR_WEIGHTS, TRIPLET_WEIGHTS, Objective
from vl_plugins.kernels import comparison, equal_label_pairs, mine_hardest_negatives

hardest_negative_losses, _ = KERNELS["triplet_hn"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(comparison, "CPU_BLOCK", 1)
    monkeypatch.setattr(comparison, "LEAST_ROWS", 16)


def whole_numbers(rows, columns, dimension, labels, seed):
    """Embeddings whose dot products are exact and often equal, and labels."""
    generator = seeded(seed)
    sides = [torch.randint(-2, 3, (count, dimension), generator=generator).double() / 4 for count in (rows, columns)]
    return *sides, *(torch.randint(labels, (count,), generator=generator) for count in (rows, columns))


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_first_of_the_hardest(symmetric):
    *sides, labels, ref_labels = whole_numbers(40, 36, 3, 6, seed=0)
    sides = [side.requires_grad_() for side in sides]
    rows, columns = pairs = equal_label_pairs(labels, ref_labels)
    found = mine_hardest_negatives(
        *sides, labels, ref_labels, pairs, normalize=False, symmetric=symmetric, backend="tiled"
    )
    similarities = sides[0] @ sides[1].T
    masked = similarities.masked_fill(labels[:, None] == ref_labels, -9)
    assert ((masked == masked.amax(dim=1, keepdim=True)).sum(dim=1) > 1).sum() > 10
    expected = [similarities[rows, masked.argmax(dim=1)[rows]]]  # argmax is the first
    if symmetric:
        expected.append(similarities[masked.argmax(dim=0)[columns], columns])
    assert torch.equal(found.positive_similarities, similarities[pairs])
    assert torch.equal(found.negative_similarities, torch.stack(expected))
    assert found.exists.all()
    upstream = torch.linspace(-1, 2, found.negative_similarities.numel(), dtype=torch.float64).view(-1, len(rows))
    actual, right = (
        torch.autograd.grad(values, sides, upstream) for values in (found.negative_similarities, torch.stack(expected))
    )
    assert_near(actual, right, 1e-12)


def test_without_negatives():
    labels = torch.tensor([0, 0, 1]), torch.zeros(20).long()
    sides = random_embeddings(3, 20, 4)[:2]
    found = mine_hardest_negatives(*sides, *labels, equal_label_pairs(*labels))
    assert found.exists.tolist() == [[False] * 40, [True] * 40]
    assert found.negative_similarities[0].count_nonzero() == 0
    assert found.terms is None
    assert found.zero == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_zero_is_nan_if_any_embedding_is_not_finite(bad):
    *sides, labels, ref_labels = random_embeddings(20, 20, 4)
    sides[1][17, 2] = bad
    sides = [side.requires_grad_() for side in sides]
    pairs = torch.tensor([[0], [0]])
    zero = mine_hardest_negatives(*sides, labels, ref_labels, pairs).zero
    assert zero.isnan()
    assert all(gradient[0].isnan().all() for gradient in torch.autograd.grad(zero, sides))


COMBINATIONS = [(triplet, pair) for triplet in TRIPLET_WEIGHTS for pair in PAIR_WEIGHTS]


@pytest.mark.parametrize(("triplet", "pair"), COMBINATIONS, ids=map("-".join, COMBINATIONS))
def test_goal_is_equal_to_the_loops(triplet, pair):
    *sides, labels, ref_labels = random_embeddings(20, 35, 4)
    sides = [side.requires_grad_() for side in sides]
    similarities = torch.nn.functional.normalize(sides[0]) @ torch.nn.functional.normalize(sides[1]).T
    equal = labels[:, None] == ref_labels
    batch_positives = similarities[equal].tolist()
    for options, symmetric in ((reference.DEFAULTS, True), (reference.DEFAULTS | {"tau": 4.0, "eps": 0.4}, False)):
        options = {"triplet_weight": triplet, "pair_weight": pair, **options}
        pair_loss = partial(reference.goal_hardest, batch_positives=batch_positives, **options)
        values, gradient = loops(pair_loss, similarities, (equal, ~equal), symmetric=symmetric)
        assert len(values) > 15
        expected = values, *torch.autograd.grad(similarities, sides, gradient, retain_graph=True)
        run = partial(kernel_and_gradients, hardest_negative_losses, *sides, labels, ref_labels, backend="tiled")
        assert_near(run(objective=Objective(**options), symmetric=symmetric), expected, 1e-10)


@pytest.mark.parametrize("pair", ["sig_ms", "lin_ms"])
@pytest.mark.parametrize("steepness", [0.0, 2.0, 60.0])
def test_relative_terms_with_ties_and_similarities_at_the_thresholds(pair, steepness):
    # Multiples of 1/16 and a slack of such a one: equal similarities and thresholds are met exactly.
    for seed, eps in enumerate((0.0, 0.5, 0.5, 3.0)):
        arguments = whole_numbers(40, 36, 3, 8, seed)
        objective = Objective("nca", pair, eps=eps, alpha=steepness, beta=steepness)
        for options in ({"symmetric": True}, {"symmetric": False}):
            options |= {"normalize": False, "objective": objective}
            expected = formula_and_gradients(goal_loss, *arguments, **options)
            assert expected[1].abs().max() > 0.1
            run = partial(kernel_and_gradients, hardest_negative_losses, *arguments, backend="tiled", **options)
            assert_near(run(), expected, 1e-10)
            assert_near(run(dtype=torch.float32), expected, 1e-4)
