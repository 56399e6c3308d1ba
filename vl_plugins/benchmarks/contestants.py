"""What is compared: the losses of this package, those of others, and plain formulations."""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, lp_pool2d, normalize, softplus

from vl_plugins import create_loss, functional
from vl_plugins.benchmarks.names import DEFAULT_BACKEND, PEERS, SETS
from vl_plugins.kernels import pairwise_smooth_chamfer

__all__ = [
    "FORMULAS",
    "Contestant",
    "Formula",
    "Inputs",
    "Setting",
    "Skipped",
    "make_contestants",
    "make_inputs",
    "three_products",
]

# The defaults of the losses of this package, which the others are given too.
SCALE = 50.0
MARGIN = 0.2
ALPHA = 16.0
UNIT_SETS = "smooth-Chamfer of unit vectors"  # what the others compute; ours normalizes
# Where SigLIP starts training.
SIGLIP_SCALE, SIGLIP_BIAS = 10.0, -10.0


@dataclass(frozen=True)
class Setting:
    """One point of a comparison.

    Attributes:
        batch_size: B, pairs.
        dimension: D.
        dtype: of the embeddings, such as ``float32``.
        device: where they are.
        elements: K, vectors in each set; None where items are single vectors.
    """

    batch_size: int
    dimension: int
    dtype: str
    device: torch.device
    elements: int | None = None

    @property
    def rows(self) -> int:
        """Vectors on each side."""
        return self.batch_size * (self.elements or 1)


class Inputs(NamedTuple):
    """What a contestant gets.

    Attributes:
        x: (B, D) or (B, K, D), unit vectors, a leaf.
        y: likewise.
        labels: (B,), all different: a pair is row i and row i.
        upstream: (B, B), gradient of the similarities of sets; None for losses.
    """

    x: Tensor
    y: Tensor
    labels: Tensor
    upstream: Tensor | None

    def fresh(self) -> "Inputs":
        """Return the same leaves without gradients, and new labels, as each step of a training has them."""
        self.x.grad = self.y.grad = None
        return self._replace(labels=self.labels.clone())

    def first(self, number: int) -> "Inputs":
        """Return new leaves with the first items."""
        x, y = (side.detach()[:number].clone().requires_grad_() for side in (self.x, self.y))
        upstream = None if self.upstream is None else self.upstream[:number, :number].clone()
        return Inputs(x, y, self.labels[:number], upstream)


def make_inputs(setting: Setting, seed: int) -> Inputs:
    """Return random unit vectors, the same for the same seed and setting."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, setting.dtype)
    shape = [setting.batch_size, *([] if setting.elements is None else [setting.elements]), setting.dimension]
    x, y = (
        normalize(torch.randn(shape, generator=generator), dim=-1).to(setting.device, dtype).requires_grad_()
        for _ in range(2)
    )
    upstream = None
    if setting.elements is not None:
        upstream = torch.randn([setting.batch_size] * 2, generator=generator).to(setting.device, dtype)
    return Inputs(x, y, torch.arange(setting.batch_size, device=setting.device), upstream)


class Formula(NamedTuple):
    """What contestants compute.

    Attributes:
        value: the plain formula of (x, y); a loss, or the similarities of sets.
        products: how many matrix products of all rows, forward and backward, it needs at least.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    products: int


@dataclass(frozen=True)
class Contestant:
    """One implementation.

    Attributes:
        name: in tables.
        run: the loss, or the similarities, of inputs.
        peak: about how many bytes it takes at a setting, forward and backward; rather too many.
        formula: name of what it computes, in :data:`FORMULAS`; None if it computes no loss.
        factor: how many times the formula.
        peer: under which name ours are compared with it; None for ours.
    """

    name: str
    run: Callable[[Inputs], Tensor]
    peak: Callable[[Setting], float]
    formula: str | None = None
    factor: float = 1.0
    peer: str | None = None

    @property
    def ours(self) -> bool:
        """Whether it is of this package."""
        return self.peer is None


class Skipped(NamedTuple):
    """What was asked for and not measured, and why not."""

    name: str
    reason: str


