import pytest
import torch
from torch import nn

from tests.encoders.trunks import assert_keeps_the_promises_of_trunks
from vl_plugins.encoders import GRUTrunk

VOCABULARY, WORD_DIM, HIDDEN_DIM = 20, 5, 4
CAPTIONS = torch.tensor([[3, 7, 19, 3, 0, 0], [1, 0, 0, 0, 0, 0], [4, 5, 6, 7, 8, 9]])
VARIANTS = {"default": {}, "two layers and directions": {"num_layers": 2, "bidirectional": True}}


def make(variant="default", dtype=torch.float64, **options):
    torch.manual_seed(0)
    options = {**VARIANTS[variant], **options}
    return GRUTrunk(VOCABULARY, word_dim=WORD_DIM, hidden_dim=HIDDEN_DIM, **options).to(dtype).eval()


def run_direction(trunk, suffix, inputs):
    cell = nn.GRUCell(inputs.shape[1], HIDDEN_DIM, dtype=inputs.dtype)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(cell, name).data = getattr(trunk.gru, f"{name}_{suffix}").data
    state, states = inputs.new_zeros(1, HIDDEN_DIM), []
    for row in inputs:
        state = cell(row[None], state)
        states.append(state[0])
    return torch.stack(states)


def states_by_loops(trunk, words):
    """States (n, H) and last state (H,) of the n words of a caption, of the cells of each layer and direction."""
    inputs = trunk.words.weight[words]
    for layer in range(trunk.gru.num_layers):
        directions = [run_direction(trunk, f"l{layer}", inputs)]
        if trunk.gru.bidirectional:
            directions.append(run_direction(trunk, f"l{layer}_reverse", inputs.flip(0)).flip(0))
        inputs = torch.cat(directions, dim=1)
    last = [directions[0][-1], *[backwards[0] for backwards in directions[1:]]]
    return sum(directions) / len(directions), sum(last) / len(last)


@pytest.mark.parametrize("local", ["states", "words"])
def test_promises(local):
    trunk = make("two layers and directions", torch.float32, local=local, word_dropout=0.3)
    assert_keeps_the_promises_of_trunks(trunk, CAPTIONS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_are_those_of_cells(variant):
    trunk = make(variant)
    features = trunk(CAPTIONS)
    assert torch.equal(features.padding_mask, CAPTIONS == 0)
    for item, caption in enumerate(CAPTIONS):
        words = caption[caption != 0]
        states, last = states_by_loops(trunk, words)
        torch.testing.assert_close(features.local[item, : len(words)], states)
        torch.testing.assert_close(features.pooled[item], last)
    scattered = trunk(torch.tensor([[0, 3, 0, 7, 19, 0, 3]]))
    torch.testing.assert_close(scattered.pooled[0], features.pooled[0])
    assert scattered.padding_mask.tolist() == [[False] * 4 + [True] * 3]
    words = make(variant, local="words")(CAPTIONS)
    torch.testing.assert_close(words.local[CAPTIONS != 0], trunk.words(CAPTIONS[CAPTIONS != 0]))
    torch.testing.assert_close(words.pooled, features.pooled)


def test_words_are_left_out_in_training_as_if_they_were_not_there():
    trunk, caption = make(word_dropout=0.5).train(), CAPTIONS[2]
    for _ in range(9):
        features = trunk(caption[None])
        length = int((~features.padding_mask).sum())
        assert 1 <= length <= 6
        # Which ones, by the last state.
        subset = next(
            rest
            for rest in torch.combinations(caption, length)
            if torch.allclose(states_by_loops(trunk, rest)[1], features.pooled[0])
        )
        torch.testing.assert_close(features.local[0, :length], states_by_loops(trunk, subset)[0])
    torch.testing.assert_close(trunk.eval()(caption[None]).pooled[0], states_by_loops(trunk, caption)[1])


def test_word_vectors():
    vectors = torch.randn(VOCABULARY, WORD_DIM)
    trunk = GRUTrunk(VOCABULARY, word_dim=WORD_DIM, hidden_dim=HIDDEN_DIM, word_vectors=vectors)
    assert torch.equal(trunk.words.weight, vectors)
    assert 0.08 < make().words.weight.abs().max() <= 0.1
    with pytest.raises(ValueError, match="unknown local 'state'"):
        GRUTrunk(VOCABULARY, local="state")
