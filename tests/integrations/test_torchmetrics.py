"""The metric gives the recalls of all similarities, whatever the batches and processes."""

import pytest
import torch
from torch.utils.data import DistributedSampler

from tests.helpers.processes import in_processes
from vl_plugins.retrieval import retrieval_metrics, similarity_ranks

pytest.importorskip("torchmetrics", reason="needs pip install 'vl_plugins[torchmetrics]'")
CrossModalRecall = pytest.importorskip("vl_plugins.integrations.torchmetrics").CrossModalRecall

IDS = torch.tensor([70, -3, 5, 9, 12, 30])
CAPTIONS = 2


def embeddings():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 4, generator=generator)
    captions = images.repeat_interleave(CAPTIONS, dim=0) + torch.randn(12, 4, generator=generator)
    return images, captions


def expected():
    """Return the metrics of the matrix of cosines."""
    images, captions = embeddings()
    cosines = torch.tensor([[torch.cosine_similarity(x, y, dim=0) for y in captions] for x in images])
    metrics = retrieval_metrics(similarity_ranks(cosines, torch.arange(6).repeat_interleave(CAPTIONS)))
    return {name: value for name, value in metrics.items() if "_R@" in name or name == "rsum"}


def test_batches_of_images_with_their_captions():
    metric, (images, captions) = CrossModalRecall(), embeddings()
    for rows in (slice(0, 4), slice(4, 6)):
        metric.update(images[rows], captions[rows.start * CAPTIONS : rows.stop * CAPTIONS], IDS[rows])
    assert metric.compute() == pytest.approx(expected(), abs=1e-6)
    assert 0 < expected()["image_to_text_R@1"] < 1


def in_process(rank):
    """Update with one caption of an image at a time, and unequal numbers of rows."""
    metric, (images, captions) = CrossModalRecall(), embeddings()
    ids = IDS.repeat_interleave(CAPTIONS)
    rows = torch.arange(0, 5) if rank == 0 else torch.arange(5, 12)
    for part in rows.split(3):
        metric.update(images.repeat_interleave(CAPTIONS, dim=0)[part], captions[part], ids[part], caption_ids=part)
    return values(metric)


def test_captions_of_an_image_in_several_batches_and_two_processes():
    assert in_processes(in_process, 2) == [pytest.approx(expected(), abs=1e-6)] * 2


def values(metric):
    return {name: value.item() for name, value in metric.compute().items()}


def update(metric, rows):
    """Add images with all captions of theirs."""
    images, captions = embeddings()
    rows = torch.tensor(rows)
    metric.update(images[rows], captions.view(6, CAPTIONS, 4)[rows].flatten(0, 1), IDS[rows])


def one_process_has_samples(rank):
    """Return the metrics where the second process has no samples, and where it gets some after that."""
    metric = CrossModalRecall()
    if rank == 0:
        update(metric, [0, 1, 2, 3, 4, 5])
    without = values(metric)
    metric.reset()
    if rank == 0:
        update(metric, [0, 1, 2])
    metric.compute()
    update(metric, [3] if rank == 0 else [4, 5])
    return [without, values(metric)]


def test_a_process_without_samples_has_the_metrics_of_the_others():
    right = pytest.approx(expected(), abs=1e-6)
    for found in in_processes(one_process_has_samples, 2):
        assert found == [right, right]


def other_precision(rank):
    """Return the metrics of float32 in one process, and of a batch without rows and of float16 in the other."""
    metric, (images, captions) = CrossModalRecall(), embeddings()
    if rank == 0:
        metric.update(images[:5], captions[:10], IDS[:5])
    else:
        metric.update(images[:0].half(), captions[:0].half(), IDS[:0])
        metric.update(images[5:].half(), captions[10:].half(), IDS[5:])
    return values(metric)


def test_processes_with_embeddings_of_different_precision():
    assert in_processes(other_precision, 2) == [pytest.approx(expected(), abs=1e-6)] * 2


def no_samples(rank):
    with pytest.raises(ValueError, match=r"^there are no images: call update before compute$"):
        CrossModalRecall().compute()


def test_no_samples_at_all_are_an_error():
    no_samples(0)
    assert in_processes(no_samples, 2) == [None, None]


def test_samples_that_a_distributed_sampler_repeats_count_once():
    """The updates of four processes, whose states are joined one after the other; six images become eight."""
    metric, (images, captions) = CrossModalRecall(), embeddings()
    captions = captions.view(6, CAPTIONS, 4)
    for rank in range(4):
        for row in DistributedSampler(range(6), 4, rank, seed=1):
            noise = 1e-4 * torch.randn(4)  # of another batch, as in half precision
            metric.update(images[[row]] + noise, captions[row], IDS[[row]])
    assert len(metric.image_ids) == 8
    assert metric.compute() == pytest.approx(expected(), abs=1e-6)


def test_captions_that_come_again_count_once():
    """Text to image, 2 of 3 captions find their image; with the last one twice it would be 2 of 4."""
    images, captions = torch.eye(3), torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1, 0.1]])
    metric = CrossModalRecall()
    for rows in ([0, 1, 2], [2]):
        metric.update(images[rows], captions[rows], torch.tensor([5, 6, 7])[rows])
    assert metric.compute()["text_to_image_R@1"].item() == pytest.approx(2 / 3)


def test_ids_that_are_not_unique_are_errors():
    """Image ids that begin at 0 in each batch, and captions of an image in several rows."""
    images, captions = embeddings()
    metric = CrossModalRecall()
    for rows in (slice(0, 3), slice(3, 6)):
        metric.update(images[rows], captions[2 * rows.start : 2 * rows.stop], torch.arange(3))
    with pytest.raises(ValueError, match=r"^image 0 comes again with another embedding: image_ids must be unique in "):
        metric.compute()
    metric = CrossModalRecall()
    for number in range(CAPTIONS):
        metric.update(images, captions[number::CAPTIONS], IDS)
    with pytest.raises(ValueError, match=r"^caption 0 of image 70 comes again .*; give caption_ids if the captions of"):
        metric.compute()


def test_captions_of_no_image():
    metric = CrossModalRecall()
    metric.update(torch.eye(2), torch.eye(2), IDS[:2], torch.tensor([70, 8]), torch.arange(2))
    with pytest.raises(ValueError, match="there are captions of image 8, but no such image"):
        metric.compute()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.eye(2), torch.eye(3), IDS[:2]), "3 captions, 2 caption_image_ids"),
        ((torch.eye(2), torch.eye(2), IDS[:2], IDS[:2]), "caption_image_ids needs caption_ids"),
        ((torch.eye(2), torch.eye(2), IDS[:3]), "2 images, 3 image_ids"),
    ],
)
def test_ids_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        CrossModalRecall().update(*arguments)
