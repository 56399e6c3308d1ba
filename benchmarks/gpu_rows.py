"""The losses that ``make gpu`` measures, each a row of its tables.

- Those of open_clip, eager, and compiled with a graph for each shape, which is as fast as it gets.
- Those of siglip-kernel and inf-cl, which run on GPUs only, where they are installed.
- Ours, by place and by labels, eager. Those with a soft maximum also with the element-wise part of their blocks of
  similarities compiled.
"""

import importlib
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.losses import PEERS, SCALE, SIGLIP_BIAS, SIGLIP_SCALE, Loss, metric_loss, place_loss, step
from vl_plugins import create_loss, engine

BASELINE = "open_clip's `ClipLoss`"
COMPILED_BASELINE = f"{BASELINE}, compiled"
LOSSES_OF_VECTORS = ("unified", "vlc", "siglip", "triplet_hn", "triplet_sh", "goal")
WITH_COMPILED_BLOCKS = ("unified", "vlc")  # those with a soft maximum
SET_SIZE = 4


class Row(NamedTuple):
    """A loss in the tables.

    Attributes:
        label: first cell of the row, in Markdown.
        loss: called with images, texts and labels.
        set_size: number of vectors of an image or text; 0 for a loss of single vectors.
        is_compiled: whether ``torch.compile`` compiles the loss, or the blocks of one of ours.
    """

    label: str
    loss: Loss
    set_size: int = 0
    is_compiled: bool = False

    def run(self, images: Tensor, texts: Tensor, labels: Tensor) -> None:
        """Run the forward and the backward pass under autocast. Ours compile every block on a GPU, or none."""
        defaults = engine.COMPILE_FROM, engine.COMPILE_AFTER
        engine.COMPILE_FROM = 0 if self.is_compiled else sys.maxsize
        engine.COMPILE_AFTER = 0
        try:
            step(self.loss, images, texts, labels, autocast=True)
        finally:
            engine.COMPILE_FROM, engine.COMPILE_AFTER = defaults


class Peer(NamedTuple):
    """A package that runs on GPUs only, and need not be installed.

    Attributes:
        package: its name in the Python Package Index.
        module: its name in Python.
        function: the function that is measured.
        loss: given the module and the name of torch's device, returns the loss.
    """

    package: str
    module: str
    function: str
    loss: Callable[[ModuleType, str], Loss]


def open_clip_rows(compiler: str) -> list[Row]:
    """Return open_clip's losses, eager and compiled by a backend of ``torch.compile``."""
    rows = []
    for label, name in ((BASELINE, "clip"), ("open_clip's `SigLipLoss`", "siglip")):
        loss = PEERS[name]()
        compiled = torch.compile(loss, backend=compiler, fullgraph=True, dynamic=False)
        rows.append(Row(label, loss))
        rows.append(Row(f"{label}, compiled", compiled, is_compiled=True))
    return rows


def siglip_kernel_loss(siglip_kernel: ModuleType, device: str) -> Loss:
    """Return the sigmoid loss of siglip-kernel, which takes the logarithm of the scale."""
    log_scale = torch.tensor(math.log(SIGLIP_SCALE), device=device)
    bias = torch.tensor(SIGLIP_BIAS, device=device)

    def run(images: Tensor, texts: Tensor, labels: Tensor) -> Tensor:
        return siglip_kernel.fused_siglip_loss(images, texts, log_scale, bias)

    return run


def inf_cl_loss(inf_cl: ModuleType, device: str) -> Loss:
    """Return the contrastive loss of inf-cl in both directions. It computes one direction a call."""
    scale = torch.tensor(SCALE, device=device)  # with a gradient it would need a process group

    def run(images: Tensor, texts: Tensor, labels: Tensor) -> Tensor:
        to_texts = inf_cl.cal_inf_loss(images, texts, scale=scale)
        to_images = inf_cl.cal_inf_loss(texts, images, scale=scale)
        return (to_texts + to_images) / 2

    return run


PEERS_ON_GPUS = (
    Peer("siglip-kernel", "siglip_kernel", "fused_siglip_loss", siglip_kernel_loss),
    Peer("inf-cl", "inf_cl", "cal_inf_loss", inf_cl_loss),
)


def peer_rows(device: str) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of the packages that can be imported, and why others cannot, by package."""
    rows = []
    reasons = {}
    for peer in PEERS_ON_GPUS:
        if torch.device(device).type != "cuda":
            reasons[peer.package] = "runs on GPUs only"
            continue
        try:
            module = importlib.import_module(peer.module)
        except ModuleNotFoundError as error:
            reasons[peer.package] = f"{error.name} is not installed"
        except Exception as error:  # of its code for this GPU or this version of Triton
            reasons[peer.package] = f"{type(error).__name__} when it is imported"
        else:
            rows.append(Row(f"{peer.package}'s `{peer.function}`", peer.loss(module, device)))
    return rows, reasons


def rows_of_loss(name: str, **options: str) -> list[Row]:
    """Return the rows of one of our losses of vectors, with options that the labels show."""
    loss = create_loss(name, **options)
    label = f"`{name}`"
    for option, value in options.items():
        label += f", {option} {value}"
    rows = [Row(f"{label}, by place", place_loss(loss))]
    if name in WITH_COMPILED_BLOCKS:
        rows.append(Row(f"{label}, by place, compiled", place_loss(loss), is_compiled=True))
    rows.append(Row(f"{label}, by labels", metric_loss(loss)))
    return rows


def own_rows() -> list[Row]:
    """Return the rows of our losses."""
    rows = []
    for name in LOSSES_OF_VECTORS:
        rows += rows_of_loss(name)
        if name == "unified":
            rows += rows_of_loss(name, products="float32")
    of_sets = create_loss("smooth_chamfer")
    label = f"`smooth_chamfer`, sets of {SET_SIZE}"
    rows.append(Row(f"{label}, by place", place_loss(of_sets), SET_SIZE))
    rows.append(Row(f"{label}, by labels", metric_loss(of_sets), SET_SIZE))
    return rows
