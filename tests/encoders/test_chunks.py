"""Chunks with a recomputed graph against chunks with a graph, and against the whole batch."""

import copy

import pytest
import torch
from torch import nn

from vl_plugins.encoders import encode_in_chunks


class Encoder(nn.Sequential):
    """Returns embeddings, slots as the tower of a set head, and None."""

    def __init__(self, *layers):
        super().__init__(nn.Linear(4, 6), *layers, nn.Tanh(), nn.Linear(6, 3))

    def forward(self, inputs):
        embeddings = super().forward(inputs)
        return embeddings, embeddings[:, None] * 2, None


def gradients(encoder, encode):
    """Return loss, gradients and buffers after a step with all rows in one loss."""
    torch.manual_seed(0)
    embeddings, slots, nothing = encode(encoder, torch.randn(8, 4, dtype=torch.float64))
    assert nothing is None
    loss = (embeddings @ embeddings.T).logsumexp(dim=1).sum() + slots.square().sum()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in encoder.parameters()), *encoder.buffers()]


def with_graph(encoder, inputs):
    embeddings, slots, _ = zip(*(encoder(chunk) for chunk in inputs.split(3)), strict=True)
    return torch.cat(embeddings), torch.cat(slots), None


def in_chunks(encoder, inputs):
    return encode_in_chunks(encoder, inputs, 3)


@pytest.mark.parametrize("layers", [[], [nn.Dropout(0.5)], [nn.BatchNorm1d(6), nn.Dropout(0.5)]], ids=len)
def test_gradients_are_those_of_the_same_chunks_with_a_graph(layers):
    """With the same dropout, and running statistics that are updated once."""
    encoder = Encoder(*copy.deepcopy(layers)).double()
    whole = copy.deepcopy(encoder)
    expected = gradients(copy.deepcopy(encoder), with_graph)
    torch.testing.assert_close(gradients(encoder, in_chunks), expected, rtol=0, atol=1e-13)
    if not layers:
        torch.testing.assert_close(gradients(whole, lambda e, x: encode_in_chunks(e, x, None)), expected)


def test_activations_are_not_kept_for_the_backward_pass():
    def kept(encode):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: sizes.append(saved.numel()), lambda saved: saved):
            encode(Encoder().double(), torch.randn(9, 4, dtype=torch.float64))
        return sum(sizes)

    assert kept(with_graph) > 2 * 36
    assert kept(in_chunks) == 36, "the inputs"


@pytest.mark.parametrize(
    ("inputs", "chunk_size", "message"),
    [
        (torch.ones(4, 4), 0, "chunk_size must be an integer >= 1, got 0"),
        ({"input_ids": torch.ones(4, 4)}, 2, "inputs must be a tensor, got dict: wrap an encoder that takes others"),
    ],
)
def test_what_cannot_be_cut_into_chunks(inputs, chunk_size, message):
    with pytest.raises(ValueError, match=message):
        encode_in_chunks(Encoder(), inputs, chunk_size)