def make_contestants(
    losses: Sequence[str], backends: Sequence[str], peers: Sequence[str], setting: Setting
) -> tuple[list[Contestant], list[Skipped]]:
    """Return those of the losses and peers that are of the kind of the setting, single vectors or sets.

    Args:
        losses: ``unified``, ``vlc``, ``triplet_hn``, ``goal`` or ``smooth_chamfer_similarity``.
        backends: of the losses of single vectors: names of :data:`vl_plugins.kernels.BACKENDS`, or ``default``.
        peers: names of :data:`~vl_plugins.benchmarks.names.PEERS`.
        setting: for which.
    """
    contestants, skipped = [], []
    for loss in losses:
        if (loss == SETS) != (setting.elements is not None):
            continue
        contestants += [_SETS] if loss == SETS else [_own_loss(loss, backend) for backend in backends]
    for peer in peers:
        if PEERS[peer].of_sets != (setting.elements is not None):
            continue
        reason = _missing(peer, setting)
        if reason is None:
            try:
                contestants.append(_PEERS[peer](setting))
                continue
            except Exception as error:  # whatever goes wrong while another package is imported
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        skipped.append(Skipped(peer, reason))
    return contestants, skipped


def _missing(peer: str, setting: Setting) -> str | None:
    """Say why a peer cannot be measured; None if it can."""
    needs = PEERS[peer]
    if needs.needs_cuda and setting.device.type != "cuda":
        return "needs a CUDA GPU"
    # Looked up, not imported: some cannot be imported without a GPU.
    if needs.module is not None and importlib.util.find_spec(needs.module) is None:
        return f"{needs.module} is not installed; install it with: pip install 'vl_plugins[bench]'"
    if needs.dimensions_of and setting.dimension % needs.dimensions_of:
        return f"needs a dimension that is a multiple of {needs.dimensions_of}, got {setting.dimension}"
    return None


# What the contestants compute, from all similarities.


def _of_all_pairs(loss: Callable[..., Tensor], **options) -> Callable[[Tensor, Tensor], Tensor]:
    def value(x: Tensor, y: Tensor) -> Tensor:
        positives = torch.eye(len(x), dtype=torch.bool, device=x.device)
        return loss(x @ y.T, positives, ~positives, **options)

    return value


def _siglip(x: Tensor, y: Tensor) -> Tensor:
    """Eq. 1 of Zhai et al. 2023, Sigmoid Loss for Language Image Pre-Training."""
    logits = SIGLIP_SCALE * x @ y.T + SIGLIP_BIAS
    return (softplus(logits).sum() - logits.diagonal().sum()) / len(x)


FORMULAS: Mapping[str, Formula] = {
    "unified": Formula(_of_all_pairs(functional.unified_loss, margin=MARGIN, scale=SCALE), 3),
    "vlc": Formula(_of_all_pairs(functional.vlc_loss, scale=SCALE), 3),
    "vlc of rows": Formula(_of_all_pairs(functional.vlc_loss, scale=SCALE, symmetric=False), 3),
    # The gradient by the similarities has one element or two in each row and column: no product.
    "triplet_hn": Formula(_of_all_pairs(functional.triplet_hn_loss, margin=MARGIN), 1),
    "triplet_hn of rows": Formula(_of_all_pairs(functional.triplet_hn_loss, margin=MARGIN, symmetric=False), 1),
    "goal": Formula(_of_all_pairs(functional.goal_loss), 1),
    "siglip": Formula(_siglip, 3),
    SETS: Formula(partial(functional.smooth_chamfer_similarity, alpha=ALPHA), 3),
    UNIT_SETS: Formula(partial(functional.smooth_chamfer_similarity, alpha=ALPHA, normalize=False), 3),
}


# About how much memory they take: so many matrices of all pairs, vectors and gradients, and tiles.


def _matrices(number: float) -> Callable[[Setting], float]:
    def peak(setting: Setting) -> float:
        tiles = 2**24 if setting.device.type == "cpu" else 2**30
        return 4 * (number * setting.rows**2 + 8 * setting.rows * setting.dimension) + tiles

    return peak


