import torch

from vl_plugins.functional import triplet_hn_loss, triplet_margin, triplet_sh_loss

POSITIVE_MASK = torch.tensor([[True, False, False, False]])
MASKS = (POSITIVE_MASK, ~POSITIVE_MASK)


def test_triplet_margin():
    anchor_positive = torch.tensor([0.9, 0.5, 0.1], requires_grad=True)
    anchor_negative = torch.tensor([0.1, 0.5, 0.4], requires_grad=True)
    values = triplet_margin(anchor_positive, anchor_negative, margin=0.2)
    values.sum().backward()
    torch.testing.assert_close(values, torch.tensor([0.0, 0.2, 0.5]))
    assert anchor_positive.grad.tolist() == [0, -1, -1]
    assert anchor_negative.grad.tolist() == [0, 1, 1]


def test_hardest_negative():
    similarities = torch.tensor([[0.5, 0.4, 0.7, 0.1]])
    torch.testing.assert_close(triplet_hn_loss(similarities, *MASKS, symmetric=False), torch.tensor(0.4))
    torch.testing.assert_close(triplet_hn_loss(similarities, *MASKS, margin=0, symmetric=False), torch.tensor(0.2))


def test_one_of_equally_hard_negatives_receives_the_gradient():
    similarities = torch.tensor([[0.5, 0.7, 0.7, 0.7]], requires_grad=True)
    triplet_hn_loss(similarities, *MASKS, symmetric=False).backward()
    assert sorted(similarities.grad[0].tolist()) == [-1, 0, 0, 1]


def test_sum_of_hinges():
    similarities = torch.tensor([[0.5, 0.4, 0.7, 0.1]])
    torch.testing.assert_close(triplet_sh_loss(similarities, *MASKS, symmetric=False), torch.tensor(0.5))


def test_other_positives_are_not_negatives():
    similarities = torch.tensor([[0.5, 0.9, 0.4, 0.2]])
    positive_mask = torch.tensor([[True, True, False, False]])
    for loss in (triplet_hn_loss, triplet_sh_loss):
        values = loss(similarities, positive_mask, ~positive_mask, symmetric=False, reduction="none")
        torch.testing.assert_close(values, torch.tensor([0.1, 0.0]))


def test_sum_of_hinges_needs_one_row_of_candidates_per_positive_pair():
    size = 300
    positives = torch.eye(size, dtype=torch.bool)
    similarities = torch.rand(size, size, requires_grad=True)
    largest = 0

    def record(tensor):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        triplet_sh_loss(similarities, positives, ~positives)
    assert 0 < largest <= size * size
