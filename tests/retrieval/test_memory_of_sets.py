"""What DivE's sizes take on a CPU: 200 images and 1,000 captions in training, 5,000 and 25,000 in evaluation."""

import subprocess
import sys

import pytest

# The most that the process ever held, in bytes, without what was there before.
PREPARE = """
import resource, sys
import torch
from torch.nn.functional import normalize
from vl_plugins import create_loss
from vl_plugins.distances import SmoothChamferSimilarity
from vl_plugins.retrieval import retrieval_metrics, retrieval_ranks

torch.set_num_threads(2)

def held():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

def sets(count):
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 4, 1024, generator=generator)

small = torch.randn(4, 2, 8)
create_loss("smooth_chamfer")(small.requires_grad_(), torch.arange(4), None, small.flip(0), torch.arange(4)).backward()
"""
TRAIN = """
images, texts, image_slots, text_slots = (sets(count).requires_grad_() for count in (200, 1000, 200, 1000))
before = held()
labels = torch.arange(200)
loss = create_loss("smooth_chamfer")
value = loss(images, labels, None, texts, labels.repeat_interleave(5), image_slots, text_slots)
value.backward()
assert all(tensor.grad.isfinite().all() and tensor.grad.any() for tensor in (images, texts, image_slots, text_slots))
print(held() - before)
"""
EVALUATE = """
images, captions = sets(5000), sets(25000)
image_of_caption = torch.arange(5000).repeat_interleave(5)
captions.view(5000, 5, 4, 1024).add_(images[:, None], alpha=0.2)
for part in (images, captions):
    for rows in part.split(100):
        rows.copy_(normalize(rows, dim=-1))
before = held()
ranks = retrieval_ranks(images, captions, image_of_caption, similarity=SmoothChamferSimilarity().compute_mat)
assert retrieval_metrics(ranks)["rsum"] > 100
print(held() - before)
"""


@pytest.mark.slow
@pytest.mark.timeout(1600)  # the evaluation takes minutes
@pytest.mark.parametrize("program", [pytest.param(TRAIN, id="training"), pytest.param(EVALUATE, id="evaluation")])
def test_memory_beyond_the_embeddings(program):
    finished = subprocess.run([sys.executable, "-c", PREPARE + program], capture_output=True, text=True, timeout=1500)
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) < 1e9, f"{int(finished.stdout) / 1e9:.2f} GB"
    print(f"{int(finished.stdout) / 1e6:.0f} MB")