def _triples(number: float) -> Callable[[Setting], float]:
    return lambda setting: 4 * number * setting.rows**3 + _matrices(10)(setting)


def _chunks_of_rows(number: int) -> Callable[[Setting], float]:
    return lambda setting: 8 * min(number, setting.rows) * setting.rows + _matrices(0)(setting)


# Ours.


def _own_matrices(name: str, backend: str) -> float:
    # What looks for hardest negatives keeps no similarities.
    return 1.2 if backend in ("dense", DEFAULT_BACKEND) and FORMULAS[name].products == 3 else 0


def _own_loss(name: str, backend: str) -> Contestant:
    loss = create_loss(name, backend=None if backend == DEFAULT_BACKEND else backend)

    def run(inputs: Inputs) -> Tensor:
        return loss(inputs.x, inputs.labels, ref_emb=inputs.y, ref_labels=inputs.labels)

    label = name if backend == DEFAULT_BACKEND else f"{name} ({backend})"
    return Contestant(label, run, _matrices(_own_matrices(name, backend)), name)


_SETS = Contestant(SETS, lambda inputs: pairwise_smooth_chamfer(inputs.x, inputs.y, ALPHA), _matrices(1), SETS)


# Those of others. Each function returns a contestant for a setting.


def three_products(setting: Setting) -> Contestant:
    """The products that a contrastive loss cannot do without: similarities, and the gradients of both sides."""

    def run(inputs: Inputs) -> Tensor:
        with torch.no_grad():
            x, y = (side.flatten(0, -2) for side in inputs[:2])
            similarities = x @ y.T
            return similarities @ y, similarities.T @ x

    return Contestant("three-products", run, _matrices(1), peer="three-products")


def _clip(setting: Setting, compiled: bool = False) -> Contestant:
    from open_clip.loss import ClipLoss

    loss = _compiled(ClipLoss()) if compiled else ClipLoss()
    name = "clip-compiled" if compiled else "clip"
    return Contestant(name, lambda inputs: loss(inputs.x, inputs.y, SCALE), _matrices(6), "vlc", 0.5, name)


def _siglip_loss(setting: Setting, compiled: bool = False) -> Contestant:
    from open_clip.loss import SigLipLoss

    loss = _compiled(SigLipLoss()) if compiled else SigLipLoss()
    name = "siglip-compiled" if compiled else "siglip"

    def run(inputs: Inputs) -> Tensor:
        return loss(inputs.x, inputs.y, SIGLIP_SCALE, SIGLIP_BIAS)

    return Contestant(name, run, _matrices(6), "siglip", peer=name)


def _compiled(loss: torch.nn.Module) -> Callable[..., Tensor]:
    # For each shape anew: as fast as it gets.
    return torch.compile(loss, dynamic=False)


def _ntxent(setting: Setting) -> Contestant:
    from pytorch_metric_learning.losses import NTXentLoss

    loss = NTXentLoss(temperature=1 / SCALE)

    def run(inputs: Inputs) -> Tensor:
        # With labels and ref_labels the same object the library would leave out the pairs (i, i), all positives.
        return loss(inputs.x, inputs.labels, ref_emb=inputs.y, ref_labels=inputs.labels.clone())

    return Contestant("ntxent", run, _triples(5), "vlc of rows", peer="ntxent")


def _triplet_margin(setting: Setting) -> Contestant:
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.miners import BatchHardMiner
    from pytorch_metric_learning.reducers import MeanReducer

    loss = TripletMarginLoss(margin=MARGIN, distance=CosineSimilarity(), reducer=MeanReducer())
    miner = BatchHardMiner(distance=CosineSimilarity())

    def run(inputs: Inputs) -> Tensor:
        ref_labels = inputs.labels.clone()  # see _ntxent
        triplets = miner(inputs.x, inputs.labels, inputs.y, ref_labels)
        return loss(inputs.x, inputs.labels, triplets, inputs.y, ref_labels)

    return Contestant("triplet-margin", run, _matrices(9), "triplet_hn of rows", peer="triplet-margin")


