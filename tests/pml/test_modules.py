"""Every loss as a module: copies, types, torch.compile, second derivatives."""

import copy
import pickle

import pytest
import torch
from pytorch_metric_learning import reducers, regularizers
from pytorch_metric_learning.distances import CosineSimilarity

from tests.helpers.loops import LOSSES, call_with, calls, check_call, expected, leaves_of, make_loss
from tests.helpers.seeds import seeded


@LOSSES
def test_copies(name, tmp_path):
    options = {
        "symmetric": False,
        "reducer": reducers.SumReducer(),
        "distance": CosineSimilarity(collect_stats=True),
        "embedding_regularizer": regularizers.LpRegularizer(),
    }
    loss = make_loss(name, **options)
    for _, call in calls():
        loss(**call)  # whatever it keeps of a call must not be in the way
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    restored = make_loss(name, **options)
    restored.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    for twin in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss), restored):
        for what, call in calls():
            value, _ = expected(name, call, symmetric=False, reducer=reducers.SumReducer())
            value += call["embeddings"].norm(dim=1).mean().item()
            torch.testing.assert_close(twin(**call).item(), value, msg=lambda text, what=what: f"{what}: {text}")


@LOSSES
def test_converted_losses_compute_in_the_type_of_the_embeddings(name):
    for dtype in (torch.float32, torch.float64):
        for loss in (make_loss(name).double(), make_loss(name).half()):
            check_call(name, call_with(2, dtype), loss=loss)
    assert list(make_loss(name).parameters()) == []


@pytest.mark.parametrize("name", ["goal", "smooth_chamfer", "triplet_sh", "unified"])  # one of each family
def test_compiled(name):
    torch.compiler.reset()
    check_call(name, call_with(2), loss=torch.compile(make_loss(name), backend="aot_eager"))


class PlainCosine(CosineSimilarity):
    """For which the kernels are not used."""


@LOSSES
def test_second_derivatives_are_those_of_all_similarities(name):
    for what, call in calls():
        leaves, found = leaves_of(call), []
        generator = seeded(0)
        directions = [torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator) for leaf in leaves]
        for distance in (None, PlainCosine()):
            value = make_loss(name, distance=distance)(**call)
            gradients = torch.autograd.grad(value, leaves, create_graph=True)
            product = sum((gradient * other).sum() for gradient, other in zip(gradients, directions, strict=True))
            found.append(torch.autograd.grad(product, leaves))
        assert max(part.abs().max() for part in found[1]) > 1e-3, what
        torch.testing.assert_close(*found, msg=lambda text, what=what: f"{what}: {text}")
