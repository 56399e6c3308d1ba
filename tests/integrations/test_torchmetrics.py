"""The metric gives the recalls of all similarities, whatever the batches and processes."""

import pytest
import torch

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
        metric.update(images.repeat_interleave(CAPTIONS, dim=0)[part], captions[part], ids[part], ids[part])
    return {name: value.item() for name, value in metric.compute().items()}


def test_images_that_come_again_and_two_processes():
    assert in_processes(in_process, 2) == [pytest.approx(expected(), abs=1e-6)] * 2


def test_captions_of_no_image():
    metric = CrossModalRecall()
    metric.update(torch.eye(2), torch.eye(2), IDS[:2], torch.tensor([70, 8]))
    with pytest.raises(ValueError, match="2 captions"):
        metric.compute()
