"""Chunks with a recomputed graph against chunks with a graph, and against the whole batch."""

import copy

import pytest
import torch
from torch import nn

from vl_plugins.encoders import encode_in_chunks

LAYERS = {"dropout": lambda: nn.Dropout(0.5), "norm": lambda: nn.BatchNorm1d(6)}


class Encoder(nn.Module):
    """Returns embeddings and slots, as the tower of a set head, or None."""

    def __init__(self, *layers, slots=True):
        super().__init__()
        self.layers, self.slots = (
            nn.Sequential(nn.Linear(4, 6), *(LAYERS[name]() for name in layers), nn.Tanh(), nn.Linear(6, 3)),
            slots,
        )

    def forward(self, inputs):
        embeddings = self.layers(inputs)
        return embeddings, (embeddings[:, None] * 2 if self.slots else None)


def gradients(encoder, encode):
    """Return loss, gradients and buffers after a step with all rows in one loss."""
    torch.manual_seed(0)
    inputs = torch.randn(8, 4, dtype=torch.float64)
    embeddings, slots = encode(encoder, inputs)
    loss = (embeddings @ embeddings.T).logsumexp(dim=1).sum() + (0 if slots is None else slots.square().sum())
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in encoder.parameters()), *encoder.buffers()]


def with_graph(encoder, inputs):
    chunks = [encoder(chunk) for chunk in inputs.split(3)]
    embeddings, slots = zip(*chunks, strict=True)
    return torch.cat(embeddings), None if slots[0] is None else torch.cat(slots)


@pytest.mark.parametrize("slots", [True, False])
@pytest.mark.parametrize("layers", [[], ["dropout"], ["norm", "dropout"]])
def test_gradients_are_those_of_the_same_chunks_with_a_graph(layers, slots):
    """With the same dropout, and running statistics that are updated once."""
    torch.manual_seed(1)
    encoder = Encoder(*layers, slots=slots).double()
    expected = gradients(copy.deepcopy(encoder), with_graph)
    found = gradients(encoder, lambda *arguments: encode_in_chunks(*arguments, 3))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    torch.manual_seed(1)
    if not layers:
        whole = gradients(Encoder(slots=slots).double(), lambda encoder, inputs: encoder(inputs))
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-13)


def test_activations_are_not_kept_for_the_backward_pass():
    def kept(encode):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: sizes.append(saved.numel()), lambda saved: saved):
            encode(Encoder().double(), torch.randn(9, 4, dtype=torch.float64))
        return sum(sizes)

    inputs = 9 * 4
    assert kept(with_graph) > 2 * inputs
    assert kept(lambda *arguments: encode_in_chunks(*arguments, 3)) == inputs
