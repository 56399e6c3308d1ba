"""What Triton's kernels have to compute, on any device that runs them, against float64 and autograd."""

from functools import partial

import torch

from tests.helpers.embeddings import KERNELS, formula_and_gradients, kernel_and_gradients
from tests.helpers.pairs import value_and_gradients
from vl_plugins import functional
from vl_plugins.kernels import equal_label_pairs, pairwise_smooth_chamfer
from vl_plugins.kernels.comparison import EmbeddingPair, PairLabels

# Of gradients, relative to their norm. In half precision those by the similarities are rounded, and the result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-3}


def vectors(*shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, dtype=torch.float64, generator=generator) + 0.3).to(dtype).to(device)


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


def check_unified(x, y, labels, ref_labels, scale=20.0, *, tolerance=None, **options):
    """Compare losses and gradients, also by the scale, with those of ``functional`` in float64."""
    kernel, formula = KERNELS["unified"]
    leaf = torch.tensor(scale, dtype=torch.float64, device=x.device, requires_grad=True)
    arguments, options = (x, y, labels, ref_labels), options | {"scale": leaf, "leaves": [leaf]}
    values, *gradients = kernel_and_gradients(kernel, *arguments, dtype=x.dtype, backend="triton", **options)
    expected, *expected_gradients = formula_and_gradients(formula, *arguments, **options)
    assert values.dtype == torch.float32
    assert_near(values, expected, relative=1e-5, absolute=1e-5)
    assert_gradients_near(gradients, expected_gradients, tolerance or TOLERANCE[x.dtype])


def check_hardest(x, y, labels, ref_labels, *, symmetric=True):
    """Compare with all dot products of vectors of small integers, which are exact: with ties, the first one counts."""
    labels = PairLabels(labels, ref_labels, *equal_label_pairs(labels, ref_labels), False)
    pair = EmbeddingPair.prepare(x, y, normalize=False, keep_half=True)
    from vl_plugins.kernels.triton_hardest_negatives import search  # where there is Triton

    positives, rows, columns = search(pair, labels, symmetric=symmetric)
    similarities = x.double().cpu() @ y.double().cpu().T
    assert torch.equal(positives.double().cpu(), similarities[labels.rows.cpu(), labels.columns.cpu()])
    similarities = similarities.masked_fill((labels.labels[:, None] == labels.ref_labels).cpu(), -torch.inf)
    assert (columns is None) != symmetric
    for found, dim in ((rows, 1), (columns, 0))[: 1 + symmetric]:
        values, index = similarities.max(dim)
        assert torch.equal(found[0].double().cpu(), values)
        # Without negatives it is any index.
        assert torch.equal(torch.where(values.isfinite(), found[1].cpu(), 0), torch.where(values.isfinite(), index, 0))


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
        results.append(value_and_gradients(values, [leaf for leaf in leaves if leaf.requires_grad]))
    (values, *gradients), (expected_values, *expected_gradients) = results
    assert values.dtype == torch.float32
    assert_near(values, expected_values, relative=1e-6, absolute=2e-6)
    assert_gradients_near(gradients, expected_gradients, tolerance or TOLERANCE[x.dtype])
