"""Gathered batches and features of several processes against those of one process."""

import logging

import pytest
import torch
from open_clip.loss import gather_features

from tests.helpers.processes import in_processes
from tests.helpers.seeds import seeded
from vl_plugins.distributed.gathering import BatchGatherer, all_gather_rows

EVEN, UNEVEN = (2, 2), (3, 0)
FLAGS = pytest.mark.parametrize("with_grad", [False, True])


def rows_of(counts, dtype=torch.float64):
    """The rows of each process."""
    rows = torch.randn(sum(counts), 5, generator=seeded(1), dtype=torch.float64)
    return rows.to(dtype).split(counts)


def weights(rank, counts):
    """By what each process weights the rows of all: a gradient that differs by process."""
    return torch.linspace(1, 2, sum(counts), dtype=torch.float64)[:, None] * (rank + 1)


def gather(rank):
    """Return, for each case, gathered rows and the gradient of this process's own."""
    results = {}
    for counts in (EVEN, UNEVEN):
        for with_grad in (False, True):
            rows = rows_of(counts)[rank].t().contiguous().t().requires_grad_()  # not contiguous
            gathered = all_gather_rows(rows, counts, with_grad=with_grad)
            (weights(rank, counts) * gathered.square()).sum().backward()
            results[counts, with_grad] = gathered.detach(), rows.grad
    for with_grad in (False, True):
        half = [side.requires_grad_() for side in rows_of((2, 2), torch.bfloat16)]
        options = {"local_loss": False, "gather_with_grad": with_grad, "rank": rank, "world_size": 2}
        both = (
            gather_features(half[rank], half[rank] + 1, **options)[0],
            all_gather_rows(half[rank], EVEN, with_grad=with_grad),
        )
        gradients = [torch.autograd.grad((weights(rank, EVEN) * rows).sum(), half[rank])[0] for rows in both]
        results["open_clip", with_grad] = [*both, *gradients]
    return {key: [tensor.detach() for tensor in value] for key, value in results.items()}


@pytest.fixture(scope="module")
def results():
    return in_processes(gather, 2)


@FLAGS
@pytest.mark.parametrize("counts", [EVEN, UNEVEN])
def test_values_and_gradients(results, counts, with_grad):
    rows = torch.cat(rows_of(counts))
    for rank in range(2):
        gathered, gradient = results[rank][counts, with_grad]
        assert torch.equal(gathered, rows)
        ranks = range(2) if with_grad else [rank]
        expected = sum(2 * weights(each, counts) * rows for each in ranks).split(counts)[rank]
        torch.testing.assert_close(gradient, expected)


@FLAGS
def test_the_same_as_open_clip_in_half_precision(results, with_grad):
    for rank in range(2):
        stock, ours, stock_gradient, gradient = results[rank]["open_clip", with_grad]
        assert torch.equal(ours, stock)
        torch.testing.assert_close(gradient, stock_gradient)


class FakeGatherer(BatchGatherer):
    """The first of two processes; each time something is gathered, the other one has the next of ``others``."""

    def __init__(self, *others):
        super().__init__(world_size=2)
        self.others = list(others)

    def _gather_on_cpu(self, rows, counts):
        return torch.cat([rows, torch.tensor(self.others.pop(0))])


def test_unequal_batches_are_warned_of_once(caplog):
    gatherer = FakeGatherer(*[[[3, 6, -1]]] * 3)
    batches = [gatherer.global_batch(number, 2 * number) for number in (3, 2, 1)]
    assert [batch.pair_weight for batch in batches] == [1, 0.8, 0.5]
    assert batches[1].image_labels.tolist() == [0, 1, 2, 3, 4]
    assert batches[1].text_labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "batches of different sizes, [2, 3] images" in record.message


def test_a_process_without_images_need_not_give_ids():
    batch = FakeGatherer([[3, 6, 3]], [7, 4, 7]).global_batch(0, 0)
    assert (batch.image_counts, batch.text_counts, batch.pair_weight) == ((0, 3), (0, 6), 0)
    assert batch.image_labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("other", "given", "message"),
    [
        ([3, 6, -1], (3, 7), "got 7 for 3 images in process 0"),
        ([3, 7, -1], (3, 6), "got 7 for 3 images in process 1"),
        ([3, 6, -1], (0, 1), "got 1 for 0 images in process 0"),
        ([3, 3, -1], (3, 6), "captions per image must be the same in all processes"),
        ([3, 6, 3], (3, 6), "image_ids must be given in all processes or in none"),
        ([3, 6, 3], (3, 6, torch.arange(4)), "image_ids must be one for each of 3 images, got 4 in process 0"),
        ([3, 6, 2], (3, 6, torch.arange(3)), "image_ids must be one for each of 3 images, got 2 in process 1"),
    ],
)
def test_batches_that_do_not_fit_each_other(other, given, message):
    with pytest.raises(ValueError, match=message):
        FakeGatherer([other]).global_batch(*given)
