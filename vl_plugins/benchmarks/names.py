"""Names of what can be compared, without torch, for the command line."""

from types import MappingProxyType
from typing import NamedTuple

__all__ = ["BACKENDS", "DEFAULT_BACKEND", "LOSSES", "PEERS", "SETS", "Peer"]

DEFAULT_BACKEND = "default"
BACKENDS = (DEFAULT_BACKEND, "dense", "tiled", "triton")

SETS = "smooth_chamfer_similarity"
LOSSES = ("unified", "vlc", "triplet_hn", "goal", SETS)


class Peer(NamedTuple):
    """What ours are compared with.

    Attributes:
        summary: what it is, for ``--help``.
        of_sets: it compares sets; otherwise single vectors.
        module: what has to be installed.
        needs_cuda: it runs on CUDA GPUs only.
        dimensions_of: D has to be a multiple of it; 0 for any.
    """

    summary: str
    of_sets: bool = False
    module: str | None = None
    needs_cuda: bool = False
    dimensions_of: int = 0


PEERS = MappingProxyType(
    {
        "three-products": Peer("the matrix products that a contrastive loss needs at least, and nothing else"),
        "clip": Peer("ClipLoss of open_clip", module="open_clip"),
        "clip-compiled": Peer("ClipLoss under torch.compile", module="open_clip"),
        "siglip": Peer("SigLipLoss of open_clip", module="open_clip"),
        "siglip-compiled": Peer("SigLipLoss under torch.compile", module="open_clip"),
        "ntxent": Peer("NTXentLoss of pytorch-metric-learning; one direction; memory grows with B cubed"),
        "triplet-margin": Peer("TripletMarginLoss and BatchHardMiner of pytorch-metric-learning; one direction"),
        "memeff": Peer("CLIP loss of memeff (CUDA)", module="memeff", needs_cuda=True),
        "inf-cl": Peer("Inf-CL of inf_cl (CUDA)", module="inf_cl", needs_cuda=True, dimensions_of=16),
        "siglip-kernel": Peer("SigLIP loss of siglip-kernel (CUDA)", module="siglip_kernel", needs_cuda=True),
        "lp-pooling": Peer("sets: exponentials and LPPool2d, as the authors of DivE do", of_sets=True),
        "average-pooling": Peer("sets: exponentials and AvgPool2d", of_sets=True),
        "reshape-and-sum": Peer("sets: exponentials, reshaped and summed", of_sets=True),
    }
)
