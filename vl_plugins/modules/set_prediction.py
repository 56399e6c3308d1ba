"""Sets of embeddings by slot attention: the set prediction module of DivE, also as a head of a tower."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vl_plugins.functional.precision import full_precision
from vl_plugins.modules.positions import sinusoidal_positions_2d
from vl_plugins.utils.checks import integer

__all__ = ["SetHead", "SetPrediction", "SetPredictionOutput", "TowerFeatures", "slot_attention"]


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
            each input, and is 1 / K at padded inputs. With ``attention="inputs"`` it sums to 1 over the inputs of
            each slot, and is 0 at padded inputs.
    """

    embeddings: Tensor
    slots: Tensor
    attention: Tensor


class SetPrediction(nn.Module):
    r"""Predict a set of embeddings of an item from its local features and a global one.

    K slots compete for the local features, in T iterations of one aggregation block (Eq. 1-4):

    .. math::
        M &= \frac{(\mathrm{LN}(x) W_k) (\mathrm{LN}(E) W_q)^\top}{\sqrt{D_h}}, \quad
        A_{nk} = \frac{e^{M_{nk}}}{\sum_i e^{M_{ni}}}, \quad \hat A_{nk} = \frac{A_{nk}}{\sum_i A_{ik}} \\
        \bar E &= \hat A^\top (\mathrm{LN}(x) W_v) W_o + E, \quad E \leftarrow \mathrm{MLP}(\bar E) + \bar E

    Then the global feature is added to each slot (Eq. 5): S = LN(E) + LN(global).

    Linear maps start as Xavier uniform, without a bias except in the MLP, where biases start at 0. Learned slots, and
    the noise of random ones, are drawn from N(0, 1). At first the iterations add nearly the same to every slot, so the
    last maps before the residual sums start T times smaller, and the slots apart. The options that are not the default
    are ablations of the paper (Table 3 and appendix B.3).

    Args:
        dim: D >= 1, width of the slots, the global feature and the embeddings.
        local_dim: width of the local features, >= 1; by default D.
        num_slots: K >= 1, the number of embeddings of an item.
        num_iters: T >= 1.
        hidden_dim: D_h >= 1, width of keys, queries and values, and of the MLP's hidden layer. The paper has 1024, and
            2048 for region features.
        slots: ``"learned"`` initial slots, or ``"random"`` ones from a Gaussian with learned mean and scale: in
            training new noise for each item, in evaluation the same noise for all, kept in a buffer.
        update: how slots take up the attended features: the ``"residual"`` sum of Eq. 3, or a ``"gru"``.
        attention: the softmax of Eq. 2 is over the ``"slots"``, or over the ``"inputs"`` as in a transformer.
        global_feature: whether Eq. 5 adds a global feature.

    Raises:
        ValueError: an argument out of its range.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Section 3.2.
        Locatello et al. 2020, Object-Centric Learning with Slot Attention, for ``slots="random"`` and ``update="gru"``.

    >>> module = SetPrediction(16, local_dim=24, num_slots=3, hidden_dim=32)
    >>> embeddings, slots, attention = module(torch.rand(2, 9, 24), torch.rand(2, 16))
    >>> embeddings.shape, slots.shape, attention.shape
    (torch.Size([2, 3, 16]), torch.Size([2, 3, 16]), torch.Size([2, 4, 9, 3]))
    """

    noise: Tensor

    def __init__(
        self,
        dim: int,
        local_dim: int | None = None,
        num_slots: int = 4,
        num_iters: int = 4,
        hidden_dim: int = 1024,
        slots: str = "learned",
        update: str = "residual",
        attention: str = "slots",
        global_feature: bool = True,
    ):
        super().__init__()
        self.dim = integer("dim", dim, least=1)
        self.local_dim = self.dim if local_dim is None else integer("local_dim", local_dim, least=1)
        self.num_slots = integer("num_slots", num_slots, least=1)
        self.num_iters = integer("num_iters", num_iters, least=1)
        self.hidden_dim = integer("hidden_dim", hidden_dim, least=1)
        self.slots = _one_of("slots", slots, "learned", "random")
        self.update = _one_of("update", update, "residual", "gru")
        self.attention = _one_of("attention", attention, "slots", "inputs")
        self.global_feature = _one_of("global_feature", global_feature, True, False)
        self.norm_inputs = nn.LayerNorm(self.local_dim)
        self.norm_slots = nn.LayerNorm(self.dim)
        self.to_keys = nn.Linear(self.local_dim, self.hidden_dim, bias=False)
        self.to_values = nn.Linear(self.local_dim, self.hidden_dim, bias=False)
        self.to_queries = nn.Linear(self.dim, self.hidden_dim, bias=False)
        self.to_slots = nn.Linear(self.hidden_dim, self.dim, bias=False)
        self.gru = nn.GRUCell(self.dim, self.dim) if self.update == "gru" else None
        self.norm_mlp = nn.LayerNorm(self.dim)
        self.mlp = nn.Sequential(nn.Linear(self.dim, self.hidden_dim), nn.GELU(), nn.Linear(self.hidden_dim, self.dim))
        self.norm_output = nn.LayerNorm(self.dim)
        self.norm_global = nn.LayerNorm(self.dim) if self.global_feature else None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.gru is None:
            for weight in (self.to_slots.weight, self.mlp.get_parameter("2.weight")):
                nn.init.xavier_uniform_(weight, gain=1 / self.num_iters)
        noise = torch.randn(self.num_slots, self.dim)
        if self.slots == "learned":
            self.initial_slots = nn.Parameter(noise)
        else:
            self.slots_mean = nn.Parameter(torch.zeros(self.dim))
            self.slots_log_scale = nn.Parameter(torch.zeros(self.dim))
            self.register_buffer("noise", noise)

    def forward(
        self,
        local_features: Tensor,
        global_feature: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> SetPredictionOutput:
        """Return the set of each item.

        Args:
            local_features: (B, N, local_dim), such as patches, regions or tokens; cast to the dtype of the parameters,
                as are all inputs.
            global_feature: (B, D); None for a module with ``global_feature=False``.
            padding_mask: (B, N), bool, True for inputs that do not exist. Their values, NaN too, have no influence, and
                their gradients are 0. An item without inputs has the set of N = 0.
            positions: (N, local_dim) or (B, N, local_dim), added to the inputs of the keys alone; for features without
                positions, see :func:`~vl_plugins.modules.sinusoidal_positions_2d`.

        Raises:
            ValueError: a wrong shape; a global feature that is missing or superfluous.
        """
        self._check(local_features, global_feature, padding_mask, positions)
        dtype = self.to_keys.weight.dtype
        inputs = self.norm_inputs(_without_padding(local_features.to(dtype), padding_mask))
        values = self.to_values(inputs)  # (B, N, D_h), as the keys: the same in each iteration
        if positions is not None:
            inputs = inputs + positions.to(dtype)  # NaN too, perhaps, at padded inputs
        (keys,) = full_precision(self.to_keys(_without_padding(inputs, padding_mask)))
        slots, maps = self._initial_slots(len(local_features)), []
        for _ in range(self.num_iters):
            slots, attention = self._aggregate(slots, keys, values, padding_mask)
            maps.append(attention)
        embeddings = self.norm_output(slots)
        if self.norm_global is not None and global_feature is not None:
            embeddings = embeddings + self.norm_global(global_feature.to(dtype))[:, None]
        return SetPredictionOutput(embeddings, slots, torch.stack(maps, dim=1))

    def _initial_slots(self, batch_size: int) -> Tensor:
        if self.slots == "learned":
            return self.initial_slots.expand(batch_size, -1, -1)
        noise = self.noise.expand(batch_size, -1, -1)
        noise = torch.randn_like(noise) if self.training else noise
        return self.slots_mean + self.slots_log_scale.exp() * noise

    def _aggregate(self, slots, keys, values, padding_mask) -> tuple[Tensor, Tensor]:
        """Return the slots (B, K, D) and the attention (B, N, K) after one aggregation block."""
        queries = self.to_queries(self.norm_slots(slots))
        attended, attention = slot_attention(queries, keys, values, padding_mask, over=self.attention)
        update = self.to_slots(attended)
        if self.gru is None:
            slots = update + slots
        else:  # in half precision under CUDA's autocast
            slots = self.gru(update.flatten(0, 1), slots.flatten(0, 1)).to(slots.dtype).view_as(slots)
        return self.mlp(self.norm_mlp(slots)) + slots, attention

    def _check(self, local_features, global_feature, padding_mask, positions) -> None:
        shape = tuple(local_features.shape)
        if len(shape) != 3 or shape[2] != self.local_dim:
            raise ValueError(f"local_features must have the shape (B, N, {self.local_dim}), got {shape}")
        if self.global_feature is (global_feature is None):
            expected, given = ("a tensor", "None") if self.global_feature else ("None", "a tensor")
            raise ValueError(
                f"global_feature must be {expected} for a module with global_feature={self.global_feature}, got {given}"
            )
        batch_size, length, width = shape
        for name, tensor, *shapes in (
            ("global_feature", global_feature, (batch_size, self.dim)),
            ("padding_mask", padding_mask, (batch_size, length)),
            ("positions", positions, (length, width), (batch_size, length, width)),
        ):
            if tensor is not None and tuple(tensor.shape) not in shapes:
                expected = " or ".join(map(str, shapes))
                raise ValueError(f"{name} must have the shape {expected}, got {tuple(tensor.shape)}")


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
            positions = sinusoidal_positions_2d(*grid, local.shape[-1]).to(local.device)
        if self.prediction.global_feature or pooled is None:
            return self.prediction(local, pooled, padding_mask=padding_mask, positions=positions)
        output = self.prediction(local, padding_mask=padding_mask, positions=positions)
        # DistributedDataParallel fails if a parameter of the tower has no gradient.
        return output._replace(embeddings=output.embeddings + 0 * pooled.sum())

    def forward(self, features: TowerFeatures) -> dict[str, Tensor]:
        output = self.predict(features)
        return {"features": output.embeddings, "slots": output.slots}


def slot_attention(
    queries: Tensor, keys: Tensor, values: Tensor, padding_mask: Tensor | None = None, *, over: str = "slots"
) -> tuple[Tensor, Tensor]:
    """Attend from slots to inputs (Eq. 2 and the left of Eq. 3).

    Both softmaxes are computed from logarithms in float32 at least, so a slot that no input prefers takes a mean of the
    inputs, where Eq. 3 to the letter is 0 / 0.

    Args:
        queries: (B, K, D_h), of the slots.
        keys: (B, N, D_h), of the inputs.
        values: (B, N, D_v), of the inputs; finite at padded ones.
        padding_mask: (B, N), bool, True for inputs to leave out.
        over: axis of the softmax, ``"slots"`` or ``"inputs"``.

    Returns:
        The mean of the values for each slot (B, K, D_v), in their dtype, 0 if all inputs are padded; and A (B, N, K),
        float32 at least.
    """
    with torch.autocast(keys.device.type, enabled=False):
        queries, keys = full_precision(queries, keys)
        logits = keys @ queries.transpose(1, 2) / math.sqrt(keys.shape[2])  # (B, N, K)
        # The softmax over the inputs divides by the sum of Eq. 3.
        scores = logits.log_softmax(dim=2) if over == "slots" else logits
        if padding_mask is not None:
            # Not minus infinity: a softmax over padding alone would be NaN.
            scores = scores.masked_fill(padding_mask[:, :, None], torch.finfo(scores.dtype).min)
        weights = _without_padding(scores.softmax(dim=1), padding_mask)
        attention = logits.softmax(dim=2) if over == "slots" else weights
    return weights.transpose(1, 2).to(values.dtype) @ values, attention


def _without_padding(tensor: Tensor, padding_mask: Tensor | None) -> Tensor:
    return tensor if padding_mask is None else tensor.masked_fill(padding_mask[:, :, None], 0)


def _one_of(name: str, value: Any, *allowed: Any) -> Any:
    if type(value) is not type(allowed[0]) or value not in allowed:  # 1 is not True
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")
    return value
