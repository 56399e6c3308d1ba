import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vl_plugins.kernels import pairs
from vl_plugins.kernels.pairs import RememberedPairs, equal_label_pairs, pairs_of_others

labels = st.lists(st.integers(-3, 3), max_size=12)


@given(labels, labels, st.sampled_from([torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32]))
def test_pairs_of_equal_labels(x_labels, y_labels, dtype):
    x_labels, y_labels = torch.tensor(x_labels).to(dtype), torch.tensor(y_labels).to(dtype)
    expected = torch.where(x_labels[:, None] == y_labels)
    assert all(map(torch.equal, equal_label_pairs(x_labels, y_labels), expected))


def test_labels_of_two_types():
    x_labels, y_labels = torch.tensor([300, 2], dtype=torch.int64), torch.tensor([2, 44], dtype=torch.uint8)
    assert [index.tolist() for index in equal_label_pairs(x_labels, y_labels)] == [[1], [0]]


def test_pairs_of_others():
    rows, columns, values = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 2, 1, 1]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    kept = pairs_of_others(rows, columns, values)
    assert [tensor.tolist() for tensor in kept] == [[0, 2], [2, 1], [2.0, 4.0]]


@pytest.fixture
def searches(monkeypatch):
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return equal_label_pairs(*arguments)

    monkeypatch.setattr(pairs, "equal_label_pairs", counted)
    return calls


def test_pairs_of_the_last_labels_are_remembered(searches):
    remembered = RememberedPairs()
    x_labels, y_labels = torch.tensor([1, 2, 3]), torch.tensor([3, 1])
    for number, sides in enumerate([(x_labels, y_labels), (x_labels.clone(), y_labels), (y_labels, x_labels)], 1):
        for _ in range(2):
            found = remembered(*sides)
            assert all(map(torch.equal, found, torch.where(sides[0][:, None] == sides[1])))
        assert len(searches) == number
    x_labels[0] = 3  # in place
    assert remembered(y_labels, x_labels)[0].tolist() == [0, 0]
    assert len(searches) == 4


def test_two_directions_are_remembered(searches):
    remembered = RememberedPairs()
    sides = [(torch.tensor([1, 2, 3]), torch.tensor([3, 1])) for _ in range(3)]
    for one, other in [*sides[:2] * 3, *sides[1:] * 2]:
        assert all(map(torch.equal, remembered(one, other), torch.where(one[:, None] == other)))
    assert len(searches) == 3
    remembered(*sides[0])
    assert len(searches) == 4, "no more than two"


def test_labels_that_do_not_know_whether_they_changed(searches):
    remembered = RememberedPairs()
    with torch.inference_mode():
        x_labels = torch.tensor([1, 2])
        for _ in range(2):
            assert remembered(x_labels, x_labels)[0].tolist() == [0, 1]
    assert len(searches) == 2


def test_a_copy_remembers_for_itself(searches):
    remembered = RememberedPairs()
    x_labels = torch.tensor([1, 2])
    remembered(x_labels, x_labels)
    assert copy.deepcopy(remembered)(x_labels, x_labels)[0].tolist() == [0, 1]
