from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory import LargestTensor, extra_bytes
from vl_plugins import functional, kernels, tiles
from vl_plugins.kernels import dispatch, tiled
from vl_plugins.kernels.pairs import equal_label_pairs

BACKENDS = ("dense", "tiled")
LOSSES = {"unified": kernels.unified_loss, "vlc": kernels.vlc_loss}


@pytest.fixture(params=["CPU", "accelerator"])
def path(request, monkeypatch):
    """Small shapes in several tiles, with and without questions to the device in between."""
    monkeypatch.setattr(tiles, "CPU_TILE", 512)
    if request.param == "accelerator":
        monkeypatch.setattr(tiled, "_pairs_are_known", lambda comparison: False)
        monkeypatch.setattr(tiled, "_common_shift", lambda tile, scale: None)


def vectors(rows, columns, dimension, seed, *, labels=3):
    generator = torch.Generator().manual_seed(seed)
    x, y = (
        torch.randn(number, dimension, dtype=torch.float64, generator=generator) + 0.3 for number in (rows, columns)
    )
    return x, y, *(torch.randint(labels, (number,), generator=generator) for number in (rows, columns))


def loss_and_gradients(loss, x, y, *arguments, dtype=torch.float64, leaves=(), **options):
    """Return the values and the gradients by x, y and the leaves, for an upstream gradient that differs by pair."""
    x, y = (side.to(dtype, copy=True).requires_grad_() for side in (x, y))
    values = loss(x, y, *arguments, **options)
    upstream = torch.linspace(0.5, 2, values.numel(), dtype=values.dtype).view(values.shape)
    return values.detach(), *torch.autograd.grad((values * upstream).sum(), (x, y, *leaves))


def plain(loss, x, y, x_labels, y_labels, *arguments, normalize=True, same_set=False, **options):
    """The same by ``functional``, on all similarities."""
    if normalize:
        x, y = (torch.nn.functional.normalize(side) for side in (x, y))
    positives = x_labels[:, None] == y_labels
    negatives = ~positives
    if same_set:
        positives = positives & ~torch.eye(len(x), dtype=torch.bool)
    return loss(x @ y.T, positives, negatives, *arguments, **options)


def assert_near(actual, expected, tolerance):
    """Compare each tensor relative to its largest element."""
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        largest = other.abs().max().item() if other.numel() else 0
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance * max(largest, 1e-3))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=25)
@given(
    rows=st.sampled_from([0, 1, 2, 5, 17, 40]),
    columns=st.sampled_from([0, 1, 3, 16, 33, 50]),
    dimension=st.sampled_from([2, 7, 12]),
    labels=st.sampled_from([1, 3, 1000]),
    seed=st.integers(0, 100),
    name=st.sampled_from(list(LOSSES)),
    scale=st.sampled_from([1.0, 10.0, 50.0]),
    normalize=st.booleans(),
    symmetric=st.booleans(),
    same_set=st.booleans(),
    reduction=st.sampled_from(["none", "mean", "sum"]),
    margin=st.sampled_from(["number", "of all", "of rows", "of pairs"]),
    has_weights=st.booleans(),
)
def test_backends_equal_the_formulas(
    backend,
    dtype,
    tolerance,
    rows,
    columns,
    dimension,
    labels,
    seed,
    name,
    scale,
    normalize,
    symmetric,
    same_set,
    reduction,
    margin,
    has_weights,
):
    columns = rows if same_set else columns
    x, y, x_labels, y_labels = vectors(rows, columns, dimension, seed, labels=labels)
    if same_set:
        y_labels = x_labels
    if not normalize:
        x, y = x / 2, y / 2
    leaves = {"scale": torch.tensor(scale, dtype=torch.float64, requires_grad=True)}
    if name == "unified":
        shape = {"of all": (), "of rows": (rows,), "of pairs": (rows, columns)}.get(margin)
        generator = torch.Generator().manual_seed(seed)
        leaves["margin"] = 0.2
        if shape is not None:
            leaves["margin"] = torch.rand(shape, dtype=torch.float64, generator=generator).requires_grad_()
        if has_weights:
            leaves["weights"] = (torch.rand(rows, dtype=torch.float64, generator=generator) + 0.5).requires_grad_()
    options = {"normalize": normalize, "symmetric": symmetric, "same_set": same_set, "reduction": reduction, **leaves}
    tensors = [leaf for leaf in leaves.values() if isinstance(leaf, torch.Tensor)]
    run = partial(loss_and_gradients, leaves=tensors)
    expected = run(partial(plain, getattr(functional, f"{name}_loss")), x, y, x_labels, y_labels, **options)
    actual = run(LOSSES[name], x, y, x_labels, y_labels, dtype=dtype, backend=backend, **options)
    assert actual[0].dtype == dtype
    place = len(actual) - len(tensors)  # of the gradient by the scale, in which similarities cancel
    assert_near(actual[:place] + actual[place + 1 :], expected[:place] + expected[place + 1 :], tolerance)
    largest = max(side.norm(dim=1).max().item() if len(side) else 0 for side in (x, y)) ** (0 if normalize else 2)
    summed = 1 if reduction == "mean" else max(1, (x_labels[:, None] == y_labels).sum().item())
    torch.testing.assert_close(actual[place], expected[place], rtol=0, atol=10 * tolerance * largest * summed / scale)


