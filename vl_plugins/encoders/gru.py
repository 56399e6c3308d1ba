"""Words through a gated recurrent unit."""

from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vl_plugins.encoders.regions import drop_positions
from vl_plugins.errors import one_of
from vl_plugins.modules import TowerFeatures

__all__ = ["GRUTrunk"]


class GRUTrunk(nn.Module):
    """Word vectors and a GRU over them, as in VSE++.

    The trunk's own embedding is the state after the last word; of a bidirectional GRU, the mean of both last states.

    Args:
        vocabulary_size: number of word ids; 0 is padding.
        word_dim: width of the word vectors.
        hidden_dim: H, width of the states.
        bidirectional: whether a second GRU reads the words backwards. States are the mean of both.
        num_layers: of the GRU.
        word_vectors: (vocabulary_size, word_dim), such as those of GloVe, to start with; trained like random ones.
        word_dropout: rate of the words that training drops, [0, 1), as if they were not in the caption; at least one
            stays.
        local: the local features: ``"states"``, or ``"words"``, the word vectors, as in DivE.

    Raises:
        ValueError: an unknown ``local``.

    Reference:
        Faghri et al. 2018, VSE++: Improving Visual-Semantic Embeddings with Hard Negatives, Section 3.1.
        Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings, Section 3.1.

    >>> import torch
    >>> features = GRUTrunk(100, word_dim=8, hidden_dim=16)(torch.tensor([[5, 7, 9], [6, 0, 0]]))
    >>> features.local.shape, features.pooled.shape
    (torch.Size([2, 3, 16]), torch.Size([2, 16]))
    """

    def __init__(
        self,
        vocabulary_size: int,
        word_dim: int = 300,
        hidden_dim: int = 1024,
        bidirectional: bool = False,
        num_layers: int = 1,
        word_vectors: Tensor | None = None,
        word_dropout: float = 0.0,
        local: str = "states",
    ):
        super().__init__()
        self.local = one_of("local", local, ("states", "words"))
        self.word_dropout = word_dropout
        self.pooled_width, self.local_width = hidden_dim, hidden_dim if local == "states" else word_dim
        self.words = nn.Embedding(vocabulary_size, word_dim)
        if word_vectors is None:
            nn.init.uniform_(self.words.weight, -0.1, 0.1)
        else:
            self.words.weight.data.copy_(word_vectors)
        self.gru = nn.GRU(word_dim, hidden_dim, num_layers, batch_first=True, bidirectional=bidirectional)

    def forward(self, captions: Tensor) -> TowerFeatures:
        """Return the features of captions.

        Args:
            captions: (B, L), int64 word ids, at least one in each. Zeros are padding at any position: words move to the
                front.
        """
        padding_mask = captions == 0
        if self.training and self.word_dropout:
            padding_mask = drop_positions(padding_mask, self.word_dropout)
        padding_mask, order = padding_mask.int().sort(dim=1, stable=True)
        padding_mask = padding_mask.bool()
        words = self.words(captions.gather(1, order))  # (B, L, word_dim)
        lengths = (~padding_mask).sum(dim=1).cpu()
        states, last = self.gru(pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False))
        directions = 1 + self.gru.bidirectional
        local = words
        if self.local == "states":
            states, _ = pad_packed_sequence(states, batch_first=True, total_length=captions.shape[1])
            local = states.unflatten(2, (directions, -1)).mean(dim=2)
        return TowerFeatures(local, last[-directions:].mean(dim=0), padding_mask, None, has_positions=True)
