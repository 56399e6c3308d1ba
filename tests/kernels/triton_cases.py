"""What Triton's kernels have to compute, on any device that runs them, against float64 and autograd."""

import torch
from torch.nn.functional import normalize as unit

from vl_plugins import functional
from vl_plugins.kernels.log_sum_exp import contrast
from vl_plugins.kernels.pairs import equal_label_pairs
from vl_plugins.kernels.vectors import compare

# Of gradients, relative to their norm. In half precision those by the similarities are rounded, and the result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-3}


def vectors(*shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, dtype=torch.float64, generator=generator) + 0.3).to(dtype).to(device)


def upstream_like(tensors):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tensor.shape, generator=generator).to(tensor) for tensor in tensors]


def assert_gradients_near(actual, expected, tolerance):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other.double()).norm() <= tolerance * other.double().norm()


def check_contrast(x, y, x_labels, y_labels, scale=20.0, *, symmetric=True, normalize=True, needed="xy", tolerance=None):
    """Compare log-sum-exps, similarities of positives and gradients with autograd on all similarities in float64."""
    pairs = equal_label_pairs(x_labels, y_labels)

    def actual(x, y, scale):
        of_all = contrast(
            x, y, x_labels, y_labels, pairs, scale, symmetric=symmetric, normalize=normalize, backend="triton"
        )
        return [values for values in of_all if values is not None]

    def expected(x, y, scale):
        similarities = unit(x) @ unit(y).T if normalize else x @ y.T
        negatives = (scale * similarities).masked_fill(x_labels[:, None] == y_labels, torch.finfo(torch.float64).min)
        columns = [negatives.logsumexp(0)] if symmetric else []
        return [negatives.logsumexp(1), *columns, similarities[pairs]]

    results = []
    for function, dtype in ((actual, x.dtype), (expected, torch.float64)):
        leaves = {"x": x.to(dtype), "y": y.to(dtype), "scale": torch.tensor(scale, dtype=torch.float64, device=x.device)}
        leaves = {name: leaf.detach().clone().requires_grad_(name in needed) for name, leaf in leaves.items()}
        values = function(**leaves)
        if "scale" in needed:
            # Of log-sum-exps it is a mean similarity, which signs of the upstream gradient would let cancel.
            upstream = [gradient.abs() for gradient in upstream_like(values)]
        else:
            upstream = upstream_like(values)
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        results.append((values, torch.autograd.grad(values, wanted, upstream, materialize_grads=True)))
    (values, gradients), (expected_values, expected_gradients) = results
    for one, other in zip(values, expected_values, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * scale, check_dtype=False)
    assert_gradients_near(gradients, expected_gradients, tolerance or TOLERANCE[x.dtype])


def check_hardest(x, y, x_labels, y_labels, *, symmetric=True):
    """Compare with all dot products of vectors of small integers, which are exact: with ties, the first one counts."""
    from vl_plugins.kernels.triton_mining import hardest_negatives

    comparison = compare(x, y, x_labels, y_labels, equal_label_pairs(x_labels, y_labels), normalize=False)
    rows, columns = hardest_negatives(comparison, symmetric=symmetric)
    similarities = (x.double() @ y.double().T).masked_fill(x_labels[:, None] == y_labels, -torch.inf)
    for actual, dim in ((rows, 1), (columns, 0)):
        if dim == 0 and not symmetric:
            assert actual is None
            continue
        values, index = actual
        if similarities.shape[dim] == 0:
            expected = torch.full((similarities.shape[1 - dim],), -torch.inf), torch.zeros(similarities.shape[1 - dim])
        else:
            expected = similarities.max(dim)
        assert values.dtype == torch.float32
        assert index.dtype == torch.int64
        assert torch.equal(values.double().cpu(), expected[0].double().cpu())
        assert torch.equal(index.cpu(), expected[1].long().cpu())


def check_sets(x, y, alpha=16.0, *, x_mask=None, y_mask=None, normalize=True, needed="xy", tolerance=None):
    """Compare similarities of sets and gradients with those of ``functional`` in float64."""
    from vl_plugins.kernels import triton_sets

    results = []
    for module, dtype in ((triton_sets, x.dtype), (functional, torch.float64)):
        leaves = [
            sets.detach().to(dtype, copy=True).requires_grad_(name in needed) for name, sets in (("x", x), ("y", y))
        ]
        values = module.smooth_chamfer_similarity(*leaves, alpha, x_mask=x_mask, y_mask=y_mask, normalize=normalize)
        upstream = upstream_like([values])
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        results.append((values, torch.autograd.grad(values, wanted, upstream, materialize_grads=True)))
    (values, gradients), (expected_values, expected_gradients) = results
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected_values, rtol=1e-6, atol=2e-6, check_dtype=False)
    assert_gradients_near(gradients, expected_gradients, tolerance or TOLERANCE[x.dtype])
