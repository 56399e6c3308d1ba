"""What Triton's kernels have to compute, on any device that runs them, against float64 and autograd."""

from functools import partial

import torch

from vl_plugins import functional
from vl_plugins.kernels import pairwise_smooth_chamfer
from vl_plugins.kernels.log_sum_exp import contrast
from vl_plugins.kernels.pairs import equal_label_pairs
from vl_plugins.kernels.vectors import compare

# Of gradients, relative to their norm. In half precision those by the similarities are rounded, and the result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-3}


def vectors(*shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, dtype=torch.float64, generator=generator) + 0.3).to(dtype).to(device)


def gradients_of(values, leaves, *, signs=True):
    """Return the gradients of a sum of all values, each with its own weight, by those leaves that want one."""
    generator = torch.Generator().manual_seed(1)
    total = 0
    for tensor in values:
        weights = torch.randn(tensor.shape, generator=generator).to(tensor)
        total = total + (tensor * (weights if signs else weights.abs())).sum()
    return torch.autograd.grad(total, [leaf for leaf in leaves if leaf.requires_grad])


def assert_near(actual, expected, *, relative, absolute):
    """Compare element by element."""
    assert actual.shape == expected.shape
    assert ((actual.double() - expected.double()).abs() <= absolute + relative * expected.double().abs()).all()


def assert_gradients_near(actual, expected, tolerance):
    """Compare each relative to its norm."""
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other.double()).norm() <= tolerance * max(other.double().norm(), 1e-2)


def unit(vectors):
    """Return normalised vectors; 0, with no gradient, for the vector 0."""
    norms = vectors.norm(dim=1, keepdim=True)
    return torch.where(norms == 0, 0, vectors / torch.where(norms == 0, 1, norms))


def check_contrast(
    x, y, x_labels, y_labels, scale=20.0, *, symmetric=True, normalize=True, needed="xy", tolerance=None
):
    """Compare log-sum-exps, similarities of positives and gradients with autograd on all similarities in float64."""
    pairs = equal_label_pairs(x_labels, y_labels)

    def actual(x, y, scale):
        of_all = contrast(
            x, y, x_labels, y_labels, pairs, scale, symmetric=symmetric, normalize=normalize, backend="triton"
        )
        return [values for values in of_all if values is not None]

    def expected(x, y, scale):
        similarities = unit(x) @ unit(y).T if normalize else x @ y.T
        least = torch.finfo(torch.float64).min
        negatives = (scale * similarities).masked_fill(x_labels[:, None] == y_labels, least)
        sums = [negatives.logsumexp(dim).clamp(min=least) for dim in ((1, 0) if symmetric else (1,))]
        return [*sums, similarities[pairs]]

    results = []
    for function, dtype in ((actual, x.dtype), (expected, torch.float64)):
        leaves = {
            "x": x.to(dtype),
            "y": y.to(dtype),
            "scale": torch.tensor(scale, dtype=torch.float64, device=x.device),
        }
        leaves = {name: leaf.detach().clone().requires_grad_(name in needed) for name, leaf in leaves.items()}
        values = function(**leaves)
        # Of log-sum-exps the derivative is a mean similarity: weights of both signs would let it cancel.
        results.append((values, gradients_of(values, leaves.values(), signs="scale" not in needed)))
    (values, gradients), (expected_values, expected_gradients) = results
    for one, other in zip(values, expected_values, strict=True):
        assert_near(one, other, relative=1e-6, absolute=3e-6 * scale)
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


def check_sets(x, y, alpha=16.0, *, mask=None, ref_mask=None, normalize=True, needed="xy", tolerance=None):
    """Compare similarities of sets and gradients with those of ``functional`` in float64."""
    results = []
    options = {"mask": mask, "ref_mask": ref_mask, "normalize": normalize}
    kernel = partial(pairwise_smooth_chamfer, backend="triton")
    for function, dtype in ((kernel, x.dtype), (functional.smooth_chamfer_similarity, torch.float64)):
        leaves = [
            sets.detach().to(dtype, copy=True).requires_grad_(name in needed) for name, sets in (("x", x), ("y", y))
        ]
        values = function(*leaves, alpha, **options)
        results.append((values, gradients_of([values], leaves)))
    (values, gradients), (expected_values, expected_gradients) = results
    assert values.dtype == torch.float32
    assert_near(values, expected_values, relative=1e-6, absolute=2e-6)
    assert_gradients_near(gradients, expected_gradients, tolerance or TOLERANCE[x.dtype])
