"""Smooth-Chamfer similarities of all pairs of sets in little time and memory."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vl_plugins.functional import smooth_chamfer_similarity
from vl_plugins.functional.sets import check_sets, element_weights
from vl_plugins.kernels.comparison import choose_backend, differentiable_gradients, inverse_norms, row_blocks
from vl_plugins.utils.checks import positive
from vl_plugins.utils.eager import eager

__all__ = ["pairwise_smooth_chamfer"]

LARGEST_EXPONENT = 40.0  # sums of exp(+-40) and their inverses are far from the limits of float32


def pairwise_smooth_chamfer(
    embeddings: Tensor,
    ref_emb: Tensor,
    alpha: float = 16.0,
    *,
    mask: Tensor | None = None,
    ref_mask: Tensor | None = None,
    normalize: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Smooth-Chamfer similarity of all pairs of sets, as :func:`vl_plugins.functional.smooth_chamfer_similarity`.

    Args:
        embeddings, ref_emb, alpha, mask, ref_mask, normalize: see that function.
        backend: ``"dense"`` keeps one exponential for each pair of elements, which becomes its own gradient;
            ``"tiled"`` computes them again, block by block. If left out, dense up to 1 GiB of exponentials and tiled
            beyond. Both are fast for cosines and alpha <= 40; otherwise both evaluate the formula block by block.

    Returns:
        (A, C), float32 or float64, as that function.

    Raises:
        ValueError: wrong shape, type or device, alpha out of its range, or an unknown backend.

    Reference:
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Eq. 6-8.

    >>> images, texts = torch.eye(2).expand(3, 2, 2), torch.ones(5, 1, 2)
    >>> pairwise_smooth_chamfer(images, texts).shape
    torch.Size([3, 5])
    """
    alpha = positive("alpha", alpha)
    check_sets(embeddings, ref_emb, mask, ref_mask)
    elements = embeddings.flatten(0, 1), ref_emb.flatten(0, 1)
    backend = choose_backend(backend, *elements, name="smooth-Chamfer similarity")
    dtype = torch.promote_types(torch.promote_types(embeddings.dtype, ref_emb.dtype), torch.float32)
    embeddings, ref_emb = embeddings.to(dtype), ref_emb.to(dtype)
    if mask is not None:
        embeddings = embeddings.masked_fill(~mask[..., None], 0)
    if ref_mask is not None:
        ref_emb = ref_emb.masked_fill(~ref_mask[..., None], 0)
    options: dict[str, Any] = {"mask": mask, "ref_mask": ref_mask, "alpha": alpha, "normalize": normalize}
    if 0 in (*embeddings.shape, *ref_emb.shape):
        return smooth_chamfer_similarity(embeddings, ref_emb, **options)
    if alpha > LARGEST_EXPONENT or not normalize:
        return eager()(_formula_in_blocks, embeddings, ref_emb, **options)
    if not torch.is_grad_enabled():
        embeddings, ref_emb = embeddings.detach(), ref_emb.detach()
    return eager()(_PairwiseSmoothChamfer.apply, embeddings, ref_emb, mask, ref_mask, alpha, backend)


def _formula_in_blocks(
    embeddings: Tensor, ref_emb: Tensor, mask: Tensor | None, ref_mask: Tensor | None, alpha: float, normalize: bool
) -> Tensor:
    """Return the similarities by the formula; what it keeps for its gradients is computed again."""
    formula = partial(smooth_chamfer_similarity, ref_mask=ref_mask, alpha=alpha, normalize=normalize)
    similarities = []
    for rows in _blocks_of_sets(embeddings, ref_emb):
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        part = None if mask is None else mask[rows]
        similarities.append(checkpoint(formula, embeddings[rows], ref_emb, mask=part, **options))
    return torch.cat(similarities)


def _blocks_of_sets(embeddings: Tensor, ref_emb: Tensor) -> list[slice]:
    return row_blocks(len(embeddings), embeddings.shape[1] * ref_emb.shape[:2].numel(), embeddings.device)


class _PairwiseSmoothChamfer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        ref_emb: Tensor,
        mask: Tensor | None,
        ref_mask: Tensor | None,
        alpha: float,
        backend: str,
    ) -> Tensor:
        ctx.alpha = alpha
        keep = backend == "dense" and any(ctx.needs_input_grad)
        similarities, derivatives = _Exponentials(embeddings, ref_emb, mask, ref_mask, alpha).similarities(keep)
        ctx.save_for_backward(embeddings, ref_emb, mask, ref_mask, derivatives)
        return similarities

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        embeddings, ref_emb, mask, ref_mask, derivatives = ctx.saved_tensors
        sets, needed = (embeddings, ref_emb, mask, ref_mask), ctx.needs_input_grad[:2]
        with torch.autocast(upstream.device.type, enabled=False):
            if torch.is_grad_enabled():  # create_graph=True
                options = {"mask": mask, "ref_mask": ref_mask, "alpha": ctx.alpha}
                gradients = differentiable_gradients(
                    lambda *leaves: (smooth_chamfer_similarity(*leaves, **options),), sets[:2], (upstream,)
                )
            else:
                gradients = _Exponentials(*sets, ctx.alpha).gradients(upstream, derivatives, needed)
        return *gradients, None, None, None, None