@pytest.mark.parametrize("backend", [*BACKENDS, "functional"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_several_tiles(path, backend, symmetric):
    x, y, *labels = vectors(70, 90, 5, seed=0, labels=30)
    options = {"symmetric": symmetric, "reduction": "none"}
    expected = loss_and_gradients(partial(plain, functional.unified_loss), x, y, *labels, 0.1, 40.0, **options)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        actual = loss_and_gradients(
            kernels.unified_loss, x, y, *labels, 0.1, 40.0, dtype=dtype, backend=backend, **options
        )
        assert_near(actual, expected, tolerance)


def test_exponentials_are_shared_where_they_do_not_underflow_only():
    x, y, *labels = vectors(40, 40, 5, seed=0)
    pairs = equal_label_pairs(*labels)
    shared = {}
    for scale in (1.0, 1e4):
        comparison = tiled.Comparison(x, y, None, None, *labels, *pairs)
        kept = tiled.log_sum_exps(comparison, scale, symmetric=True, keep=False)
        shared[scale] = [shift is not None for shift in kept.shifts]
        negatives = (labels[0][:, None] != labels[1]).double().log()
        exponents = scale * (x @ y.T) + negatives
        torch.testing.assert_close(kept.rows, exponents.logsumexp(1), rtol=1e-12, atol=0)
        torch.testing.assert_close(kept.columns, exponents.logsumexp(0), rtol=1e-12, atol=0)
    assert shared == {1.0: [True], 1e4: [False]}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_extreme_similarities_are_finite(path, backend, scale, dtype):
    directions = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]).repeat(8, 1)
    labels = torch.arange(40) // 2
    values = loss_and_gradients(
        kernels.unified_loss, directions, directions, labels, labels, 0.2, scale, dtype=dtype, backend=backend
    )
    assert all(value.isfinite().all() for value in values)
    unit = torch.nn.functional.normalize(directions.double())
    expected = plain(functional.unified_loss, unit, unit, labels, labels, 0.2, scale, normalize=False)
    torch.testing.assert_close(values[0].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_far_below_the_others_has_its_own_exponentials(path, backend):
    """A shift shared by all would be the logarithm of zero there: scale times the spread is beyond float32."""
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(20, 1)
    y = torch.tensor([[1.0, 0.01]]).repeat(40, 1)
    labels = torch.arange(40)
    options = {"margin": 0.2, "scale": 100.0, "reduction": "none"}
    expected = loss_and_gradients(partial(plain, functional.unified_loss), x, y, labels, labels, **options)
    actual = loss_and_gradients(
        kernels.unified_loss, x, y, labels, labels, dtype=torch.float32, backend=backend, **options
    )
    # Elements of the gradients are differences of numbers that are nearly the same.
    assert_near(actual, expected, 5e-5)
    assert (actual[0] > 0.2).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_embeddings(path, backend, dtype):
    x, y, *labels = vectors(50, 70, 8, seed=1, labels=30)
    x, y = (side.to(dtype) for side in (x, y))
    expected = loss_and_gradients(partial(plain, functional.unified_loss), x.double(), y.double(), *labels)
    loss, *gradients = loss_and_gradients(kernels.unified_loss, x, y, *labels, dtype=dtype, backend=backend)
    assert loss.dtype == torch.float32
    assert all(gradient.dtype == dtype for gradient in gradients)
    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-5, atol=0)
    for actual, right in zip(gradients, expected[1:], strict=True):
        assert (actual.double() - right).norm() < 3e-3 * right.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_embeddings_in_another_layout(backend):
    x, y, *labels = vectors(9, 12, 6, seed=2)
    strided = torch.stack([x, x], dim=2)[:, :, 0], y.T.contiguous().T
    assert not any(side.is_contiguous() for side in strided)
    expected = loss_and_gradients(kernels.unified_loss, x, y, *labels, backend=backend)
    sides = [side.detach().requires_grad_() for side in strided]
    loss = kernels.unified_loss(*sides, *labels, backend=backend)
    for actual, right in zip((loss, *torch.autograd.grad(loss * 0.5, sides)), expected, strict=True):
        torch.testing.assert_close(actual, right)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_side_needs_no_gradient(path, backend):
    x, y, *labels = vectors(40, 30, 4, seed=3)
    _, *expected = loss_and_gradients(kernels.unified_loss, x, y, *labels, backend=backend)
    for side in range(2):
        sides = [tensor.clone().requires_grad_(number == side) for number, tensor in enumerate((x, y))]
        loss = kernels.unified_loss(*sides, *labels, backend=backend)
        (gradient,) = torch.autograd.grad(0.5 * loss, (sides[side],))
        torch.testing.assert_close(gradient, expected[side])
    scale = torch.tensor(50.0, dtype=torch.float64, requires_grad=True)
    (of_scale,) = torch.autograd.grad(kernels.unified_loss(x, y, *labels, scale=scale, backend=backend), (scale,))
    (expected,) = torch.autograd.grad(plain(functional.unified_loss, x, y, *labels, scale=scale), (scale,))
    torch.testing.assert_close(of_scale, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_graph_can_be_used_again(path, backend):
    x, y, *labels = vectors(40, 30, 4, seed=4)
    x.requires_grad_()
    loss = kernels.unified_loss(x, y, *labels, backend=backend)
    first = torch.autograd.grad(loss, x, retain_graph=True)
    second = torch.autograd.grad(3 * loss, x)
    torch.testing.assert_close(second[0], 3 * first[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalize", [True, False])
def test_second_derivatives(backend, normalize):
    x, y, *labels = vectors(5, 6, 3, seed=5)
    scale = torch.tensor(5.0, dtype=torch.float64)
    leaves = [leaf.requires_grad_() for leaf in (x, y, scale)]
    options = {"normalize": normalize, "backend": backend}
    for symmetric in (True, False):
        assert torch.autograd.gradgradcheck(
            lambda x, y, scale, symmetric=symmetric: kernels.unified_loss(
                x, y, *labels, scale=scale, symmetric=symmetric, **options
            ),
            leaves,
        )
    labels = labels[0], labels[0]
    assert torch.autograd.gradgradcheck(lambda x: kernels.unified_loss(x, x, *labels, same_set=True, **options), x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_changes_nothing(backend):
    x, y, *labels = (tensor.float() if tensor.is_floating_point() else tensor for tensor in vectors(9, 12, 6, seed=6))
    expected = loss_and_gradients(kernels.unified_loss, x, y, *labels, dtype=torch.float32, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = loss_and_gradients(kernels.unified_loss, x, y, *labels, dtype=torch.float32, backend=backend)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("backend", [*BACKENDS, "functional"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_not_a_number_is_never_hidden(backend, bad, side):
    sides = [torch.eye(4), torch.eye(4)]
    sides[side][2, 1] = bad
    labels = torch.zeros(4, dtype=torch.long)  # nothing to compare
    loss, *gradients = loss_and_gradients(
        kernels.unified_loss, *sides, labels, labels, dtype=torch.float32, backend=backend
    )
    assert loss.isnan()
    assert gradients[side].isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_the_same_to_the_last_bit(path, backend):
    x, y, *labels = vectors(60, 80, 5, seed=7)
    first, second = (
        loss_and_gradients(kernels.unified_loss, x, y, *labels, dtype=torch.float32, backend=backend) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_largest_tensors():
    x, y, *labels = vectors(700, 900, 4, seed=8, labels=10**6)
    height, width = tiles.tile_shape((700, 900), torch.device("cpu"), 2**14)
    elements = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CPU_TILE", 2**14)
        for backend in (*BACKENDS, "functional"):
            sides = [side.clone().requires_grad_() for side in (x, y)]
            with LargestTensor() as largest:
                kernels.unified_loss(*sides, *labels, backend=backend).backward()
            elements[backend] = largest.elements
    assert elements == {"dense": 700 * 900, "tiled": height * width, "functional": 700 * 900}


def test_memory_grows_with_the_vectors_or_as_one_matrix():
    def megabytes(number, backend):
        x, y, *labels = (
            tensor.float().requires_grad_() if tensor.is_floating_point() else tensor
            for tensor in vectors(number, number, 64, seed=9, labels=10**6)
        )
        return extra_bytes(lambda: kernels.unified_loss(x, y, *labels, backend=backend).backward()) / 1e6

    dense, tiled_small, tiled_large = megabytes(2048, "dense"), megabytes(2048, "tiled"), megabytes(4096, "tiled")
    matrix = 4 * 2048**2 / 1e6
    assert matrix < dense < 1.6 * matrix
    assert tiled_small < 0.5 * matrix
    assert tiled_large < 2 * tiled_small


def test_known_pairs_are_not_searched(monkeypatch):
    x, y, *labels = vectors(9, 12, 4, seed=10)
    expected = kernels.unified_loss(x, y, *labels, backend="tiled")
    pairs = equal_label_pairs(*labels)
    monkeypatch.setattr("vl_plugins.kernels.unified.equal_label_pairs", None)
    assert torch.equal(kernels.unified_loss(x, y, *labels, pairs=pairs, backend="tiled"), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3)}, r"x must be floating point of shape \(number, D\), got torch.float32 of \(3,\)"),
        ({"x": torch.ones(3, 4).long()}, r"x must be floating point of shape \(number, D\), got torch.int64 of"),
        ({"y": torch.ones(5, 3)}, "y must have the width of x, 4, got 3"),
        ({"y": torch.ones(5, 4).half()}, "y must have the type of x, torch.float32, got torch.float16"),
        ({"y": torch.ones(5, 4, device="meta")}, "y must have the device of x, cpu, got meta"),
        ({"x_labels": torch.arange(4)}, r"x_labels must have the shape \(3,\) on cpu, got \(4,\) on cpu"),
        ({"y_labels": torch.arange(5, device="meta")}, r"y_labels must have the shape \(5,\) on cpu, got .* on meta"),
        ({"same_set": True}, "same_set needs y to be x, got 3 and 5 vectors"),
        ({"reduction": "average"}, "reduction must be one of 'mean', 'sum', 'none', got 'average'"),
        ({"margin": torch.ones(4)}, r"margin must have the shape \(\), \(3,\) or \(3, 5\), got \(4,\)"),
        ({"weights": torch.ones(3, 5)}, r"weights must have the shape \(3,\) on cpu, got \(3, 5\) on cpu"),
        ({"backend": "fast"}, "unknown backend 'fast'"),
        ({"backend": "triton"}, "backend 'triton' needs Triton and embeddings on a CUDA GPU .*, got cpu; 'tiled' runs"),
    ],
)
def test_wrong_input(change, message):
    right = {"x": torch.ones(3, 4), "y": torch.ones(5, 4), "x_labels": torch.arange(3), "y_labels": torch.arange(5)}
    with pytest.raises(ValueError, match=f"^{message}"):
        kernels.unified_loss(**right | {"backend": "tiled"} | change)


def test_choice_of_the_backend(monkeypatch, caplog):
    x, y = torch.ones(10, 4), torch.ones(20, 4)
    dispatch.log_choice.cache_clear()
    with caplog.at_level("INFO", logger="vl_plugins"):
        for _ in range(2):
            assert dispatch.choose_backend(None, x, y, name="one") == "dense"
        assert dispatch.choose_backend("tiled", x, y, name="one") == "tiled"
        monkeypatch.setattr(dispatch, "DENSE_BYTES", 4 * 10 * 20)
        assert dispatch.choose_backend(None, x, y, name="two") == "dense"
        assert dispatch.choose_backend(None, x.double(), y.double(), name="two") == "tiled"
        monkeypatch.setattr(dispatch, "free_bytes", lambda device: 4 * 10 * 20 * 3)
        assert dispatch.choose_backend(None, x.half(), y.half(), name="two") == "dense"
        monkeypatch.setattr(dispatch, "LITTLE_BYTES", 0)
        assert dispatch.choose_backend(None, x.half(), y.half(), name="three") == "tiled"
        monkeypatch.setattr(dispatch, "triton_is_usable", lambda device: True)
        assert dispatch.choose_backend(None, x, y, name="three") == "triton"
        assert dispatch.choose_backend("triton", x, y, name="four") == "triton"
    assert [record.getMessage() for record in caplog.records] == [
        "one: backend dense (10 x 20 similarities on cpu)",
        "two: backend dense (10 x 20 similarities on cpu)",
        "two: backend tiled (10 x 20 similarities on cpu)",
        "three: backend tiled (10 x 20 similarities on cpu)",
        "three: backend triton (on cpu)",
    ]


def test_free_memory_is_positive_and_not_more_than_there_is(monkeypatch):
    free = dispatch.free_bytes(torch.device("cpu"))
    assert free > 0
    monkeypatch.setattr(dispatch.Path, "read_text", lambda self: "MemTotal: 5 kB\nMemAvailable:  3 kB\n")
    assert dispatch.free_bytes(torch.device("cpu")) == 3 * 1024
    monkeypatch.setattr(dispatch.Path, "read_text", lambda self: "")
    assert dispatch.free_bytes(torch.device("cpu")) > 0


@pytest.mark.slow
def test_compiled_callers_have_the_same_values():
    x, y, *labels = vectors(9, 12, 6, seed=11)

    def caller(x, y):
        return 2 * kernels.unified_loss(x + 1, y, *labels, backend="tiled")

    expected = loss_and_gradients(caller, x, y)
    actual = loss_and_gradients(torch.compile(caller, backend="aot_eager"), x, y)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)
