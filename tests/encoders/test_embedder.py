import pytest
import torch

from vl_plugins.encoders import Embedder
from vl_plugins.modules import TowerFeatures

WIDTH, POOLED_WIDTH, DIM = 6, 7, 4
PADDING = torch.tensor([[False, False, True], [False, False, False], [False, True, True]])
EACH_PROJECTION = pytest.mark.parametrize("projection", ["linear", "residual_mlp", "none"])


def features_of():
    generator = torch.Generator().manual_seed(0)
    local = torch.randn(3, 3, WIDTH, dtype=torch.float64, generator=generator)
    pooled = torch.randn(3, POOLED_WIDTH, dtype=torch.float64, generator=generator)
    return TowerFeatures(local, pooled, PADDING, None, has_positions=True)


def make(pooling="avg", projection="linear", **options):
    torch.manual_seed(0)
    dim = options.pop("dim", WIDTH if projection == "none" else DIM)
    return Embedder(WIDTH, POOLED_WIDTH, dim, pooling, projection, **options).double()


def projected(embedder, rows):
    """Of rows (R, W) by the formulas; with the statistics of these rows in training."""
    projection = embedder.projection
    if not hasattr(projection, "mlp"):
        return projection(rows)
    first, norm, _, last = projection.mlp
    hidden = first(rows)
    if embedder.training:
        mean, variance = hidden.mean(dim=0), hidden.var(dim=0, correction=0)
    else:
        mean, variance = norm.running_mean, norm.running_var
    hidden = (hidden - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias
    return projection.linear(rows) + last(hidden.clamp(min=0))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padding_mask", [PADDING, None], ids=["padding", "none"])
@EACH_PROJECTION
@pytest.mark.parametrize("pooling", ["avg", "gpo", "max"])
def test_projects_what_exists_and_pools_it(pooling, projection, padding_mask, training):
    features = features_of()._replace(padding_mask=padding_mask)
    embedder = make(pooling, projection).train(training)
    exists = ~PADDING if padding_mask is not None else torch.ones_like(PADDING)
    expected = torch.zeros(3, 3, embedder.dim, dtype=torch.float64)
    expected[exists] = projected(embedder, features.local[exists])
    features.local[~exists] = float("nan")
    output = embedder(features)
    assert output.local.shape[-1] == embedder.local_width == embedder.dim
    torch.testing.assert_close(output.local, expected)
    torch.testing.assert_close(output.pooled, embedder.pool(expected, padding_mask))
    assert output[2:] == features[2:]
    if output.pooled.requires_grad:
        output.pooled.square().sum().backward()
    for name, parameter in embedder.named_parameters():
        assert parameter.grad.isfinite().all(), name


@EACH_PROJECTION
def test_own_pooling_of_the_trunk(projection):
    embedder = make("own", projection, dim=POOLED_WIDTH)
    features = features_of()
    output = embedder(features)
    assert output.local is features.local
    assert embedder.local_width == WIDTH
    torch.testing.assert_close(output.pooled, projected(embedder, features.pooled))


def test_linear_maps_start_as_those_of_vse_plus_plus():
    bound = (6 / (300 + 200)) ** 0.5
    for embedder in (Embedder(300, None, 200), Embedder(300, None, 200, projection="residual_mlp")):
        layer = getattr(embedder.projection, "linear", embedder.projection)
        assert 0.95 * bound < layer.weight.abs().max() <= bound
        assert (layer.bias == 0).all()
    assert embedder.projection.mlp[0].out_features == 100
