"""Every loss as a module: copies, devices and types, torch.compile, second derivatives."""

import copy
import pickle

import pytest
import torch
from pytorch_metric_learning import reducers, regularizers
from pytorch_metric_learning.distances import CosineSimilarity, LpDistance
from pytorch_metric_learning.miners import MultiSimilarityMiner, TripletMarginMiner

from tests.pml.loops import (
    LOSSES,
    call_with,
    check_call,
    expected,
    leaves_of,
    make_loss,
    own_losses,
    reference_of,
    similarities_of,
    values_and_derivatives,
)
from tests.reference import distances as reference_distances

MINERS = (None, MultiSimilarityMiner(epsilon=0.5), TripletMarginMiner(margin=0.3))


def calls(dtype=torch.float64):
    for sets in (1, 2):
        for miner in MINERS:
            call = call_with(sets, dtype)
            if miner is not None:
                call["indices_tuple"] = miner(**call)
            yield f"{sets} set(s), {type(miner).__name__}", call


@LOSSES
def test_copies(name, tmp_path):
    options = {
        "symmetric": False,
        "reducer": reducers.SumReducer(),
        "distance": CosineSimilarity(collect_stats=True),
        "embedding_regularizer": regularizers.LpRegularizer(),
        "embedding_reg_weight": 0.5,
    }
    loss = make_loss(name, **options)
    for _, call in calls():
        loss(**call)  # whatever it keeps of a call must not be in the way
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    restored = make_loss(name, **options)
    restored.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    for twin in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss), restored):
        for what, call in calls():
            value = loss(**call)
            assert torch.equal(twin(**call), value), what
            torch.testing.assert_close(
                value.item(),
                expected(name, call, symmetric=False, reducer=reducers.SumReducer())[0]
                + 0.5 * call["embeddings"].norm(dim=1).mean().item(),
            )
        assert repr(twin) == repr(loss)


@LOSSES
def test_moving_and_converting(name):
    for dtype in (torch.float32, torch.float64):
        call = call_with(2, dtype)
        for move in (lambda loss: loss.to("cpu"), lambda loss: loss.to(torch.float64), lambda loss: loss.half()):
            check_call(name, call, loss=move(make_loss(name)))
    assert list(make_loss(name).parameters()) == []
    assert list(make_loss(name).buffers()) == []


@pytest.mark.parametrize("name", ["goal", pytest.param("smooth_chamfer", marks=pytest.mark.slow)])
def test_compiled(name):
    """The two that are built most unlike the others; those are compiled below, with every call."""
    torch.compiler.reset()
    compiled = torch.compile(make_loss(name), backend="aot_eager")
    check_call(name, call_with(2), loss=compiled)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@LOSSES
def test_compiled_for_every_call(name, backend):
    torch.compiler.reset()
    compiled = torch.compile(make_loss(name), backend=backend)
    for dtype in (torch.float32, torch.float64):
        for what, call in calls(dtype):
            check_call(name, call, loss=compiled, what=what)


def second_derivative(loss, leaves, directions):
    """Return the gradient of the inner product of the loss's gradient and the directions."""
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    product = sum((gradient * direction).sum() for gradient, direction in zip(gradients, directions, strict=True))
    return torch.autograd.grad(product, leaves)


@pytest.mark.parametrize("name", [name for name in own_losses() if reference_of(name).smooth])
def test_second_derivatives_of_smooth_losses(name):
    for what, call in calls():
        leaves = leaves_of(call)

        def of_leaves(*leaves, call=call):
            return make_loss(name)(**(call | dict(zip(("embeddings", "ref_emb"), leaves, strict=False))))

        assert torch.autograd.gradcheck(of_leaves, leaves, fast_mode=True), what
        assert torch.autograd.gradgradcheck(of_leaves, leaves, fast_mode=True), what


@pytest.mark.parametrize("name", [name for name in own_losses() if not reference_of(name).smooth])
def test_second_derivatives_of_the_others_are_those_of_the_similarities(name):
    """Weights of the similarities are constant, so only the similarities are curved."""
    for what, call in calls():
        leaves = leaves_of(call)
        generator = torch.Generator().manual_seed(0)
        directions = [torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator) for leaf in leaves]
        twins, similarities = similarities_of(reference_distances.cosine, [leaf.detach() for leaf in leaves])
        items = values_and_derivatives(name, similarities.tolist(), call, symmetric=True)
        weights = torch.zeros_like(similarities)
        for _, _, derivatives in items:
            for pair, derivative in derivatives.items():
                weights[pair] += derivative / len(items)
        similarities = reference_distances.matrix(reference_distances.cosine, *twins)
        of_loops = second_derivative((weights * similarities).sum(), twins, directions)
        assert max(part.abs().max() for part in of_loops) > 1e-3, what
        of_loss = second_derivative(make_loss(name)(**call), leaves, directions)
        torch.testing.assert_close(of_loss, of_loops, msg=lambda text, what=what: f"{what}: {text}")


@LOSSES
def test_all_negatives_during_a_warm_up_whatever_the_host_passes(name):
    """Pairs and labels warm up; triplets that a miner chose are what they are."""
    loss = make_loss(name)
    if not hasattr(loss, "warmup_steps"):
        return
    for what, call in calls():
        warm = make_loss(name, warmup_steps=1)
        values = [warm(**call).item() for _ in range(2)]
        torch.testing.assert_close(values[1], expected(name, call)[0], msg=lambda text, what=what: f"{what}: {text}")
        is_warm = values[0] > values[1] + 1e-3
        assert is_warm == (len(call.get("indices_tuple", ())) != 3), what


@pytest.mark.parametrize("distance", [CosineSimilarity, LpDistance])
@LOSSES
def test_losses_share_a_distance(name, distance):
    if reference_of(name).only_similarities and distance is LpDistance:
        return
    shared = distance()
    for _, call in calls():
        alone = make_loss(name, distance=distance())(**call)
        assert torch.equal(make_loss(name, distance=shared)(**call), alone)
