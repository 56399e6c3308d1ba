"""Sets of embeddings by slot attention: the set prediction module of DivE, also as a head of a tower."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vl_plugins.errors import number
from vl_plugins.modules.positions import kept_positions
from vl_plugins.numerics import full_precision

__all__ = ["SetHead", "SetPrediction", "SetPredictionOutput", "TowerFeatures"]


class TowerFeatures(NamedTuple):
    """Features of a tower's inputs.

    Attributes:
        local: (B, N, W), of the last block: patches, places of a feature map, regions, or tokens.
        pooled: (B, D), the tower's own embedding, not normalized; None if it has none.
        padding_mask: (B, N) bool, True for tokens after the end of the text and for missing regions; None if no feature
            is padding.
        grid: (height, width) of the N places of an image; None for texts, and if patches are dropped.
        has_positions: whether the features contain their positions, as those of a transformer do.
    """

    local: Tensor
    pooled: Tensor | None
    padding_mask: Tensor | None
    grid: tuple[int, int] | None
    has_positions: bool


class SetPredictionOutput(NamedTuple):
    """Output of :class:`SetPrediction` for B items with N inputs each, K slots of width D and T iterations.

    Attributes:
        embeddings: (B, K, D), the set S of Eq. 5, not L2-normalized.
        slots: (B, K, D), E of the last iteration, before the layer norm of Eq. 5; for the diversity regularizer.
        attention: (B, T, N, K), A of Eq. 2 of every iteration, [0, 1], float32 at least. It sums to 1 over the slots of
            each input, and is 1 / K at padded inputs.
    """

    embeddings: Tensor
    slots: Tensor
    attention: Tensor


class SetPrediction(nn.Module):
    r"""Predict a set of embeddings of an item from its local features and a global one.

    K slots compete for the local features, in T iterations of one aggregation block (Eq. 1-4):

    .. math::
        M &= \frac{(\mathrm{LN}(x) W_k) (\mathrm{LN}(E) W_q)^\top}{\sqrt{D_h}}, \quad
        A_{nk} = \frac{e^{M_{nk}}}{\sum_i e^{M_{ni}}}, \quad B_{nk} = \frac{A_{nk}}{\sum_i A_{ik}} \\
        E' &= B^\top (\mathrm{LN}(x) W_v) W_o + E, \quad E \leftarrow \mathrm{MLP}(E') + E'

    Then the global feature is added to each slot (Eq. 5): S = LN(E) + LN(global).

    Linear maps start as Xavier uniform, without a bias except in the MLP, where biases start at 0. The slots' initial
    values are drawn from N(0, 1) and learned. At first the iterations add nearly the same to every slot, so the last
    maps before the residual sums start T times smaller, and the slots apart.

    Args:
        dim: D >= 1, width of the slots, the global feature and the embeddings.
        local_dim: width of the local features, >= 1; by default D.
        num_slots: K >= 1, the number of embeddings of an item.
        num_iters: T >= 1.
        hidden_dim: D_h >= 1, width of keys, queries and values, and of the MLP's hidden layer. The paper has 1024, and
            2048 for region features.

    Raises:
        ValueError: an argument out of its range.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Section 3.2.

    >>> module = SetPrediction(16, local_dim=24, num_slots=3, hidden_dim=32)
    >>> embeddings, slots, attention = module(torch.rand(2, 9, 24), torch.rand(2, 16))
    >>> embeddings.shape, slots.shape, attention.shape
    (torch.Size([2, 3, 16]), torch.Size([2, 3, 16]), torch.Size([2, 4, 9, 3]))
    """

    def __init__(
        self,
        dim: int,
        local_dim: int | None = None,
        num_slots: int = 4,
        num_iters: int = 4,
        hidden_dim: int = 1024,
    ):
        super().__init__()
        local_dim = dim if local_dim is None else local_dim
        number("num_slots", num_slots, least=1, kind=int)
        self.num_iters = number("num_iters", num_iters, least=1, kind=int)
        self.norm_inputs, self.norm_slots = nn.LayerNorm(local_dim), nn.LayerNorm(dim)
        self.to_keys = nn.Linear(local_dim, hidden_dim, bias=False)
        self.to_values = nn.Linear(local_dim, hidden_dim, bias=False)
        self.to_queries = nn.Linear(dim, hidden_dim, bias=False)
        self.to_slots = nn.Linear(hidden_dim, dim, bias=False)
        self.norm_mlp = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, dim))
        self.norm_output, self.norm_global = nn.LayerNorm(dim), nn.LayerNorm(dim)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for weight in (self.to_slots.weight, self.mlp.get_parameter("2.weight")):
            nn.init.xavier_uniform_(weight, gain=1 / num_iters)
        self.initial_slots = nn.Parameter(torch.randn(num_slots, dim))

    def forward(
        self,
        local_features: Tensor,
        global_feature: Tensor,
        *,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> SetPredictionOutput:
        """Return the set of each item.

        Args:
            local_features: (B, N, local_dim), such as patches, regions or tokens; cast to the dtype of the parameters,
                as are all inputs.
            global_feature: (B, D).
            padding_mask: (B, N), bool, True for inputs that do not exist. Their values, NaN too, have no influence, and
                their gradients are 0. An item without inputs has the set of N = 0.
            positions: (N, local_dim), added to the inputs of the keys alone; for features without
                positions, see :func:`~vl_plugins.modules.sinusoidal_positions_2d`.

        Raises:
            ValueError: a tensor of another shape.
        """
        shape = tuple(local_features.shape)
        for name, tensor, expected in (  # others would be broadcast
            ("global_feature", global_feature, (*shape[:1], self.to_queries.in_features)),
            ("padding_mask", padding_mask, shape[:2]),
            ("positions", positions, shape[1:]),
        ):
            if tensor is not None and tensor.shape != expected:
                raise ValueError(f"{name} must have the shape {expected}, got {tuple(tensor.shape)}")
        dtype = self.to_keys.weight.dtype
        inputs = self.norm_inputs(_without_padding(local_features.to(dtype), padding_mask))
        values = self.to_values(inputs)  # (B, N, D_h), as the keys: the same in each iteration
        if positions is not None:
            inputs = inputs + positions.to(dtype)  # NaN too, perhaps, at padded inputs
        (keys,) = full_precision(self.to_keys(_without_padding(inputs, padding_mask)))
        slots, maps = self.initial_slots.expand(len(local_features), -1, -1), []
        for _ in range(self.num_iters):
            (queries,) = full_precision(self.to_queries(self.norm_slots(slots)))
            with torch.autocast(keys.device.type, enabled=False):
                # Both softmaxes from logarithms: a slot that no input prefers takes a mean, where Eq. 3 has 0 / 0.
                scores = (keys @ queries.mT / math.sqrt(keys.shape[2])).log_softmax(dim=2)  # (B, N, K)
                maps.append(scores.exp())
                if padding_mask is not None:  # not minus infinity: a softmax over padding alone would be NaN
                    scores = scores.masked_fill(padding_mask[:, :, None], torch.finfo(scores.dtype).min)
                weights = _without_padding(scores.softmax(dim=1), padding_mask)  # divides by the sum of Eq. 3
            slots = self.to_slots(weights.mT.to(values.dtype) @ values) + slots
            slots = self.mlp(self.norm_mlp(slots)) + slots
        embeddings = self.norm_output(slots) + self.norm_global(global_feature.to(dtype))[:, None]
        return SetPredictionOutput(embeddings, slots, torch.stack(maps, dim=1))


class SetHead(nn.Module):
    """A set prediction module on a tower's local features and its embedding."""

    def __init__(self, prediction: SetPrediction):
        super().__init__()
        self.prediction = prediction

    def predict(self, features: TowerFeatures) -> SetPredictionOutput:
        """Return sets, slots and attention; sinusoidal positions are added to a grid without positions."""
        local, pooled, padding_mask, grid, has_positions = features
        positions = None
        if grid is not None and not has_positions:
            positions = kept_positions(local.device, *grid, local.shape[-1])
        return self.prediction(local, pooled, padding_mask=padding_mask, positions=positions)

    def forward(self, features: TowerFeatures) -> dict[str, Tensor]:
        output = self.predict(features)
        return {"features": output.embeddings, "slots": output.slots}


def _without_padding(tensor: Tensor, padding_mask: Tensor | None) -> Tensor:
    return tensor if padding_mask is None else tensor.masked_fill(padding_mask[:, :, None], 0)
