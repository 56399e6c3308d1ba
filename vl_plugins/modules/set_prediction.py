"""Sets of embeddings by slot attention: the set prediction module of DivE."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vl_plugins.functional.precision import full_precision
from vl_plugins.utils.checks import integer

__all__ = ["SetPrediction", "SetPredictionOutput", "slot_attention"]

SLOTS = ("learned", "random")
UPDATES = ("residual", "gru")
ATTENTIONS = ("slots", "inputs")


class SetPredictionOutput(NamedTuple):
    """What :class:`SetPrediction` returns, for B items with N inputs each, K slots of width D and T iterations.

    Attributes:
        embeddings: (B, K, D), the set S of Eq. 5, not L2-normalised.
        slots: (B, K, D), E of the last iteration, before the layer norm of Eq. 5; what the diversity regularizer takes.
        attention: (B, T, N, K), A of Eq. 2 of every iteration, [0, 1], float32 at least. It sums to 1 over the slots of
            every input; that of padded inputs is 1 / K and means nothing. With ``attention="inputs"`` it sums to 1 over
            the inputs of every slot, and is 0 at padded ones.
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

    The global feature is added to each of them (Eq. 5): S = LN(E) + LN(global).

    Keys and values do not change between the iterations and are computed once. Both softmaxes are computed from
    logarithms in float32 at least, so a slot that no input prefers still takes a mean of the inputs.

    Linear maps start as Xavier uniform, without a bias except in the MLP, where biases start at 0. Learned slots are
    drawn from N(0, 1), which is also the first Gaussian of random slots. What T iterations add points in the same
    direction for all slots at first, so the last maps before the residual sums start T times smaller, and the
    slots apart. The options that are not the default are ablations of the paper (Table 3 and appendix B.3).

    Args:
        dim: D, width of the slots, the global feature and the embeddings, >= 1.
        local_dim: width of the local features, >= 1; by default D.
        num_slots: K >= 1, the number of embeddings of an item.
        num_iters: T >= 1.
        hidden_dim: D_h >= 1, width of keys, queries and values, and of the MLP's hidden layer. The paper has 1024, and
            2048 for region features.
        slots: ``"learned"`` initial slots, or ``"random"`` ones from a Gaussian with learned mean and scale: fresh
            noise for each item in training; in evaluation the same noise, kept in a buffer, for every item.
        update: how the slots take up the attended features: the ``"residual"`` sum of Eq. 3, or a ``"gru"``.
        attention: the softmax of Eq. 2 goes over the ``"slots"``, or over the ``"inputs"`` as in a transformer.
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
    >>> bool(torch.allclose(attention.sum(dim=-1), torch.ones(2, 4, 9)))
    True
    """

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
        self.slots = _one_of("slots", slots, SLOTS)
        self.update = _one_of("update", update, UPDATES)
        self.attention = _one_of("attention", attention, ATTENTIONS)
        self.global_feature = _one_of("global_feature", global_feature, (True, False))

        if self.slots == "learned":
            self.initial_slots = nn.Parameter(torch.empty(self.num_slots, self.dim))
        else:
            self.slots_mean = nn.Parameter(torch.empty(self.dim))
            self.slots_log_scale = nn.Parameter(torch.empty(self.dim))
            self.register_buffer("noise", torch.empty(self.num_slots, self.dim))
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
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew, and the noise of random slots."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.LayerNorm, nn.GRUCell)):
                module.reset_parameters()
        if self.gru is None:
            for added in (self.to_slots, self.mlp[-1]):
                nn.init.xavier_uniform_(added.weight, gain=1 / self.num_iters)
        if self.slots == "learned":
            nn.init.normal_(self.initial_slots)
        else:
            nn.init.zeros_(self.slots_mean)
            nn.init.zeros_(self.slots_log_scale)
            nn.init.normal_(self.noise)

    def extra_repr(self) -> str:
        options = ("dim", "local_dim", "num_slots", "num_iters", "hidden_dim")
        names = ("slots", "update", "attention", "global_feature")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in (*options, *names))

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
            local_features: (B, N, local_dim), such as patches, regions or tokens; cast to the type of the parameters,
                as is every other input.
            global_feature: (B, D), required unless the module was built with ``global_feature=False``.
            padding_mask: (B, N), bool, True for inputs that do not exist. Whatever they hold, NaN too, has no
                influence, and their gradients are 0. An item with nothing else has the set that N = 0 gives.
            positions: (N, local_dim) or (B, N, local_dim), added before the projection to keys alone, see
                :func:`~vl_plugins.modules.sinusoidal_positions_2d`; for features of a convolutional network, which do
                not know where they are.

        Raises:
            ValueError: wrong shape, type or device; a global feature that is missing, or not wanted.
        """
        self._check(local_features, global_feature, padding_mask, positions)
        keys, values = self._keys_and_values(local_features, padding_mask, positions)
        slots = self._initial_slots(len(local_features))
        maps = []
        for _ in range(self.num_iters):
            slots, attention = self._aggregate(slots, keys, values, padding_mask)
            maps.append(attention)
        embeddings = self.norm_output(slots)
        if self.norm_global is not None:
            embeddings = embeddings + self.norm_global(global_feature.to(self._dtype))[:, None]
        return SetPredictionOutput(embeddings, slots, torch.stack(maps, dim=1))

    @property
    def _dtype(self) -> torch.dtype:
        return self.to_keys.weight.dtype

    def _keys_and_values(
        self, local_features: Tensor, padding_mask: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        inputs = self.norm_inputs(_without_padding(local_features.to(self._dtype), padding_mask))
        values = self.to_values(inputs)  # (B, N, D_h)
        if positions is not None:
            inputs = inputs + positions.to(self._dtype)
        # Once more: positions of padded inputs may be NaN, as the inputs before the layer norm.
        keys = self.to_keys(_without_padding(inputs, padding_mask))
        return *full_precision(keys), values

    def _initial_slots(self, batch_size: int) -> Tensor:
        if self.slots == "learned":
            slots = self.initial_slots
        else:
            noise = self.noise
            if self.training:
                noise = torch.randn(batch_size, *noise.shape, dtype=noise.dtype, device=noise.device)
            slots = self.slots_mean + self.slots_log_scale.exp() * noise
        return slots.expand(batch_size, -1, -1)

    def _aggregate(
        self, slots: Tensor, keys: Tensor, values: Tensor, padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the aggregation block once; return the new slots (B, K, D) and the attention (B, N, K)."""
        queries = self.to_queries(self.norm_slots(slots))
        attended, attention = slot_attention(queries, keys, values, padding_mask, over=self.attention)
        update = self.to_slots(attended)
        if self.gru is None:
            slots = update + slots
        else:
            state = self.gru(update.flatten(0, 1), slots.flatten(0, 1))
            # Under autocast, CUDA's is of half precision.
            slots = state.to(slots.dtype).unflatten(0, slots.shape[:2])
        return self.mlp(self.norm_mlp(slots)) + slots, attention

    def _check(
        self,
        local_features: Tensor,
        global_feature: Tensor | None,
        padding_mask: Tensor | None,
        positions: Tensor | None,
    ) -> None:
        if local_features.ndim != 3 or local_features.shape[2] != self.local_dim:
            raise ValueError(
                f"local_features must have the shape (B, N, {self.local_dim}), got {tuple(local_features.shape)}"
            )
        if self.global_feature and global_feature is None:
            raise ValueError("global_feature must be given, got None; or build the module with global_feature=False")
        if not self.global_feature and global_feature is not None:
            raise ValueError(
                "global_feature must be None for a module built with global_feature=False, got a tensor of the shape "
                f"{tuple(global_feature.shape)}"
            )
        batch_size, length, _ = local_features.shape
        for name, tensor, *shapes in (
            ("global_feature", global_feature, (batch_size, self.dim)),
            ("padding_mask", padding_mask, (batch_size, length)),
            ("positions", positions, (length, self.local_dim), (batch_size, length, self.local_dim)),
        ):
            if tensor is None:
                continue
            if tuple(tensor.shape) not in shapes:
                raise ValueError(
                    f"{name} must have the shape {' or '.join(map(str, shapes))}, got {tuple(tensor.shape)}"
                )
            if tensor.device != local_features.device:
                raise ValueError(
                    f"{name} must have the device of local_features, {local_features.device}, got {tensor.device}"
                )
        if padding_mask is not None and padding_mask.dtype != torch.bool:
            raise ValueError(f"padding_mask must have the type torch.bool, got {padding_mask.dtype}")


def slot_attention(
    queries: Tensor, keys: Tensor, values: Tensor, padding_mask: Tensor | None = None, *, over: str = "slots"
) -> tuple[Tensor, Tensor]:
    """Let slots attend to inputs (Eq. 2 and the left of Eq. 3).

    Args:
        queries: (B, K, D_h), of the slots.
        keys: (B, N, D_h), of the inputs.
        values: (B, N, D_v), of the inputs; those of padded inputs must be finite.
        padding_mask: (B, N), bool, True for inputs to leave out.
        over: what the softmax goes over. For ``"slots"`` the result is then divided by its sum over the inputs.

    Returns:
        The mean of the values for each slot (B, K, D_v), in their type, 0 where all inputs are padded; and A
        (B, N, K), float32 at least.

    >>> keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> attended, attention = slot_attention(20 * keys, keys, torch.tensor([[[1.0], [5.0]]]))
    >>> attended.flatten(), attention.round()
    (tensor([1.0000, 5.0000]), tensor([[[1., 0.],
             [0., 1.]]]))
    """
    with torch.autocast(keys.device.type, enabled=False):
        queries, keys = full_precision(queries, keys)
        logits = keys @ queries.transpose(1, 2) / math.sqrt(keys.shape[2])  # (B, N, K)
        # The second softmax, over the inputs, divides by the sum in Eq. 3, which itself may underflow.
        scores = logits.log_softmax(dim=2) if over == "slots" else logits
        if padding_mask is not None:
            # Not minus infinity, of which the softmax over nothing but padding would be NaN.
            scores = scores.masked_fill(padding_mask[:, :, None], torch.finfo(scores.dtype).min)
        weights = _without_padding(scores.softmax(dim=1), padding_mask)
        attention = logits.softmax(dim=2) if over == "slots" else weights
    return weights.transpose(1, 2).to(values.dtype) @ values, attention


def _without_padding(tensor: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return ``tensor`` (B, N, ...) with 0 at padded inputs."""
    return tensor if padding_mask is None else tensor.masked_fill(padding_mask[:, :, None], 0)


def _one_of(name: str, value: object, allowed: tuple) -> object:
    # By type too: 1 is not True.
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")
    return value