def _memeff(setting: Setting) -> Contestant:
    from memeff import MemoryEfficientCLIPLoss

    # Its default is another gradient than that of the loss.
    loss = MemoryEfficientCLIPLoss(temperature=1 / SCALE, normalized_inputs=True, stable=False)
    return Contestant("memeff", lambda inputs: loss(inputs.x, inputs.y), _matrices(0), "vlc", 0.5, "memeff")


def _inf_cl(setting: Setting) -> Contestant:
    from inf_cl import cal_flash_loss

    width = max(width for width in (256, 128, 64, 32, 16) if setting.dimension % width == 0)

    def run(inputs: Inputs) -> Tensor:
        sides = ((inputs.x, inputs.y), (inputs.y, inputs.x))
        return sum(cal_flash_loss(*both, scale=SCALE, head_dim=width).mean() for both in sides) / 2

    return Contestant("inf-cl", run, _matrices(0), "vlc", 0.5, "inf-cl")


def _siglip_kernel(setting: Setting) -> Contestant:
    from siglip_kernel import fused_siglip_loss

    logarithm, bias = (torch.tensor(value, device=setting.device) for value in (math.log(SIGLIP_SCALE), SIGLIP_BIAS))

    def run(inputs: Inputs) -> Tensor:
        return fused_siglip_loss(inputs.x, inputs.y, logarithm, bias)

    # It computes some thousand rows of the similarities at a time.
    return Contestant("siglip-kernel", run, _chunks_of_rows(4096), "siglip", peer="siglip-kernel")


# Smooth-Chamfer similarity of unit vectors as torch code usually computes it: exponentials, and pooling over sets.


def _exponentials(inputs: Inputs) -> Tensor:
    """Return (1, B K, B K)."""
    return torch.exp(ALPHA * (inputs.x.flatten(0, 1) @ inputs.y.flatten(0, 1).T))[None]


def _pool_by_norm(inputs: Inputs) -> Tensor:
    """With ``torch.nn.LPPool2d(1, ...)`` and ``torch.nn.AvgPool2d``, as the authors of DivE do."""
    exponentials, size = _exponentials(inputs), inputs.x.shape[1]
    of_x = avg_pool2d(lp_pool2d(exponentials, 1, (1, size)).log(), (size, 1))
    of_y = avg_pool2d(lp_pool2d(exponentials, 1, (size, 1)).log(), (1, size))
    return (of_x + of_y)[0] / (2 * ALPHA)


def _pool_by_mean(inputs: Inputs) -> Tensor:
    exponentials, size = _exponentials(inputs), inputs.x.shape[1]
    of_x = avg_pool2d((avg_pool2d(exponentials, (1, size)) * size).log(), (size, 1))
    of_y = avg_pool2d((avg_pool2d(exponentials, (size, 1)) * size).log(), (1, size))
    return (of_x + of_y)[0] / (2 * ALPHA)


def _reshape_and_sum(inputs: Inputs) -> Tensor:
    sets, size, _ = inputs.x.shape
    exponentials = _exponentials(inputs).view(sets, size, sets, size)
    return (exponentials.sum(3).log().mean(1) + exponentials.sum(1).log().mean(2)) / (2 * ALPHA)


def _plain_sets(name: str, similarity: Callable[[Inputs], Tensor], setting: Setting) -> Contestant:
    return Contestant(name, similarity, _matrices(9), UNIT_SETS, peer=name)


_PEERS: Mapping[str, Callable[[Setting], Contestant]] = {
    "three-products": three_products,
    "clip": _clip,
    "clip-compiled": partial(_clip, compiled=True),
    "siglip": _siglip_loss,
    "siglip-compiled": partial(_siglip_loss, compiled=True),
    "ntxent": _ntxent,
    "triplet-margin": _triplet_margin,
    "memeff": _memeff,
    "inf-cl": _inf_cl,
    "siglip-kernel": _siglip_kernel,
    "lp-pooling": partial(_plain_sets, "lp-pooling", _pool_by_norm),
    "average-pooling": partial(_plain_sets, "average-pooling", _pool_by_mean),
    "reshape-and-sum": partial(_plain_sets, "reshape-and-sum", _reshape_and_sum),
}
