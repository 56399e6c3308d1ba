"""A gradient cache: large batches with the activations of a chunk."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vl_plugins.errors import number

__all__ = ["encode_in_chunks"]


def encode_in_chunks(encoder: nn.Module, inputs: Tensor, chunk_size: int | None) -> Any:
    """Return ``encoder(inputs)``, and keep activations of one chunk at a time.

    Chunks are encoded without a graph. The backward pass encodes each one again, with the same random numbers and
    autocast, and needs the gradients of all embeddings, so a loss of the whole batch can follow. Gradients are those of
    the same chunks with a graph; without batch norm and dropout, those of ``encoder(inputs)``. This takes about a third
    more time. It works in ``DistributedDataParallel``, where the encoder is part of the wrapped module.

    Batch norm takes the statistics of each chunk, and updates its running statistics once.

    Args:
        encoder: returns a tensor, None, or a tuple of those, with one row for each input.
        inputs: (B, ...).
        chunk_size: number of inputs in a chunk; None for one chunk, with its graph.

    Reference:
        Gao et al. 2021, Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup.

    >>> encoder = nn.Linear(3, 2)
    >>> encode_in_chunks(encoder, torch.rand(5, 3), chunk_size=2).shape
    torch.Size([5, 2])
    """

    if chunk_size is None:
        return encoder(inputs)
    if not isinstance(inputs, Tensor):
        raise ValueError(f"inputs must be a tensor, got {type(inputs).__name__}: wrap an encoder that takes others")
    chunk_size = number("chunk_size", chunk_size, least=1, kind=int)

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return nullcontext(), _fixed_statistics(encoder)

    chunks = inputs.split(chunk_size)
    return _join([checkpoint(encoder, chunk, use_reentrant=False, context_fn=contexts) for chunk in chunks])


def _join(chunks: list[Any]) -> Any:
    if isinstance(chunks[0], tuple):
        return tuple(_join(list(parts)) for parts in zip(*chunks, strict=True))
    return None if chunks[0] is None else torch.cat(chunks)


@contextmanager
def _fixed_statistics(encoder: nn.Module) -> Iterator[None]:
    """Leave running statistics of batch norm alone, which still normalizes by those of the chunk."""
    norms: list[Any] = [norm for norm in encoder.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm)]
    saved = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, count in saved:
        norm.momentum = 0.0
        norm.num_batches_tracked = None if count is None else count.clone()
    try:
        yield
    finally:
        for norm, momentum, count in saved:
            norm.momentum, norm.num_batches_tracked = momentum, count