class _Exponentials:
    """Exponentials of the cosines of all pairs of elements, some sets at a time.

    Both directions share them. They are laid out as (a, K1, K2, C), because sums over a short last dimension are slow.
    """

    def __init__(self, embeddings: Tensor, ref_emb: Tensor, mask: Tensor | None, ref_mask: Tensor | None, alpha: float):
        self.embeddings, self.alpha = embeddings, alpha
        self.mask, self.ref_mask = mask, None if ref_mask is None else ref_mask.T
        self.factors, self.ref_factors = inverse_norms(embeddings), inverse_norms(ref_emb).T
        self.ref_units = ref_emb.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # (K2, C, D)
        self.ref_units.mul_(self.ref_factors[..., None])
        self.weights = element_weights(embeddings, mask)
        self.ref_weights = element_weights(ref_emb, ref_mask).T
        self.shape = (*embeddings.shape[:2], *self.ref_units.shape[:2])
        self.blocks = _blocks_of_sets(embeddings, ref_emb)

    def similarities(self, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Return the similarities (A, C) and, to ``keep``, their derivatives by the cosines."""
        similarities = self.embeddings.new_empty(self.shape[0], self.shape[3])
        derivatives = self.embeddings.new_empty(self.shape) if keep else None
        for rows, workspace in self._blocks():
            block = workspace if derivatives is None else derivatives[rows]
            similarities[rows] = self._pool(rows, block, derive=keep)
        return similarities, derivatives

    def gradients(self, upstream: Tensor, derivatives: Tensor | None, needed: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients by both sides; the derivatives are computed again where there are none."""
        # Contiguous, whatever the layout of the embeddings: collectives read them as such.
        (a, k1, k2, c), width = self.shape, self.embeddings.shape[2]
        gradient = self.embeddings.new_empty(a, k1, width) if needed[0] else None
        ref_gradient = self.embeddings.new_zeros(c, k2, width) if needed[1] else None
        for rows, block in self._blocks():
            if derivatives is None:
                self._pool(rows, block, derive=True)
            torch.mul(block if derivatives is None else derivatives[rows], upstream[rows, None, None], out=block)
            units = self.embeddings[rows] * self.factors[rows, :, None]
            if gradient is not None:
                products = block.flatten(2).flatten(0, 1)
                torch.mm(products, self.ref_units.flatten(0, 1), out=gradient[rows].flatten(0, 1))
                _normalization_gradient(gradient[rows], units, self.factors[rows])
            if ref_gradient is not None:
                for k in range(k2):
                    ref_gradient[:, k].addmm_(block[:, :, k].flatten(0, 1).T, units.flatten(0, 1))
        if ref_gradient is not None:
            for k in range(k2):
                _normalization_gradient(ref_gradient[:, k], self.ref_units[k], self.ref_factors[k])
        return [gradient, ref_gradient]

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield which sets come next, and memory (a, K1, K2, C) for them."""
        memory = self.embeddings.new_empty(self.blocks[0].stop, *self.shape[1:])
        for rows in self.blocks:
            yield rows, memory[: rows.stop - rows.start]

    def _pool(self, rows: slice, block: Tensor, derive: bool) -> Tensor:
        """Return the similarities (a, C); the block holds the exponentials, or to ``derive`` the derivatives."""
        units = self.embeddings[rows] * self.factors[rows, :, None]
        logits = block.flatten(2).flatten(0, 1)
        torch.addmm(logits, units.flatten(0, 1), self.ref_units.flatten(0, 1).T, beta=0, alpha=self.alpha, out=logits)
        block.exp_()
        if self.mask is not None:
            block.masked_fill_(~self.mask[rows, :, None, None], 0)
        if self.ref_mask is not None:
            block.masked_fill_(~self.ref_mask, 0)
        sums, ref_sums = block.sum(2), block.sum(1)  # (a, K1, C), (a, K2, C)
        if self.mask is not None or self.ref_mask is not None:
            for total in (sums, ref_sums):
                total.masked_fill_(total == 0, 1)  # of no elements
        weights, ref_weights = self.weights[rows, :, None] / 2, self.ref_weights / 2
        similarities = (sums.log() * weights).sum(1).add_((ref_sums.log() * ref_weights).sum(1)).div_(self.alpha)
        if derive:
            sums, ref_sums = sums.reciprocal_().mul_(weights), ref_sums.reciprocal_().mul_(ref_weights)
            block.mul_(sums[:, :, None] + ref_sums[:, None])
        return similarities


def _normalization_gradient(gradient: Tensor, units: Tensor, factors: Tensor) -> None:
    """Turn the gradient by unit vectors, in place, into that by the vectors."""
    gradient.addcmul_(units, torch.einsum("...d,...d->...", gradient, units)[..., None], value=-1).mul_(
        factors[..., None]
    )
